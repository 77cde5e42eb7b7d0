"""`Kron` and `KronDecomposed`: lists of Kronecker factors, as users' own backends make and read them."""

from typing import TYPE_CHECKING

from laplace.core.lazy import attach

if TYPE_CHECKING:
    from laplace.compat.kronecker.decomposed import KronDecomposed
    from laplace.compat.kronecker.matrix import Kron
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "laplace.compat.kronecker.decomposed": "KronDecomposed",
            "laplace.compat.kronecker.matrix": "Kron",
        },
    )

__all__ = ["Kron", "KronDecomposed"]
