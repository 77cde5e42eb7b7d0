"""Cross-entropy of softmax(f), which categorical and preference likelihoods share."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from laplace.core.precision_policy import wide_dtype, widened
from laplace.core.random_numbers import uniform
from laplace.errors import InvalidArgument
from laplace.likelihoods.base import NoiseFreeLikelihood, OutputHessian
from laplace.likelihoods.checks import snapped
from laplace.likelihoods.labels import Labels, labels_of
from laplace.likelihoods.targets import TARGETS


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
        """Weights of targets that may be missing where all count alike.

        Raises:
            InvalidArgument: They are, and classes have weights.
        """
        if y is None and self.class_weight is not None:
            raise InvalidArgument("class_weight= weighs data by their labels: give y.")
        return None if y is None else self.weights(y)

    def loss_terms(self, f: Tensor, y: Tensor) -> Tensor:
        """Σ_b −log softmax(f_b)_{y_b}, or −Σ_bc y_bc log softmax(f_b)_c, `[1]`."""
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
        """diag(p) − p pᵀ with p = softmax(f), times the weight of the label; zero for ignored labels.

        Raises:
            InvalidArgument: Classes have weights, and there are no labels.
        """
        p = self._counted(torch.softmax(f, 1), y)
        return OutputHessian(diag=p, vec=p, sums_to_zero=self.sums_to_zero).scaled(self._weights_of(y))

    def sample_gradients(
        self, f: Tensor, y: Tensor | None, n_samples: int, generator: torch.Generator | None = None
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


def _sample_labels(p: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
    """Labels drawn from the rows of p by inversion, `[S, B]`; a class of probability 0 is never drawn."""
    cumulative = widened(p).cumsum(1)
    u = uniform((n_samples, p.shape[0]), p, generator).T * cumulative[:, -1:]
    labels = torch.searchsorted(cumulative, u.contiguous(), right=True)
    return labels.clamp(max=p.shape[1] - 1).T
