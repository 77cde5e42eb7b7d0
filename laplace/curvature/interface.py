"""The public face of a backend: what users call, and what they derive their own backends from.

A class names an engine and the options of that engine that its constructor takes. Fits make the engine from these two
alone; objects serve direct calls, which return plain tensors. Of a class of the user's, every public method that it
defines takes the place of a primitive of the engine, which is then made from an object.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from laplace.core import batch as batches
from laplace.core.arguments import hint
from laplace.core.batch import Inputs
from laplace.core.cached import cached_property
from laplace.core.overrides import check_backend_assignment, is_ours
from laplace.curvature.user_backend import DERIVATIVES, METHODS, with_users_methods
from laplace.engines.engine import CurvatureEngine, EngineOptions
from laplace.engines.native.engine import NativeEngine
from laplace.engines.native.kinds import EFEngine, GGNEngine, HessianEngine
from laplace.errors import InvalidArgument
from laplace.likelihoods import get_likelihood
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.checks import Loss
from laplace.weights.base import AllWeights, Subnetwork, Weights
from laplace.weights.last_layer import FeatureExtractor, LastLayer
from laplace.weights.problem import Problem

if TYPE_CHECKING:
    from laplace.compat.kron import Kron

_CHOICES = ("last_layer", "subnetwork_indices")
"""Arguments of constructors that a `Problem` makes superfluous."""

_POSITIONAL = ("stochastic", "num_samples")
"""Options that may be given by their places."""

SAMPLED_BY_PACKAGE = ("stochastic", "num_samples", "generator", "memory_budget")
"""Options of the GGN by a package."""


def _without_self(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _signature(cls: type[CurvatureInterface]) -> inspect.Signature:
    """The constructor's: common arguments, then the options of the engine that the class takes, and other names."""
    common = _without_self(CurvatureInterface.__init__).parameters.values()
    parameters = [p for p in common if p.kind is p.POSITIONAL_OR_KEYWORD]
    defaults = {field.name: field.default for field in fields(EngineOptions)} | dict.fromkeys(cls.synonyms)
    for name in (*cls.engine_options, *cls.synonyms):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if name in _POSITIONAL else inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=getattr(cls, name, defaults[name])))
    return inspect.Signature(parameters)


