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
    """Choices of the weights that are random under the posterior."""

    ALL = "all"
    """All trainable parameters."""
    LAST_LAYER = "last_layer"
    """The weights of the last layer; the layers below are a fixed feature map."""
    SUBNETWORK = "subnetwork"
    """Chosen single weights; all others keep their trained values."""


WeightsName = SubsetOfWeights | Literal["all", "last_layer", "subnetwork"]


class HessianStructure(_Name):
    """Approximations of the curvature matrix, by how much of it is kept."""

    FULL = "full"
    """The dense matrix, `[P, P]`."""
    KRON = "kron"
    """Kronecker factors, one pair per layer (K-FAC)."""
    DIAG = "diag"
    """The diagonal."""
    LOWRANK = "lowrank"
    """The dominant eigenpairs of the full matrix."""
    BLOCK = "block"
    """A dense block for every layer."""
    EKFAC = "ekfac"
    """The exact diagonal in the eigenbasis of the Kronecker factors (EK-FAC)."""
    LOWRANK_KRON = "lowrank_kron"
    """The dominant eigenvectors of the Kronecker factors plus the exact diagonal; for large networks and adapters."""
    MATRIX_FREE = "matrix_free"
    """The full matrix through matrix–vector products, never formed."""
    GP = "gp"
    """The same posterior in function space, as a Gaussian process."""


StructureName = (
    HessianStructure | Literal["full", "kron", "diag", "lowrank", "block", "ekfac", "lowrank_kron", "matrix_free", "gp"]
)


class FunctionalApproximation(_Name):
    """Approximations of a posterior over functions, with `hessian_structure="gp"`."""

    SOD = "sod"
    """A Gaussian process on a subset of the data."""
    NYSTROM = "nystrom"
    """The Nyström approximation of the kernel (ELLA)."""
    VARIATIONAL = "variational"
    """A sparse variational posterior with inducing points (VaLLA)."""


FamilyName = FunctionalApproximation | Literal["sod", "nystrom", "variational"]


class Likelihood(_Name):
    """Likelihoods by name; objects of `laplace.likelihoods` are accepted as well."""

    REGRESSION = "regression"
    """Gaussian noise σ around the outputs."""
    CLASSIFICATION = "classification"
    """Softmax over C classes; the outputs are logits."""
    REWARD_MODELING = "reward_modeling"
    """Bradley–Terry preferences between pairs; the output is a reward."""
    BERNOULLI = "bernoulli"
    """Independent binary labels; the outputs are logits."""
    POISSON = "poisson"
    """Counts; the outputs are log rates."""
    HETEROSCEDASTIC = "heteroscedastic"
    """Gaussian with an input-dependent variance, which the network predicts by natural parameters."""
    MEAN_LOG_VARIANCE = "mean_log_variance"
    """Gaussian whose mean and log variance are the outputs, as `nn.GaussianNLLLoss` trains them."""


LikelihoodName = (
    Likelihood
    | Literal[
        "regression",
        "classification",
        "reward_modeling",
        "bernoulli",
        "poisson",
        "heteroscedastic",
        "mean_log_variance",
    ]
)


class PredType(_Name):
    """Ways to predict from the posterior over weights."""

    GLM = "glm"
    """The linearised network: Gaussian outputs. The default."""
    NN = "nn"
    """The network at sampled weights."""
    GP = "gp"
    """The linearised network in function space, for `hessian_structure="gp"`."""


PredTypeName = PredType | Literal["glm", "nn", "gp"]


class LinkApprox(_Name):
    """Link approximations: from a Gaussian over the network's outputs to class probabilities."""

    MC = "mc"
    """Monte-Carlo samples of the outputs."""
    PROBIT = "probit"
    """Closed form: logits scaled by (1 + π/8 · variance)^(−1/2). The default."""
    PROBIT_CENTRED = "probit_centred"
    """The same of the logits less their mean, whose variances no common shift of all logits enters."""
    BRIDGE = "bridge"
    """Laplace bridge: a Dirichlet with matching Laplace approximation."""
    BRIDGE_NORM = "bridge_norm"
    """Laplace bridge after the variances are normalised."""
    DELTA = "delta"
    """Second-order expansion (delta method) of the softmax at the mean."""


LinkName = LinkApprox | Literal["mc", "probit", "probit_centred", "bridge", "bridge_norm", "delta"]


class TuningMethod(_Name):
    """Methods that choose the prior precision."""

    MARGLIK = "marglik"
    """Maximise the evidence (log marginal likelihood) by gradients."""
    GRIDSEARCH = "gridsearch"
    """Minimise a loss on validation data over a grid."""
    CV = "CV"
    """The same as `gridsearch`."""
    EM = "em"
    """Fixed-point iteration of the evidence."""


TuningMethodName = TuningMethod | Literal["marglik", "gridsearch", "CV", "em"]


class PriorStructure(_Name):
    """Shapes of the prior precision."""

    SCALAR = "scalar"
    """One number."""
    DIAG = "diag"
    """One per parameter."""
    LAYERWISE = "layerwise"
    """One per parameter tensor."""


PriorStructureName = PriorStructure | Literal["scalar", "diag", "layerwise"]


class FeatureReduction(_Name):
    """Reductions of the features of a sequence, `[B, T, D]`, to `[B, D]`."""

    PICK_FIRST = "pick_first"
    """Features of the first token."""
    PICK_LAST = "pick_last"
    """Features of the last token."""
    AVERAGE = "average"
    """Mean over all tokens."""


FeatureReductionName = FeatureReduction | Literal["pick_first", "pick_last", "average"]


DampingForm = bool | Literal["mean", "sum"]
"""Damping of Kronecker factors, `damping=`: none, as they are kept, or both √N times a mean, or both sums."""
