"""Layer rules: Jacobian blocks of a parameter from the input of a module and the gradient of its output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace.core.registry import Registry
from laplace.jacobian.blocks import Block, DenseBlock
from laplace.jacobian.index import IndexBlock
from laplace.jacobian.outer import OuterBlock
from laplace.jacobian.patches import Patches, unfold


class BatchAxis(ABC):
    """Dimension of the data among the leading ones of an activation.

    `LEADING` reads `(B, T, …)` and `(B·T, …)`, `TRAILING` reads `(T, B, …)` and `(T·B, …)`. Shapes cannot tell
    the two apart (T may equal B); the probe of `proof.py` does. `RoutedRows` know the sample of every row.
    """

    LEADING: ClassVar[BatchAxis]
    TRAILING: ClassVar[BatchAxis]
    value: str  # Name in the coverage report

    @abstractmethod
    def positions(self, tensor: Tensor, n_data: int, n_features: int, *, batched: bool = False) -> Tensor:
        """`[B, T, *features]` of an activation with `n_features` trailing dimensions."""


class _Leading(BatchAxis):
    value = "batch first"

    def positions(self, tensor: Tensor, n_data: int, n_features: int, *, batched: bool = False) -> Tensor:
        lead, features = _around(tensor, n_features, batched=batched)
        return tensor.reshape(*lead, n_data, -1, *features)


class _Trailing(BatchAxis):
    value = "batch second"

    def positions(self, tensor: Tensor, n_data: int, n_features: int, *, batched: bool = False) -> Tensor:
        lead, features = _around(tensor, n_features, batched=batched)
        return tensor.reshape(*lead, -1, n_data, *features).transpose(len(lead), len(lead) + 1)


BatchAxis.LEADING, BatchAxis.TRAILING = _Leading(), _Trailing()


@dataclass(frozen=True, eq=False)
class RoutedRows(BatchAxis):
    """Rows without a batch dimension: those that were routed to an expert, or a packed batch.

    Every sample gets T positions, as many as the one with most rows. Places without a row hold zeros, and −1 for
    indices.
    """

    place: Tensor  # Sample · T + position of every row, `[R]`, all different
    present: Tensor  # Places that hold a row, `[B, T]`
    value = "routed rows"

    @classmethod
    def from_samples(cls, datum: Tensor, n_data: int) -> RoutedRows:
        """From the sample of every row, `[R]`."""
        counts = torch.bincount(datum, minlength=n_data)
        order = datum.argsort(stable=True)
        position = torch.empty_like(datum)
        position[order] = torch.arange(len(datum), device=datum.device) - (counts.cumsum(0) - counts)[datum[order]]
        width = max(1, int(counts.max()))
        return cls.from_places(datum * width + position, n_data, width)

    @classmethod
    def from_places(cls, place: Tensor, n_data: int, width: int) -> RoutedRows:
        """From the place of every row, `[R]`, among T of every sample."""
        present = torch.zeros(n_data * width, dtype=torch.bool, device=place.device)
        return cls(place, present.index_fill(0, place, True).view(n_data, width))

    def positions(self, tensor: Tensor, n_data: int, n_features: int, *, batched: bool = False) -> Tensor:
        lead, features = _around(tensor, n_features, batched=batched)
        shape = *lead, n_data, self.present.shape[1], *features
        if tensor.is_meta:
            return tensor.new_empty(shape)
        rows = tensor.reshape(*lead, len(self.place), *features)
        nothing = rows.new_full((*lead, self.present.numel(), *features), 0 if rows.is_floating_point() else -1)
        return nothing.index_copy(len(lead), self.place, rows).view(shape)


def _around(tensor: Tensor, n_features: int, *, batched: bool) -> tuple[torch.Size, torch.Size]:
    """The dimensions before and after those of samples and positions."""
    return tensor.shape[: int(batched)], tensor.shape[tensor.ndim - n_features :]


A = TypeVar("A")


class LayerRule(ABC, Generic[A]):
    """The Jacobian blocks of one family of layers, from activations of type A: mostly tensors.

    Attributes:
        parameters: Attribute names of the parameters that this rule explains.
        name: Name in the coverage report.
    """

    parameters: tuple[str, ...] = ("weight", "bias")
    name: str

    def accepts(self, module: nn.Module, x: Tensor) -> bool:
        """True if the rule holds for this module and input."""
        return True

    @abstractmethod
    def positions(self, module: nn.Module, x: Tensor, n_data: int) -> int:
        """Positions per sample in the leading dimensions of the input, 0 if they cannot hold `n_data` data."""

    @abstractmethod
    def activation(self, module: nn.Module, attribute: str, x: Tensor, n_data: int, axis: BatchAxis) -> A | None:
        """The part of the forward pass that the parameter's block needs; computed once for all cotangents."""

    @abstractmethod
    def block(self, module: nn.Module, attribute: str, a: A | None, g: Tensor, n_data: int, axis: BatchAxis) -> Block:
        """The block from the activation and the gradients `[K, *shape of the module's output]`."""


