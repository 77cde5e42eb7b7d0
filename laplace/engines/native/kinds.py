"""The cotangents of a batch, few at a time: roots of output Hessians, and columns of single positions.

Curvatures that are sums of outer products, Σ (Jᵀu)(Jᵀu)ᵀ: one forward pass and K backward passes per batch.

The cotangents u decide which: a root of the output Hessian gives the GGN, gradients at sampled targets its Monte-Carlo
estimate, gradients of the loss the empirical Fisher.


The generalised Gauss–Newton matrix, exact or sampled.

The empirical Fisher, a sum of outer products of gradients.

The exact Hessian of the negative log likelihood, by differentiating twice; it may be indefinite.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.memory import COTANGENT, VECTOR, in_slices
from laplace.core.positions import rows_that_count
from laplace.core.random_numbers import standard_normal
from laplace.engines.engine import Bases, BatchSummary, EngineOptions, Groups, OutputCurvature, detached
from laplace.engines.kron_parts import KronParts, KronSketch, Probe
from laplace.engines.native.engine import NativeEngine
from laplace.engines.native.forward import ForwardPass, Plan
from laplace.engines.native.products import HessianProduct, Linearised, add_rows
from laplace.engines.native.proof import TOLERANCE, first_of_use
from laplace.engines.native.sinks import BlockSum, DiagSum, FullSum, KronSum, Origin, ProductSum
from laplace.errors import CurvatureError, UnsupportedError
from laplace.jacobian.blocks import Block
from laplace.jacobian.heads import Head, as_head
from laplace.jacobian.matrix_sum import MatrixSum
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.observed import Observed
from laplace.likelihoods.output_hessian import OutputHessian, columns_of
from laplace.network.model_guard import preserve_model
from laplace.weights.problem import Problem


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


class _Sum(Protocol):
    """A sum that `_accumulate` adds to; a diagonal takes heads in any basis, the others in that of the outputs."""

    def add(self, blocks: Mapping[int, Block], first: int) -> None: ...

    def add_head(self, blocks: Mapping[int, Head], hessian: OutputHessian) -> None: ...


class OuterEngine(NativeEngine):
    """Curvature Σ_kb (J_bᵀ u_kb)(J_bᵀ u_kb)ᵀ, without `[B, C, P]`.

    The arguments are those of `NativeEngine`.
    """

    _by_graph = False  # for products with vectors, as a first batch has decided

    @abstractmethod
    def cotangents(self, f: Tensor, targets: Observed, hessian: OutputHessian | None = None) -> Columns:
        """Columns u_k, `[K, B, C]`, with curvature Σ_kb (Jᵀu)(Jᵀu)ᵀ.

        Args:
            f: Outputs `[B, C]`.
            targets: Checked targets.
            hessian: Λ of these outputs, where it is known already.
        """

    def output_hessian(self, f: Tensor, targets: Observed) -> OutputHessian | None:
        """Output Hessian of which a head needs no root, or None where only cotangents are known."""
        return None

    # Primitives.

    def diag(self, x: Inputs, y: Tensor, bases: Bases | None = None) -> tuple[BatchSummary, Tensor]:
        batch, targets = self.observe(x, y)
        total = DiagSum(self.problem, self._n_terms(batch.f), self.dtype, bases)
        return self._add_diag(batch, targets, total), total.values

    def add_diag(self, x: Inputs, y: Tensor, running: Tensor, bases: Bases | None = None) -> BatchSummary:
        batch, targets = self.observe(x, y)
        return self._add_diag(batch, targets, DiagSum(self.problem, len(running), self.dtype, bases, running))

    def _add_diag(self, batch: ForwardPass, targets: Observed, total: DiagSum) -> BatchSummary:
        heads = batch.head_blocks(batch.heads())
        in_basis = {i: as_head(total.in_basis(i, block)) for i, block in heads.items()}
        self._accumulate(batch, targets, total, heads={i: head for i, head in in_basis.items() if head is not None})
        return self.summary(batch.f, targets)

    def full(self, x: Inputs, y: Tensor) -> tuple[BatchSummary, Tensor]:
        total = MatrixSum(self.problem.layout.n_params)
        return self.add_full(x, y, total), total.complete().to(self.dtype)

    def add_full(self, x: Inputs, y: Tensor, running: MatrixSum) -> BatchSummary:
        batch, targets = self.observe(x, y)
        slots = range(len(batch.plan))
        total = FullSum(slots, self.problem, self._n_terms(batch.f), running)
        heads = batch.head_blocks(batch.heads())
        self._accumulate(batch, targets, total, heads=heads if len(heads) == len(slots) else {}, groups=(tuple(slots),))
        return self.summary(batch.f, targets)

    def blocks(self, x: Inputs, y: Tensor, groups: Groups) -> tuple[BatchSummary, tuple[Tensor, ...]]:
        sizes = self.problem.layout.sizes
        sums = [MatrixSum(sum(sizes[i] for i in group)) for group in groups]
        return self.add_blocks(x, y, groups, sums), tuple(total.complete().to(self.dtype) for total in sums)

    def add_blocks(self, x: Inputs, y: Tensor, groups: Groups, running: Sequence[MatrixSum]) -> BatchSummary:
        batch, targets = self.observe(x, y)
        total = BlockSum(groups, self.problem, self._n_terms(batch.f), running)
        heads = set(batch.heads())
        whole = [i for group in groups if heads.issuperset(group) for i in group]
        self._accumulate(batch, targets, total, heads=batch.head_blocks(whole), groups=groups)
        return self.summary(batch.f, targets)

    def kron(self, x: Inputs, y: Tensor) -> tuple[BatchSummary, KronParts]:
        batch, targets = self.observe(x, y)
        total = self._kron_sum(batch, targets, None)
        self._accumulate(batch, targets, total, heads=batch.head_blocks(batch.heads()))
        return self.summary(batch.f, targets), total.result()

    def sketch(self, x: Inputs, y: Tensor, probe: Probe, *, diagonal: bool) -> tuple[BatchSummary, KronSketch]:
        batch, targets = self.observe(x, y)
        sides, exact = self._kron_sum(batch, targets, probe), DiagSum(self.problem, self._n_terms(batch.f), self.dtype)
        total = _Both(sides, exact) if diagonal else sides
        self._accumulate(batch, targets, total, heads=batch.head_blocks(batch.heads()))
        return self.summary(batch.f, targets), KronSketch(sides.result(), exact.values if diagonal else None)

    def _kron_sum(self, batch: ForwardPass, targets: Observed, probe: Probe | None) -> KronSum:
        reduce, terms = self.options.kfac_approx == "reduce", self._n_terms(batch.f)
        origins = _origins(batch.plan, self._input_weights(batch, targets))
        return KronSum(self.problem, terms, self.dtype, origins, reduce=reduce, probe=probe)

    def _input_weights(self, batch: ForwardPass, targets: Observed) -> list[Tensor | None]:
        """Weights of the data among the inputs of each tensor's layer; None for ones.

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

    def matmul(
        self, x: Inputs, y: Tensor, vectors: Tensor, running: Tensor | None = None
    ) -> tuple[BatchSummary, Tensor]:
        batch = self._explained(x, vectors.shape[1])
        if batch is None:
            return self._times_by_graph(x, y, vectors, running)
        targets = self.targets(batch.f, y, batch.positions)
        total = torch.zeros_like(vectors) if running is None else running
        vectors, mixed = vectors[0].to(batch.dtype), batch.dtype != self.dtype
        product = ProductSum(self.problem.layout, vectors, total[0], mixed=mixed)
        slots, heads = tuple(range(len(batch.plan))), batch.head_blocks(batch.heads())
        self._accumulate(batch, targets, product, heads=heads if len(heads) == len(slots) else {}, groups=(slots,))
        return self.summary(batch.f, targets), total

    def _explained(self, x: Inputs, count: int) -> ForwardPass | None:
        """A forward pass, if rules of layers explain all tensors and products with vectors are less work by factors."""
        if self._by_graph or self.split_outputs or self.problem.processes is not None:
            return None
        with torch.inference_mode(False), preserve_model(self.problem.module):
            capture = self._capture(detached(x))
            plan = None
            if len(capture.f):
                with suppress(CurvatureError):
                    plan = self._known(capture, x) or self._prove(capture, x, ladder=False)
            if plan is not None and all(rule.proven for rule in plan):
                batch = ForwardPass(self.problem, x, capture, plan, self.memory_budget)
                if self._outline(batch).multiplies_by_factors(count):
                    self._remember(self._form(capture, x), plan)
                    return batch
        self._by_graph = True
        return None

    def _times_by_graph(
        self, x: Inputs, y: Tensor, vectors: Tensor, running: Tensor | None
    ) -> tuple[BatchSummary, Tensor]:
        """Products with vectors by a graph that is differentiated in both directions, whatever the layers are."""
        with torch.inference_mode(False), preserve_model(self.problem.module):
            capture = self._differentiable(x)
            f = capture.rows.detach()
            targets = self.targets(f, y, capture.positions)
            linear, inner = Linearised(self.problem, capture), _Inner.of(self, f, targets)
            step = self.per_call(capture, vectors.shape[1])
            vectors = vectors.expand(self._n_terms(f), -1, -1)
            total = torch.zeros_like(vectors, memory_format=torch.contiguous_format) if running is None else running
            for term, rows, sums in zip(inner.terms(len(vectors)), vectors, total, strict=True):

                def product(part: slice, rows: Tensor = rows, term: int | None = term) -> list[Tensor | None]:
                    pushed = linear.push(rows[part])
                    weighted = inner.times(pushed.reshape(len(pushed), *f.shape), term)
                    return linear.pull(weighted.view_as(pushed))

                for part, pulled in in_slices(len(rows), step, product, VECTOR):
                    add_rows(self.problem, pulled, sums[part])
        return self.summary(f, targets), total

    def output_curvature(self, x: Inputs, y: Tensor) -> tuple[BatchSummary, OutputCurvature]:
        batch, targets = self.observe(x, y)
        hessian = self.output_hessian(batch.f, targets)
        if hessian is None:
            columns = self.cotangents(batch.f, targets)[:]
            dense = torch.einsum("kbc,kbd->bcd", columns, columns)
            hessian = OutputHessian(dense.diagonal(dim1=1, dim2=2), dense=dense)
        n_positions = batch.capture.n_positions if batch.positions else 1
        return self.summary(batch.f, targets), OutputCurvature(hessian, n_positions)

    def _accumulate(
        self, batch: ForwardPass, targets: Observed, total: _Sum, heads: Mapping[int, Head], groups: Groups = ()
    ) -> None:
        """Adds the curvature of a batch: of heads without a root of Λ, of the rest by chunks of cotangents.

        Of outputs with positions, rows are the data of tensors that allow it (`JacobianRule.by_row`), and ignored ones
        are left out; other tensors get cotangents of their own for every position.

        Args:
            batch: The batch.
            targets: Checked targets.
            total: What to add to.
            heads: Blocks of heads.
            groups: Tensors that `total` needs in one form.
        """
        counted = self._counted(batch, targets)
        f = batch.f if counted is None else batch.f[counted]
        hessian = self.output_hessian(f, targets.at(counted))
        if hessian is None:
            heads = {}
        elif heads:
            total.add_head(heads if counted is None else {i: head.at(counted) for i, head in heads.items()}, hessian)
        rest = [i for i in range(len(batch.plan)) if i not in heads]
        if not rest:
            return
        columns = self.cotangents(batch.f, targets, hessian if counted is None else None)
        step = batch.columns_at_once(together=bool(groups))
        mixed = {i for i in rest if not batch.by_row(i)}
        mixed |= {i for group in groups if mixed & set(group) for i in group}
        if mixed and len(columns) > self.max_passes:  # refused before any of them are made
            self.check_passes(len(columns) * (batch.capture.n_positions if self.apart else 1), "a fit")
        if simple := [i for i in rest if i not in mixed]:

            def computed(part: slice) -> dict[int, Block]:
                return batch.row_blocks(columns[part].to(batch.f.dtype), only=simple)

            for part, blocks in in_slices(len(columns), step, computed, COTANGENT):
                total.add(
                    blocks if counted is None else {i: block.at(counted) for i, block in blocks.items()}, part.start
                )
        if mixed:
            self._accumulate_mixed(batch, columns, step, [i for i in rest if i in mixed], total)

    def _counted(self, batch: ForwardPass, targets: Observed) -> Tensor | None:
        """Rows that are not ignored, `[n]`; None for all."""
        return rows_that_count(targets.y, batch.positions, self.likelihood.ignore_index)

    def _accumulate_mixed(self, batch: ForwardPass, columns: Columns, step: int, only: list[int], total: _Sum) -> None:
        """Adds the curvature of tensors that take cotangents of their own for every position."""
        apart = RowColumns(columns[:].to(batch.f.dtype), batch.n_data, apart=self.apart)
        self.check_passes(len(apart), "a fit")
        for part, blocks in in_slices(len(apart), step, lambda part: batch.blocks(apart[part], only), COTANGENT):
            total.add(blocks, part.start)


