"""Predictions as users call them, of a posterior over weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, nn

from laplace.core import overrides
from laplace.core.arguments import checked
from laplace.core.batch import Inputs
from laplace.core.gaussian import Gaussian
from laplace.core.hyperparameters import check_counts
from laplace.core.output_choice import Given, OutputChoice
from laplace.core.random_numbers import check_generator
from laplace.deployment.export import exported
from laplace.enums import LinkApprox, LinkName, PredType, PredTypeName
from laplace.errors import InvalidArgument, InvalidType
from laplace.jacobian.jacobian import Jacobian
from laplace.network.model_guard import autograd_mode, own_precision
from laplace.posterior.predictor import PosteriorPredictor, precision_before
from laplace.predictive.options import WEIGHT_SPACE, PredictiveNames
from laplace.predictive.prediction import Prediction, laid_out
from laplace.predictive.predictor import Predictor, Request, check_group, form_of, is_loader
from laplace.structures.draws import drawn


class OutputSampling(ABC):
    """An object that draws outputs at given inputs: a posterior, or a mixture of several."""

    @property
    @abstractmethod
    def _predictor(self) -> Predictor:
        """The posterior, or the mixture, as it is now."""

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
        outputs: Given = None,
        group_size: int | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """Samples of the latent outputs, `[S, B, C]`: per input, or with `joint` of all inputs together, or of groups.

        With `outputs`, as of `__call__`, those of some outputs, `[S, B, K]`; `group_size` is as there.

        Of outputs with positions `[S, *shape of the network's outputs]`, positions being inputs in this sense. Of a
        mixture a component is drawn per sample, then a sample of it (Eschenhagen et al., 2021, equation 8).
        """
        request = Request(
            pred_type, n_samples, diagonal_output, generator, joint, outputs=outputs, group_size=group_size
        )
        return self._predictor.functional_samples(x, request, **model_kwargs)

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
        outputs: Given = None,
        group_size: int | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """Samples of the target's mean, `[S, B, C]`: probabilities, or the latents of a regression or of rewards.

        With `outputs`, as of `__call__`, those of some outputs, `[S, B, K]`; `group_size` is as there.

        Reward modelling gives preference probabilities for pairs (C = 2) and latent rewards for single items.
        """
        request = Request(
            pred_type, n_samples, diagonal_output, generator, joint, outputs=outputs, group_size=group_size
        )
        return self._predictor.predictive_samples(x, request, **model_kwargs)

    @abstractmethod
    def __call__(self, x: Inputs, **options: Any) -> Any:
        """Predictive distribution at x."""

    @checked
    def export(self, example_x: Inputs, *, generator: torch.Generator | None = None, **options: Any) -> nn.Module:
        """The prediction `la(x, **options)` as a plain module of PyTorch, with buffers alone, for batches of any size.

        It is traced from the prediction, and compared with it at `example_x`. `torch.export.export` takes it with a
        dynamic batch, so do `torch.onnx.export` and `torch.compile(fullgraph=True)`, and what they save is loaded
        without this library. It returns what `la(x)` returns, and has gradients with respect to x. What is sampled is
        stored: all data share the numbers of one datum, so that each is predicted as alone with the same generator.

        Args:
            example_x: Inputs, a tensor, tuple or mapping, of at least one datum. The module takes the tensors among
                them: `module(x)`, `module(x0, x1)`, or by the keys of the mapping, `module(**x)`.
            generator: Source of the numbers that are stored.
            **options: Of `la(x, ...)`: `link_approx`, `diagonal_output`, `observation_noise`, …

        Raises:
            NotFittedError: Before `fit`.
            InvalidData: No data, or a key that is no name of an argument.
            UnsupportedError: The prediction is no fixed graph of operations, or another one for other batches; of a
                posterior that is spread over processes; or the module differs from the prediction.
        """
        self._predictor.check_whole("the export")
        return exported(self, example_x, generator, options)


class Predicting(OutputSampling):
    """An object that predicts by a posterior over weights.

    Attributes:
        pred_types: Names of its predictives.
    """

    pred_types: ClassVar[PredictiveNames] = WEIGHT_SPACE

    @property
    @abstractmethod
    def _predictor(self) -> PosteriorPredictor:
        """The posterior as it is now."""

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
        outputs: Given = None,
        group_size: int | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Predictive distribution at x.

        Regression (and rewards) return the latent Gaussian `(mean, variance)`: `[B, C]` with `[B, C, C]`,
        `[B, C]` (`diagonal_output`), `[B·C]` with `[B·C, B·C]` (`joint`), or `[B/n, n·C]` with `[B/n, n·C, n·C]` of
        groups of n inputs (`group_size`); the variance is that of f, plus σ² with `observation_noise`. Classification
        returns probabilities `[B, C]`. Counts (`"poisson"`) and a noise that depends on the input (`"heteroscedastic"`)
        return mean and variance of y, `[B, C]` each.

        Of a network with outputs `[B, T, C]` (or `[B, C, H, W]` with `channel_dim=1`) means, variances and
        probabilities have that shape; covariances, one per position, are `[B, T, C, C]` (`[B, H, W, C, C]`).

        Args:
            x: Inputs, a tensor, tuple or mapping.
            pred_type: `"glm"`, the linearised network (Immer et al., 2021), or `"nn"`, sampled weights.
            joint: Covariance over all inputs; with classification, samples of `link_approx="mc"` are joint.
            link_approx: One of the links of the likelihood, names in `laplace.likelihoods.links.LINKS`; `"nn"` always
                samples.
            n_samples: Monte-Carlo samples.
            diagonal_output: Only variances of the outputs.
            generator: Source of randomness; equal seeds give equal bits.
            fitting: Return preference probabilities of pairs with reward modelling.
            observation_noise: Add σ² to the variance (regression).
            outputs: Which outputs are predicted: indices `[K]`, or of each row its own, `[B, K]` (with positions in the
                network's own shape, `[B, T, K]`), or an integer K for the K largest means, the largest first. Results
                have K in place of C, and are those of a network without the other outputs: probabilities are given
                that y is one of the K. None for all.
            group_size: n, with `joint`: inputs that follow each other n by n are joint, and covariances between such
                groups are not computed.
            **model_kwargs: For the model, with `pred_type="nn"`.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: An option is not accepted.
            ModelChangedError: The network was trained further after `fit`.
        """
        request = Request(pred_type, n_samples, diagonal_output, generator, joint, link_approx, outputs, group_size)
        return self._predictor.call(x, request, fitting=fitting, observation_noise=observation_noise, **model_kwargs)

    @overload
    def predict(  # pyright: ignore[reportOverlappingOverload]  (a tensor is iterable, too)
        self, x: Tensor | tuple[Any, ...] | Mapping[Any, Any], pred_type: PredTypeName = ..., joint: bool = ...,
        link_approx: LinkName = ..., n_samples: int = ..., diagonal_output: bool = ...,
        generator: torch.Generator | None = ..., *, local_reparameterization: bool = ..., outputs: Given = ...,
        group_size: int | None = ..., progress_bar: bool = ..., **model_kwargs: Any,
    ) -> Prediction: ...  # fmt: skip

    @overload
    def predict(
        self, x: Iterable[Any], pred_type: PredTypeName = ..., joint: bool = ...,
        link_approx: LinkName = ..., n_samples: int = ..., diagonal_output: bool = ...,
        generator: torch.Generator | None = ..., *, local_reparameterization: bool = ..., outputs: Given = ...,
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
        local_reparameterization: bool = False,
        outputs: Given = None,
        group_size: int | None = None,
        progress_bar: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """The predictive distribution at x as one object; each of its quantities is computed when it is first read.

        Of a loader, an iterator that gives one such object for every batch, as it is asked for: of `(x, y)` or of a
        mapping with labels only the inputs are read. A quantity is to be read before the next batch, or keeps what it
        is computed from.

        Args:
            x: Inputs, a tensor, tuple or mapping; or a loader, any other iterable of batches, a list among them.
            pred_type: `"glm"`, the linearised network (Immer et al., 2021), or `"nn"`, sampled weights.
            joint: Covariance over all inputs.
            link_approx: One of the links of the likelihood, names in `laplace.likelihoods.links.LINKS`; `"nn"` always
                samples.
            n_samples: Monte-Carlo samples, of whatever is sampled.
            diagonal_output: Only variances of the outputs.
            generator: Source of randomness; its state is copied, so that what is drawn does not depend on the order of
                reading, and it is advanced once.
            local_reparameterization: With `pred_type="nn"` and a diagonal posterior: draw noise on the pre-activations
                of linear and convolutional layers instead of weights, for every datum anew (Kingma et al., 2015).
            outputs: Which outputs are predicted, as of `__call__`; `Prediction.outputs` names them.
            group_size: Inputs of a group, within which covariances are with `joint`, as of `__call__`.
            progress_bar: Show one, of a loader.
            **model_kwargs: For the model, with `pred_type="nn"`.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: An option is not accepted, of a loader `joint` among them.
            InvalidData: A batch of a loader holds no inputs.
            ModelChangedError: The network was trained further after `fit`; also when a quantity is read.
            UnsupportedError: Local reparameterisation without a diagonal posterior over sampled weights.
        """
        request = Request(pred_type, n_samples, diagonal_output, generator, joint, link_approx, outputs, group_size)
        more = {"local_reparameterization": local_reparameterization, **model_kwargs}
        if is_loader(x):
            return self._predictor.stream(x, request, progress_bar=progress_bar, **more)
        return self._predictor.predict(x, request, **more)

    @checked
    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Samples of the weights, `[S, P]`; of a subnetwork `[S, all trainable parameters]`.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: A negative number of samples.
            ModelChangedError: The fixed weights around a subnetwork are not those of `fit` any more.
        """
        check_counts(0, n_samples=n_samples)
        check_generator(generator)
        posterior = self._predictor.posterior
        with torch.set_grad_enabled(posterior.keeps_graph), own_precision():
            precision, mean = precision_before(posterior, "sample"), posterior.mean
            samples = drawn(mean, precision, n_samples, generator)
            embedded = posterior.weights.embed(samples)
            if embedded is not samples:
                posterior.check_unchanged()
            return embedded

    @checked
    def functional_variance(self, Js: Tensor | Jacobian) -> Tensor:
        """J_b P⁻¹ J_bᵀ of Jacobians `[B, C, P]`, `[B, C, C]`."""
        precision = precision_before(self._predictor.posterior, "functional_variance")
        return precision.functional_variance(self._jacobian(Js))

    def functional_covariance(self, Js: Tensor | Jacobian) -> Tensor:
        """J P⁻¹ Jᵀ over all data of Jacobians `[B, C, P]`, `[B·C, B·C]`, data major."""
        precision = precision_before(self._predictor.posterior, "functional_covariance")
        return precision.functional_covariance(self._jacobian(Js))

    @checked
    def predictive_moments(
        self,
        x: Inputs,
        *,
        joint: bool = False,
        diagonal_output: bool = False,
        outputs: Given = None,
        group_size: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the linearised network's outputs, without noise, under any likelihood.

        Args:
            x: Inputs of B data.
            joint: Whether the covariance is of all data together.
            diagonal_output: Only variances of the outputs.
            outputs: Which outputs, as of `__call__`; None for all.
            group_size: Inputs of a group, as of `__call__`; None for all.

        Returns:
            `[B, C]` with `[B, C, C]`, or with `[B, C]` (`diagonal_output`), or `[B·C]` with `[B·C, B·C]` (`joint`), or
            `[B/n, n·C]` with `[B/n, n·C, n·C]` (groups of n).

        Raises:
            NotFittedError: Before `fit`.
            ModelChangedError: The network was trained further after `fit`.
        """
        check_group(group_size, joint=joint)
        channel_dim = self._predictor.posterior.channel_dim
        choice = OutputChoice.of(outputs, channel_dim)
        gaussian = self._latent(x, form_of(joint=joint, diagonal_output=diagonal_output), choice, group_size)
        with autograd_mode():
            return laid_out(gaussian, channel_dim, joint=joint)

    @checked
    def functional_variance_fast(self, X: Inputs) -> tuple[Tensor, Tensor]:
        """Mean and variances of the latent outputs at X, `[B, C]` each, without covariances between outputs."""
        gaussian = self._latent(X, "diagonal")
        with autograd_mode():
            return laid_out(gaussian, self._predictor.posterior.channel_dim)

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
        self, x: Inputs, form: str, choice: OutputChoice | None = None, group_size: int | None = None
    ) -> Gaussian:
        """Gaussian of the linearised network's outputs, or of some; `form` is `"full"`, `"diagonal"` or `"joint"`."""
        predictor = self._predictor
        source = predictor.linearised(x, choice, group_size)
        with autograd_mode(), torch.set_grad_enabled(predictor.graph):
            return source.latent(form)


overrides.check_class(OutputSampling, OutputSampling)
overrides.check_class(Predicting, Predicting)
