"""Curvature whose tensors are spread over processes: each of them holds, and factorises, its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core.hyperparameters import GaussianPrior
from laplace.core.inference import kept_for_later
from laplace.core.layout import Layout
from laplace.core.precision_policy import wide_dtype
from laplace.core.processes import Processes
from laplace.engines.engine import CurvatureEngine
from laplace.errors import UnsupportedError
from laplace.structures import fields
from laplace.structures.algebra import other_structure
from laplace.structures.base import Curvature, DataPass, narrowed
from laplace.structures.separation import Separation
from laplace.structures.sharded_precision import ShardedPrecision, SharePrecision, apart
from laplace.structures.variances_over_priors import VariancesOverPriors


@dataclass(frozen=True, eq=False)
class ShardedCurvature(Curvature):
    """A block-diagonal curvature of which every process of a group holds the blocks of some tensors.

    Attributes:
        processes: The group.
        owners: Rank of the process that holds a tensor, of every tensor.
        layout: All tensors.
        own: The curvature of this process's tensors; None if it has none.
        terms: E.
    """

    processes: Processes
    owners: tuple[int, ...]
    layout: Layout
    own: Curvature | None
    terms: int
    name = "sharded"

    @classmethod
    def of(cls, curvature: Curvature, processes: Processes, layout: Layout) -> ShardedCurvature:
        """This process's part of a curvature that all processes have; what is left of it can be let go.

        Args:
            curvature: That of all tensors, the same in every process, of a structure that has a separation.
            processes: The group.
            layout: All tensors.
        """
        owners = placed(curvature, layout, processes.size)
        return cls(processes, owners, layout, None, curvature.n_terms).alike(curvature)

    def alike(self, curvature: Curvature) -> ShardedCurvature:
        """This process's part of another curvature of all tensors, with the same owners."""
        own = separation_of(curvature).part(curvature, self.tensors, self.layout) if self.tensors else None
        return replace(self, own=own, terms=curvature.n_terms)

    def holding(self, own: Curvature) -> ShardedCurvature:
        """The same with another curvature of this process's tensors."""
        return replace(self, own=own)

    @property
    def n_terms(self) -> int:
        return self.terms

    @property
    def tensors(self) -> tuple[int, ...]:
        """Indices of this process's tensors."""
        return tensors_of(self.owners, self.processes.rank)

    @classmethod
    def first_pass(cls, engine: CurvatureEngine, options: Any) -> DataPass:
        raise UnsupportedError("a curvature is taken apart after a fit of its structure, la.fit(..., sharded=True).")

    def __add__(self, other: Curvature) -> ShardedCurvature:
        if not isinstance(other, ShardedCurvature):
            return NotImplemented
        if self.own is None or other.own is None:
            return self
        return replace(self, own=self.own + other.own)

    def scaled(self, factor: float) -> ShardedCurvature:
        return self if self.own is None else replace(self, own=self.own.scaled(factor))

    def minus(self, removed: Curvature, *, signed: bool = False) -> ShardedCurvature:
        if not isinstance(removed, ShardedCurvature):
            raise other_structure(self.name, removed.name)
        if self.own is None or removed.own is None:
            return self
        return replace(self, own=self.own.minus(removed.own, signed=signed))

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> ShardedPrecision:
        def share(weights: Tensor, prior: GaussianPrior) -> SharePrecision:
            tensors = self.tensors
            with kept_for_later():
                own = None if self.own is None else self.own.precision(weights, prior.part(tensors), **options)
            return SharePrecision(own, tensors, prior)

        return ShardedPrecision(self.processes, share, weights, prior)

    def decompose(self, **options: Any) -> None:
        if self.own is not None:
            self.own.decompose(**options)

    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> VariancesOverPriors:
        raise apart("tuning on validation data", "tune by the evidence, method='marglik' or objective='evidence'")

    def state(self) -> dict[str, Any]:
        raise apart("a state dict", "write it by laplace.checkpoint.save(la, path)")

    def narrowed(self, dtype: torch.dtype) -> ShardedCurvature:
        """The same with wide sums in the dtype of the posterior."""
        return self if self.own is None else self.holding(narrowed(self.own, dtype))

    def moved(self, device: torch.device | None, dtype: torch.dtype | None) -> ShardedCurvature:
        return replace(self, own=None if self.own is None else self.own.moved(device, dtype))

    @property
    def note(self) -> str:
        """Words about it in the `repr` of a posterior."""
        ranks, mine = self.processes.size, len(self.tensors)
        return f"sharded over {ranks} processes, of which this one holds {mine} of {len(self.owners)} tensors"

    def public(self) -> Any:
        raise apart("la.H, or its factors", "write it by laplace.checkpoint.save, and load it in one process")


def separation_of(curvature: Curvature) -> Separation[Any]:
    """The way in which a curvature is taken apart.

    Raises:
        UnsupportedError: Its tensors are coupled.
    """
    if curvature.separation is None:
        raise UnsupportedError(f"curvature of structure {curvature.name!r} couples all tensors; it is not taken apart.")
    return curvature.separation


def tensors_of(owners: Sequence[int], rank: int) -> tuple[int, ...]:
    """Indices of the tensors that a process holds."""
    return tuple(i for i, owner in enumerate(owners) if owner == rank)


_EIGENVECTORS = 2
"""Copies of a factor's bytes that its eigenvectors take, in float64 and in the dtype of Jacobians."""

_EIGENVALUES = 3
"""Float64 numbers that are kept of every entry of a tensor: its eigenvalues, those of P and of the evidence."""


def placed(curvature: Curvature, layout: Layout, n_ranks: int) -> tuple[int, ...]:
    """Rank of every tensor: the largest units first, each to the process that holds least (greedy placement).

    By the bytes that factors, eigenvectors and eigenvalues take: of shapes alone, on which all processes agree.
    """
    separation = separation_of(curvature)
    owners, loads = [0] * layout.n_tensors, [0] * n_ranks
    sizes = {
        unit: _bytes(separation.part(curvature, unit, layout), layout.part(unit).n_params)
        for unit in separation.units(curvature, layout)
    }
    for unit in sorted(sizes, key=lambda unit: (-sizes[unit], unit)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[unit]
        for i in unit:
            owners[i] = rank
    return tuple(owners)


def _bytes(part: Curvature, n_params: int) -> int:
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in fields.named_tensors(part.state()))
    return (1 + _EIGENVECTORS) * size + _EIGENVALUES * wide_dtype().itemsize * n_params
