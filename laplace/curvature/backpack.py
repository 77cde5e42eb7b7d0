"""Curvature by BackPACK (Dangel, Kunstner & Hennig, 2020), which extends the backward pass of modules it knows.

First-order quantities (gradients and Jacobians per sample) exist for known layers wherever they stand in a network;
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
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from laplace.core.batch import Inputs
from laplace.core.gram import gram
from laplace.core.random_numbers import drawn_seed
from laplace.curvature.interface import SAMPLED_BY_PACKAGE, CurvatureInterface, EFInterface, GGNInterface
from laplace.curvature.packages import CopiedBatch, LayerFactors, PackageEngine, imported, obstacle_by_row
from laplace.engines.engine import Groups
from laplace.engines.native.forward import ForwardPass
from laplace.engines.native.functions import LayerCall
from laplace.engines.native.kinds import EFEngine, GGNEngine
from laplace.errors import CurvatureError

# Which modules BackPACK differentiates correctly, and the chains of them that its second-order quantities need.

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_MAXIMA = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_AVERAGES = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_ACTIVATIONS = (nn.ReLU, nn.Dropout, nn.LeakyReLU, nn.ELU, nn.SELU)

LAYERS: frozenset[type[nn.Module]] = frozenset((nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED, *_NORMS))
"""Layers with parameters."""

FACTORED: frozenset[type[nn.Module]] = frozenset((
    nn.Linear, nn.Conv2d, nn.ReLU, nn.Sigmoid, nn.Tanh, nn.Identity, nn.Dropout, nn.Flatten, nn.MaxPool2d,
    nn.AvgPool2d, nn.ZeroPad2d,
))  # fmt: skip
"""Modules of chains through which Kronecker factors are propagated."""

CHAIN: frozenset[type[nn.Module]] = LAYERS | FACTORED | {nn.LogSigmoid, *_ACTIVATIONS, *_MAXIMA, *_AVERAGES}
"""Modules of chains through which roots of the GGN are propagated."""


def fault_of(module: Any, known: frozenset[type[nn.Module]]) -> str:
    """Reason why a module is not differentiated correctly; empty if it is."""
    kind = type(module)
    if kind not in known:
        return f"no derivative of {kind.__name__}"
    if module._forward_hooks or module._forward_pre_hooks:
        return "a hook on a layer"
    if kind in _CONVOLUTIONS and isinstance(module.padding, str):
        return f"padding={module.padding!r}, which it does not know"
    if kind in _CONVOLUTIONS and module.padding_mode != "zeros":
        return f"{module.padding_mode} padding, which it takes for zeros"
    if kind in _AVERAGES:
        plain = module.count_include_pad and not module.ceil_mode and getattr(module, "divisor_override", None) is None
        return "" if plain else "an average of another number of entries"
    faults = (
        (_TRANSPOSED, lambda: any(module.output_padding), "output padding"),
        (_ACTIVATIONS, lambda: module.inplace, "an activation in place"),
        (_MAXIMA, lambda: module.return_indices, "indices of a pooling"),
        ((nn.ZeroPad2d,), lambda: min(module.padding) < 0, "negative padding"),
        ((nn.Flatten,), lambda: module.start_dim < 1, "the data's dimension is flattened"),
        (_NORMS, lambda: not (module.affine and module.track_running_stats),
         "a norm without scale or running statistics"),
    )  # fmt: skip
    return next((words for kinds, is_wrong, words in faults if kind in kinds and is_wrong()), "")


def layer_fault(call: LayerCall, *, factored: bool) -> str:
    """Reason why BackPACK does not differentiate a layer correctly; empty if it does."""
    layer = call.module
    if factored and type(layer) is not nn.Linear:
        return f"no Kronecker factors of {type(layer).__name__} by the convention of KFAC-expand"
    if factored and call.x.ndim != 2:
        return "no Kronecker factors for positions that share a weight"
    return fault_of(layer, LAYERS)


class _Call(NamedTuple):
    module: nn.Module
    x: Any
    x_version: int  # Number of writes to the tensor
    output: Any
    output_version: int


def chain_from(
    module: nn.Module, x: Inputs, tensors: Sequence[Tensor], known: frozenset[type[nn.Module]]
) -> tuple[list[nn.Module], Tensor]:
    """The chain that begins with the first module that holds one of the tensors, and the inputs of that module.

    What runs before may be anything: it does not depend on the tensors. Modules that come again are copied, since what
    is written to a module must be of one call.

    Raises:
        CurvatureError: Something else happens in between (a function, a sum of branches, a write in place), or a module
            is not known.
    """
    calls: list[_Call] = []

    def version(value: Any) -> int:
        return value._version if isinstance(value, Tensor) else -1

    def remember(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        first = args[0] if len(args) == 1 and not kwargs else None
        calls.append(_Call(part, first, version(first), output, version(output)))

    leaves = [part for part in module.modules() if not any(True for _ in part.children())]
    handles = [leaf.register_forward_hook(remember, with_kwargs=True) for leaf in leaves]
    try:
        with torch.no_grad():
            f = module(x)
    finally:
        for handle in handles:
            handle.remove()
    wanted = {id(tensor) for tensor in tensors}
    held = [{id(tensor) for tensor in call.module._parameters.values()} for call in calls]
    start = next((n for n, its in enumerate(held) if wanted & its), len(calls))
    links = calls[start:]
    joined = all(b.x is a.output and b.x_version == a.output_version for a, b in itertools.pairwise(links))
    if not links or not joined or f is not links[-1].output or version(f) != links[-1].output_version:
        raise CurvatureError("the network is not a chain of modules")
    if not isinstance(f, Tensor) or not isinstance(links[0].x, Tensor):
        raise CurvatureError("the network is not a chain of modules")
    if not wanted <= set().union(*held[start:]):
        raise CurvatureError("a parameter is not held by a module of the chain")
    modules: list[nn.Module] = []
    for link in links:
        if fault := fault_of(link.module, known):
            raise CurvatureError(fault)
        # Its derivative of a mean is that of a convolution, which is made in the default dtype.
        if isinstance(link.module, _AVERAGES) and links[0].x.dtype is not torch.get_default_dtype():
            raise CurvatureError(f"averages in {links[0].x.dtype}, which is not the default dtype")
        modules.append(copy.deepcopy(link.module) if link.module in modules else link.module)
    return modules, links[0].x


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


def _backpack() -> ModuleType:
    import backpack
    import backpack.context
    import backpack.extensions

    return backpack


class BackPackEngine(PackageEngine):
    """Base of both kinds of curvature: layers, and gradients per sample."""

    package, install, load = "backpack", INSTALL, staticmethod(_backpack)

    def obstacle(self, primitive: str, watched: ForwardPass) -> str:
        return obstacle_by_row(watched, lambda call: layer_fault(call, factored=primitive == "kron"))

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
                with self.api.backpack(self.api.extensions.BatchGrad(), retain_graph=True):
                    column.sum().backward(retain_graph=True)
                rows.append(torch.cat(self._per_datum(batch, "grad_batch"), 1))
        return torch.stack(rows, 1)

    def _per_datum(self, batch: CopiedBatch, field: str) -> list[Tensor]:
        """Random entries `[B, p]` of the per-sample values that BackPACK left on every tensor."""
        whole = [getattr(tensor, field).detach() for tensor in batch.tensors]
        return [slot.take_rows(values) for slot, values in zip(self.problem.slots, whole, strict=True)]

    @contextmanager
    def _extended(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """BackPACK's hooks on private modules; its global list of hooks is restored afterwards."""
        with _ONE_AT_A_TIME:
            handles = self.api.context.CTX.hook_handles
            before = len(handles)
            try:
                for module in modules:
                    self.api.extend(module)
                yield
            finally:
                ours = handles[before:]
                del handles[before:]
                for handle in ours:
                    handle.remove()


