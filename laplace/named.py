"""Classes of the grid that have a name: declarations only, behaviour lives in the bases.

The constructors differ in nothing but the order of their arguments, which users' code and tools rely on; `bind` hands
what they are given on to the common one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from laplace.base import Backend, BaseLaplace, Options
from laplace.core.batch import ForwardFn
from laplace.enums import FeatureReduction
from laplace.errors import InvalidArgument
from laplace.likelihoods.base import Likelihood
from laplace.parametric import ParametricLaplace
from laplace.posterior.attributes import Part
from laplace.posterior.posterior import Posterior
from laplace.structures import (
    BlockCurvature,
    DiagCurvature,
    EkfacCurvature,
    FullCurvature,
    KronCurvature,
    LowRankCurvature,
    LowRankKronCurvature,
)
from laplace.structures.damping import checked_damping
from laplace.weights.last_layer import LastLayer
from laplace.weights.subnetwork import Subnetwork

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


def _factors(now: Posterior) -> Any:
    from laplace.compat.kronecker import Kron  # legacy values are imported by those who use them

    source = None if now.data is None else now.data.factored
    if source is None or source.H is None:
        return None
    return source.H if isinstance(source.H, Kron) else source.complete.curvature.public().factors


def _residual(la: ParametricLaplace) -> float:
    curvature = la.fitted().curvature
    return curvature.residual if isinstance(curvature, LowRankCurvature) else 0.0


class FullLaplace(ParametricLaplace):
    """All weights, full curvature."""

    _key = ("all", "full")
    structure = FullCurvature

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: Backend = None,
        backend_kwargs: Options = None,
        *,
        forward_fn: ForwardFn | None = None,
        structure_kwargs: Options = None,
        channel_dim: int | None = None,
    ) -> None:
        bind(self, locals())


class KronLaplace(ParametricLaplace):
    """All weights, Kronecker-factored curvature; `damping` is Ritter et al.'s."""

    _key = ("all", "kron")
    structure = KronCurvature
    damping = property(lambda la: la.precision_options["damping"], doc="Form of (√s B + √δ) ⊗ (√s A + √δ), or False.")
    H_facs = Part[Any](_factors, "Kronecker factors, a `Kron`, or None; assigned ones are H, if not set apart from it.")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: Backend = None,
        damping: bool | str = False,
        backend_kwargs: Options = None,
        asdl_fisher_kwargs: Options = None,
        *,
        forward_fn: ForwardFn | None = None,
        channel_dim: int | None = None,
    ) -> None:
        bind(self, locals())


class DiagLaplace(ParametricLaplace):
    """All weights, diagonal curvature."""

    _key = ("all", "diag")
    structure = DiagCurvature


class BlockLaplace(ParametricLaplace):
    """All weights, an exact dense block for every layer; `structure_kwargs={"max_block": …}` limits its size."""

    _key = ("all", "block")
    structure = BlockCurvature


class LowRankLaplace(ParametricLaplace):
    """All weights, the dominant eigenpairs of the curvature; `structure_kwargs={"rank": k}` says how many.

    Scripts written for older versions may say `backend_kwargs={"low_rank": k}`.
    """

    _key = ("all", "lowrank")
    structure = LowRankCurvature
    residual = property(_residual, doc="‖H U − U Λ‖ / ‖Λ‖ of the eigenpairs: how well they are found.")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        backend: Backend = None,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend_kwargs: Options = None,
        *,
        forward_fn: ForwardFn | None = None,
        structure_kwargs: Options = None,
        channel_dim: int | None = None,
    ) -> None:
        backend_kwargs, structure_kwargs = _rank_of_older_scripts(backend_kwargs, structure_kwargs)
        bind(self, locals())


class EkfacLaplace(ParametricLaplace):
    """All weights, the exact diagonal of the curvature in the eigenbasis of its Kronecker factors."""

    _key = ("all", "ekfac")
    structure = EkfacCurvature


class LowRankKronLaplace(ParametricLaplace):
    """All weights, dominant Kronecker eigenvectors and the exact diagonal; `structure_kwargs={"rank": k}`."""

    _key = ("all", "lowrank_kron")
    structure = LowRankKronCurvature


class OfLastLayer:
    """The attributes of every posterior over a last layer."""

    weights_type = LastLayer
    last_layer_name = property(attrgetter("weights.name"), doc="Name of the layer, None before it is found.")
    feature_reduction = property(attrgetter("weights.reduction"), doc="How positions are reduced, or None.")


