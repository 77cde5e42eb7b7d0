"""`Laplace(...)`: two names, or enum members, to a class of the grid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from laplace import function_space, named
from laplace.core.arguments import check_call, checked
from laplace.enums import FunctionalApproximation, HessianStructure, SubsetOfWeights
from laplace.errors import InvalidArgument
from laplace.likelihoods.base import Likelihood
from laplace.posterior.base import BaseLaplace

__all__ = ["Laplace", "function_space", "named"]

_APPROXIMATED: dict[tuple[str, str], type[BaseLaplace]] = {
    ("all", "nystrom"): function_space.ELLA,
    ("last_layer", "nystrom"): function_space.LLELLA,
    ("all", "variational"): function_space.VaLLA,
    ("last_layer", "variational"): function_space.LLVaLLA,
}
"""Classes of other functional approximations than the default one, which `_key` names."""

_OURS = ("laplace.named", "laplace.function_space.named")


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
) -> Any:
    """A Laplace approximation of the posterior over a network's weights.

    Args:
        model: The trained network.
        likelihood: A name in `laplace.likelihoods.LIKELIHOODS`, e.g. `"classification"`, or a likelihood object.
        subset_of_weights: `"all"`, `"last_layer"` or `"subnetwork"`.
        hessian_structure: `"full"`, `"block"`, `"kron"`, `"ekfac"`, `"diag"`, `"lowrank"`, `"lowrank_kron"` or `"gp"`.
        *args: Positional arguments of the class.
        functional_approximation: Which function-space posterior `hessian_structure="gp"` stands for.
        **kwargs: Keyword arguments of the class.

    Returns:
        An object of the class for the pair, e.g. `KronLLLaplace` for the default.

    Raises:
        InvalidArgument: No class for the pair, or a functional approximation of a weight-space structure.
        InvalidCall: An argument of the class is missing, or not known.
    """
    names = [str(member) for member in FunctionalApproximation]
    if str(functional_approximation) not in names:
        raise InvalidArgument(f"functional_approximation={functional_approximation!r}; accepted are {names}.")
    if str(functional_approximation) != names[0] and str(hessian_structure) != "gp":
        raise InvalidArgument(
            f"functional_approximation={str(functional_approximation)!r} needs hessian_structure='gp'; "
            f"{str(hessian_structure)!r} was given."
        )
    approximated = _APPROXIMATED.get((str(subset_of_weights), str(functional_approximation)))
    if approximated is not None:
        return _made(approximated, model, likelihood, *args, **kwargs)
    if str(functional_approximation) != names[0]:
        raise InvalidArgument(
            f"functional_approximation={str(functional_approximation)!r} with subset_of_weights="
            f"{str(subset_of_weights)!r} is not available; accepted are {sorted(_APPROXIMATED)}."
        )
    keyed = [cls for cls in _all_subclasses(BaseLaplace) if "_key" in cls.__dict__]
    # Ours first, so that a user's own class of the same key wins.
    keyed.sort(key=lambda cls: cls.__module__ not in _OURS)
    classes = {cls.__dict__["_key"]: cls for cls in keyed}
    key = (str(subset_of_weights), str(hessian_structure))
    if key not in classes:
        raise InvalidArgument(_unknown(key, sorted(classes)))
    return _made(classes[key], model, likelihood, *args, **kwargs)


def _made(cls: type[BaseLaplace], *args: Any, **kwargs: Any) -> BaseLaplace:
    check_call(cls.__init__, cls.__name__, (None, *args), kwargs, also=_NAMES)
    return cls(*args, **kwargs)


def _unknown(key: tuple[str, str], known: list[tuple[str, str]]) -> str:
    """Which name of a pair is wrong, and what is accepted beside the other one."""
    weights, structure = key
    structures = [other for own, other in known if own == weights]
    if not structures:
        return f"subset_of_weights={weights!r}; accepted are {sorted({own for own, _ in known})}."
    return f"hessian_structure={structure!r}; with subset_of_weights={weights!r} accepted are {structures}."


def _all_subclasses(cls: type) -> Iterator[type]:
    """Every subclass, depth first."""
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _all_subclasses(subclass)
