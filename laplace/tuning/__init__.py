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
from laplace.tuning.objectives import Thresholds
from laplace.tuning.subject import Subject

__all__ = [
    "Predictive",
    "SearchOptions",
    "Subject",
    "Thresholds",
    "TuningOptions",
    "TuningResult",
    "choose_hyperparameters",
    "choose_prior_precision",
    "report",
]
