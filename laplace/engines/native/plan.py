"""The rule of every parameter: a candidate among the uses that were recorded, proved by a probe.

A module's type promises nothing: the hook of a module called through its weight never fires, a parametrised
weight is recomputed, and the data may lie in another dimension than the first. So a candidate must
reproduce one number that autograd knows for certain, with random r `[B]` and u `[B, C]`,

    Σ_b r_b J_bᵀ u_b  =  autograd.grad(f, parameter, r u),

where the left side uses the per-datum factors of cotangents u, *unweighted*, and weighs them after. A
parameter whose uses fail with every axis of the data goes down the ladder of fallbacks, probed in the same way.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.memory import ran_out
from laplace.engines.native.autograd import pull
from laplace.engines.native.calls import FunctionCall, LayerCall, UseOfParameter, block_of
from laplace.engines.native.capture import Capture, Owner, owners
from laplace.engines.native.fallback import Fallback, per_sample
from laplace.engines.native.graph import Explained, Graph
from laplace.engines.native.layers import BatchAxis, RoutedRows, rule_for
from laplace.engines.native.proof import Probe, close, probe
from laplace.engines.native.routing import Routing
from laplace.errors import CurvatureError
from laplace.jacobian.blocks import Block, TensorShape
from laplace.jacobian.heads import gradients_are
from laplace.network.spread import require_whole
from laplace.weights.problem import Problem


@dataclass(frozen=True)
class JacobianRule:
    """The way to the block of one tensor: from its recorded uses, or by a fallback.

    Attributes:
        uses: Uses whose contributions add up; empty if the tensor does not influence the outputs.
        fallback: The fallback that computes the block, or None.
        description: Text for the coverage report.
        by_row: Whether, of outputs with positions, every row depends on one position of the layer's input, its own, so
            that rows are data like any other and their cost does not grow with the square of the positions.
        is_head: Whether, besides, the layer's outputs are the network's.
        proven: True if the rule holds for the next batch of this form too. It does not where the batch could
            not tell it from another (zeros, equal data) or where the place of the data may depend on them.
        shapes: By what they depend on, shapes of the tensor's Jacobian.
    """

    uses: tuple[UseOfParameter, ...] = ()
    fallback: Fallback | None = None
    description: str = "unused"
    proven: bool = True
    by_row: bool = False
    is_head: bool = False
    shapes: dict[Hashable, TensorShape] = field(init=False, default_factory=dict, compare=False, repr=False)

    @property
    def routed(self) -> bool:
        """True if rows were routed to the tensor's layer: how often it was called is for the data to say."""
        return any(isinstance(use.axis, RoutedRows) for use in self.uses)


Plan = tuple[JacobianRule, ...]
"""One rule per parameter."""


def make_plan(
    problem: Problem, capture: Capture, x: Inputs, n_data: int, *, repeated: bool = False, ladder: bool = True
) -> Plan | None:
    """Finds and proves a rule for every random parameter on one captured batch.

    Args:
        problem: The network and its random parameters.
        capture: The captured batch.
        x: Its inputs.
        n_data: B.
        repeated: The data are one datum twice, a stand-in for a batch of one, in which every dimension could carry
            the data; which one is meant makes no difference for one datum.
        ladder: True if tensors that no use explains go down the fallback ladder.

    Returns:
        The plan; None without the ladder, where a tensor needs it.

    Raises:
        InvalidData: Outputs or derivatives are not finite.
        CurvatureError: A tensor fails every fallback, which means that the output of one datum depends on others.
    """
    proof = probe(problem, capture, x, n_data)
    all_owners, permutes = owners(problem), _permutes(capture.graph)
    least = Explained.HERE if ladder or problem.processes is not None else Explained.ALWAYS
    plan: list[JacobianRule] = []
    routing = Routing(capture)
    for i, truth in enumerate(proof.truths):
        if truth is None:
            plan.append(JacobianRule())
            continue
        expected = problem.slots[i].take(truth.to_dense())
        tensor_owners = [owner for owner in all_owners if owner.slot == i]
        families = list(_families(capture, tensor_owners, problem.slots[i].name, n_data))
        for certainty, candidates in _by_certainty(problem, i, families, capture, routing, least):
            passed = _passed(problem, i, candidates, capture, proof, expected)
            if passed:
                unique = (repeated or len(passed) == 1) and bool(expected.any())
                lasting = unique and not permutes and _anchored(passed[0], capture, n_data)
                plan.append(replace(passed[0], proven=lasting and certainty is Explained.ALWAYS))
                break
        else:
            if not ladder:
                return None
            plan.append(_prove_fallback(problem, i, x, capture, proof))
    return _with_rows(problem, tuple(plan), capture, proof)


