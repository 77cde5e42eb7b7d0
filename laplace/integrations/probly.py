"""Predictions as distributions of probly, which asks a predictor that has a `predict` for them.

`probly.predictor.predict(la, x)` calls `la.predict(x)`, and makes a categorical distribution of what that returns by
the type of it. The first `la.predict` after probly was imported brings this module: there is nothing to do.
"""

from __future__ import annotations

from typing import Any

from probly.representation.distribution import create_categorical_distribution

from laplace.predictive.prediction import Prediction


@create_categorical_distribution.register(Prediction)
def _categorical(prediction: Prediction) -> Any:
    """The categorical distribution of the predicted class probabilities."""
    return create_categorical_distribution(prediction.probabilities)
