"""The proof of every parameter's rule: a candidate among the uses that were recorded must pass a probe.

A module's type promises nothing: the hook of a module called through its weight never fires, a parametrised weight is
recomputed, and the data may lie in another dimension than the first. So a candidate must reproduce one number that
autograd knows for certain, with random r `[B]` and u `[B, C]`,

    Σ_b r_b J_bᵀ u_b  =  autograd.grad(f, parameter, r u),

where the left side contracts the per-sample blocks for the *unweighted* cotangents u with r afterwards. A parameter
whose uses fail for every batch axis goes down the ladder of fallbacks, probed in the same way. `Routing` finds the
samples of rows without a batch dimension (routed to experts, or packed). Parameters without a gradient are unused, or
used in a way that autograd cannot see, of which `check_unreached` warns.

The probe takes some backward passes, and is asked of the first batch of a form alone, where no earlier proof serves
(`proof_cache`). In every pass autograd's graph is asked whether the calls of a rule still hold all that reads its
parameter (`holds`, by `graph`): a number that was zero in the probe may hide another use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.cached import cached_property
from laplace.core.checks import is_true, where_not_finite
from laplace.core.memory import ran_out
from laplace.engines.native.autograd import differentiable, pull
from laplace.engines.native.forward import (
    Capture,
    Fallback,
    JacobianRule,
    Owner,
    Plan,
    UseOfParameter,
    block_of,
    owners,
    per_sample,
)
from laplace.engines.native.functions import FunctionCall, LayerCall, SpreadCall
from laplace.engines.native.graph import Explained
from laplace.engines.native.rules import BatchAxis, RoutedRows, rule_for
from laplace.errors import ApproximationWarning, CurvatureError, InvalidData, warn
from laplace.jacobian.blocks import Block
from laplace.jacobian.heads import gradients_are
from laplace.network.fsdp import require_unsharded
from laplace.network.model_guard import same_random_state
from laplace.weights.problem import Problem

# The probe: the numbers that a rule must reproduce, and how closely.


TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Relative error that rounding may leave in a product of a derivative with random vectors."""

_SCALINGS = (0.61, 0.83, 1.37)
"""Factors of a cotangent, each of which rounds every product in a backward pass differently."""

_PERTURBATIONS = 6
"""Number of forward passes at weights and inputs that differ in their last digits."""

_LOST = 0.25
"""A derivative that changes by more than this share between these passes is nothing but rounding."""

_NOISE = 8.0
"""Largest accepted error, in multiples of the observed rounding."""

Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class Probe:
    """Random numbers r and u, and what autograd gives for them."""

    r: Tensor  # Weights of the data, `[B]`
    unweighted: Tensor  # u, a multiple of v for every sample, `[1, B, M]`
    truths: Gradients  # autograd.grad(f, tensor, r u) per slot, or None where f does not depend on the tensor
    gradients: tuple[Tensor, ...]  # Output gradients of every captured use for the unweighted cotangents
    # The least exact dtype among them and the outputs: that of the weights, or a lower one where the network
    # enters `torch.autocast` by itself
    coarsest: torch.dtype
    again: Callable[[float], Gradients]  # The truths for a multiple of r u
    # The truths at weights and inputs with other last digits, by a seed; None if they cannot be computed
    perturbed: Callable[[int], Gradients] | None

    @cached_property
    def noise(self) -> tuple[Tensor, ...]:
        """Norm of the rounding error in every truth: how much c⁻¹ autograd.grad(f, tensor, c r u) changes with c.

        Where a derivative is zero for a reason, as that of a softmax in the bias of its keys or of a norm over two
        channels in what it normalises, nothing but rounding is left of it, which no bound of the sum shows.
        """
        return self._largest_change((self.again(factor), factor) for factor in _SCALINGS)

    @cached_property
    def lost(self) -> tuple[Tensor, ...]:
        """Norm of every truth that consists of rounding in the forward pass alone; 0 for all others.

        A norm over one number gives 0, but for rounding that follows the last digits of what it is given. The
        derivative in its weight is that rounding; it is another one in every pass over other data.
        """
        if self.perturbed is None:
            return (torch.zeros(()),) * len(self.truths)
        changes = self._largest_change((self.perturbed(seed), 1.0) for seed in range(_PERTURBATIONS))
        return tuple(
            change if truth is not None and change >= _LOST * truth.to_dense().to(change).norm() else 0 * change
            for truth, change in zip(self.truths, changes, strict=True)
        )

    def _largest_change(self, others: Iterable[tuple[Gradients, float]]) -> tuple[Tensor, ...]:
        """Norm of the largest difference between every truth and its rescaled recomputations."""
        largest = [torch.zeros(())] * len(self.truths)
        for gradients, factor in others:
            for i, (truth, scaled) in enumerate(zip(self.truths, gradients, strict=True)):
                if truth is not None and scaled is not None:
                    dtype = torch.promote_types(truth.dtype, torch.float32)
                    difference = scaled.to_dense().to(dtype) / factor - truth.to_dense().to(dtype)
                    largest[i] = torch.maximum(largest[i].to(difference), difference.norm())
        return tuple(largest)

    def agree(self, slot: int, actual: Tensor, expected: Tensor, bound: Tensor, scale: float = 1.0) -> bool:
        """True if two vectors agree to the accuracy of the model's dtype, or to what rounding leaves in the truth."""
        if close(actual, expected, bound, self.coarsest):
            return True
        error = (actual - expected.to(actual)).norm()
        if error <= _NOISE * scale * self.noise[slot].to(error):
            return True
        return bool(error <= _NOISE * scale * self.lost[slot].to(error))