class LLLaplace(OfLastLayer, ParametricLaplace):
    """The last layer, which is found at `fit` unless `last_layer_name` is given."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        enable_backprop: bool = False,
        feature_reduction: FeatureReduction | str | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: Backend = None,
        last_layer_name: str | None = None,
        backend_kwargs: Options = None,
        asdl_fisher_kwargs: Options = None,
        *,
        forward_fn: ForwardFn | None = None,
        structure_kwargs: Options = None,
        channel_dim: int | None = None,
    ) -> None:
        _refuse_asdl_kwargs(asdl_fisher_kwargs)
        bind(self, locals())


class FullLLLaplace(LLLaplace, FullLaplace):
    """The last layer, full curvature."""

    _key = ("last_layer", "full")


class KronLLLaplace(LLLaplace, KronLaplace):
    """The last layer, Kronecker-factored curvature: the default of `Laplace`."""

    _key = ("last_layer", "kron")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        enable_backprop: bool = False,
        feature_reduction: FeatureReduction | str | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: Backend = None,
        last_layer_name: str | None = None,
        damping: bool | str = False,
        backend_kwargs: Options = None,
        asdl_fisher_kwargs: Options = None,
        *,
        forward_fn: ForwardFn | None = None,
        channel_dim: int | None = None,
    ) -> None:
        _refuse_asdl_kwargs(asdl_fisher_kwargs)
        bind(self, locals())


class DiagLLLaplace(LLLaplace, DiagLaplace):
    """The last layer, diagonal curvature."""

    _key = ("last_layer", "diag")


class BlockLLLaplace(LLLaplace, BlockLaplace):
    """The last layer, an exact dense block for every layer: of a head of one module, the full curvature."""

    _key = ("last_layer", "block")


class LowRankLLLaplace(LLLaplace, LowRankLaplace):
    """The last layer, the dominant eigenpairs of the curvature."""

    _key = ("last_layer", "lowrank")


class EkfacLLLaplace(LLLaplace, EkfacLaplace):
    """The last layer, the exact diagonal of the curvature in the eigenbasis of its Kronecker factors."""

    _key = ("last_layer", "ekfac")


class LowRankKronLLLaplace(LLLaplace, LowRankKronLaplace):
    """The last layer, dominant Kronecker eigenvectors and the exact diagonal."""

    _key = ("last_layer", "lowrank_kron")


class SubnetLaplace(ParametricLaplace):
    """Single entries of the flattened trainable parameters; all others keep their trained values."""

    weights_type = Subnetwork
    subnetwork_indices = property(
        attrgetter("weights.indices"), doc="Indices of the random entries, as they were given, `[p]`."
    )
    n_params_subnet = property(attrgetter("n_params"), doc="Number of random entries, p.")
    mean_subnet = property(attrgetter("mean"), doc="θ* of the random entries, `[p]`.")
    assemble_full_samples = property(
        attrgetter("weights.embed"), doc="Function from samples `[S, p]` to samples of all trainable parameters."
    )
    damping = property(
        lambda la: la.precision_options["damping"], doc="Form of damping of a Kronecker-factored subnetwork, or False."
    )

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str,
        subnetwork_indices: Tensor,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        backend: Backend = None,
        backend_kwargs: Options = None,
        asdl_fisher_kwargs: Options = None,
        *,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        damping: bool | str = False,
        forward_fn: ForwardFn | None = None,
        structure_kwargs: Options = None,
        channel_dim: int | None = None,
    ) -> None:
        _refuse_asdl_kwargs(asdl_fisher_kwargs)
        if damping and self.structure is not KronCurvature:
            raise InvalidArgument(
                f"damping=True is a Kronecker-factored posterior's; hessian_structure={self.structure.name!r} has none."
            )
        bind(self, locals())


class FullSubnetLaplace(SubnetLaplace, FullLaplace):
    """A subnetwork, full curvature."""

    _key = ("subnetwork", "full")


class KronSubnetLaplace(SubnetLaplace, KronLaplace):
    """A subnetwork, the sub-block of the Kronecker-factored curvature."""

    _key = ("subnetwork", "kron")


class DiagSubnetLaplace(SubnetLaplace, DiagLaplace):
    """A subnetwork, diagonal curvature."""

    _key = ("subnetwork", "diag")


class BlockSubnetLaplace(SubnetLaplace, BlockLaplace):
    """A subnetwork, an exact dense block for the random entries of every layer."""

    _key = ("subnetwork", "block")


class LowRankSubnetLaplace(SubnetLaplace, LowRankLaplace):
    """A subnetwork, the dominant eigenpairs of the curvature."""

    _key = ("subnetwork", "lowrank")


class EkfacSubnetLaplace(SubnetLaplace, EkfacLaplace):
    """A subnetwork, the exact diagonal in the eigenbasis of the sub-block of the Kronecker factors."""

    _key = ("subnetwork", "ekfac")


class LowRankKronSubnetLaplace(SubnetLaplace, LowRankKronLaplace):
    """A subnetwork, the random entries of dominant Kronecker eigenvectors and the exact diagonal."""

    _key = ("subnetwork", "lowrank_kron")


def _rank_of_older_scripts(backend_kwargs: Options, structure_kwargs: Options) -> tuple[Options, Options]:
    """Options of a backend and of a structure, to which `backend_kwargs={"low_rank": k}` belongs as the rank."""
    others = dict(backend_kwargs or {})
    if "low_rank" not in others:
        return backend_kwargs, structure_kwargs
    return others, {"rank": others.pop("low_rank")} | (structure_kwargs or {})


def _refuse_asdl_kwargs(given: Options) -> None:
    if given:
        raise InvalidArgument(
            "asdl_fisher_kwargs is only read by all-weights posteriors with an ASDL backend; pass backend_kwargs."
        )
