"""Binary targets: one logit, or several labels that are independent given their logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from laplace.core.checks import require
from laplace.core.random_numbers import uniform
from laplace.core.scores import summed
from laplace.enums import LinkApprox
from laplace.errors import InvalidData
from laplace.likelihoods.base import NoiseFreeLikelihood, OutputHessian
from laplace.likelihoods.checks import check_outputs, check_tensor, check_values, observed, snapped
from laplace.likelihoods.links import probabilities_within
from laplace.likelihoods.targets import TARGETS


@dataclass(frozen=True)
class Bernoulli(NoiseFreeLikelihood):
    """p(y | f) = Π_c σ(f_c)^{y_c} (1 − σ(f_c))^{1 − y_c}; targets in [0, 1], soft ones included.

    Entries of y that are NaN, or the ignored label, were not observed: the product is over the others.

    Attributes:
        ignore_index: Label of entries to be ignored, as −1 in tables of integers; None for no such label.
    """

    name = "bernoulli"
    target = TARGETS["binary"]
    response = "sigmoid"
    independent_outputs = True
    some_outputs = True
    activation = "sigmoid"
    ignore_index: int | None = None

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Targets in [0, 1], `[B, C]` (or `[B]` for a single logit), in the dtype of f; NaN where nothing was observed.

        Raises:
            InvalidData: Another shape, values outside [0, 1], a row of NaN alone.
        """
        check_outputs(f)
        y = check_tensor(y)
        if f.shape[1] == 1 and y.ndim == 1:
            y = y.unsqueeze(1)
        if self.ignore_index is not None:
            y = y.masked_fill(y == self.ignore_index, torch.nan) if y.is_floating_point() else self._without_label(f, y)
        y = check_values(f, y, gaps=True)
        require(
            y.isnan() | ((y >= 0) & (y <= 1)),
            lambda: InvalidData(
                f"Targets reach from {y.nan_to_num(0.0).min().item():.3g} to {y.nan_to_num(0.0).max().item():.3g}; "
                "likelihood='bernoulli' accepts [0, 1]: map labels -1 and 1 by (y + 1) / 2, and use 'classification' "
                "for class indices."
            ),
        )
        return y

    def _without_label(self, f: Tensor, y: Tensor) -> Tensor:
        """Integers as numbers, with NaN in the place of the ignored label."""
        return y.to(f.dtype).masked_fill(y.long() == self.ignore_index, torch.nan)

    def as_targets(self, values: Tensor) -> Tensor:
        """Those within rounding of 0 and 1 are these numbers."""
        return snapped(values)

    def loss_terms(self, f: Tensor, y: Tensor) -> Tensor:
        """Σ_bc binary cross-entropy, `[1]`."""
        seen = observed(y)
        each = functional.binary_cross_entropy_with_logits(f, torch.where(seen, y, 0.0), reduction="none")
        return torch.where(seen, each, 0.0).sum().unsqueeze(0)

    def torch_loss(self) -> tuple[nn.Module, float]:
        """`BCEWithLogitsLoss`, with factor 1."""
        return nn.BCEWithLogitsLoss(reduction="sum"), 1.0

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """σ(f) − y, `[B, C]`, as (1 − y) σ(f) − y σ(−f), which keeps its digits where σ rounds to 1."""
        seen = observed(y)
        given = torch.where(seen, y, 0.0)
        return torch.where(seen, (1 - given) * torch.sigmoid(f) - given * torch.sigmoid(-f), 0.0)

    def hessian(self, f: Tensor, y: Tensor | None = None) -> OutputHessian:
        """diag(σ(f) σ(−f)), with zeros where nothing was observed."""
        diag = torch.sigmoid(f) * torch.sigmoid(-f)
        return OutputHessian(diag if y is None else torch.where(observed(y), diag, 0.0))

    def sample_gradients(
        self, f: Tensor, y: Tensor | None, n_samples: int, generator: Generator | None = None
    ) -> Tensor:
        """σ(f) − ŷ with ŷ ~ Bernoulli(σ(f)), `[S, B, C]`."""
        drawn = uniform((n_samples, *f.shape), f, generator) < torch.sigmoid(f.detach())
        gradients = self.gradient(f, drawn.to(f))
        return gradients if y is None else torch.where(observed(y), gradients, 0.0)

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
        positive, negative = prediction.clamp(min=eps).log(), (1 - prediction).clamp(min=eps).log()
        return -summed(lambda y: y * positive + (1 - y) * negative, y, prediction)
