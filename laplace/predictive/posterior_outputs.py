"""The outputs of B rows under one posterior, or a mixture of several: computed when they are read, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core.gaussian import Gaussian
from laplace.core.positions import OutputRows
from laplace.core.precision_policy import wide_dtype, widened
from laplace.enums import LinkApprox
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.links import LINKS
from laplace.likelihoods.targets import Decomposition, Target
from laplace.network.model_guard import autograd_mode
from laplace.predictive.latent import GaussianSource, SampleSource, moments_of
from laplace.predictive.options import PredictOptions

# Predictions of several posteriors as one: the mixture of their predictive distributions.


Prediction = Tensor | tuple[Tensor, Tensor]


def mixed(predictions: Sequence[Prediction], weights: Tensor, channel_dim: int = -1) -> Prediction:
    """The mixture Σ_k π_k p_k (Eschenhagen et al., 2021, equation 9), or its first two moments.

    Args:
        predictions: Of each component: probabilities `[..., B, C]`, which are averaged; or means and (co)variances, as
            of `mixed_moments`.
        weights: π, `[K]`; or of each of n candidates whose predictions are `[n, B, C]`, `[K, n]`.
        channel_dim: As of `mixed_moments`.

    Returns:
        What each prediction is: a tensor, or means and (co)variances. One prediction is returned as it is.
    """
    if len(predictions) == 1:
        return predictions[0]
    moments = [prediction for prediction in predictions if isinstance(prediction, tuple)]
    if moments:
        return mixed_moments(moments, weights, channel_dim)
    return average([p for p in predictions if isinstance(p, Tensor)], weights)


def mixed_moments(
    moments: Sequence[tuple[Tensor, Tensor]], weights: Tensor, channel_dim: int = -1
) -> tuple[Tensor, Tensor]:
    """Mean and (co)variance of a mixture of distributions with these, by the law of total variance.

        m = Σ_k π_k m_k,    C = Σ_k π_k (C_k + (m_k − m)(m_k − m)ᵀ)

    Args:
        moments: Means and (co)variances: `[..., B, C]` with `[..., B, C]` or `[..., B, C, C]`, or those of all data
            together, `[B·C]` with `[B·C, B·C]`.
        weights: π, `[K]`, or `[K, n]` of candidates.
        channel_dim: Where means have their C outputs: those of networks with positions, `[B, C, H, W]`, whose
            covariances are `[B, H, W, C, C]`.
    """
    mean = average([m for m, _ in moments], weights)
    within = average([c for _, c in moments], weights)
    steps = [m.to(mean) - mean for m, _ in moments]
    if within.ndim == mean.ndim:
        return mean, within + average([step.square() for step in steps], weights)
    if mean.ndim > 1:
        steps = [step.movedim(channel_dim, -1) for step in steps]
    return mean, within + average([step.unsqueeze(-1) * step.unsqueeze(-2) for step in steps], weights)


def average(values: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Σ_k π_k v_k; components may live on several devices, the first one's has the result."""
    like = values[0]
    shape = weights.shape[1:] + (1,) * (like.ndim - len(weights.shape[1:]))
    parts = [
        weight.to(like.device, torch.promote_types(value.dtype, like.dtype)).reshape(shape) * value.to(like.device)
        for weight, value in zip(weights, values, strict=True)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


_HALVINGS = 64
"""Halvings of an interval: to the last bit of float64."""

_FLAT = 1e-8
"""Density, in units of the widest component's, below which the distribution function counts as constant."""


def quantile(means: Tensor, variances: Tensor, weights: Tensor, probability: float) -> Tensor:
    """Quantile: where the mixture's distribution function Σ_k π_k Φ((q − m_k) / s_k) is `probability`, `[...]`.

    Found by bisection between the components' own quantiles. A step of Newton's method at the end changes no digit,
    and carries the derivative by means and variances.

    Args:
        means: `[K, ...]`.
        variances: `[K, ...]`.
        weights: π, `[K]`.
        probability: In (0, 1).
    """
    m, v = widened(means), widened(variances)
    s = v.clamp(min=torch.finfo(v.dtype).tiny).sqrt()
    pi = weights.to(m).reshape(-1, *(1,) * (m.ndim - 1))

    def excess(q: Tensor) -> Tensor:
        return (pi * torch.special.ndtr((q - m) / s)).sum(0) - probability

    with torch.no_grad():
        own = m + s * torch.special.ndtri(torch.tensor(probability, dtype=wide_dtype(m.device), device=m.device))
        low, high = own.amin(0), own.amax(0)
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            above = excess(middle) > 0
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        q = 0.5 * (low + high)
        spread = s.amax(0)
        density = spread * (pi * (-0.5 * ((q - m) / s).square()).exp() / (s * (2 * torch.pi) ** 0.5)).sum(0)
    steep = density > _FLAT  # between modes far apart there is nothing to divide by
    return torch.where(steep, q - excess(q) * spread / density.where(steep, 1.0), q).to(means.dtype)


class LazyQuantity(property):
    """A property that is computed when it is first read, whatever grad mode the reader is in, and kept.

    Its owner says by `create_graph` whether it can be differentiated. Before Python 3.12 `functools.cached_property`
    has one lock for all owners: predictions in several threads would wait for each other.
    """

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        super().__init__(compute)
        self.compute = compute
        self.name = compute.__name__

    def __get__(self, owner: Any, cls: type | None = None) -> Any:
        if owner is None:
            return self
        if self.name in owner.__dict__:
            return owner.__dict__[self.name]
        with autograd_mode(), torch.set_grad_enabled(owner.create_graph):
            # Of two threads that read one object at once the first has its result kept; both drew the same numbers.
            return owner.__dict__.setdefault(self.name, self.compute(owner))


lazy = LazyQuantity


Draws = Callable[[], "torch.Generator | None"]
"""The source of randomness of one quantity; None for the global one."""


Draw = Callable[[int, "torch.Generator | None"], OutputRows]
"""Samples `[n, B, C]` from a number of them and a source of randomness."""


@dataclass(frozen=True)
class OwnSamples:
    """Samples that users' classes draw by themselves; None where they do not.

    Attributes:
        latents: Of the outputs.
        targets: Of the target's mean, probabilities or the latents of a regression or of rewards.
    """

    latents: Draw | None = None
    targets: Draw | None = None


@dataclass(frozen=True, eq=False)
class PosteriorOutputs:
    """Outputs of B rows (inputs, or inputs × positions) under a posterior; what was computed is kept.

    The posterior is that of the call: hyper-parameters that are set afterwards change nothing here. Quantities that
    are drawn start from the same state of the generator, whichever is read first.

    Attributes:
        source: The latent outputs.
        likelihood: p(y | f).
        sigma_noise: 0-dim or `[C]`.
        options: Link, samples and form.
        draws: Source of randomness.
        own: Samples that users' classes draw by themselves.
    """

    source: GaussianSource | SampleSource
    likelihood: Likelihood
    sigma_noise: Tensor
    options: PredictOptions
    draws: Draws
    own: OwnSamples = OwnSamples()

    @property
    def link(self) -> str:
        """Name of the link."""
        return self.options.link

    @property
    def n_samples(self) -> int:
        """Number of Monte-Carlo samples."""
        return self.options.n_samples

    @property
    def create_graph(self) -> bool:
        """True if results can be differentiated, with respect to hyper-parameters or the inputs."""
        return self.source.create_graph

    @property
    def sampled(self) -> bool:
        """True if the latents are known by samples alone."""
        return isinstance(self.source, SampleSource)

    @property
    def positions(self) -> tuple[int, ...]:
        """Dimensions of the positions, empty for outputs `[B, C]`; of a quantity that was computed already."""
        known = next(
            (name for name in ("latent", "marginals", "_full_covariance", "_drawn") if name in self.__dict__), "_mean"
        )
        return getattr(self, known).positions

    @property
    def outputs(self) -> Tensor | None:
        """Indices of these among the network's outputs, `[B, K]`; None for all."""
        return None if self.options.choice is None else self._mean.outputs

    # Latents.

    @lazy
    def _mean(self) -> OutputRows:
        if isinstance(self.source, SampleSource):
            return replace(self._drawn, values=self._drawn.values.mean(0))
        known = next(
            (self.__dict__[name] for name in ("latent", "_sampling_gaussian", "marginals") if name in self.__dict__),
            None,
        )
        return self.source.mean() if known is None else OutputRows(known.mean, known.positions, known.outputs)

    @property
    def latent_mean(self) -> Tensor:
        """`[B, C]`; alone it costs one forward pass (refined: one Jacobian more)."""
        return self._mean.values

    @lazy
    def latent(self) -> Gaussian:
        """Gaussian of the network's outputs, in the form that was asked for."""
        return self._gaussian(self.options.form)

    @lazy
    def marginals(self) -> Gaussian:
        """Gaussian of the outputs with variances alone."""
        return self._gaussian("diagonal")

    @lazy
    def _full_covariance(self) -> Gaussian:
        return self.latent if self.options.form == "full" else self._gaussian("full")

    @property
    def per_row(self) -> Gaussian:
        """Gaussian of the outputs of every row alone: with `diagonal_output` variances, else covariances."""
        return self.marginals if self.options.form == "diagonal" else self._full_covariance

    @lazy
    def _sampling_gaussian(self) -> Gaussian:
        """The same as `latent` to draw from, with (co)variances summed in float64: in float32 a pass of its own.

        Where the link draws, or everything is float64, `latent` has them.
        """
        there = self._link_draws or self.sigma_noise.dtype == wide_dtype(self.sigma_noise.device)
        return self.latent if there else self._gaussian(self.options.form, wide=True)

    @property
    def _link_draws(self) -> bool:
        """True if the link draws from covariances."""
        return self.link == LinkApprox.MC

    def _gaussian(self, form: str, *, wide: bool = False) -> Gaussian:
        if isinstance(self.source, SampleSource):
            return moments_of(self._drawn, form, self.options.group_size)
        return self.source.gaussian(form, wide=wide or self._link_draws)

    @lazy
    def latent_variance(self) -> Tensor:
        """Variances of the outputs, without observation noise, `[B, C]`."""
        known = self.latent if "latent" in self.__dict__ else self.marginals
        return known.variance.to(known.mean)

    @lazy
    def _drawn(self) -> OutputRows:
        if self.own.latents is not None:
            return self.own.latents(self.n_samples, self.draws())
        if isinstance(self.source, SampleSource):
            return self.source.samples(self.n_samples, self.draws())
        gaussian = self._sampling_gaussian
        return OutputRows(gaussian.sample(self.n_samples, self.draws()), gaussian.positions, gaussian.outputs)

    @property
    def latent_samples(self) -> Tensor:
        """`[S, B, C]`."""
        return self._drawn.values

    # Targets.

    @lazy
    def mean(self) -> Tensor:
        """E[y], `[B, C]`: by the link, or that of the latents."""
        likelihood, joint = self.likelihood, self.options.form == "joint"
        if likelihood.target.mean_is_latent:
            return self.latent_mean
        own = self.own.latents or self.own.targets
        if self.sampled or (self._link_draws and own is not None) or (self._target_draws and joint):
            return self.mean_samples.mean(0)
        gaussian = self.link_input
        return likelihood.predict(gaussian.mean, gaussian.covariance, self.link, self.n_samples, self.draws())

    @property
    def link_input(self) -> Gaussian:
        """Gaussian of the outputs in the form that E[y] is computed from."""
        if self.likelihood.target.reads_variances(self.likelihood, self.link):
            return self.marginals
        return self.per_row if self._target_draws else self._full_covariance

    @property
    def _target_draws(self) -> bool:
        """True if the link draws, and E[y] is by the link."""
        return self._link_draws and not self.likelihood.target.by_rows(self.likelihood, self.link)

    @lazy
    def mean_samples(self) -> Tensor:
        """Samples of E[y | f], `[S, B, C]`."""
        if self.own.targets is not None:
            return self.own.targets(self.n_samples, self.draws()).values
        return self.likelihood.inverse_link(self.latent_samples)

    @lazy
    def decomposition(self) -> Decomposition:
        """Aleatoric and epistemic parts."""
        return self.likelihood.target.decompose(self)

    @lazy
    def log_concentrations(self) -> Tensor | None:
        """Logarithms of the concentrations of the link's Dirichlet, `[B, C]`; None if it has none."""
        concentrations = LINKS[self.link].log_concentrations
        if concentrations is None or self.sampled:
            return None
        return concentrations(self._full_covariance.mean, self._full_covariance.covariance)


Choice = Callable[[], Tensor]
"""The component of every sample, `[S]`; the same at every call."""


@dataclass(frozen=True, eq=False)
class MixedOutputs:
    """Outputs of B rows under Σ_k π_k p_k (Eschenhagen et al., 2021, equation 9); what was computed is kept.

    Moments are those of the mixture, by the law of total variance, and so is `latent`; quantiles are those of the
    mixture itself, not of a Gaussian with its moments.

    Attributes:
        components: Outputs under each of them, of the same options and likelihood.
        weights: π, `[K]`.
        choice: The component that each sample is of.
    """

    components: tuple[PosteriorOutputs, ...]
    weights: Tensor
    choice: Choice

    @classmethod
    def of(cls, outputs: PosteriorOutputs) -> MixedOutputs:
        """Outputs under one posterior."""
        return cls((outputs,), torch.ones(1), lambda: torch.zeros(outputs.n_samples, dtype=torch.long))

    @property
    def options(self) -> PredictOptions:
        """Link, samples and form, of all components."""
        return self.components[0].options

    @property
    def likelihood(self) -> Likelihood:
        """Distribution of the data, p(y | f), of all components."""
        return self.components[0].likelihood

    @property
    def target(self) -> Target:
        """The target of the likelihood, of these rows."""
        return self.likelihood.target.of(self)

    @property
    def create_graph(self) -> bool:
        """True if results can be differentiated, with respect to hyper-parameters or the inputs."""
        return any(part.create_graph for part in self.components)

    @property
    def positions(self) -> tuple[int, ...]:
        """Dimensions of the positions, empty for outputs `[B, C]`."""
        return self.components[0].positions

    @property
    def outputs(self) -> Tensor | None:
        """Indices of these among the networks' outputs, `[B, K]`, of all components; None for all."""
        return self.components[0].outputs

    @property
    def sampled(self) -> bool:
        """True if the latents of a component are known by samples alone."""
        return any(part.sampled for part in self.components)

    def draws(self) -> torch.Generator | None:
        """A source of randomness, in the same state at every call; None for the global one."""
        return self.components[0].draws()

    @lazy
    def sigma_noise(self) -> Tensor:
        """√Σ_k π_k σ_k², 0-dim or `[C]`: σ, where the components have one in common."""
        sigmas = [part.sigma_noise for part in self.components]
        return sigmas[0] if len(sigmas) == 1 else self.average([sigma.square() for sigma in sigmas]).sqrt()

    @lazy
    def latent_mean(self) -> Tensor:
        """`[B, C]`."""
        return self.average([part.latent_mean for part in self.components])

    @lazy
    def latent(self) -> Gaussian:
        """The Gaussian with the mixture's moments."""
        gaussians = [part.latent for part in self.components]
        if len(gaussians) == 1:
            return gaussians[0]
        joint = self.options.form == "joint"
        means = [g.mean.reshape(g.covariance.shape[:-1]) if joint else g.mean for g in gaussians]
        mean, covariance = self.moments(means, [gaussian.covariance for gaussian in gaussians])
        return replace(gaussians[0], mean=mean.view_as(gaussians[0].mean), covariance=covariance)

    @lazy
    def latent_variance(self) -> Tensor:
        """`[B, C]`."""
        variances = [part.latent_variance for part in self.components]
        if len(variances) == 1:
            return variances[0]
        return self.moments([part.latent_mean for part in self.components], variances)[1]

    @lazy
    def latent_samples(self) -> Tensor:
        """`[S, B, C]`, each of a component by its weight."""
        return self.chosen([part.latent_samples for part in self.components])

    @lazy
    def mean(self) -> Tensor:
        """E[y], `[B, C]`."""
        return self.average([part.mean for part in self.components])

    @lazy
    def mean_samples(self) -> Tensor:
        """Samples of E[y | f], `[S, B, C]`, each of a component by its weight."""
        return self.chosen([part.mean_samples for part in self.components])

    # Mixing.

    def average(self, values: Sequence[Tensor]) -> Tensor:
        """Σ_k π_k v_k."""
        return values[0] if len(values) == 1 else average(values, self.weights)

    def moments(self, means: Sequence[Tensor], variances: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and (co)variance of the mixture, in the components' shapes."""
        return mixed_moments(list(zip(means, variances, strict=True)), self.weights)

    def chosen(self, samples: Sequence[Tensor]) -> Tensor:
        """Samples `[S, …]`: the s-th one of the component that was chosen for it."""
        if len(samples) == 1:
            return samples[0]
        stacked = _together(samples)
        return stacked[self.choice().to(stacked.device), torch.arange(stacked.shape[1], device=stacked.device)]

    def gaussian_interval(self, variances: Sequence[Tensor], level: float) -> tuple[Tensor, Tensor]:
        """Central quantiles of the mixture of Gaussians with the latents' means and these variances, `[B, C]` each."""
        if len(variances) == 1:
            half = variances[0].clamp(min=0).sqrt() * torch.erfinv(variances[0].new_tensor(level)) * 2**0.5
            return self.latent_mean - half, self.latent_mean + half
        means, spread = _together([part.latent_mean for part in self.components]), _together(variances)
        lower, upper = (quantile(means, spread, self.weights, 0.5 + half) for half in (-0.5 * level, 0.5 * level))
        return lower, upper


def _together(values: Sequence[Tensor]) -> Tensor:
    """Values of all components, `[K, …]`, on the device of the first."""
    return torch.stack([value.to(values[0]) for value in values])
