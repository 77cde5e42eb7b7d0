"""Kernels of the linearised network, k(x, x') = J(x) D⁻¹ J(x')ᵀ (Immer et al., 2021, equation 14), from factors.

For a layer with inputs a and output gradients g the kernel is Σ_tt' (a_t · a'_t')(g_ct · g'_c't'), summed over layers:
products of the factors, without a Jacobian `[B, C, P]`. Everything is contracted in float64, for a posterior variance
is a difference of two kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from laplace.jacobian.blocks import CHUNK_BYTES, Block, DenseBlock, SumBlock, total
from laplace.jacobian.factors import IndexBlock, OuterBlock
from laplace.jacobian.heads import HeadBlock
from laplace.jacobian.jacobian import Jacobian

Scales = Sequence[Tensor] | None
"""A factor per treated tensor, 0-dim or `[1]` each: its prior variance; None for ones."""

_DOUBLE = 8


def kernel(first: Jacobian, second: Jacobian, scales: Scales = None) -> Tensor:
    """K between the data of two Jacobians, `[B, C, M, C]`, float64.

    Args:
        first: J of B data.
        second: J of M data.
        scales: Prior variance of every treated tensor.
    """
    pairs = zip(first.blocks, second.blocks, strict=True)
    found = total(_scaled(block_kernel(x, y), scales, i) for i, (x, y) in enumerate(pairs))
    return found.permute(1, 0, 3, 2)


def kernel_at(jacobian: Jacobian, scales: Scales = None) -> Tensor:
    """k(x_b, x_b) of every datum, `[B, C, C]`, float64."""
    return jacobian.sum_over_blocks(lambda i, block: _scaled(_double(block).weighted_gram(_ones(block)), scales, i))


def kernel_diagonal(jacobian: Jacobian, scales: Scales = None) -> Tensor:
    """Its diagonals, `[B, C]`, float64."""
    return jacobian.sum_over_blocks(lambda i, block: _scaled(_double(block).weighted_norms(_ones(block)), scales, i))


def block_kernel(x: Block, y: Block) -> Tensor:
    """Σ_p J[k, b, p] J'[l, m, p] of the blocks of one tensor, `[K, B, L, M]`, float64."""
    if isinstance(x, HeadBlock):
        return _head_kernel(x, y)
    if isinstance(y, HeadBlock):
        return _head_kernel(y, x).permute(2, 3, 0, 1)
    if isinstance(x, SumBlock) or isinstance(y, SumBlock):
        parts = [(u, v) for u in _parts(x) for v in _parts(y)]
        if all(_by_grams(u, v) for u, v in parts):
            return total(_factored(u, v) for u, v in parts)
        return _multiplied_out(x, y)
    return _factored(x, y) if _by_grams(x, y) else _multiplied_out(x, y)


def _head_kernel(x: HeadBlock, y: Block) -> Tensor:
    """The same with a head, whose output gradients are the identity: (φ_b · a_m) g'_lmk."""
    features = x.features.double()
    if isinstance(y, HeadBlock):
        eye = torch.eye(x.n_outputs, dtype=torch.float64, device=features.device)
        return (features @ y.features.double().T)[None, :, None] * eye[:, None, :, None]
    if isinstance(y, OuterBlock) and y.n_positions == y.groups == 1 and not y.input_first:
        a = features.new_ones(y.n_data, 1) if y.a is None else y.a[:, 0, 0].double()
        return torch.einsum("bm,lmk->kblm", features @ a.T, _gradients(y)[:, :, 0, 0])
    return block_kernel(x.multiplied(), y)


def _parts(block: Block) -> tuple[Block, ...]:
    return block.parts if isinstance(block, SumBlock) else (block,)


def _scaled(values: Tensor, scales: Scales, i: int) -> Tensor:
    return values if scales is None else scales[i].double().reshape(()) * values


def _double(block: Block) -> Block:
    return block.cast(torch.float64)


def _ones(block: Block) -> Tensor:
    return torch.ones(block.size, dtype=torch.float64, device=block.bound().device)


