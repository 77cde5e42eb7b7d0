"""Choosing hyper-parameters: by the evidence, or by a loss on validation data."""

from typing import TYPE_CHECKING

from laplace.core.lazy import attach

if TYPE_CHECKING:
    from laplace.tuning.candidates import Predictive
    from laplace.tuning.choose import TuningResult, report
    from laplace.tuning.group import PosteriorGroup
    from laplace.tuning.objectives import Thresholds
    from laplace.tuning.tunable import Tunable
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "laplace.tuning.choose": "TuningResult report",
            "laplace.tuning.group": "PosteriorGroup",
            "laplace.tuning.objectives": "Thresholds",
            "laplace.tuning.candidates": "Predictive",
            "laplace.tuning.tunable": "Tunable",
        },
    )

__all__ = ["PosteriorGroup", "Predictive", "Thresholds", "Tunable", "TuningResult", "report"]