class CurvatureInterface:
    """Base of all backends: computes Jacobians and gradients; derived classes add the curvature.

    `Laplace(..., backend=cls)` takes a class. Make an object yourself for direct calls only, such as `jacobians(x)`.

    Args:
        model: The network; with `last_layer` it may be wrapped in a `FeatureExtractor`.
        likelihood: A name in `laplace.likelihoods.LIKELIHOODS`, e.g. `"classification"`, or a likelihood object.
        last_layer: Differentiate with respect to the last layer only.
        subnetwork_indices: Differentiate with respect to these weights only: indices of flattened parameters, `[p]`.
        dict_key_x: Where batches are mappings: key of the inputs.
        dict_key_y: Where batches are mappings: key of the targets.

    Attributes:
        kind: `"ggn"`, `"ef"` or `"hessian"`, which decides how the curvature scales with noise and temperature.
        engine_type: Class of the engine that computes the curvature.
        engine_options: Names of the engine's options that the constructor takes and the object stores. A class
            attribute of such a name is its default.
        synonyms: Alternative names of options in the constructor.
    """

    kind: str = "ggn"
    engine_type: type[CurvatureEngine] = NativeEngine
    engine_options: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = {}
    _loss: Loss | None = None

    __signature__: ClassVar[inspect.Signature]
    stochastic: bool
    num_samples: int
    generator: torch.Generator | None
    kfac_approx: str
    memory_budget: int | None
    max_passes: int

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        last_layer: bool = False,
        subnetwork_indices: Tensor | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        *positional: Any,
        **options: Any,
    ) -> None:
        given = _signature(type(self)).bind(
            model, likelihood, last_layer, subnetwork_indices, dict_key_x, dict_key_y, *positional, **options
        )
        given.apply_defaults()
        for name in self.engine_options:
            synonyms = [given.arguments[other] for other, meant in self.synonyms.items() if meant == name]
            value = next((value for value in synonyms if value is not None), given.arguments[name])
            setattr(self, name, value)
        self.model = model.of_network() if isinstance(model, FeatureExtractor) else model
        self.likelihood = likelihood
        self.last_layer = last_layer
        self.subnetwork_indices = subnetwork_indices
        self.dict_key_x = dict_key_x
        self.dict_key_y = dict_key_y

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherits = cls.__init__ is CurvatureInterface.__init__
        cls.__signature__ = _signature(cls) if inherits else _without_self(cls.__init__)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses assignments that would be ignored; backends of users may hold what they like.

        Raises:
            ReadOnlyError: The loss of one of the library's backends, which is that of the likelihood.
        """
        check_backend_assignment(self, name)
        super().__setattr__(name, value)

    # What derived classes and users read.

    @property
    def lossfunc(self) -> Loss:
        """The loss as a PyTorch module with `reduction="sum"`, e.g. `CrossEntropyLoss`.

        You can assign a function that calls it with transformed targets, of another shape or scale, say: later fits
        then use these targets. A loss that does anything else is refused by the next fit.
        """
        return get_likelihood(self.likelihood).torch_loss()[0] if self._loss is None else self._loss

    @lossfunc.setter
    def lossfunc(self, loss: Loss) -> None:
        self._loss = loss
        self._engines.clear()

    @property
    def assigned_loss(self) -> Loss | None:
        """The loss that was assigned to `lossfunc`; None for backends of your own, which may use any loss."""
        return self._loss if is_ours(type(self)) else None

    @cached_property
    def factor(self) -> float:
        """Factor from `lossfunc` to the negative log likelihood at σ = T = 1: ½ for regression, else 1."""
        return get_likelihood(self.likelihood).torch_loss()[1]

    @property
    def params(self) -> list[Tensor]:
        """The tensors of which derivatives are taken: trainable ones, in the order of `parameters()`."""
        return [p for p in self._model.parameters() if p.requires_grad]

    @property
    def params_dict(self) -> dict[str, Tensor]:
        """The tensors of which derivatives are taken, by name, detached; for a frozen last layer all of its tensors."""
        named = dict(self._model.named_parameters())
        tensors = {name: tensor for name, tensor in named.items() if tensor.requires_grad} or named
        return {name: tensor.detach() for name, tensor in tensors.items()}

    @property
    def buffers_dict(self) -> dict[str, Tensor]:
        """All buffers of `_model` by name, detached."""
        return {name: tensor.detach() for name, tensor in self._model.named_buffers()}

    @property
    def _model(self) -> nn.Module:
        if self.last_layer and isinstance(self.model, FeatureExtractor) and self.model.last_layer is not None:
            return self.model.last_layer
        return self.model

    # The engine behind.

    @classmethod
    def engine_for(
        cls,
        problem: Problem,
        likelihood: Likelihood,
        given: Mapping[str, Any],
        *,
        split_outputs: bool = False,
        loss: Loss | None = None,
    ) -> CurvatureEngine:
        """Makes the library's engine of this kind of curvature, without an object of this class.

        Args:
            problem: The network and its random parameters.
            likelihood: Loss and output Hessian.
            given: Keyword arguments of the constructor.
            split_outputs: Keep one curvature term per output.
            loss: A loss around that of the likelihood, or None.

        Raises:
            InvalidArgument: An option that the constructor does not take, or a value that is not accepted.
        """
        accepted = (*_CHOICES, *cls.engine_options)
        unknown = sorted(set(given) - set(accepted) - set(cls.synonyms))
        if unknown:
            meant = hint(unknown[0], accepted) or f"accepted are {', '.join(cls.engine_options) or 'none'}."
            raise InvalidArgument(
                f"backend={cls.__name__} could not be made with backend_kwargs={sorted(given)}: it has no option "
                f"{unknown[0]!r}; {meant}"
            )
        options = {name: given[name] for name in cls.engine_options if name in given}
        options |= {name: given[other] for other, name in cls.synonyms.items() if given.get(other) is not None}
        return cls.engine_type.make(
            problem, likelihood, EngineOptions(**options, split_outputs=split_outputs, loss=loss)
        )

    def engine(
        self, problem: Problem, likelihood: Likelihood, *, split_outputs: bool = False, **options: Any
    ) -> CurvatureEngine:
        """The library's engine of this object, with the user's own methods in place of its primitives.

        Args:
            problem: The network and its random parameters.
            likelihood: Loss and output Hessian.
            split_outputs: Keep one curvature term per output.
            **options: Options that the user's own `diag` and `kron` are called with.
        """
        builtin = self.engine_type.make(problem, likelihood, replace(self._options, split_outputs=split_outputs))
        return with_users_methods(self, builtin, METHODS, options)

    @property
    def _options(self) -> EngineOptions:
        return EngineOptions(**{name: getattr(self, name) for name in self.engine_options}, loss=self.assigned_loss)

    @cached_property
    def _engines(self) -> dict[bool, CurvatureEngine]:
        """Engines of direct calls, for the last layer and for the other choices of weights."""
        return {}

    def _engine_at(self, x: Inputs, *without: str, last_layer: bool = False) -> CurvatureEngine:
        """The engine for a direct call of a public method, which must not call the methods `without` again."""
        key = last_layer or self.last_layer
        if key not in self._engines:  # kept, so that random draws go on from call to call
            problem = self._weights(last_layer=key).discover(x)
            self._engines[key] = self.engine_type.make(problem, get_likelihood(self.likelihood), self._options)
        return with_users_methods(self, self._engines[key], DERIVATIVES - set(without), {})

    def _weights(self, *, last_layer: bool) -> Weights:
        if last_layer:
            if isinstance(self.model, FeatureExtractor):
                return LastLayer(self.model.model, None, self.model.last_layer_name, self.model.feature_reduction)
            return LastLayer(self.model)
        if self.subnetwork_indices is not None:
            return Subnetwork(self.model, self.subnetwork_indices)
        return AllWeights(self.model)

    # Curvature.

    def full(self, x: Inputs, y: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Unit negative log likelihood of a batch, 0-dim, and its curvature, `[P, P]`.

        Raises:
            UnsupportedError: This backend has none.
        """
        summary, values = self._engine_at(x).full(x, y)
        return summary.loss_terms.sum(), values.sum(0)

    def diag(self, x: Inputs, y: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Unit negative log likelihood of a batch, 0-dim, and the diagonal of its curvature, `[P]`.

        Raises:
            UnsupportedError: This backend has none.
        """
        summary, values = self._engine_at(x).diag(x, y)
        return summary.loss_terms.sum(), values.sum(0)

    def kron(self, x: Inputs, y: Tensor, N: int, **options: Any) -> tuple[Tensor, Kron]:
        """Unit negative log likelihood of a batch, 0-dim, and its Kronecker factors.

        Factors of batches add up to those of all N data: a weight has B ⊗ A with B the sum over the batch's data and A
        their mean times (batch size / N); a bias has B.

        Raises:
            UnsupportedError: This backend has none.
        """
        from laplace.compat.kron import Kron  # legacy values are imported by those who use them

        engine = self._engine_at(x)
        summary, parts = engine.kron(x, y)
        return summary.loss_terms.sum(), Kron(parts.shared(len(y) / N, engine.dtype))

    # Jacobians and gradients.

    def jacobians(self, x: Inputs, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """Jacobians `[B, C, P]` of the outputs, and the outputs `[B, C]`.

        Args:
            x: Inputs of B data.
            enable_backprop: Keep the graph that leads to x.
        """
        return self._joined(self._engine_at(x, "jacobians"), x, enable_backprop)

    def functorch_jacobians(self, x: Inputs, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """Another name of `jacobians`."""
        return self.jacobians(x, enable_backprop)

    def last_layer_jacobians(self, x: Inputs, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """Jacobians `[B, C, P]` with respect to the last layer, and the outputs `[B, C]`."""
        engine = self._engine_at(x, "last_layer_jacobians", "jacobians", last_layer=True)
        return self._joined(engine, x, enable_backprop)

    def selected_output_jacobians(
        self, x: Inputs, outputs: Tensor, enable_backprop: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Jacobians `[B, s, P]` of some outputs of every sample, and all outputs `[B, C]`.

        Args:
            x: Inputs of B data.
            outputs: Indices of the outputs, `[B]` or `[B, s]`.
            enable_backprop: Keep the graph that leads to x.
        """
        Js, f = self.jacobians(x, enable_backprop)
        chosen = outputs.view(len(f), -1, 1).to(Js.device)
        return Js.gather(1, chosen.expand(-1, -1, Js.shape[2])), f

    def gradients(self, x: Inputs, y: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients `[B, P]` of `lossfunc` at every sample, and its sum, 0-dim."""
        Js, f = self.last_layer_jacobians(x) if self.last_layer else self.jacobians(x)
        with torch.enable_grad():
            outputs = f.detach().requires_grad_()
            loss = self.lossfunc(outputs, y)
            (residual,) = torch.autograd.grad(loss, outputs)
        return torch.einsum("bcp,bc->bp", Js, residual.to(Js)), loss.detach()

    @staticmethod
    def _joined(engine: CurvatureEngine, x: Inputs, enable_backprop: bool) -> tuple[Tensor, Tensor]:
        x = batches.to_device(x, engine.problem.device)
        with torch.set_grad_enabled(enable_backprop):
            parts = [(jacobian.dense(), f) for jacobian, f in engine.jacobian(x, create_graph=enable_backprop)]
        return torch.cat([J for J, _ in parts]), torch.cat([f for _, f in parts])


CurvatureInterface.__signature__ = _signature(CurvatureInterface)  # those of derived classes as they are made


class GGNInterface(CurvatureInterface):
    """Backends of the generalised Gauss–Newton matrix Σ_b J_bᵀ Λ_b J_b (= Fisher for exponential families).

    The arguments are those of `CurvatureInterface`, and:

    Args:
        stochastic: Replace Λ by gradients at targets drawn from the model (the Monte-Carlo Fisher).
        num_samples: Number of targets drawn per sample, with `stochastic`.
    """

    engine_type = GGNEngine
    engine_options = ("stochastic", "num_samples")


class EFInterface(CurvatureInterface):
    """Empirical Fisher backends: Σ_b g_b g_bᵀ, g_b the gradient of the unit negative log likelihood of sample b."""

    kind = "ef"
    engine_type = EFEngine


class NativeGGN(GGNInterface):
    """Generalised Gauss–Newton matrix Σ_b J_bᵀ Λ_b J_b (= Fisher for exponential families), exact or sampled.

    The arguments are those of `GGNInterface`, and:

    Args:
        generator: Random generator of the draws; by default a new one with the seed of `torch.manual_seed`.
        kfac_approx: Kronecker factors of layers that share weights over tokens or pixels: `"expand"` or `"reduce"`
            (Eschenhagen et al., 2023).
        memory_budget: Bytes of output gradients that may be stored at once; results depend on it by rounding only. None
            for 1 GiB, or on a larger card a sixth of its memory.
        max_passes: Largest number of backward passes for a batch, where outputs are per token or pixel: one per
            position and output. More raise an error.
    """

    engine_options = ("stochastic", "num_samples", "generator", "kfac_approx", "memory_budget", "max_passes")


class NativeEF(EFInterface):
    """Empirical Fisher Σ_b g_b g_bᵀ, g_b the gradient of the unit negative log likelihood of sample b.

    The arguments are those of `CurvatureInterface`, with `kfac_approx`, `memory_budget` and `max_passes` of
    `NativeGGN`; of outputs per token or pixel it takes a backward pass per position.
    """

    engine_options = ("kfac_approx", "memory_budget", "max_passes")


class NativeHessian(CurvatureInterface):
    """The exact Hessian of the negative log likelihood, which may be indefinite.

    Structures `full`, `diag`, `block` and `lowrank` take it, and say by `structure_kwargs={"indefinite": ...}` what
    becomes of negative eigenvalues. The arguments are those of `CurvatureInterface`, and:

    Args:
        memory_budget: Bytes of activations that vectorised products may hold.
        max_passes: Largest number of backward passes of a linearised prediction, where outputs are per token or pixel.
    """

    kind = "hessian"
    engine_type = HessianEngine
    engine_options = ("memory_budget", "max_passes")
