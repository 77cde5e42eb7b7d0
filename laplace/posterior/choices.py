"""The choices that a posterior is made by, and the backends and engines that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from laplace.core.batch import ForwardFn
from laplace.core.overrides import is_ours
from laplace.curvature import CurvatureInterface, NativeGGN
from laplace.engines.engine import CurvatureEngine
from laplace.errors import InvalidArgument, InvalidType
from laplace.likelihoods.base import Likelihood
from laplace.predictive.options import PredictiveNames
from laplace.structures.base import Curvature
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

    def reconciled(self) -> Choices:
        """The same, with what the structure's options say of the sign of an exact Hessian.

        Raises:
            InvalidArgument: The structure takes the exact GGN alone, and the backend has other curvature.
        """
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
            return backend(model, name, dict_key_x=self.dict_key_x, dict_key_y=self.dict_key_y, **options)
        except TypeError as error:
            raise InvalidArgument(
                f"backend={backend.__name__} could not be made with "
                f"backend_kwargs={sorted(self.backend_kwargs)}: {error}"
            ) from error

    def engine(self, weights: Weights, problem: Problem, *, split_outputs: bool) -> CurvatureEngine:
        """An engine, which keeps one curvature term per output with `split_outputs`."""
        backend, likelihood = self.backend_cls, self.likelihood_object
        if is_ours(backend):
            given = {**self.backend_kwargs, **self.asdl_fisher_kwargs}
            return backend.engine_for(problem, likelihood, given, split_outputs=split_outputs)
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
