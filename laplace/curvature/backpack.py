"""Curvature by BackPACK (Dangel, Kunstner & Hennig, 2020), which extends the backward pass of modules it knows.

First-order quantities (gradients and Jacobians per datum) exist for known layers wherever they stand in a network;
second-order ones only where the network is, from the first layer with random parameters on, a chain of known modules.
Padding other than zeros, which BackPACK takes for zeros, and convolutions' Kronecker factors, which follow another
convention than KFAC-expand, are the native engine's.
"""

from __future__ import annotations

import copy
import itertools
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from laplace.core.batch import Inputs
from laplace.core.gram import gram
from laplace.core.random_numbers import drawn_seed
from laplace.curvature.interface import CurvatureInterface, EFInterface, PackageGGN, PackageInterface
from laplace.curvature.packages import CopiedBatch, LayerFactors, PackageEngine, Reasons, missing, obstacles_of
from laplace.engines.engine import EngineOptions, Groups
from laplace.engines.native.forward import ForwardPass
from laplace.engines.native.functions import LayerCall
from laplace.engines.native.kinds import EFEngine, GGNEngine
from laplace.errors import CurvatureError
from laplace.likelihoods.base import Likelihood
from laplace.weights.problem import Problem


@dataclass(frozen=True, eq=False)
class ModuleChain:
    """Modules one after the other, of which the last gives the outputs of the network.

    Attributes:
        modules: The modules, no two of them the same object.
        x: Inputs of the first one.
    """

    modules: tuple[nn.Module, ...]
    x: Tensor


@dataclass(frozen=True)
class _Call:
    """One call of a module without children; versions count the writes to a tensor."""

    module: nn.Module
    x: Any
    x_version: int
    output: Any
    output_version: int


def chain_from(module: nn.Module, x: Inputs, tensors: Sequence[Tensor]) -> ModuleChain:
    """The chain that begins with the first module that holds one of the tensors, watched in one forward pass.

    What runs before that module may be anything: it does not depend on the tensors.

    Raises:
        CurvatureError: Something else happens in between (a function, a sum of branches, a write in place).
    """
    wanted = {id(tensor) for tensor in tensors}
    calls: list[_Call] = []
    with torch.no_grad(), _watched(module, calls):
        f = module(x)
    starts = [n for n, call in enumerate(calls) if wanted & _held(call.module)]
    links = calls[starts[0] :] if starts else []
    if not links or not _joined(links, f) or not isinstance(links[0].x, Tensor):
        raise CurvatureError("the network is not a chain of modules")
    if not wanted <= set().union(*(_held(call.module) for call in links)):
        raise CurvatureError("a parameter is not held by a module of the chain")
    return ModuleChain(tuple(_apart([call.module for call in links])), links[0].x)


def _held(module: nn.Module) -> set[int]:
    return {id(tensor) for tensor in module._parameters.values() if tensor is not None}


def _joined(links: Sequence[_Call], f: Any) -> bool:
    """True if the input of every module is the output of the one before, unchanged, and the last one's is f."""
    last = links[-1]
    between = all(b.x is a.output and b.x_version == a.output_version for a, b in itertools.pairwise(links))
    return between and f is last.output and isinstance(f, Tensor) and f._version == last.output_version


