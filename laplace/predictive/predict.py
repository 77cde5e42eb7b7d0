"""How predictions are asked for: of a posterior or a mixture, linearised or by samples, also of users' classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from numbers import Number, Real
from typing import Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core import checks
from laplace.core.batch import Inputs
from laplace.core.cached import version
from laplace.core.checks import named
from laplace.core.gaussian import GaussianOutputs
from laplace.core.overrides import PREDICTIONS, wrong_shape
from laplace.core.positions import OutputChoice, OutputRows, in_users_layout, rows_of, unrolled
from laplace.core.precision_policy import widened
from laplace.core.progress import DataBar
from laplace.core.random_numbers import drawn_seed, seeded
from laplace.enums import PredType
from laplace.errors import (
    ApproximationWarning,
    GradientWarning,
    InvalidArgument,
    InvalidData,
    InvalidType,
    UnsupportedError,
    warn,
)
from laplace.posterior.posterior import Posterior
from laplace.predictive.latent import GaussianSource, LinearisedOutputs, SampleSource
from laplace.predictive.options import PredictOptions, check_model_kwargs, refuse_model_kwargs
from laplace.predictive.prediction import Draw, Draws, PosteriorOutputs, Prediction, laid_out
from laplace.predictive.tilted import TiltedOutputs


def is_loader(x: Any) -> bool:
    """True of an iterable of batches: any but a tensor, tuple or mapping, which are inputs, and arrays and numbers."""
    if isinstance(x, Tensor | tuple | str | bytes) or not isinstance(x, Iterable) or batches.keys(x) is not None:
        return False
    if batches.are_graphs(x) or callable(getattr(x, "to", None)):
        return False  # what is moved to a device is an input
    return getattr(x, "__array__", None) is None and not (isinstance(x, list) and x and isinstance(x[0], Real | str))


_AT_ONCE = 500
"""Inputs of a tensor that are predicted at once."""


def in_parts(x: Any, name: str, at_once: int = _AT_ONCE) -> Iterator[Inputs]:
    """The inputs of a loader, or of a tensor, tuple or mapping, a few hundred at a time."""
    if x is None or isinstance(x, Number):
        raise InvalidType(f"{name}={x!r}; give a tensor, tuple or mapping of inputs, or a loader of batches.")
    for part in (batches.inputs(batch) for batch in x) if is_loader(x) else (x,):
        count = batches.size(part, "")
        step = at_once if batches.can_split(part, count) else max(1, count)
        for start in range(0, count, step):
            yield part if count <= step else batches.select(part, slice(start, start + step), count)


def predicted_batches(
    predict: Callable[[Inputs, PredictOptions, dict[str, Any]], Prediction],
    loader: Iterable[Any],
    options: PredictOptions,
    model_kwargs: dict[str, Any],
    *,
    progress_bar: bool,
) -> Iterator[Prediction]:
    """Predictions at the inputs of every batch of a loader, when they are asked for; nothing is kept of former ones."""
    if options.joint:
        raise InvalidArgument("joint=True is over all inputs, which a loader gives a few at a time; give a tensor.")
    if isinstance(options.outputs, Tensor) and options.outputs.ndim > 1:
        raise InvalidArgument(
            "outputs= with indices per row fits one batch only; for a loader give indices [K], or a number."
        )

    def batch_by_batch() -> Iterator[Prediction]:
        bar = DataBar("predict", loader, shown=progress_bar)
        for number, batch in enumerate(loader):
            with named(f"batch {number}"):
                x = batches.inputs(batch)
                prediction = predict(x, options, model_kwargs)
            yield prediction
            bar.add(batches.size(x, ""))
        bar.close()

    return batch_by_batch()


# Predictions of one posterior.


@dataclass(frozen=True, eq=False)
class Predictor:
    """A posterior as it is asked for predictions.

    Attributes:
        posterior: Fitted, with the object that may have methods of users.
        through_x: Whether predictions can be differentiated with respect to the inputs.
    """

    posterior: Posterior
    through_x: bool = False

    @property
    def graph(self) -> bool:
        """True if predictions are differentiable: in the inputs, or in hyper-parameters that ask for it."""
        return self.through_x or self.posterior.keeps_graph

    def call(self, x: Inputs, options: PredictOptions, model_kwargs: dict[str, Any]) -> Any:
        """Means, with variances where the likelihood has them, in the shape of the network's outputs."""
        posterior = self.posterior
        likelihood, channel_dim, kind = posterior.likelihood, posterior.channel_dim, self._kind(options)
        if options.observation_noise and not likelihood.has_noise:
            raise InvalidArgument(f"observation_noise=True, but likelihood={likelihood.name!r} has no noise.")
        if kind == PredType.NN:
            options = replace(options, joint=False, diagonal_output=True)
        rows = self._predicted(x, kind, self._for_network(options), lambda: options.generator, model_kwargs)
        prediction = Prediction.from_outputs(rows, channel_dim)
        if likelihood.moment_prediction:
            return _finite(prediction.mean, prediction.variance)
        if not likelihood.latent_prediction or (options.fitting and not likelihood.has_noise):
            return prediction.mean
        gaussian = prediction.latent
        if options.observation_noise:
            gaussian = gaussian.plus_noise(prediction.sigma_noise)
        return laid_out(gaussian, channel_dim, joint=options.joint)

    def predict(self, x: Inputs, options: PredictOptions, model_kwargs: dict[str, Any]) -> Prediction:
        """One object; each of its quantities is computed when it is first read."""
        kind, options, posterior = self._kind(options), self._for_network(options), self.posterior
        posterior.check_unchanged()
        draws = replayed(options.generator, posterior.hypers.device)
        rows = replace(self._predicted(x, kind, options, draws, model_kwargs), require_same=_same_as_now(x))
        return Prediction.from_outputs(rows, posterior.channel_dim)

    def samples(self, name: str, x: Inputs, options: PredictOptions, model_kwargs: dict[str, Any]) -> Tensor:
        """Samples of f (`functional_samples`) or of E[y | f] (`predictive_samples`), in the network's layout."""
        posterior, of_targets = self.posterior, name == "predictive_samples"
        kind, options = self._kind(options), self._for_network(options)
        if of_targets and posterior.overrides("functional_samples"):
            draw = users_samples(posterior, "functional_samples", x, kind, options, model_kwargs)
            rows = draw(options.n_samples, options.generator)
            f = unrolled(rows.values, rows.positions, 1)
        else:
            outputs = self._outputs(x, kind, options, lambda: options.generator, model_kwargs)
            f = unrolled(outputs.latent_samples, outputs.positions, 1)
        return in_users_layout(posterior.likelihood.inverse_link(f) if of_targets else f, posterior.channel_dim, 1)

    def _kind(self, options: PredictOptions) -> PredType:
        return options.kind(self.posterior.choices.pred_types)

    def _for_network(self, options: PredictOptions) -> PredictOptions:
        """The options with the outputs of this network."""
        posterior = self.posterior
        options, likelihood = options.for_network(posterior.channel_dim), posterior.likelihood
        if options.choice is None:
            return options
        if not likelihood.some_outputs:
            raise UnsupportedError(
                f"outputs= with likelihood={likelihood.name!r}, which reads the outputs of a datum together: ask for "
                "all of them. A likelihood of your own allows it by some_outputs = True."
            )
        if posterior.overrides(*PREDICTIONS[1:]):  # besides `__call__`, which is not asked here
            raise UnsupportedError(
                f"outputs= with a class that defines one of {', '.join(PREDICTIONS[1:])}, which predict all outputs: "
                "leave it out, and select them from the result."
            )
        return options

    def _predicted(
        self, x: Inputs, kind: PredType, options: PredictOptions, draws: Draws, model_kwargs: dict[str, Any]
    ) -> PosteriorOutputs:
        """The prediction at x, with what users' classes override of it."""
        rows = self._outputs(x, kind, options, draws, model_kwargs)
        if not self.posterior.overrides(*PREDICTIONS):
            return rows
        return users_outputs(self.posterior, rows, x, kind, model_kwargs)

    def _outputs(
        self, x: Inputs, kind: PredType, options: PredictOptions, draws: Draws, model_kwargs: dict[str, Any]
    ) -> PosteriorOutputs:
        """The prediction at x without users' own samples and variances at given inputs."""
        if kind != PredType.NN:
            refuse_model_kwargs(model_kwargs)
            source = self.linearised(x, options.choice, options.group_size)
        else:
            source = self._sampled(x, options, model_kwargs)
        sigma = self.posterior.noise_of_targets
        sigma = sigma if source.create_graph else sigma.detach()
        sigma = sigma if options.choice is None else options.choice.noise(sigma)
        return PosteriorOutputs(source, self.posterior.likelihood, sigma, options, draws)

    def linearised(
        self, x: Inputs, choice: OutputChoice | None = None, group_size: int | None = None
    ) -> LinearisedOutputs | TiltedOutputs:
        """Outputs of the linearised network: all, or those of a choice; jointly all inputs, or those of a group."""
        posterior, graph = self.posterior, self.graph
        self._look_at(x)
        with torch.set_grad_enabled(graph):
            precision = posterior.predictive_precision()
        source = LinearisedOutputs(posterior, precision, x, graph, self.through_x, choice, group_size)
        applied = posterior.applied
        if applied is None or applied.tilt is None:
            return source
        return TiltedOutputs(source, applied.tilt, alone=applied.is_network)

    def _sampled(self, x: Inputs, options: PredictOptions, model_kwargs: dict[str, Any]) -> SampleSource:
        """Outputs of the network at sampled weights."""
        from laplace.predictive.sampled import SampledOutputs, refuse_refined
        from laplace.predictive.tilted import TiltedSamples

        posterior, graph = self.posterior, self.graph
        check_model_kwargs(posterior.problem.module, model_kwargs)
        self._look_at(x)
        refuse_refined(posterior.refined_step, posterior.problem)
        more = x, model_kwargs, graph, self.through_x, options.choice
        with torch.set_grad_enabled(graph):
            source = SampledOutputs(posterior, posterior.sampler(), *more)
        applied = posterior.applied
        if applied is None or applied.tilt is None:
            return source
        return TiltedSamples(source, applied.tilt, alone=applied.is_network)

    def _look_at(self, x: Inputs) -> None:
        """Warns of gradients that the prediction will not have, of data that are coupled, and of a noise left at 1."""
        warn_of_default_noise(self.posterior)
        if not isinstance(x, Collection):
            return  # what is no collection is refused where it is read
        if self.posterior.data is not None:
            self.posterior.data.watch.warn_of_coupling(self.posterior.model, x)
        if self.through_x or not torch.is_grad_enabled() or self.posterior.cache.gradient_seen:
            return
        if any(tensor.requires_grad for tensor in batches.tensors(x)):
            self.posterior.cache.gradient_seen = True  # many hand such inputs over in every prediction
            warn(
                "the inputs require a gradient, which the prediction does not have: enable_backprop is False. Set "
                "la.enable_backprop = True, or give x.detach().",
                GradientWarning,
            )


