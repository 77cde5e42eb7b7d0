"""The exact Hessian of the negative log likelihood, by differentiating twice; it may be indefinite."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.memory import VECTOR, in_slices
from laplace.core.random_numbers import standard_normal
from laplace.engines.engine import Bases, BatchSummary, Groups
from laplace.engines.native.engine import NativeEngine
from laplace.engines.native.products import HessianProduct, add_rows
from laplace.engines.native.proof import TOLERANCE
from laplace.errors import CurvatureError, UnsupportedError
from laplace.network.model_guard import preserve_model

_ROWS = 64
"""Unit vectors that are multiplied at once: rows of the Hessian held besides the result."""


class HessianEngine(NativeEngine):
    """∇² Σ_b −log p(y_b | f_b) with respect to the random entries: P products for a matrix, one for a vector.

    The arguments are those of `NativeEngine`.
    """

    kind = "hessian"
    name = "NativeHessian"

    def matmul(
        self, x: Inputs, y: Tensor, vectors: Tensor, running: Tensor | None = None
    ) -> tuple[BatchSummary, Tensor]:
        with torch.inference_mode(False), preserve_model(self.problem.module):
            capture = self._differentiable(x)
            with torch.enable_grad():
                f = capture.rows.to(self.dtype)
                targets = self.targets(f.detach(), y, capture.positions)
                losses = targets.loss_terms(f)
                losses = losses if self.split_outputs else losses.sum().unsqueeze(0)
            step = self.per_call(capture, vectors.shape[1])
            vectors = vectors.expand(len(losses), -1, -1)
            total = torch.zeros_like(vectors, memory_format=torch.contiguous_format) if running is None else running
            for loss, rows, sums in zip(losses, vectors, total, strict=True):
                product = HessianProduct(self.problem, capture, loss)
                self._require_symmetric(product)
                products = in_slices(
                    len(rows), step, lambda part, rows=rows, product=product: product.times(rows[part]), VECTOR
                )
                for part, rows in products:
                    add_rows(self.problem, rows, sums[part])
        return self.summary(capture.rows.detach(), targets), total

    def _require_symmetric(self, product: HessianProduct) -> None:
        """Asks for one number twice, vᵀ H w = wᵀ H v: second derivatives of some operations of PyTorch are wrong.

        Raises:
            CurvatureError: The two differ beyond rounding.
        """
        like = torch.zeros((), dtype=self.dtype, device=self.problem.device)
        generator = torch.Generator(device=like.device).manual_seed(0)
        pair = standard_normal((2, self.problem.layout.n_params), like, generator)
        result = torch.zeros_like(pair)
        add_rows(self.problem, product.times(pair), result)
        difference = (pair[0] @ result[1] - pair[1] @ result[0]).abs()
        scale = pair.norm(dim=1).flip(0) @ result.norm(dim=1)
        if bool(difference > TOLERANCE[self.problem.dtype] * scale):
            raise CurvatureError(
                "the exact Hessian is not symmetric: an operation of the network has a wrong second derivative. Use "
                "backend=NativeGGN, which takes first derivatives only, or write that operation in other terms."
            )

    def full(self, x: Inputs, y: Tensor) -> tuple[BatchSummary, Tensor]:
        n_params = self.problem.layout.n_params
        summary, rows = self._rows(x, y, torch.arange(n_params), lambda rows, _: rows)
        return summary, 0.5 * (rows + rows.transpose(1, 2))

    def blocks(self, x: Inputs, y: Tensor, groups: Groups) -> tuple[BatchSummary, tuple[Tensor, ...]]:
        slices = self.problem.layout.slices
        inside = [torch.cat([torch.arange(slices[i].start, slices[i].stop) for i in group]) for group in groups]
        parts = [self._rows(x, y, entries, lambda rows, _, e=entries: rows[..., e]) for entries in inside]
        return parts[0][0], tuple(0.5 * (rows + rows.transpose(1, 2)) for _, rows in parts)

    def diag(self, x: Inputs, y: Tensor, bases: Bases | None = None) -> tuple[BatchSummary, Tensor]:
        if bases is not None:
            raise UnsupportedError(
                "the exact Hessian has no eigenvalue correction; use backend=NativeGGN, or hessian_structure='full'."
            )
        entries = torch.arange(self.problem.layout.n_params)
        return self._rows(x, y, entries, lambda rows, at: rows[:, torch.arange(len(at)), at])

    def _rows(
        self, x: Inputs, y: Tensor, entries: Tensor, keep: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[BatchSummary, Tensor]:
        """Results of `keep(rows, entries)` for rows `[E, r, P]` of the Hessian, joined in their second dimension."""
        parts = [self._columns(x, y, at, keep) for at in entries.split(_ROWS)]
        return parts[0][0], torch.cat([rows for _, rows in parts], 1)

    def _columns(
        self, x: Inputs, y: Tensor, at: Tensor, keep: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[BatchSummary, Tensor]:
        hot = torch.zeros(1, len(at), self.problem.layout.n_params, dtype=self.dtype, device=self.problem.device)
        hot[0, torch.arange(len(at)), at] = 1
        summary, rows = self.matmul(x, y, hot)
        return summary, keep(rows, at)
