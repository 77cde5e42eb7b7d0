"""Curvature backends: who computes the numbers of a batch."""

from laplace.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "laplace.curvature.asdl": "AsdlEF AsdlGGN AsdlHessian AsdlInterface",
        "laplace.curvature.backpack": "BackPackEF BackPackGGN BackPackInterface",
        "laplace.curvature.curvlinops": "CurvlinopsEF CurvlinopsGGN CurvlinopsHessian CurvlinopsInterface",
        "laplace.curvature.interface": "CurvatureInterface EFInterface GGNInterface NativeEF NativeGGN NativeHessian",
    },
)
