"""The view that backends have of a model: a module, named tensors of it, and which of their entries are random."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from laplace.core import batch as batches
from laplace.core.batch import ForwardFn, Inputs
from laplace.core.cached import cached_property
from laplace.core.layout import Layout
from laplace.core.positions import ChannelsLast
from laplace.core.processes import Processes
from laplace.enums import FeatureReduction
from laplace.errors import InvalidData, UnsupportedError
from laplace.network.fsdp import fsdp_processes, full_tensor, require_unsharded
from laplace.network.input_errors import call_with_context
from laplace.network.model_guard import model_lock, private_copy
from laplace.network.plain import known_places
from laplace.network.tree import Place, places_of


@dataclass(frozen=True, eq=False)
class Selection:
    """Entries of one tensor, seen as a matrix (first dimension × the rest): rows × columns, then an index."""

    rows: Tensor | None  # that hold a selected entry, `[R]`, or None for all
    cols: Tensor | None  # that hold one, `[Q]`, or None for all
    index: Tensor | None  # within the R × Q sub-matrix, row-major, or None if it is selected whole

    @classmethod
    def from_entries(cls, entries: Tensor, shape: torch.Size) -> Selection:
        """Selection of the flat `entries` (sorted) of a tensor of `shape`."""
        width = max(1, shape[1:].numel()) if len(shape) > 1 else 1
        height = shape.numel() // width
        rows, row_at = (entries // width).unique(return_inverse=True)
        cols, col_at = (entries % width).unique(return_inverse=True)
        rectangular = rows.numel() * cols.numel() == entries.numel()
        return cls(
            rows=None if rows.numel() == height else rows,
            cols=None if cols.numel() == width else cols,
            index=None if rectangular else row_at * cols.numel() + col_at,
        )


@dataclass(frozen=True, eq=False)
class ParameterSlice:
    """One tensor of a problem with random entries."""

    name: str  # qualified, in the module
    shape: torch.Size  # of the whole tensor
    entries: Tensor | None = None  # flat random entries, sorted, or None for all

    @property
    def size(self) -> int:
        """Number of random entries."""
        return self.shape.numel() if self.entries is None else int(self.entries.numel())

    @cached_property
    def selection(self) -> Selection | None:
        """The random entries as rows × columns, or None for all."""
        return None if self.entries is None else Selection.from_entries(self.entries, self.shape)

    def on(self, device: torch.device) -> ParameterSlice:
        """The same entries, with indices on a device: these are copied there once, and kept."""
        if self.entries is None or self.entries.device == device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = ParameterSlice(self.name, self.shape, self.entries.to(device))
        return self._elsewhere[device]

    @cached_property
    def _elsewhere(self) -> dict[torch.device, ParameterSlice]:
        return {}

    def take(self, tensor: Tensor) -> Tensor:
        """Random entries `[p]` of a tensor of this slot's shape."""
        flat, entries = tensor.reshape(-1), self.on(tensor.device).entries
        return flat if entries is None else flat[entries]

    def take_rows(self, tensors: Tensor) -> Tensor:
        """Random entries `[R, p]` of tensors `[R, *shape]`."""
        flat, entries = tensors.reshape(len(tensors), -1), self.on(tensors.device).entries
        return flat if entries is None else flat[:, entries]

    def place(self, values: Tensor) -> Tensor:
        """Entries `[R, p]` at their places in flat tensors of this slot's shape, `[R, numel]`; zero elsewhere."""
        entries = self.on(values.device).entries
        if entries is None:
            return values
        return values.new_zeros(len(values), self.shape.numel()).index_copy(1, entries, values)