def explains(problem: Problem, slot: int, rule: JacobianRule, capture: Capture) -> Explained:
    """The amount of a tensor's derivative that a rule explains, whatever the data: a fallback does all of it."""
    if rule.fallback is not None:
        return Explained.ALWAYS
    tensor = capture.stand_ins[problem.slots[slot].name]
    if not rule.uses:
        return Explained.NOT if capture.graph.reaches(tensor) else Explained.ALWAYS
    return capture.graph.explained(tensor, [capture.calls[use.call] for use in rule.uses])


def holds(plan: Plan, problem: Problem, capture: Capture, least: Explained = Explained.ALWAYS) -> bool:
    """True if every rule of a plan explains its tensor in another pass too, in which the same calls were recorded."""
    return all(explains(problem, i, rule, capture) >= least for i, rule in enumerate(plan)) and all(
        rule.uses[0].call in capture.heads if rule.is_head else capture.keeps_rows(rule.uses[0].call)
        for rule in plan
        if rule.by_row and least is Explained.ALWAYS
    )


def require_explained(problem: Problem) -> None:
    """Refuses a network that is spread over processes, where layers do not explain all of its tensors.

    Raises:
        UnsupportedError: It is spread.
    """
    if problem.processes is not None:
        names = [problem.slots[owner.slot].name for owner in owners(problem) if rule_for(owner.module) is None]
        which = f"{names} are" if names else "some that a layer reads of another one are"
        require_whole(problem.module, f"{which} explained by no layer's rule (freeze them by requires_grad_(False))")


@dataclass(frozen=True)
class _Role:
    """One use that could explain a tensor: its number, the attribute or argument, positions and name."""

    call: int
    attribute: str
    positions: int
    name: str


def _families(capture: Capture, modules: Sequence[Owner], name: str, n_data: int) -> Iterator[list[_Role]]:
    """Uses that could explain one tensor, from the likeliest family to the last.

    A table that is read without the data, as one of positions is, is explained by the sums in which it meets them.

    Args:
        capture: The captured batch.
        modules: Those that own the tensor.
        name: Its name.
        n_data: B.
    """
    yield _by_modules(capture, modules, n_data)
    functions = [(n, call.by) for n, call in enumerate(capture.calls) if isinstance(call.by, FunctionCall)]
    calls = [(n, call) for n, call in functions if name in call.roles]
    if not calls:
        return
    yield _by_calls([(n, call) for n, call in calls if call.instead_of is None], name, n_data)
    replaced = {id(call.instead_of) for _, call in calls}
    yield _by_calls([(n, call) for n, call in calls if id(call) not in replaced], name, n_data)


def _by_modules(capture: Capture, modules: Sequence[Owner], n_data: int) -> list[_Role]:
    rules = {id(owner.module): rule_for(owner.module) for owner in modules}
    attributes = {id(owner.module): owner.attribute for owner in modules}
    roles: list[_Role] = []
    for n, call in enumerate(capture.calls):
        if isinstance(call.by, FunctionCall) or id(call.by) not in rules:
            continue
        rule, attribute = rules[id(call.by)], attributes[id(call.by)]
        if rule is None or attribute not in rule.parameters or not rule.accepts(call.by, call.x):
            return []
        roles.append(_Role(n, attribute, rule.positions(call.by, call.x, n_data), rule.name))
    return roles


def _by_calls(calls: Sequence[tuple[int, FunctionCall]], name: str, n_data: int) -> list[_Role]:
    return [_Role(n, call.roles[name], call.positions(n_data), call.name) for n, call in calls]


def _by_axis(roles: Sequence[_Role]) -> list[JacobianRule]:
    """One candidate for each axis of the data that fits all uses."""
    if not roles or any(role.positions == 0 for role in roles):
        return []
    names = " + ".join(dict.fromkeys(role.name for role in roles))
    candidates: list[JacobianRule] = []
    for axis in (BatchAxis.LEADING, BatchAxis.TRAILING):
        if axis is BatchAxis.LEADING or max(role.positions for role in roles) > 1:
            where = "" if axis is BatchAxis.LEADING else f" ({axis.value})"
            description = names + where + (f", {len(roles)} uses" if len(roles) > 1 else "")
            uses = tuple(UseOfParameter(role.call, role.attribute, axis) for role in roles)
            candidates.append(JacobianRule(uses, description=description))
    return candidates


