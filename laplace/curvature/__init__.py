"""Curvature backends: who computes the numbers of a batch."""

from laplace.curvature.interface import CurvatureInterface
from laplace.curvature.native import NativeEF, NativeGGN

__all__ = ["CurvatureInterface", "NativeEF", "NativeGGN"]
