"""Refinement of the linearised model (Immer et al., 2021, appendix A.3.2): its mode, or a variational Gaussian."""
