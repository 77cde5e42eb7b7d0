"""The kinds of native curvature: generalised Gauss–Newton, empirical Fisher and Hessian.

The first two are sums of outer products, Σ (Jᵀu)(Jᵀu)ᵀ: one forward pass and K backward passes per batch. The
cotangents u decide which: a root of the output Hessian gives the GGN, gradients at sampled targets its Monte-Carlo
estimate, gradients of the loss the empirical Fisher. The exact Hessian comes by differentiating twice.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.memory import COTANGENT, VECTOR, in_slices
from laplace.core.positions import rows_that_count
from laplace.core.random_numbers import standard_normal
from laplace.engines.engine import BatchSummary, EngineOptions, OutputCurvature, detached
from laplace.engines.native.engine import NativeEngine
from laplace.engines.native.forward import ForwardPass
from laplace.engines.native.products import HessianProduct, Linearised, add_rows
from laplace.engines.native.proof import TOLERANCE, first_of_use
from laplace.engines.sinks import BatchForm, BlockSink, BlockSource, DiagSink, ProductSink, Sink
from laplace.errors import CurvatureError, UnsupportedError
from laplace.jacobian.blocks import Block
from laplace.likelihoods.base import Likelihood, Observed
from laplace.likelihoods.output_hessian import OutputHessian, columns_of
from laplace.weights.problem import Problem


class Cotangents(Protocol):
    """Cotangents u_k, `[K, B, C]`: a tensor, or an object that computes slices of one."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Tensor: ...


@dataclass(frozen=True)
class RootCotangents:
    """Columns of a root of structured Hessians, computed as they are needed: all together hold B·C² numbers."""

    hessian: OutputHessian  # Λ, without a dense part

    @classmethod
    def from_hessian(cls, hessian: OutputHessian) -> Cotangents:
        """The columns of a root of any Λ; a dense one is factorised once."""
        return cls(hessian) if hessian.dense is None else hessian.root()

    def __len__(self) -> int:
        return self.hessian.n_columns

    def __getitem__(self, part: slice) -> Tensor:
        return self.hessian.root(part)


