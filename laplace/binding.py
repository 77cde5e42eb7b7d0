"""Arguments of a named class's constructor, handed on to the common one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from laplace.base import BaseLaplace

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
        "precision_options": {name: own.pop(name) for name in PRECISION_OPTIONS if name in own},
        "structure_kwargs": own,
    }
    for name, values in options.items():
        common[name] = values | (common.get(name) or {})
    BaseLaplace.__init__(**common)
