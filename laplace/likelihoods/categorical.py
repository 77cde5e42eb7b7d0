"""Classification: y ~ Categorical(softmax(f))."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from laplace.errors import InvalidArgument, InvalidData
from laplace.likelihoods.checks import check_labels, check_outputs
from laplace.likelihoods.links import softmax
from laplace.likelihoods.softmax import SoftmaxLikelihood


@dataclass(frozen=True)
class Categorical(SoftmaxLikelihood):
    """p(y | f) = softmax(f)_y for integer labels, Π_c softmax(f)_c^{q_c} for soft ones.

    With class weights w it is softmax(f)_y^{w_y}: the loss is `CrossEntropyLoss(weight, reduction="sum")`, and a datum
    of class y has the weight w_y in loss, curvature, evidence and number of data, as if it occurred w_y times.

    Attributes:
        ignore_index: Label of data to be ignored; None for no such label.
        class_weight: w, weights of the C classes, at least 0; None for 1.

    Raises:
        InvalidArgument: Class weights that are no numbers, negative, not finite, or all zero.
    """

    name = "classification"
    activation = "softmax"
    some_outputs = True
    ignore_index: int | None = -100
    class_weight: Any = None

    def __post_init__(self) -> None:
        if self.class_weight is not None:
            object.__setattr__(self, "class_weight", _weights(self.class_weight))

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Integer labels `[B]` in [0, C) or equal to `ignore_index`, as int64, or probabilities `[B, C]`.

        Raises:
            InvalidData: One output only, another shape or dtype, labels out of range, rows that are no probabilities.
        """
        check_outputs(f)
        if self.class_weight is not None and len(self.class_weight) != f.shape[1]:
            raise InvalidData(
                f"class_weight has {len(self.class_weight)} numbers, the network {f.shape[1]} outputs; give one for "
                "every class."
            )
        if f.shape[1] == 1:
            raise InvalidData(
                "One output was given, and the softmax of one class is always 1. For binary targets with a single "
                "logit use likelihood='bernoulli', or give the network two outputs."
            )
        return check_labels(f, y, self.ignore_index)

    def inverse_link(self, f: Tensor) -> Tensor:
        """Softmax over the last dimension."""
        return softmax(f)


def _weights(given: Any) -> tuple[float, ...]:
    """Weights of classes as numbers.

    Raises:
        InvalidArgument: They are none.
    """
    try:
        weights = tuple(float(value) for value in given)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"class_weight={given!r}; a number for every class is accepted: class_weight=[1.0, 5.0]."
        ) from error
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise InvalidArgument(
            f"class_weight={list(weights)}; weights must be finite, at least 0, and some of them positive."
        )
    return weights