def _candidates(families: Sequence[Sequence[_Role]], routing: Routing) -> Iterator[list[JacobianRule]]:
    """Candidates for one tensor, of which those of the first that pass are meant: by axis, then by routed rows.

    Of rows that each have a place among those of the outputs, fewer than these, the place comes first: an axis may fit
    them as well, by the number of rows that a batch happens to have.
    """
    if routing.capture.reduced or routing.capture.processes is not None:  # of which each would make other passes
        yield from map(_by_axis, families)
        return
    placed = [(roles, routing.by_output_row([role.call for role in roles])) for roles in families]
    yield from (_by_rows(roles, axes) for roles, axes in placed if roles and axes is not None)
    yield from map(_by_axis, families)
    for roles in families:
        if roles:
            yield _by_rows(roles, routing.by_datum([role.call for role in roles]))


def _by_certainty(
    problem: Problem,
    slot: int,
    families: Sequence[Sequence[_Role]],
    capture: Capture,
    routing: Routing,
    least: Explained,
) -> Iterator[tuple[Explained, list[JacobianRule]]]:
    """Candidates for one tensor with what they explain: first those of all data, which are one form in all batches."""
    tensor = capture.stand_ins[problem.slots[slot].name]
    explained = [capture.graph.explained(tensor, [capture.calls[role.call] for role in roles]) for roles in families]
    for certainty in (Explained.ALWAYS, Explained.HERE):
        if certainty >= least:
            alike = [roles for roles, amount in zip(families, explained, strict=True) if amount is certainty]
            yield from ((certainty, candidates) for candidates in _candidates(alike, routing))


def _by_rows(roles: Sequence[_Role], axes: Sequence[RoutedRows]) -> list[JacobianRule]:
    names = " + ".join(dict.fromkeys(role.name for role in roles))
    uses = tuple(UseOfParameter(r.call, r.attribute, axis) for r, axis in zip(roles, axes, strict=True))
    return [JacobianRule(uses, description=f"{names} ({RoutedRows.value})")]


def _with_rows(problem: Problem, plan: Plan, capture: Capture, proof: Probe) -> Plan:
    """Marks the heads, and of outputs with positions the tensors whose rows are data like any other.

    That is proved like everything else, with weights r of the rows instead of the data; tensors of one use go together,
    since they share their output gradients.
    """
    if not capture.positions:
        return plan
    rows = [_row_block(problem, i, rule, capture, proof) for i, rule in enumerate(plan)]
    r = torch.randn(len(capture.rows), generator=torch.Generator().manual_seed(1)).to(capture.f)
    used = [i for i, block in enumerate(rows) if block is not None]
    stand_ins = [capture.stand_ins[problem.slots[i].name] for i in used]
    weighted = (r[:, None] * proof.unweighted.view_as(capture.rows)).view_as(capture.f)
    truths: Sequence[Tensor | None] = ()
    if used:
        with capture.backward(1, len(stand_ins)):
            truths = pull(capture.f, stand_ins, weighted.unsqueeze(0), loop=True)
    blocks: dict[int, Block] = {}
    for i, truth in zip(used, truths, strict=True):
        block, expected = rows[i], problem.slots[i].take(truth[0].to_dense()) if truth is not None else None
        if block is None or expected is None:
            continue
        actual = block.pull(r.unsqueeze(0).to(block_dtype(expected.dtype)))
        scale = float(weighted.norm() / (proof.r[:, None] * proof.unweighted[0]).norm())
        if proof.agree(i, actual, expected, block.bound() * r.abs().max(), scale):
            blocks[i] = block
    broken = {t.call for i, e in enumerate(plan) if i not in blocks for t in e.uses}

    def by_row(rule: JacobianRule, block: Block) -> JacobianRule:
        is_head = _ends(rule, capture) and gradients_are(block, proof.unweighted)
        # Behind a layer that is no head, the data may decide whether rows see each other.
        lasting = rule.proven and (is_head or capture.keeps_rows(rule.uses[0].call))
        return replace(rule, by_row=True, is_head=is_head, proven=lasting)

    return tuple(
        by_row(e, blocks[i]) if i in blocks and e.uses[0].call not in broken else e for i, e in enumerate(plan)
    )


