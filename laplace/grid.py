"""`Laplace(...)`, and the grid of its classes: weights × structures, or × families of posteriors over functions.

A cell has a class that is made of its parts when it is first asked for, by a row of the table `ROWS` where it has one;
or else a user's own with a `_key`. What type checkers and editors see is `grid.pyi`, which is generated from all this:
`python -m tests.house.stubs`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from itertools import product
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

from torch import Tensor, nn

from laplace import curvature, parametric  # noqa: F401  (`Backend` names the former)
from laplace.core.arguments import check_call, checked
from laplace.core.batch import ForwardFn, Inputs
from laplace.core.lazy import imported
from laplace.core.registry import Cell
from laplace.enums import (
    DampingForm,
    FamilyName,
    FeatureReductionName,
    FunctionalApproximation,
    HessianStructure,
    LikelihoodName,
    StructureName,
    SubsetOfWeights,
    WeightsName,
)
from laplace.errors import ApproximationWarning, InvalidArgument, InvalidCall, warn
from laplace.likelihoods.base import Likelihood
from laplace.network.model_guard import are_idle, has_adapters
from laplace.parametric import Backend, LastLayerAttributes, Options, SubnetworkAttributes
from laplace.structures import FAMILIES, STRUCTURES
from laplace.structures.base import Curvature
from laplace.weights import WEIGHTS, Weights

if TYPE_CHECKING:
    from laplace.parametric import ParametricLaplace

__all__ = ["ROWS", "Laplace", "ClassRecipe", "class_of", "classes", "families", "from_names"]

P = ParamSpec("P")
_MAKING = RLock()
"""Threads that ask for a class at once get the same one."""

# Constructors, which differ in the order of their arguments. It is what users' code and tools rely on.


class _Constructors:
    """Constructors by the name of the weights, and by that of the structure or family and of the weights.

    Tools take the names in `__init__.__code__.co_varnames` for the arguments: there must be no other local variable.
    """

    _construct: Callable[[Mapping[str, Any]], None]

    def last_layer(
        self, model: nn.Module, likelihood: Likelihood | LikelihoodName, sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0, prior_mean: float | Tensor = 0.0, temperature: float | Tensor = 1.0,
        enable_backprop: bool = False, feature_reduction: FeatureReductionName | None = None,
        dict_key_x: str = "input_ids", dict_key_y: str = "labels", backend: Backend = None,
        last_layer_name: str | None = None, backend_kwargs: Options = None, asdl_fisher_kwargs: Options = None, *,
        forward_fn: ForwardFn | None = None, structure_kwargs: Options = None, channel_dim: int | None = None,
    ) -> None:  # fmt: skip
        self._construct(locals())

    def subnetwork(
        self, model: nn.Module, likelihood: Likelihood | LikelihoodName, subnetwork_indices: Tensor,
        sigma_noise: float | Tensor = 1.0, prior_precision: float | Tensor = 1.0, prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0, backend: Backend = None, backend_kwargs: Options = None,
        asdl_fisher_kwargs: Options = None, *, enable_backprop: bool = False, dict_key_x: str = "input_ids",
        dict_key_y: str = "labels", damping: DampingForm = False, forward_fn: ForwardFn | None = None,
        structure_kwargs: Options = None, channel_dim: int | None = None,
    ) -> None:  # fmt: skip
        self._construct(locals())

    def full_all(
        self, model: nn.Module, likelihood: Likelihood | LikelihoodName, sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0, prior_mean: float | Tensor = 0.0, temperature: float | Tensor = 1.0,
        enable_backprop: bool = False, dict_key_x: str = "input_ids", dict_key_y: str = "labels",
        backend: Backend = None, backend_kwargs: Options = None, *, forward_fn: ForwardFn | None = None,
        structure_kwargs: Options = None, channel_dim: int | None = None,
    ) -> None:  # fmt: skip
        self._construct(locals())

    def kron_all(
        self, model: nn.Module, likelihood: Likelihood | LikelihoodName, sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0, prior_mean: float | Tensor = 0.0, temperature: float | Tensor = 1.0,
        enable_backprop: bool = False, dict_key_x: str = "input_ids", dict_key_y: str = "labels",
        backend: Backend = None, damping: DampingForm = False, backend_kwargs: Options = None,
        asdl_fisher_kwargs: Options = None, *, forward_fn: ForwardFn | None = None, channel_dim: int | None = None,
    ) -> None:  # fmt: skip
        self._construct(locals())

    def kron_last_layer(
        self, model: nn.Module, likelihood: Likelihood | LikelihoodName, sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0, prior_mean: float | Tensor = 0.0, temperature: float | Tensor = 1.0,
        enable_backprop: bool = False, feature_reduction: FeatureReductionName | None = None,
        dict_key_x: str = "input_ids", dict_key_y: str = "labels", backend: Backend = None,
        last_layer_name: str | None = None, damping: DampingForm = False, backend_kwargs: Options = None,
        asdl_fisher_kwargs: Options = None, *, forward_fn: ForwardFn | None = None, channel_dim: int | None = None,
    ) -> None:  # fmt: skip
        self._construct(locals())

    def lowrank_all(
        self, model: nn.Module, likelihood: Likelihood | LikelihoodName, backend: Backend = None,
        sigma_noise: float | Tensor = 1.0, prior_precision: float | Tensor = 1.0, prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0, enable_backprop: bool = False, dict_key_x: str = "input_ids",
        dict_key_y: str = "labels", backend_kwargs: Options = None, *, forward_fn: ForwardFn | None = None,
        structure_kwargs: Options = None, channel_dim: int | None = None,
    ) -> None:  # fmt: skip
        self._construct(locals())

    def sod_all(
        self, model: nn.Module, likelihood: Likelihood | LikelihoodName, n_subset: int,
        sigma_noise: float | Tensor = 1.0, prior_precision: float | Tensor = 1.0, prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0, enable_backprop: bool = False, dict_key_x: str = "input_ids",
        dict_key_y: str = "labels", backend: Backend = None, backend_kwargs: Options = None,
        independent_outputs: bool = False, seed: int = 0, *, selection: Literal["random", "top", "leverage"] = "random",
        prior_factor: float | None = None, forward_fn: ForwardFn | None = None,
    ) -> None:  # fmt: skip
        self._construct(locals())

    def sod_last_layer(
        self, model: nn.Module, likelihood: Likelihood | LikelihoodName, n_subset: int,
        sigma_noise: float | Tensor = 1.0, prior_precision: float | Tensor = 1.0, prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0, enable_backprop: bool = False,
        feature_reduction: FeatureReductionName | None = None, dict_key_x: str = "input_ids",
        dict_key_y: str = "labels", last_layer_name: str | None = None, backend: Backend = None,
        backend_kwargs: Options = None, independent_outputs: bool = False, seed: int = 0, *,
        selection: Literal["random", "top", "leverage"] = "random", prior_factor: float | None = None,
        forward_fn: ForwardFn | None = None,
    ) -> None:  # fmt: skip
        self._construct(locals())

    def nystrom_all(
        self, model: nn.Module, likelihood: Likelihood | LikelihoodName, subsample_size: int, n_eigenvalues: int,
        sigma_noise: float | Tensor = 1.0, prior_precision: float | Tensor = 1.0, prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0, enable_backprop: bool = False, dict_key_x: str = "input_ids",
        dict_key_y: str = "labels", backend: Backend = None, backend_kwargs: Options = None, seed: int = 1234, *,
        forward_fn: ForwardFn | None = None,
    ) -> None:  # fmt: skip
        self._construct(locals())

    def nystrom_last_layer(
        self, model: nn.Module, likelihood: Likelihood | LikelihoodName, subsample_size: int, n_eigenvalues: int,
        sigma_noise: float | Tensor = 1.0, prior_precision: float | Tensor = 1.0, prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0, enable_backprop: bool = False,
        feature_reduction: FeatureReductionName | None = None, dict_key_x: str = "input_ids",
        dict_key_y: str = "labels", last_layer_name: str | None = None, backend: Backend = None,
        backend_kwargs: Options = None, seed: int = 1234, *, forward_fn: ForwardFn | None = None,
    ) -> None:  # fmt: skip
        self._construct(locals())

    def variational_all(
        self, model: nn.Module, likelihood: Likelihood | LikelihoodName,
        inducing_locations: Inputs | Literal["random", "kmeans"], num_inducing: int | None = None,
        inducing_classes: Tensor | None = None, sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0, prior_mean: float | Tensor = 0.0, temperature: float | Tensor = 1.0,
        enable_backprop: bool = False, dict_key_x: str = "input_ids", dict_key_y: str = "labels",
        backend: Backend = None, backend_kwargs: Options = None, seed: int = 0, alpha: float = 1.0,
        mc_softmax_samples: int = 0, *, forward_fn: ForwardFn | None = None, weights_options: Options = None,
    ) -> None:  # fmt: skip
        self._construct(locals())

    def variational_last_layer(
        self, model: nn.Module, likelihood: Likelihood | LikelihoodName,
        inducing_locations: Inputs | Literal["random", "kmeans"], num_inducing: int | None = None,
        inducing_classes: Tensor | None = None, sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0, prior_mean: float | Tensor = 0.0, temperature: float | Tensor = 1.0,
        enable_backprop: bool = False, feature_reduction: FeatureReductionName | None = None,
        dict_key_x: str = "input_ids", dict_key_y: str = "labels", last_layer_name: str | None = None,
        backend: Backend = None, backend_kwargs: Options = None, seed: int = 0, alpha: float = 1.0,
        mc_softmax_samples: int = 0, *, forward_fn: ForwardFn | None = None,
    ) -> None:  # fmt: skip
        self._construct(locals())


def _class(name: str, bases: tuple[type, ...], doc: str | None, constructor: str, **members: Any) -> Any:
    """A class, with a constructor of its own where there is one of that name."""
    own = vars(_Constructors).get(constructor)
    if own is not None:
        own.__name__, own.__qualname__, members["__init__"] = "__init__", f"{name}.__init__", own
    return type(name, bases, {"__doc__": doc, "__module__": __name__, **members})


LLLaplace: type[ParametricLaplace] = _class(
    "LLLaplace", (LastLayerAttributes,),
    "Base of the posteriors over the last layer, which is determined at `fit` unless `last_layer_name` is given.",
    "last_layer", weights_type=WEIGHTS["last_layer"],
)  # fmt: skip
SubnetLaplace: type[ParametricLaplace] = _class(
    "SubnetLaplace", (SubnetworkAttributes,),
    "Base of the posteriors over a subnetwork: chosen weights have a distribution, all others keep their values.",
    "subnetwork", weights_type=WEIGHTS["subnetwork"],
)  # fmt: skip

# The table.

_OVER_WEIGHTS, _OVER_FUNCTIONS = "laplace.parametric:", "laplace.function_space.posteriors:"


@dataclass(frozen=True)
class ClassRecipe:
    """What the classes of a structure, or of a family of posteriors over functions, have beside their parts."""

    name: str  # their names; in the place of {} stands "", "LL" or "Subnet"
    what: str  # the approximation, in words that follow "All weights, "
    more: str | None = ""  # further text of the docstring of all weights; of None the whole is that of `attributes`
    attributes: str = _OVER_WEIGHTS + "ParametricLaplace"  # base with the attributes that they have by it


ROWS: dict[str, ClassRecipe] = {
    "full": ClassRecipe(
        "Full{}Laplace", "full curvature",
        "Of fewer rows of data than weights it is factored between the rows, which files do not hold.",
        f"{_OVER_WEIGHTS}NamedPosterior",
    ),
    "kron": ClassRecipe(
        "Kron{}Laplace", "Kronecker-factored curvature (K-FAC): B ⊗ A for every layer",
        attributes=f"{_OVER_WEIGHTS}KronAttributes",
    ),
    "diag": ClassRecipe("Diag{}Laplace", "diagonal curvature"),
    "block": ClassRecipe(
        "Block{}Laplace", "an exact dense block for every layer",
        '`structure_kwargs={"max_block": …}` limits its width.',
    ),
    "lowrank": ClassRecipe(
        "LowRank{}Laplace", "the dominant eigenpairs of the full curvature",
        'Their number is `structure_kwargs={"rank": k}`; `backend_kwargs={"low_rank": k}` is an older form of it.',
        f"{_OVER_WEIGHTS}LowRankAttributes",
    ),
    "ekfac": ClassRecipe(
        "Ekfac{}Laplace", "the exact diagonal of the curvature in the eigenbasis of its Kronecker factors (EK-FAC)"
    ),
    "lowrank_kron": ClassRecipe(
        "LowRankKron{}Laplace",
        "the k dominant eigenvectors of the Kronecker factors plus the exact diagonal of the curvature",
        'k is `structure_kwargs={"rank": k}`. With `"corrected": True` the eigenvectors are chosen by the exact\n'
        "diagonal of the curvature in their basis (Lee et al., 2020).",
    ),
    "matrix_free": ClassRecipe(
        "MatrixFree{}Laplace", "the full curvature by matrix–vector products, without forming the matrix",
        'Options are given as `structure_kwargs={"tolerance": 1e-3, …}`.',
        "laplace.extensions.matrix_free:MatrixFreePosterior",
    ),
    "sod": ClassRecipe(
        "Functional{}Laplace", "as a Gaussian process on a subset of the data", None,
        f"{_OVER_FUNCTIONS}SubsetPosterior",
    ),
    "nystrom": ClassRecipe(
        "{}ELLA", "by the Nyström approximation of its kernel", None, f"{_OVER_FUNCTIONS}NystromPosterior",
    ),
    "variational": ClassRecipe(
        "{}VaLLA", "by a sparse variational posterior with M inducing points", None,
        "laplace.extensions.valla:VariationalPosterior",
    ),
}  # fmt: skip
"""The library's structures and families, by their names in the registries. One without a row gets one by its name."""