@dataclass(frozen=True)
class Problem:
    """A module to differentiate, and the tensors to differentiate it by: all that a curvature backend needs to know.

    All weights are every trainable tensor; a last layer is the head's tensors, so that autograd's graph
    starts at the head and the trunk runs without one; a subnetwork is a set of entries.

    Attributes:
        module: The network, never written to; in a block of passes a copy of it.
        slots: The tensors with random entries, in order.
        forward_fn: How to call the module on inputs; None for the default of `laplace.core.batch.call`.
        reduction: How a head applied to positions `[B, T, D]` is reduced, or None.
        head: Name of the head module of a last-layer problem, or None.
        samples_at_once: By what they depend on, decisions of how many samples of the weights a pass takes.
        watched: Not empty once a pass at other tensors has shown that the network uses no others.
    """

    module: nn.Module
    slots: tuple[ParameterSlice, ...]
    forward_fn: ForwardFn | None = None
    reduction: str | None = None
    head: str | None = None
    layout: Layout = field(init=False)
    samples_at_once: dict[Hashable, int] = field(init=False, default_factory=dict, compare=False, repr=False)
    watched: list[bool] = field(init=False, default_factory=list, compare=False, repr=False)

    def __post_init__(self) -> None:
        layout = Layout(tuple(slot.name for slot in self.slots), tuple(slot.size for slot in self.slots))
        object.__setattr__(self, "layout", layout)

    @cached_property
    def processes(self) -> Processes | None:
        """Processes over which FSDP2 shards the module, which run it together; None of a whole one."""
        return (
            None if known_places(self.module) is not None else fsdp_processes(self.module)
        )  # plain networks are whole

    @contextmanager
    def on_private_copy(self) -> Iterator[Problem]:
        """The same problem on a network that a block of passes has to itself, see `private_copy`."""
        with private_copy(self.module, self.forward_fn) as module:
            own = copy.copy(self)
            object.__setattr__(own, "module", module)
            yield own

    @property
    def channel_dim(self) -> int:
        """Dimension of the channels in the outputs as users see them; `run` returns them last."""
        return self.forward_fn.channel_dim if isinstance(self.forward_fn, ChannelsLast) else -1

    @property
    def device(self) -> torch.device:
        """Device of the random parameters."""
        return self.tensor(self.slots[0].name).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the random parameters."""
        return self.tensor(self.slots[0].name).dtype

    def tensor(self, name: str) -> Tensor:
        """The module's tensor of this name."""
        *path, key = name.split(".")
        with model_lock(self.module):
            module: Any = self.module
            for part in path:
                module = module._modules[part]
            return module._parameters[key]

    def mean(self) -> Tensor:
        """Present values of the random entries, `[P]`, detached; a collective call where the module is sharded."""
        return torch.cat([slot.take(full_tensor(self.tensor(slot.name).detach())) for slot in self.slots])

    def places(self) -> list[Place]:
        """Every place of a parameter: its name, the module and the key there.

        Tied parameters have several places, but one module with several names has only the first.
        """
        return known_places(self.module) or places_of(self.module)

    def detached(self, places: list[Place] | None = None) -> dict[str, Tensor]:
        """Every parameter by name, detached; of a head also tied ones separately, since its features are fixed.

        Here and below `places` are those of the parameters, where they are known.
        """
        tensors = {name: module._parameters[key] for name, module, key in places or self.places()}
        if self.head is None:  # the first name of tied ones
            names = {id(tensor): name for name, tensor in reversed(tensors.items())}
            tensors = {name: tensor for name, tensor in tensors.items() if names[id(tensor)] == name}
        return {name: _plain(tensor) for name, tensor in tensors.items() if tensor is not None}

    def _places_by_name(
        self, names: Collection[str], places: list[Place] | None
    ) -> dict[str, list[tuple[dict[str, Any], str]]]:
        """All places of parameters, by names of `detached`; of a head each separately."""
        tables = [(name, module._parameters, key) for name, module, key in places or self.places()]
        if self.head is not None:
            return {name: [(table, key)] for name, table, key in tables if name in names}
        shared: defaultdict[int, list[tuple[dict[str, Any], str]]] = defaultdict(list)
        for _, table, key in tables:
            shared[id(table[key])].append((table, key))
        return {name: shared[id(table[key])] for name, table, key in tables if name in names}

    def stand_ins(self, places: list[Place] | None = None) -> dict[str, Tensor]:
        """Detached tensors for every parameter: those of the slots require gradients, the others do not."""
        tensors = self.detached(places)
        for slot in self.slots:
            tensors[slot.name].requires_grad_()
        return tensors

    def substituted(self, theta: Tensor) -> dict[str, Tensor]:
        """Detached tensors with the random entries replaced by `theta`, `[P]`."""
        return self.detached() | {name: rows[0] for name, rows in self.stacked(theta.unsqueeze(0)).items()}

    def stacked(self, thetas: Tensor) -> dict[str, Tensor]:
        """Tensors of the slots, `[S, *shape]`, with their random entries at S weights `[S, P]`; some may be views."""
        tensors: dict[str, Tensor] = {}
        for slot, values in zip(self.slots, thetas.split(self.layout.sizes, 1), strict=True):
            whole = _plain(self.tensor(slot.name))
            values = values.to(whole.dtype)
            entries = slot.on(whole.device).entries
            if entries is not None:
                values = whole.reshape(1, -1).expand(len(thetas), -1).index_copy(1, entries, values)
            tensors[slot.name] = values.view(len(thetas), *slot.shape)
        return tensors

    @contextmanager
    def holding(
        self, tensors: Mapping[str, Tensor], places: list[Place] | None = None
    ) -> Iterator[Callable[[Mapping[str, Tensor]], None]]:
        """Puts tensors in the place of the module's own, in all places of tied ones, which are put back at the end.

        Tensors have the names of `detached`. What it yields puts others there, of the same names or of some of them.
        """
        if tensors and self.processes is not None:
            require_unsharded(self.module, "what is asked replaces weights, or differentiates by them twice")
        at = self._places_by_name(tensors.keys(), places) if tensors else {}
        originals = [(name, table, key, table[key]) for name in tensors for table, key in at[name]]

        def put(others: Mapping[str, Tensor]) -> None:
            for name, tensor in others.items():
                for table, key in at[name]:
                    table[key] = tensor

        try:
            put(tensors)
            with nullcontext() if self.watched else self._watching(originals):
                yield put
        finally:
            for _, table, key, tensor in originals:
                table[key] = tensor

    @contextmanager
    def _watching(self, originals: list[tuple[str, dict[str, Any], str, Any]]) -> Iterator[None]:
        """A block that raises if the network uses a random parameter that was replaced; for the first one of a problem.

        It could reach one past its modules, in a global variable or a list, and would use it in place of a sampled one.
        """
        random = {slot.name for slot in self.slots}
        replaced = {id(tensor): (name, tensor) for name, _, _, tensor in originals if name in random}
        for _, module, key in self.places():  # of tied ones a head may replace its own alone
            replaced.pop(id(module._parameters[key]), None)
        if not replaced or torch.compiler.is_compiling():
            yield
            return
        with _Replaced(replaced):
            yield
        self.watched.append(True)

    def run(self, tensors: Mapping[str, Tensor], x: Inputs, places: list[Place] | None = None) -> Tensor:
        """Outputs of the module on x with these tensors in place of its own: `[B, C]`, or `[B, *positions, C]`."""
        with self.holding(tensors, places):
            return self.outputs(x)

    def outputs(self, x: Inputs) -> Tensor:
        """Outputs of the module as it is, as of `run`."""
        f = batches.latent(call_with_context(self.module, self.forward_fn, x))
        if f.ndim < 2:
            raise InvalidData(_without_channels(f, x))
        return f


