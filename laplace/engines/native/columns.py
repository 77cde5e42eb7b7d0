"""The cotangents of a batch, few at a time: roots of output Hessians, and columns of single positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from laplace.likelihoods.output_hessian import OutputHessian


class Columns(Protocol):
    """Columns u_k, `[K, B, C]`: a tensor, or what makes slices of one as they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Tensor: ...


@dataclass(frozen=True)
class RootColumns:
    """Columns of a root of structured Hessians, of which all together hold B·C² numbers.

    Attributes:
        hessian: Λ, without a dense part.
    """

    hessian: OutputHessian

    @classmethod
    def of(cls, hessian: OutputHessian) -> Columns:
        """The columns of any Λ; a root of a dense one is found by factorising it, once."""
        return cls(hessian) if hessian.dense is None else hessian.root()

    def __len__(self) -> int:
        return self.hessian.n_columns

    def __getitem__(self, part: slice) -> Tensor:
        return self.hessian.root(part)


class RowColumns:
    """Columns `[K, B·T, C]`, of which every row has its own, as cotangents `[K', B, T·C]` of the whole outputs.

    A curvature that is a sum over rows needs their columns apart: column (t, k) is column k at position t and zero at
    the others, K' = T·K, built as they are asked for. Columns that are random, independent and of mean zero need not be
    kept apart, for their products vanish on average: K' = K.

    Args:
        columns: `[K, B·T, C]`; positions of which every entry is zero are left out.
        n_data: B.
        apart: True if rows are kept apart.
    """

    def __init__(self, columns: Tensor, n_data: int, *, apart: bool) -> None:
        self.columns = columns.unflatten(1, (n_data, -1))  # [K, B, T, C]
        self.apart = apart and self.columns.shape[2] > 1
        self.used = self._places() if self.apart else None

    def _places(self) -> Tensor:
        """Positions of which some entry is not zero; the first one if there are none."""
        used = self.columns.ne(0).any(3).any(1).any(0)
        used[0] |= ~used.any()
        return used.nonzero().flatten()

    def __len__(self) -> int:
        return len(self.columns) * (1 if self.used is None else len(self.used))

    def __getitem__(self, part: slice) -> Tensor:
        """Consecutive cotangents, `[k, B, T·C]`."""
        if self.used is None:
            return self.columns[part].flatten(2)
        k, b, t, c = self.columns.shape
        index = torch.arange(*part.indices(len(self)), device=self.columns.device)
        column, position = index % k, self.used[index // k]
        rows = torch.arange(len(index), device=index.device)
        whole = self.columns.new_zeros(len(index), t, b, c)
        whole[rows, position] = self.columns[column, :, position]
        return whole.transpose(1, 2).reshape(len(index), b, t * c)