# Cells and their classes.

_GP, _DEFAULT = str(HessianStructure.GP), Cell("", "").family


_BASES: dict[str, type[ParametricLaplace]] = {"last_layer": LLLaplace, "subnetwork": SubnetLaplace}
"""Bases of weights with a constructor of their own; that of others has `weights_options`."""

_SHORT = {"all": "", "last_layer": "LL", "subnetwork": "Subnet"}
"""Weights in the names of classes."""

_BY_TASK = """Members by task:
    fitting: fit, plan, coverage, refine, leave_one_out, forget, is_fitted, n_data, loss, log_likelihood
    predicting: la(x), predict, predictive, predictive_moments, predictive_samples, functional_samples,
        functional_variance, functional_covariance, compare
    hyper-parameters: calibrate, optimize_hyperparameters, optimize_prior_precision, calibration, prior_precision,
        prior_mean, sigma_noise, temperature, log_marginal_likelihood, evidence
    the posterior: mean, sample, posterior_covariance, posterior_variance, posterior_precision, log_prob, H, posterior,
        snapshot, fitted
    keeping it: save, state_dict, load_state_dict, to
    options: model, likelihood, weights, structure, backend, engine, channel_dim, enable_backprop, params, n_params,
        n_outputs"""
"""What `help(la)` says below the arguments: where to look among the members that follow."""

