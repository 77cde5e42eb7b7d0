"""`Laplace(...)`, and the grid of its classes: weights × structures, or × families of posteriors over functions.

A cell has a class with a `_key`, the library's or a user's own; or else one that is made here of registered parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, wraps
from itertools import product
from typing import TYPE_CHECKING, Any, ParamSpec, overload

from torch import nn

from laplace import function_space, named
from laplace.core.arguments import check_call, checked
from laplace.core.registry import Cell
from laplace.enums import (
    FamilyName,
    FunctionalApproximation,
    HessianStructure,
    LikelihoodName,
    StructureName,
    SubsetOfWeights,
    WeightsName,
)
from laplace.errors import ApproximationWarning, InvalidArgument, InvalidCall, warn
from laplace.function_space import FAMILIES
from laplace.likelihoods.base import Likelihood
from laplace.named import LLLaplace, SubnetLaplace
from laplace.network.adapters import are_idle, has_adapters
from laplace.parametric import CELLS, ParametricLaplace
from laplace.structures import STRUCTURES
from laplace.structures.base import Curvature
from laplace.weights import WEIGHTS, Weights

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from laplace import matrix_free
    from laplace import typed as t

__all__ = ["Laplace", "from_names", "function_space", "named"]

_NAMES = ("subset_of_weights", "hessian_structure", "functional_approximation")
"""Arguments of `Laplace` that choose the class, which does not see them."""

P = ParamSpec("P")


def _suited_to_adapters(factory: Callable[P, ParametricLaplace]) -> Callable[P, ParametricLaplace]:
    """Chooses weights and structure for a model with adapters, where neither was given."""

    @wraps(factory)
    def made(*args: P.args, **kwargs: P.kwargs) -> ParametricLaplace:
        model = kwargs.get("model", next(iter(args), None))
        given = len(args) > 2 or not kwargs.keys().isdisjoint(_NAMES)
        if given or not isinstance(model, nn.Module) or not has_adapters(model):
            return factory(*args, **kwargs)
        if are_idle(model):
            raise InvalidArgument(_IDLE)
        warn(_ADAPTED, ApproximationWarning)
        chosen = {"subset_of_weights": SubsetOfWeights.ALL, "hessian_structure": HessianStructure.LOWRANK_KRON}
        return factory(*args, **{**kwargs, **chosen})  # pyright: ignore[reportCallIssue]

    return made


_ADAPTED = (
    "the model has adapters of PEFT: the posterior is over all trainable weights, with hessian_structure="
    "'lowrank_kron', whose Kronecker factors are of low rank (of other models the default is the last layer with "
    "'kron'). Give subset_of_weights or hessian_structure to choose, and not to see this; either one is taken as it is."
)

_IDLE = (
    "all adapters of the model are merged into their layers, or switched off, so that no output depends on their "
    "weights: call model.unmerge_adapter() or model.enable_adapter_layers(), or take a merged model as it is by "
    "model.merge_and_unload(). subset_of_weights or hessian_structure, where given, is taken literally."
)


if TYPE_CHECKING:  # the class that every pair of names stands for
    # fmt: off

    # The last layer.
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Last,
                hessian_structure: t.Full, **options: Unpack[t.OfLast]) -> named.FullLLLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Last = ...,
                hessian_structure: t.Kron = ..., **options: Unpack[t.OfKronLast]) -> named.KronLLLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Last,
                hessian_structure: t.Diag, **options: Unpack[t.OfLast]) -> named.DiagLLLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Last,
                hessian_structure: t.Block, **options: Unpack[t.OfLast]) -> named.BlockLLLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Last,
                hessian_structure: t.LowRank, **options: Unpack[t.OfLast]) -> named.LowRankLLLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Last,
                hessian_structure: t.Ekfac, **options: Unpack[t.OfLast]) -> named.EkfacLLLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Last,
                hessian_structure: t.LowRankKron, **options: Unpack[t.OfLast]) -> named.LowRankKronLLLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Last,
                hessian_structure: t.MatrixFree, **options: Unpack[t.OfLast]) -> matrix_free.MatrixFreeLLLaplace: ...

    # All weights.
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.All,
                hessian_structure: t.Full, **options: Unpack[t.OfFull]) -> named.FullLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.All,
                hessian_structure: t.Kron = ..., **options: Unpack[t.OfKron]) -> named.KronLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.All,
                hessian_structure: t.Diag, **options: Unpack[t.OfAll]) -> named.DiagLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.All,
                hessian_structure: t.Block, **options: Unpack[t.OfAll]) -> named.BlockLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.All,
                hessian_structure: t.LowRank, **options: Unpack[t.OfFull]) -> named.LowRankLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.All,
                hessian_structure: t.Ekfac, **options: Unpack[t.OfAll]) -> named.EkfacLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.All,
                hessian_structure: t.LowRankKron, **options: Unpack[t.OfAll]) -> named.LowRankKronLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.All,
                hessian_structure: t.MatrixFree, **options: Unpack[t.OfAll]) -> matrix_free.MatrixFreeLaplace: ...

    # A subnetwork.
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Sub,
                hessian_structure: t.Full, **options: Unpack[t.OfSub]) -> named.FullSubnetLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Sub,
                hessian_structure: t.Kron = ..., **options: Unpack[t.OfSub]) -> named.KronSubnetLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Sub,
                hessian_structure: t.Diag, **options: Unpack[t.OfSub]) -> named.DiagSubnetLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Sub,
                hessian_structure: t.Block, **options: Unpack[t.OfSub]) -> named.BlockSubnetLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Sub,
                hessian_structure: t.LowRank, **options: Unpack[t.OfSub]) -> named.LowRankSubnetLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Sub,
                hessian_structure: t.Ekfac, **options: Unpack[t.OfSub]) -> named.EkfacSubnetLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Sub,
                hessian_structure: t.LowRankKron, **options: Unpack[t.OfSub]) -> named.LowRankKronSubnetLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Sub,
                hessian_structure: t.MatrixFree, **options: Unpack[t.OfSub]) -> matrix_free.MatrixFreeSubnetLaplace: ...

    # Posteriors over functions.
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.All,
                hessian_structure: t.GP, *, functional_approximation: t.Sod = ...,
                **options: Unpack[t.OfSod]) -> function_space.FunctionalLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Last,
                hessian_structure: t.GP, *, functional_approximation: t.Sod = ...,
                **options: Unpack[t.OfSodLast]) -> function_space.FunctionalLLLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.All,
                hessian_structure: t.GP, *, functional_approximation: t.Nystrom,
                **options: Unpack[t.OfNystrom]) -> function_space.ELLA: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Last,
                hessian_structure: t.GP, *, functional_approximation: t.Nystrom,
                **options: Unpack[t.OfNystromLast]) -> function_space.LLELLA: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.All,
                hessian_structure: t.GP, *, functional_approximation: t.Variational,
                **options: Unpack[t.OfVariational]) -> function_space.VaLLA: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Last,
                hessian_structure: t.GP, *, functional_approximation: t.Variational,
                **options: Unpack[t.OfVariationalLast]) -> function_space.LLVaLLA: ...

    # The last layer by default, where the structure alone is given.
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, *,
                hessian_structure: t.Full, **options: Unpack[t.OfLast]) -> named.FullLLLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, *,
                hessian_structure: t.Diag, **options: Unpack[t.OfLast]) -> named.DiagLLLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, *,
                hessian_structure: t.Block, **options: Unpack[t.OfLast]) -> named.BlockLLLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, *,
                hessian_structure: t.LowRank, **options: Unpack[t.OfLast]) -> named.LowRankLLLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, *,
                hessian_structure: t.Ekfac, **options: Unpack[t.OfLast]) -> named.EkfacLLLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, *,
                hessian_structure: t.LowRankKron, **options: Unpack[t.OfLast]) -> named.LowRankKronLLLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, *,
                hessian_structure: t.MatrixFree, **options: Unpack[t.OfLast]) -> matrix_free.MatrixFreeLLLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, *,
                hessian_structure: t.GP, functional_approximation: t.Sod = ...,
                **options: Unpack[t.OfSodLast]) -> function_space.FunctionalLLLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, *,
                hessian_structure: t.GP, functional_approximation: t.Nystrom,
                **options: Unpack[t.OfNystromLast]) -> function_space.LLELLA: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, *,
                hessian_structure: t.GP, functional_approximation: t.Variational,
                **options: Unpack[t.OfVariationalLast]) -> function_space.LLVaLLA: ...

    # What users register, by its class.
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.All,
                hessian_structure: type[Curvature], **options: Unpack[t.OfAll]) -> ParametricLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Last,
                hessian_structure: type[Curvature], **options: Unpack[t.OfLast]) -> LLLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, *,
                hessian_structure: type[Curvature], **options: Unpack[t.OfLast]) -> LLLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: t.Sub,
                hessian_structure: type[Curvature], **options: Unpack[t.OfSub]) -> SubnetLaplace: ...
    @overload
    def Laplace(model: nn.Module, likelihood: t.AnyLikelihood, subset_of_weights: type[Weights],
                hessian_structure: t.AnyStructure = ..., **options: Unpack[t.OfAll]) -> ParametricLaplace: ...
    # fmt: on


@_suited_to_adapters
@checked
def Laplace(
    model: nn.Module,
    likelihood: Likelihood | LikelihoodName,
    subset_of_weights: WeightsName | type[Weights] = SubsetOfWeights.LAST_LAYER,
    hessian_structure: StructureName | type[Curvature] = HessianStructure.KRON,
    *args: Any,
    functional_approximation: FamilyName = FunctionalApproximation.SOD,
    **kwargs: Any,
) -> ParametricLaplace:
    """Makes a Laplace approximation of the posterior over a network's weights; call `fit` on it next.

    For a model with adapters (PEFT), the defaults are `"all"` and `"lowrank_kron"` (Yang et al., 2024), if you give
    neither `subset_of_weights` nor `hessian_structure`.

    Args:
        model: The trained network.
        likelihood: How the network's outputs give a distribution over targets: `"classification"`, `"regression"`,
            `"bernoulli"`, `"poisson"`, `"heteroscedastic"` or `"reward_modeling"`, or a likelihood object.
        subset_of_weights: Which weights are random: `"all"`, `"last_layer"` or `"subnetwork"`; or a name or class of
            your own in `laplace.weights.WEIGHTS`.
        hessian_structure: How the curvature is approximated: `"full"`, `"block"`, `"kron"`, `"ekfac"`, `"diag"`,
            `"lowrank"`, `"lowrank_kron"`, `"matrix_free"` or `"gp"`; or a name or class of your own in
            `laplace.structures.STRUCTURES`.
        *args: Further positional arguments of the class.
        functional_approximation: Which approximation `hessian_structure="gp"` uses: `"sod"` (a Gaussian process on a
            subset of data), `"nystrom"` or `"variational"`.
        **kwargs: Further keyword arguments of the class, e.g. `prior_precision`.

    Returns:
        An object of the class for these names, e.g. `KronLLLaplace` for the defaults.

    Raises:
        InvalidArgument: There is no class for these names; `functional_approximation` is given without `"gp"`; or all
            adapters are merged or disabled, and neither weights nor structure are given.
        InvalidCall: An argument of the class is missing or unknown.

    Warns:
        ApproximationWarning: Weights and structure were chosen automatically, for a model with adapters.
    """
    weights, structure = WEIGHTS.name_of(subset_of_weights), STRUCTURES.name_of(hessian_structure)
    cell = Cell(weights, structure, str(functional_approximation))
    if cell.family != FunctionalApproximation.SOD:
        if cell.family not in families():
            raise InvalidArgument(f"functional_approximation={functional_approximation!r}; accepted are {families()}.")
        if cell.structure != HessianStructure.GP:
            raise InvalidArgument(
                f"functional_approximation={cell.family!r} needs hessian_structure='gp'; {cell.structure!r} was given."
            )
    cls = class_of(cell)
    try:
        return cls(model, likelihood, *args, **kwargs)
    except InvalidCall:  # of the class, which does not see the names that chose it
        check_call(cls.__init__, cls.__name__, (None, model, likelihood, *args), kwargs, also=_NAMES)
        raise


from_names: Callable[..., ParametricLaplace] = Laplace
"""The same for names that are known at run time alone, which no type checker can follow."""

_GP, _DEFAULT = str(HessianStructure.GP), Cell("", "").family

CELLS.refer(_GP, "laplace.function_space.named", "laplace.function_space.variational_named")
CELLS.refer(str(HessianStructure.MATRIX_FREE), "laplace.matrix_free")

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
        function_space.BaseFunctionalLaplace if cell.structure == _GP else ParametricLaplace,
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
