"""Curvature backends: who computes the numbers of a batch."""

from laplace.curvature.interface import CurvatureInterface, EFInterface, GGNInterface
from laplace.curvature.native_backends import NativeEF, NativeGGN, NativeHessian

__all__ = ["CurvatureInterface", "EFInterface", "GGNInterface", "NativeEF", "NativeGGN", "NativeHessian"]