def close(actual: Tensor, expected: Tensor, bound: Tensor, coarsest: torch.dtype | None = None) -> bool:
    """True if two vectors agree to the accuracy of the model's dtype."""
    return bool(_is_close(actual, expected, bound, coarsest))


def _is_close(actual: Tensor, expected: Tensor, bound: Tensor, coarsest: torch.dtype | None) -> Tensor:
    """The same as a tensor, 0-dim, that is still to be read."""
    tolerance = max(TOLERANCE[expected.dtype], TOLERANCE.get(coarsest or expected.dtype, 0.0))
    error = (actual - expected.to(actual)).norm()
    return error <= tolerance * (expected.norm().to(error) + 1e-2 * bound.to(error))


def probe(problem: Problem, capture: Capture, x: Inputs) -> Probe:
    """The probe of a captured batch x of B data."""
    f, n_data, generator = capture.f, len(capture.f), torch.Generator().manual_seed(0)
    r = torch.randn(n_data, generator=generator).to(f) if n_data > 1 else torch.ones(1).to(f)
    v = torch.randn(f.shape[1], generator=generator).to(f)
    # A bias has the same Jacobian at every sample: cotangents that differ in size tell its rows apart all the same.
    unweighted = (1 + torch.rand(n_data, 1, generator=generator).to(f)) * v
    weighted, names = r[:, None] * unweighted, [slot.name for slot in problem.slots]
    stand_ins = [capture.stand_ins[name] for name in names]

    def again(factor: float) -> Gradients:
        with capture.backward(1, len(stand_ins)):
            gradients = pull(f, stand_ins, factor * weighted.unsqueeze(0), loop=True)
        return tuple(None if gradient is None else gradient[0] for gradient in gradients)

    def perturbed(seed: int) -> Gradients:
        digits = torch.Generator().manual_seed(seed)
        tensors = {name: _perturbed(tensor, digits) for name, tensor in problem.detached().items()}
        wanted = [tensors[name].requires_grad_() for name in names]
        of_head = problem.head is not None
        with (
            torch.enable_grad(),
            differentiable(problem.module, twice=False, of_head=of_head),
            problem.holding(tensors),
        ):
            outputs = problem.outputs(batches.transform(x, lambda leaf: _perturbed(leaf, digits))).flatten(1)
            gradients = pull(outputs, wanted, weighted.unsqueeze(0), loop=True)
        return tuple(None if gradient is None else gradient[0] for gradient in gradients)

    truths = again(1.0)
    known = [f, *(truth.to_dense() for truth in truths if truth is not None)]
    if not bool(torch.stack([tensor.isfinite().all().to(f.device) for tensor in known]).all()):
        raise InvalidData(
            f"the network's outputs or their derivatives are NaN or infinite{where_not_finite(f)}; look at the inputs "
            "and at the network's weights."
        )
    cotangents = unweighted.unsqueeze(0)
    pulled = capture.gradients(cotangents, range(len(capture.calls)))
    gradients = tuple(pulled[n].detach() for n in range(len(capture.calls)))
    coarsest = max({tensor.dtype for tensor in (f, *gradients)}, key=lambda dtype: TOLERANCE.get(dtype, 0.0))
    made = Probe(r, cotangents, truths, gradients, coarsest, again, perturbed if capture.processes is None else None)
    # Computed now: rounding decides whether it is needed, and processes must run the same passes.
    if capture.processes is not None:
        _ = made.noise
    return made