class _Both:
    """Two sums of the same blocks: one backward pass for both."""

    def __init__(self, first: KronSum, second: DiagSum) -> None:
        self.sums = first, second

    def add(self, blocks: Mapping[int, Block], first: int) -> None:
        for part in self.sums:
            part.add(blocks, first)

    def add_head(self, blocks: Mapping[int, Head], hessian: OutputHessian) -> None:
        for part in self.sums:
            part.add_head(blocks, hessian)


class _Inner:
    """The matrix M_b = Σ_k u_kb u_kbᵀ between J and Jᵀ, applied without being built.

    Args:
        hessian: M itself, where it is known.
        columns: u, `[K, B, C]`, where it is not.
    """

    def __init__(self, hessian: OutputHessian | None, columns: Tensor | None) -> None:
        self.hessian = hessian
        self.columns = columns

    @classmethod
    def of(cls, engine: OuterEngine, f: Tensor, targets: Observed) -> _Inner:
        """That of an engine on a batch."""
        hessian = engine.output_hessian(f, targets)
        return cls(hessian, None if hessian is not None else engine.cotangents(f, targets)[:])

    def terms(self, count: int) -> list[int | None]:
        """The output of every term, or None where one term holds all."""
        return [None] if count == 1 else list(range(count))

    def times(self, vectors: Tensor, term: int | None) -> Tensor:
        """M v of `[R, B, C]`, only the part of one output where terms are kept apart."""
        if self.hessian is not None:
            product = self.hessian.times(vectors.to(self.hessian.diag))
            if term is None:
                return product
            only = torch.zeros_like(product)
            only[..., term] = product[..., term]
            return only
        columns = self.columns if self.columns is not None else vectors.new_zeros(0, *vectors.shape[1:])
        weights = torch.einsum("kbc,rbc->rkb", columns, vectors.to(columns))
        return torch.einsum("kbc,rkb->rbc", columns, weights)


