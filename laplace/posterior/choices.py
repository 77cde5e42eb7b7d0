"""The choices that a posterior is made by, and what follows from them on first use: backend, engine, precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from laplace.core.batch import ForwardFn
from laplace.core.overrides import is_ours
from laplace.curvature import CurvatureInterface, NativeEF, NativeGGN
from laplace.engines.engine import CurvatureEngine
from laplace.enums import HessianStructure
from laplace.errors import InvalidArgument, InvalidType
from laplace.evidence import Distance, version
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.recovered import Loss
from laplace.network.spread import require_whole
from laplace.predictive.options import PredictiveNames
from laplace.structures.base import Curvature, Precision
from laplace.structures.indefinite import SignedOptions
from laplace.weights.base import Weights
from laplace.weights.problem import Problem


@dataclass(frozen=True, eq=False)
class Choices:
    """Everything that was chosen when a posterior was made, besides the random weights and the hyper-parameters.

    Attributes:
        likelihood: p(y | f), as it was given.
        likelihood_object: The same as an object.
        structure: Structure of the curvature.
        structure_options: Its options.
        precision_options: Options of its precisions.
        backend_cls: Class of the curvature backend.
        backend_kwargs: Options of its constructor.
        asdl_fisher_kwargs: Options of the ASDL backends.
        forward_fn: How the user calls the network; None for `model(x)`.
        dict_key_x: Key of the inputs, for mappings.
        dict_key_y: Key of the targets, for mappings.
        channel_dim: Dimension of the network's outputs that holds the channels; None where that is not known.
        pred_types: Names of its predictives.
        weights_options: Options of the choice of random weights, as they were given.
        loss: A loss that was assigned to the backend, around that of the likelihood; else None.
    """

    likelihood: Likelihood | str
    likelihood_object: Likelihood
    structure: type[Curvature]
    structure_options: Any
    precision_options: dict[str, Any]
    backend_cls: type[CurvatureInterface]
    backend_kwargs: dict[str, Any]
    asdl_fisher_kwargs: dict[str, Any]
    forward_fn: ForwardFn | None
    dict_key_x: str
    dict_key_y: str
    channel_dim: int | None
    pred_types: PredictiveNames
    weights_options: dict[str, Any]
    loss: Loss | None = None

    def reconciled(self, model: nn.Module) -> Choices:
        """The same, with what the structure's options say of the sign of an exact Hessian.

        Raises:
            InvalidArgument: The structure takes the exact GGN alone, and the backend has other curvature.
            UnsupportedError: The network is spread over processes, and the curvature not one of layers' inputs and
                output gradients.
        """
        if self.structure.name not in _OF_FACTORS or self.backend_cls not in (NativeGGN, NativeEF):
            require_whole(model, f"{self.backend_cls.__name__} with {self.structure.name!r} takes more than hooks see")
        if self.structure.exact_ggn:
            require_exact_ggn(self.backend_cls, self.backend_kwargs)
        options = self.structure_options
        if self.backend_cls.kind != "hessian" or not isinstance(options, SignedOptions):
            return self
        return replace(self, precision_options=self.precision_options | {"indefinite": options.indefinite})

    def backend(self, weights: Weights, problem: Problem) -> CurvatureInterface:
        """An object of the backend's class, for direct calls and for methods of users' classes.

        A class of the user's sees the names "regression" and "classification" only, and is called with
        `asdl_fisher_kwargs`, which the library's take in the constructor.

        Raises:
            InvalidArgument: The constructor does not know an option.
        """
        backend, ours = self.backend_cls, is_ours(self.backend_cls)
        model, choice = weights.for_backend(problem)
        options = {**choice, **self.backend_kwargs, **(self.asdl_fisher_kwargs if ours else {})}
        name = self.likelihood if ours else self.likelihood_object.peer_name
        try:
            made = backend(model, name, dict_key_x=self.dict_key_x, dict_key_y=self.dict_key_y, **options)
        except TypeError as error:
            raise InvalidArgument(
                f"backend={backend.__name__} could not be made with "
                f"backend_kwargs={sorted(self.backend_kwargs)}: {error}"
            ) from error
        if self.loss is not None:
            made.lossfunc = self.loss
        return made

    def with_loss_of(self, backend: CurvatureInterface | None) -> Choices:
        """The same with the loss that a user assigned to a backend, for the fits that follow."""
        return (
            self if backend is None or backend.assigned_loss is self.loss else replace(self, loss=backend.assigned_loss)
        )

    def engine(self, weights: Weights, problem: Problem, *, split_outputs: bool) -> CurvatureEngine:
        """An engine, which keeps one curvature term per output with `split_outputs`."""
        backend, likelihood = self.backend_cls, self.likelihood_object
        if is_ours(backend):
            given = {**self.backend_kwargs, **self.asdl_fisher_kwargs}
            return backend.engine_for(problem, likelihood, given, split_outputs=split_outputs, loss=self.loss)
        own = self.backend(weights, problem)
        return own.engine(problem, likelihood, split_outputs=split_outputs, **self.asdl_fisher_kwargs)


def checked_backend(backend: Any) -> type[CurvatureInterface]:
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


def require_exact_ggn(backend: type[CurvatureInterface], options: dict[str, Any]) -> None:
    """Refuses an empirical Fisher, a Hessian, or sampled curvature.

    Raises:
        InvalidArgument: It is one of these.
    """
    if backend.kind != "ggn":
        raise InvalidArgument(
            f"backend={backend.__name__} has curvature of kind {backend.kind!r}; a Gaussian process of the linearised "
            "network has that of the GGN: give backend=NativeGGN or another GGN backend."
        )
    if options.get("stochastic"):
        raise InvalidArgument(
            "backend_kwargs has stochastic=True, but a Gaussian process takes the exact output Hessian; leave it out."
        )


_OF_FACTORS = (HessianStructure.KRON, HessianStructure.EKFAC, HessianStructure.DIAG)
"""Structures whose sums take the inputs and output gradients of one layer at a time."""


class Derived:
    """The one mutable part of a posterior: nothing in it is a fact that could not be computed again.

    Attributes:
        backend: The curvature backend as users call it, or None.
        engine: What computes Jacobians and curvature, or None.
        distance: Of the mean from the prior's.
        noise_seen: Whether a noise of 1 has been compared with the residuals.
    """

    def __init__(self, engine: CurvatureEngine | None = None) -> None:
        self.backend: CurvatureInterface | None = None
        self.engine = engine
        self.distance = Distance()
        self.noise_seen = False
        self._latest: _Latest | None = None

    def precision(self, curvature: Curvature, values: tuple[Tensor, ...], make: Callable[[], Precision]) -> Precision:
        """The precision of a curvature at some hyper-parameters, made anew where they are not those of the last one.

        Only one is kept, and it is let go before another is made: there are never two factorisations.

        Args:
            curvature: H.
            values: The hyper-parameters.
            make: Makes the precision.
        """
        latest = self._latest
        if latest is None or not latest.is_of(curvature, values):
            self._latest = latest = None
            self._latest = latest = _Latest(curvature, values, make())
        return latest.precision


class _Latest:
    """A precision, with all that it was made of."""

    def __init__(self, curvature: Curvature, values: tuple[Tensor, ...], precision: Precision) -> None:
        self.curvature = curvature
        self.values = tuple((value, version(value)) for value in values)
        self.precision = precision

    def is_of(self, curvature: Curvature, values: tuple[Tensor, ...]) -> bool:
        """True if it is the precision of this curvature at these values."""
        return self.curvature is curvature and all(
            version(mine) == then and (mine is value or (mine.shape == value.shape and bool((mine == value).all())))
            for (mine, then), value in zip(self.values, values, strict=True)
        )