class BackPackGGNEngine(BackPackEngine):
    """GGN by a propagated root of the output Hessian, exact or sampled."""

    name = "BackPackGGN"
    native_type = GGNEngine

    def computes(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "full": self._full, "blocks": self._blocks, "diag": self._diag, "kron": self._kron,
            "jacobian": self._jacobian,
        }  # fmt: skip

    def _blocks(self, batch: CopiedBatch, groups: Groups) -> list[Tensor]:
        """Grams of the propagated root V, `[K, B, p]` of every tensor."""
        roots = self._propagated(batch, "SqrtGGN", CHAIN)
        flat = [slot.take_rows(root.flatten(0, 1)) for slot, root in zip(self.problem.slots, roots, strict=True)]
        return [self.factor * gram(torch.cat([flat[i] for i in group], 1)) for group in groups]

    def _diag(self, batch: CopiedBatch) -> list[Tensor]:
        diagonals = self._propagated(batch, "DiagGGN", CHAIN)
        return [self.factor * slot.take(v) for slot, v in zip(self.problem.slots, diagonals, strict=True)]

    def _kron(self, batch: CopiedBatch) -> list[LayerFactors]:
        sides = self._propagated(batch, "KFAC" if self.options.stochastic else "KFLR", FACTORED)
        n_data = len(batch.y)  # BackPACK's input side is a mean over the data
        return [
            LayerFactors(self.factor * output, n_data * inputs[0] if inputs else None, n_data)
            for output, *inputs in sides
        ]

    def _propagated(self, batch: CopiedBatch, quantity: str, known: frozenset[type[nn.Module]]) -> list[Any]:
        """Values of a second-order extension for all tensors, in one backward pass."""
        loss = hessian_known(self.loss, batch.watched.f.shape[1])
        modules, x = chain_from(batch.module, batch.x, batch.tensors, known)
        extension = self._extension(quantity)
        with self._extended([*modules, loss]), self.api.backpack(extension):
            loss(nn.Sequential(*modules)(x), batch.y).backward()
        return [getattr(tensor, extension.savefield) for tensor in batch.tensors]

    def _extension(self, quantity: str) -> Any:
        """An extension; its draws come from the global state, which is seeded anew and restored."""
        extensions = self.api.extensions
        if self.generator is not None:
            torch.manual_seed(drawn_seed(self.generator))
        if not self.options.stochastic:
            return getattr(extensions, quantity if quantity == "KFLR" else f"{quantity}Exact")()
        return getattr(extensions, quantity if quantity == "KFAC" else f"{quantity}MC")(
            mc_samples=self.options.num_samples
        )


