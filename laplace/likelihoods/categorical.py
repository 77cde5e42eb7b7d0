"""Likelihoods of classes: softmax(f), of one of C classes or of the preferred of two items.

Their labels stand first, then the cross-entropy that they share, then each of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from laplace.core.precision_policy import wide_dtype, widened
from laplace.core.random_numbers import uniform
from laplace.errors import InvalidArgument, InvalidData
from laplace.likelihoods.base import Likelihood, NoiseFreeLikelihood, OutputHessian
from laplace.likelihoods.checks import check_labels, check_outputs, snapped
from laplace.likelihoods.links import softmax
from laplace.likelihoods.targets import TARGETS, ClassTarget, Decomposition, Target

if TYPE_CHECKING:
    from laplace.predictive.prediction import Prediction

# Labels of a batch, as a cross-entropy reads them: indices of classes, or probabilities of them.


@dataclass(frozen=True, eq=False)
class HardLabels:
    """Indices of classes.

    Attributes:
        y: Checked labels, `[B]`, int64.
        ignore_index: Label of data to be ignored, or None.
        class_weights: How often data of each class count, `[C]`; None for once.
    """

    y: Tensor
    ignore_index: int | None
    class_weights: Tensor | None = None

    @property
    def counts(self) -> Tensor:
        return torch.ones_like(self.y, dtype=torch.bool) if self.ignore_index is None else self.y != self.ignore_index

    @property
    def weights(self) -> Tensor | None:
        if self.class_weights is None:
            return None
        return torch.where(self.counts, self.class_weights[self._indices.squeeze(1)], 0.0)

    def loss(self, f: Tensor) -> Tensor:
        # cross_entropy insists on an ignored label; checked labels without ignore_index are never negative.
        ignored = -100 if self.ignore_index is None else self.ignore_index
        weight = None if self.class_weights is None else self.class_weights.to(f)
        return functional.cross_entropy(f, self.y, weight, reduction="sum", ignore_index=ignored)

    def gradient(self, f: Tensor) -> Tensor:
        """softmax(f) − e_y; zero for ignored labels."""
        counts = self.counts.unsqueeze(1)
        # −(1 − p_y) as minus the sum of the others keeps its digits where p_y rounds to 1.
        others = torch.softmax(f, 1).scatter(1, self._indices, 0.0)
        full = others.scatter(1, self._indices, -others.sum(1, keepdim=True))
        return _times(torch.where(counts, full, 0.0), self.weights)

    def negative_log(self, probabilities: Tensor) -> Tensor:
        chosen = probabilities.gather(1, self._indices).squeeze(1)
        return torch.where(self.counts, -_log(chosen), torch.nan)

    @property
    def _indices(self) -> Tensor:
        """Classes to read at, `[B, 1]`: any for ignored labels."""
        return torch.where(self.counts, self.y, 0).unsqueeze(1)


@dataclass(frozen=True, eq=False)
class SoftLabels:
    """Probabilities of classes: one-hot rows, mixed or smoothed labels, a teacher's predictions.

    Loss and score are the expectations of those of a label that is drawn with these probabilities. With weights of
    classes the loss is −Σ_c w_c q_c log p_c: that of the probabilities w_c q_c / w, which count w = Σ_c w_c q_c times.

    Attributes:
        q: Checked rows, `[B, C]`, at least 0, sums 1.
        class_weights: How often data of each class count, `[C]`; None for once.
    """

    q: Tensor
    class_weights: Tensor | None = None

    @property
    def counts(self) -> Tensor:
        return self.q.new_ones(len(self.q), dtype=torch.bool)

    @property
    def weights(self) -> Tensor | None:
        return None if self.class_weights is None else self.q @ self.class_weights.to(self.q)

    @property
    def _weighed(self) -> Tensor:
        """Rows w_c q_c."""
        return self.q if self.class_weights is None else self.q * self.class_weights.to(self.q)

    def loss(self, f: Tensor) -> Tensor:
        return functional.cross_entropy(f, self._weighed, reduction="sum")

    def gradient(self, f: Tensor) -> Tensor:
        """softmax(f) − q, as p_c Σ_{j≠c} q_j − q_c Σ_{j≠c} p_j, which keeps its digits where p_c and q_c round to 1."""
        p, q = torch.softmax(f, 1), self._weighed
        return p * _sum_of_others(q) - q * _sum_of_others(p)

    def negative_log(self, probabilities: Tensor) -> Tensor:
        return -(self.q * _log(probabilities)).sum(1)


Labels = HardLabels | SoftLabels


def classes_of(y: Tensor, likelihood: Likelihood) -> Tensor | None:
    """Most probable classes of soft labels, `[B]`, for readers of indices; None of all other targets."""
    return y.argmax(1) if likelihood.class_targets and y.ndim > 1 else None


def labels_of(y: Tensor, ignore_index: int | None, class_weights: Tensor | None = None) -> Labels:
    """The labels of checked targets, `[B]` or `[B, C]`, of classes with weights `[C]`; None for ones."""
    return HardLabels(y, ignore_index, class_weights) if y.ndim == 1 else SoftLabels(y, class_weights)


def _times(rows: Tensor, weights: Tensor | None) -> Tensor:
    """Rows `[B, C]` times weights `[B]`; None for ones."""
    return rows if weights is None else rows * weights.to(rows).unsqueeze(1)


def _log(probabilities: Tensor) -> Tensor:
    """Logarithms of probabilities, of which one that underflowed counts as the smallest normal number."""
    return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()


def _sum_of_others(rows: Tensor) -> Tensor:
    """Σ_{j≠c} x_j of rows `[B, C]` that are at least 0: no entry is subtracted from a sum that holds it."""
    nothing = torch.zeros_like(rows[:, :1])
    before = torch.cat([nothing, rows[:, :-1]], 1).cumsum(1)
    after = torch.cat([nothing, rows.flip(1)[:, :-1]], 1).cumsum(1).flip(1)
    return before + after


# What classification and preferences share.


class SoftmaxLikelihood(NoiseFreeLikelihood):
    """p(y | f) = softmax(f)_y; labels are indices `[B]`, of which `ignore_index` counts nowhere, or soft, `[B, C]`."""

    target = TARGETS["class"]
    response = "softmax"
    class_targets = True
    sums_to_zero = True
    class_weight: tuple[float, ...] | None = None

    def _labels(self, y: Tensor) -> Labels:
        """Checked targets as the loss reads them."""
        given = self.class_weight
        return labels_of(y, self.ignore_index, None if given is None else _numbers(given, y.device))

    @property
    def weighs_targets(self) -> bool:
        """True if classes have weights."""
        return self.class_weight is not None

    def weights(self, y: Tensor) -> Tensor | None:
        """Weights of the labels' classes, or Σ_c w_c y_c; None without any."""
        return None if self.class_weight is None else self._labels(y).weights

    def _weights_of(self, y: Tensor | None) -> Tensor | None:
        """Weights of targets that may be missing where all count alike."""
        if y is None and self.class_weight is not None:
            raise InvalidArgument("class_weight= weighs data by their labels: give y.")
        return None if y is None else self.weights(y)

    def loss_terms(self, f: Tensor, y: Tensor) -> Tensor:
        """Σ_b −log softmax(f_b)_{y_b}, or −Σ_bc y_bc log softmax(f_b)_c, `[1]` [Redux, eq. 2]."""
        return self._labels(y).loss(f).unsqueeze(0)

    @property
    def peer_name(self) -> str:
        """Preferences are a classification of pairs."""
        return "classification"

    def as_targets(self, values: Tensor) -> Tensor:
        """Labels `[B]` of rows that are one-hot up to rounding, else rows of probabilities."""
        rows = snapped(values)
        one_hot = (rows == 1).sum(1).eq(1) & (rows == 0).sum(1).eq(rows.shape[1] - 1)
        return rows.argmax(1) if bool(one_hot.all()) else rows / rows.sum(1, keepdim=True)

    def torch_loss(self) -> tuple[nn.Module, float]:
        """`CrossEntropyLoss`, with factor 1."""
        ignored = -100 if self.ignore_index is None else self.ignore_index
        weight = None if self.class_weight is None else torch.tensor(self.class_weight)
        return nn.CrossEntropyLoss(weight, reduction="sum", ignore_index=ignored), 1.0

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """softmax(f) − e_y, or softmax(f) − y, `[B, C]`."""
        return self._labels(y).gradient(f)

    def hessian(self, f: Tensor, y: Tensor | None = None) -> OutputHessian:
        """diag(p) − p pᵀ with p = softmax(f), times the weight of the label; zero for ignored labels."""
        p = self._counted(torch.softmax(f, 1), y)
        return OutputHessian(diag=p, vec=p, sums_to_zero=self.sums_to_zero).scaled(self._weights_of(y))

    def sample_gradients(
        self, f: Tensor, y: Tensor | None, n_samples: int, generator: Generator | None = None
    ) -> Tensor:
        """softmax(f) − e_ŷ with ŷ ~ softmax(f), `[S, B, C]`, times the root of y's weight; zero for ignored labels.

        A weight is of a datum, whatever is drawn in the place of its label: the second moment
        is that of the weighted loss.
        """
        p = torch.softmax(f, 1)
        labels = _sample_labels(p.detach(), n_samples, generator)
        gradients = self._counted(p.unsqueeze(0) - functional.one_hot(labels, f.shape[1]).to(f), y)
        weights = self._weights_of(y)
        return gradients if weights is None else weights.to(f).sqrt().unsqueeze(1) * gradients

    def predictive_nll(self, prediction: Tensor, variance: Tensor | None, y: Tensor, sigma_noise: Tensor) -> Tensor:
        """−log prediction_y, or −Σ_c y_c log prediction_c, `[B]`; NaN for ignored labels.

        A probability that underflowed counts as the smallest normal number, so that one saturated
        datum is punished (about 87 in float32) without making every candidate of a search infinite.
        """
        return labels_of(y, self.ignore_index).negative_log(prediction)

    def _counted(self, values: Tensor, y: Tensor | None) -> Tensor:
        """Values `[..., B, C]`, zero for ignored labels."""
        return values if y is None else torch.where(self._labels(y).counts.unsqueeze(1), values, 0.0)