def evenly(total: int, n_data: int) -> int:
    """Positions per sample, 0 if the total is no multiple of the data."""
    return total // n_data if total % n_data == 0 else 0


RULES: Registry[LayerRule[Any]] = Registry("layer rule")
"""Rules by the qualified name of the module class they are for."""


def rule_for(module: nn.Module) -> LayerRule[Any] | None:
    """The rule of a module's class, or of the nearest base class that has one.

    A subclass may have another forward: whether the rule holds for it is for the probe to say.
    """
    return rule_of(type(module))


def rule_of(kind: type[nn.Module]) -> LayerRule[Any] | None:
    """The rule of a module class, or of the nearest base class that has one."""
    base = class_with_rule(kind)
    return None if base is None else RULES[_name(base)]


def class_with_rule(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class, or the nearest base class, that has a rule."""
    return next((base for base in kind.__mro__ if _name(base) in RULES), None)


def files(rule: LayerRule[Any], *kinds: type[nn.Module]) -> None:
    """Files one rule for several module classes, and for the classes that derive from them.

    Raises:
        InvalidArgument: A class has another rule of its own.
    """
    for kind in kinds:
        name = _name(kind)
        if name not in RULES or RULES[name] is not rule:
            RULES.register(name)(rule)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class LinearRule(LayerRule[Tensor]):
    """z = W a + b: the weight's block is Σ_t g ⊗ a, the bias's Σ_t g."""

    name = "linear"

    def positions(self, module: nn.Module, x: Tensor, n_data: int) -> int:
        return evenly(x.shape[:-1].numel(), n_data)  # of one row `[D]` the rows are one

    def activation(self, module: nn.Module, attribute: str, x: Tensor, n_data: int, axis: BatchAxis) -> Tensor | None:
        if attribute == "bias":
            return None
        return axis.positions(x, n_data, 1).unsqueeze(2)

    def block(
        self, module: nn.Module, attribute: str, a: Tensor | None, g: Tensor, n_data: int, axis: BatchAxis
    ) -> Block:
        g = axis.positions(g, n_data, 1, batched=True).unsqueeze(3)
        return OuterBlock(a=a, g=g)


files(LinearRule(), nn.Linear)


def _padded(module: nn.Module, x: Tensor) -> Tensor:
    """Pads the input; on the meta device only the shape matters, so constant padding is used."""
    amount: list[int] = module._reversed_padding_repeated_twice  # pyright: ignore
    if module.padding_mode != "zeros" and not x.is_meta:
        return F.pad(x, amount, mode=module.padding_mode)  # pyright: ignore
    return F.pad(x, amount) if any(amount) else x


class _Convolution(LayerRule[A]):
    """Inputs `[N, channels, *space]` with the data in N."""

    def accepts(self, module: nn.Module, x: Tensor) -> bool:
        return x.ndim == 2 + len(module.kernel_size)  # pyright: ignore[reportArgumentType]

    def positions(self, module: nn.Module, x: Tensor, n_data: int) -> int:
        return evenly(x.shape[0], n_data)


class ConvolutionRule(_Convolution[Tensor | Patches]):
    """z = W ∗ x + b."""

    name = "convolution"

    def activation(
        self, module: nn.Module, attribute: str, x: Tensor, n_data: int, axis: BatchAxis
    ) -> Tensor | Patches | None:
        if attribute == "bias":
            return None
        images = axis.positions(_padded(module, x), n_data, x.ndim - 1)
        return patches_of(images, module.kernel_size, module.stride, module.dilation, module.groups)  # pyright: ignore

    def block(
        self, module: nn.Module, attribute: str, a: Tensor | Patches | None, g: Tensor, n_data: int, axis: BatchAxis
    ) -> Block:
        return OuterBlock(a=a, g=output_gradients(module.groups, g, n_data, axis))  # pyright: ignore


class TransposedConvolutionRule(_Convolution[Tensor]):
    """z = Wᵀ ∗ x + b: entry (i, o, k) of the weight meets x_i at t and g_o at stride·t + dilation·k − padding."""

    name = "transposed convolution"

    def activation(self, module: nn.Module, attribute: str, x: Tensor, n_data: int, axis: BatchAxis) -> Tensor | None:
        if attribute == "bias":
            return None
        a = x.unflatten(1, (module.groups, -1)).movedim((1, 2), (-2, -1))  # pyright: ignore
        return _merge_positions(axis.positions(a, n_data, a.ndim - 1))

    def block(
        self, module: nn.Module, attribute: str, a: Tensor | None, g: Tensor, n_data: int, axis: BatchAxis
    ) -> Block:
        if a is None:
            return OuterBlock(a=None, g=output_gradients(module.groups, g, n_data, axis))  # pyright: ignore
        unfolded = _unfolded_gradients(module, g)
        g = _merge_positions(axis.positions(unfolded, n_data, unfolded.ndim - 2, batched=True), batched=True)
        return OuterBlock(a=a, g=g, input_first=True, unfolded=True)


def _unfolded_gradients(module: nn.Module, g: Tensor) -> Tensor:
    """Gradients `[K, N, channels, *space]` that every input meets, `[K, N, *input space, G, O]`."""
    kernel, groups = module.kernel_size, module.groups
    space = _input_space(module, g.shape[3:])
    if g.is_meta:
        return g.new_empty(*g.shape[:2], *space, groups, g.shape[2] // groups * prod(kernel))  # pyright: ignore
    amount = [side for p in reversed(module.padding) for side in (p, p)]  # pyright: ignore
    unfolded = unfold(F.pad(g.flatten(0, 1), amount), kernel, module.stride, module.dilation, groups)  # pyright: ignore
    for d, positions in enumerate(space):
        # An output padding leaves windows that no input position writes.
        unfolded = unfolded.narrow(1 + d, 0, positions)
    return unfolded.unflatten(0, g.shape[:2])


def _input_space(module: nn.Module, output_space: Sequence[int]) -> list[int]:
    """Spatial shape of a transposed convolution's input, from its output's."""
    sizes = zip(
        output_space,
        module.kernel_size,  # pyright: ignore
        module.stride,  # pyright: ignore
        module.padding,  # pyright: ignore
        module.dilation,  # pyright: ignore
        module.output_padding,  # pyright: ignore
        strict=True,
    )
    return [(out + 2 * p - d * (k - 1) - 1 - extra) // s + 1 for out, k, s, p, d, extra in sizes]


def _merge_positions(tensor: Tensor, *, batched: bool = False) -> Tensor:
    """`[(K,) B, T', *space, G, I]` as `[(K,) B, T, G, I]`."""
    return tensor.flatten(1 + batched, -3)


def patches_of(
    images: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...], groups: int
) -> Tensor | Patches:
    """The inputs `[B, T, G, I]` of a convolution of padded images `[B, T', channels, *space]`."""
    patches = Patches(images, kernel, stride, dilation, groups)
    return patches if prod(kernel) > 1 else patches.rows


def output_gradients(groups: int, g: Tensor, n_data: int, axis: BatchAxis) -> Tensor:
    """`[K, N, channels, *space]` as `[K, B, T, G, O]`."""
    g = g.unflatten(2, (groups, -1)).movedim((2, 3), (-2, -1))
    return _merge_positions(axis.positions(g, n_data, g.ndim - 2, batched=True), batched=True)


files(ConvolutionRule(), nn.Conv1d, nn.Conv2d, nn.Conv3d)
files(TransposedConvolutionRule(), nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class EmbeddingRule(LayerRule[Tensor]):
    """z = W[index]: rows of the weight get the gradients of the positions that read them."""

    name = "embedding"
    parameters = ("weight",)

    def accepts(self, module: nn.Module, x: Tensor) -> bool:
        # max_norm rewrites the weight during the forward pass; scale_grad_by_freq couples the data.
        return isinstance(module, nn.Embedding) and module.max_norm is None and not module.scale_grad_by_freq

    def positions(self, module: nn.Module, x: Tensor, n_data: int) -> int:
        return evenly(x.numel(), n_data)

    def activation(self, module: nn.Module, attribute: str, x: Tensor, n_data: int, axis: BatchAxis) -> Tensor | None:
        index = axis.positions(x, n_data, 0)
        padding: Any = module.padding_idx
        return index if padding is None or index.is_meta else index.where(index != padding, -1)

    def block(
        self, module: nn.Module, attribute: str, a: Tensor | None, g: Tensor, n_data: int, axis: BatchAxis
    ) -> Block:
        index = torch.empty(0) if a is None else a
        g = axis.positions(g, n_data, 1, batched=True)
        return IndexBlock.from_index(index, g, int(module.num_embeddings))  # pyright: ignore[reportArgumentType]


files(EmbeddingRule(), nn.Embedding)


class _ScaleRule(LayerRule[Tensor]):
    """z = γ ⊙ n(x) + β.

    On the meta device, where shapes alone are asked, nothing is computed: PyTorch imports its compiler for such sums.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.normalise = _NORMS[name]  # n

    def activation(self, module: nn.Module, attribute: str, x: Tensor, n_data: int, axis: BatchAxis) -> Tensor | None:
        if attribute == "bias":
            return None
        n_features = self.n_features(module, x)
        return axis.positions(x if x.is_meta else self.normalise(module, x), n_data, n_features)

    def block(
        self, module: nn.Module, attribute: str, a: Tensor | None, g: Tensor, n_data: int, axis: BatchAxis
    ) -> Block:
        parameter: Tensor = getattr(module, attribute)
        if g.is_meta:
            return DenseBlock(g.new_empty(len(g), n_data, parameter.numel()))
        g = axis.positions(g, n_data, self.n_features(module, g[0]), batched=True)
        return DenseBlock(self.summed(g if a is None else g * a, parameter))

    @abstractmethod
    def n_features(self, module: nn.Module, x: Tensor) -> int:
        """Trailing dimensions of an input or output that are not data or positions."""

    @abstractmethod
    def summed(self, products: Tensor, parameter: Tensor) -> Tensor:
        """Products `[K, B, T, *features]` summed over what shares an entry of the parameter, `[K, B, p]`."""


class TrailingScaleRule(_ScaleRule):
    """γ has the shape of the trailing dimensions: LayerNorm, RMSNorm."""

    def positions(self, module: nn.Module, x: Tensor, n_data: int) -> int:
        return evenly(x.shape[: x.ndim - self.n_features(module, x)].numel(), n_data)

    def n_features(self, module: nn.Module, x: Tensor) -> int:
        return len(module.normalized_shape)  # pyright: ignore[reportArgumentType]

    def summed(self, products: Tensor, parameter: Tensor) -> Tensor:
        return products.sum(2).flatten(2)


class ChannelScaleRule(_ScaleRule):
    """γ has an entry per channel, dimension 1: BatchNorm in eval, GroupNorm, InstanceNorm, PReLU."""

    def accepts(self, module: nn.Module, x: Tensor) -> bool:
        return x.ndim >= 2

    def positions(self, module: nn.Module, x: Tensor, n_data: int) -> int:
        return evenly(x.shape[0], n_data)

    def n_features(self, module: nn.Module, x: Tensor) -> int:
        return x.ndim - 1

    def summed(self, products: Tensor, parameter: Tensor) -> Tensor:
        products = products.sum((2, *range(4, products.ndim)))  # of [K, B, T, channels, *space]
        return products.sum(2, keepdim=True) if parameter.numel() == 1 else products


def _instance_norm(module: Any, x: Tensor) -> Tensor:
    mean, var = module.running_mean, module.running_var
    return F.instance_norm(x, mean, var, use_input_stats=mean is None, eps=module.eps)


def _running_norm(module: Any, x: Tensor) -> Tensor:
    return torch.batch_norm(x, None, None, module.running_mean, module.running_var, False, 0.0, module.eps, False)


_NORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "layer norm": lambda module, x: F.layer_norm(x, module.normalized_shape, None, None, module.eps),
    "rms norm": lambda module, x: F.rms_norm(x, module.normalized_shape, None, module.eps),
    "group norm": lambda module, x: F.group_norm(x, module.num_groups, None, None, module.eps),
    "instance norm": _instance_norm,
    "batch norm": _running_norm,
    "prelu": lambda _, x: x.clamp(max=0),
}
files(TrailingScaleRule("layer norm"), nn.LayerNorm)
files(TrailingScaleRule("rms norm"), nn.RMSNorm)
files(ChannelScaleRule("group norm"), nn.GroupNorm)
files(ChannelScaleRule("instance norm"), nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
files(ChannelScaleRule("batch norm"), nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
files(ChannelScaleRule("prelu"), nn.PReLU)
