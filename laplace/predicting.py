"""Predictions as users call them, of a posterior over weights or a mixture of several."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core import overrides
from laplace.core.arguments import check_counts, checked
from laplace.core.batch import Inputs
from laplace.core.extensions import NAMES as EXTENSIONS
from laplace.core.gaussian import GaussianOutputs
from laplace.core.positions import OutputChoice, WhichOutputs
from laplace.core.random_numbers import check_generator
from laplace.enums import LinkApprox, LinkName, PredType, PredTypeName
from laplace.errors import InvalidArgument, InvalidType
from laplace.jacobian.jacobian import Jacobian
from laplace.network.model_guard import autograd_mode, own_precision
from laplace.predictive.options import WEIGHT_SPACE, PredictiveNames, PredictOptions
from laplace.structures.precision import Form, drawn

if TYPE_CHECKING:
    from laplace.comparison import Comparison
    from laplace.predictive.predict import Predictor
    from laplace.predictive.prediction import Prediction
    from laplace.tuning.group import PosteriorGroup

_BRIDGES = {"probly.predictor": "laplace.integrations.probly"}
"""Modules of other packages that ask for predictions, and the bridge that says what these are for them, by name."""

_OTHER_NAMES = {
    "predict_proba": "la(x) returns the class probabilities, [B, C].",
    "predict_log_proba": "la(x).log() is of the class probabilities, [B, C].",
    "predict_mean": "la.predict(x).mean is the mean of the target, [B, C].",
    "predict_std": "la.predict(x).std is the standard deviation of the target, [B, C].",
}
"""Names of other libraries, and what is meant here."""


class Predicting(ABC):
    """An object that predicts: a posterior over weights, or a mixture of several."""

    @abstractmethod
    def _call_with(self, x: Inputs, options: PredictOptions, model_kwargs: dict[str, Any]) -> Any:
        """Value of `la(x, ...)`."""

    @abstractmethod
    def predict_batch(self, x: Inputs, options: PredictOptions, model_kwargs: dict[str, Any]) -> Prediction:
        """Value of `la.predict(x, ...)` with checked options: x is one batch of inputs, whatever its type."""

    @abstractmethod
    def _samples_with(self, name: str, x: Inputs, options: PredictOptions, model_kwargs: dict[str, Any]) -> Tensor:
        """Value of `la.functional_samples(x, ...)` or `la.predictive_samples(x, ...)`."""

    @property
    @abstractmethod
    def _group(self) -> PosteriorGroup:
        """The posterior, or those of a mixture with their weights, as they are now."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Hint for a name of another library; what a property has raised, once more."""
            if name in _OTHER_NAMES:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}: {_OTHER_NAMES[name]}")
            if name in EXTENSIONS:
                kind = type(self).__name__
                raise AttributeError(f"{kind!r} object has no attribute {name!r}: laplace.{name}(la, ...).")
            return object.__getattribute__(self, name)

    @checked
    def __call__(
        self,
        x: Inputs,
        pred_type: PredTypeName = PredType.GLM,
        joint: bool = False,
        link_approx: LinkName = LinkApprox.PROBIT,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        fitting: bool = False,
        *,
        observation_noise: bool = False,
        outputs: WhichOutputs = None,
        group_size: int | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Predictive distribution at x: class probabilities, or mean and variance.

        Classification returns probabilities `[B, C]`. Regression (and reward modelling) returns `(mean, variance)` of
        the network's outputs f: mean `[B, C]` with covariances `[B, C, C]`, or variances `[B, C]` with
        `diagonal_output`; with `joint` one Gaussian over all inputs, `[B·C]` and `[B·C, B·C]`; with `joint` and
        `group_size=n` one per group, `[B/n, n·C]` and `[B/n, n·C, n·C]`. The variance is that of f, plus σ² with
        `observation_noise`. `"poisson"`, `"heteroscedastic"` and `"mean_log_variance"` return mean and
        variance of y, `[B, C]` each.

        For a network with an output per token or pixel, `[B, T, C]` or (with `channel_dim=1`) `[B, C, H, W]`, means,
        variances and probabilities have that shape, and covariances are `[B, T, C, C]` or `[B, H, W, C, C]`.

        Args:
            x: Inputs of B data: a tensor, tuple or mapping.
            pred_type: `"glm"`: the linearised network (Immer et al., 2021), recommended. `"nn"`: sampled weights.
            joint: Also compute covariances between inputs; in classification, `link_approx="mc"` draws joint samples.
            link_approx: Link approximation, from a Gaussian over f to probabilities: `"probit"`, `"probit_centred"` (of
                logits less their mean), `"mc"`, `"bridge"`, `"bridge_norm"` or `"delta"`. Ignored by `pred_type="nn"`,
                which always samples.
            n_samples: Number of Monte-Carlo samples, where samples are drawn.
            diagonal_output: Compute variances of the outputs only, no covariances between them.
            generator: Random generator; equal seeds give bitwise equal results.
            fitting: In reward modelling: return preference probabilities of pairs.
            observation_noise: Add σ² to the variance (regression).
            outputs: Which of the C outputs to predict: indices `[K]`; or indices per input, `[B, K]` (per token
                `[B, T, K]`); or an integer K for the K largest means, in descending order. Results have K in place of
                C, as if the network had no other outputs: probabilities are conditional on y being one of these K. None
                for all.
            group_size: n, with `joint`: consecutive groups of n inputs get a joint Gaussian each, without covariances
                between groups.
            **model_kwargs: Passed on to the model, with `pred_type="nn"`.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: An option is not accepted.
            ModelChangedError: The network was trained further after `fit`.
        """
        options = PredictOptions(
            pred_type, n_samples, diagonal_output, generator, joint, link_approx, outputs, group_size,
            fitting=fitting, observation_noise=observation_noise,
        )  # fmt: skip
        return self._call_with(x, options, model_kwargs)

    @overload
    def predict(  # pyright: ignore[reportOverlappingOverload]  (a tensor is iterable, too)
        self, x: Tensor | tuple[Any, ...] | Mapping[Any, Any], pred_type: PredTypeName = ..., joint: bool = ...,
        link_approx: LinkName = ..., n_samples: int = ..., diagonal_output: bool = ...,
        generator: torch.Generator | None = ..., *, outputs: WhichOutputs = ...,
        group_size: int | None = ..., progress_bar: bool = ..., **model_kwargs: Any,
    ) -> Prediction: ...  # fmt: skip

    @overload
    def predict(
        self, x: Iterable[Any], pred_type: PredTypeName = ..., joint: bool = ...,
        link_approx: LinkName = ..., n_samples: int = ..., diagonal_output: bool = ...,
        generator: torch.Generator | None = ..., *, outputs: WhichOutputs = ...,
        group_size: int | None = ..., progress_bar: bool = ..., **model_kwargs: Any,
    ) -> Iterator[Prediction]: ...  # fmt: skip

    @checked
    def predict(
        self,
        x: Any,
        pred_type: PredTypeName = PredType.GLM,
        joint: bool = False,
        link_approx: LinkName = LinkApprox.PROBIT,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        *,
        outputs: WhichOutputs = None,
        group_size: int | None = None,
        progress_bar: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """The predictive distribution at x as one object, whose quantities are computed when you first read them.

        `la.predict(x).mean`, `.variance`, `.entropy`, `.interval(0.95)`, …: see `Prediction`. Given a loader it returns
        an iterator with one such object per batch. Batches may have labels, `(x, y)`: only the inputs are used. Read
        what you need before the next batch, so that the memory of this one can be freed.

        Args:
            x: Inputs of B data: a tensor, tuple or mapping. Or a loader: any other iterable of batches, e.g. a list.
            pred_type: `"glm"`: the linearised network (Immer et al., 2021), recommended. `"nn"`: sampled weights.
            joint: Also compute covariances between inputs.
            link_approx: Link approximation, from a Gaussian over f to probabilities: `"probit"`, `"probit_centred"` (of
                logits less their mean), `"mc"`, `"bridge"`, `"bridge_norm"` or `"delta"`. Ignored by `pred_type="nn"`,
                which always samples.
            n_samples: Number of Monte-Carlo samples, where samples are drawn.
            diagonal_output: Compute variances of the outputs only, no covariances between them.
            generator: Random generator. Its state is copied, so that results do not depend on the order in which you
                read quantities; it is advanced once.
            outputs: Which of the outputs to predict, as in `__call__`; `Prediction.outputs` gives their indices.
            group_size: Number of inputs in a group that gets a joint Gaussian, as in `__call__`.
            progress_bar: Show a progress bar over the batches of a loader.
            **model_kwargs: Passed on to the model, with `pred_type="nn"`.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: An option is not accepted, such as `joint` with a loader.
            InvalidData: A batch of a loader has no inputs.
            ModelChangedError: The network was trained further after `fit`; also raised when a quantity is read.
        """
        from laplace.predictive.predict import predicted_batches

        options = PredictOptions(
            pred_type, n_samples, diagonal_output, generator, joint, link_approx, outputs, group_size
        )  # fmt: skip
        for asking, bridge in _BRIDGES.items():
            if asking in sys.modules:
                import_module(bridge)
        if batches.is_loader(x):
            return predicted_batches(self.predict_batch, x, options, model_kwargs, progress_bar=progress_bar)
        return self.predict_batch(x, options, model_kwargs)

    @checked
    def functional_samples(
        self,
        x: Inputs,
        pred_type: PredTypeName = PredType.GLM,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        joint: bool = False,
        *,
        outputs: WhichOutputs = None,
        group_size: int | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """Samples of the network's outputs f under the posterior, `[S, B, C]`, without observation noise.

        S is `n_samples`. Samples are independent between inputs, unless `joint` draws them for all inputs together (or
        for groups of `group_size`). The arguments are those of `__call__`; with `outputs` the shape is `[S, B, K]`. For
        a network with an output per token or pixel it is `[S, *shape of the network's outputs]`.

        For a mixture, each sample comes from a component drawn at random (Eschenhagen et al., 2021).
        """
        options = PredictOptions(
            pred_type, n_samples, diagonal_output, generator, joint, outputs=outputs, group_size=group_size
        )
        return self._samples_with("functional_samples", x, options, model_kwargs)

    @checked
    def predictive_samples(
        self,
        x: Inputs,
        pred_type: PredTypeName = PredType.GLM,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        joint: bool = False,
        *,
        outputs: WhichOutputs = None,
        group_size: int | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """Samples of the mean of y, `[S, B, C]`: class probabilities, or the network's outputs f in a regression.

        They are the samples of `functional_samples` after softmax or sigmoid, with the same arguments and shapes.
        Reward modelling gives preference probabilities for pairs (C = 2) and rewards for single items.
        """
        options = PredictOptions(
            pred_type, n_samples, diagonal_output, generator, joint, outputs=outputs, group_size=group_size
        )
        return self._samples_with("predictive_samples", x, options, model_kwargs)

    @checked
    def compare(
        self,
        loader: Iterable[Any],
        *,
        pred_type: PredTypeName = PredType.GLM,
        link_approx: LinkName = LinkApprox.PROBIT,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        progress_bar: bool = False,
    ) -> Comparison:
        """The network against its posterior on labelled data: a table of scores, and which of the two to use.

        The network is scored by what the likelihood says at its outputs f(x): softmax(f), a Gaussian around f with the
        noise σ (after `calibrate`, with the noise that suits the network best). The posterior is scored as `la.predict`
        has it; in a regression as a Gaussian with the mean and the variance of y of every output. Both see the same
        data, which must be new to training and to tuning. Every difference has its paired standard error. Where an
        output per token or pixel makes several labels of a datum, that of the data counts, not of labels. For a mixture
        the network is the ensemble of its networks, with the same weights π.

        Args:
            loader: Labelled data, batches as `fit` takes them; it is read once. Labels that are ignored do not count.
            pred_type: `"glm"`: the linearised network. `"nn"`: sampled weights, the same for all data.
            link_approx: Link approximation of classification, as in `__call__`.
            n_samples: Number of Monte-Carlo samples, where samples are drawn.
            generator: Random generator of samples, resampled data and labels; None for seed 0. Equal seeds give equal
                results.
            progress_bar: Show a progress bar.

        Returns:
            A `Comparison`, which prints as a table; `comparison.rows` has the numbers.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: An option is not accepted.
            InvalidType: The loader is no iterable of batches.
            InvalidData: There are no data, all labels are ignored, or a batch cannot be used.
            UnsupportedError: The likelihood does not say how good a prediction is.
            ModelChangedError: The network was trained further after `fit`.

        Warns:
            DataWarning: The data are those of the fit, at which the network is surer than elsewhere.
        """
        from laplace.tuning.comparing import compare

        options = PredictOptions(
            pred_type, n_samples, diagonal_output=False, generator=generator, joint=False, link_approx=link_approx
        )
        return compare(self.predict_batch, self._group, loader, options, progress_bar=progress_bar)


class PosteriorPredicting(Predicting):
    """An object that predicts by a posterior over weights.

    Attributes:
        pred_types: Names of its predictives.
    """

    pred_types: ClassVar[PredictiveNames] = WEIGHT_SPACE

    @property
    @abstractmethod
    def _predictor(self) -> Predictor:
        """The posterior as it is now."""

    def _call_with(self, x: Inputs, options: PredictOptions, model_kwargs: dict[str, Any]) -> Any:
        return self._predictor.call(x, options, model_kwargs)

    def predict_batch(self, x: Inputs, options: PredictOptions, model_kwargs: dict[str, Any]) -> Prediction:
        return self._predictor.predict(x, options, model_kwargs)

    def _samples_with(self, name: str, x: Inputs, options: PredictOptions, model_kwargs: dict[str, Any]) -> Tensor:
        return self._predictor.samples(name, x, options, model_kwargs)

    @checked
    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Samples of the weights from the posterior, `[S, P]`; for a subnetwork `[S, all trainable parameters]`.

        Args:
            n_samples: S.
            generator: Random generator; None for PyTorch's global one.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: A negative number of samples.
            ModelChangedError: The fixed weights around a subnetwork are no longer those of `fit`.
        """
        check_counts(0, n_samples=n_samples)
        check_generator(generator)
        posterior = self._predictor.posterior
        with torch.set_grad_enabled(posterior.keeps_graph), own_precision():
            precision, mean = posterior.precision_before("sample"), posterior.mean
            samples = drawn(mean, precision, n_samples, generator)
            embedded = posterior.weights.embed(samples)
            if embedded is not samples:
                posterior.check_unchanged()
            return embedded

    @checked
    def functional_variance(self, Js: Tensor | Jacobian) -> Tensor:
        """Covariances of the outputs of each datum, J_b P⁻¹ J_bᵀ, `[B, C, C]`, given Jacobians `[B, C, P]`."""
        precision = self._predictor.posterior.precision_before("functional_variance")
        return precision.variance(self._jacobian(Js), "full")

    def functional_covariance(self, Js: Tensor | Jacobian) -> Tensor:
        """Joint covariance of the outputs of all data, J P⁻¹ Jᵀ, `[B·C, B·C]`, given Jacobians `[B, C, P]`.

        Row b·C + c belongs to output c of datum b.
        """
        precision = self._predictor.posterior.precision_before("functional_covariance")
        return precision.variance(self._jacobian(Js), "joint")

    @checked
    def predictive_moments(
        self,
        x: Inputs,
        *,
        joint: bool = False,
        diagonal_output: bool = False,
        outputs: WhichOutputs = None,
        group_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the linearised network's outputs f (logits, say), without noise, for any likelihood.

        Args:
            x: Inputs of B data.
            joint: Also compute covariances between data.
            diagonal_output: Compute variances of the outputs only, no covariances between them.
            outputs: Which outputs, as in `__call__`; None for all.
            group_size: Number of inputs in a group, as in `__call__`; None for one group of all.

        Returns:
            `[B, C]` with `[B, C, C]`, or with `[B, C]` (`diagonal_output`), or `[B·C]` with `[B·C, B·C]` (`joint`), or
            `[B/n, n·C]` with `[B/n, n·C, n·C]` (groups of n).

        Raises:
            NotFittedError: Before `fit`.
            ModelChangedError: The network was trained further after `fit`.
        """
        from laplace.predictive.prediction import laid_out

        options = PredictOptions(joint=joint, diagonal_output=diagonal_output, outputs=outputs, group_size=group_size)
        channel_dim = self._predictor.posterior.channel_dim
        options = options.for_network(channel_dim)
        gaussian = self._latent(x, options.form, options.choice, group_size)
        with autograd_mode():
            return laid_out(gaussian, channel_dim, joint=joint)

    @checked
    def functional_variance_fast(self, X: Inputs) -> tuple[Tensor, Tensor]:
        """Mean and variances of the outputs f at X, `[B, C]` each: `predictive_moments(X, diagonal_output=True)`."""
        return self.predictive_moments(X, diagonal_output=True)

    def _jacobian(self, Js: Tensor | Jacobian) -> Jacobian:
        if isinstance(Js, Jacobian):
            return Js
        posterior = self._predictor.posterior
        layout, like = posterior.problem.layout, posterior.hypers.prior_precision
        n_params = layout.n_params
        if not isinstance(Js, Tensor):
            raise InvalidType(f"Js is of type {type(Js).__name__}; give Jacobians [B, C, P], P = {n_params}.")
        if Js.ndim != 3 or Js.shape[2] != n_params:
            raise InvalidArgument(f"Js has shape {tuple(Js.shape)}; it must be [B, C, P] with P = {n_params}.")
        return Jacobian.from_dense(Js.to(device=like.device, dtype=like.dtype), layout.sizes)

    def _latent(
        self, x: Inputs, form: Form, choice: OutputChoice | None = None, group_size: int | None = None
    ) -> GaussianOutputs:
        """Gaussian of the linearised network's outputs, or of some."""
        predictor = self._predictor
        source = predictor.linearised(x, choice, group_size)
        with autograd_mode(), torch.set_grad_enabled(predictor.graph):
            return source.gaussian(form)


overrides.remember(Predicting)
overrides.remember(PosteriorPredicting)