@lru_cache(maxsize=16)
def _numbers(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers on a device, to which they are copied once."""
    return torch.tensor(values, dtype=wide_dtype(device), device=device)


def _sample_labels(p: Tensor, n_samples: int, generator: Generator | None) -> Tensor:
    """Labels drawn from the rows of p by inversion, `[S, B]`; a class of probability 0 is never drawn."""
    cumulative = widened(p).cumsum(1)
    u = uniform((n_samples, p.shape[0]), p, generator).T * cumulative[:, -1:]
    labels = torch.searchsorted(cumulative, u.contiguous(), right=True)
    return labels.clamp(max=p.shape[1] - 1).T


# Classification: y ~ Categorical(softmax(f)).


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

        Floating rows that are no probabilities have the loss of `CrossEntropyLoss`, and a warning.

        Raises:
            InvalidData: One output only, another shape or dtype, labels out of range, or rows that are no probabilities
                where these are integers or classes have weights.
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
        return check_labels(f, y, self.ignore_index, any_rows=self.class_weight is None)

    def inverse_link(self, f: Tensor) -> Tensor:
        """Softmax over the last dimension."""
        return softmax(f)


def _weights(given: Any) -> tuple[float, ...]:
    """Weights of classes as numbers."""
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


# Reward modelling: pairwise preferences (Bradley and Terry, 1952).


class RewardTarget(Target):
    """The reward of a single item: it is never observed, and known as a latent alone."""

    subject = "single rewards"

    def decomposition(self, rows: Prediction) -> Decomposition:
        self.refuse("decomposition", rows.likelihood)


class PreferenceTarget(ClassTarget):
    """The preferred item of a pair, which many data sets put first."""

    labels_vary = False

    def with_outputs(self, rows: Prediction) -> Target:
        return RewardTarget() if rows.latent_mean.shape[1] == 1 else self


@dataclass(frozen=True)
class Preference(SoftmaxLikelihood):
    """Preferences between two items: p(item y is preferred | f) = softmax(f)_y, with the rewards f of both items.

    Fit it to pairs: inputs `[B, 2, …]`, outputs `[B, 2]`, targets the index of the preferred item. It predicts
    preference probabilities of pairs, or, for single items with outputs `[B, 1]`, rewards with their variance.
    """

    name = "reward_modeling"
    target = PreferenceTarget()
    latent_prediction = True

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Indices of the preferred items, `[B]` of 0 and 1, as int64, or probabilities that they are, `[B, 2]`.

        Raises:
            InvalidData: Outputs other than `[B, 2]`, another shape or dtype, labels other than 0 and 1, rows that are
                no probabilities.
        """
        check_outputs(f)
        if f.shape[1] != 2:
            raise InvalidData(
                f"Outputs have shape {list(f.shape)}; a preference is learnt from pairs, inputs [B, 2, ...], for "
                "which the network returns one reward per item, [B, 2]."
            )
        return check_labels(f, y)

    def inverse_link(self, f: Tensor) -> Tensor:
        """Preference probabilities of pairs `[..., 2]` (softmax); rewards of single items `[..., 1]` as they are."""
        return f if f.shape[-1] == 1 else softmax(f)

    def predict(
        self, mean: Tensor, covariance: Tensor, link: str, n_samples: int = 100, generator: Generator | None = None
    ) -> Tensor:
        """Preference probabilities `[B, 2]` of pairs by `link`; mean rewards `[B, 1]` of single items.

        Raises:
            UnsupportedError: Unknown link.
        """
        return mean if mean.shape[1] == 1 else super().predict(mean, covariance, link, n_samples, generator)
