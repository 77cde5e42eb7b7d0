"""Candidates for the rule of a parameter: its uses by modules and functions, for each axis of the data."""

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
        description: Text for the coverage report.
    """

    uses: tuple[UseOfParameter, ...]
    description: str


@dataclass(frozen=True)
class _Role:
    """One use that could explain a tensor: its number, the attribute or argument, positions and name."""

    call: int
    attribute: str
    positions: int
    name: str


def families(capture: Capture, owners: Sequence[Owner], name: str, n_data: int) -> Iterator[list[Candidate]]:
    """Candidates for one tensor, from the likeliest family of uses to the last; of each, one for every axis.

    A table that is read without the data, as one of positions is, is explained by the sums in which it meets them.

    Args:
        capture: The captured batch.
        owners: The modules that own the tensor.
        name: Its name.
        n_data: B.
    """
    yield _by_axis(_by_modules(capture, owners, n_data))
    functions = [(n, call.by) for n, call in enumerate(capture.calls) if isinstance(call.by, FunctionCall)]
    calls = [(n, call) for n, call in functions if name in call.roles]
    if not calls:
        return
    yield _by_axis(_by_calls([(n, call) for n, call in calls if call.instead_of is None], name, n_data))
    replaced = {id(call.instead_of) for _, call in calls}
    yield _by_axis(_by_calls([(n, call) for n, call in calls if id(call) not in replaced], name, n_data))


def _by_modules(capture: Capture, owners: Sequence[Owner], n_data: int) -> list[_Role]:
    rules = {id(owner.module): rule_for(owner.module) for owner in owners}
    attributes = {id(owner.module): owner.attribute for owner in owners}
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


def _by_axis(roles: Sequence[_Role]) -> list[Candidate]:
    """One candidate for each axis of the data that fits all uses."""
    if not roles or any(role.positions == 0 for role in roles):
        return []
    names = " + ".join(dict.fromkeys(role.name for role in roles))
    candidates: list[Candidate] = []
    for axis in BatchAxis:
        if axis is BatchAxis.LEADING or max(role.positions for role in roles) > 1:
            where = "" if axis is BatchAxis.LEADING else f" ({axis.value})"
            description = names + where + (f", {len(roles)} uses" if len(roles) > 1 else "")
            candidates.append(
                Candidate(tuple(UseOfParameter(role.call, role.attribute, axis) for role in roles), description)
            )
    return candidates
