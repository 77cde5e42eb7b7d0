"""A posterior beside its predictive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Method:
    """A posterior and how it predicts.

    Attributes:
        structure: Of the curvature.
        pred_type: "nn" or "glm".
        options: Of the posterior.
    """

    structure: str
    pred_type: str
    options: dict[str, Any]
