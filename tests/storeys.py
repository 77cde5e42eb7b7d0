"""The storeys of the house, from the ground up: which folder or module stands where, and how much code each may hold.

A file imports its own storey and those below. The one exception are objects that users hold: their methods may import,
inside the function, what they call. Extensions may use everything, and nothing uses them.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from tests.size import lines
from tests.source import FILES, name_of, tree


class Storey(NamedTuple):
    """A storey.

    Attributes:
        name: As the design page has it.
        rooms: Folders, and modules where a folder's are of two storeys, relative to `laplace/`.
        most: Lines of code, without blanks, comments and docstrings. Raised only together with a line in CHANGELOG.md
            that says for what.
    """

    name: str
    rooms: tuple[str, ...]
    most: int


STOREYS = (
    Storey("ground", ("core", "likelihoods", "enums.py", "errors.py", "compat/kron.py"), 6_240),
    Storey(
        "machine",
        (
            "weights", "network", "jacobian", "engines", "curvature/interface.py", "curvature/rules.py",
            "curvature/user_backend.py", "curvature/__init__.py",
        ),
        10_120,
    ),
    Storey(
        "the approximation",
        (
            "posterior", "structures", "predictive", "fitting", "evidence.py", "parametric.py", "predicting.py",
            "tunable.py", "saving.py", "grid.py",
        ),
        5_910,
    ),
    Storey(
        "methods",
        (
            "large_structures", "large_fits", "gp", "function_space", "refinement", "tuning", "comparison.py",
            "metrics.py", "mixture", "training",
        ),
        9_040,
    ),
    Storey(
        "adapters",
        ("contract", "curvature", "compat", "recipe.py", "loading.py", "state.py", "stand_in.py", "integrations"),
        4_430,
    ),
    Storey("extensions", ("extensions",), 5_820),
)  # fmt: skip
"""From the ground up. The names at the top, `__init__.py`, belong to none: they import everything when it is read."""

OBJECTS = ("parametric.py", "predicting.py", "tunable.py", "saving.py", "grid.py", "mixture/mixture.py")
"""Where the methods of the objects that users hold are."""


def storey_of(name: str) -> int | None:
    """The number of the storey of a file, relative to `laplace/`; None of the names at the top.

    A module that is named itself is where it is named, any other one is where its folder is.
    """
    for room in (name, name.partition("/")[0]):
        for number, storey in enumerate(STOREYS):
            if room in storey.rooms:
                return number
    return None


def code() -> Counter[str]:
    """Lines of code of every storey."""
    found: Counter[str] = Counter()
    for path in FILES:
        number = storey_of(name_of(path))
        if number is not None:
            found[STOREYS[number].name] += lines(path, tree(path))[0]
    return found
