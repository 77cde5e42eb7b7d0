"""Protocols: what targets read of a likelihood, and of the outputs f of B rows that a posterior predicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributions import Distribution

from laplace.core.gaussian import Gaussian
from laplace.likelihoods.decomposition import Decomposition


class Density(Protocol):
    """p(y | f): the attributes and methods of a `Likelihood` that targets use."""

    @property
    def name(self) -> str:
        """The string users write."""
        ...

    @property
    def ignore_index(self) -> int | None:
        """Label that marks data which count nowhere, or None."""
        ...

    @property
    def independent_outputs(self) -> bool:
        """True if loss and inverse link act on every output alone."""
        ...

    @property
    def links(self) -> tuple[str, ...]:
        """Names of the links that `predict` accepts."""
        ...

    def inverse_link(self, f: Tensor) -> Tensor:
        """E[y | f] of latents `[..., C]`."""
        ...

    def predict(
        self, mean: Tensor, covariance: Tensor, link: str, n_samples: int, generator: torch.Generator | None
    ) -> Tensor:
        """E[y] under f ~ N(mean, covariance), `[B, C]`."""
        ...

    def predictive_nll(self, prediction: Tensor, variance: Tensor | None, y: Tensor, sigma_noise: Tensor) -> Tensor:
        """Negative log predictive density of each datum, `[B]`."""
        ...

    def conditional(self, f: Tensor) -> Distribution:
        """p(y | f) as a distribution of PyTorch."""
        ...


class Outputs(Protocol):
    """Outputs of B rows under a posterior, or under a mixture of posteriors."""

    @property
    def likelihood(self) -> Density:
        """p(y | f)."""
        ...

    @property
    def sigma_noise(self) -> Tensor:
        """0-dim or `[C]`."""
        ...

    @property
    def sampled(self) -> bool:
        """True if the outputs are known by samples alone."""
        ...

    @property
    def positions(self) -> tuple[int, ...]:
        """Dimensions of the positions among the rows, empty for outputs `[B, C]`."""
        ...

    @property
    def mean(self) -> Tensor:
        """E[y] by the link, `[B, C]`."""
        ...

    @property
    def mean_samples(self) -> Tensor:
        """Samples of E[y | f], `[S, B, C]`."""
        ...

    @property
    def latent_mean(self) -> Tensor:
        """E[f], `[B, C]`."""
        ...

    @property
    def latent_variance(self) -> Tensor:
        """Var(f), `[B, C]`."""
        ...

    @property
    def latent_samples(self) -> Tensor:
        """Samples of f, `[S, B, C]`."""
        ...

    def draws(self) -> torch.Generator | None:
        """A source of randomness, in the same state at every call; None for the global one."""
        ...


class Component(Outputs, Protocol):
    """Outputs of B rows under one posterior."""

    @property
    def link(self) -> str:
        """Name of the link."""
        ...

    @property
    def n_samples(self) -> int:
        """Number of Monte-Carlo samples, S."""
        ...

    @property
    def latent(self) -> Gaussian:
        """Gaussian of f in the form that was asked for."""
        ...

    @property
    def marginals(self) -> Gaussian:
        """Gaussian of f with variances alone."""
        ...

    @property
    def per_row(self) -> Gaussian:
        """Gaussian of f of every row: with `diagonal_output` its variances, else its covariances."""
        ...

    @property
    def link_input(self) -> Gaussian:
        """Gaussian of f in the form that E[y] is computed from."""
        ...

    @property
    def decomposition(self) -> Decomposition:
        """Aleatoric and epistemic parts."""
        ...

    @property
    def log_concentrations(self) -> Tensor | None:
        """Logarithms of the concentrations of the link's Dirichlet, `[B, C]`; None without one."""
        ...


class Mixture(Outputs, Protocol):
    """Outputs of B rows under Σ_k π_k p_k; under a single posterior they are a mixture of one."""

    @property
    def components(self) -> Sequence[Component]:
        """Outputs under every p_k."""
        ...

    @property
    def weights(self) -> Tensor:
        """π, `[K]`."""
        ...

    def average(self, values: Sequence[Tensor]) -> Tensor:
        """Σ_k π_k v_k."""
        ...

    def moments(self, means: Sequence[Tensor], variances: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and variance of a mixture, by the law of total variance."""
        ...

    def chosen(self, samples: Sequence[Tensor]) -> Tensor:
        """Samples `[S, …]`, each of a component by its weight."""
        ...

    def gaussian_interval(self, variances: Sequence[Tensor], level: float) -> tuple[Tensor, Tensor]:
        """Central quantiles of the mixture of N(E_k[f], v_k), `[B, C]` each."""
        ...