def _row_block(problem: Problem, slot: int, rule: JacobianRule, capture: Capture, proof: Probe) -> Block | None:
    """The block of a tensor with rows for data, if it has a position for every one."""
    if len(rule.uses) != 1 or rule.uses[0].axis is BatchAxis.TRAILING:
        return None
    block = block_of(problem, slot, rule.uses, capture.calls, proof.gradients, len(capture.f), _dtype(problem))
    return block.fold_positions(capture.n_positions)


def _ends(rule: JacobianRule, capture: Capture) -> bool:
    """True if the outputs of a tensor's one use are the network's."""
    return len(rule.uses) == 1 and rule.uses[0].call in capture.heads


def _anchored(rule: JacobianRule, capture: Capture, n_data: int) -> bool:
    """True if every use sees the batch itself in its first dimension, or rows that are a view of it.

    Where it sees another number of rows (time first, tokens routed to experts), or where rows are indexed on
    their way to the outputs (`_permutes`: a batch sorted by length), which row belongs to which datum may be decided by
    the data: such a plan is right for its batch and is proven anew for the next.
    """
    calls = [capture.calls[use.call] for use in rule.uses]
    leading = all(use.axis is BatchAxis.LEADING for use in rule.uses)
    return leading and all(call.x.shape[0] == n_data or _views_batch(call, n_data) for call in calls)


def _views_batch(call: LayerCall, n_data: int) -> bool:
    """True if a call's input `[B·T, D]` is a view of one with the data first."""
    for node, _ in call.edge.node.next_functions:
        if node is not None and node.name().startswith(_VIEWS):
            sizes: tuple[int, ...] = getattr(node, "_saved_self_sym_sizes", ())
            if len(sizes) > 1 and sizes[0] == n_data and tuple(call.x.shape) == (prod(sizes[:-1]), sizes[-1]):
                return True
    return False


_VIEWS = ("ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward")


_INDEXING = ("Index", "Gather", "Scatter", "Sort", "MaskedS", "Put", "Pack", "Unique")
"""Parts of the names of autograd's nodes that can move rows."""


def _permutes(graph: Graph) -> bool:
    """True if an operation that can move rows lies between a random parameter and the outputs."""
    return any(part in node.name() for node in graph for part in _INDEXING)


def first_of_use(plan: Plan) -> list[int]:
    """The first tensor of the same uses, for every tensor: a weight and its bias share the output side of a layer."""
    first: dict[object, int] = {}
    uses = [tuple((use.call, use.axis.value) for use in rule.uses) for rule in plan]
    return [first.setdefault(key or i, i) for i, key in enumerate(uses)]


def _passed(
    problem: Problem,
    slot: int,
    candidates: Sequence[JacobianRule],
    capture: Capture,
    proof: Probe,
    expected: Tensor,
) -> list[JacobianRule]:
    """The candidates whose factors reproduce autograd's number.

    If one does so closely, rounding is small, and no other is asked whether rounding is all that it misses.
    """
    numbers = [(c, _pulled(problem, slot, c, capture, proof, expected)) for c in candidates]
    fitting = [(c, number) for c, number in numbers if number is not None]
    near = [c for c, (actual, bound) in fitting if close(actual, expected, bound, proof.coarsest)]
    return near or [c for c, (actual, bound) in fitting if proof.agree(slot, actual, expected, bound)]


def _pulled(
    problem: Problem, slot: int, rule: JacobianRule, capture: Capture, proof: Probe, expected: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The number of a candidate's factors and its bound; None of a candidate that does not fit the shapes."""
    try:
        block = block_of(problem, slot, rule.uses, capture.calls, proof.gradients, len(proof.r), _dtype(problem))
        actual = block.pull(proof.r.unsqueeze(0).to(block_dtype(expected.dtype)))
    except (RuntimeError, IndexError, TypeError) as error:  # shapes that the data cannot have on this axis
        if ran_out(error):
            raise  # an axis that is refused for want of memory would be another curvature
        return None
    return actual, block.bound() * proof.r.abs().max()


def block_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which factors are contracted: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def _dtype(problem: Problem) -> torch.dtype:
    return block_dtype(problem.dtype)


_COTANGENTS = 3
"""Of a fallback's proof: that of one would not see cotangents that are taken for each other."""


def _prove_fallback(problem: Problem, slot: int, x: Inputs, capture: Capture, proof: Probe) -> JacobianRule:
    """The first fallback that reproduces Σ_kb r_kb J_bᵀ u_kb; proven for other batches unless that is zero."""
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
