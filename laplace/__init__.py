"""Laplace approximations of neural networks: a trained PyTorch model becomes a Bayesian one."""

from laplace.compat import finder as _finder
from laplace.compat import installation as _installation

_installation.check_installation()  # first: files of two packages may not go together
_finder.install()

from laplace.base import BaseLaplace  # noqa: E402
from laplace.enums import (  # noqa: E402
    FunctionalApproximation,
    HessianStructure,
    Likelihood,
    LinkApprox,
    PredType,
    PriorStructure,
    SubsetOfWeights,
    TuningMethod,
)
from laplace.factory import Laplace  # noqa: E402
from laplace.function_space import (  # noqa: E402
    ELLA,
    LLELLA,
    BaseFunctionalLaplace,
    FunctionalLaplace,
    FunctionalLLLaplace,
    LLVaLLA,
    VaLLA,
)
from laplace.loading import load  # noqa: E402
from laplace.matrix_free import (  # noqa: E402
    MatrixFreeLaplace,
    MatrixFreeLLLaplace,
    MatrixFreeSubnetLaplace,
)
from laplace.mixture import MixtureLaplace  # noqa: E402
from laplace.named import (  # noqa: E402
    BlockLaplace,
    BlockLLLaplace,
    BlockSubnetLaplace,
    DiagLaplace,
    DiagLLLaplace,
    DiagSubnetLaplace,
    EkfacLaplace,
    EkfacLLLaplace,
    EkfacSubnetLaplace,
    FullLaplace,
    FullLLLaplace,
    FullSubnetLaplace,
    KronLaplace,
    KronLLLaplace,
    KronSubnetLaplace,
    LLLaplace,
    LowRankKronLaplace,
    LowRankKronLLLaplace,
    LowRankKronSubnetLaplace,
    LowRankLaplace,
    LowRankLLLaplace,
    LowRankSubnetLaplace,
    SubnetLaplace,
)
from laplace.parametric import ParametricLaplace  # noqa: E402
from laplace.predictive.prediction import Prediction  # noqa: E402
from laplace.training import OnlineLaplace, marglik_training  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "ELLA",
    "LLELLA",
    "BaseFunctionalLaplace",
    "BaseLaplace",
    "BlockLLLaplace",
    "BlockLaplace",
    "BlockSubnetLaplace",
    "DiagLLLaplace",
    "DiagLaplace",
    "DiagSubnetLaplace",
    "EkfacLLLaplace",
    "EkfacLaplace",
    "EkfacSubnetLaplace",
    "FullLLLaplace",
    "FullLaplace",
    "FullSubnetLaplace",
    "FunctionalApproximation",
    "FunctionalLLLaplace",
    "FunctionalLaplace",
    "HessianStructure",
    "KronLLLaplace",
    "KronLaplace",
    "KronSubnetLaplace",
    "LLLaplace",
    "LLVaLLA",
    "Laplace",
    "Likelihood",
    "LinkApprox",
    "OnlineLaplace",
    "LowRankKronLLLaplace",
    "LowRankKronLaplace",
    "LowRankKronSubnetLaplace",
    "LowRankLLLaplace",
    "LowRankLaplace",
    "LowRankSubnetLaplace",
    "MatrixFreeLLLaplace",
    "MatrixFreeLaplace",
    "MatrixFreeSubnetLaplace",
    "MixtureLaplace",
    "ParametricLaplace",
    "PredType",
    "Prediction",
    "PriorStructure",
    "SubnetLaplace",
    "SubsetOfWeights",
    "TuningMethod",
    "VaLLA",
    "load",
    "marglik_training",
]