_WORDS = {"all": "All weights", "last_layer": "The last layer", "subnetwork": "A subnetwork"}


def class_of(cell: Cell) -> type[ParametricLaplace]:
    """The class of a cell.

    Raises:
        InvalidArgument: There is none; the message lists what is accepted.
    """
    keyed = parametric.CELLS.find(cell)
    if keyed is not None:
        return keyed
    if cell not in _registered():
        raise InvalidArgument(_unknown(cell))
    return _of_parts(cell)


def families() -> list[str]:
    """Names of the families."""
    return list(dict.fromkeys([*FAMILIES, *(cell.family for cell in parametric.CELLS)]))


def _registered() -> list[Cell]:
    """Cells of registered parts that go together: no posterior over functions is of a subnetwork."""
    over_functions = product(("all", "last_layer"), [_GP], FAMILIES)
    return [Cell(*names) for names in (*product(WEIGHTS, STRUCTURES), *over_functions)]


def _part(cell: Cell) -> str:
    """Name of the structure of a cell, or of the family of posteriors over functions."""
    return cell.family if cell.structure == _GP else cell.structure


def _name(cell: Cell) -> str:
    """`("last_layer", "tri_diagonal")` → `"TriDiagonalLLLaplace"`."""
    row = ROWS.get(_part(cell))
    name = f"{_camel(_part(cell))}{{}}Laplace" if row is None else row.name
    return name.format(_SHORT.get(cell.weights, _camel(cell.weights)))


