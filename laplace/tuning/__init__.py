"""Choosing hyper-parameters: by the evidence, or by a loss on validation data."""

from laplace.tuning.choose import TuningOptions, choose_prior_precision

__all__ = ["TuningOptions", "choose_prior_precision"]
