"""Names of the axes, as string enums: members and plain strings are interchangeable everywhere.

Beside each enum stands the type of what is accepted for it, `…Name`: a member, or one of the strings. Names that users
register are accepted as well, but no type checker knows them: docs/practice.md says how such code is typed.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal


class _Name(str, Enum):
    """A string enum that prints as its value."""

    __str__ = str.__str__


class SubsetOfWeights(_Name):
    """Choices of the random coordinates among the parameters."""

    ALL = "all"
    LAST_LAYER = "last_layer"
    SUBNETWORK = "subnetwork"


WeightsName = SubsetOfWeights | Literal["all", "last_layer", "subnetwork"]


class HessianStructure(_Name):
    """Shapes of the curvature."""

    FULL = "full"
    KRON = "kron"
    DIAG = "diag"
    LOWRANK = "lowrank"
    BLOCK = "block"
    EKFAC = "ekfac"
    LOWRANK_KRON = "lowrank_kron"
    MATRIX_FREE = "matrix_free"
    GP = "gp"


StructureName = (
    HessianStructure | Literal["full", "kron", "diag", "lowrank", "block", "ekfac", "lowrank_kron", "matrix_free", "gp"]
)


class FunctionalApproximation(_Name):
    """Approximations of a function-space posterior."""

    SOD = "sod"
    NYSTROM = "nystrom"
    VARIATIONAL = "variational"


FamilyName = FunctionalApproximation | Literal["sod", "nystrom", "variational"]


class Likelihood(_Name):
    """The likelihoods that have a name; objects of `laplace.likelihoods` are accepted as well."""

    REGRESSION = "regression"
    CLASSIFICATION = "classification"
    REWARD_MODELING = "reward_modeling"
    BERNOULLI = "bernoulli"
    POISSON = "poisson"
    HETEROSCEDASTIC = "heteroscedastic"


LikelihoodName = (
    Likelihood | Literal["regression", "classification", "reward_modeling", "bernoulli", "poisson", "heteroscedastic"]
)


class PredType(_Name):
    """The predictive: linearised network (`glm`), sampled weights (`nn`) or Gaussian process (`gp`)."""

    GLM = "glm"
    NN = "nn"
    GP = "gp"


PredTypeName = PredType | Literal["glm", "nn", "gp"]


class LinkApprox(_Name):
    """Ways in which a Gaussian over the network's outputs becomes a distribution over targets."""

    MC = "mc"
    PROBIT = "probit"
    BRIDGE = "bridge"
    BRIDGE_NORM = "bridge_norm"
    DELTA = "delta"


LinkName = LinkApprox | Literal["mc", "probit", "bridge", "bridge_norm", "delta"]


class TuningMethod(_Name):
    """Methods that choose the prior precision; `CV` is the Laplace Redux paper's name of `gridsearch`."""

    MARGLIK = "marglik"
    GRIDSEARCH = "gridsearch"
    CV = "CV"
    EM = "em"


TuningMethodName = TuningMethod | Literal["marglik", "gridsearch", "CV", "em"]


class PriorStructure(_Name):
    """Numbers of prior precisions: one, one per parameter tensor, one per parameter."""

    SCALAR = "scalar"
    DIAG = "diag"
    LAYERWISE = "layerwise"


PriorStructureName = PriorStructure | Literal["scalar", "diag", "layerwise"]


class FeatureReduction(_Name):
    """Reductions of features with positions, `[B, T, D]`, to `[B, D]`."""

    PICK_FIRST = "pick_first"
    PICK_LAST = "pick_last"
    AVERAGE = "average"


FeatureReductionName = FeatureReduction | Literal["pick_first", "pick_last", "average"]
