"""Curvature that is a sum over batches, in one reading of the data."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.engines.engine import BatchSummary, CurvatureEngine
from laplace.errors import InvalidData
from laplace.structures import fields
from laplace.structures.base import Curvature, DataPass, require_finite

A = TypeVar("A", bound="AdditiveCurvature")


class AdditiveCurvature(Curvature):
    """Curvature whose batches simply add up, in one reading of the data; the tensors of its fields are sums.

    Attributes:
        matrix_dims: Number of dimensions from which on tensors of its state are symmetric matrices `[..., n, n]`; None
            where none of them is.
    """

    matrix_dims: int | None = None

    @classmethod
    @abstractmethod
    def from_batch(cls: type[A], engine: CurvatureEngine, x: Inputs, y: Tensor) -> tuple[BatchSummary, A]:
        """Curvature of one batch, by the engine's primitive of this structure."""

    def with_batch(self: A, engine: CurvatureEngine, x: Inputs, y: Tensor) -> tuple[BatchSummary, A]:
        """Curvature of the batches so far and one more; the memory of this one may be reused."""
        summary, new = self.from_batch(engine, x, y)
        return summary, self + new

    def kept(self: A, *, additive: bool = False) -> A:
        """The sum as it is kept after the last batch, without what only further batches need."""
        del additive  # the tensors of most sums are what batches are added to
        return self

    def is_finite(self) -> Tensor | bool:
        """True, or 0-dim, if every number is finite (of a matrix: its diagonal, which holds every square)."""
        return fields.is_finite(self)

    @classmethod
    def first_pass(cls, engine: CurvatureEngine, options: Any) -> DataPass:
        return _SumPass(cls, engine)


class _SumPass(DataPass):
    """Adds up batches."""

    def __init__(self, structure: type[AdditiveCurvature], engine: CurvatureEngine) -> None:
        self.structure = structure
        self.engine = engine
        self.total: AdditiveCurvature | None = None

    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        add = self.structure.from_batch if self.total is None else self.total.with_batch
        summary, total = add(self.engine, x, y)
        require_finite(torch.as_tensor(total.is_finite()))  # structures of users give a bool
        self.total = total
        return summary

    def sums(self) -> dict[str, Tensor]:
        # As states hold them: sums may have other forms on the way, which depend on the batches that were added.
        self.total = self._read().kept(additive=True)
        return dict(fields.named_tensors(self.total.state()))

    def is_symmetric(self, tensor: Tensor) -> bool:
        least = self.structure.matrix_dims
        return least is not None and tensor.ndim >= least

    def form(self) -> Any:
        return fields.form_of(self._read().kept(additive=True).state())

    def make_room(self, form: Any) -> None:
        zeros = self.structure.from_state(fields.zeros_of(form, self.engine.problem.device))
        self.total = zeros if self.total is None else self.total.kept(additive=True) + zeros

    def state(self) -> dict[str, Any]:
        return {"total": fields.state_of(self.total)}  # by its fields: `Curvature.state` is of a sum that is complete

    def resumed(self, state: Mapping[str, Any]) -> DataPass:
        total = state["total"]
        self.total = None if total is None else fields.from_state(self.structure, total)
        return self

    def finish(self) -> AdditiveCurvature:
        return self._read().kept()

    def _read(self) -> AdditiveCurvature:
        if self.total is None:
            raise InvalidData("no batch was read.")
        return self.total