def _perturbed(tensor: Tensor, digits: torch.Generator) -> Tensor:
    """The tensor with a few units of rounding added; integers and sparse tensors are unchanged."""
    if not tensor.is_floating_point() or tensor.layout is not torch.strided:
        return tensor
    steps = torch.randint(-3, 4, tensor.shape, generator=digits, dtype=torch.int8).to(tensor)
    return torch.addcmul(tensor.detach(), tensor.detach(), steps, value=torch.finfo(tensor.dtype).eps)


# The plan: for every parameter the first of its candidates that passes the probe.


def make_plan(
    problem: Problem, capture: Capture, x: Inputs, *, repeated: bool = False, ladder: bool = True
) -> Plan | None:
    """Finds and proves a rule for every random parameter on one captured batch.

    `repeated` data are one input twice, a stand-in for a batch of one: every dimension of it could carry the data, and
    which one is meant makes no difference. Without the ladder of fallbacks the result is None where a tensor needs it.
    """
    trial = Trial(problem, capture, probe(problem, capture, x))
    all_owners, routing = owners(problem), Routing(capture)
    moving, moves_rows = moving_nodes(capture), moves(capture)
    least = Explained.HERE if ladder or problem.processes is not None else Explained.ALWAYS

    def levels(slot: int) -> Iterator[tuple[Explained, list[JacobianRule]]]:
        own = [owner for owner in all_owners if owner.slot == slot]
        families = [roles for roles in _families(capture, own, problem.slots[slot].name) if roles]
        return _by_certainty(problem, slot, families, capture, routing, least)

    used = [i for i, truth in enumerate(trial.probe.truths) if truth is not None]
    # The likeliest candidates of all tensors are compared before any answer is read: that waits for the device.
    near, matters = trial.compared({i: next(levels(i), (Explained.NOT, []))[1] for i in used})
    plan: list[JacobianRule] = []
    for i in range(len(trial.probe.truths)):
        if i not in near:
            plan.append(JacobianRule())
            continue
        for level, (certainty, candidates) in enumerate(levels(i)):
            passed = near[i] if level == 0 and near[i] else trial.passed(i, candidates)
            if passed:
                unique = (repeated or len(passed) == 1) and matters[i]
                lasting = unique and not moves_rows and sees_batch(passed[0], capture)
                proven = lasting and certainty is Explained.ALWAYS
                plan.append(replace(passed[0], proven=proven, indexed=bool(moving)))
                break
        else:
            if not ladder:
                return None
            plan.append(_prove_fallback(trial, i, x))
    return _with_rows(trial, tuple(plan))


@dataclass(frozen=True, eq=False)
class Trial:
    """What candidates for the tensors of a problem are tried on: a captured batch, with autograd's numbers."""

    problem: Problem
    capture: Capture
    probe: Probe

    def expected(self, slot: int) -> Tensor:
        """Autograd's number of a tensor that is used: the random entries of its derivative, `[p]`."""
        truth = self.probe.truths[slot]
        if truth is None:
            raise CurvatureError(f"the outputs do not depend on {self.problem.slots[slot].name!r}.")
        return self.problem.slots[slot].take(truth.to_dense())

    def passed(self, slot: int, candidates: Sequence[JacobianRule]) -> list[JacobianRule]:
        """The candidates whose factors reproduce autograd's number.

        If one does so closely, rounding is small, and no other is asked whether rounding is all that it misses.
        """
        expected = self.expected(slot)
        numbers = self._numbers(slot, candidates, expected)
        if not numbers:
            return []
        are_near = torch.stack([self._is_near(number, expected) for number in numbers])
        near = [number.rule for number, is_near in zip(numbers, are_near.tolist(), strict=True) if is_near]
        return near or [n.rule for n in numbers if self.probe.agree(slot, n.actual, expected, n.bound)]

    def compared(
        self, candidates: Mapping[int, Sequence[JacobianRule]]
    ) -> tuple[dict[int, list[JacobianRule]], dict[int, bool]]:
        """For some tensors the candidates that are close to autograd's number, and whether that is not zero."""
        rules: dict[int, list[JacobianRule]] = {}
        answers: list[Tensor] = []
        for slot, some in candidates.items():
            expected = self.expected(slot)
            numbers = self._numbers(slot, some, expected)
            rules[slot] = [number.rule for number in numbers]
            answers += [self._is_near(number, expected) for number in numbers]
            answers.append(expected.any())
        read = iter(torch.stack([answer.to(self.capture.f.device) for answer in answers]).tolist() if answers else [])
        near: dict[int, list[JacobianRule]] = {}
        matters: dict[int, bool] = {}
        for slot, some in rules.items():
            near[slot] = [rule for rule in some if next(read)]
            matters[slot] = next(read)
        return near, matters

    def _numbers(self, slot: int, candidates: Sequence[JacobianRule], expected: Tensor) -> list[_Number]:
        r, numbers = self.probe.r, list[_Number]()
        for rule in candidates:
            try:
                block = block_of(self.problem, slot, rule.uses, self.capture, self.probe.gradients)
                actual = block.pull(r.unsqueeze(0).to(block_dtype(expected.dtype)))
            except (RuntimeError, IndexError, TypeError) as error:  # shapes that the data cannot have on this axis
                if ran_out(error):
                    raise  # an axis that is refused for want of memory would be another curvature
                continue
            numbers.append(_Number(rule, actual, block.bound() * r.abs().max()))
        return numbers

    def _is_near(self, number: _Number, expected: Tensor) -> Tensor:
        return _is_close(number.actual, expected, number.bound, self.probe.coarsest)


