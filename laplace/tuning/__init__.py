"""Choosing hyper-parameters: by the evidence, or by a loss on validation data."""

from laplace.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "laplace.tuning.search": "TuningResult report",
        "laplace.tuning.group": "PosteriorGroup",
        "laplace.tuning.candidates": "Predictive",
        "laplace.tunable": "Tunable",
    },
)