_COMPARED = 2**18
"""Entries of a tensor of inputs whose values are compared, at most."""


def _same_as_now(x: Inputs) -> Callable[[], None]:
    """Refuses, when it is called, inputs that were written to since: a prediction reads them when it is asked.

    PyTorch counts its own writes. Of others, through NumPy or `.data`, values tell: all of them, or evenly spaced ones.
    """
    if not checks.numbers_are_known() or not isinstance(x, Collection):  # what is none is refused where it is read
        return lambda: None
    before = [(tensor, version(tensor), _some_values(tensor).clone()) for tensor in batches.tensors(x)]

    def require_same() -> None:
        now = batches.tensors(x)
        if len(now) != len(before) or not all(map(_is_same, now, before)):
            raise InvalidData(
                "the inputs of this prediction were overwritten after the call of la.predict(x), and it would be of "
                "what they are now. Read what you need of a prediction before you use the memory again, or give a "
                "copy: la.predict(x.clone())."
            )

    return require_same


def _is_same(tensor: Tensor, before: tuple[Tensor, int, Tensor]) -> bool:
    former, count, values = before
    if tensor is not former or version(tensor) != count:
        return False
    now = _some_values(tensor)
    return torch.equal(values, now) or torch.equal(values.nan_to_num(), now.nan_to_num())  # NaN does not equal itself


