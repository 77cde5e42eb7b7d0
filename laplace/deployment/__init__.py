"""Predictions as plain modules of PyTorch, for programs that have no Laplace approximation."""
