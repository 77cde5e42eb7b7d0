"""Linear layers, on `[B, I]` or with positions that share the weight, `[B, T, I]`."""

from __future__ import annotations

from torch import Tensor, nn

from laplace.engines.native.layers.base import BatchAxis, LayerRule, evenly, files
from laplace.jacobian.blocks import Block
from laplace.jacobian.outer import OuterBlock


class LinearRule(LayerRule[Tensor]):
    """z = W a + b: the weight's block is Σ_t g ⊗ a, the bias's Σ_t g."""

    name = "linear"

    def positions(self, module: nn.Module, x: Tensor, n_data: int) -> int:
        return evenly(x.shape[:-1].numel(), n_data) if x.ndim >= 2 else 0

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
