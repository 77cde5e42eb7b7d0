"""Cross-entropy of softmax(f), which categorical and preference likelihoods share."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from laplace.core.precision_policy import widened
from laplace.core.random_numbers import uniform
from laplace.likelihoods.base import NoiseFreeLikelihood, OutputHessian
from laplace.likelihoods.checks import snapped
from laplace.likelihoods.targets import TARGETS

# cross_entropy insists on an ignored label; checked labels without ignore_index are never negative.
_NEVER = -100


class SoftmaxLikelihood(NoiseFreeLikelihood):
    """p(y | f) = softmax(f)_y; labels equal to `ignore_index` count nowhere."""

    target = TARGETS["class"]
    response = "softmax"

    def loss_terms(self, f: Tensor, y: Tensor) -> Tensor:
        """Σ_b −log softmax(f_b)_{y_b}, `[1]`."""
        ignored = _NEVER if self.ignore_index is None else self.ignore_index
        return functional.cross_entropy(f, y, reduction="sum", ignore_index=ignored).unsqueeze(0)

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
        ignored = _NEVER if self.ignore_index is None else self.ignore_index
        return nn.CrossEntropyLoss(reduction="sum", ignore_index=ignored), 1.0

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """softmax(f) − e_y, `[B, C]`."""
        counts = self._counts(y)
        labels = torch.where(counts, y, 0)
        # −(1 − p_y) as minus the sum of the others keeps its digits where p_y rounds to 1.
        others = torch.softmax(f, 1).scatter(1, labels.unsqueeze(1), 0.0)
        full = others.scatter(1, labels.unsqueeze(1), -others.sum(1, keepdim=True))
        return torch.where(counts.unsqueeze(1), full, 0.0)

    def hessian(self, f: Tensor, y: Tensor | None = None) -> OutputHessian:
        """diag(p) − p pᵀ with p = softmax(f); zero for ignored labels."""
        p = torch.softmax(f, 1)
        if y is not None:
            p = torch.where(self._counts(y).unsqueeze(1), p, 0.0)
        return OutputHessian(diag=p, vec=p)

    def sample_gradients(
        self, f: Tensor, y: Tensor | None, n_samples: int, generator: torch.Generator | None = None
    ) -> Tensor:
        """softmax(f) − e_ŷ with ŷ ~ softmax(f), `[S, B, C]`; zero for ignored labels."""
        p = torch.softmax(f, 1)
        labels = _sample_labels(p.detach(), n_samples, generator)
        gradients = p.unsqueeze(0) - functional.one_hot(labels, f.shape[1]).to(f)
        return gradients if y is None else torch.where(self._counts(y).unsqueeze(1), gradients, 0.0)

    def predictive_nll(self, prediction: Tensor, variance: Tensor | None, y: Tensor, sigma_noise: Tensor) -> Tensor:
        """−log prediction_y, `[B]`; NaN for ignored labels.

        A probability that underflowed counts as the smallest normal number, so that one saturated
        datum is punished (about 87 in float32) without making every candidate of a search infinite.
        """
        counts = self._counts(y)
        chosen = prediction.gather(1, torch.where(counts, y, 0).unsqueeze(1)).squeeze(1)
        nll = -chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log()
        return torch.where(counts, nll, torch.nan)

    def _counts(self, y: Tensor) -> Tensor:
        """True for the data that count, `[B]`."""
        return torch.ones_like(y, dtype=torch.bool) if self.ignore_index is None else y != self.ignore_index


def _sample_labels(p: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
    """Labels drawn from the rows of p by inversion, `[S, B]`; a class of probability 0 is never drawn."""
    cumulative = widened(p).cumsum(1)
    u = uniform((n_samples, p.shape[0]), p, generator).T * cumulative[:, -1:]
    labels = torch.searchsorted(cumulative, u.contiguous(), right=True)
    return labels.clamp(max=p.shape[1] - 1).T
