"""The data as the linearised network sees them: outputs at θ*, products with the Jacobian, targets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.checks import named
from laplace.core.positions import require_none
from laplace.core.precision_policy import widened
from laplace.core.progress import DataBar
from laplace.engines.engine import as_count
from laplace.engines.native.engine import NativeEngine
from laplace.engines.native.products import GraphMap, HeadMap
from laplace.errors import InvalidData
from laplace.likelihoods.output_hessian import OutputHessian
from laplace.network import next_token

_INSTEAD = "Predictions, evidence and tuning of a posterior that is not refined take them"
"""What to do with outputs that have positions."""

KEPT_BYTES = 2**28
"""Bytes of graphs or features that are kept from one product to the next: fixed, as results must not depend on it."""


class LinearBatch:
    """One batch.

    Args:
        engine: Gives outputs and Jacobians at θ*.
        x: Inputs.
        y: Targets as the loader gives them, without ignored ones.

    Attributes:
        f: Outputs at θ*, `[B, C]`, float64.
        y: Checked targets.
    """

    def __init__(self, engine: NativeEngine, x: Inputs, y: Tensor) -> None:
        self.engine = engine
        self.x = x
        self.kept: HeadMap | GraphMap | None = self._map()
        self.f = widened(self._outputs.detach())
        self.y = engine.checked(self.f, y)

    def _map(self) -> HeadMap | GraphMap:
        if self.engine.problem.head is not None:
            parts = list(self.engine.jacobian(self.x))
            if parts and all(jacobian.is_head for jacobian, _ in parts):
                require_none(parts[0][0].positions, "refine(...)", _INSTEAD)
                self._outputs = torch.cat([f for _, f in parts])
                features = torch.cat([jacobian.head_features() for jacobian, _ in parts])
                return HeadMap(widened(features), parts[0][0].head_places())
        linear = self.engine.linear(self.x)
        require_none(linear.positions, "refine(...)", _INSTEAD)
        self._outputs = linear.f
        return GraphMap(linear, linear.f.shape[-1])

    @property
    def linear(self) -> HeadMap | GraphMap:
        """Products with the Jacobian: those that are kept, or from a new forward pass."""
        return self._map() if self.kept is None else self.kept


class LinearData:
    """All data, read once and held: every product reads the same batches in the same order.

    Args:
        engine: Gives outputs and Jacobians at θ*.
        loader: Batches.
        dict_key_y: Key of the targets, for mappings.
        progress_bar: Whether to show one.

    Raises:
        InvalidData: No data, or all are ignored, or a batch that cannot be used.
    """

    def __init__(
        self, engine: NativeEngine, loader: Iterable[Any], dict_key_y: str, *, progress_bar: bool = False
    ) -> None:
        self.engine = engine
        self.batches: list[LinearBatch] = []
        n_bytes, device, rules = 0, engine.problem.device, engine.target_rules
        bar = DataBar("refine, data", loader, shown=progress_bar)
        for number, item in enumerate(loader):
            with named(f"batch {number}"):
                counted = next_token.counted(item, dict_key_y, device, rules, engine.problem.module)
                if counted is None:
                    continue
                batch = LinearBatch(engine, *counted)
            n_bytes += batch.linear.n_bytes
            if n_bytes > KEPT_BYTES:
                batch.kept = None
            self.batches.append(batch)
            bar.add(len(batch.f))
        bar.close()
        if not self.batches:
            raise InvalidData("the loader gave no data, or all are ignored; a refinement needs those of the fit.")

    @property
    def n_data(self) -> float:
        """Data that count."""
        likelihood = self.engine.likelihood
        return as_count(sum(float(likelihood.count(batch.f, batch.y)) for batch in self.batches))

    def push(self, vector: Tensor) -> list[Tensor]:
        """J v of every batch, `[B, C]` each."""
        return [batch.linear.push(vector.unsqueeze(0))[0] for batch in self.batches]

    def pull(self, cotangents: Sequence[Tensor]) -> Tensor:
        """Σ Jᵀ u over batches, `[P]`."""
        total = cotangents[0].new_zeros(1, self.engine.problem.layout.n_params)
        for batch, u in zip(self.batches, cotangents, strict=True):
            batch.linear.add_pull(u.unsqueeze(0), total)
        return total[0]

    def curvature_product(self, inner: Sequence[OutputHessian], scale: Tensor, vector: Tensor) -> Tensor:
        """Σ Jᵀ (scale · Λ) J v, `[P]`, with an output Hessian per batch; one map per batch serves both directions."""
        total = torch.zeros_like(vector).unsqueeze(0)
        for batch, hessian in zip(self.batches, inner, strict=True):
            linear = batch.linear
            linear.add_pull(scale * hessian.times(linear.push(vector.unsqueeze(0))), total)
        return total[0]
