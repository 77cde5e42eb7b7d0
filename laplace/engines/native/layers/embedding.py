"""Embeddings: a is one-hot and stays an index, whatever the size of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from laplace.engines.native.layers.base import BatchAxis, LayerRule, evenly, files
from laplace.jacobian.blocks import Block
from laplace.jacobian.index import IndexBlock


class EmbeddingRule(LayerRule[Tensor]):
    """z = W[index]: rows of the weight get the gradients of the positions that read them."""

    name = "embedding"
    parameters = ("weight",)

    def accepts(self, module: nn.Module, x: Tensor) -> bool:
        # max_norm rewrites the weight during the forward pass; scale_grad_by_freq couples the data.
        return isinstance(module, nn.Embedding) and module.max_norm is None and not module.scale_grad_by_freq

    def positions(self, module: nn.Module, x: Tensor, n_data: int) -> int:
        return evenly(x.numel(), n_data) if x.ndim >= 1 else 0

    def activation(self, module: nn.Module, attribute: str, x: Tensor, n_data: int, axis: BatchAxis) -> Tensor | None:
        index = axis.positions(x, n_data, 0)
        padding: Any = module.padding_idx
        return index if padding is None or index.is_meta else index.where(index != padding, -1)

    def block(
        self, module: nn.Module, attribute: str, a: Tensor | None, g: Tensor, n_data: int, axis: BatchAxis
    ) -> Block:
        index = torch.empty(0) if a is None else a
        g = axis.positions(g, n_data, 1, batched=True)
        return IndexBlock.of(index, g, int(module.num_embeddings))  # pyright: ignore[reportArgumentType]


files(EmbeddingRule(), nn.Embedding)
