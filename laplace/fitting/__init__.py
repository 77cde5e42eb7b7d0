"""From data to one frozen `Fit`."""

from laplace.fitting.checks import (
    check_decay,
    check_override,
    check_weight,
    require_rereadable,
    warn_of_diagonals,
    warn_of_shards,
)
from laplace.fitting.fit import (
    NO_DATA,
    FirstPass,
    Fit,
    ReadOptions,
    accumulate,
    begin_reading,
)
from laplace.fitting.padding import without_padding

__all__ = [
    "NO_DATA",
    "FirstPass",
    "Fit",
    "ReadOptions",
    "accumulate",
    "begin_reading",
    "check_decay",
    "check_override",
    "check_weight",
    "require_rereadable",
    "warn_of_diagonals",
    "warn_of_shards",
    "without_padding",
]
