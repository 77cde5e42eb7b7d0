"""Saving, loading and describing a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from laplace.errors import InvalidArgument, InvalidType, StateError
from laplace.mixture.components import Rule, all_or_none, checked_rule
from laplace.mixture.mimo import HeadCall
from laplace.parametric import ParametricLaplace
from laplace.saving import Recipe

VERSION = 1
"""Version of the format of state dicts."""

CLASS = "MixtureLaplace"


def save(posteriors: Sequence[ParametricLaplace], rule: Rule) -> dict[str, Any]:
    """The states of all components, and how they are weighed."""
    return {
        "version": VERSION,
        "cls_name": CLASS,
        "weights": rule.clone() if isinstance(rule, Tensor) else rule,
        "components": [la.state_dict() for la in posteriors],
    }


def recipe(posteriors: Sequence[ParametricLaplace]) -> dict[str, Any]:
    """Classes and arguments by which the components are made again."""
    return {"components": [_component(la) for la in posteriors]}


def _component(la: ParametricLaplace) -> dict[str, Any]:
    """Class and arguments of one component; the call of one head of a network as its two numbers."""
    own, call = Recipe.of(la), la.forward_fn
    if not isinstance(call, HeadCall):
        return own.plain()
    others = {name: value for name, value in own.objects.items() if name != "forward_fn"}
    return replace(own, objects=others).plain() | {"head": [call.head, call.n_heads]}


def load(posteriors: Sequence[ParametricLaplace], state: dict[str, Any]) -> Rule:
    """Takes over the states of all components, all or none; returns how they are weighed.

    Raises:
        StateError: It is no state of a mixture of as many such components.
    """
    try:
        version, name, weights, states = (state[key] for key in ("version", "cls_name", "weights", "components"))
    except (TypeError, KeyError) as error:
        raise StateError("the state lacks an entry; it is truncated, or no state of a mixture.") from error
    if (version, name) != (VERSION, CLASS):
        raise StateError(f"the state is of {name!r}, version {version!r}; this is {CLASS!r}, version {VERSION}.")
    if not isinstance(states, list):
        raise StateError(f"the state's components are of type {type(states).__name__}, not a list; it is damaged.")
    if len(states) != len(posteriors):
        raise StateError(f"the state has {len(states)} components, this mixture {len(posteriors)}.")
    try:
        rule = checked_rule(weights, len(posteriors))
    except (InvalidArgument, InvalidType) as error:
        raise StateError(f"the state's weights are not accepted: {error}") from error
    with all_or_none(posteriors):
        for la, part in zip(posteriors, states, strict=True):
            la.load_state_dict(part)
    return rule


def describe(posteriors: Sequence[ParametricLaplace], rule: Rule) -> str:
    """Description of the weights and of every component."""
    weights = rule if isinstance(rule, str) else "[" + ", ".join(f"{value:.4g}" for value in rule.tolist()) + "]"
    parts = [f"({k}): {la!r}".replace("\n", "\n  ") for k, la in enumerate(posteriors)]
    lines = [f"{len(posteriors)} components, weights={weights}", *parts]
    return f"{CLASS}(\n  " + ",\n  ".join(lines) + "\n)"
