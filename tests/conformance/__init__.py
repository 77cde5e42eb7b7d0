"""Every structure × choice of weights × likelihood × kind of curvature against the dense truth."""
