"""The view that backends have of a model: a module, named tensors of it, and which of their entries are random."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call

from laplace.core import batch as batches
from laplace.core.batch import ForwardFn, Inputs
from laplace.core.layout import Layout
from laplace.core.positions import ChannelsLast
from laplace.enums import FeatureReduction
from laplace.errors import InvalidData
from laplace.network.misfits import called
from laplace.network.model_guard import model_lock


@dataclass(frozen=True, eq=False)
class Selection:
    """Entries of one tensor, seen as a matrix (first dimension × the rest): rows × columns, then an index.

    Attributes:
        rows: Rows that hold a selected entry, `[R]`, or None for all.
        cols: Columns that hold one, `[Q]`, or None for all.
        index: Indices within the R × Q sub-matrix, row-major, or None if it is selected whole.
    """

    rows: Tensor | None
    cols: Tensor | None
    index: Tensor | None

    @classmethod
    def of(cls, entries: Tensor, shape: torch.Size) -> Selection:
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
    """One tensor of a problem with random entries.

    Attributes:
        name: Qualified name in the module.
        shape: Shape of the whole tensor.
        entries: Flat random entries, sorted, or None for all.
    """

    name: str
    shape: torch.Size
    entries: Tensor | None = None

    @property
    def size(self) -> int:
        """Number of random entries."""
        return self.shape.numel() if self.entries is None else int(self.entries.numel())

    @cached_property
    def selection(self) -> Selection | None:
        """The random entries as rows × columns, or None for all."""
        return None if self.entries is None else Selection.of(self.entries, self.shape)

    def take(self, tensor: Tensor) -> Tensor:
        """Random entries `[p]` of a tensor of this slot's shape."""
        return self.take_rows(tensor.unsqueeze(0))[0]

    def take_rows(self, tensors: Tensor) -> Tensor:
        """Random entries `[R, p]` of tensors `[R, *shape]`."""
        flat = tensors.reshape(len(tensors), -1)
        return flat if self.entries is None else flat[:, self.entries.to(flat.device)]

    def place(self, values: Tensor) -> Tensor:
        """Entries `[R, p]` at their places in flat tensors of this slot's shape, `[R, numel]`; zero elsewhere."""
        if self.entries is None:
            return values
        return values.new_zeros(len(values), self.shape.numel()).index_copy(1, self.entries.to(values.device), values)


@dataclass(frozen=True)
class Problem:
    """A module to differentiate, and the tensors to differentiate it by: all that a curvature backend needs to know.

    All weights are every trainable tensor; a last layer is the head's tensors, so that autograd's graph
    starts at the head and the trunk runs without one; a subnetwork is a set of entries.

    Attributes:
        module: The network, never written to.
        slots: The tensors with random entries, in order.
        forward_fn: How to call the module on inputs; None for the default of `laplace.core.batch.call`.
        reduction: How a head applied to positions `[B, T, D]` is reduced, or None.
        head: Name of the head module of a last-layer problem, or None.
    """

    module: nn.Module
    slots: tuple[ParameterSlice, ...]
    forward_fn: ForwardFn | None = None
    reduction: str | None = None
    head: str | None = None
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        layout = Layout(tuple(slot.name for slot in self.slots), tuple(slot.size for slot in self.slots))
        object.__setattr__(self, "layout", layout)

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
        with model_lock(self.module):
            return self.module.get_parameter(name)

    def mean(self) -> Tensor:
        """Present values of the random entries, `[P]`, detached."""
        return torch.cat([slot.take(self.tensor(slot.name).detach()) for slot in self.slots])

    def detached(self) -> dict[str, Tensor]:
        """Every parameter by name, detached; of a head also tied ones apart, since its features are fixed."""
        if self.head is None:
            return {name: _plain(tensor) for name, tensor in self.module.named_parameters()}
        return {name: _plain(tensor) for name, tensor in self._places()}

    def _places(self) -> Iterator[tuple[str, Tensor]]:
        """Every place of a parameter: tied ones have several, but one module with several names has only the first.

        PyTorch puts its own substitutes back for the module's parameters where a place is substituted twice.
        """
        for prefix, module in self.module.named_modules():
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    yield (f"{prefix}.{name}" if prefix else name), tensor

    def _everywhere(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Substitutes by name, for all places of tied parameters; of a head for its own place."""
        if self.head is not None:
            return tensors
        places = list(self._places())
        given = {id(tensor): tensors[name] for name, tensor in places if name in tensors}
        return {name: given[id(tensor)] for name, tensor in places if id(tensor) in given}

    def stand_ins(self) -> dict[str, Tensor]:
        """Detached tensors for every parameter: those of the slots require gradients, the others do not."""
        random = {slot.name for slot in self.slots}
        return {name: tensor.requires_grad_(name in random) for name, tensor in self.detached().items()}

    def substituted(self, theta: Tensor) -> dict[str, Tensor]:
        """Detached tensors with the random entries replaced by `theta`, `[P]`."""
        tensors = self.detached()
        for slot, values in zip(self.slots, self.layout.split(theta), strict=True):
            whole = tensors[slot.name]
            values = values.to(whole.dtype)
            if slot.entries is not None:
                values = whole.reshape(-1).index_copy(0, slot.entries.to(whole.device), values)
            tensors[slot.name] = values.view(slot.shape)
        return tensors

    def run(self, tensors: Mapping[str, Tensor], x: Inputs) -> Tensor:
        """Outputs of the module on x with these tensors in place of its own: `[B, C]`, or `[B, *positions, C]`.

        Raises:
            InvalidData: The output has fewer dimensions.
        """
        caller = Caller(self.module, self.forward_fn)
        substitutes = {f"module.{name}": tensor for name, tensor in self._everywhere(tensors).items()}
        f = functional_call(caller, substitutes, (x,), tie_weights=False)
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
            f"{fault}. For one output per datum leave squeeze(-1) away, or give forward_fn=lambda model, x: "
            "model(x).unsqueeze(-1), and targets [B, 1]."
        )
    return (
        f"{fault}. If the inputs are of one datum, give them a batch dimension, x.unsqueeze(0), and data sets in a "
        "torch.utils.data.DataLoader; else reshape the output in the model or by forward_fn=."
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
        return batches.latent(called(self.module, self.forward_fn, x))
