"""Curvature that may be indefinite: what becomes of directions in which the loss curves downwards.

P = s·H + δ must be positive definite, H need not be. At weights that are no minimum the exact Hessian has negative
eigenvalues; a prior that exceeds them gives a proper posterior all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.errors import CurvatureError, InvalidArgument

MODES = ("error", "clamp", "abs")

_ROUNDING = 10
"""Eigenvalues up to so many units of rounding of the largest one are zero."""


@dataclass(frozen=True)
class SignedOptions:
    """Options of structures that can hold an indefinite curvature.

    Attributes:
        indefinite: What is done about negative eigenvalues of the exact Hessian: `"error"` refuses a posterior whose
            precision is not positive definite, `"clamp"` replaces them by zero, `"abs"` by their absolute value
            (Dauphin et al., 2014). With terms of several noises each term's eigenvalues are meant. Not read with
            positive semi-definite curvature (GGN, empirical Fisher).

    Raises:
        InvalidArgument: Another word.
    """

    indefinite: str = "error"

    def __post_init__(self) -> None:
        if self.indefinite not in MODES:
            raise InvalidArgument(f"indefinite={self.indefinite!r}; accepted are {', '.join(map(repr, MODES))}.")


def nonnegative(values: Tensor, mode: str) -> Tensor:
    """Eigenvalues `[..., n]` without negative ones, by `"clamp"` or `"abs"`."""
    return values.clamp(min=0) if mode == "clamp" else values.abs()


def without_rounding(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Eigenvalues `[..., n]` of a matrix that was summed in `dtype`: those that are zero but for rounding are zero."""
    floor = _ROUNDING * torch.finfo(dtype).eps * values.abs().amax(-1, keepdim=True) if values.shape[-1] else 0.0
    return torch.where(values.abs() > floor, values, 0.0)


def require_positive(values: Tensor, what: str = "eigenvalue") -> Tensor:
    """The eigenvalues of P, `[n]`, if P is positive definite.

    Args:
        values: They.
        what: What they are, for the message.

    Raises:
        CurvatureError: It is not.
    """
    negative = int((values <= 0).sum())
    if negative:
        raise CurvatureError(
            f"the posterior precision s·H + δ has {negative} directions that are not positive (smallest {what} "
            f"{values.min().item():.3g}) at this prior: the exact Hessian is indefinite here. Give a larger "
            "prior_precision, train the network to a minimum, pass structure_kwargs={'indefinite': 'clamp'} or "
            "{'indefinite': 'abs'}, or use backend=NativeGGN."
        )
    return values
