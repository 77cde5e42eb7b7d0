"""The bases of all posteriors, with every class that the library derives from them, for `__subclasses__()`."""

from __future__ import annotations

from laplace import matrix_free, named
from laplace.base import BaseLaplace
from laplace.function_space import named as over_functions
from laplace.function_space import variational_named
from laplace.function_space.base import BaseFunctionalLaplace
from laplace.parametric import ParametricLaplace

__all__ = [
    "BaseFunctionalLaplace",
    "BaseLaplace",
    "ParametricLaplace",
    "matrix_free",
    "named",
    "over_functions",
    "variational_named",
]
