"""How a posterior is asked for predictions: linearised or by sampled weights, with what a user's class overrides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core import checks
from laplace.core.batch import Inputs
from laplace.core.checks import named
from laplace.core.overrides import PREDICTIONS
from laplace.core.overwritten_inputs import same_as_now
from laplace.core.positions import OutputChoice, in_users_layout, unrolled
from laplace.core.progress import DataBar
from laplace.core.random_numbers import replayed
from laplace.enums import PredType
from laplace.errors import (
    GradientWarning,
    InvalidArgument,
    InvalidData,
    UnsupportedError,
    warn,
)
from laplace.posterior.noise import warn_of_default_noise
from laplace.posterior.posterior import Posterior
from laplace.predictive.latent import LinearisedOutputs, SampleSource
from laplace.predictive.options import PredictOptions, check_model_kwargs, refuse_model_kwargs
from laplace.predictive.prediction import GeneratorSource, PosteriorOutputs, Prediction, laid_out
from laplace.predictive.sampled import SampledOutputs, refuse_refined
from laplace.predictive.tilted import TiltedOutputs, TiltedSamples


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
        rows = replace(self._predicted(x, kind, options, draws, model_kwargs), require_same=same_as_now(x))
        return Prediction.from_outputs(rows, posterior.channel_dim)

    def samples(self, name: str, x: Inputs, options: PredictOptions, model_kwargs: dict[str, Any]) -> Tensor:
        """Samples of f (`functional_samples`) or of E[y | f] (`predictive_samples`), in the network's layout."""
        posterior, of_targets = self.posterior, name == "predictive_samples"
        kind, options = self._kind(options), self._for_network(options)
        if of_targets and posterior.overrides("functional_samples"):
            draw = posterior.users_samples("functional_samples", x, kind, options, model_kwargs)
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
        self, x: Inputs, kind: PredType, options: PredictOptions, draws: GeneratorSource, model_kwargs: dict[str, Any]
    ) -> PosteriorOutputs:
        """The prediction at x, with what users' classes override of it."""
        return self.posterior.with_users_outputs(
            self._outputs(x, kind, options, draws, model_kwargs), x, kind, model_kwargs
        )

    def _outputs(
        self, x: Inputs, kind: PredType, options: PredictOptions, draws: GeneratorSource, model_kwargs: dict[str, Any]
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


# Predictions at a loader's batches, of whatever predicts one batch.


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
