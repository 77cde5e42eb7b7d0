"""What every Laplace approximation shares: hyper-parameters, evidence, predictions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from laplace.core import hyperparameters as hyper
from laplace.core import overrides
from laplace.core.arguments import CheckedConstructor, checked
from laplace.core.batch import Inputs
from laplace.curvature import CurvatureInterface, NativeGGN
from laplace.enums import LinkApprox, PredType
from laplace.errors import InvalidArgument, InvalidType, LaplaceError
from laplace.evidence import Evidence
from laplace.likelihoods import get_likelihood
from laplace.likelihoods.base import Likelihood
from laplace.network.model_guard import own_precision, require_module
from laplace.structures.base import Precision


class BaseLaplace(CheckedConstructor, ABC):
    """A Gaussian posterior around trained weights, in weight space or in function space.

    Args:
        model: The trained network; it is lent and left as it is.
        likelihood: A name in `laplace.likelihoods.LIKELIHOODS`, e.g. `"classification"`, or a likelihood object.
        sigma_noise: Standard deviation of the observation noise, one or one per output (regression only).
        prior_precision: δ: one, one per parameter tensor, or one per parameter.
        prior_mean: μ₀: one, or one per parameter.
        temperature: T of the likelihood p(y | f)^(1/T).
        enable_backprop: Whether predictions can be differentiated with respect to the inputs.
        dict_key_x: Key of the inputs whose first dimension is the batch, for mappings.
        dict_key_y: Key of the targets, for mappings.
        backend: Curvature backend, a class; None for the native GGN.
        backend_kwargs: Its constructor's options; never written to.
        asdl_fisher_kwargs: Options for the ASDL backends.

    Raises:
        InvalidArgument: A hyper-parameter is not positive or not finite, or has a length that fits nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: type[CurvatureInterface] | None = None,
        backend_kwargs: dict[str, Any] | None = None,
        asdl_fisher_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.model = require_module(model)
        self.likelihood = likelihood
        self.likelihood_object = get_likelihood(likelihood)
        self.enable_backprop = bool(enable_backprop)
        self.dict_key_x = dict_key_x
        self.dict_key_y = dict_key_y
        self.backend_cls = _checked_backend(backend)
        self.backend_kwargs = dict(backend_kwargs or {})
        self.asdl_fisher_kwargs = dict(asdl_fisher_kwargs or {})
        parameter = next(model.parameters(), torch.zeros(()))
        dtype = torch.promote_types(parameter.dtype, torch.float32) if parameter.is_floating_point() else None
        self._like = torch.zeros((), device=parameter.device, dtype=dtype)
        self.sigma_noise = sigma_noise
        self.temperature = temperature
        self.prior_precision = prior_precision
        self.prior_mean = prior_mean

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuses classes of users that define what would have no effect.

        Raises:
            UnsupportedError: One does.
        """
        super().__init_subclass__(**options)
        overrides.check_class(cls, BaseLaplace)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses assignments that would be ignored; new attributes, and functions in place of methods, are free.

        Raises:
            ReadOnlyError: The attribute is computed, or never read.
        """
        overrides.check_assignment(self, name, value)
        try:
            super().__setattr__(name, value)
        except LaplaceError:
            raise
        except AttributeError as error:
            raise overrides.refused(self, name, error) from None

    # Hyper-parameters.

    @property
    def prior_precision(self) -> Tensor:
        """δ, `[1]`, `[n_tensors]` or `[P]`."""
        return self._prior_precision

    @prior_precision.setter
    @torch.inference_mode(False)
    def prior_precision(self, value: float | Tensor) -> None:
        tensor = hyper.positive("prior_precision", hyper.as_tensor("prior_precision", value, like=self._like))
        self._prior_precision = self._checked_prior("prior_precision", tensor.reshape(-1))

    @property
    def prior_mean(self) -> Tensor:
        """μ₀, 0-dim, `[1]` or `[P]`."""
        return self._prior_mean

    @prior_mean.setter
    @torch.inference_mode(False)
    def prior_mean(self, value: float | Tensor) -> None:
        tensor = hyper.finite("prior_mean", hyper.as_tensor("prior_mean", value, like=self._like))
        self._prior_mean = self._checked_mean(tensor if not isinstance(value, Tensor) else tensor.reshape(-1))

    @property
    def sigma_noise(self) -> Tensor:
        """σ, 0-dim or `[C]`."""
        return self._sigma_noise

    @sigma_noise.setter
    @torch.inference_mode(False)
    def sigma_noise(self, value: float | Tensor) -> None:
        tensor = hyper.positive("sigma_noise", hyper.as_tensor("sigma_noise", value, like=self._like))
        if not self.likelihood_object.has_noise and bool((tensor.detach() != 1).any()):
            raise InvalidArgument(
                f"sigma_noise={value} with likelihood={self.likelihood_object.name!r}, which has no observation noise; "
                "leave sigma_noise at 1."
            )
        self._sigma_noise = tensor.reshape(()) if tensor.numel() == 1 else tensor

    @property
    def temperature(self) -> Tensor:
        """T, 0-dim."""
        return self._temperature

    @temperature.setter
    @torch.inference_mode(False)
    def temperature(self, value: float | Tensor) -> None:
        tensor = hyper.positive("temperature", hyper.as_tensor("temperature", value, like=self._like))
        if tensor.numel() != 1:
            raise InvalidArgument(f"temperature must be a scalar; {tensor.numel()} values were given.")
        self._temperature = tensor.reshape(())

    @abstractmethod
    def _checked_prior(self, name: str, value: Tensor) -> Tensor:
        """A prior precision `[n]` whose length fits, restricted to the treated coordinates."""

    @abstractmethod
    def _checked_mean(self, value: Tensor) -> Tensor:
        """A prior mean whose length fits."""

    # Evidence.

    @abstractmethod
    def fit(self, train_loader: Iterable[Any], override: bool = True, progress_bar: bool = False) -> None:
        """Fits the posterior to the data of a loader."""

    @abstractmethod
    def evidence(self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None) -> Evidence:
        """The terms of the log evidence at the present, or at other, hyper-parameters."""

    @property
    def log_likelihood(self) -> Tensor:
        """Log p(D | θ*), 0-dim, differentiable in noise and temperature."""
        return self.evidence().log_likelihood.to(self._like.dtype)

    @property
    def scatter(self) -> Tensor:
        """(θ* − μ₀)ᵀ diag(δ) (θ* − μ₀), 0-dim."""
        return self.evidence().scatter.to(self._like.dtype)

    @property
    def log_det_ratio(self) -> Tensor:
        """Log det P − log det P₀, 0-dim."""
        if overrides.is_overridden(
            self, "log_det_posterior_precision", "log_det_prior_precision", "posterior_precision"
        ):
            return self.log_det_posterior_precision - self.log_det_prior_precision
        return self.evidence().log_det_ratio.to(self._like.dtype)

    @property
    def log_det_prior_precision(self) -> Tensor:
        """Log det P₀, 0-dim."""
        return self.evidence().effective_prior.logdet().to(self._like.dtype)

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """Log det P, 0-dim."""
        return self._precision().logdet().to(self._like.dtype)

    @abstractmethod
    def _precision(self) -> Precision:
        """P, with its graph, as users' classes override it."""

    @checked
    def log_marginal_likelihood(
        self, prior_precision: float | Tensor | None = None, sigma_noise: float | Tensor | None = None
    ) -> Tensor:
        """Laplace approximation of the log evidence, differentiable in both arguments.

        log p(D) ≈ log p(D | θ*) − ½ (log det P − log det P₀ + scatter)   (Daxberger et al., 2021, equation 6).

        Args:
            prior_precision: δ to evaluate at; it is also assigned, without its graph.
            sigma_noise: σ to evaluate at, likewise (regression only).

        Returns:
            0-dim tensor.

        Raises:
            InvalidArgument: A value is not accepted, or a noise is given without a Gaussian likelihood.
            NotFittedError: Before `fit`.
        """
        if sigma_noise is not None and not self.likelihood_object.has_noise:
            raise InvalidArgument(
                f"sigma_noise was given, but likelihood={self.likelihood_object.name!r} has no observation noise."
            )
        former = self.prior_precision, self.sigma_noise
        try:
            if prior_precision is not None:
                self.prior_precision = prior_precision
            if sigma_noise is not None:
                self.sigma_noise = sigma_noise
            with own_precision():
                value = self._log_evidence()
        except BaseException:
            self._prior_precision, self._sigma_noise = former
            raise
        if prior_precision is not None:
            self._prior_precision = self._prior_precision.detach()
        if sigma_noise is not None:
            self._sigma_noise = self._sigma_noise.detach()
        return value

    def _log_evidence(self) -> Tensor:
        """Log p(D), 0-dim, of the terms as users' classes override them."""
        evidence = self.evidence()
        if not overrides.is_overridden(self, *overrides.EVIDENCE):
            return evidence.log_marginal_likelihood
        value = self.log_likelihood - 0.5 * (self.log_det_ratio + self.scatter + evidence.precision.slack())
        return value.to(self._like.dtype)

    @checked
    def marglik(
        self, prior_precision: float | Tensor | None = None, sigma_noise: float | Tensor | None = None
    ) -> Tensor:
        """`log_marginal_likelihood`, by the name of the Laplace Redux paper."""
        return self.log_marginal_likelihood(prior_precision, sigma_noise)

    # Predictions.

    @abstractmethod
    def __call__(self, x: Inputs, pred_type: PredType | str = PredType.GLM, **options: Any) -> Any:
        """Predictive distribution at x."""

    @checked
    def predictive(
        self, x: Inputs, pred_type: PredType | str, link_approx: LinkApprox | str, n_samples: int
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`self(x, ...)` with positional options."""
        return self(x, pred_type=pred_type, link_approx=link_approx, n_samples=n_samples)


overrides.check_class(BaseLaplace, BaseLaplace)


def _checked_backend(backend: Any) -> type[CurvatureInterface]:
    """The class that computes curvature, the native GGN by default; an object, as `la.backend`, stands for its class.

    Raises:
        InvalidType: Neither a class derived from `CurvatureInterface` nor an object of one.
    """
    if backend is None:
        return NativeGGN
    kind = backend if isinstance(backend, type) else type(backend)
    if issubclass(kind, CurvatureInterface):
        return kind
    raise InvalidType(
        f"backend={backend!r} is not accepted; give a class derived from "
        "laplace.curvature.CurvatureInterface, such as NativeGGN or NativeEF, and its options as backend_kwargs={...}."
    )
