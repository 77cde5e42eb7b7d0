"""A function of one datum for all data of a batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import vmap

from laplace.core.memory import ran_out


def for_each(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """`function` of the rows of each datum, `[B, ...]`: at once by `torch.func.vmap`, or else one by one.

    What reads a number (`f[y]`, `int(y)`, a branch on values) runs one by one only.

    Args:
        function: Of one row of every tensor.
        *rows: Tensors `[B, ...]`.
    """
    try:
        return vmap(function)(*rows)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if ran_out(error) or not len(rows[0]):
            raise
    return torch.stack([function(*row) for row in zip(*rows, strict=True)])
