"""The outputs of B rows under one posterior, and E[y] by a link: computed when they are read, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.core.gaussian import Gaussian, sample_moments
from laplace.core.positions import OutputRows
from laplace.core.precision_policy import wide_dtype
from laplace.enums import LinkApprox
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.decomposition import Decomposition
from laplace.likelihoods.links import LINKS
from laplace.predictive.lazy import lazy
from laplace.predictive.sources import GaussianSource, SampleSource

Draws = Callable[[], "torch.Generator | None"]
"""The source of randomness of one quantity; None for the global one."""


@dataclass(frozen=True)
class PredictionOptions:
    """Options of a prediction.

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
    options: PredictionOptions
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
        known = next((name for name in ("latent", "marginals", "_whole", "_drawn") if name in self.__dict__), "_mean")
        return getattr(self, known).positions

    # Latents.

    @lazy
    def _mean(self) -> OutputRows:
        if isinstance(self.source, SampleSource):
            return OutputRows(self._drawn.values.mean(0), self._drawn.positions)
        known = next(
            (self.__dict__[name] for name in ("latent", "_drawable", "marginals") if name in self.__dict__), None
        )
        return self.source.mean() if known is None else OutputRows(known.mean, known.positions)

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
    def _whole(self) -> Gaussian:
        return self.latent if self.options.form == "full" else self._gaussian("full")

    @property
    def of_each(self) -> Gaussian:
        """Gaussian of the outputs of every row alone: with `diagonal_output` variances, else covariances."""
        return self.marginals if self.options.form == "diagonal" else self._whole

    @lazy
    def _drawable(self) -> Gaussian:
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
            return moments_of(self._drawn, form)
        return self.source.latent(form, wide=wide or self._link_draws)

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
        gaussian = self._drawable
        return OutputRows(gaussian.sample(self.n_samples, self.draws()), gaussian.positions)

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
        gaussian = self.read_by_link
        return likelihood.predict(gaussian.mean, gaussian.covariance, self.link, self.n_samples, self.draws())

    @property
    def read_by_link(self) -> Gaussian:
        """Gaussian of the outputs in the form that E[y] is computed from."""
        if self.likelihood.target.reads_variances(self.likelihood, self.link):
            return self.marginals
        return self.of_each if self._target_draws else self._whole

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
        return concentrations(self._whole.mean, self._whole.covariance)


def moments_of(drawn: OutputRows, form: str) -> Gaussian:
    """The Gaussian with the moments of samples `[S, B, C]`; covariances are unbiased.

    Raises:
        InvalidArgument: One sample, which has no variance.
    """
    samples, positions = drawn.values, drawn.positions
    mean, variance = sample_moments(samples)
    if form == "diagonal":
        return Gaussian(mean, variance, positions)
    centred = samples - mean
    if form == "joint":
        rows = centred.flatten(1)
        return Gaussian(mean, rows.T @ rows / (len(samples) - 1), positions)
    return Gaussian(mean, torch.einsum("sbc,sbd->bcd", centred, centred) / (len(samples) - 1), positions)