class _Number(NamedTuple):
    rule: JacobianRule
    actual: Tensor  # The number that its factors give, `[p]`
    bound: Tensor  # How large its terms are, 0-dim


def explains(problem: Problem, slot: int, rule: JacobianRule, capture: Capture) -> Explained:
    """How much of a tensor's derivative a rule explains; a fallback explains all."""
    if rule.fallback is not None:
        return Explained.ALWAYS
    tensor = capture.stand_ins[problem.slots[slot].name]
    if not rule.uses:
        return Explained.NOT if capture.graph.reaches(tensor) else Explained.ALWAYS
    return capture.graph.explained(tensor, [capture.calls[use.call] for use in rule.uses])


def holds(plan: Plan, problem: Problem, capture: Capture, least: Explained = Explained.ALWAYS) -> bool:
    """True if the rules of a plan explain their tensors in another pass with the same recorded calls as well."""
    if any(explains(problem, i, rule, capture) < least for i, rule in enumerate(plan)):
        return False
    if least is not Explained.ALWAYS:
        return True
    if any(rule.indexed for rule in plan) and moves(capture):
        return False
    for rule in plan:
        if rule.by_row:
            call = rule.uses[0].call
            keeps_rows = call in capture.heads if rule.is_head else capture.keeps_rows(call)
            if not keeps_rows:
                return False
    return True


def require_explained(problem: Problem) -> None:
    """Refuses a network that is sharded over processes unless rules of layers explain all tensors."""
    if problem.processes is not None:
        names = [problem.slots[owner.slot].name for owner in owners(problem) if rule_for(owner.module) is None]
        which = f"{names} are" if names else "some that a layer reads of another one are"
        require_unsharded(
            problem.module, f"{which} explained by no layer's rule (freeze them by requires_grad_(False))"
        )


class _Role(NamedTuple):
    call: int
    attribute: str  # Attribute of the module, or argument of the function
    positions: int
    name: str


def _families(capture: Capture, modules: Sequence[Owner], name: str) -> Iterator[list[_Role]]:
    """Uses that could explain one tensor, from the likeliest family to the last: of modules, then of functions.

    A table that is read without the data, as one of positions is, is explained by the sums in which it meets them.
    """
    n_data = len(capture.f)
    rules = {id(owner.module): (rule_for(owner.module), owner.attribute) for owner in modules}
    roles: list[_Role] = []
    for n, call in enumerate(capture.calls):
        if isinstance(call.by, FunctionCall) or id(call.by) not in rules:
            continue
        rule, attribute = rules[id(call.by)]
        if rule is None or attribute not in rule.parameters or not rule.accepts(call.by, call.x):
            roles = []
            break
        roles.append(_Role(n, attribute, rule.positions(call.by, call.x, n_data), rule.name))
    yield roles
    functions = [(n, call.by) for n, call in enumerate(capture.calls) if isinstance(call.by, FunctionCall)]
    own = [(n, call) for n, call in functions if name in call.roles]
    replaced = {id(call.instead_of) for _, call in own}
    for some in ([pair for pair in own if pair[1].instead_of is None], [p for p in own if id(p[1]) not in replaced]):
        yield [_Role(n, call.roles[name], call.positions(n_data), call.name) for n, call in some]


