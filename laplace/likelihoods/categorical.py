"""Classification: y ~ Categorical(softmax(f))."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laplace.errors import InvalidData
from laplace.likelihoods.checks import check_labels, check_outputs
from laplace.likelihoods.links import softmax
from laplace.likelihoods.softmax import SoftmaxLikelihood


@dataclass(frozen=True)
class Categorical(SoftmaxLikelihood):
    """p(y | f) = softmax(f)_y for integer labels, Π_c softmax(f)_c^{q_c} for soft ones.

    Attributes:
        ignore_index: Label of data that count nowhere; None for no such label.
    """

    name = "classification"
    activation = "softmax"
    some_outputs = True
    ignore_index: int | None = -100

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Integer labels `[B]` in [0, C) or equal to `ignore_index`, as int64, or probabilities `[B, C]`.

        Raises:
            InvalidData: One output only, another shape or dtype, labels out of range, rows that are no probabilities.
        """
        check_outputs(f)
        if f.shape[1] == 1:
            raise InvalidData(
                "One output was given, and the softmax of one class is always 1. For binary targets with a single "
                "logit use likelihood='bernoulli', or give the network two outputs."
            )
        return check_labels(f, y, self.ignore_index)

    def inverse_link(self, f: Tensor) -> Tensor:
        """Softmax over the last dimension."""
        return softmax(f)
