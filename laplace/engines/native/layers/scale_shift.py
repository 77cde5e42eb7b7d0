"""Elementwise scales and shifts: normalisation layers and PReLU."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace.engines.native.layers.base import BatchAxis, LayerRule, evenly, files
from laplace.jacobian.blocks import Block, DenseBlock

Normaliser = Callable[[nn.Module, Tensor], Tensor]


class _ScaleRule(LayerRule[Tensor]):
    """z = γ ⊙ n(x) + β.

    On the meta device, where shapes alone are asked, nothing is computed: PyTorch imports its compiler for such sums.
    """

    def __init__(self, name: str, normalise: Normaliser) -> None:
        self.name = name
        self.normalise = normalise

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
        lead = x.shape[: x.ndim - self.n_features(module, x)]
        return evenly(lead.numel(), n_data) if lead else 0

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