def _camel(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"\W|_", name))


def _of_parts(cell: Cell) -> type[ParametricLaplace]:
    structure = FAMILIES[cell.family] if cell.structure == _GP else STRUCTURES[cell.structure]
    with _MAKING:
        return _made(cell, WEIGHTS[cell.weights], structure)


@cache
def _made(cell: Cell, weights_type: type[Weights], structure: type[Curvature]) -> type[ParametricLaplace]:
    """A class of registered parts, derived from that of all weights with the same structure."""
    row = ROWS.get(_part(cell))
    if cell.weights in _BASES:
        head = LastLayerAttributes if row is not None and cell.structure == _GP else _BASES[cell.weights]
        bases = (head, _made(cell._replace(weights="all"), WEIGHTS["all"], structure))
    elif row is not None and cell.weights == "all":
        bases = (imported(row.attributes),)
    else:
        over_functions = cell.structure == _GP
        bases = (imported(_OVER_FUNCTIONS + "BaseFunctionalLaplace" if over_functions else ClassRecipe.attributes),)
    doc = f"Posterior of {structure.__name__}, over {weights_type.__name__}."
    if row is not None and cell.weights in _WORDS:
        doc = f"{_WORDS[cell.weights]}, {row.what}."
        if cell.weights == "all":
            doc = inspect.getdoc(bases[0]) if row.more is None else f"{doc}\n\n{row.more}".rstrip()
    constructor = f"{_part(cell)}_{cell.weights}"
    made = _class(_name(cell), bases, doc, constructor, structure=structure, weights_type=weights_type)
    # Set afterwards: a class that is defined with a `_key` would take the cell over, also from a later registration.
    made._key = cell[:2] if cell.family == _DEFAULT else tuple(cell)
    made.__doc__ = f"{made.__doc__}\n\n{_BY_TASK}"
    return made