def _some_values(tensor: Tensor) -> Tensor:
    """Values, evenly spaced; none of a device, which would be waited for, or where no part is at hand."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return torch.empty(0)
    if tensor.numel() > _COMPARED:
        if not tensor.is_contiguous():
            return torch.empty(0)
        return tensor.view(-1)[:: -(-tensor.numel() // _COMPARED) | 1]  # an odd step meets all columns of most images
    return tensor


def replayed(generator: torch.Generator | None, device: torch.device) -> Draws:
    """Generators that all start where the given one is now, or, without one, where the global seed leads at first."""
    if generator is not None:
        state = generator.get_state()
        torch.randint(2, (1,), generator=generator, device=generator.device)  # the next prediction draws others

        def same() -> torch.Generator:
            copy = torch.Generator(device=generator.device)
            copy.set_state(state)
            return copy

        return same
    seeds: list[int] = []

    def seeded() -> torch.Generator:
        if not seeds:
            seeds.append(drawn_seed())
        return torch.Generator(device=device).manual_seed(seeds[0])

    return seeded


# Says when the noise of a regression was left at 1 where the residuals are of another size.


_LARGEST_RATIO = 5.0
"""Of the noise and the residuals, or of the residuals and the noise."""

_FEWEST = 10
"""Observed values whose root mean square tells a size: of ten normal ones it is below 0.2 twice in a million."""


def warn_of_default_noise(posterior: Posterior) -> None:
    """Warns, once per fit, where σ is 1 and the residuals of the training data are far from it.

    It is asked when something first depends on σ, a prediction or a tuning of the prior alone, and not by `fit`, after
    which many choose σ.
    """
    if not posterior.likelihood.has_noise or posterior.cache.noise_seen or posterior.data is None:
        return
    if not checks.numbers_are_known() or posterior.overrides("sigma_noise"):
        return
    posterior.cache.noise_seen = True
    fit = posterior.map_fit
    squares = posterior.likelihood.mean_squares(widened(fit.loss_terms), fit.n_observed, fit.n_outputs)
    if squares is None or fit.n_data * fit.n_outputs / len(squares) < _FEWEST:
        return
    sigma = posterior.hypers.sigma_noise.detach()
    if not bool((sigma == 1).all()):
        return
    spreads = (squares if sigma.ndim else squares.mean(0, keepdim=True)).sqrt().tolist()
    spread = max(spreads, key=lambda each: abs(math.log(each)) if each > 0 else 0.0)
    unlike = unlike_outputs(posterior, sigma)
    if spread == 0 or 1 / _LARGEST_RATIO <= spread <= _LARGEST_RATIO:  # a loss of 0 was never summed
        if unlike:
            warn(f"{unlike}.", ApproximationWarning)
        return
    wrong = f"{1 / spread:.3g} times as large" if spread < 1 else f"{spread:.3g} times smaller"
    warn(
        f"sigma_noise is 1, its default, and the root mean square of the residuals is {spread:.3g}: the noise that "
        f"the posterior and its predictions assume is {wrong}. Give sigma_noise=, tune it by "
        "la.optimize_hyperparameters(('prior_precision', 'sigma_noise')) or, on validation data, by "
        "la.calibrate(val_loader), or standardise targets in units of their own."
        + (f" And {unlike}." if unlike else ""),
        ApproximationWarning,
    )


_UNLIKE = 3.0
"""Ratio of two outputs' residuals above which one noise suits at most one of them."""


