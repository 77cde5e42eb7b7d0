"""Curvature engines: the primitives that structures ask for, and their computation by this library."""
