"""From data to one frozen `Fit`."""

from laplace.fitting.fit import (
    Fit,
    accumulate,
    check_decay,
    check_override,
    check_weight,
    first_inputs,
    require_rereadable,
)

__all__ = [
    "Fit",
    "accumulate",
    "check_decay",
    "check_override",
    "check_weight",
    "first_inputs",
    "require_rereadable",
]
