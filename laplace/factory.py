"""`Laplace(...)`: names, or enum members, to an object of a class of the grid."""

from __future__ import annotations

from typing import Any

from torch import nn

from laplace import function_space, named
from laplace.cells import class_of, families
from laplace.core.arguments import check_call, checked
from laplace.enums import FunctionalApproximation, HessianStructure, SubsetOfWeights
from laplace.errors import InvalidArgument
from laplace.keyed_classes import Cell
from laplace.likelihoods.base import Likelihood
from laplace.parametric import ParametricLaplace

__all__ = ["Laplace", "function_space", "named"]

_NAMES = ("subset_of_weights", "hessian_structure", "functional_approximation")
"""Arguments of `Laplace` that choose the class, which does not see them."""


@checked
def Laplace(
    model: nn.Module,
    likelihood: Likelihood | str,
    subset_of_weights: SubsetOfWeights | str = SubsetOfWeights.LAST_LAYER,
    hessian_structure: HessianStructure | str = HessianStructure.KRON,
    *args: Any,
    functional_approximation: FunctionalApproximation | str = FunctionalApproximation.SOD,
    **kwargs: Any,
) -> ParametricLaplace:
    """A Laplace approximation of the posterior over a network's weights.

    Args:
        model: The trained network.
        likelihood: A name in `laplace.likelihoods.LIKELIHOODS`, e.g. `"classification"`, or a likelihood object.
        subset_of_weights: `"all"`, `"last_layer"` or `"subnetwork"`; or a name in `laplace.weights.WEIGHTS`.
        hessian_structure: `"full"`, `"block"`, `"kron"`, `"ekfac"`, `"diag"`, `"lowrank"`, `"lowrank_kron"` or `"gp"`;
            or a name in `laplace.structures.STRUCTURES`.
        *args: Positional arguments of the class.
        functional_approximation: Which function-space posterior `hessian_structure="gp"` stands for.
        **kwargs: Keyword arguments of the class.

    Returns:
        An object of the class for these names, e.g. `KronLLLaplace` for the default.

    Raises:
        InvalidArgument: No class for these names, or a functional approximation of a weight-space structure.
        InvalidCall: An argument of the class is missing, or not known.
    """
    cell = Cell(str(subset_of_weights), str(hessian_structure), str(functional_approximation))
    if cell.family not in families():
        raise InvalidArgument(f"functional_approximation={functional_approximation!r}; accepted are {families()}.")
    if cell.family != FunctionalApproximation.SOD and cell.structure != HessianStructure.GP:
        raise InvalidArgument(
            f"functional_approximation={cell.family!r} needs hessian_structure='gp'; {cell.structure!r} was given."
        )
    cls = class_of(cell)
    check_call(cls.__init__, cls.__name__, (None, model, likelihood, *args), kwargs, also=_NAMES)
    return cls(model, likelihood, *args, **kwargs)
