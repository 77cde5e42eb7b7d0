"""Gaussian processes of linearised networks: posteriors by kernels between data."""