def _by_grams(x: Block, y: Block) -> bool:
    """Whether Grams of the factors are less work than the tensor's entries, I·O.

    Per pair of data and of outputs, Grams multiply T·T'·O gradients and T·T' products; per pair of data T·T'·I inputs.
    """
    if isinstance(x, IndexBlock) and isinstance(y, IndexBlock):
        return x.index.shape[1] * y.index.shape[1] * (x.g.shape[3] + 1) < x.size
    if not isinstance(x, OuterBlock) or not isinstance(y, OuterBlock) or x.input_first != y.input_first:
        return False
    pairs, n_outputs = x.n_positions * y.n_positions, x.g.shape[4]
    shared = x.n_inputs / (x.n_cotangents * y.n_cotangents)
    return x.a is None or pairs == 1 or pairs * (n_outputs + 1 + shared) < x.n_inputs * n_outputs


def _factored(x: Block, y: Block) -> Tensor:
    if isinstance(x, OuterBlock) and isinstance(y, OuterBlock) and x.a is None:
        return _flat_product(_gradients(x).sum(2), _gradients(y).sum(2))
    rows: list[Tensor] = []
    for part in _slices(x, y):
        columns = [_product_of_grams(part, other) for other in _slices(y, part)]
        rows.append(torch.cat(columns, 3))
    return torch.cat(rows, 1)


def _slices(x: Block, y: Block) -> Iterator[Block]:
    """Consecutive data of x, so few that the Gram of output gradients with as many of y fits a chunk."""
    pairs = x.n_cotangents * y.n_cotangents * _positions(x) * _positions(y) * _groups(x)
    step = max(1, int((CHUNK_BYTES / (_DOUBLE * pairs)) ** 0.5))
    for start in range(0, x.n_data, step):
        yield x.rows(slice(start, start + step))


def _positions(block: Block) -> int:
    return block.g.shape[2] if isinstance(block, OuterBlock | IndexBlock) else 1


def _groups(block: Block) -> int:
    return block.groups if isinstance(block, OuterBlock) else 1


def _product_of_grams(x: Block, y: Block) -> Tensor:
    """Σ_g Σ_tt' (a·a')(g·g'), `[K, b, L, m]`."""
    inputs = _input_gram(x, y)
    gx, gy = _gradients(x), _gradients(y)
    outputs = torch.einsum("kbtgo,lmsgo->gkbtlms", gx, gy)
    if outputs.shape[3] == outputs.shape[6] == 1:
        return (outputs[:, :, :, 0, :, :, 0] * inputs[:, None, :, None, :]).sum(0)
    return torch.einsum("gkbtlms,gbtms->kblm", outputs, inputs)


def _gradients(block: Block) -> Tensor:
    """G `[K, B, T, G, O]`, float64."""
    if isinstance(block, OuterBlock):
        return (block.g.expand(-1, block.n_data, -1, -1, -1) if block.identity else block.g).double()
    if isinstance(block, IndexBlock):
        return block.g.double().unsqueeze(3)
    return block.dense().double()[:, :, None, None]


def _input_gram(x: Block, y: Block) -> Tensor:
    """Products of the inputs, `[G, B, T, M, T']`, or `[G, B, M]` where there is one position."""
    if isinstance(x, IndexBlock) and isinstance(y, IndexBlock):
        same = (x.index[:, :, None, None] == y.index) & (x.index >= 0)[:, :, None, None]
        found = same.double().unsqueeze(0)
    elif isinstance(x, OuterBlock) and isinstance(y, OuterBlock):
        if x.a is None or y.a is None:
            shape = (x.groups, x.n_data, x.n_positions, y.n_data, y.n_positions)
            found = torch.ones(shape, dtype=torch.float64, device=x.g.device)
        else:
            found = torch.einsum("btgi,msgi->gbtms", x.a.double(), y.a.double())
    else:
        found = torch.ones(1, x.n_data, 1, y.n_data, 1, dtype=torch.float64, device=x.bound().device)
    return found[:, :, 0, :, 0] if found.shape[2] == found.shape[4] == 1 else found


def _flat_product(x: Tensor, y: Tensor) -> Tensor:
    """`[K, B, ...]` and `[L, M, ...]` to `[K, B, L, M]`."""
    return (x.flatten(0, 1).flatten(1) @ y.flatten(0, 1).flatten(1).T).view(*x.shape[:2], *y.shape[:2])


def _multiplied_out(x: Block, y: Block) -> Tensor:
    """By dense pieces of both, contracted and dropped."""
    others = [y.dense().double()] if isinstance(y, DenseBlock) else None
    rows: list[Tensor] = []
    for piece in x.pieces():
        columns = [_flat_product(piece.double(), other.double()) for other in (others or y.pieces())]
        rows.append(torch.cat(columns, 3))
    return torch.cat(rows, 1)
