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
    def name(self) -> str: ...
    @property
    def ignore_index(self) -> int | None: ...
    @property
    def independent_outputs(self) -> bool: ...
    @property
    def links(self) -> tuple[str, ...]: ...

    def inverse_link(self, f: Tensor) -> Tensor: ...
    def predict(
        self, mean: Tensor, covariance: Tensor, link: str, n_samples: int, generator: torch.Generator | None
    ) -> Tensor: ...
    def predictive_nll(self, prediction: Tensor, variance: Tensor | None, y: Tensor, sigma_noise: Tensor) -> Tensor: ...
    def conditional(self, f: Tensor) -> Distribution: ...
    def sample_targets(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor: ...
    def log_density(self, f: Tensor, y: Tensor) -> Tensor: ...
    def target_variance(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor: ...


class Outputs(Protocol):
    """Outputs of B rows under a posterior, or under a mixture of posteriors.

    Attributes:
        likelihood: p(y | f).
        sigma_noise: 0-dim or `[C]`.
        sampled: True if the outputs are known by samples alone.
        positions: Dimensions of the positions among the rows, empty for outputs `[B, C]`.
        mean: E[y] by the link, `[B, C]`.
        mean_samples: Samples of E[y | f], `[S, B, C]`.
        latent_mean: E[f], `[B, C]`.
        latent_variance: Var(f), `[B, C]`.
        latent_samples: Samples of f, `[S, B, C]`.
    """

    @property
    def likelihood(self) -> Density: ...
    @property
    def sigma_noise(self) -> Tensor: ...
    @property
    def sampled(self) -> bool: ...
    @property
    def positions(self) -> tuple[int, ...]: ...
    @property
    def mean(self) -> Tensor: ...
    @property
    def mean_samples(self) -> Tensor: ...
    @property
    def latent_mean(self) -> Tensor: ...
    @property
    def latent_variance(self) -> Tensor: ...
    @property
    def latent_samples(self) -> Tensor: ...

    def draws(self) -> torch.Generator | None:
        """A source of randomness, in the same state at every call; None for the global one."""
        ...


class Component(Outputs, Protocol):
    """Outputs of B rows under one posterior.

    Attributes:
        link: Name of the link.
        n_samples: Number of Monte-Carlo samples, S.
        latent: Gaussian of f in the form that was asked for.
        marginals: Gaussian of f with variances alone.
        of_each: Gaussian of f of every row: with `diagonal_output` its variances, else its covariances.
        decomposition: Aleatoric and epistemic parts.
        log_concentrations: Logarithms of the concentrations of the link's Dirichlet, `[B, C]`; None without one.
    """

    @property
    def link(self) -> str: ...
    @property
    def n_samples(self) -> int: ...
    @property
    def latent(self) -> Gaussian: ...
    @property
    def marginals(self) -> Gaussian: ...
    @property
    def of_each(self) -> Gaussian: ...
    @property
    def decomposition(self) -> Decomposition: ...
    @property
    def log_concentrations(self) -> Tensor | None: ...


class Mixture(Outputs, Protocol):
    """Outputs of B rows under Σ_k π_k p_k; under a single posterior they are a mixture of one.

    Attributes:
        components: Outputs under every p_k.
        weights: π, `[K]`.
    """

    @property
    def components(self) -> Sequence[Component]: ...
    @property
    def weights(self) -> Tensor: ...

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
