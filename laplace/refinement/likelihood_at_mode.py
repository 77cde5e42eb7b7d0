"""A likelihood around other outputs than the network's: its targets say where."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.core.precision_policy import widened
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.checks import check_outputs
from laplace.likelihoods.output_hessian import OutputHessian
from laplace.refinement.smoothing import Smoothing


@dataclass(frozen=True, eq=False)
class Shifted(Likelihood):
    """p(y | f + shift), in expectation over a Gaussian around f + shift, with shift and root packed into the targets.

    It makes an engine compute, in any structure, Σ Jᵀ Λ(f_lin) J with Λ at the outputs of the linearised network
    instead of at f(x, θ*).

    Attributes:
        base: p(y | f).
        smoothing: Points of the expectation.
        example: One row of the targets, for their shape and dtype.
        n_outputs: C.
        rooted: Whether targets carry a root.
    """

    base: Likelihood
    smoothing: Smoothing
    example: Tensor
    n_outputs: int
    rooted: bool
    name = "shifted"

    def pack(self, shift: Tensor, root: Tensor | None, y: Tensor) -> Tensor:
        """Targets `[B, …]` of `base` with shifts `[B, C]` and roots, as `[B, n]`, float64."""
        parts = [shift] if root is None else [shift, root.flatten(1)]
        return torch.cat([widened(part) for part in (*parts, y.reshape(len(y), -1))], 1)

    def _unpacked(self, packed: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        c = self.n_outputs
        width = 0 if not self.rooted else c if self.smoothing.independent else c * c
        shift, root, y = packed.split([c, width, packed.shape[1] - c - width], 1)
        y = y.reshape(len(y), *self.example.shape).to(self.example.dtype)
        if not self.rooted:
            return shift, None, y
        return shift, root if self.smoothing.independent else root.view(-1, c, c), y

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        check_outputs(f)
        return y

    @property
    def weighs_targets(self) -> bool:
        return self.base.weighs_targets

    def weights(self, y: Tensor) -> Tensor | None:
        return self.base.weights(self._unpacked(y)[2])

    def count(self, f: Tensor, y: Tensor) -> int | Tensor:
        return self.base.count(f, self._unpacked(y)[2])

    def loss_terms(self, f: Tensor, y: Tensor) -> Tensor:
        """Loss at the centre, f + shift."""
        shift, _, targets = self._unpacked(y)
        return self.base.loss_terms(widened(f) + shift, targets).to(f.dtype)

    def hessian(self, f: Tensor, y: Tensor | None = None) -> OutputHessian:
        """Expected output Hessian around f + shift."""
        if y is None:
            return self.base.hessian(f)
        shift, root, targets = self._unpacked(y)
        return self.smoothing.hessian(self.base, widened(f) + shift, root, targets).to(f.dtype)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        shift, root, targets = self._unpacked(y)
        return self.smoothing.gradient(self.base, widened(f) + shift, root, targets).to(f.dtype)

    def sample_gradients(
        self, f: Tensor, y: Tensor | None, n_samples: int, generator: torch.Generator | None = None
    ) -> Tensor:
        return self.base.sample_gradients(f, None, n_samples, generator)

    def log_likelihood(
        self, loss_terms: Tensor, n_data: float, n_outputs: int, sigma_noise: Tensor, temperature: Tensor
    ) -> Tensor:
        return self.base.log_likelihood(loss_terms, n_data, n_outputs, sigma_noise, temperature)

    def curvature_scale(self, kind: str, sigma_noise: Tensor, temperature: Tensor) -> Tensor:
        return self.base.curvature_scale(kind, sigma_noise, temperature)

    def inverse_link(self, f: Tensor) -> Tensor:
        return self.base.inverse_link(f)

    def predict(
        self, mean: Tensor, covariance: Tensor, link: str, n_samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Tensor:  # fmt: skip
        return self.base.predict(mean, covariance, link, n_samples, generator)

    def predictive_nll(self, prediction: Tensor, variance: Tensor | None, y: Tensor, sigma_noise: Tensor) -> Tensor:
        return self.base.predictive_nll(prediction, variance, y, sigma_noise)
