"""Symmetric products xᵀx, at little more than half the cost of a product."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor
from torch.nn.grad import conv1d_weight

from laplace.core.checks import numbers_are_known
from laplace.core.pieces import bytes_at_once, operations_are_dear

_LEAST_BLOCK, _LARGEST_BLOCK, _BLOCKS = 64, 256, 8
"""Widths of the blocks of which the lower ones are mirrored instead of computed, and how many there are in between."""

_ROWS = 8192
"""Rows whose products are added up within one matrix product."""

_NARROW = 64
"""Width up to which transposing a part in cache beats a matrix product with a tall operand."""


_CROWDED, _APART = 1024, 64
"""Bytes between rows, of which a multiple puts a column into few places of a cache; and bytes that put them apart."""

_WIDE_BYTES = 32 * 2**20
"""Bytes of float64 columns that are multiplied at once."""

_CACHED_BYTES = 2**21
"""Bytes of rows that a CPU widens at once: they stay in its cache, and the next ones take the same memory."""


def add_gram(total: Tensor, x: Tensor) -> None:
    """Adds xᵀx of x `[N, D]` to the upper block triangle of total `[D, D]`; `mirror` completes it."""
    width = x.shape[1]
    step = width if operations_are_dear(x.device) else _block(width)
    for start in range(0, width, step):
        rows = x[:, start : start + step]
        total[start : start + rows.shape[1], start:].addmm_(rows.T, x[:, start:])


def _block(width: int) -> int:
    """Width of the blocks of a symmetric matrix of a given width."""
    return min(_LARGEST_BLOCK, max(_LEAST_BLOCK, -(-width // _BLOCKS)))


def mirror(total: Tensor) -> Tensor:
    """Completes sums of `add_gram`, `[..., D, D]`, in place."""
    step = _block(total.shape[-1])
    is_crowded = total.stride(-2) * total.element_size() % _CROWDED == 0
    for start in range(0, total.shape[-1], step):
        stop = start + step
        upper = total[..., start:stop, stop:]
        total[..., stop:, start:stop] = (_padded(upper) if is_crowded else upper).mT
    return total


def _padded(rows: Tensor) -> Tensor:
    """A copy whose rows are apart, so that its columns are read at the speed of other widths."""
    more = _APART // rows.element_size()
    return rows.new_empty(*rows.shape[:-1], rows.shape[-1] + more)[..., :-more].copy_(rows)


def gram(x: Tensor) -> Tensor:
    """xᵀx of `[N, D]`, at little more than half the cost of the product."""
    if operations_are_dear(x.device):  # whose kernels add up parts of long sums apart
        return x.T @ x
    total = x.new_zeros(x.shape[1], x.shape[1])
    parts = x.split(_ROWS)
    for part in parts:
        # A product over millions of rows adds them up one by one in float32 (an error of 1e-3 for narrow matrices);
        # partial products that are formed apart and then added do not lose that.
        partial = total if len(parts) == 1 else torch.zeros_like(total)
        add_gram(partial, part)
        total = partial if len(parts) == 1 else total + partial
    return mirror(total)


def row_gram(rows: Tensor, weights: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Σ_p w_p r_p r_pᵀ over the columns r_p of `[..., n, P]`, `[..., n, n]`; differentiable.

    Args:
        rows: `[..., n, P]`; where they are narrower than the sum they are widened a few columns at a time.
        weights: w, `[P]`; None for ones.
        dtype: Of the sum; None for the wider one of rows and weights.
    """
    wide = dtype or (rows.dtype if weights is None else torch.promote_types(rows.dtype, weights.dtype))
    if wide == rows.dtype:
        return (rows if weights is None else rows * weights) @ rows.mT
    step = max(1, bytes_at_once(_WIDE_BYTES, rows.device) // (8 * max(1, rows.shape[:-1].numel())))
    total = rows.new_zeros(*rows.shape[:-1], rows.shape[-2], dtype=wide)
    for start in range(0, rows.shape[-1], step):
        part = rows[..., start : start + step].to(wide)
        total += (part if weights is None else part * weights[start : start + step]) @ part.mT
    return total


def group_gram(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Σ x xᵀ over all but the last two dimensions of `[..., G, D]`, `[G, D, D]`.

    Args:
        x: Rows; where they are narrower than the sum they are widened a few at a time.
        dtype: Of the products and of their sum; None for that of the rows.
    """
    rows = x.flatten(0, -4) if x.ndim > 3 else x.unsqueeze(1)  # [N, T, G, D], also of no rows
    if dtype is None or dtype == x.dtype:
        return _group_gram(rows)
    step = max(1, bytes_at_once(_CACHED_BYTES, x.device) // (8 * max(1, rows.shape[1:].numel())))
    parts = (part.to(dtype) for part in rows.split(step))
    if operations_are_dear(x.device) or not _has_triangle(rows):
        return reduce(torch.add, map(_group_gram, parts))
    total = x.new_zeros(rows.shape[-1], rows.shape[-1], dtype=dtype)
    for part in parts:
        _add_triangle(total, part[:, :, 0])
    return mirror(total).unsqueeze(0)


def _has_triangle(rows: Tensor) -> bool:
    """True if the lower triangle of the sum over rows `[N, T, G, D]` is worth being mirrored."""
    return rows.shape[-2] == 1 and rows.shape[-1] > _NARROW


def _add_triangle(total: Tensor, x: Tensor) -> None:
    """`add_gram` of x `[N, T, D]`; columns of images are not turned first."""
    if not _are_columns(x):
        add_gram(total, x.reshape(-1, x.shape[-1]))
        return
    step = _block(x.shape[-1])
    for start in range(0, x.shape[-1], step):
        columns = x[..., start : start + step]
        total[start : start + columns.shape[-1], start:].addbmm_(columns.mT, x[..., start:])


def _are_columns(x: Tensor) -> bool:
    """True if all T of one of D follow each other in `[N, T, D]`, as in images."""
    return x.stride(1) == 1 and x.shape[1] >= _LEAST_BLOCK


def _group_gram(rows: Tensor) -> Tensor:
    """Σ x xᵀ of `[N, T, G, D]`, `[G, D, D]`."""
    groups, width = rows.shape[-2:]
    if operations_are_dear(rows.device):
        return gram(rows.flatten(0, 1)[:, 0]).unsqueeze(0) if groups == 1 else _turned(rows)
    if _has_triangle(rows):
        x = rows[:, :, 0]
        if not _are_columns(x):
            return gram(x.reshape(-1, width)).unsqueeze(0)
        if convolutions_are_fast(x, x.shape[1], width):
            return _gram_by_convolution(x.mT).unsqueeze(0)
        total = x.new_zeros(width, width)
        _add_triangle(total, x)
        return mirror(total).unsqueeze(0)
    if rows.stride(1) == 1 and rows.shape[1] >= max(width, _NARROW):  # the same; the products hold no more than x
        columns = rows.permute(0, 2, 3, 1).flatten(0, 1)  # [N · G, D, T]
        return torch.bmm(columns, columns.mT).unflatten(0, (-1, groups)).sum(0)
    step = max(1, _ROWS // max(1, rows.shape[1]))
    total = _turned(rows[:step])
    for start in range(step, rows.shape[0], step):
        total += _turned(rows[start : start + step])
    return total


def _turned(rows: Tensor) -> Tensor:
    """Σ x xᵀ of `[N, T, G, D]`, `[G, D, D]`, of a copy with the rows last."""
    flat = rows.permute(2, 3, 0, 1).flatten(2)
    return torch.bmm(flat, flat.mT)


def _gram_by_convolution(x: Tensor) -> Tensor:
    """Σ_bt x_bt x_btᵀ of columns `[B, D, T]`, `[D, D]`, as the gradient of a convolution's weight.

    Its images and gradients are the columns.
    """
    width, n_columns = x.shape[1:]
    total = x.new_zeros(width, width, 1)
    for part in x.split(max(1, _ROWS // n_columns)):
        total += conv1d_weight(part, torch.Size((width, width, 1)), part)
    return total[..., 0]


def group_product(x: Tensor, matrix: Tensor) -> Tensor:
    """Σ x xᵀ M over all but the last two dimensions of `[..., G, D]`, for M `[G, D, w]`, `[G, D, w]` in its dtype.

    As Σ x (Mᵀ x)ᵀ: the Gram `[G, D, D]` is not formed. Partial sums are formed apart, as in `gram`; few rows times
    many are multiplied faster than the transposed product.
    """
    rows = x.reshape(-1, *x.shape[-2:]) if x.ndim > 2 else x.unsqueeze(0)  # [N, G, D]
    if operations_are_dear(x.device):
        flat = rows.transpose(0, 1).to(matrix.dtype)
        return flat.mT @ (flat @ matrix)
    total = matrix.new_zeros(matrix.mT.shape)
    for part in rows.split(_ROWS):
        flat = part.transpose(0, 1).to(matrix.dtype)  # [G, n, D]
        total += (matrix.mT @ flat.mT) @ flat
    return total.mT.contiguous()


# Convolutions of PyTorch that multiply faster than its matrix products.


_VECTOR = 16
"""Channels that a kernel takes at once: of other numbers it takes longer than a matrix product."""

_SUMMED = 64
"""Terms of a sum from which on a kernel repays that it lays out the sums anew."""


def convolutions_are_fast(x: Tensor, n_terms: int, *channels: int) -> bool:
    """True if gradients of a convolution's weight, sums of products, take less time than matrix products of the same.

    That holds of PyTorch's float32 kernels on x86, which read every number from a cache and know the widest vectors of
    a processor. The others, of which some are slow, are not asked.
    """
    x86 = torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available()
    x86 = x86 and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    known = x86 and x.device.type == "cpu" and x.dtype == torch.float32 and numbers_are_known()
    return known and n_terms >= _SUMMED and all(n % _VECTOR == 0 for n in channels)
