"""The native backend: one forward pass and K backward passes give every quantity, without [B, C, P]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from laplace import batch as batches
from laplace.batch import Inputs
from laplace.curvature.blocks import Block, DenseBlock, LazyBlock
from laplace.curvature.factors import OuterBlock
from laplace.curvature.interface import BatchSummary, CurvatureInterface, KronParts, detached
from laplace.curvature.jacobian import Jacobian
from laplace.curvature.native.accumulate import DiagSum, FullSum, KronSum, Origin
from laplace.curvature.native.backward import prefers_loop
from laplace.curvature.native.capture import Capture, capture
from laplace.curvature.native.fallback import Rung, per_sample
from laplace.curvature.native.pieces import block_of
from laplace.curvature.native.plan import Plan, make_plan
from laplace.errors import InvalidArgument
from laplace.lending import lent
from laplace.likelihoods.base import Likelihood, OutputHessian
from laplace.weights.problem import Problem

MEMORY_BUDGET = 2**30
"""Bytes of output gradients held at once: fixed, so that results do not depend on the machine."""

_LAZY_SHARE = 4
"""Dense fallback blocks above a quarter of the budget are computed piece by piece instead of held."""

_MAX_PLANS = 64


class _Sum(Protocol):
    """What `accumulate` adds to."""

    def add(self, blocks: Mapping[int, Block], first: int) -> None: ...

    def add_head(self, blocks: Mapping[int, OuterBlock], hessian: OutputHessian) -> None: ...


class _Pass:
    """A captured forward pass with its proven plan: what the backward passes start from."""

    def __init__(self, engine: NativeInterface, x: Inputs, taken: Capture, plan: Plan) -> None:
        self.engine = engine
        self.problem = engine.problem
        self.x = x
        self.taken = taken
        self.plan = plan
        self.f = taken.f.detach()

    @property
    def n_data(self) -> int:
        """B."""
        return self.f.shape[0]

    def bytes_per_cotangent(self) -> int:
        """Bytes of output gradients that one cotangent holds, patches of convolutions not counted."""
        return 2 * sum(use.shape.numel() for use in self.taken.uses) * self.f.element_size()

    def heads(self) -> list[int]:
        """Slots whose layer's outputs are the network's outputs, treated whole."""
        return [
            i
            for i, explanation in enumerate(self.plan)
            if len(explanation.terms) == 1
            and self.problem.slots[i].entries is None
            and self.taken.is_head(self.taken.uses[explanation.terms[0].use])
        ]

    def head_blocks(self, slots: list[int]) -> dict[int, OuterBlock]:
        """Identity blocks of heads: g is one `[C, C]` identity, whatever the batch."""
        outputs = self.f.shape[1]
        eye = torch.eye(outputs, device=self.f.device, dtype=self.engine.dtype)
        blocks = self.blocks(self.f.new_zeros(1, *self.f.shape), only=slots)
        g = eye[:, None, None, None, :]
        return {i: replace(b, g=g, identity=True) for i, b in blocks.items() if isinstance(b, OuterBlock)}

    def blocks(self, cotangents: Tensor, only: list[int]) -> dict[int, Block]:
        """Weighted blocks of the slots in `only` for cotangents `[K, B, C]`."""
        plan, taken = self.plan, self.taken
        needed = {term.use for i in only for term in plan[i].terms}
        chosen = sorted(needed)
        gradients: list[Tensor] = [self.f] * len(taken.uses)
        found = taken.gradients(cotangents, [taken.uses[n] for n in chosen])
        for n, g in zip(chosen, found, strict=True):
            gradients[n] = g
        blocks: dict[int, Block] = {}
        for i in only:
            if plan[i].terms:
                blocks[i] = block_of(self.problem, i, plan[i].terms, taken.uses, gradients, self.n_data)
            elif plan[i].rung is None:
                zero = torch.zeros((), dtype=self.engine.dtype, device=self.f.device)
                blocks[i] = DenseBlock(zero.expand(len(cotangents), self.n_data, self.problem.slots[i].size))
        return blocks | self._fallbacks(cotangents, [i for i in only if plan[i].rung is not None])

    def _fallbacks(self, cotangents: Tensor, slots: list[int]) -> dict[int, Block]:
        """Dense blocks by the fallback ladder, held together if they are small, computed in pieces if not."""
        blocks: dict[int, Block] = {}
        for rung in Rung:
            members = [i for i in slots if self.plan[i].rung is rung]
            entries = cotangents.shape[0] * self.n_data * sum(self.problem.slots[i].shape.numel() for i in members)
            if entries * self.engine.dtype.itemsize * _LAZY_SHARE <= self.engine.memory_budget:
                values = self._fallback(cotangents, members, rung, slice(None))
                blocks |= {i: DenseBlock(v) for i, v in zip(members, values, strict=True)}
            else:
                blocks |= {i: self._lazy(cotangents, i, rung) for i in members}
        return blocks

    def _lazy(self, cotangents: Tensor, slot: int, rung: Rung) -> Block:
        return LazyBlock(
            compute=lambda rows: self._fallback(cotangents, [slot], rung, rows)[0],
            size=self.problem.slots[slot].size,
            n_cotangents=cotangents.shape[0],
            span=(0, self.n_data),
            norm=cotangents.norm(),
        )

    def _fallback(self, cotangents: Tensor, slots: list[int], rung: Rung, rows: slice) -> list[Tensor]:
        if not slots:
            return []
        x = self.x if rows == slice(None) else batches.select(self.x, rows, self.n_data)
        with lent(self.problem.module), torch.inference_mode(False):
            values = per_sample(self.problem, x, cotangents[:, rows], slots, rung, create_graph=self.taken.create_graph)
        return [v.to(self.engine.dtype) for v in values]


class NativeInterface(CurvatureInterface):
    """Curvature from layer inputs and output gradients captured by hooks; a fallback where no rule holds.

    Args:
        problem: The network and its treated tensors.
        likelihood: Loss and output Hessian.
        kfac_approx: `"expand"` or `"reduce"`: how Kronecker factors treat positions that share a weight
            (Eschenhagen et al., 2023).
        memory_budget: Bytes of output gradients held at once.
        split_outputs: Keep one curvature term per output.

    Raises:
        InvalidArgument: Unknown `kfac_approx` or a memory budget that is not positive.
    """

    def __init__(
        self,
        problem: Problem,
        likelihood: Likelihood,
        *,
        kfac_approx: str = "expand",
        memory_budget: int = MEMORY_BUDGET,
        split_outputs: bool = False,
    ) -> None:
        super().__init__(problem, likelihood, split_outputs=split_outputs)
        if kfac_approx not in ("expand", "reduce"):
            raise InvalidArgument(f"kfac_approx={kfac_approx!r}; accepted are 'expand' and 'reduce'.")
        if memory_budget <= 0:
            raise InvalidArgument(f"memory_budget={memory_budget} bytes; it must be positive.")
        self.kfac_approx = kfac_approx
        self.memory_budget = memory_budget
        self.dtype = torch.promote_types(problem.dtype, torch.float32)
        self._loop = prefers_loop(problem.module)
        self._plans: dict[object, Plan] = {}

    # What the kinds of curvature differ in.

    def cotangents(self, f: Tensor, y: Tensor) -> Tensor:
        """Columns u_k, `[K, B, C]`, with curvature Σ_kb (Jᵀu)(Jᵀu)ᵀ."""
        raise InvalidArgument(f"{type(self).__name__} has no curvature; use NativeGGN or NativeEF.")

    def output_hessian(self, f: Tensor, y: Tensor) -> OutputHessian | None:
        """Output Hessian of which a head needs no root, or None where only cotangents are known."""
        return None

    # Primitives.

    def diag(self, x: Inputs, y: Tensor) -> tuple[BatchSummary, Tensor]:
        with self._forward(x) as taken:
            total = DiagSum(self.problem, self._n_terms(taken.f), self.dtype)
            self._accumulate(taken, y, total, heads=taken.heads())
            return self._summary(taken.f, y), total.result()

    def full(self, x: Inputs, y: Tensor) -> tuple[BatchSummary, Tensor]:
        with self._forward(x) as taken:
            total = FullSum(self.problem, self._n_terms(taken.f), self.dtype)
            heads = taken.heads()
            self._accumulate(taken, y, total, heads=heads if len(heads) == len(taken.plan) else [])
            return self._summary(taken.f, y), total.result()

    def kron(self, x: Inputs, y: Tensor) -> tuple[BatchSummary, KronParts]:
        with self._forward(x) as taken:
            origins = _origins(taken.plan)
            reduce = self.kfac_approx == "reduce"
            total = KronSum(self.problem, self._n_terms(taken.f), self.dtype, origins, reduce=reduce)
            self._accumulate(taken, y, total, heads=taken.heads())
            return self._summary(taken.f, y), total.result()

    def jacobian(self, x: Inputs, *, create_graph: bool = False) -> Iterator[tuple[Jacobian, Tensor]]:
        with self._forward(x, create_graph=create_graph) as taken:
            n_data, outputs = taken.f.shape
            parts = -(-taken.bytes_per_cotangent() * outputs // self.memory_budget)
            if parts <= 1 or n_data == 1:
                yield self._jacobian(taken), taken.taken.f if create_graph else taken.f
                return
        step = -(-n_data // min(parts, n_data))
        for start in range(0, n_data, step):
            part = batches.select(x, slice(start, start + step), n_data)
            with self._forward(part, create_graph=create_graph) as taken:
                yield self._jacobian(taken), taken.taken.f if create_graph else taken.f

    def coverage(self) -> dict[str, str]:
        names = [slot.name for slot in self.problem.slots]
        rules: dict[str, str] = {}
        for plan in self._plans.values():
            for name, explanation in zip(names, plan, strict=True):
                rules.setdefault(name, explanation.rule)
        return rules

    # How they come about.

    @contextmanager
    def _forward(self, x: Inputs, *, create_graph: bool = False) -> Iterator[_Pass]:
        """One captured forward pass in evaluation mode, with a plan proven for this shape of input."""
        with torch.inference_mode(False), lent(self.problem.module):
            x = x if create_graph else detached(x)
            taken = capture(self.problem, x, loop=self._loop, create_graph=create_graph)
            key = (batches.signature(x), taken.f.shape)
            if key not in self._plans:
                if len(self._plans) >= _MAX_PLANS:
                    self._plans.pop(next(iter(self._plans)))
                self._plans[key] = make_plan(self.problem, taken, x, taken.f.shape[0])
            yield _Pass(self, x, taken, self._plans[key])

    def _jacobian(self, taken: _Pass) -> Jacobian:
        outputs = taken.f.shape[1]
        heads = taken.heads()
        rest = [i for i in range(len(taken.plan)) if i not in heads]
        blocks: dict[int, Block] = dict(taken.head_blocks(heads)) if heads else {}
        if rest:
            eye = torch.eye(outputs, device=taken.f.device, dtype=taken.f.dtype)
            blocks |= taken.blocks(eye.unsqueeze(1).expand(-1, taken.n_data, -1), only=rest)
        return Jacobian(tuple(blocks[i] for i in range(len(taken.plan))))

    def _accumulate(self, taken: _Pass, y: Tensor, total: _Sum, heads: list[int]) -> None:
        hessian = self.output_hessian(taken.f, y)
        if hessian is None:
            heads = []
        elif heads:
            total.add_head(taken.head_blocks(heads), hessian)
        rest = [i for i in range(len(taken.plan)) if i not in heads]
        if not rest:
            return
        columns = self.cotangents(taken.f, y).to(taken.f.dtype)
        step = max(1, self.memory_budget // max(1, taken.bytes_per_cotangent()))
        for first in range(0, len(columns), step):
            total.add(taken.blocks(columns[first : first + step], only=rest), first)

    def _n_terms(self, f: Tensor) -> int:
        return f.shape[1] if self.split_outputs else 1

    def _summary(self, f: Tensor, y: Tensor) -> BatchSummary:
        terms = self.likelihood.loss_terms(f.to(self.dtype), y)
        return BatchSummary(terms, self.likelihood.count(f, y), f.shape[1])


def _origins(plan: Plan) -> list[Origin]:
    """Keys by which a weight and its bias share an output side: the first tensor of the same use."""
    first: dict[object, int] = {}
    origins: list[Origin] = []
    for i, explanation in enumerate(plan):
        key = tuple((term.use, term.reading) for term in explanation.terms) or i
        origins.append(Origin(str(first.setdefault(key, i)), single=len(explanation.terms) == 1))
    return origins
