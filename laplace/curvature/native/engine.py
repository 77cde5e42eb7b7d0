"""The native backend: one forward pass and K backward passes give every quantity, without [B, C, P]."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from laplace import batch as batches
from laplace.batch import Inputs
from laplace.curvature.blocks import Block
from laplace.curvature.factors import OuterBlock
from laplace.curvature.interface import BatchSummary, CurvatureInterface, KronParts, detached
from laplace.curvature.jacobian import Jacobian
from laplace.curvature.native.accumulate import DiagSum, FullSum, KronSum, Origin
from laplace.curvature.native.backward import prefers_loop
from laplace.curvature.native.capture import Capture, capture
from laplace.curvature.native.passes import ForwardPass
from laplace.curvature.native.plan import Plan, make_plan, unused_still
from laplace.errors import InvalidArgument, InvalidData
from laplace.gram import mirror
from laplace.lending import lent
from laplace.likelihoods.base import Likelihood, OutputHessian
from laplace.weights.problem import Problem

MEMORY_BUDGET = 2**30
"""Bytes of output gradients held at once: fixed, so that results do not depend on the machine."""

_MAX_PLANS = 64


class _Sum(Protocol):
    """What `accumulate` adds to."""

    def add(self, blocks: Mapping[int, Block], first: int) -> None: ...

    def add_head(self, blocks: Mapping[int, OuterBlock], hessian: OutputHessian) -> None: ...


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
        self._rules: dict[str, str] = {}

    # What the kinds of curvature differ in.

    @abstractmethod
    def cotangents(self, f: Tensor, y: Tensor) -> Tensor:
        """Columns u_k, `[K, B, C]`, with curvature Σ_kb (Jᵀu)(Jᵀu)ᵀ."""

    def output_hessian(self, f: Tensor, y: Tensor) -> OutputHessian | None:
        """Output Hessian of which a head needs no root, or None where only cotangents are known."""
        return None

    # Primitives.

    def diag(self, x: Inputs, y: Tensor) -> tuple[BatchSummary, Tensor]:
        taken, y = self._observe(x, y)
        total = DiagSum(self.problem, self._n_terms(taken.f), self.dtype)
        self._accumulate(taken, y, total, heads=taken.heads())
        return self._summary(taken.f, y), total.result()

    def full(self, x: Inputs, y: Tensor, running: Tensor | None = None) -> tuple[BatchSummary, Tensor]:
        taken, y = self._observe(x, y)
        total = FullSum(self.problem, self._n_terms(taken.f), self.dtype, running)
        heads = taken.heads()
        self._accumulate(taken, y, total, heads=heads if len(heads) == len(taken.plan) else [])
        return self._summary(taken.f, y), total.result() if running is not None else mirror(total.result())

    def kron(self, x: Inputs, y: Tensor) -> tuple[BatchSummary, KronParts]:
        taken, y = self._observe(x, y)
        reduce = self.kfac_approx == "reduce"
        total = KronSum(self.problem, self._n_terms(taken.f), self.dtype, _origins(taken.plan), reduce=reduce)
        self._accumulate(taken, y, total, heads=taken.heads())
        return self._summary(taken.f, y), total.result()

    def jacobian(self, x: Inputs, *, create_graph: bool = False) -> Generator[tuple[Jacobian, Tensor]]:
        taken = self._forward(x, create_graph=create_graph)
        n_data, outputs = taken.f.shape
        parts = min(n_data, -(-taken.bytes_per_cotangent() * outputs // self.memory_budget))
        if parts <= 1:
            yield taken.jacobian(), taken.taken.f if create_graph else taken.f
            return
        del taken
        step = -(-n_data // parts)
        for start in range(0, n_data, step):
            part = batches.select(x, slice(start, start + step), n_data)
            taken = self._forward(part, create_graph=create_graph)
            yield taken.jacobian(), taken.taken.f if create_graph else taken.f

    def coverage(self) -> dict[str, str]:
        return dict(self._rules)

    # How they come about.

    def _forward(self, x: Inputs, *, create_graph: bool = False) -> ForwardPass:
        """One captured forward pass in evaluation mode, with a plan proven for this form of input.

        Raises:
            InvalidData: A batch of no data.
        """
        with torch.inference_mode(False), lent(self.problem.module):
            x = x if create_graph else detached(x)
            taken = capture(self.problem, x, loop=self._loop, create_graph=create_graph)
            n_data = taken.f.shape[0]
            if n_data == 0:
                raise InvalidData("the batch holds no data.")
            calls = tuple((id(use.module), use.x.shape) for use in taken.uses)
            key = (batches.signature(x), taken.f.shape, calls)
            plan = self._plans.get(key)
            if plan is None or not unused_still(plan, self.problem, taken):
                plan = self._prove(taken, x, n_data)
                self._remember(key, plan)
            return ForwardPass(self.problem, x, taken, plan, self.memory_budget)

    def _prove(self, taken: Capture, x: Inputs, n_data: int) -> Plan:
        """A plan for a captured batch; for one datum that of the datum twice, so that batches of any size agree."""
        if n_data > 1:
            return make_plan(self.problem, taken, x, n_data)
        try:
            twice = batches.select(x, torch.zeros(2, dtype=torch.int64, device=taken.f.device), 1)
            pair = capture(self.problem, twice, loop=self._loop)
        except (RuntimeError, ValueError, TypeError, IndexError):  # a network that takes one datum only
            return make_plan(self.problem, taken, x, n_data)
        if len(pair.f) != 2 or len(pair.uses) != len(taken.uses):
            return make_plan(self.problem, taken, x, n_data)
        return make_plan(self.problem, pair, twice, 2, repeated=True)

    def _remember(self, key: object, plan: Plan) -> None:
        for slot, explanation in zip(self.problem.slots, plan, strict=True):
            if self._rules.get(slot.name, "unused") == "unused":
                self._rules[slot.name] = explanation.rule
        if all(explanation.proven for explanation in plan):
            if len(self._plans) >= _MAX_PLANS:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = plan

    def _observe(self, x: Inputs, y: Tensor) -> tuple[ForwardPass, Tensor]:
        """A forward pass with its checked targets."""
        taken = self._forward(x)
        return taken, self.likelihood.check_targets(taken.f.to(self.dtype), y)

    def _accumulate(self, taken: ForwardPass, y: Tensor, total: _Sum, heads: list[int]) -> None:
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
        origins.append(
            Origin(
                str(first.setdefault(key, i)), single=len(explanation.terms) == 1, unused=explanation.rule == "unused"
            )
        )
    return origins
