"""The native curvature backend: factors captured by hooks, proven by a probe, contracted by structures."""

from laplace.curvature.native.kinds import NativeEF, NativeGGN

__all__ = ["NativeEF", "NativeGGN"]
