"""Laplace approximations of neural networks: a trained PyTorch model becomes a Bayesian one.

Names and submodules are imported when they are first read.
"""

from typing import TYPE_CHECKING

from laplace.compat import finder as _finder
from laplace.compat import installation as _installation
from laplace.core import lazy as _lazy

_installation.check_installation()  # first: files of two packages may not go together
_finder.install()

if TYPE_CHECKING:
    from laplace.comparison import Comparison
    from laplace.enums import (
        FunctionalApproximation,
        HessianStructure,
        Likelihood,
        LinkApprox,
        PredType,
        PriorStructure,
        SubsetOfWeights,
        TuningMethod,
    )
    from laplace.grid import (
        ELLA,
        LLELLA,
        BaseFunctionalLaplace,
        BaseLaplace,
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
        FunctionalLaplace,
        FunctionalLLLaplace,
        KronLaplace,
        KronLLLaplace,
        KronSubnetLaplace,
        Laplace,
        LLLaplace,
        LLVaLLA,
        LowRankKronLaplace,
        LowRankKronLLLaplace,
        LowRankKronSubnetLaplace,
        LowRankLaplace,
        LowRankLLLaplace,
        LowRankSubnetLaplace,
        MatrixFreeLaplace,
        MatrixFreeLLLaplace,
        MatrixFreeSubnetLaplace,
        ParametricLaplace,
        SubnetLaplace,
        VaLLA,
    )
    from laplace.loading import load
    from laplace.mixture.mixture import MixtureLaplace
    from laplace.posterior.calibration import Calibration
    from laplace.predictive.prediction import Prediction
    from laplace.training.marglik import marglik_training
    from laplace.training.online import OnlineLaplace
else:
    __getattr__, __dir__ = _lazy.attach(
        __name__,
        {
            "laplace.comparison": "Comparison",
            "laplace.enums": (
                "FunctionalApproximation HessianStructure Likelihood LinkApprox PredType PriorStructure "
                "SubsetOfWeights TuningMethod"
            ),
            "laplace.loading": "load",
            "laplace.mixture.mixture": "MixtureLaplace",
            "laplace.grid": (
                "Laplace BaseFunctionalLaplace BaseLaplace ParametricLaplace "
                "ELLA LLELLA FunctionalLaplace FunctionalLLLaplace LLVaLLA VaLLA "
                "MatrixFreeLaplace MatrixFreeLLLaplace MatrixFreeSubnetLaplace "
                "BlockLaplace BlockLLLaplace BlockSubnetLaplace DiagLaplace DiagLLLaplace DiagSubnetLaplace "
                "EkfacLaplace EkfacLLLaplace EkfacSubnetLaplace FullLaplace FullLLLaplace FullSubnetLaplace "
                "KronLaplace KronLLLaplace KronSubnetLaplace LLLaplace LowRankKronLaplace LowRankKronLLLaplace "
                "LowRankKronSubnetLaplace LowRankLaplace LowRankLLLaplace LowRankSubnetLaplace SubnetLaplace"
            ),
            "laplace.posterior.calibration": "Calibration",
            "laplace.predictive.prediction": "Prediction",
            "laplace.training.marglik": "marglik_training",
            "laplace.training.online": "OnlineLaplace",
        },
    )

__version__ = "0.1.0"

__all__ = [
    "ELLA",
    "LLELLA",
    "BaseFunctionalLaplace",
    "BaseLaplace",
    "BlockLLLaplace",
    "BlockLaplace",
    "BlockSubnetLaplace",
    "Calibration",
    "Comparison",
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