def _by_certainty(
    problem: Problem,
    slot: int,
    families: Sequence[Sequence[_Role]],
    capture: Capture,
    routing: Routing,
    least: Explained,
) -> Iterator[tuple[Explained, list[JacobianRule]]]:
    """Candidates for one tensor with what they explain: first those that hold whatever the data."""
    tensor = capture.stand_ins[problem.slots[slot].name]
    explained = [capture.graph.explained(tensor, [capture.calls[role.call] for role in roles]) for roles in families]
    for certainty in (Explained.ALWAYS, Explained.HERE):
        if certainty >= least:
            alike = [roles for roles, amount in zip(families, explained, strict=True) if amount is certainty]
            yield from ((certainty, candidates) for candidates in _candidates(alike, routing))


def _candidates(families: Sequence[Sequence[_Role]], routing: Routing) -> Iterator[list[JacobianRule]]:
    """Lists of candidates for one tensor, in the order in which they are tried: by batch axis, then by routed rows.

    Of rows that each have a place among those of the outputs, fewer than these, the place comes first: an axis may fit
    them as well, by the number of rows that a batch happens to have.
    """

    def rule(roles: Sequence[_Role], axes: Sequence[BatchAxis], words: str) -> JacobianRule:
        names = " + ".join(dict.fromkeys(role.name for role in roles))
        uses = (UseOfParameter(role.call, role.attribute, axis) for role, axis in zip(roles, axes, strict=True))
        return JacobianRule(tuple(uses), description=names + words)

    def routed(roles: Sequence[_Role], axes: Sequence[RoutedRows]) -> list[JacobianRule]:
        return [rule(roles, axes, f" ({RoutedRows.value})")]

    # Processes and reduced features would need other passes.
    may_be_routed = not routing.capture.reduced and routing.capture.processes is None
    if may_be_routed:
        placed = [(roles, routing.by_output_row([role.call for role in roles])) for roles in families]
        yield from (routed(roles, axes) for roles, axes in placed if axes is not None)
    for roles in families:
        if all(role.positions for role in roles):
            several = f", {len(roles)} uses" if len(roles) > 1 else ""
            by_axis = [rule(roles, [BatchAxis.LEADING] * len(roles), several)]
            if max(role.positions for role in roles) > 1:
                words = f" ({BatchAxis.TRAILING.value}){several}"
                by_axis.append(rule(roles, [BatchAxis.TRAILING] * len(roles), words))
            yield by_axis
    if may_be_routed:
        for roles in families:
            yield routed(roles, routing.by_datum([role.call for role in roles]))


# Outputs with positions: which tensors have a row for every position.


def _with_rows(trial: Trial, plan: Plan) -> Plan:
    """Marks the heads, and of outputs with positions the tensors whose rows are data like any other.

    That is proved like everything else, with weights r of the rows instead of the data; tensors of one use go together,
    since they share their output gradients.
    """
    problem, capture, proof = trial.problem, trial.capture, trial.probe
    if not capture.positions:
        return plan
    rows: dict[int, Block] = {}  # blocks of one position for every row
    for i, rule in enumerate(plan):
        if len(rule.uses) == 1 and rule.uses[0].axis is not BatchAxis.TRAILING:
            folded = block_of(problem, i, rule.uses, capture, proof.gradients).fold_positions(capture.n_positions)
            rows |= {} if folded is None else {i: folded}
    r = torch.randn(len(capture.rows), generator=torch.Generator().manual_seed(1)).to(capture.f)
    weighted = (r[:, None] * proof.unweighted.view_as(capture.rows)).view_as(capture.f)
    scale = float(weighted.norm() / (proof.r[:, None] * proof.unweighted[0]).norm())
    stand_ins = [capture.stand_ins[problem.slots[i].name] for i in rows]
    truths: Sequence[Tensor | None] = ()
    if rows:
        with capture.backward(1, len(stand_ins)):
            truths = pull(capture.f, stand_ins, weighted.unsqueeze(0), loop=True)
    proved: set[int] = set()
    for (i, block), truth in zip(rows.items(), truths, strict=True):
        if truth is not None:
            expected = problem.slots[i].take(truth[0].to_dense())
            actual = block.pull(r.unsqueeze(0).to(block_dtype(expected.dtype)))
            if proof.agree(i, actual, expected, block.bound() * r.abs().max(), scale):
                proved.add(i)
    broken = {use.call for i, rule in enumerate(plan) if i not in proved for use in rule.uses}

    def by_row(rule: JacobianRule, block: Block) -> JacobianRule:
        call = rule.uses[0].call
        is_head = call in capture.heads and gradients_are(block, proof.unweighted)
        # Behind a layer that is no head, the data may decide whether rows see each other.
        return replace(rule, by_row=True, is_head=is_head, proven=rule.proven and (is_head or capture.keeps_rows(call)))

    return tuple(
        by_row(rule, rows[i]) if i in proved and rule.uses[0].call not in broken else rule
        for i, rule in enumerate(plan)
    )