def _origins(plan: Plan, weights: Sequence[Tensor | None]) -> list[Origin]:
    """The use that the block of every tensor comes from, and the weights of the data there."""
    return [
        Origin(str(first), single=len(rule.uses) == 1 or rule.routed, unused=rule.description == "unused", weights=own)
        for first, rule, own in zip(first_of_use(plan), plan, weights, strict=True)
    ]


class GGNEngine(OuterEngine):
    """Generalised Gauss–Newton matrix Σ_b J_bᵀ Λ_b J_b (= Fisher for exponential families), exact or sampled.

    Args:
        problem: The network and its random parameters.
        likelihood: Loss and output Hessian.
        options: Sampling, Kronecker factors, and how much is computed at once.
    """

    kind = "ggn"
    name = "NativeGGN"

    def __init__(self, problem: Problem, likelihood: Likelihood, options: EngineOptions) -> None:
        super().__init__(problem, likelihood, options)
        self.generator = options.generator or torch.Generator(device=problem.device).manual_seed(torch.initial_seed())

    def cotangents(self, f: Tensor, targets: Observed, hessian: OutputHessian | None = None) -> Columns:
        if self.options.stochastic:
            draws = targets.sample_gradients(f.to(self.dtype), self.options.num_samples, self.generator)
            return draws / self.options.num_samples**0.5
        return RootColumns.of(targets.hessian(f.to(self.dtype)) if hessian is None else hessian)

    def n_columns(self, f: Tensor) -> int:
        if self.options.stochastic:
            return self.options.num_samples
        return columns_of(f.shape[1], sums_to_zero=self.likelihood.sums_to_zero)

    @property
    def apart(self) -> bool:
        return not self.options.stochastic

    def output_hessian(self, f: Tensor, targets: Observed) -> OutputHessian | None:
        return None if self.options.stochastic else targets.hessian(f.to(self.dtype))


class EFEngine(OuterEngine):
    """Empirical Fisher Σ_b w_b g_b g_bᵀ, g_b the gradient of the unit negative log likelihood of datum b.

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
