"""The objects that a posterior makes on first use, which every setting of its hyper-parameters shares."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from laplace.curvature import CurvatureInterface
from laplace.engines.engine import CurvatureEngine
from laplace.structures.base import Curvature, Precision


class Derived:
    """The one mutable part of a posterior: nothing in it is a fact that could not be computed again.

    Attributes:
        backend: The curvature backend as users call it, or None.
        engine: What computes Jacobians and curvature, or None.
    """

    def __init__(self, engine: CurvatureEngine | None = None) -> None:
        self.backend: CurvatureInterface | None = None
        self.engine = engine
        self._latest: _Latest | None = None

    def precision(self, curvature: Curvature, values: tuple[Tensor, ...], make: Callable[[], Precision]) -> Precision:
        """The precision of a curvature at some hyper-parameters, made anew where they are not those of the last one.

        Only one is kept, and it is let go before another is made: there are never two factorisations.

        Args:
            curvature: H.
            values: The hyper-parameters.
            make: Makes the precision.
        """
        latest = self._latest
        if latest is None or not latest.is_of(curvature, values):
            self._latest = latest = None
            self._latest = latest = _Latest(curvature, values, make())
        return latest.precision


class _Latest:
    """A precision, with all that it was made of."""

    def __init__(self, curvature: Curvature, values: tuple[Tensor, ...], precision: Precision) -> None:
        self.curvature = curvature
        self.values = tuple((value, _version(value)) for value in values)
        self.precision = precision

    def is_of(self, curvature: Curvature, values: tuple[Tensor, ...]) -> bool:
        """True if it is the precision of this curvature at these values."""
        return self.curvature is curvature and all(
            _version(mine) == version and (mine is value or (mine.shape == value.shape and bool((mine == value).all())))
            for (mine, version), value in zip(self.values, values, strict=True)
        )


def _version(tensor: Tensor) -> int:
    """Number of times that a tensor was written to; tensors of inference mode are not counted."""
    return 0 if tensor.is_inference() else tensor._version