def _apart(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules with copies of those that come again: what is written to a module must be of one call."""
    seen: set[int] = set()
    apart: list[nn.Module] = []
    for module in modules:
        apart.append(copy.deepcopy(module) if id(module) in seen else module)
        seen.add(id(module))
    return apart


@contextmanager
def _watched(module: nn.Module, calls: list[_Call]) -> Iterator[None]:
    def remember(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x = args[0] if len(args) == 1 and not kwargs else None
        calls.append(_Call(part, x, _version(x), output, _version(output)))

    leaves = [part for part in module.modules() if not any(True for _ in part.children())]
    handles = [leaf.register_forward_hook(remember, with_kwargs=True) for leaf in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else -1


SupportTable = Mapping[type[nn.Module], Callable[[Any], str]]
"""Reason, by exact class, why a module is not differentiated correctly; empty if it is."""


def _none(module: nn.Module) -> str:
    return ""


def _padded(module: Any) -> str:
    if isinstance(module.padding, str):
        return f"padding={module.padding!r}, which it does not know"
    return "" if module.padding_mode == "zeros" else f"{module.padding_mode} padding, which it takes for zeros"


def _enlarged(module: Any) -> str:
    return "output padding" if any(module.output_padding) else ""


def _in_place(module: Any) -> str:
    return "an activation in place" if module.inplace else ""


def _normalised(module: Any) -> str:
    return "" if module.affine and module.track_running_stats else "a norm without scale or running statistics"


def _max_pooled(module: Any) -> str:
    return "indices of a pooling" if module.return_indices else ""


def _mean_pooled(module: Any) -> str:
    plain = module.count_include_pad and not module.ceil_mode and getattr(module, "divisor_override", None) is None
    return "" if plain else "an average of another number of entries"


def _cropped(module: Any) -> str:
    return "negative padding" if min(module.padding) < 0 else ""


def _flat(module: Any) -> str:
    return "" if module.start_dim >= 1 else "the data's dimension is flattened"


_AVERAGES = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)

LAYERS: SupportTable = {
    nn.Linear: _none,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _padded),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _enlarged),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _normalised),
}
"""Layers with parameters, by exact class."""

FACTORED: SupportTable = {
    nn.Linear: _none,
    nn.Conv2d: _padded,
    nn.ReLU: _in_place,
    **dict.fromkeys((nn.Sigmoid, nn.Tanh, nn.Identity), _none),
    nn.Dropout: _in_place,
    nn.Flatten: _flat,
    nn.MaxPool2d: _max_pooled,
    nn.AvgPool2d: _mean_pooled,
    nn.ZeroPad2d: _cropped,
}
"""Modules of chains through which Kronecker factors are propagated."""

CHAIN: SupportTable = {
    **LAYERS,
    **FACTORED,
    nn.LogSigmoid: _none,
    **dict.fromkeys((nn.LeakyReLU, nn.ELU, nn.SELU), _in_place),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool3d), _max_pooled),
    **dict.fromkeys(_AVERAGES, _mean_pooled),
}
"""Modules of chains through which roots of the GGN are propagated."""


def fault_of(module: nn.Module, table: SupportTable) -> str:
    """Reason why a module is not in a table; empty if it is."""
    if type(module) not in table:
        return f"no derivative of {type(module).__name__}"
    if module._forward_hooks or module._forward_pre_hooks:
        return "a hook on a layer"
    return table[type(module)](module)


def backpack_fault(call: LayerCall, *, factored: bool) -> str:
    """Reason why BackPACK does not differentiate a layer correctly; empty if it does."""
    layer = call.module
    if factored and type(layer) is not nn.Linear:
        return f"no Kronecker factors of {type(layer).__name__} by the convention of KFAC-expand"
    if factored and call.x.ndim != 2:
        return "no Kronecker factors for positions that share a weight"
    return fault_of(layer, LAYERS)


def faultless(chain: ModuleChain, table: SupportTable) -> ModuleChain:
    """A chain of which the table knows every module.

    Raises:
        CurvatureError: It does not know one, or BackPACK averages in another dtype than the default one.
    """
    for module in chain.modules:
        fault = fault_of(module, table)
        if fault:
            raise CurvatureError(fault)
        # Its derivative of a mean is that of a convolution, which is made in the default dtype.
        if isinstance(module, _AVERAGES) and chain.x.dtype is not torch.get_default_dtype():
            raise CurvatureError(f"averages in {chain.x.dtype}, which is not the default dtype")
    return chain


def hessian_known(loss: nn.Module, outputs: int) -> nn.Module:
    """The loss as BackPACK takes it for its Hessian.

    Raises:
        CurvatureError: It has no Hessian of this loss.
    """
    if type(loss) is nn.MSELoss:
        return nn.MSELoss(reduction="sum")
    if type(loss) is nn.CrossEntropyLoss and loss.weight is None and loss.label_smoothing == 0:
        return nn.CrossEntropyLoss(reduction="sum")  # BackPACK insists on −100 for ignored labels; none are left here
    if type(loss) is nn.BCEWithLogitsLoss and loss.weight is None and loss.pos_weight is None and outputs == 1:
        return nn.BCEWithLogitsLoss(reduction="sum")
    raise CurvatureError(f"no Hessian of {type(loss).__name__} of {outputs} outputs")


INSTALL = (
    "pip install --no-deps backpack-for-pytorch unfoldNd and then pip install einops leave an installed PyTorch as it "
    "is (its own requirements would bring torchvision and another PyTorch)"
)

_ONE_AT_A_TIME = threading.RLock()
"""BackPACK keeps its active extensions and hooks in global variables."""


def _package() -> ModuleType:
    try:
        import backpack
        import backpack.context
        import backpack.extensions
    except ImportError as error:
        raise missing("backpack", INSTALL, error) from error
    return backpack


class BackPackEngine(PackageEngine):
    """Base of both kinds of curvature: layers, and gradients per datum.

    The arguments are those of `PackageEngine`.
    """

    package = "backpack"

    def __init__(self, problem: Problem, likelihood: Likelihood, options: EngineOptions) -> None:
        super().__init__(problem, likelihood, options)
        self.backpack = _package()

    @abstractmethod
    def computes(self) -> Mapping[str, Callable[..., Any]]: ...

    def obstacles(self, primitive: str, watched: ForwardPass) -> Reasons:
        return obstacles_of(watched, lambda use: backpack_fault(use, factored=primitive == "kron"))

    @abstractmethod
    def _blocks(self, batch: CopiedBatch, groups: Groups) -> list[Tensor]:
        """Blocks of the unit curvature of groups of tensors."""

    def _full(self, batch: CopiedBatch) -> Tensor:
        return self._blocks(batch, (tuple(range(len(batch.tensors))),))[0]

    def _jacobian(self, batch: CopiedBatch) -> Tensor:
        """Jacobians `[B, C, P]`: one backward pass per output."""
        with self._extended(_layers(batch)):
            f = batch.module(batch.x)
            rows: list[Tensor] = []
            for column in f.T:
                with self.backpack.backpack(self.backpack.extensions.BatchGrad(), retain_graph=True):
                    column.sum().backward(retain_graph=True)
                rows.append(torch.cat(self._per_datum(batch, "grad_batch"), 1))
        return torch.stack(rows, 1)

    def _per_datum(self, batch: CopiedBatch, field: str) -> list[Tensor]:
        """Random entries `[B, p]` of what BackPACK left per datum on every tensor."""
        whole = [getattr(tensor, field).detach() for tensor in batch.tensors]
        return [slot.take_rows(values) for slot, values in zip(self.problem.slots, whole, strict=True)]

    @contextmanager
    def _extended(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """BackPACK's hooks on private modules; its global list of hooks is afterwards what it was before."""
        with _ONE_AT_A_TIME:
            handles = self.backpack.context.CTX.hook_handles
            before = len(handles)
            try:
                for module in modules:
                    self.backpack.extend(module)
                yield
            finally:
                ours = handles[before:]
                del handles[before:]
                for handle in ours:
                    handle.remove()


class BackPackGGNEngine(BackPackEngine):
    """GGN by a propagated root of the output Hessian, exact or sampled; the arguments are those of the base."""

    name = "BackPackGGN"
    native_type = GGNEngine

    def computes(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "full": self._full, "blocks": self._blocks, "diag": self._diag, "kron": self._kron,
            "jacobian": self._jacobian,
        }  # fmt: skip

    def _blocks(self, batch: CopiedBatch, groups: Groups) -> list[Tensor]:
        """Grams of the propagated root V, `[K, B, p]` of every tensor."""
        roots = self._propagated(batch, range(len(batch.tensors)), "SqrtGGN", CHAIN)
        flat = [slot.take_rows(root.flatten(0, 1)) for slot, root in zip(self.problem.slots, roots, strict=True)]
        return [self.factor * gram(torch.cat([flat[i] for i in group], 1)) for group in groups]

    def _diag(self, batch: CopiedBatch, chosen: Sequence[int]) -> dict[int, Tensor]:
        diagonals = self._propagated(batch, chosen, "DiagGGN", CHAIN)
        return {i: self.factor * self.problem.slots[i].take(v) for i, v in zip(chosen, diagonals, strict=True)}

    def _kron(self, batch: CopiedBatch, chosen: Sequence[int]) -> dict[int, LayerFactors]:
        sides = self._propagated(batch, chosen, "KFAC" if self.options.stochastic else "KFLR", FACTORED)
        factors: dict[int, LayerFactors] = {}
        for i, (output, *inputs) in zip(chosen, sides, strict=True):
            n_data = len(batch.y)  # BackPACK's input side is a mean over the data
            factors[i] = LayerFactors(self.factor * output, n_data * inputs[0] if inputs else None, n_data)
        return factors

    def _propagated(self, batch: CopiedBatch, chosen: Sequence[int], quantity: str, table: SupportTable) -> list[Any]:
        """Values of a second-order extension for some tensors, in one backward pass."""
        loss = hessian_known(self.loss, batch.watched.f.shape[1])
        batch.treat_only(chosen)
        chain = faultless(chain_from(batch.module, batch.x, [batch.tensors[i] for i in chosen]), table)
        extension = self._extension(quantity)
        with self._extended([*chain.modules, loss]), self.backpack.backpack(extension):
            loss(nn.Sequential(*chain.modules)(chain.x), batch.y).backward()
        return [getattr(batch.tensors[i], extension.savefield) for i in chosen]

    def _extension(self, quantity: str) -> Any:
        """An extension, its draws (from the global state, which is put back) begun at a seed of their own."""
        extensions = self.backpack.extensions
        if self.generator is not None:
            torch.manual_seed(drawn_seed(self.generator))
        if not self.options.stochastic:
            return getattr(extensions, quantity if quantity == "KFLR" else f"{quantity}Exact")()
        return getattr(extensions, quantity if quantity == "KFAC" else f"{quantity}MC")(
            mc_samples=self.options.num_samples
        )


class BackPackEFEngine(BackPackEngine):
    """Empirical Fisher by gradients per datum, or by the sums of their squares; the arguments are those of the base."""

    name = "BackPackEF"
    native_type = EFEngine

    def computes(self) -> Mapping[str, Callable[..., Any]]:
        return {"full": self._full, "blocks": self._blocks, "diag": self._diag, "jacobian": self._jacobian}

    def _blocks(self, batch: CopiedBatch, groups: Groups) -> list[Tensor]:
        self._backward(batch, self.backpack.extensions.BatchGrad())
        gradients = self._per_datum(batch, "grad_batch")
        # The factor of the loss is a factor of every gradient, so that the Fisher has its square.
        return [self.factor**2 * gram(torch.cat([gradients[i] for i in group], 1)) for group in groups]

    def _diag(self, batch: CopiedBatch, chosen: Sequence[int]) -> dict[int, Tensor]:
        batch.treat_only(chosen)
        self._backward(batch, self.backpack.extensions.SumGradSquared())
        sums = [batch.tensors[i].sum_grad_squared for i in chosen]  # pyright: ignore[reportAttributeAccessIssue]
        return {i: self.factor**2 * self.problem.slots[i].take(v) for i, v in zip(chosen, sums, strict=True)}

    def _backward(self, batch: CopiedBatch, extension: Any) -> None:
        with self._extended(_layers(batch)), self.backpack.backpack(extension):
            self.loss(batch.module(batch.x), batch.y).backward()


def _layers(batch: CopiedBatch) -> list[nn.Module]:
    """Modules of the copy that hold random parameters."""
    parameters = {id(tensor) for tensor in batch.tensors if tensor.requires_grad}
    return [m for m in batch.module.modules() if any(id(t) in parameters for t in m._parameters.values())]


def _cleanup(module: nn.Module) -> None:
    """Takes BackPACK's hooks and attributes off a module and its submodules, those of other modules left alone.

    `backpack.context.CTX.remove_hooks()` takes the hooks off every module there is, and leaves the mark by which
    `extend` knows an extended module, so that it could not be extended again.
    """
    backpack = _package()
    names = (backpack.hook_store_io, backpack.hook_run_extensions)
    for part in module.modules():
        for hooks in (part._forward_hooks, part._backward_hooks):
            for key in [key for key, hook in hooks.items() if hook in names]:
                del hooks[key]
        if not part._backward_hooks:
            part._is_full_backward_hook = None
        backpack.memory_cleanup(part)
        part.__dict__.pop("_backpack_extend", None)


class BackPackInterface(CurvatureInterface):
    """Base of the backends by BackPACK; the arguments are those of `CurvatureInterface`."""


class BackPackGGN(BackPackInterface, PackageGGN):
    """GGN by BackPACK, exact or sampled: `full`, `diag` and `kron`, blocks and Jacobians; the rest is native.

    The arguments are those of `PackageGGN`.
    """

    engine_type = BackPackGGNEngine


class BackPackEF(BackPackInterface, PackageInterface, EFInterface):
    """Empirical Fisher by BackPACK: structures `full` and `diag`, blocks and Jacobians; the rest is native.

    The arguments are those of `PackageInterface`.
    """

    engine_type = BackPackEFEngine
