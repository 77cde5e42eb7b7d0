"""What `la.predict` returns: the outputs under one posterior, or a mixture of several, and what follows for y.

Every quantity is computed when it is first read, and kept. A posterior's prediction is a mixture of one component.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.distributions import Distribution

from laplace.core.gaussian import GaussianAlongAxes, GaussianOutputs, against_others, centred, mixture_of, normal_of
from laplace.core.overrides import is_ours
from laplace.core.positions import OutputRows, in_users_layout, unrolled
from laplace.core.precision_policy import wide_dtype, widened
from laplace.enums import LinkApprox
from laplace.errors import InvalidArgument
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.links import LINKS, average_response
from laplace.likelihoods.targets import Decomposition, Target, TargetMoments
from laplace.network.model_guard import AS_IT_IS, autograd_mode
from laplace.predictive.latent import GaussianSource, LatentForm, SampleSource, moments_of
from laplace.predictive.options import PredictOptions


class LazyQuantity(property):
    """A property that is computed when it is first read, whatever grad mode the reader is in, and kept.

    Its owner says by `create_graph` whether it can be differentiated.
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
        # Of two threads that read one object at once the first has its result kept; both drew the same numbers.
        mode, graph = autograd_mode(), owner.create_graph
        if mode is AS_IT_IS and torch.is_grad_enabled() == graph:  # as where one quantity reads another
            return owner.__dict__.setdefault(self.name, self.compute(owner))
        with mode, torch.set_grad_enabled(graph):
            return owner.__dict__.setdefault(self.name, self.compute(owner))