def _without_channels(f: Tensor, x: Inputs) -> str:
    """The fault of outputs `[B]` or `[C]`."""
    given = next(iter(batches.tensors(x)), f)
    fault = (
        f"the network's output has shape {list(f.shape)} for inputs of shape {list(given.shape)}; a Laplace "
        "approximation needs [B, C], or [B, *positions, C]"
    )
    if f.ndim and given.ndim > 1 and len(given) == len(f):
        return (
            f"{fault}. For one output per datum give targets [B], or say channel_dim=0; or leave squeeze(-1) away, and "
            "give targets [B, 1]."
        )
    return (
        f"{fault}. If the inputs are of one datum, give them a batch dimension, x.unsqueeze(0), and data sets in a "
        "torch.utils.data.DataLoader; else reshape the output in the model or by forward_fn=."
    )


class _Replaced(TorchFunctionMode):
    """A block in which no operation may take any of these tensors.

    Args:
        tensors: The tensors with their names, by their identities.
    """

    def __init__(self, tensors: dict[int, tuple[str, Tensor]]) -> None:
        super().__init__()
        self._tensors = tensors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor | tuple | list) and not isinstance(result, torch.Size):  # not of its shape
            for arg in (*args, *(kwargs or {}).values()):
                for part in arg if isinstance(arg, tuple | list) else (arg,):
                    if id(part) in self._tensors:
                        raise UnsupportedError(_past_its_modules(self._tensors[id(part)][0]))
        return result


def _past_its_modules(name: str) -> str:
    """The fault of a network that uses a parameter which is not the one of its module."""
    return (
        f"the network reaches its parameter {name!r} past its modules, by a list, a global variable or another object, "
        "and would use it where another value is to be in its place. Let forward read it from its module, as "
        "self.layer(x) or self.layer.weight."
    )


def reduce_features(features: Tensor, reduction: str | None) -> Tensor:
    """Features with positions, `[B, T, …, D]`, as `[B, D]`: the first, the last, or their mean.

    They are as they were without a reduction, or without positions.
    """
    if reduction is None or features.ndim <= 2:
        return features
    positions = features.flatten(1, -2)
    if reduction == FeatureReduction.AVERAGE:
        return positions.mean(1)
    return positions[:, 0 if reduction == FeatureReduction.PICK_FIRST else -1]


def _plain(tensor: Tensor) -> Tensor:
    """A detached tensor that autograd can use, also of a parameter that was made in inference mode."""
    return tensor.detach().clone() if tensor.is_inference() else tensor.detach()


class Caller(nn.Module):
    """Gives every way of calling a model one signature, inputs to outputs."""

    def __init__(self, module: nn.Module, forward_fn: ForwardFn | None) -> None:
        super().__init__()
        self.module = module
        self.forward_fn = forward_fn

    def forward(self, x: Inputs) -> Tensor:
        """The output tensor, whatever the model returns it in."""
        return batches.latent(call_with_context(self.module, self.forward_fn, x))