def unlike_outputs(posterior: Posterior, sigma_noise: Tensor, argument: str = "sigma_noise") -> str:
    """Words that one noise, 0-dim, serves outputs whose residuals in the fit are of unlike size; else none.

    `argument` is the one by which several are given.
    """
    fit = posterior.map_fit
    squares = posterior.likelihood.mean_squares(widened(fit.loss_terms), fit.n_observed, fit.n_outputs)
    return "" if squares is None else unlike_squares(squares, fit.n_data, sigma_noise, argument)


def unlike_squares(squares: Tensor, n_data: float, sigma_noise: Tensor, argument: str = "sigma_noise") -> str:
    """The same of residuals with mean squares `[C]` of so many data."""
    if sigma_noise.ndim or n_data < _FEWEST or not float(squares.max()) > _UNLIKE**2 * float(squares.min()):
        return ""
    low, high = (float(end.sqrt()) for end in squares.aminmax())
    return (
        f"one noise serves {len(squares)} outputs whose residuals (root mean squares) lie between {low:.2g} and "
        f"{high:.2g}, so that intervals are too wide for some and too narrow for others: give one per output from "
        f"the start, {argument}=torch.ones({len(squares)}), or standardise the targets"
    )


def noise_like(squares: Tensor, former: Tensor) -> Tensor:
    """Noises `[C]` of the size of the residuals, whose mean squares these are; the former where those have no size."""
    sizes = squares.sqrt()
    return torch.where((sizes > 0) & sizes.isfinite(), sizes.to(former), former)


