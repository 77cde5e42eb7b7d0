"""`Kron` and `KronDecomposed`: lists of Kronecker factors, as users' own backends make and read them."""

from laplace.compat.kronecker.decomposed import KronDecomposed
from laplace.compat.kronecker.matrix import Kron

__all__ = ["Kron", "KronDecomposed"]
