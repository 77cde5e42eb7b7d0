"""The grid: weights × structures, and weights × families of posteriors over functions; each axis is a registry.

A cell has a class with a `_key`, the library's or a user's own; or else one that is made here of registered parts.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import product

from laplace.enums import HessianStructure, SubsetOfWeights
from laplace.errors import InvalidArgument
from laplace.function_space import FAMILIES, BaseFunctionalLaplace
from laplace.keyed_classes import Cell
from laplace.named import LLLaplace, SubnetLaplace
from laplace.parametric import CELLS, ParametricLaplace
from laplace.structures import STRUCTURES, Curvature
from laplace.weights import WEIGHTS, Weights

_GP, _DEFAULT = str(HessianStructure.GP), Cell("", "").family

_CONSTRUCTORS: dict[str, tuple[type[ParametricLaplace], ...]] = {
    SubsetOfWeights.LAST_LAYER: (LLLaplace,),
    SubsetOfWeights.SUBNETWORK: (SubnetLaplace,),
}
"""Bases with a constructor of their own; that of other weights has `weights_options`."""

_SHORT: dict[str, str] = {
    SubsetOfWeights.ALL: "",
    SubsetOfWeights.LAST_LAYER: "LL",
    SubsetOfWeights.SUBNETWORK: "Subnet",
}
"""Weights in the names of classes."""


def class_of(cell: Cell) -> type[ParametricLaplace]:
    """The class of a cell.

    Raises:
        InvalidArgument: There is none; the message lists what is accepted.
    """
    keyed = CELLS.find(cell)
    if keyed is not None:
        return keyed
    if cell not in _registered():
        raise InvalidArgument(_unknown(cell))
    return _made(cell, WEIGHTS[cell.weights], _structure(cell))


def families() -> list[str]:
    """Names of the families."""
    return list(dict.fromkeys([*FAMILIES, *(cell.family for cell in CELLS)]))


def _registered() -> list[Cell]:
    """Cells of registered parts that go together: no posterior over functions is of a subnetwork."""
    over_functions = product(("all", "last_layer"), [_GP], FAMILIES)
    return [Cell(*names) for names in (*product(WEIGHTS, STRUCTURES), *over_functions)]


def _structure(cell: Cell) -> type[Curvature]:
    return FAMILIES[cell.family] if cell.structure == _GP else STRUCTURES[cell.structure]


def _name(cell: Cell) -> str:
    """`("last_layer", "tri_diagonal")` → `"TriDiagonalLLLaplace"`."""
    structure = cell.family if cell.structure == _GP else cell.structure
    return f"{_camel(structure)}{_SHORT.get(cell.weights, _camel(cell.weights))}Laplace"


def _camel(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"\W|_", name))


@cache
def _made(cell: Cell, weights_type: type[Weights], structure: type[Curvature]) -> type[ParametricLaplace]:
    """A class of registered parts, with the constructor of its weights."""
    bases = (
        *_CONSTRUCTORS.get(cell.weights, ()),
        BaseFunctionalLaplace if cell.structure == _GP else ParametricLaplace,
    )
    members = {"__doc__": f"Posterior of {structure.__name__}, over {weights_type.__name__}.", "__module__": __name__}
    made = type(_name(cell), bases, members | {"structure": structure, "weights_type": weights_type})
    # Set afterwards: a class that is defined with a `_key` would take the cell over, also from a later registration.
    made._key = cell if cell.structure == _GP else cell[:2]
    return made


def __getattr__(name: str) -> type[ParametricLaplace]:
    """A class that is made here, by its name: pickles find it so, once its parts are registered."""
    for cell in _registered():
        if _name(cell) == name and CELLS.find(cell) is None:
            return class_of(cell)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _unknown(cell: Cell) -> str:
    """The error of a cell without a class: which of its names is wrong, and what is accepted beside the others."""
    known = {*CELLS, *_registered()}
    if cell.family != _DEFAULT:
        pairs = sorted((other.weights, other.family) for other in known if other.family != _DEFAULT)
        return (
            f"functional_approximation={cell.family!r} with subset_of_weights={cell.weights!r} is not available; "
            f"accepted are {pairs}."
        )
    structures = sorted(other.structure for other in known if other[::2] == (cell.weights, _DEFAULT))
    if not structures:
        return f"subset_of_weights={cell.weights!r}; accepted are {sorted({other.weights for other in known})}."
    return f"hessian_structure={cell.structure!r}; with subset_of_weights={cell.weights!r} accepted are {structures}."
