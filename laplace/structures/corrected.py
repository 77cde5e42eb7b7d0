"""Corrected eigenvalues: the diagonal of the curvature in a basis, which a reading of its own sums up.

(Uᵀ H U)_pp = Σ_kb (u_pᵀ J_kb)² (George et al., 2018, "Fast Approximate Natural Gradient Descent in a Kronecker-factored
Eigenbasis").
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.checks import all_finite
from laplace.engines.engine import Bases, BatchSummary, CurvatureEngine
from laplace.engines.sinks import DiagSink
from laplace.errors import InvalidData
from laplace.structures import fields
from laplace.structures.base import DataPass, require_finite, those_known


class Correction(DataPass):
    """The last reading of a structure whose bases are known by then.

    Args:
        engine: Computes the numbers of a batch.
        bases: U of every tensor.
        corrected: The sum so far, `[E, n]` for n vectors of all bases; None before the first batch.
    """

    def __init__(self, engine: CurvatureEngine, bases: Bases, corrected: Tensor | None = None) -> None:
        self.engine = engine
        self.bases = bases
        self.corrected = corrected

    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        sink = DiagSink(self.bases, self.corrected)
        summary = self.engine.accumulate(x, y, sink)
        self.corrected = sink.values
        require_finite(all_finite([self.corrected]))
        return summary

    def sums(self) -> dict[str, Tensor]:
        return those_known(corrected=self.corrected)

    def form(self) -> Any:
        return fields.form_of(self.sums())

    def make_room(self, form: Any) -> None:
        if self.corrected is None:
            self.corrected = fields.zeros_of(form, self.engine.problem.device)["corrected"]

    def read(self) -> Tensor:
        """The diagonals of all data, `[E, n]`.

        Raises:
            InvalidData: There were none.
        """
        if self.corrected is None:
            raise InvalidData("no batch was read.")
        return self.corrected
