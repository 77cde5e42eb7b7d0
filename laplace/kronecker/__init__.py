"""`Kron` and `KronDecomposed`: lists of Kronecker factors, as users' own backends make and read them."""

from laplace.kronecker.decomposed import KronDecomposed
from laplace.kronecker.matrix import Kron

__all__ = ["Kron", "KronDecomposed"]
