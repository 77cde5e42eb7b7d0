"""From data to one frozen `Fit`."""

from laplace.fitting.diagonals import warn_of_diagonals
from laplace.fitting.fit import Fit, accumulate, check_decay, check_weight, first_inputs, require_rereadable

__all__ = [
    "Fit", "accumulate", "check_decay", "check_weight", "first_inputs", "require_rereadable", "warn_of_diagonals",
]  # fmt: skip
