"""Curvature backends: who computes the numbers of a batch."""

from laplace.curvature.asdl import AsdlEF, AsdlGGN, AsdlHessian, AsdlInterface
from laplace.curvature.backpack import BackPackEF, BackPackGGN, BackPackInterface
from laplace.curvature.curvlinops import CurvlinopsEF, CurvlinopsGGN, CurvlinopsHessian, CurvlinopsInterface
from laplace.curvature.interface import CurvatureInterface, EFInterface, GGNInterface
from laplace.curvature.native_backends import NativeEF, NativeGGN, NativeHessian

__all__ = [
    "CurvatureInterface", "EFInterface", "GGNInterface", "NativeEF", "NativeGGN", "NativeHessian",
    "CurvlinopsInterface", "CurvlinopsGGN", "CurvlinopsEF", "CurvlinopsHessian",
    "BackPackInterface", "BackPackGGN", "BackPackEF", "AsdlInterface", "AsdlGGN", "AsdlEF", "AsdlHessian",
]  # fmt: skip
