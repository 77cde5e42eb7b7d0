"""Curvature backends: who computes the numbers of a batch."""

from typing import TYPE_CHECKING

from laplace.core.lazy import attach

if TYPE_CHECKING:
    from laplace.curvature.asdl import AsdlEF, AsdlGGN, AsdlHessian, AsdlInterface
    from laplace.curvature.backpack import BackPackEF, BackPackGGN, BackPackInterface
    from laplace.curvature.curvlinops import CurvlinopsEF, CurvlinopsGGN, CurvlinopsHessian, CurvlinopsInterface
    from laplace.curvature.interface import (
        CurvatureInterface,
        EFInterface,
        GGNInterface,
        NativeEF,
        NativeGGN,
        NativeHessian,
    )
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "laplace.curvature.asdl": "AsdlEF AsdlGGN AsdlHessian AsdlInterface",
            "laplace.curvature.backpack": "BackPackEF BackPackGGN BackPackInterface",
            "laplace.curvature.curvlinops": "CurvlinopsEF CurvlinopsGGN CurvlinopsHessian CurvlinopsInterface",
            "laplace.curvature.interface": (
                "CurvatureInterface EFInterface GGNInterface NativeEF NativeGGN NativeHessian"
            ),
        },
    )

__all__ = [
    "CurvatureInterface", "EFInterface", "GGNInterface", "NativeEF", "NativeGGN", "NativeHessian",
    "CurvlinopsInterface", "CurvlinopsGGN", "CurvlinopsEF", "CurvlinopsHessian",
    "BackPackInterface", "BackPackGGN", "BackPackEF", "AsdlInterface", "AsdlGGN", "AsdlEF", "AsdlHessian",
]  # fmt: skip