def sees_batch(rule: JacobianRule, capture: Capture) -> bool:
    """True if the input of every use has the batch in its first dimension, or is a view of such a tensor.

    Where it sees another number of rows (time first, tokens routed to experts), or where rows are indexed on
    their way to the outputs (`_MOVING_ROWS`: a batch sorted by length), the data may decide which row belongs to
    which sample: such a plan is right for its batch and is proven anew for the next. An index that leaves every
    datum in its place (`moves`) is no such one, for which every batch is asked.
    """
    n_data = len(capture.f)

    def is_view_of_batch(call: LayerCall) -> bool:
        """True if the input `[B·T, D]` is a view of one with the data first."""
        for node, _ in call.edge.node.next_functions:
            if node is not None and node.name().startswith(_VIEWS):
                sizes: tuple[int, ...] = getattr(node, "_saved_self_sym_sizes", ())
                if len(sizes) > 1 and sizes[0] == n_data and tuple(call.x.shape) == (prod(sizes[:-1]), sizes[-1]):
                    return True
        return False

    calls = [capture.calls[use.call] for use in rule.uses]
    leading = all(use.axis is BatchAxis.LEADING for use in rule.uses)
    return leading and all(call.x.shape[:1] == (n_data,) or is_view_of_batch(call) for call in calls)


def moving_nodes(capture: Capture) -> list[Any]:
    """The operations of a pass that may move rows by what the data are."""
    return [node for node in capture.graph if any(part in node.name() for part in _MOVING_ROWS)]


def moves(capture: Capture) -> bool:
    """True if rows may have come to another datum's place; one number is read where all were indexed one by one."""
    stay = [_stays(node, len(capture.f)) for node in moving_nodes(capture)] if len(capture.f) > 1 else []
    known = [answer.to(capture.f.device) for answer in stay if answer is not None]
    if len(known) < len(stay) or (known and capture.positions):
        return True
    return bool(known) and not is_true(torch.stack(known).all())


def _stays(node: Any, n_data: int) -> Tensor | None:
    """Whether x[rows, …] gives every datum its own row, 0-dim, as the last token's is picked; None of other forms."""
    if not node.name().startswith("IndexBackward"):
        return None
    size, *others = node._saved_self_sym_sizes
    rows, *picked = node._saved_indices
    if rows is None or any(one is None or one.shape != rows.shape for one in picked):
        return None
    if rows.shape != (n_data,) or rows.dtype != torch.int64 or size != n_data or n_data in others:
        return None
    return (rows == torch.arange(n_data, device=rows.device)).all()


_VIEWS = ("ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward")

_MOVING_ROWS = ("Index", "Gather", "Scatter", "Sort", "MaskedS", "Put", "Pack", "Unique")
"""Parts of the names of autograd's nodes that can move rows between a random parameter and the outputs."""


def first_of_use(plan: Plan) -> list[int]:
    """For every tensor the first one with the same uses: a weight and its bias share the output side of a layer."""
    first: dict[object, int] = {}
    uses = [tuple((use.call, use.axis.value) for use in rule.uses) for rule in plan]
    return [first.setdefault(key or i, i) for i, key in enumerate(uses)]


def block_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which factors are contracted: at least float32."""
    return torch.promote_types(dtype, torch.float32)


# The ladder of fallbacks.


_COTANGENTS = 3
"""Number of cotangents in a fallback's proof: with one, swapped cotangents would go unnoticed."""


