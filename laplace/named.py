"""Classes of the grid that have a name: declarations only, behaviour lives in the bases."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from laplace.base import Backend, Options
from laplace.constructors import bind, rank_of_older_scripts, refuse_asdl_kwargs
from laplace.core.batch import ForwardFn
from laplace.enums import FeatureReductionName, LikelihoodName
from laplace.errors import InvalidArgument
from laplace.likelihoods.base import Likelihood
from laplace.parametric import ParametricLaplace
from laplace.posterior.attributes import Part
from laplace.posterior.posterior import Posterior
from laplace.structures import STRUCTURES
from laplace.structures.damping import DampingForm
from laplace.weights.last_layer import LastLayer
from laplace.weights.subnetwork import Subnetwork


def _factors(now: Posterior) -> Any:
    from laplace.compat.kronecker import Kron  # legacy values are imported by those who use them

    source = None if now.data is None else now.data.factors_fit
    if source is None or source.H is None:
        return None
    return source.H if isinstance(source.H, Kron) else source.complete.curvature.public().factors


def _residual(la: ParametricLaplace) -> float:
    from laplace.structures.low_rank import LowRankCurvature

    curvature = la.fitted().curvature
    return curvature.residual if isinstance(curvature, LowRankCurvature) else 0.0


class FullLaplace(ParametricLaplace):
    """All weights, full curvature."""

    _key = ("all", "full")
    structure = STRUCTURES.attribute("full")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | LikelihoodName,
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
    """All weights, Kronecker-factored curvature (K-FAC): B ⊗ A for every layer.

    Args:
        damping: False for the exact prior, P = s B ⊗ A + δ. Otherwise P = (√s B + √δ) ⊗ (√s A + √δ), a cheaper form
            (Ritter et al., 2018), with Kronecker factors normalised differently: True, B is a sum over the data and A a
            mean; `"mean"`, both are √N times means, as in that paper; `"sum"`, both are sums (Immer et al., 2021).
    """

    _key = ("all", "kron")
    structure = STRUCTURES.attribute("kron")
    damping = property(lambda la: la.precision_options["damping"], doc="The `damping` that was given, or False.")
    H_facs = Part[Any](_factors, "Kronecker factors of H, a `Kron`, or None; assigning them also assigns H.")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | LikelihoodName,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: Backend = None,
        damping: DampingForm = False,
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
    structure = STRUCTURES.attribute("diag")


class BlockLaplace(ParametricLaplace):
    """All weights, an exact dense block for every layer; `structure_kwargs={"max_block": …}` limits its width."""

    _key = ("all", "block")
    structure = STRUCTURES.attribute("block")


class LowRankLaplace(ParametricLaplace):
    """All weights, the dominant eigenpairs of the full curvature; their number is `structure_kwargs={"rank": k}`.

    `backend_kwargs={"low_rank": k}` is an older form of the same.
    """

    _key = ("all", "lowrank")
    structure = STRUCTURES.attribute("lowrank")
    residual = property(_residual, doc="‖H U − U Λ‖ / ‖Λ‖ of the eigenpairs (U, Λ); 0 if they are exact.")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | LikelihoodName,
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
        backend_kwargs, structure_kwargs = rank_of_older_scripts(backend_kwargs, structure_kwargs)
        bind(self, locals())


class EkfacLaplace(ParametricLaplace):
    """All weights, the exact diagonal of the curvature in the eigenbasis of its Kronecker factors (EK-FAC)."""

    _key = ("all", "ekfac")
    structure = STRUCTURES.attribute("ekfac")


class LowRankKronLaplace(ParametricLaplace):
    """All weights, the k dominant eigenvectors of the Kronecker factors plus the exact diagonal of the curvature.

    k is `structure_kwargs={"rank": k}`. With `"corrected": True` the eigenvectors are chosen by the exact diagonal of
    the curvature in their basis (Lee et al., 2020).
    """

    _key = ("all", "lowrank_kron")
    structure = STRUCTURES.attribute("lowrank_kron")


class OfLastLayer:
    """The attributes of every posterior over a last layer.

    Args:
        feature_reduction: How the features of a sequence, `[B, T, D]`, become `[B, D]`: `"pick_first"`, `"pick_last"`
            or `"average"`; None if the model does that itself.
        last_layer_name: Name of the last layer, linear or convolutional; None to determine it at `fit`.
    """

    weights_type = LastLayer
    last_layer_name = property(attrgetter("weights.name"), doc="Name of the last layer; None while it is not known.")
    feature_reduction = property(attrgetter("weights.reduction"), doc="The `feature_reduction` that was given.")


class LLLaplace(OfLastLayer, ParametricLaplace):
    """Base of the posteriors over the last layer, which is determined at `fit` unless `last_layer_name` is given."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | LikelihoodName,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        enable_backprop: bool = False,
        feature_reduction: FeatureReductionName | None = None,
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
        refuse_asdl_kwargs(asdl_fisher_kwargs)
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
        likelihood: Likelihood | LikelihoodName,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        enable_backprop: bool = False,
        feature_reduction: FeatureReductionName | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: Backend = None,
        last_layer_name: str | None = None,
        damping: DampingForm = False,
        backend_kwargs: Options = None,
        asdl_fisher_kwargs: Options = None,
        *,
        forward_fn: ForwardFn | None = None,
        channel_dim: int | None = None,
    ) -> None:
        refuse_asdl_kwargs(asdl_fisher_kwargs)
        bind(self, locals())


class DiagLLLaplace(LLLaplace, DiagLaplace):
    """The last layer, diagonal curvature."""

    _key = ("last_layer", "diag")


class BlockLLLaplace(LLLaplace, BlockLaplace):
    """The last layer, an exact dense block: the same as the full curvature, if the head is one module."""

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
    """Base of the posteriors over a subnetwork: chosen single weights are random, all others keep their trained values.

    Args:
        subnetwork_indices: Indices of the random weights in the flattened trainable parameters, `[p]`, int64, distinct.
            The masks of `laplace.utils` compute them.
        damping: As in `KronLaplace`, with `hessian_structure="kron"`.
    """

    weights_type = Subnetwork
    subnetwork_indices = property(
        attrgetter("weights.indices"), doc="Indices of the random weights, as they were given, `[p]`."
    )
    n_params_subnet = property(attrgetter("n_params"), doc="Number of random weights, p.")
    mean_subnet = property(attrgetter("mean"), doc="Trained values θ* of the random weights, `[p]`.")
    assemble_full_samples = property(
        attrgetter("weights.embed"), doc="Function from samples `[S, p]` to samples of all trainable parameters."
    )
    damping = property(lambda la: la.precision_options["damping"], doc="The `damping` that was given, or False.")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | LikelihoodName,
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
        damping: DampingForm = False,
        forward_fn: ForwardFn | None = None,
        structure_kwargs: Options = None,
        channel_dim: int | None = None,
    ) -> None:
        refuse_asdl_kwargs(asdl_fisher_kwargs)
        if damping and self.structure is not STRUCTURES["kron"]:
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
