"""Constructors of the named classes, which differ in the order of their arguments alone: they all lead to one.

The order is what users' code and tools rely on; what a constructor is given goes to the common one by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from laplace.base import BaseLaplace, Options
from laplace.errors import InvalidArgument
from laplace.structures.damping import checked_damping

COMMON = frozenset(inspect.signature(BaseLaplace.__init__).parameters)
"""Names of the common constructor's arguments."""

PRECISION_OPTIONS = frozenset({"damping"})
"""Names of arguments that are options of the structure's precision."""


def bind(la: BaseLaplace, given: Mapping[str, Any]) -> None:
    """Constructs a posterior from all arguments of a named class's constructor.

    An argument that the common constructor does not have is an option: of the choice of weights, where
    `Weights.arguments` names it, of the precision, or else of the structure.

    Args:
        la: The new object.
        given: Its class's arguments by name, `self` included, as `locals()` has them on entry.
    """
    common: dict[str, Any] = {name: value for name, value in given.items() if name in COMMON}
    own = {name: value for name, value in given.items() if name not in COMMON}
    renamed = la.weights_type.arguments
    options = {
        "weights_options": {renamed[name]: own.pop(name) for name in renamed if name in own},
        "precision_options": {name: checked_damping(own.pop(name)) for name in PRECISION_OPTIONS if name in own},
        "structure_kwargs": own,
    }
    for name, values in options.items():
        common[name] = values | (common.get(name) or {})
    BaseLaplace.__init__(**common)


def rank_of_older_scripts(backend_kwargs: Options, structure_kwargs: Options) -> tuple[Options, Options]:
    """Options of a backend and of a structure, to which `backend_kwargs={"low_rank": k}` belongs as the rank."""
    others = dict(backend_kwargs or {})
    if "low_rank" not in others:
        return backend_kwargs, structure_kwargs
    return others, {"rank": others.pop("low_rank")} | (structure_kwargs or {})


def refuse_asdl_kwargs(given: Options) -> None:
    """Raises where options of ASDL would not be read.

    Raises:
        InvalidArgument: There are some.
    """
    if given:
        raise InvalidArgument(
            "asdl_fisher_kwargs is only read by all-weights posteriors with an ASDL backend; pass backend_kwargs."
        )
