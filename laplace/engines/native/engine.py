"""The native engine: forward passes with proven plans, Jacobians, and the outputs as a linear map."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.memory import DATUM, OUTPUT, POSITION, in_slices, ran_out
from laplace.core.nested import n_bytes, stored
from laplace.core.pieces import bytes_at_once
from laplace.core.positions import OutputChoice, target_rows
from laplace.engines.engine import BatchSummary, CurvatureEngine, EngineOptions, LinearMap, detached
from laplace.engines.native.autograd import prefers_loop
from laplace.engines.native.forward import Capture, ForwardPass, Plan, record, require_unsharded_problem
from laplace.engines.native.graph import Explained
from laplace.engines.native.products import DenseMap, GraphMap, HeadMap, Linearised
from laplace.engines.native.proof import Routing, check_unreached, holds, make_plan, require_explained
from laplace.engines.native.proof_cache import Plans
from laplace.engines.profile import BatchProfile
from laplace.errors import InvalidData, OutOfMemory, UnsupportedError
from laplace.jacobian.jacobian import Jacobian
from laplace.likelihoods.base import Likelihood, Observed
from laplace.network.model_guard import GRADIENTS_LATER
from laplace.weights.problem import Problem

_CACHED = 2**26
"""Bytes that vectors hold at once on a CPU, where larger passes are slower than several small ones."""

_TOGETHER = 8
"""Outputs that are computed together, at least, where those of a single datum are too many for the budget."""

_MOST_AT_ONCE = 1024
"""Largest number of vectors in one pass, whatever the memory budget."""

_COPIES = 4
"""Activations that a vector holds on its way through a pass that is differentiated twice."""


class NativeEngine(CurvatureEngine):
    """Base of all native curvature: Jacobians from layer inputs and output gradients, and proven plans.

    The arguments are those of `CurvatureEngine`.
    """

    weighs_data = True
    takes_gaps = True

    def __init__(self, problem: Problem, likelihood: Likelihood, options: EngineOptions) -> None:
        super().__init__(problem, likelihood, options)
        self.memory_budget = options.budget(problem.device)
        self.max_passes = options.max_passes
        self._loop = prefers_loop(problem.module, problem.device)
        self._observed = self._unwatchable = False
        self._plans = Plans()
        self._rules: dict[str, str] = {}
        self._unreached: set[str] = set()

    # What every kind of curvature has.

    def jacobian(
        self, x: Inputs, *, create_graph: bool = False, choice: OutputChoice | None = None
    ) -> Generator[tuple[Jacobian, Tensor]]:
        return self._jacobian(x, None, create_graph=create_graph, choice=choice)

    def _jacobian(
        self,
        x: Inputs,
        known: list[ForwardPass] | None,
        *,
        create_graph: bool = False,
        choice: OutputChoice | None = None,
    ) -> Generator[tuple[Jacobian, Tensor]]:
        """`jacobian`, with the pass of all data where it is known."""
        n_data, step, passes = self._first_pass(x, choice, known, create_graph=create_graph)
        del known

        def computed(part: slice) -> tuple[Jacobian | Callable[[slice], Jacobian], Tensor, int]:
            """A Jacobian, or for a single sample a function of its positions, how many at once; and outputs."""
            some = x if part == slice(0, n_data) else batches.select(x, part, n_data)
            batch = passes.pop() if passes else self.forward(some, create_graph=create_graph)
            if batch.n_data != part.stop - part.start:
                raise OutOfMemory(
                    f"memory ran out, and the inputs cannot be split: {part.stop - part.start} rows of their first "
                    f"tensor give the outputs of {batch.n_data} data. Give fewer data at once."
                )
            start = part.start * batch.capture.n_positions
            outputs = None if choice is None else choice.chosen(batch.f, batch.positions, start)
            f = batch.at_outputs(outputs)
            if batch.mixes and batch.n_data == 1:
                at_once = max(1, self.memory_budget // max(1, batch.bytes_per_cotangent() * f.shape[1]))
                return partial(batch.jacobian, outputs), f, at_once
            return batch.jacobian(outputs), f, 0

        for _, (jacobian, f, at_once) in in_slices(n_data, step, computed, DATUM):
            if isinstance(jacobian, Jacobian):
                yield jacobian, f
            else:
                for rows, part in in_slices(len(f), at_once, jacobian, POSITION):
                    yield part, f[rows]

    def jacobian_by_outputs(self, x: Inputs) -> Generator[tuple[Jacobian, Tensor]]:
        try:
            batch = self.forward(x)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            batch = None
        if batch is None:
            yield from self.jacobian(x)
            return
        n_data, n_outputs, passes = batch.n_data, batch.f.shape[1], [batch]
        per_output = -(-batch.bytes_per_cotangent() // n_data)  # of one datum
        if batch.mixes or batch.capture.processes is not None or per_output * n_outputs <= self.memory_budget:
            del batch
            yield from self._jacobian(x, passes)
            return
        step = max(1, min(n_data, self.memory_budget // (_TOGETHER * per_output)))
        del batch
        if step < n_data:
            passes.clear()
        for rows in (slice(start, min(start + step, n_data)) for start in range(0, n_data, step)):
            some = passes.pop() if passes else self.forward(batches.select(x, rows, n_data))

            def computed(outputs: slice, some: ForwardPass = some) -> Jacobian:
                chosen = torch.arange(outputs.start, outputs.stop, device=some.f.device)
                return replace(some.jacobian(chosen.expand(len(some.f), -1)), outputs=None)

            at_once = max(1, self.memory_budget // (per_output * some.n_data))
            for _, jacobian in in_slices(n_outputs, at_once, computed, OUTPUT):
                yield jacobian, some.at_outputs()

    def _first_pass(
        self, x: Inputs, choice: OutputChoice | None, known: list[ForwardPass] | None, *, create_graph: bool
    ) -> tuple[int, int, list[ForwardPass]]:
        """Number of samples, how many fit the memory budget at once, and the pass that serves all if they do."""
        try:
            batch = known.pop() if known else self.forward(x, create_graph=create_graph)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            count = batches.size(x, "")
            return count, count, []
        if choice is not None:
            choice.require_all(len(batch.f))
        outputs = batch.f.shape[1] if choice is None else choice.count
        if batch.mixes:
            outputs *= batch.capture.n_positions
            self.check_passes(outputs, "a linearised prediction")
            require_unsharded_problem(self.problem)  # slices of positions are of every process's own
        if batch.capture.processes is not None:
            return batch.n_data, batch.n_data, [batch]  # slices of the data, too
        parts = max(1, min(batch.n_data, -(-batch.bytes_per_cotangent() * outputs // self.memory_budget)))
        return batch.n_data, -(-batch.n_data // parts), [batch] if parts == 1 else []

    def head_jacobian(self, x: Inputs, *, create_graph: bool = False) -> list[tuple[Jacobian, Tensor]] | None:
        batch = self.forward(x, create_graph=create_graph)
        if len(batch.heads) < len(batch.plan):
            return None
        return [(batch.jacobian(), batch.at_outputs())]

    def check_passes(self, count: int, what: str) -> None:
        """Refuses work that takes too many backward passes, one per position and output."""
        if count <= self.max_passes:
            return
        remedy = "Use pred_type='nn'"
        if what == "a fit":
            drawn = "backend_kwargs={'stochastic': True} (a pass per sample), " if self.separates_positions else ""
            remedy = (
                f"Use {drawn}hessian_structure='lowrank' (products alone), or fewer data, the subsampled GGN, "
                "with a higher budget"
            )
        head = "subset_of_weights='last_layer', which takes none; or " if self.problem.head is None else ""
        raise UnsupportedError(
            f"{what} of outputs per token or pixel takes {count:,} backward passes for every batch, one per position "
            f"and output; the limit is max_passes={self.max_passes:,}. {remedy}; or {head}raise it by "
            f"backend_kwargs={{'max_passes': {count}}}."
        )

    def profile(self, x: Inputs, y: Tensor) -> BatchProfile:
        batch, _ = self.observe(x, y)
        kept: dict[int, int] = {}
        widths: list[int] = []
        with (
            torch.inference_mode(False),
            batch.problem.on_private_copy() as problem,
            _recording(problem.module, kept, widths),
        ):
            again = record(problem, batch.x, loop=batch.capture.loop, observed=batch.capture.watched)
        del again
        return replace(self._profile(batch), graph=sum(kept.values()), widest=max(widths, default=0))

    def profile_by_shapes(self, x: Inputs | None = None) -> BatchProfile:
        if x is not None:
            return self._profile(self.forward(x))
        f = torch.zeros(1, 1, dtype=self.dtype, device=self.problem.device)
        return BatchProfile.least(
            self.problem.layout, n_columns=self.n_columns(f), itemsize=self.dtype.itemsize,
            product_budget=self._product_budget, loop=self._loop, device=self.problem.device,
        )  # fmt: skip

    def _profile(self, batch: ForwardPass) -> BatchProfile:
        columns, terms = self.n_columns(batch.f), self._n_terms(batch.f)
        columns *= batch.capture.n_positions if batch.mixes and self.separates_positions else 1
        return BatchProfile(
            layout=self.problem.layout, tensors=batch.shapes(), n_data=batch.n_data if batch.mixes else len(batch.f),
            n_outputs=batch.f.shape[1], n_columns=columns, n_terms=terms, itemsize=self.dtype.itemsize,
            graph=0, widest=0, gradients=batch.bytes_per_cotangent() // 2, budget=self.memory_budget,
            product_budget=self._product_budget, loop=batch.capture.loop,
            refused=batch.mixes and columns > self.max_passes,
            inputs=sum(map(n_bytes, batches.tensors(batch.x))), device=self.problem.device,
        )  # fmt: skip

    def n_columns(self, f: Tensor) -> int:
        """Number of cotangents that the curvature of outputs f `[B, C]` takes; 0 if it is known by products alone."""
        return 0

    @property
    def separates_positions(self) -> bool:
        """True if positions of a sample need separate cotangents; independent random draws do not."""
        return True

    def coverage(self) -> dict[str, str]:
        return dict(self._rules)

    # A forward pass with a proven plan.

    def forward(self, x: Inputs, *, create_graph: bool = False) -> ForwardPass:
        """One captured forward pass in evaluation mode, with a plan proven for this form of input."""
        with torch.inference_mode(False), self.problem.on_private_copy() as problem:
            x = x if create_graph else detached(x)
            capture = self._capture(problem, x, create_graph=create_graph)
            if capture.f.shape[0] == 0:
                raise InvalidData("the batch holds no data.")
            if create_graph and capture.as_it_was is not None:
                raise UnsupportedError(GRADIENTS_LATER)
            plan, widest = self._plans.known(problem, capture, x), len(capture.f)
            if capture.processes is not None:  # all of them know theirs, or prove together
                said = capture.processes.barrier("its plan", (plan is not None, widest))
                plan, widest = plan if all(known for known, _ in said) else None, max(count for _, count in said)
            if plan is None:
                capture, plan = self._with_new_plan(problem, capture, x, create_graph=create_graph)
            if unused := [i for i, rule in enumerate(plan) if rule.description == "unused"]:
                self._check_unreached(problem, x, unused)
            return ForwardPass(problem, x, capture, plan, self.memory_budget, widest)

    def _with_new_plan(
        self, problem: Problem, capture: Capture, x: Inputs, *, create_graph: bool
    ) -> tuple[Capture, Plan]:
        """A plan by layers alone; else that of a pass that is watched, with the ladder of fallbacks."""
        plan = None
        if not self._observed and not self._unwatchable:
            plan = self._prove(problem, capture, x, ladder=False)
            if plan is None:
                capture = self._watched(problem, capture, x, create_graph=create_graph)
        if plan is None:
            plan = self._prove(problem, capture, x) or ()
        self._remember(plan, capture, x)
        return capture, plan

    def _capture(self, problem: Problem, x: Inputs, *, create_graph: bool = False) -> Capture:
        return record(problem, x, loop=self._loop, create_graph=create_graph, observed=self._observed)

    def _watched(self, problem: Problem, capture: Capture, x: Inputs, *, create_graph: bool) -> Capture:
        """Repeats the pass and records calls of PyTorch's functions, since layers do not explain every tensor.

        From then on every pass is watched, if that found a use at all.
        """
        if problem.reduction is not None or capture.as_it_was is not None:
            return capture
        require_explained(problem)
        try:
            loop = prefers_loop(problem.module, problem.device, stepwise=True)
            again = record(problem, x, loop=loop, create_graph=create_graph, observed=True)
        except (RuntimeError, ValueError, TypeError) as error:  # a network that must not be watched
            if ran_out(error):
                raise
            return capture
        if not again.watched:
            self._unwatchable = True
            return capture
        self._observed, self._loop = True, loop
        return again

    def _prove(self, problem: Problem, capture: Capture, x: Inputs, *, ladder: bool = True) -> Plan | None:
        """A plan for a captured batch. A single sample is proven as a batch of it twice, so that all sizes agree."""
        prove = partial(self._plans.proven, problem, ladder=ladder)
        if capture.processes is not None:  # they may have other numbers of data, and other proofs
            return make_plan(problem, capture, x, ladder=ladder)
        if len(capture.f) > 1:
            return prove(capture, x)
        try:
            twice = batches.select(x, torch.zeros(2, dtype=torch.int64, device=capture.f.device), 1)
            pair = self._capture(problem, twice)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # a network that takes one sample only
            if ran_out(error):
                raise
            return prove(capture, x)
        if len(pair.f) != 2 or len(pair.calls) != len(capture.calls):
            return prove(capture, x)
        plan = prove(pair, twice, repeated=True)
        if plan is not None and not holds(plan, problem, capture, Explained.HERE):
            return prove(capture, x)
        routing = Routing(capture)
        return plan and tuple(replace(rule, uses=routing.rerouted(rule.uses)) for rule in plan)

    def _remember(self, plan: Plan, capture: Capture, x: Inputs) -> None:
        for slot, rule in zip(self.problem.slots, plan, strict=True):
            if self._rules.get(slot.name, "unused") == "unused":
                self._rules[slot.name] = rule.description
        self._plans.keep(plan, capture, x)

    def _check_unreached(self, problem: Problem, x: Inputs, slots: Sequence[int]) -> None:
        """Checks every tensor that autograd does not reach once."""
        names = [problem.slots[i].name for i in slots]
        if not self._unreached.issuperset(names):
            self._unreached.update(names)
            check_unreached(problem, x, names)

    def observe(self, x: Inputs, y: Tensor) -> tuple[ForwardPass, Observed]:
        """A forward pass with a proven plan, and checked targets."""
        batch = self.forward(x)
        targets = self.targets(batch.f, y, batch.positions)
        listening = self.listening
        profile, listening.profile, outputs, listening.outputs = listening.profile, None, listening.outputs, None
        if profile is not None:
            profile(self._profile(batch))
        if outputs is not None:
            outputs(batch.capture.f)
        if listening.keeps and self.problem.head is not None:
            self._keep(batch, targets)
        return batch, targets

    def _keep(self, batch: ForwardPass, targets: Observed) -> None:
        """Keeps the features of a head without positions: the inputs of its only call."""
        calls = batch.capture.calls
        if len(calls) == 1 and batch.capture.heads and calls[0].x.ndim == batch.f.ndim == 2:
            self.seen.add(calls[0].x, batch.f, targets.y)

    def targets(self, f: Tensor, y: Tensor, positions: tuple[int, ...]) -> Observed:
        """Checked targets of outputs f `[B·T, C]`; rows have the weights of their samples, or targets their own."""
        checked = self.checked(f.to(self.dtype), target_rows(y, f, positions, self.problem.channel_dim))
        weights = self.listening.weights
        if weights is not None and weights.ndim > 1:
            weights = target_rows(weights.to(f.device), f, positions, self.problem.channel_dim)
            if weights.ndim > 1:
                weights = self._of_entries(checked, weights)
        elif weights is not None:
            if len(f) % len(weights):
                raise InvalidData(f"{len(weights)} weights of data, but {len(f)} rows of outputs.")
            weights = weights.to(f.device).repeat_interleave(len(f) // len(weights))
        return Observed(self.likelihood, checked, weights)

    def _of_entries(self, y: Tensor, weights: Tensor) -> Tensor:
        """Weights of every entry of checked targets, `[B, C]`; of one output those of the rows.

        Raises:
            InvalidData: Entries of a target have no loss of their own.
        """
        if weights.shape != y.shape or not self.likelihood.independent_outputs or not self.takes_gaps:
            raise InvalidData(
                f"the weights have shape {list(weights.shape)}, but likelihood={self.likelihood.name!r} has no loss of "
                "every entry of its targets; give a weight for every datum, [B]."
            )
        return weights.masked_fill(y.isnan(), 0.0)  # what was not observed counts never

    def _differentiable(self, problem: Problem, x: Inputs) -> Capture:
        """A captured forward pass whose gradients can be differentiated again; it needs no rules."""
        loop = prefers_loop(problem.module, problem.device, twice=True)
        capture = record(problem, detached(x), loop=loop, create_graph=True)
        if capture.f.shape[0] == 0:
            raise InvalidData("the batch holds no data.")
        if capture.f.is_leaf:
            self._check_unreached(problem, x, range(len(problem.slots)))
        for slot in problem.slots:
            self._rules.setdefault(slot.name, "products with vectors")
        return capture

    def linear(self, x: Inputs) -> Linearised:
        """The outputs of a batch as a linear function of the random entries, which outlives the call."""
        with torch.inference_mode(False), self.problem.on_private_copy() as problem:
            return Linearised(problem, self._differentiable(problem, x))

    def linear_map(self, x: Inputs, *, multiplied_out: bool = False) -> LinearMap:
        if self.problem.head is not None:
            parts = list(self.jacobian(x))
            if parts and all(jacobian.is_head for jacobian, _ in parts):
                features = torch.cat([jacobian.head_features() for jacobian, _ in parts])
                return HeadMap(features.to(self.dtype), parts[0][0].head_places())
        if multiplied_out:
            return self._multiplied_out(x)
        with torch.inference_mode(False), self.problem.on_private_copy() as problem:
            capture = self._differentiable(problem, x)
            linear, n_outputs = Linearised(problem, capture), capture.rows.shape[1]
            return GraphMap(linear, n_outputs, self.per_call(capture, _MOST_AT_ONCE))

    def _multiplied_out(self, x: Inputs) -> DenseMap:
        rows: list[Tensor] = []
        n_outputs = 1
        for jacobian, f in self.jacobian(x):
            n_outputs = f.shape[1]
            rows += [piece.flatten(0, 1).to(self.dtype) for piece in jacobian.pieces()]
        return DenseMap(torch.cat(rows), n_outputs)

    def per_call(self, capture: Capture, count: int) -> int:
        """How many of `count` vectors go through one vectorised pass within the memory budget."""
        activations = sum(call.shape.numel() for call in capture.calls) + capture.f.numel()
        gradients = sum(slot.shape.numel() for slot in self.problem.slots)  # of a loop twice: as a list, and stacked
        per_vector = (_COPIES * activations + 2 * gradients) * capture.f.element_size()
        return max(1, min(count, self._product_budget // per_vector))

    @property
    def _product_budget(self) -> int:
        return min(self.memory_budget, bytes_at_once(_CACHED, self.problem.device))

    def _n_terms(self, f: Tensor) -> int:
        return f.shape[1] if self.split_outputs else 1

    def summary(self, f: Tensor, targets: Observed) -> BatchSummary:
        """Loss and number of data of a batch with outputs f `[B, C]`."""
        losses, count = targets.loss_terms(f.to(self.dtype)), targets.count(f)
        return BatchSummary(losses, count, f.shape[1], targets.observations(f))


@contextmanager
def _recording(module: nn.Module, kept: dict[int, int], widths: list[int]) -> Iterator[None]:
    """Records the bytes that autograd keeps, besides parameters and buffers, and what every module reads and writes."""
    parameters = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}

    def pack(tensor: Tensor) -> Tensor:
        for part in stored(tensor.detach()):
            storage = part.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not any(True for _ in module.children()):
            tensors = [t for t in (*args, output) if isinstance(t, Tensor)]
            widths.append(sum(t.numel() * t.element_size() for t in tensors))

    handle = register_module_forward_hook(note)
    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
    finally:
        handle.remove()
