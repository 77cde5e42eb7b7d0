"""Names of the axes, as string enums: members and plain strings are interchangeable everywhere."""

from __future__ import annotations

from enum import Enum


class _Name(str, Enum):
    """A string enum that prints as its value."""

    __str__ = str.__str__


class SubsetOfWeights(_Name):
    """Choices of the random coordinates among the parameters."""

    ALL = "all"
    LAST_LAYER = "last_layer"
    SUBNETWORK = "subnetwork"


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


class FunctionalApproximation(_Name):
    """Approximations of a function-space posterior."""

    SOD = "sod"
    NYSTROM = "nystrom"
    VARIATIONAL = "variational"


class Likelihood(_Name):
    """The likelihoods that have a name; objects of `laplace.likelihoods` are accepted as well."""

    REGRESSION = "regression"
    CLASSIFICATION = "classification"
    REWARD_MODELING = "reward_modeling"
    BERNOULLI = "bernoulli"
    POISSON = "poisson"
    HETEROSCEDASTIC = "heteroscedastic"


class PredType(_Name):
    """The predictive: linearised network (`glm`), sampled weights (`nn`) or Gaussian process (`gp`)."""

    GLM = "glm"
    NN = "nn"
    GP = "gp"


class LinkApprox(_Name):
    """Ways in which a Gaussian over the network's outputs becomes a distribution over targets."""

    MC = "mc"
    PROBIT = "probit"
    BRIDGE = "bridge"
    BRIDGE_NORM = "bridge_norm"
    DELTA = "delta"


class TuningMethod(_Name):
    """Methods that choose the prior precision; `CV` is the Laplace Redux paper's name of `gridsearch`."""

    MARGLIK = "marglik"
    GRIDSEARCH = "gridsearch"
    CV = "CV"
    EM = "em"


class PriorStructure(_Name):
    """Numbers of prior precisions: one, one per parameter tensor, one per parameter."""

    SCALAR = "scalar"
    DIAG = "diag"
    LAYERWISE = "layerwise"


class FeatureReduction(_Name):
    """Reductions of features with positions, `[B, T, D]`, to `[B, D]`."""

    PICK_FIRST = "pick_first"
    PICK_LAST = "pick_last"
    AVERAGE = "average"