def classes() -> list[type[ParametricLaplace]]:
    """The classes of all cells of registered parts, and the bases of the weights."""
    return [*_BASES.values(), *map(_of_parts, _registered())]


def __getattr__(name: str) -> type[parametric.BaseLaplace]:
    """A class that is made here, by its name, as pickles find it; the bases of all with every class derived from them.

    Scripts walk the bases' `__subclasses__()`.
    """
    if name in ("BaseLaplace", "ParametricLaplace", "BaseFunctionalLaplace"):
        classes()
        own = {"BaseLaplace": parametric.BaseLaplace, "ParametricLaplace": parametric.ParametricLaplace}
        return own.get(name) or imported(f"{_OVER_FUNCTIONS}{name}")
    for cell in _registered():
        if _name(cell) == name:
            return _of_parts(cell)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _unknown(cell: Cell) -> str:
    """The error of a cell without a class: which of its names is wrong, and what is accepted beside the others."""
    known = {*parametric.CELLS, *_registered()}
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


# The factory.

_NAMES = ("subset_of_weights", "hessian_structure", "functional_approximation")
"""Arguments of `Laplace` that choose the class, which does not see them."""


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
            `"bernoulli"`, `"poisson"`, `"heteroscedastic"`, `"mean_log_variance"` or `"reward_modeling"`, or an object.
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