class PositionCotangents:
    """Columns `[K, B·T, C]`, of which every row has its own, as cotangents `[K', B, T·C]` of the whole outputs.

    A curvature that is a sum over rows needs their columns apart: column (t, k) is column k at position t and zero at
    the others, K' = T·K, built as they are asked for. Columns that are random, independent and of mean zero need not be
    kept apart, for their products vanish on average: K' = K.
    """

    def __init__(self, columns: Tensor, n_data: int, separate: bool) -> None:
        # `[K, B·T, C]`; positions of which every entry is zero are left out
        self.columns = columns.unflatten(1, (n_data, -1))  # [K, B, T, C]
        self.separates_positions = separate and self.columns.shape[2] > 1
        self.used = self._places() if self.separates_positions else None

    def _places(self) -> Tensor:
        """Positions with an entry that is not zero; the first one if there are none."""
        used = self.columns.ne(0).any(3).any(1).any(0)
        used[0] |= ~used.any()
        return used.nonzero().flatten()

    def __len__(self) -> int:
        return len(self.columns) * (1 if self.used is None else len(self.used))

    def __getitem__(self, part: slice) -> Tensor:
        if self.used is None:
            return self.columns[part].flatten(2)
        k, b, t, c = self.columns.shape
        index = torch.arange(*part.indices(len(self)), device=self.columns.device)
        column, position = index % k, self.used[index // k]
        rows = torch.arange(len(index), device=index.device)
        whole = self.columns.new_zeros(len(index), t, b, c)
        whole[rows, position] = self.columns[column, :, position]
        return whole.transpose(1, 2).reshape(len(index), b, t * c)


class OuterEngine(NativeEngine):
    """Curvature Σ_kb (J_bᵀ u_kb)(J_bᵀ u_kb)ᵀ, without `[B, C, P]`.

    The arguments are those of `NativeEngine`.
    """

    _products_by_autograd = False  # for products with vectors, as a first batch has decided

    @abstractmethod
    def cotangents(self, f: Tensor, targets: Observed, hessian: OutputHessian | None = None) -> Cotangents:
        """Columns u_k, `[K, B, C]`, with curvature Σ_kb (Jᵀu)(Jᵀu)ᵀ."""

    def output_hessian(self, f: Tensor, targets: Observed) -> OutputHessian | None:
        """Λ, from which heads are summed without a root; None where only cotangents are known."""
        return None

    def accumulate(self, x: Inputs, y: Tensor, sink: Sink) -> BatchSummary:
        if isinstance(sink, ProductSink):
            return self._add_products(x, y, sink)
        batch, targets = self.observe(x, y)
        self.add(batch, targets, sink)
        return self.summary(batch.f, targets)

    def _sources(self, batch: ForwardPass, targets: Observed) -> list[BlockSource]:
        uses = zip(first_of_use(batch.plan), batch.plan, self._input_weights(batch, targets), strict=True)
        return [
            BlockSource(str(first), len(rule.uses) == 1 or rule.is_routed, rule.description == "unused", own)
            for first, rule, own in uses
        ]

    def _input_weights(self, batch: ForwardPass, targets: Observed) -> list[Tensor | None]:
        """Weights of the inputs of each tensor's layer; None for ones.

        For a layer that is applied by row these are the rows that are not ignored, `[n]`; for others the batch, `[B]`,
        each with the mean weight of its rows that are not ignored.
        """
        weights = targets.weights
        if weights is None:
            return [None] * len(batch.plan)
        counted = self._counted(batch, targets)
        rows, present = weights, torch.ones_like(weights)
        if counted is not None:
            rows, present = weights[counted], torch.zeros_like(weights).index_fill(0, counted, 1.0)
        sums, counts = (values.view(batch.n_data, -1).sum(1) for values in (weights * present, present))
        return [rows if batch.by_row(i) else sums / counts.clamp(min=1) for i in range(len(batch.plan))]

    def _add_products(self, x: Inputs, y: Tensor, sink: ProductSink) -> BatchSummary:
        batch = self._forward_with_factors(x, sink.vectors.shape[1])
        if batch is None:
            return self._add_products_by_autograd(x, y, sink)
        targets = self.targets(batch.f, y, batch.positions)
        self.add(batch, targets, sink)
        return self.summary(batch.f, targets)

    def _forward_with_factors(self, x: Inputs, count: int) -> ForwardPass | None:
        """A forward pass, if layer rules explain all tensors and products with vectors are cheaper by factors."""
        if self._products_by_autograd or self.split_outputs or self.problem.processes is not None:
            return None
        with torch.inference_mode(False), self.problem.on_private_copy() as problem:
            capture = self._capture(problem, detached(x))
            plan = None
            if len(capture.f):
                with suppress(CurvatureError):
                    plan = self._plans.known(problem, capture, x) or self._prove(problem, capture, x, ladder=False)
            if plan is not None and all(rule.proven for rule in plan):
                batch = ForwardPass(problem, x, capture, plan, self.memory_budget)
                if self._profile(batch).multiplies_by_factors(count):
                    self._remember(plan, capture, x)
                    return batch
        self._products_by_autograd = True
        return None

    def _add_products_by_autograd(self, x: Inputs, y: Tensor, sink: ProductSink) -> BatchSummary:
        """Products with vectors by differentiating the graph in both directions, whatever the layers are."""
        with torch.inference_mode(False), self.problem.on_private_copy() as problem:
            capture = self._differentiable(problem, x)
            f = capture.rows.detach()
            targets = self.targets(f, y, capture.positions)
            linear, inner = Linearised(problem, capture), self._output_product(f, targets)
            step = self.per_call(capture, sink.vectors.shape[1])
            vectors, total = sink.prepared(self._n_terms(f))
            sink.is_rounded = True
            for term, (rows, sums) in enumerate(zip(vectors, total, strict=True)):

                def product(part: slice, rows: Tensor = rows, term: int = term) -> list[Tensor | None]:
                    pushed = linear.push(rows[part])
                    weighted = inner(pushed.reshape(len(pushed), *f.shape), term if len(vectors) > 1 else None)
                    return linear.pull(weighted.view_as(pushed))

                for part, pulled in in_slices(len(rows), step, product, VECTOR):
                    add_rows(self.problem, pulled, sums[part])
        return self.summary(f, targets)

    def _output_product(self, f: Tensor, targets: Observed) -> Callable[[Tensor, int | None], Tensor]:
        """The map v ↦ M v of `[R, B, C]`, M_b = Σ_k u_kb u_kbᵀ; for one term only the part of its output."""
        hessian = self.output_hessian(f, targets)
        columns = f.new_zeros(0) if hessian is not None else self.cotangents(f, targets)[:]

        def times(vectors: Tensor, term: int | None) -> Tensor:
            if hessian is None:
                weights = torch.einsum("kbc,rbc->rkb", columns, vectors.to(columns))
                return torch.einsum("kbc,rkb->rbc", columns, weights)
            product = hessian.times(vectors.to(hessian.diag))
            if term is not None:
                only = torch.zeros_like(product)
                only[..., term] = product[..., term]
                return only
            return product

        return times

    def output_curvature(self, x: Inputs, y: Tensor) -> tuple[BatchSummary, OutputCurvature]:
        batch, targets = self.observe(x, y)
        hessian = self.output_hessian(batch.f, targets)
        if hessian is None:
            columns = self.cotangents(batch.f, targets)[:]
            dense = torch.einsum("kbc,kbd->bcd", columns, columns)
            hessian = OutputHessian(dense.diagonal(dim1=1, dim2=2), dense=dense)
        n_positions = batch.capture.n_positions if batch.positions else 1
        return self.summary(batch.f, targets), OutputCurvature(hessian, n_positions)

    def add(self, batch: ForwardPass, targets: Observed, sink: Sink) -> None:
        """Adds the curvature of a batch: of heads without a root of Λ, of other tensors by chunks of cotangents.

        Of outputs with positions, rows are the data of tensors that allow it (`JacobianRule.by_row`), and ignored ones
        are left out; other tensors get cotangents of their own for every position.
        """
        form = BatchForm(
            self.problem, self._n_terms(batch.f), self.dtype, batch.dtype, self.options.kfac_approx == "reduce",
            lambda: self._sources(batch, targets),
        )  # fmt: skip
        sink.begin(form)
        heads, groups = sink.heads(batch.heads), sink.groups
        counted = self._counted(batch, targets)
        f = batch.f if counted is None else batch.f[counted]
        hessian = self.output_hessian(f, targets.select(counted))
        if hessian is None:
            heads = {}
        elif heads:
            sink.add_head(heads if counted is None else {i: head.at(counted) for i, head in heads.items()}, hessian)
        rest = [i for i in range(len(batch.plan)) if i not in heads]
        if not rest:
            return
        columns = self.cotangents(batch.f, targets, hessian if counted is None else None)
        step = batch.columns_at_once(together=bool(groups))
        mixed = {i for i in rest if not batch.by_row(i)}
        mixed |= {i for group in groups if mixed & set(group) for i in group}
        if mixed and len(columns) > self.max_passes:  # refused before any of them are made
            self.check_passes(len(columns) * (batch.capture.n_positions if self.separates_positions else 1), "a fit")
        if simple := [i for i in rest if i not in mixed]:

            def computed(part: slice) -> dict[int, Block]:
                return batch.row_blocks(columns[part].to(batch.f.dtype), only=simple)

            for part, blocks in in_slices(len(columns), step, computed, COTANGENT):
                sink.add(
                    blocks if counted is None else {i: block.at(counted) for i, block in blocks.items()}, part.start
                )
        if mixed:
            cotangents = PositionCotangents(columns[:].to(batch.f.dtype), batch.n_data, self.separates_positions)
            self.check_passes(len(cotangents), "a fit")
            some = [i for i in rest if i in mixed]
            every = in_slices(len(cotangents), step, lambda part: batch.blocks(cotangents[part], some), COTANGENT)
            for part, blocks in every:
                sink.add(blocks, part.start)

    def _counted(self, batch: ForwardPass, targets: Observed) -> Tensor | None:
        """Rows that are not ignored, `[n]`; None for all."""
        return rows_that_count(targets.y, batch.positions, self.likelihood.ignore_index)


class GGNEngine(OuterEngine):
    """Generalised Gauss–Newton matrix Σ_b J_bᵀ Λ_b J_b [Redux, eq. 9], exact or sampled.

    It is the Fisher information of exponential families [Redux, eq. 8].

    The arguments are those of `CurvatureEngine`.
    """

    kind = "ggn"
    name = "NativeGGN"

    def __init__(self, problem: Problem, likelihood: Likelihood, options: EngineOptions) -> None:
        super().__init__(problem, likelihood, options)
        self.generator = options.generator or torch.Generator(device=problem.device).manual_seed(torch.initial_seed())

    def cotangents(self, f: Tensor, targets: Observed, hessian: OutputHessian | None = None) -> Cotangents:
        if self.options.stochastic:
            draws = targets.sample_gradients(f.to(self.dtype), self.options.num_samples, self.generator)
            return draws / self.options.num_samples**0.5
        return RootCotangents.from_hessian(targets.hessian(f.to(self.dtype)) if hessian is None else hessian)

    def n_columns(self, f: Tensor) -> int:
        if self.options.stochastic:
            return self.options.num_samples
        return columns_of(f.shape[1], sums_to_zero=self.likelihood.sums_to_zero)

    @property
    def separates_positions(self) -> bool:
        return not self.options.stochastic

    def output_hessian(self, f: Tensor, targets: Observed) -> OutputHessian | None:
        return None if self.options.stochastic else targets.hessian(f.to(self.dtype))


class EFEngine(OuterEngine):
    """Empirical Fisher Σ_b w_b g_b g_bᵀ, g_b the gradient of the unit loss of b [Redux, footnote 3].

    Of outputs with positions every one that counts is an observation: Σ_bt g_bt g_btᵀ. Weights w are those of data that
    are repeated, so that they enter once, not by the square as the gradients of the weighted loss have them.
    """

    kind = "ef"
    name = "NativeEF"

    def cotangents(self, f: Tensor, targets: Observed, hessian: OutputHessian | None = None) -> Tensor:
        del hessian  # gradients of the loss alone
        return targets.gradients(f.to(self.dtype)).unsqueeze(0)

    def n_columns(self, f: Tensor) -> int:
        return 1


_ROWS = 64
"""Rows of the Hessian that are computed at once."""


class HessianEngine(NativeEngine):
    """∇² Σ_b −log p(y_b | f_b) with respect to the random entries: P products for a matrix, one for a vector.

    It is the second term of [Redux, eq. 7]. The arguments are those of `NativeEngine`.
    """

    kind = "hessian"
    name = "NativeHessian"

    def accumulate(self, x: Inputs, y: Tensor, sink: Sink) -> BatchSummary:
        if isinstance(sink, ProductSink):
            return self._add_products(x, y, sink)
        if isinstance(sink, BlockSink):
            slices = self.problem.layout.slices
            inside = [
                torch.cat([torch.arange(slices[i].start, slices[i].stop) for i in group]) for group in sink.groups
            ]
            parts = [self._rows(x, y, entries, lambda rows, _, e=entries: rows[..., e]) for entries in inside]
            sink.put([0.5 * (rows + rows.transpose(1, 2)) for _, rows in parts])
            return parts[0][0]
        if not isinstance(sink, DiagSink):
            return super().accumulate(x, y, sink)
        if sink.bases is not None:
            raise UnsupportedError(
                "the exact Hessian has no eigenvalue correction; use backend=NativeGGN, or hessian_structure='full'."
            )
        entries = torch.arange(self.problem.layout.n_params)
        summary, values = self._rows(x, y, entries, lambda rows, at: rows[:, torch.arange(len(at)), at])
        sink.put(values)
        return summary

    def _add_products(self, x: Inputs, y: Tensor, sink: ProductSink) -> BatchSummary:
        with torch.inference_mode(False), self.problem.on_private_copy() as problem:
            capture = self._differentiable(problem, x)
            with torch.enable_grad():
                f = capture.rows.to(self.dtype)
                targets = self.targets(f.detach(), y, capture.positions)
                losses = targets.loss_terms(f)
                losses = losses if self.split_outputs else losses.sum().unsqueeze(0)
            step = self.per_call(capture, sink.vectors.shape[1])
            vectors, total = sink.prepared(len(losses))
            sink.is_rounded = True
            for loss, rows, sums in zip(losses, vectors, total, strict=True):
                product = HessianProduct(problem, capture, loss)
                self._require_symmetric(product)
                products = in_slices(
                    len(rows), step, lambda part, rows=rows, product=product: product.times(rows[part]), VECTOR
                )
                for part, rows in products:
                    add_rows(self.problem, rows, sums[part])
        return self.summary(capture.rows.detach(), targets)

    def _require_symmetric(self, product: HessianProduct) -> None:
        """Compares vᵀ H w with wᵀ H v, since second derivatives of some operations of PyTorch are wrong."""
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

    def _rows(
        self, x: Inputs, y: Tensor, entries: Tensor, keep: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[BatchSummary, Tensor]:
        """Results of `keep(rows, entries)` for rows `[E, r, P]` of the Hessian, joined in their second dimension."""
        summaries: list[BatchSummary] = []
        parts: list[Tensor] = []
        for at in entries.split(_ROWS):
            units = torch.zeros(1, len(at), self.problem.layout.n_params, dtype=self.dtype, device=self.problem.device)
            units[0, torch.arange(len(at)), at] = 1
            summary, rows = self.matmul(x, y, units)
            summaries.append(summary)
            parts.append(keep(rows, at))
        return summaries[0], torch.cat(parts, 1)
