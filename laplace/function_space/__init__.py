"""Posteriors over functions: Gaussian processes of the linearised network on a subset of the data, and their kin."""

from laplace.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "laplace.grid": "ELLA LLELLA BaseFunctionalLaplace FunctionalLaplace FunctionalLLLaplace LLVaLLA VaLLA",
        "laplace.jacobian.jacobian": "kernel",
        "laplace.structures": "FAMILIES",
    },
)
