"""Regression: y ~ N(f, σ²), with one noise for all outputs or one per output."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from laplace.core.precision_policy import widened
from laplace.core.random_numbers import standard_normal
from laplace.core.scores import gaussian_nll
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.likelihoods.base import Likelihood, OutputHessian, check_kind
from laplace.likelihoods.checks import check_outputs, check_values, observed
from laplace.likelihoods.targets import TARGETS


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """p(y | f) = Π_c N(y_c; f_c, σ_c²); the unit negative log likelihood is ½ |y − f|².

    Entries of y that are NaN were not observed: the product is over the others.
    """

    name = "regression"
    has_noise = True
    latent_prediction = True
    target = TARGETS["real"]
    independent_outputs = True
    some_outputs = True
    numeric_targets = True

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Targets of the shape of f, `[B, C]`, in its dtype, finite or, where an entry was not observed, NaN.

        Raises:
            InvalidData: Another shape (nothing is broadcast), infinite values, a row of NaN alone.
        """
        check_outputs(f)
        return check_values(f, y, gaps=True)

    def observations(self, f: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Number of observed entries per output, `[C]`."""
        seen = widened(observed(y))
        return (seen if weights is None else weights.to(seen) * seen).sum(0)

    def loss_terms(self, f: Tensor, y: Tensor) -> Tensor:
        """½ Σ_b (y_bc − f_bc)², `[C]` [Redux, eq. 2]."""
        return 0.5 * self._residual(f, y).square().sum(0)

    def _residual(self, f: Tensor, y: Tensor) -> Tensor:
        """F − y, zero where nothing was observed."""
        return torch.where(observed(y), f - y, 0.0)

    @property
    def peer_name(self) -> str:
        return self.name

    def torch_loss(self) -> tuple[nn.Module, float]:
        """`MSELoss`, with factor ½."""
        return nn.MSELoss(reduction="sum"), 0.5

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """The residual f − y, `[B, C]`, zero where nothing was observed."""
        return self._residual(f, y)

    def hessian(self, f: Tensor, y: Tensor | None = None) -> OutputHessian:
        """The identity, with zeros where nothing was observed."""
        return OutputHessian(torch.ones_like(f) if y is None else observed(y).to(f))

    def sample_gradients(
        self, f: Tensor, y: Tensor | None, n_samples: int, generator: Generator | None = None
    ) -> Tensor:
        """Residuals f − ŷ with ŷ ~ N(f, 1), `[S, B, C]`: standard normal numbers, zero where nothing was observed."""
        residuals = standard_normal((n_samples, *f.shape), f, generator)
        return residuals if y is None else torch.where(observed(y), residuals, 0.0)

    def log_likelihood(
        self, loss_terms: Tensor, n_data: float | Tensor, n_outputs: int, sigma_noise: Tensor, temperature: Tensor
    ) -> Tensor:
        """−Σ_c loss_c / (σ_c² T) − Σ_c N_c log(σ_c √2π), 0-dim: temperature tempers the data term alone.

        N_c is N, or the number of observed entries of an output where `n_data` says them, `[C]`.

        Raises:
            InvalidArgument: Neither one noise nor one per output.
        """
        sigma = _scalar_or_vector(sigma_noise)
        if sigma.ndim and sigma.shape != loss_terms.shape:
            raise InvalidArgument(
                f"sigma_noise has {sigma.numel()} entries, the network {loss_terms.numel()} outputs; "
                "one noise, or one per output, is accepted."
            )
        data = (loss_terms / (sigma.square() * temperature)).sum()
        if isinstance(n_data, Tensor):
            return -data - (n_data.to(sigma) * (sigma.log() + 0.5 * math.log(2 * math.pi))).sum()
        log_sigma = sigma.log().sum() if sigma.ndim else n_outputs * sigma.log()
        return -data - n_data * (log_sigma + 0.5 * n_outputs * math.log(2 * math.pi))

    def mean_squares(self, loss_terms: Tensor, n_data: float | Tensor, n_outputs: int) -> Tensor:
        """2 loss_c / N_c."""
        if isinstance(n_data, Tensor):
            return 2 * loss_terms / (n_data if len(loss_terms) > 1 else n_data.sum())
        return 2 * loss_terms / (n_data * n_outputs / loss_terms.numel())

    def curvature_scale(self, kind: str, sigma_noise: Tensor, temperature: Tensor) -> Tensor:
        """1/(σ²T), 0-dim or `[C]`; for the empirical Fisher 1/(σ⁴T), since a gradient carries 1/σ².

        Raises:
            InvalidArgument: Unknown kind.
            UnsupportedError: The empirical Fisher with one noise per output: its gradients mix the outputs.
        """
        check_kind(kind)
        sigma = _scalar_or_vector(sigma_noise)
        if kind != "ef":
            return 1 / (sigma.square() * temperature)
        if sigma.ndim:
            raise UnsupportedError(
                f"An empirical Fisher with {sigma.numel()} noises has no factor, for its gradients are summed over "
                "outputs. Use the GGN, one common noise, or fit outputs and targets divided by their noise."
            )
        return 1 / (sigma.pow(4) * temperature)

    def inverse_link(self, f: Tensor) -> Tensor:
        """The outputs themselves: they are the mean of y."""
        return f

    def predict(
        self, mean: Tensor, covariance: Tensor, link: str, n_samples: int = 100, generator: Generator | None = None
    ) -> Tensor:
        """The mean of the latents, whatever the link, `[B, C]`."""
        return mean

    def predictive_nll(self, prediction: Tensor, variance: Tensor | None, y: Tensor, sigma_noise: Tensor) -> Tensor:
        """−Σ_c log N(y_c; prediction_c, variance_c + σ_c²) of what was observed, `[B]`.

        Without a variance it is that of the noise alone.
        """
        noise = _scalar_or_vector(sigma_noise).square()
        total = (noise if variance is None else variance + noise).expand_as(prediction)
        return gaussian_nll(prediction, total, y)


def _scalar_or_vector(sigma_noise: Tensor) -> Tensor:
    """One noise as 0-dim, several as `[C]`."""
    if sigma_noise.numel() == 1:
        return sigma_noise.reshape(())
    if sigma_noise.ndim != 1:
        raise InvalidArgument(f"sigma_noise has shape {list(sigma_noise.shape)}; a scalar or [C] is accepted.")
    return sigma_noise
