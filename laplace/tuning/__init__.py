"""Choosing hyper-parameters: by the evidence, or by a loss on validation data."""

from laplace.tuning.choose import TuningResult, report
from laplace.tuning.group import PosteriorGroup
from laplace.tuning.objectives import Thresholds
from laplace.tuning.predictive import Predictive
from laplace.tuning.tunable import Tunable

__all__ = ["PosteriorGroup", "Predictive", "Thresholds", "Tunable", "TuningResult", "report"]
