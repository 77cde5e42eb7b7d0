"""`Kron` and `KronDecomposed`: lists of Kronecker factors, as users' own backends make and read them."""

from laplace.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "laplace.compat.kronecker.decomposed": "KronDecomposed",
        "laplace.compat.kronecker.matrix": "Kron",
    },
)
