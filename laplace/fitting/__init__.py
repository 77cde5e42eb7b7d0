"""From data to one frozen `Fit`."""

from laplace.fitting.diagonals import warn_of_diagonals
from laplace.fitting.first_batch import FirstBatch
from laplace.fitting.fit import (
    FirstPass,
    Fit,
    ReadOptions,
    accumulate,
    begin_reading,
    check_decay,
    check_override,
    check_weight,
    require_rereadable,
)
from laplace.fitting.processes import warn_of_shards

__all__ = [
    "FirstBatch",
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
]
