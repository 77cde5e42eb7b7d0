"""Binary targets: one logit, or several labels that are independent given their logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from laplace.core.checks import require
from laplace.core.random_numbers import uniform
from laplace.enums import LinkApprox
from laplace.errors import InvalidData
from laplace.likelihoods.base import NoiseFreeLikelihood, OutputHessian
from laplace.likelihoods.checks import check_outputs, check_tensor, check_values, snapped
from laplace.likelihoods.links import probabilities_within
from laplace.likelihoods.targets import TARGETS


@dataclass(frozen=True)
class Bernoulli(NoiseFreeLikelihood):
    """p(y | f) = Π_c σ(f_c)^{y_c} (1 − σ(f_c))^{1 − y_c}; targets in [0, 1], soft ones included."""

    name = "bernoulli"
    target = TARGETS["binary"]
    response = "sigmoid"
    independent_outputs = True
    some_outputs = True
    activation = "sigmoid"

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Targets in [0, 1], `[B, C]` (or `[B]` for a single logit), in the dtype of f.

        Raises:
            InvalidData: Another shape, values outside [0, 1], NaN.
        """
        check_outputs(f)
        y = check_tensor(y)
        if f.shape[1] == 1 and y.ndim == 1:
            y = y.unsqueeze(1)
        y = check_values(f, y)
        require(
            (y >= 0) & (y <= 1),
            lambda: InvalidData(
                f"Targets reach from {y.min().item():.3g} to {y.max().item():.3g}; likelihood='bernoulli' accepts "
                "[0, 1]: map labels -1 and 1 by (y + 1) / 2, and use 'classification' for class indices."
            ),
        )
        return y

    def as_targets(self, values: Tensor) -> Tensor:
        """Those within rounding of 0 and 1 are these numbers."""
        return snapped(values)

    def loss_terms(self, f: Tensor, y: Tensor) -> Tensor:
        """Σ_bc binary cross-entropy, `[1]`."""
        return functional.binary_cross_entropy_with_logits(f, y, reduction="sum").unsqueeze(0)

    def torch_loss(self) -> tuple[nn.Module, float]:
        """`BCEWithLogitsLoss`, with factor 1."""
        return nn.BCEWithLogitsLoss(reduction="sum"), 1.0

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """σ(f) − y, `[B, C]`, as (1 − y) σ(f) − y σ(−f), which keeps its digits where σ rounds to 1."""
        return (1 - y) * torch.sigmoid(f) - y * torch.sigmoid(-f)

    def hessian(self, f: Tensor, y: Tensor | None = None) -> OutputHessian:
        """diag(σ(f) σ(−f))."""
        return OutputHessian(torch.sigmoid(f) * torch.sigmoid(-f))

    def sample_gradients(
        self, f: Tensor, y: Tensor | None, n_samples: int, generator: Generator | None = None
    ) -> Tensor:
        """σ(f) − ŷ with ŷ ~ Bernoulli(σ(f)), `[S, B, C]`."""
        drawn = uniform((n_samples, *f.shape), f, generator) < torch.sigmoid(f.detach())
        return self.gradient(f, drawn.to(f))

    def inverse_link(self, f: Tensor) -> Tensor:
        """Sigmoid, element-wise."""
        return torch.sigmoid(f)

    def predict(
        self, mean: Tensor, covariance: Tensor, link: str, n_samples: int = 100, generator: Generator | None = None
    ) -> Tensor:
        """Probabilities of 1, `[B, C]`; probit: σ(μ / √(1 + π/8 · v)) (MacKay, 1992); delta: σ(μ) + ½ σ″(μ) v.

        Raises:
            UnsupportedError: A bridge, which is a matter of softmax, or an unknown link.
        """
        probabilities = super().predict(mean, covariance, link, n_samples, generator)
        return probabilities_within(probabilities) if link == LinkApprox.DELTA else probabilities

    def predictive_nll(self, prediction: Tensor, variance: Tensor | None, y: Tensor, sigma_noise: Tensor) -> Tensor:
        """Σ_c binary cross-entropy of the predicted probabilities, `[B]`; zeros count as machine precision."""
        eps = torch.finfo(prediction.dtype).eps
        positive = y * prediction.clamp(min=eps).log()
        negative = (1 - y) * (1 - prediction).clamp(min=eps).log()
        return -(positive + negative).sum(1)
