"""Runs a product block by block over the last dimension of a batch of vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from laplace.errors import InvalidArgument

Shape = tuple[int, int, int]
Product = Callable[[Tensor], Tensor]


def split_blocks(shapes: Sequence[Shape], vectors: Tensor) -> list[Tensor]:
    """Slabs `[M, G, n₁, n₂]`, one per block, of vectors `[…, P]`.

    Raises:
        InvalidArgument: The last dimension is not the number of parameters.
    """
    sizes = [math.prod(shape) for shape in shapes]
    if vectors.ndim not in (1, 2, 3) or vectors.shape[-1] != sum(sizes):
        raise InvalidArgument(
            f"vectors of shape {tuple(vectors.shape)} were given; accepted are [P], [B, P] and [B, K, P] with "
            f"P = {sum(sizes)}, the number of parameters."
        )
    pieces = vectors.reshape(-1, vectors.shape[-1]).split(sizes, dim=1)
    return [piece.reshape(-1, *shape) for piece, shape in zip(pieces, shapes, strict=True)]


def map_blocks(products: Sequence[Product], shapes: Sequence[Shape], vectors: Tensor) -> Tensor:
    """Applies one product per block; the result has the shape of `vectors`."""
    slabs = split_blocks(shapes, vectors)
    done = [product(slab).flatten(1) for product, slab in zip(products, slabs, strict=True)]
    return torch.cat(done, dim=1).view(vectors.shape)