lazy = LazyQuantity


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """The predictive distribution at B inputs; each quantity is computed when you first read it, and cached.

    f are the network's outputs, y is the target. Hyper-parameters assigned after the call of `la.predict` have no
    effect. Random quantities start from the same state of the generator, in whichever order you read them.

    For a network with an output per token or pixel, `[B, C]` below stands for the shape of the outputs (`[B, T, C]`, or
    `[B, C, H, W]` with `channel_dim=1`), `[B]` for one number per token or pixel, and covariances have two trailing
    dimensions. With `outputs=` in the call, C is the number of these outputs.

    For a mixture, means and variances are those of the mixture, by the law of total variance, and so are intervals,
    entropies and distributions; disagreement between its components is epistemic.

    Attributes:
        components: Outputs under each component of the mixture Σ_k π_k p_k; one without a mixture.
        weights: π, `[K]`.
        channel_dim: Dimension of the network's outputs that holds the C classes or values.
        drawn_components: Draws the component of every sample, `[S]`, the same at every call; None for one component.
        as_rows: Whether quantities are shown as rows `[B, C]`, one per input, token or pixel: see `rows`.
    """

    components: tuple[PosteriorOutputs, ...]
    weights: Tensor
    channel_dim: int = -1
    drawn_components: Callable[[], Tensor] | None = None
    as_rows: bool = False

    @classmethod
    def from_outputs(cls, outputs: PosteriorOutputs, channel_dim: int = -1) -> Prediction:
        """The prediction of one posterior."""
        return cls((outputs,), torch.ones(1), channel_dim)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Hint for a name of tensors; what a property has raised, once more."""
            if not name.startswith("_") and name in dir(Tensor):
                raise AttributeError(
                    f"a Prediction has no attribute {name!r}, it is no tensor: prediction.mean is one, of class "
                    "probabilities or means [B, C], e.g. prediction.mean.argmax(-1); la(x) returns tensors."
                )
            return object.__getattribute__(self, name)

    def __repr__(self) -> str:
        """The options of the prediction; nothing is computed for them."""
        options = self.options
        link = "" if self.target.mean_is_latent else f"link={options.link!r}, "
        return f"Prediction({link}n_samples={options.n_samples}, form={options.form!r})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """`mean` for NumPy: `np.asarray(prediction)`, class probabilities or means; an error where it has a graph."""
        values = self.mean.cpu().numpy()
        return values.astype(dtype or values.dtype, copy=bool(copy))

    def __dlpack__(self, **options: Any) -> Any:
        """`mean` for PyTorch, whose `torch.as_tensor(prediction)` is this tensor, and for other libraries of arrays."""
        return self.mean.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        """Kind and number of the device of `mean`."""
        return self.mean.__dlpack_device__()

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
        """The part of the likelihood that derives mean, variance and distribution of y from those of f."""
        return self.likelihood.target.with_outputs(self.rows)

    @property
    def create_graph(self) -> bool:
        """True if results can be differentiated with respect to hyper-parameters or inputs."""
        return any(part.create_graph for part in self.components)

    # Latents.

    @property
    def outputs(self) -> Tensor | None:
        """Indices of the predicted outputs, `[B, K]` (for the K largest in descending order); None for all outputs."""
        chosen = self.components[0].outputs
        return None if chosen is None else self._shown(chosen)

    @lazy
    def latent(self) -> GaussianOutputs:
        """Gaussian distribution of the outputs f, an object with mean and covariance; one row per token or pixel."""
        gaussians = [part.latent for part in self.components]
        if len(gaussians) == 1:
            return gaussians[0]
        joint = self.options.form == "joint"
        means = [g.mean.reshape(g.covariance.shape[:-1]) if joint else g.mean for g in gaussians]
        mean, covariance = self.moments(means, [gaussian.covariance for gaussian in gaussians])
        return replace(gaussians[0], mean=mean.view_as(gaussians[0].mean), covariance=covariance)

    @lazy
    def latent_mean(self) -> Tensor:
        """Mean of the outputs f, `[B, C]`. Alone it costs one forward pass; after `refine` also the Jacobian."""
        return self._shown(self.average([part.latent_mean for part in self.components]))

    @property
    def latent_covariance(self) -> Tensor:
        """Covariance of the outputs f, `[B, C, C]`.

        With `diagonal_output` variances, `[B, C]`; with `joint` `[B·C, B·C]`, or `[B/n, n·C, n·C]` with `group_size=n`.
        """
        return laid_out(self.latent, self.channel_dim, joint=self.options.form == "joint")[1]

    @lazy
    def latent_variance(self) -> Tensor:
        """Variances of the outputs f, without observation noise, `[B, C]`."""
        variances = [part.latent_variance for part in self.components]
        if len(variances) == 1:
            return self._shown(variances[0])
        return self._shown(self.moments([part.latent_mean for part in self.components], variances)[1])

    @lazy
    def latent_samples(self) -> Tensor:
        """Samples of the outputs f, `[S, B, C]`, with S the `n_samples` of the call."""
        return self._shown(self.chosen([part.latent_samples for part in self.components]), 1)

    # Targets.

    @lazy
    def mean(self) -> Tensor:
        """Mean of the target y, `[B, C]`; in classification the class probabilities."""
        return self._shown(self.average([part.mean for part in self.components]))

    @lazy
    def mean_samples(self) -> Tensor:
        """Samples of E[y | f], `[S, B, C]`, at `latent_samples`."""
        return self._shown(self.chosen([part.mean_samples for part in self.components]), 1)

    @lazy
    def sigma_noise(self) -> Tensor:
        """Standard deviation σ of the observation noise at the time of the call, 0-dim or `[C]`."""
        sigmas = [part.sigma_noise for part in self.components]
        return sigmas[0] if len(sigmas) == 1 else self.average([sigma.square() for sigma in sigmas]).sqrt()

    @property
    def probabilities(self) -> Tensor:
        """Probabilities of the classes or labels, `[B, C]`, by the link approximation of the call.

        Raises:
            UnsupportedError: The target has none (regression, rewards of single items).
        """
        self.target.require_probabilities("probabilities", self.rows)
        return self.mean

    @property
    def probability_samples(self) -> Tensor:
        """Samples of the probabilities, `[S, B, C]`, which are p(y | f) at `latent_samples`.

        Raises:
            UnsupportedError: The target has no probabilities.
        """
        self.target.require_probabilities("probability_samples", self.rows)
        return self.mean_samples

    @lazy
    def variance(self) -> Tensor:
        """Variance of the target y, `[B, C]`, observation noise included; p (1 − p) for each class or label.

        Raises:
            UnsupportedError: The likelihood does not say what a prediction means for the target.
        """
        return self._shown(self.target.variance(self.rows))

    @property
    def std(self) -> Tensor:
        """Standard deviation of the target y, `[B, C]`: the square root of `variance`.

        Raises:
            UnsupportedError: The likelihood does not say what a prediction means for the target.
        """
        return self.variance.sqrt()

    @lazy
    def entropy(self) -> Tensor:
        """Entropy of the predictive distribution of y, in nats, `[B]`; differential entropy for a real y.

        Raises:
            UnsupportedError: The likelihood does not say what a prediction means for the target.
        """
        return unrolled(self.target.entropy(self.rows), self._positions)

    @lazy
    def decomposition(self) -> Decomposition:
        """Aleatoric and epistemic parts of the uncertainty about y, as variances and as entropies.

        `decomposition.mutual_information` is the BALD score of active learning. Regression: exact. Bernoulli: by
        quadrature. Classification: exact for the Dirichlet of `link_approx="bridge"` and `"bridge_norm"`, otherwise
        from samples of f. With `pred_type="nn"`: from the samples. Equal seeds of `generator` give equal results.

        Raises:
            UnsupportedError: The likelihood does not say what a prediction means for the target.
        """
        parts = self.target.decomposition(self.rows)
        return parts.map(lambda part: self._shown(part) if part.ndim == 2 else unrolled(part, self._positions))

    def interval(self, level: float = 0.95, *, observation_noise: bool = True) -> tuple[Tensor, Tensor]:
        """Central credible interval: its lower and upper ends, `[B, C]` each.

        In regression the interval is one for y, or for f without `observation_noise`; in classification it is one for
        the *probability* of each class or label. Quantiles are Gaussian where f is Gaussian (for labels carried through
        the sigmoid), otherwise those of the samples.

        Args:
            level: Probability of the interval, in (0, 1).
            observation_noise: Whether the interval is one for y rather than for f (regression).

        Raises:
            InvalidArgument: `level` is not in (0, 1).
            UnsupportedError: The likelihood does not say what a prediction means for the target.
        """
        if not 0 < level < 1:
            raise InvalidArgument(f"level={level}; it must lie in (0, 1), e.g. 0.95.")
        with autograd_mode(), torch.set_grad_enabled(self.create_graph):
            lower, upper = self.target.interval(self.rows, level, observation_noise=observation_noise)
            return self._shown(lower), self._shown(upper)

    def distribution(self, of: Literal["target", "latent", "probabilities"] = "target") -> Distribution:
        """The predictive as an object of `torch.distributions`.

        `"target"`, the distribution of y: `MultivariateNormal` with observation noise for regression (`Normal` with
        `diagonal_output`), `Categorical` for classification, `Bernoulli` for labels.

        `"latent"`, the distribution of f: `MultivariateNormal`, or `Normal` with `diagonal_output`.

        `"probabilities"`: `Dirichlet`, for classification with the links `"bridge"` and `"bridge_norm"`.

        The batch shape is `[B]` (`Normal` and `Bernoulli`: `[B, C]`), or `[B, *tokens or pixels]`; with `joint` it is
        empty, and the event shape `[B·C]`. Where f is sampled, the Gaussians have the moments of the samples. For a
        mixture it is a `MixtureSameFamily` of the components' distributions, except for `Categorical` and `Bernoulli`.

        Args:
            of: `"target"`, `"latent"` or `"probabilities"`.

        Raises:
            InvalidArgument: `of` is another name.
            UnsupportedError: There is no such distribution for this likelihood, link or predictive.
            CurvatureError: The covariance is singular.
        """
        distributions = {
            "target": self.target.distribution,
            "latent": lambda rows: mixture_of([normal_of(part.latent) for part in rows.components], rows.weights),
            "probabilities": self.target.probability_distribution,
        }
        if of not in distributions:
            raise InvalidArgument(f"of={of!r}; accepted are 'target', 'latent' and 'probabilities'.")
        with autograd_mode(), torch.set_grad_enabled(self.create_graph):
            return distributions[of](self.rows)

    # What targets read.

    @property
    def rows(self) -> Prediction:
        """The same with quantities as rows `[B, C]`, one per input, token or pixel, whatever the network's layout."""
        return self if self.as_rows else self._rows

    @lazy
    def _rows(self) -> Prediction:
        return replace(self, as_rows=True)

    @property
    def positions(self) -> tuple[int, ...]:
        """Dimensions of the positions, empty for outputs `[B, C]`; of a quantity that was computed already."""
        return self.components[0].positions

    @property
    def sampled(self) -> bool:
        """True if the latents of a component are known by samples alone."""
        return any(part.sampled for part in self.components)

    def draws(self) -> torch.Generator | None:
        """A source of randomness, in the same state at every call; None for the global one."""
        return self.components[0].draws()

    def average(self, values: Sequence[Tensor]) -> Tensor:
        """Σ_k π_k v_k, of rows."""
        return values[0] if len(values) == 1 else average(values, self.weights)

    def moments(self, means: Sequence[Tensor], variances: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and (co)variance of the mixture, in the components' shapes."""
        return mixed_moments(list(zip(means, variances, strict=True)), self.weights)

    def chosen(self, samples: Sequence[Tensor]) -> Tensor:
        """Samples `[S, …]`: the s-th one of the component that was chosen for it."""
        if self.drawn_components is None:
            return samples[0]
        stacked = _stacked(samples)
        return stacked[
            self.drawn_components().to(stacked.device), torch.arange(stacked.shape[1], device=stacked.device)
        ]

    def gaussian_interval(self, variances: Sequence[Tensor], level: float) -> tuple[Tensor, Tensor]:
        """Central quantiles of the mixture of Gaussians with the latents' means and these variances, rows `[B, C]`."""
        means = [part.latent_mean for part in self.components]
        if len(variances) == 1:
            half = variances[0].clamp(min=0).sqrt() * torch.erfinv(variances[0].new_tensor(level)) * 2**0.5
            return means[0] - half, means[0] + half
        m, v = _stacked(means), _stacked(variances)
        lower, upper = (quantile(m, v, self.weights, 0.5 + half) for half in (-0.5 * level, 0.5 * level))
        return lower, upper

    # Shapes.

    @property
    def _positions(self) -> tuple[int, ...]:
        return () if self.as_rows else self.positions

    def _shown(self, rows: Tensor, lead: int = 0) -> Tensor:
        """Rows `[*lead, B, C]` in the shape of the network's outputs."""
        if self.as_rows:
            return rows
        return in_users_layout(unrolled(rows, self.positions, lead), self.channel_dim, lead)


def _stacked(values: Sequence[Tensor]) -> Tensor:
    """Values of all components, `[K, …]`, on the device of the first."""
    return torch.stack([value.to(values[0]) for value in values])


def laid_out(gaussian: GaussianOutputs, channel_dim: int, *, joint: bool = False) -> tuple[Tensor, Tensor]:
    """Mean and covariance of a Gaussian over rows, in the shape of the network's outputs."""
    if joint:
        covariance = gaussian.shown
        return gaussian.mean.reshape(covariance.shape[:-1]), covariance
    mean, covariance = (unrolled(part, gaussian.positions) for part in (gaussian.mean, gaussian.shown))
    if gaussian.is_diagonal:
        covariance = in_users_layout(covariance, channel_dim)
    return in_users_layout(mean, channel_dim), covariance


# Outputs under one posterior.

GeneratorSource = Callable[[], "torch.Generator | None"]
"""The source of randomness of one quantity; None for the global one."""


OutputSampler = Callable[[int, "torch.Generator | None"], OutputRows]
"""Samples `[n, B, C]` from a number of them and a source of randomness."""


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
        users_latents, users_targets: Samples of f and of E[y | f] that a user's class draws by itself; None for none.
        require_same: Refuses inputs that were overwritten since the call: what reads them asks it first.
    """

    source: GaussianSource | SampleSource
    likelihood: Likelihood
    sigma_noise: Tensor
    options: PredictOptions
    draws: GeneratorSource
    users_latents: OutputSampler | None = None
    users_targets: OutputSampler | None = None
    require_same: Callable[[], None] = lambda: None

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
        known = self._read_already("latent", "marginals", "_centred", "_full_covariance", "_drawn", "_along_axes")
        return (self._mean if known is None else known).positions

    @property
    def outputs(self) -> Tensor | None:
        """Indices of these among the network's outputs, `[B, K]`; None for all."""
        return None if self.options.choice is None else self._mean.outputs

    def _read_already(self, *names: str) -> Any:
        """The first of these quantities that was read, and so costs no pass of the network; None if none was."""
        return next((known for name in names if (known := vars(self).get(name)) is not None), None)

    # Latents.

    @lazy
    def _mean(self) -> OutputRows:
        if isinstance(self.source, SampleSource):
            return replace(self._drawn, values=self._drawn.values.mean(0))
        known = self._read_already("latent", "_along_axes", "_sampling_gaussian", "marginals", "_centred")
        if known is not None:
            return OutputRows(known.mean, known.positions, known.outputs)
        self.require_same()
        return self.source.mean()

    @property
    def latent_mean(self) -> Tensor:
        """`[B, C]`; alone it costs one forward pass (refined: one Jacobian more)."""
        return self._mean.values

    @lazy
    def latent(self) -> GaussianOutputs:
        """Gaussian of the network's outputs, in the form that was asked for."""
        return self._gaussian(self.options.form)

    @lazy
    def marginals(self) -> GaussianOutputs:
        """Gaussian of the outputs with variances alone."""
        return self._gaussian("diagonal")

    @lazy
    def _centred(self) -> GaussianOutputs:
        """Gaussian of the outputs with the variances of these less their mean."""
        return self._gaussian("centred")

    @lazy
    def _full_covariance(self) -> GaussianOutputs:
        return self.latent if self.options.form == "full" else self._gaussian("full")

    @property
    def per_row(self) -> GaussianOutputs:
        """Gaussian of the outputs of every row alone: with `diagonal_output` variances, else covariances."""
        return self.marginals if self.options.form == "diagonal" else self._full_covariance

    @lazy
    def _sampling_gaussian(self) -> GaussianOutputs:
        """The same as `latent` to draw from, with (co)variances summed in float64: in float32 a pass of its own.

        Where the link draws, or everything is float64, `latent` has them.
        """
        there = self._link_draws or self.sigma_noise.dtype == wide_dtype(self.sigma_noise.device)
        return self.latent if there else self._gaussian(self.options.form, wide=True)

    @lazy
    def _along_axes(self) -> GaussianAlongAxes | None:
        """The same without covariances, where those of all rows have the same axes."""
        if isinstance(self.source, SampleSource) or self.options.form != "full":
            return None
        self.require_same()
        return self.source.along_axes()

    @property
    def _link_draws(self) -> bool:
        """True if the link draws from covariances."""
        return self.options.link == LinkApprox.MC

    def _gaussian(self, form: LatentForm, *, wide: bool = False) -> GaussianOutputs:
        if isinstance(self.source, SampleSource):
            return moments_of(self._drawn, form, self.options.group_size)
        if form == "full" and self._link_draws and self._along_axes is not None:
            return self._along_axes.with_covariance()
        self.require_same()
        return self.source.gaussian(form, wide=wide or self._link_draws)

    @lazy
    def latent_variance(self) -> Tensor:
        """Variances of the outputs, without observation noise, `[B, C]`."""
        known = self.latent if "latent" in self.__dict__ else self.marginals
        return known.variance.to(known.mean)

    @lazy
    def _drawn(self) -> OutputRows:
        self.require_same()
        if self.users_latents is not None:
            return self.users_latents(self.options.n_samples, self.draws())
        if isinstance(self.source, SampleSource):
            return self.source.samples(self.options.n_samples, self.draws())
        gaussian = self._along_axes or self._sampling_gaussian
        return OutputRows(gaussian.sample(self.options.n_samples, self.draws()), gaussian.positions, gaussian.outputs)

    @property
    def latent_samples(self) -> Tensor:
        """`[S, B, C]`."""
        return self._drawn.values

    # Targets.

    @lazy
    def mean(self) -> Tensor:
        """E[y], `[B, C]`: by the link, or that of the latents, or over samples [Redux, appendix B, Monte Carlo]."""
        likelihood, joint = self.likelihood, self.options.form == "joint"
        if likelihood.target.mean_is_latent:
            return self.latent_mean
        own = self.users_latents or self.users_targets
        if self.sampled or (self._link_draws and own is not None) or (self._target_draws and joint):
            return self.mean_samples.mean(0)
        if likelihood.moment_prediction:
            return self.target_moments.mean
        of_centred = likelihood.target.centred_link(likelihood, self.options.link)
        if of_centred is not None:
            return likelihood.predict(centred(self._centred.mean), against_others(self._centred.covariance), of_centred)
        if self._target_draws and _predicts_by_links(likelihood) and self._along_axes is not None:
            return average_response(self._along_axes, likelihood.inverse_link, self.options.n_samples, self.draws())
        gaussian = self.link_input
        return likelihood.predict(
            gaussian.mean, gaussian.covariance, self.options.link, self.options.n_samples, self.draws()
        )

    @lazy
    def target_moments(self) -> TargetMoments:
        """Moments of y, where the target knows them."""
        return self.likelihood.target.moments_under(self.link_input, self.likelihood)

    @property
    def link_input(self) -> GaussianOutputs:
        """Gaussian of the outputs in the form that E[y] is computed from."""
        if self.likelihood.target.reads_variances(self.likelihood, self.options.link):
            return self.marginals
        return self.per_row if self._target_draws else self._full_covariance

    @property
    def _target_draws(self) -> bool:
        """True if the link draws, and E[y] is by the link."""
        return self._link_draws and not self.likelihood.target.by_rows(self.likelihood, self.options.link)

    @lazy
    def mean_samples(self) -> Tensor:
        """Samples of E[y | f], `[S, B, C]`."""
        if self.users_targets is not None:
            self.require_same()
            return self.users_targets(self.options.n_samples, self.draws()).values
        return self.likelihood.inverse_link(self.latent_samples)

    @lazy
    def decomposition(self) -> Decomposition:
        """Aleatoric and epistemic parts."""
        return self.likelihood.target.decompose(self)

    @lazy
    def log_concentrations(self) -> Tensor | None:
        """Logarithms of the concentrations of the link's Dirichlet, `[B, C]`; None if it has none."""
        concentrations = LINKS[self.options.link].log_concentrations
        if concentrations is None or self.sampled:
            return None
        return concentrations(self._full_covariance.mean, self._full_covariance.covariance)


def _predicts_by_links(likelihood: Likelihood) -> bool:
    """True if no user's class says what a link makes of the latents."""
    return is_ours(next(base for base in type(likelihood).__mro__ if "predict" in vars(base)))


# Predictions of several posteriors as one: the mixture of their predictive distributions.

Summary = Tensor | tuple[Tensor, Tensor]


def mixed(predictions: Sequence[Summary], weights: Tensor, channel_dim: int = -1) -> Summary:
    """The mixture Σ_k π_k p_k [Mixtures, eq. 9], or its first two moments."""
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
    """
    mean = average([m for m, _ in moments], weights)
    within = average([c for _, c in moments], weights)
    steps = [m.to(mean) - mean for m, _ in moments]
    if within.ndim == mean.ndim:
        return mean, within + average([step.square() for step in steps], weights)
    if mean.ndim > 1:
        steps = [step.movedim(channel_dim, -1) for step in steps]
    elif within.ndim == 3:  # of outputs `[B]`
        steps = [step.unsqueeze(-1) for step in steps]
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
