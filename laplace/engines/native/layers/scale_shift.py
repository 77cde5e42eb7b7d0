"""Elementwise scales and shifts: normalisation layers and PReLU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace.engines.native.layers.base import BatchAxis, LayerRule, evenly, files
from laplace.jacobian.blocks import Block, DenseBlock

Normaliser = Callable[[nn.Module, Tensor], Tensor]


class TrailingScaleRule(LayerRule):
    """z = γ ⊙ n(x) + β with γ of the shape of the trailing dimensions: LayerNorm, RMSNorm."""

    def __init__(self, name: str, normalise: Normaliser) -> None:
        self.name = name
        self.normalise = normalise

    def positions(self, module: nn.Module, x: Tensor, n_data: int) -> int:
        lead = x.shape[: x.ndim - len(module.normalized_shape)]  # pyright: ignore[reportArgumentType]
        return evenly(lead.numel(), n_data) if lead else 0

    def activation(self, module: nn.Module, attribute: str, x: Tensor, n_data: int, axis: BatchAxis) -> Tensor | None:
        if attribute == "bias":
            return None
        return axis.positions(self.normalise(module, x), n_data, len(module.normalized_shape))  # pyright: ignore[reportArgumentType]

    def block(
        self, module: nn.Module, attribute: str, a: Tensor | None, g: Tensor, n_data: int, axis: BatchAxis
    ) -> Block:
        g = axis.positions(g, n_data, len(module.normalized_shape), batched=True)  # pyright: ignore[reportArgumentType]
        return DenseBlock((g if a is None else g * a).sum(2).flatten(2))


class ChannelScaleRule(LayerRule):
    """z = γ_c n(x)_c + β_c with channels in dimension 1: BatchNorm in eval, GroupNorm, InstanceNorm, PReLU."""

    def __init__(self, name: str, normalise: Normaliser) -> None:
        self.name = name
        self.normalise = normalise

    def accepts(self, module: nn.Module, x: Tensor) -> bool:
        return x.ndim >= 2

    def positions(self, module: nn.Module, x: Tensor, n_data: int) -> int:
        return evenly(x.shape[0], n_data)

    def activation(self, module: nn.Module, attribute: str, x: Tensor, n_data: int, axis: BatchAxis) -> Tensor | None:
        if attribute == "bias":
            return None
        return axis.positions(self.normalise(module, x), n_data, x.ndim - 1)

    def block(
        self, module: nn.Module, attribute: str, a: Tensor | None, g: Tensor, n_data: int, axis: BatchAxis
    ) -> Block:
        g = axis.positions(g, n_data, g.ndim - 2, batched=True)
        products = g if a is None else g * a  # [K, B, T, channels, *space]
        products = products.sum((2, *range(4, products.ndim)))
        shared = getattr(module, attribute).numel() == 1
        return DenseBlock(products.sum(2, keepdim=True) if shared else products)


def _layer_norm(module: nn.Module, x: Tensor) -> Tensor:
    return F.layer_norm(x, module.normalized_shape, None, None, module.eps)  # pyright: ignore


def _rms_norm(module: nn.Module, x: Tensor) -> Tensor:
    return F.rms_norm(x, module.normalized_shape, None, module.eps)  # pyright: ignore


def _group_norm(module: nn.Module, x: Tensor) -> Tensor:
    return F.group_norm(x, module.num_groups, None, None, module.eps)  # pyright: ignore


def _instance_norm(module: nn.Module, x: Tensor) -> Tensor:
    mean, var = module.running_mean, module.running_var
    return F.instance_norm(x, mean, var, use_input_stats=mean is None, eps=module.eps)  # pyright: ignore


def _running_norm(module: nn.Module, x: Tensor) -> Tensor:
    mean, var = module.running_mean, module.running_var
    return torch.batch_norm(x, None, None, mean, var, False, 0.0, module.eps, False)  # pyright: ignore


def _negative_part(module: nn.Module, x: Tensor) -> Tensor:
    del module
    return x.clamp(max=0)


files(TrailingScaleRule("layer norm", _layer_norm), nn.LayerNorm)
files(TrailingScaleRule("rms norm", _rms_norm), nn.RMSNorm)
files(ChannelScaleRule("group norm", _group_norm), nn.GroupNorm)
files(ChannelScaleRule("instance norm", _instance_norm), nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
files(ChannelScaleRule("batch norm", _running_norm), nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
files(ChannelScaleRule("prelu", _negative_part), nn.PReLU)
