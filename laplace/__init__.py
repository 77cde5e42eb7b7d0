"""Laplace approximations of neural networks: a trained PyTorch model becomes a Bayesian one.

Names and submodules are imported when they are first read.
"""

from laplace.compat import paths as _paths
from laplace.core import lazy as _lazy
from laplace.core.extensions import EXTENSIONS as _EXTENSIONS

_paths.check_installation()  # first: files of two packages may not go together
_paths.install()

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = _lazy.attach(
    __name__,
    {
        **_EXTENSIONS,
        "laplace.comparison": "Comparison",
        "laplace.enums": (
            "FunctionalApproximation HessianStructure Likelihood LinkApprox PredType PriorStructure "
            "SubsetOfWeights TuningMethod"
        ),
        "laplace.grid": (
            "Laplace BaseFunctionalLaplace BaseLaplace ParametricLaplace ELLA LLELLA FunctionalLaplace "
            "FunctionalLLLaplace LLVaLLA VaLLA MatrixFreeLaplace MatrixFreeLLLaplace MatrixFreeSubnetLaplace "
            "BlockLaplace BlockLLLaplace BlockSubnetLaplace DiagLaplace DiagLLLaplace DiagSubnetLaplace "
            "EkfacLaplace EkfacLLLaplace EkfacSubnetLaplace FullLaplace FullLLLaplace FullSubnetLaplace "
            "KronLaplace KronLLLaplace KronSubnetLaplace LLLaplace LowRankKronLaplace LowRankKronLLLaplace "
            "LowRankKronSubnetLaplace LowRankLaplace LowRankLLLaplace LowRankSubnetLaplace SubnetLaplace"
        ),
        "laplace.loading": "load",
        "laplace.mixture.mixture": "MixtureLaplace",
        "laplace.posterior.calibration": "Calibration",
        "laplace.predictive.prediction": "Prediction",
        "laplace.training.online": "OnlineLaplace marglik_training",
    },
)