def _prove_fallback(trial: Trial, slot: int, x: Inputs) -> JacobianRule:
    """The first fallback that reproduces Σ_kb r_kb J_bᵀ u_kb; proven for other batches unless that is zero."""
    problem, capture, proof = trial.problem, trial.capture, trial.probe
    f, generator = capture.f, torch.Generator().manual_seed(2)
    r = torch.randn(_COTANGENTS, len(f), generator=generator).to(f)
    cotangents = proof.unweighted + torch.randn(_COTANGENTS, 1, f.shape[1], generator=generator).to(f)
    weighted = (r[..., None] * cotangents).sum(0)
    with capture.backward(1, 1):
        (truth,) = pull(f, [capture.stand_ins[problem.slots[slot].name]], weighted.unsqueeze(0), loop=True)
    expected = problem.slots[slot].take(
        f.new_zeros(problem.slots[slot].shape) if truth is None else truth[0].to_dense()
    )
    dtype = block_dtype(expected.dtype)
    scale = float(weighted.norm() / (proof.r[:, None] * proof.unweighted[0]).norm())
    for fallback in Fallback:
        try:
            (values,) = per_sample(problem, x, cotangents, [slot], fallback)
        except (RuntimeError, ValueError, TypeError) as error:  # the fallback does not work for this network
            if ran_out(error) and fallback is Fallback.LOOP:  # the others take more
                raise
            continue
        actual = torch.einsum("kbp,kb->p", values.to(dtype), r.to(dtype))
        if proof.agree(slot, actual, expected, values.norm() * r.abs().max(), scale):
            description = f"fallback: {fallback.value}"
            return JacobianRule(fallback=fallback, description=description, proven=bool(expected.any()))
    raise CurvatureError(
        f"the Jacobian with respect to {problem.slots[slot].name!r} cannot be split over the data: the output of one "
        "datum depends on the others. A BatchNorm without running statistics does that in evaluation mode, and so "
        "does a model whose inputs do not carry the data in their first dimension, or one that rounds its numbers to "
        "fewer digits than its weights and outputs have. Data that are meant to depend on each other, as nodes of a "
        "graph do, go in as positions of one datum: inputs [1, N, ...], outputs [1, N, C]."
    )


# Rows without a batch dimension.


_AT_ONCE = 2**22
"""Size of gradients up to which all cotangents go through one pass."""


