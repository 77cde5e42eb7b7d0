"""What may explain a treated tensor: its uses by modules with a rule, or by functions, in each reading of the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from laplace.engines.native.capture import Capture, Owner
from laplace.engines.native.layer_calls import FunctionCall
from laplace.engines.native.layers import BatchAxis, rule_for
from laplace.engines.native.pieces import UseOfParameter


@dataclass(frozen=True)
class Candidate:
    """Uses of one tensor that may add up to its Jacobian.

    Attributes:
        terms: The uses.
        rule: Words for the coverage report.
    """

    uses: tuple[UseOfParameter, ...]
    rule: str


@dataclass(frozen=True)
class _Role:
    """One use that could explain a tensor: its number, the attribute or argument, positions and name."""

    call: int
    attribute: str
    positions: int
    name: str


def families(taken: Capture, held: Sequence[Owner], name: str, n_data: int) -> Iterator[list[Candidate]]:
    """Candidates for one tensor, from the likeliest family of uses to the last; of a family, one for each reading.

    A table that is read without the data, as one of positions is, is explained by the sums in which it meets them.

    Args:
        taken: The captured batch.
        held: The modules that own the tensor.
        name: Its name.
        n_data: B.
    """
    yield _by_axis(_by_modules(taken, held, n_data))
    functions = [(n, call.by) for n, call in enumerate(taken.calls) if isinstance(call.by, FunctionCall)]
    calls = [(n, call) for n, call in functions if name in call.roles]
    if not calls:
        return
    yield _by_axis(_by_calls([(n, call) for n, call in calls if call.instead_of is None], name, n_data))
    replaced = {id(call.instead_of) for _, call in calls}
    yield _by_axis(_by_calls([(n, call) for n, call in calls if id(call) not in replaced], name, n_data))


def _by_modules(taken: Capture, held: Sequence[Owner], n_data: int) -> list[_Role]:
    rules = {id(owner.module): rule_for(owner.module) for owner in held}
    attributes = {id(owner.module): owner.attribute for owner in held}
    roles: list[_Role] = []
    for n, call in enumerate(taken.calls):
        if isinstance(call.by, FunctionCall) or id(call.by) not in rules:
            continue
        rule, attribute = rules[id(call.by)], attributes[id(call.by)]
        if rule is None or attribute not in rule.parameters or not rule.accepts(call.by, call.x):
            return []
        roles.append(_Role(n, attribute, rule.positions(call.by, call.x, n_data), rule.name))
    return roles


def _by_calls(calls: Sequence[tuple[int, FunctionCall]], name: str, n_data: int) -> list[_Role]:
    return [_Role(n, call.roles[name], call.positions(n_data), call.name) for n, call in calls]


def _by_axis(roles: Sequence[_Role]) -> list[Candidate]:
    """One candidate for each reading that fits all uses."""
    if not roles or any(role.positions == 0 for role in roles):
        return []
    words = " + ".join(dict.fromkeys(role.name for role in roles))
    found: list[Candidate] = []
    for axis in BatchAxis:
        if axis is BatchAxis.LEADING or max(role.positions for role in roles) > 1:
            where = "" if axis is BatchAxis.LEADING else f" ({axis.value})"
            rule = words + where + (f", {len(roles)} uses" if len(roles) > 1 else "")
            found.append(Candidate(tuple(UseOfParameter(role.call, role.attribute, axis) for role in roles), rule))
    return found
