"""The choices of a Laplace approximation that Daxberger et al. (2021, C.1) combine, and the combinations' names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

WeightsName = Literal["all", "last_layer"]
StructureName = Literal["diag", "kron", "full"]
WEIGHTS: tuple[WeightsName, ...] = ("all", "last_layer")
STRUCTURES: tuple[StructureName, ...] = ("diag", "kron", "full")
LINK_NAMES = ("map", "probit", "mc", "bridge")


@dataclass(frozen=True)
class Configuration:
    """A posterior.

    Attributes:
        tuning: "post-hoc" or "online".
        weights: "all" or "last_layer".
        structure: Of the curvature.
        curvature: "GGN" or "EF".
    """

    tuning: str
    weights: WeightsName
    structure: StructureName
    curvature: str

    def method(self, link: str) -> str:
        """Its name in the scores with a link."""
        weights = self.weights.replace("_", " ")
        return f"{self.tuning}, {weights}, {self.structure}, {self.curvature}, {link}"


POST_HOC = tuple(
    Configuration("post-hoc", weights, structure, curvature)
    for weights, structure, curvature in product(WEIGHTS, STRUCTURES, ("GGN", "EF"))
)
ONLINE = (
    *(Configuration("online", "all", structure, "GGN") for structure in STRUCTURES),
    Configuration("online", "last_layer", "kron", "GGN"),
)


def names(
    tuning: Sequence[str] = ("post-hoc",),
    weights: Sequence[WeightsName] = WEIGHTS,
    structure: Sequence[StructureName] = STRUCTURES,
    curvature: Sequence[str] = ("GGN", "EF"),
    link: Sequence[str] = ("probit",),
) -> list[str]:
    """All methods with these choices."""
    return [
        choice.method(name)
        for choice, name in product((*POST_HOC, *ONLINE), link)
        if choice.tuning in tuning
        and choice.weights in weights
        and choice.structure in structure
        and choice.curvature in curvature
    ]


def kron(weights: WeightsName, link: str = "probit", tuning: str = "post-hoc") -> list[str]:
    """Posteriors with Kronecker-factored GGN."""
    return names((tuning,), (weights,), ("kron",), ("GGN",), (link,))
