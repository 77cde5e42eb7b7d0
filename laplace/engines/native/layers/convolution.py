"""Convolutions of any dimension, stride, padding mode, dilation and grouping, and their transposes.

A convolution is a linear layer on patches: a are the unfolded patches `[B, T, G, I]` with
I = (input channels of a group)·(kernel size), z the outputs `[B, T, G, O]`. A transposed convolution is the
adjoint: there the *gradients* are unfolded, and a are the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch.nn.functional as F
from torch import Tensor, nn

from laplace.engines.native.layers.base import A, BatchAxis, LayerRule, evenly, files
from laplace.jacobian.blocks import Block
from laplace.jacobian.outer import OuterBlock
from laplace.jacobian.patches import Patches, unfold


def _padded(module: nn.Module, x: Tensor) -> Tensor:
    """The input as the convolution sees it, in any padding mode; without numbers its shape, the same in all of them."""
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
    """Gradients `[K, N, channels, *space]` that meet an input, `[K, N, *input space, G, O]`, or their shape."""
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
