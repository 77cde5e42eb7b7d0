"""Arguments of `Laplace(...)` as type checkers and editors see them; nothing here is read at run time.

One name of every axis, as a string or a member of its enum, and the further arguments of the class that the names
choose. Strings in general are none of them: a misspelt one is found before the program runs. Tests compare all of it
with the constructors and the registries.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from torch import Tensor

from laplace.base import Backend, Options
from laplace.core.batch import ForwardFn, Inputs
from laplace.enums import FamilyName, FeatureReductionName, LikelihoodName, StructureName, WeightsName
from laplace.enums import FunctionalApproximation as F
from laplace.enums import HessianStructure as H
from laplace.enums import SubsetOfWeights as S
from laplace.likelihoods.base import Likelihood
from laplace.structures.base import Curvature
from laplace.structures.damping import DampingForm
from laplace.weights.base import Weights

AnyLikelihood = Likelihood | LikelihoodName
AnyWeights = WeightsName | type[Weights]
AnyStructure = StructureName | type[Curvature]
AnyFamily = FamilyName | type[Curvature]

# One value of an axis.

All = Literal["all", S.ALL]
Last = Literal["last_layer", S.LAST_LAYER]
Sub = Literal["subnetwork", S.SUBNETWORK]

Full = Literal["full", H.FULL]
Kron = Literal["kron", H.KRON]
Diag = Literal["diag", H.DIAG]
Block = Literal["block", H.BLOCK]
LowRank = Literal["lowrank", H.LOWRANK]
Ekfac = Literal["ekfac", H.EKFAC]
LowRankKron = Literal["lowrank_kron", H.LOWRANK_KRON]
MatrixFree = Literal["matrix_free", H.MATRIX_FREE]
GP = Literal["gp", H.GP]

Sod = Literal["sod", F.SOD]
Nystrom = Literal["nystrom", F.NYSTROM]
Variational = Literal["variational", F.VARIATIONAL]

# Further arguments of the classes.


class Common(TypedDict, total=False):
    """Arguments of every class."""

    sigma_noise: float | Tensor
    prior_precision: float | Tensor
    prior_mean: float | Tensor
    temperature: float | Tensor
    enable_backprop: bool
    dict_key_x: str
    dict_key_y: str
    backend: Backend
    backend_kwargs: Options
    forward_fn: ForwardFn | None


class OfHead(TypedDict, total=False):
    """Arguments that choose a last layer."""

    feature_reduction: FeatureReductionName | None
    last_layer_name: str | None


class OfFull(Common, total=False):
    """Arguments of `FullLaplace` and `LowRankLaplace`."""

    structure_kwargs: Options
    channel_dim: int | None


class OfAll(OfFull, total=False):
    """Arguments of the other classes of all weights."""

    asdl_fisher_kwargs: Options
    weights_options: Options
    precision_options: Options


class OfKron(Common, total=False):
    """Arguments of `KronLaplace`."""

    damping: DampingForm
    asdl_fisher_kwargs: Options
    channel_dim: int | None


class OfKronLast(OfKron, OfHead, total=False):
    """Arguments of `KronLLLaplace`."""


class OfLast(OfFull, OfHead, total=False):
    """Arguments of the other classes of a last layer."""

    asdl_fisher_kwargs: Options


class Entries(TypedDict):
    """The argument that chooses a subnetwork."""

    subnetwork_indices: Tensor


class OfSub(OfKron, Entries, total=False):
    """Arguments of the classes of a subnetwork."""

    structure_kwargs: Options


class Subset(TypedDict):
    """The size of a subset of the data."""

    n_subset: int


class OfSod(Common, Subset, total=False):
    """Arguments of `FunctionalLaplace`."""

    independent_outputs: bool
    seed: int
    selection: Literal["random", "top", "leverage"]
    prior_factor: float | None


class OfSodLast(OfSod, OfHead, total=False):
    """Arguments of `FunctionalLLLaplace`."""


class Directions(TypedDict):
    """The numbers of data and of directions of a Nyström approximation."""

    subsample_size: int
    n_eigenvalues: int


class OfNystrom(Common, Directions, total=False):
    """Arguments of `ELLA`."""

    seed: int


class OfNystromLast(OfNystrom, OfHead, total=False):
    """Arguments of `LLELLA`."""


class Locations(TypedDict):
    """The inputs at which a variational posterior is represented."""

    inducing_locations: Inputs | Literal["random", "kmeans"]


class OfVariationalLast(Common, OfHead, Locations, total=False):
    """Arguments of `LLVaLLA`."""

    num_inducing: int | None
    inducing_classes: Tensor | None
    seed: int
    alpha: float
    mc_softmax_samples: int


class OfVariational(Common, Locations, total=False):
    """Arguments of `VaLLA`."""

    num_inducing: int | None
    inducing_classes: Tensor | None
    seed: int
    alpha: float
    mc_softmax_samples: int
    weights_options: Options
