"""Data as an approximation in function space sees them: Jacobians with outputs and targets, and the loss on the way."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.positions import require_none
from laplace.engines.engine import BatchSummary, CurvatureEngine
from laplace.jacobian.jacobian import Jacobian
from laplace.likelihoods.checks import refuse_gaps
from laplace.structures.base import DataPass, require_finite, require_read

HOLDS_INPUTS = "held with the inputs of the layers there, which in a first layer are data"
"""Text that `repr` says of a posterior whose states and pickles hold data: those that its kernels are between."""

POSITIONS = (
    "hessian_structure='gp', a posterior over functions,",
    "Posteriors over weights take them: hessian_structure='full', 'kron', 'diag', 'lowrank' or 'matrix_free'",
)
"""Text that refuses outputs with positions, and says what takes them."""


def jacobians(engine: CurvatureEngine, x: Inputs, *, create_graph: bool = False) -> Iterator[tuple[Jacobian, Tensor]]:
    """Jacobians and outputs `[b, C]` of consecutive parts of a batch, differentiable in x with `create_graph`."""
    for jacobian, f in engine.jacobian(x, create_graph=create_graph):
        require_none(jacobian.positions, *POSITIONS)
        yield jacobian, f


def observed(
    engine: CurvatureEngine, x: Inputs, y: Tensor, least: torch.dtype = torch.float32
) -> Iterator[tuple[Jacobian, Tensor, Tensor]]:
    """Jacobians, outputs `[b, C]` as constants in at least this precision, and checked targets of parts of a batch."""
    start = 0
    for jacobian, f in jacobians(engine, x):
        f = f.detach().to(torch.promote_types(f.dtype, least))
        targets = engine.checked(f, y[start : start + len(f)])
        refuse_gaps(targets, POSITIONS[0].removesuffix(","))
        yield jacobian, f, targets
        start += len(f)


class ObservingPass(DataPass):
    """A reading that sums the loss of the data that it looks at: others, which choose data, do not know it."""

    def __init__(self, engine: CurvatureEngine) -> None:
        self.engine = engine  # Computes Jacobians
        self.losses: Tensor | None = None
        self.n_outputs = 0

    def observed(self, x: Inputs, y: Tensor) -> Iterator[tuple[Jacobian, Tensor, Tensor]]:
        """As the function of this name; the loss is counted."""
        for jacobian, f, targets in observed(self.engine, x, y):
            losses = self.engine.likelihood.loss_terms(f, targets).detach()
            require_finite(losses.isfinite())
            self.losses = losses if self.losses is None else self.losses + losses
            self.n_outputs = f.shape[1]
            yield jacobian, f, targets

    def summary_of_fit(self, read: BatchSummary) -> BatchSummary:
        return BatchSummary(require_read(self.losses), read.n_data, self.n_outputs)


def uncounted(y: Tensor, n_outputs: int = 0) -> BatchSummary:
    """Contribution of a batch whose loss is counted elsewhere: its number of data."""
    return BatchSummary(torch.zeros(1), len(y), n_outputs)
