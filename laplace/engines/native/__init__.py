"""The native curvature backend: factors captured by hooks, proven by a probe, contracted by structures."""
