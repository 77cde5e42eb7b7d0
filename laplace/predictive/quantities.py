"""Everything that a prediction can be asked for, computed when it is first read, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Dirichlet, Distribution

from laplace.core.gaussian import Gaussian
from laplace.core.positions import OutputRows, unrolled
from laplace.core.random_numbers import drawn_seed, standard_normal
from laplace.enums import LinkApprox
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.links import log_concentrations
from laplace.network.model_guard import own_mode
from laplace.predictive import decomposition as parts
from laplace.predictive.decomposition import Decomposition
from laplace.predictive.distributions import normal_of
from laplace.predictive.latent import moments, needs_variances_only, with_noise
from laplace.predictive.lazy import lazy
from laplace.predictive.sources import GaussianSource, SampleSource

Draws = Callable[[], "torch.Generator | None"]
"""The source of randomness of one quantity; None for the global one."""

_BRIDGES = {str(LinkApprox.BRIDGE): False, str(LinkApprox.BRIDGE_NORM): True}
"""Links with a Dirichlet, and whether the latents are rescaled first."""


@dataclass(frozen=True)
class PredictionOptions:
    """What a prediction was asked for.

    Attributes:
        link: How latents become probabilities.
        n_samples: Monte-Carlo samples.
        form: `"full"`, `"diagonal"` or `"joint"`: the covariance of the latents.
    """

    link: str = "probit"
    n_samples: int = 100
    form: str = "full"


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
class Quantities:
    """The predictive distribution at B rows (inputs, or inputs × positions); what was computed is kept.

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
    options: PredictionOptions
    draws: Draws
    own: OwnSamples = OwnSamples()

    # Latents.

    @lazy
    def _mean(self) -> OutputRows:
        if isinstance(self.source, SampleSource):
            return OutputRows(self._drawn.values.mean(0), self._drawn.positions)
        known = next(
            (self.__dict__[name] for name in ("latent", "_drawable", "_variances") if name in self.__dict__), None
        )
        return self.source.mean() if known is None else OutputRows(known.mean, known.positions)

    @property
    def latent_mean(self) -> Tensor:
        """`[B, C]`; alone it costs one forward pass (refined: one Jacobian more)."""
        return self._mean.values

    @property
    def positions(self) -> tuple[int, ...]:
        """Of what was computed already: the dimensions of the positions, empty for outputs `[B, C]`."""
        known = next((name for name in ("latent", "_variances", "_whole", "_drawn") if name in self.__dict__), "_mean")
        return getattr(self, known).positions

    @lazy
    def latent(self) -> Gaussian:
        """Gaussian of the network's outputs, in the form that was asked for."""
        return self._gaussian(self.options.form)

    @lazy
    def _drawable(self) -> Gaussian:
        """The same to draw from, with (co)variances that were summed in float64: in float32 a pass of its own.

        Where the link draws, or everything is float64, `latent` has them.
        """
        there = self._link_draws or self.sigma_noise.dtype == torch.float64
        return self.latent if there else self._gaussian(self.options.form, wide=True)

    @property
    def _link_draws(self) -> bool:
        """Whether the link draws from covariances."""
        return self.options.link == LinkApprox.MC

    @lazy
    def _variances(self) -> Gaussian:
        return self._gaussian("diagonal")

    def _gaussian(self, form: str, *, wide: bool = False) -> Gaussian:
        if isinstance(self.source, SampleSource):
            return moments_of(self._drawn, form)
        return self.source.latent(form, wide=wide or self._link_draws)

    @property
    def of_each(self) -> Gaussian:
        """Gaussian of the outputs of every row alone: with `diagonal_output` variances, else covariances."""
        return self._variances if self.options.form == "diagonal" else self._whole

    @property
    def create_graph(self) -> bool:
        """Whether results can be differentiated, with respect to hyper-parameters or the inputs."""
        return self.source.create_graph

    @property
    def sampled(self) -> bool:
        """Whether the latents are known by samples alone."""
        return isinstance(self.source, SampleSource)

    @property
    def latent_covariance(self) -> Tensor:
        """Covariance of the outputs: `[B, C, C]`, `[B, C]` (`diagonal_output`) or `[B·C, B·C]` (`joint`)."""
        return self.latent.shown

    @lazy
    def latent_variance(self) -> Tensor:
        """Variances of the outputs, without observation noise, `[B, C]`."""
        known = self.latent if "latent" in self.__dict__ else self._variances
        return known.variance.to(known.mean)

    @lazy
    def _drawn(self) -> OutputRows:
        if self.own.latents is not None:
            return self.own.latents(self.options.n_samples, self.draws())
        if isinstance(self.source, SampleSource):
            return self.source.samples(self.options.n_samples, self.draws())
        gaussian = self._drawable
        return OutputRows(gaussian.sample(self.options.n_samples, self.draws()), gaussian.positions)

    @property
    def latent_samples(self) -> Tensor:
        """`[S, B, C]`."""
        return self._drawn.values

    # Targets.

    @lazy
    def mean(self) -> Tensor:
        """Mean of the target, `[B, C]`: that of a regression, or probabilities."""
        likelihood, options = self.likelihood, self.options
        if likelihood.latent_prediction and likelihood.has_noise:
            return self.latent_mean
        joint = options.form == "joint" and options.link == LinkApprox.MC
        own = options.link == LinkApprox.MC and (self.own.latents or self.own.targets) is not None
        if self.sampled or joint or own:
            return self._mean_samples.mean(0)
        gaussian = self._read_by_link
        return likelihood.predict(gaussian.mean, gaussian.covariance, options.link, options.n_samples, self.draws())

    @lazy
    def _mean_samples(self) -> Tensor:
        """Samples of the target's mean, `[S, B, C]`."""
        if self.own.targets is not None:
            return self.own.targets(self.options.n_samples, self.draws()).values
        return self.likelihood.inverse_link(self.latent_samples)

    @property
    def _read_by_link(self) -> Gaussian:
        """The Gaussian in the form that the link reads."""
        options, independent = self.options, self.likelihood.independent_outputs
        if needs_variances_only(options.link, independent=independent):
            return self._variances
        return self._variances if options.form == "diagonal" and options.link == LinkApprox.MC else self._whole

    @lazy
    def _whole(self) -> Gaussian:
        return self.latent if self.options.form == "full" else self._gaussian("full")

    @property
    def probabilities(self) -> Tensor:
        """Probabilities of the classes or labels by the link, `[B, C]`.

        Raises:
            UnsupportedError: The target has none (a regression, single rewards).
        """
        self.require("probabilities", "class", "binary")
        return self.mean

    @lazy
    def probability_samples(self) -> Tensor:
        """Samples of the probabilities, `[S, B, C]`: p(y | f) at `latent_samples`.

        Raises:
            UnsupportedError: The target has none.
        """
        self.require("probability_samples", "class", "binary")
        return self._mean_samples

    @lazy
    def variance(self) -> Tensor:
        """Variance of the target, `[B, C]`: with observation noise, or p (1 − p) of an indicator.

        Raises:
            UnsupportedError: The likelihood does not say what a prediction means for the target.
        """
        kind = self.require("variance", "real", "class", "binary")
        if kind == "real":
            return self.latent_variance + self.sigma_noise.square()
        return self.mean * (1 - self.mean)

    @lazy
    def entropy(self) -> Tensor:
        """Entropy of the predictive distribution of the target in nats, `[B]`: of `probabilities`, or differential.

        Raises:
            UnsupportedError: The likelihood does not say what a prediction means for the target.
        """
        kind = self.require("entropy", "real", "class", "binary")
        if kind == "real":
            return self.decomposition.predictive_entropy
        return parts.entropy_of(self.mean, kind)

    @lazy
    def decomposition(self) -> Decomposition:
        """See `Prediction.decomposition`."""
        kind = self.require("decomposition", "real", "class", "binary")
        if kind == "real":
            return parts.of_gaussian(self.of_each, self.sigma_noise)
        if kind == "binary":
            if self.sampled:
                return parts.of_binary_samples(self.probability_samples)
            return parts.of_binary_gaussian(
                self._variances.mean, self._variances.covariance, self.likelihood.inverse_link
            )
        if self.options.link in _BRIDGES and not self.sampled:
            return parts.of_dirichlet(self._log_concentrations, self._whole.mean.dtype)
        return parts.of_class_samples(self.probability_samples)

    @property
    def _log_concentrations(self) -> Tensor:
        gaussian = self._whole
        return log_concentrations(gaussian.mean, gaussian.covariance, normalise=_BRIDGES[self.options.link])

    def interval(self, level: float = 0.95, *, observation_noise: bool = True) -> tuple[Tensor, Tensor]:
        """Lower and upper ends `[B, C]`; see `Prediction.interval`."""
        checked_level(level)
        kind = self.require("interval", "real", "class", "binary")
        with own_mode(), torch.set_grad_enabled(self.create_graph):
            if kind == "class" or self.sampled:
                values = self.target_samples(observation_noise) if kind == "real" else self.probability_samples
                ends = values.new_tensor([0.5 - 0.5 * level, 0.5 + 0.5 * level])
                lower, upper = torch.quantile(values, ends, dim=0).unbind(0)
                return lower, upper
            variance = self.variance if kind == "real" and observation_noise else self.latent_variance
            half = variance.clamp(min=0).sqrt() * torch.erfinv(variance.new_tensor(level)) * 2**0.5
            lower, upper = self.latent_mean - half, self.latent_mean + half
            if kind == "real":
                return lower, upper
            return self.likelihood.inverse_link(lower), self.likelihood.inverse_link(upper)

    def target_samples(self, observation_noise: bool = True) -> Tensor:
        """Samples of a real target, `[S, B, C]`, or of f without observation noise."""
        samples = self.latent_samples
        if not observation_noise:
            return samples
        noise = standard_normal(tuple(samples.shape), samples, _another(self.draws()))
        return samples + self.sigma_noise * noise

    def distribution(self, of: str = "target") -> Distribution:
        """See `Prediction.distribution`."""
        if of == "latent":
            return normal_of(self.latent)
        if of == "probabilities":
            return self._dirichlet()
        if of != "target":
            raise InvalidArgument(f"of={of!r}; accepted are 'target', 'latent' and 'probabilities'.")
        kind = self.require("distribution", "real", "class", "binary")
        if kind == "real":
            return normal_of(with_noise(self.latent, self.sigma_noise))
        probabilities = unrolled(self.mean, self.positions)
        return Categorical(probs=probabilities) if kind == "class" else Bernoulli(probs=probabilities.clamp(0, 1))

    def _dirichlet(self) -> Dirichlet:
        kind = self.require("distribution('probabilities')", "class", "binary")
        if kind != "class" or self.options.link not in _BRIDGES or self.sampled:
            raise UnsupportedError(
                f"there is no distribution of the probabilities for likelihood={self.likelihood.name!r} with "
                f"link_approx={self.options.link!r}; classification with pred_type='glm' has a Dirichlet with "
                "link_approx='bridge' or 'bridge_norm', and probability_samples otherwise."
            )
        with own_mode(), torch.set_grad_enabled(self.create_graph):
            return Dirichlet(unrolled(parts.bounded(self._log_concentrations), self.positions))

    def require(self, what: str, *kinds: str) -> str:
        """The kind of target, if it is one of these.

        Raises:
            UnsupportedError: It is not.
        """
        kind = self.likelihood.target_kind
        rewards = kind == "class" and self.latent_mean.shape[1] == 1
        if kind not in kinds or rewards:
            given = "single rewards" if rewards else f"likelihood={self.likelihood.name!r} (target_kind={kind!r})"
            raise UnsupportedError(
                f"{what} has no meaning for {given}; it is defined for targets of the kinds {list(kinds)}. mean, "
                "latent_mean, latent_covariance and latent_samples always are."
            )
        return kind


def checked_level(level: float) -> None:
    """Raises where the level of an interval is no probability.

    Raises:
        InvalidArgument: It does not lie in (0, 1).
    """
    if not 0 < level < 1:
        raise InvalidArgument(f"level={level}; it must lie in (0, 1), e.g. 0.95.")


def moments_of(drawn: OutputRows, form: str) -> Gaussian:
    """The Gaussian with the moments of samples `[S, B, C]`; covariances are unbiased.

    Raises:
        InvalidArgument: One sample, which has no variance.
    """
    samples, positions = drawn.values, drawn.positions
    mean, variance = moments(samples)
    if form == "diagonal":
        return Gaussian(mean, variance, positions)
    centred = samples - mean
    if form == "joint":
        rows = centred.flatten(1)
        return Gaussian(mean, rows.T @ rows / (len(samples) - 1), positions)
    return Gaussian(mean, torch.einsum("sbc,sbd->bcd", centred, centred) / (len(samples) - 1), positions)


def _another(generator: torch.Generator | None) -> torch.Generator | None:
    """A generator of numbers other than those that this one gives."""
    if generator is None:
        return None
    return torch.Generator(device=generator.device).manual_seed(drawn_seed(generator))
