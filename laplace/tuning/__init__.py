"""Choosing hyper-parameters: by the evidence, or by a loss on validation data."""

from laplace.tuning.candidates import Predictive
from laplace.tuning.choose import (
    SearchOptions,
    TuningOptions,
    TuningResult,
    choose_hyperparameters,
    choose_prior_precision,
    report,
)
from laplace.tuning.group import PosteriorGroup
from laplace.tuning.objectives import Thresholds
from laplace.tuning.tunable import Tunable

__all__ = [
    "Predictive",
    "SearchOptions",
    "PosteriorGroup",
    "Thresholds",
    "Tunable",
    "TuningOptions",
    "TuningResult",
    "choose_hyperparameters",
    "choose_prior_precision",
    "report",
]
