"""Names of the axes, as string enums: members and plain strings are interchangeable everywhere."""

from __future__ import annotations

from enum import Enum


class _Name(str, Enum):
    """A string enum that prints as its value."""

    def __str__(self) -> str:
        return str(self.value)


class SubsetOfWeights(_Name):
    """Which coordinates of the parameters are random."""

    ALL = "all"
    LAST_LAYER = "last_layer"
    SUBNETWORK = "subnetwork"


class HessianStructure(_Name):
    """Which shape the curvature has."""

    FULL = "full"
    KRON = "kron"
    DIAG = "diag"
    LOWRANK = "lowrank"
    BLOCK = "block"
    EKFAC = "ekfac"
    LOWRANK_KRON = "lowrank_kron"
    GP = "gp"


class FunctionalApproximation(_Name):
    """How a function-space posterior is approximated."""

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
    """How a Gaussian over the network's outputs becomes a distribution over targets."""

    MC = "mc"
    PROBIT = "probit"
    BRIDGE = "bridge"
    BRIDGE_NORM = "bridge_norm"
    DELTA = "delta"


class TuningMethod(_Name):
    """How the prior precision is chosen; `CV` is the Laplace Redux paper's name of `gridsearch`."""

    MARGLIK = "marglik"
    GRIDSEARCH = "gridsearch"
    CV = "CV"


class PriorStructure(_Name):
    """How many prior precisions there are: one, one per parameter tensor, one per parameter."""

    SCALAR = "scalar"
    DIAG = "diag"
    LAYERWISE = "layerwise"


class FeatureReduction(_Name):
    """How features with positions, `[B, T, D]`, become `[B, D]`."""

    PICK_FIRST = "pick_first"
    PICK_LAST = "pick_last"
    AVERAGE = "average"