@dataclass(frozen=True, eq=False)
class Routing:
    """Finds which sample every row of a call belongs to, where rows were routed (to experts, or packed).

    A row belongs to the sample whose outputs it reaches. Of ⌈log₂ B⌉ cotangents the j-th is zero for all data whose
    number has no j-th bit: the gradient of a row is exactly zero for those that its sample lacks. A row that
    reaches the outputs of several samples gets a wrong number; like every other candidate it must pass the probe.
    """

    capture: Capture  # The batch

    def by_datum(self, calls: Sequence[int]) -> list[RoutedRows]:
        """The sample of every row of some calls."""
        return [RoutedRows.from_samples(self._data[call], len(self.capture.f)) for call in calls]

    def by_output_row(self, calls: Sequence[int]) -> list[RoutedRows] | None:
        """Rows that reach one row of the outputs each, in its place, so that rows are data like any other.

        None where two reach one, where the outputs have no positions, or if this is no other reading than by axis.
        """
        if not self.capture.positions or not any(self._is_partial(call) for call in calls):
            return None
        places = [self._rows[call] for call in calls]
        if any(len(place) != len(place.unique()) for place in places):
            return None
        return [RoutedRows.from_places(place, len(self.capture.f), self.capture.n_positions) for place in places]

    def rerouted(self, uses: Sequence[UseOfParameter]) -> tuple[UseOfParameter, ...]:
        """Uses that were proven on another batch, with the rows of this one."""
        if not any(isinstance(use.axis, RoutedRows) for use in uses):
            return tuple(uses)
        calls = [use.call for use in uses]
        axes = self.by_output_row(calls) or self.by_datum(calls)
        return tuple(replace(use, axis=axis) for use, axis in zip(uses, axes, strict=True))

    def _is_partial(self, call: int) -> bool:
        """True if a call may have seen only some rows: fewer than the outputs have, and not one image per sample."""
        own = self.capture.calls[call]
        n_rows = _n_rows(own)
        return n_rows < len(self.capture.rows) and (n_rows != len(self.capture.f) or own.x.ndim <= 2)

    @cached_property
    def _data(self) -> list[Tensor]:
        return self._numbers(len(self.capture.f))

    @cached_property
    def _rows(self) -> list[Tensor]:
        return self._numbers(len(self.capture.rows))

    def _numbers(self, count: int) -> list[Tensor]:
        """Number of the sample, or of the row of the outputs, that every row of every call belongs to, `[R]`.

        A row without a gradient adds nothing but its input; it gets a number between those of the rows around it.
        """
        f, rows, calls = self.capture.f, self.capture.rows, range(len(self.capture.calls))
        bits = torch.arange(max(1, (count - 1).bit_length()), device=f.device)
        codes = torch.arange(count, device=f.device) >> bits.unsqueeze(1) & 1
        codes = torch.cat([torch.ones_like(codes[:1]), codes]).to(f)  # the first: of all
        u = 1 + torch.rand(rows.shape[1], generator=torch.Generator().manual_seed(0)).to(f)
        cotangents = (codes.repeat_interleave(len(rows) // count, 1).unsqueeze(2) * u).view(len(codes), *f.shape)
        step = len(codes) if len(codes) * sum(c.shape.numel() for c in self.capture.calls) <= _AT_ONCE else 1
        reached: list[list[Tensor]] = [[] for _ in calls]
        for part in cotangents.split(step):
            gradients = self.capture.gradients(part, calls)
            for n in calls:
                n_rows, g = _n_rows(self.capture.calls[n]), gradients[n].detach()
                g = g.reshape(len(part), n_rows, -1) if n_rows else g.new_empty(len(part), 0, 1)
                reached[n].append(g.ne(0).any(2))
        each = (torch.cat(parts) for parts in reached)
        return [_between(r[0], (r[1:].long() << bits.unsqueeze(1)).sum(0), count) for r in each]


def _n_rows(call: LayerCall) -> int:
    """Number of rows of a call: its positions if the batch were one sample; 0 if no rule knows them."""
    if isinstance(call.by, SpreadCall):
        return call.shape[0] if call.shape else 0
    if not isinstance(call.by, nn.Module):
        return call.by.positions(1)
    rule = rule_for(call.by)
    return rule.positions(call.by, call.x, 1) if rule is not None and rule.accepts(call.by, call.x) else 0


def _between(known: Tensor, numbers: Tensor, count: int) -> Tensor:
    """Numbers `[R]` of all rows, interpolated between those that are known."""
    at, row = torch.nonzero(known).flatten(), torch.arange(len(known), device=known.device)
    ends = torch.cat([at.new_full((1,), -1), at, at.new_full((1,), len(known))])
    values = torch.cat([at.new_zeros(1), numbers[at], at.new_full((1,), count)]).clamp(max=count - 1)
    right = torch.searchsorted(ends, row).clamp(min=1)
    left = right - 1
    step = (values[right] - values[left]) * (row - ends[left]) // (ends[right] - ends[left])
    return torch.where(known, values[right], values[left] + step)


# Parameters without a gradient.


_CHANGE = 1e-3
"""Relative change of the outputs above which they depend on a tensor: far above rounding."""


def check_unreached(problem: Problem, x: Inputs, unreached: list[str]) -> None:
    """Warns of tensors without a derivative on which the outputs nevertheless depend, as two forward passes show.

    Under `torch.no_grad()`, behind `detach()` or a step function a tensor has no derivative. Its curvature would be
    zero and its posterior the prior, which is right of unused tensors alone.
    """
    if not _depends(problem, x, unreached):
        return
    several = len(unreached) > 1
    named = f"{unreached[0]!r}" + (f" (and {len(unreached) - 1} more)" if several else "")
    what = (
        f"the network's outputs depend on {named}, of which autograd knows no derivative: its forward runs under "
        "torch.no_grad(), or detaches, or takes a step function of them, or checkpoints with use_reentrant=True. "
    )
    if len(unreached) == len(problem.slots):
        raise CurvatureError(f"{what}No random weight is left: let gradients through.")
    warn(
        f"{what}Their posterior is the prior. Let gradients through, or freeze them by requires_grad_(False), so that "
        "they are not random.",
        ApproximationWarning,
    )


def _depends(problem: Problem, x: Inputs, names: list[str]) -> bool:
    tensors = problem.detached()
    outputs: list[Tensor] = []
    try:
        for moved in ({}, {name: 2 * tensors[name] + 1 for name in names}):
            with torch.no_grad(), same_random_state(problem.module):  # random numbers are the same in both passes
                outputs.append(problem.run({**tensors, **moved}, x))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if ran_out(error):
            raise
        return False
    before, after = outputs
    return before.shape != after.shape or not bool((after - before).abs().max() <= _CHANGE * before.abs().max())