def _finite(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of y, if both are finite: an inverse link may take outputs beyond the range of their dtype."""
    checks.require(
        checks.are_finite(mean, variance),
        lambda: InvalidData(
            "means or variances of the targets are NaN or infinite; look at the inputs. Where those are right the "
            "outputs, or their variances, are beyond the range of the dtype: raise prior_precision."
        ),
    )
    return mean, variance


# What users' classes predict at given inputs.


def users_outputs(
    posterior: Posterior, rows: PosteriorOutputs, x: Inputs, kind: PredType, model_kwargs: dict[str, Any]
) -> PosteriorOutputs:
    """The library's prediction `rows` with users' own samples, and their own variances of the linearised outputs."""
    source = rows.source
    if isinstance(source, GaussianSource) and posterior.overrides("functional_variance_fast"):
        source = _UsersVariances(posterior, source, x)
    samples = {
        name: users_samples(posterior, name, x, kind, rows.options, model_kwargs)
        for name in ("functional_samples", "predictive_samples")
        if posterior.overrides(name)
    }
    latents, targets = samples.get("functional_samples"), samples.get("predictive_samples")
    return replace(rows, source=source, users_latents=latents, users_targets=targets)


def users_samples(
    posterior: Posterior, name: str, x: Inputs, kind: PredType, asked: PredictOptions, model_kwargs: dict[str, Any]
) -> Draw:
    """A user's own `functional_samples` or `predictive_samples` at x; `asked` is the form of the covariance."""
    options = dict(model_kwargs)
    # What has its default value is not passed on: a user's method need not know it.
    if kind != PredType.NN:
        options |= {"full": {}, "diagonal": {"diagonal_output": True}, "joint": {"joint": True}}[asked.form]
        options |= {} if asked.group_size is None else {"group_size": asked.group_size}
    pred_type = posterior.choices.pred_types.name(kind)

    def draw(n: int, generator: torch.Generator | None) -> OutputRows:
        with posterior.as_user_object() as la:
            samples = seeded(getattr(la, name), generator)(x, pred_type=pred_type, n_samples=n, **options)
            if not isinstance(samples, Tensor) or samples.ndim < 3 or len(samples) != n:
                raise wrong_shape(la, name, samples, f"[{n}, B, C]")
        return rows_of(samples, posterior.channel_dim, 1)

    return draw


@dataclass(frozen=True, eq=False)
class _UsersVariances(GaussianSource):
    """Linearised outputs whose variances are those of a user's own `functional_variance_fast`."""

    posterior: Posterior
    source: GaussianSource
    x: Inputs

    @property
    def create_graph(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.source.create_graph

    def mean(self) -> OutputRows:
        return self.source.mean()

    def gaussian(self, form: str, *, wide: bool = False) -> GaussianOutputs:
        if form != "diagonal":
            return self.source.gaussian(form, wide=wide)
        with self.posterior.as_user_object() as la:
            moments = la.functional_variance_fast(self.x)
            if not isinstance(moments, tuple) or len(moments) != 2 or moments[0].shape != moments[1].shape:
                raise InvalidArgument(
                    f"functional_variance_fast of class {type(la).__name__} must return mean and variances, [B, C] "
                    "each."
                )
        mean, variance = (rows_of(part, self.posterior.channel_dim) for part in moments)
        return GaussianOutputs(mean.values, variance.values, mean.positions)