class BackPackEFEngine(BackPackEngine):
    """Empirical Fisher by gradients per sample, or by the sums of their squares."""

    name = "BackPackEF"
    native_type = EFEngine

    def computes(self) -> Mapping[str, Callable[..., Any]]:
        return {"full": self._full, "blocks": self._blocks, "diag": self._diag, "jacobian": self._jacobian}

    def _blocks(self, batch: CopiedBatch, groups: Groups) -> list[Tensor]:
        self._backward(batch, self.api.extensions.BatchGrad())
        gradients = self._per_datum(batch, "grad_batch")
        # The factor of the loss is a factor of every gradient, so that the Fisher has its square.
        return [self.factor**2 * gram(torch.cat([gradients[i] for i in group], 1)) for group in groups]

    def _diag(self, batch: CopiedBatch) -> list[Tensor]:
        self._backward(batch, self.api.extensions.SumGradSquared())
        sums = [tensor.sum_grad_squared for tensor in batch.tensors]  # pyright: ignore[reportAttributeAccessIssue]
        return [self.factor**2 * slot.take(v) for slot, v in zip(self.problem.slots, sums, strict=True)]

    def _backward(self, batch: CopiedBatch, extension: Any) -> None:
        with self._extended(_layers(batch)), self.api.backpack(extension):
            self.loss(batch.module(batch.x), batch.y).backward()


def _layers(batch: CopiedBatch) -> list[nn.Module]:
    parameters = {id(tensor) for tensor in batch.tensors if tensor.requires_grad}
    return [m for m in batch.module.modules() if any(id(t) in parameters for t in m._parameters.values())]


def _cleanup(module: nn.Module) -> None:
    """Removes BackPACK's hooks and attributes from a module and its submodules.

    `backpack.context.CTX.remove_hooks()` takes the hooks off every module there is, and leaves the mark by which
    `extend` knows an extended module, so that it could not be extended again.
    """
    backpack: Any = imported(_backpack, "backpack", INSTALL)
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
    """Base of the backends by BackPACK.

    The arguments are those of `CurvatureInterface`, and:

    Args:
        memory_budget: Bytes of Jacobians, or of activations of vectorised passes, that are held at once.

    Warns:
        InstallationWarning: The package cannot be imported, so that the native engine computes, with the same results.
    """

    engine_options = ("memory_budget",)


class BackPackGGN(BackPackInterface, GGNInterface):
    """GGN by BackPACK, exact or sampled: `full`, `diag` and `kron`, blocks and Jacobians; the rest is native.

    The arguments are those of `NativeGGN`, without `kfac_approx` and `max_passes`.
    """

    engine_type = BackPackGGNEngine
    engine_options = SAMPLED_BY_PACKAGE


class BackPackEF(BackPackInterface, EFInterface):
    """Empirical Fisher by BackPACK: structures `full` and `diag`, blocks and Jacobians; the rest is native.

    The arguments are those of `BackPackInterface`.
    """

    engine_type = BackPackEFEngine
