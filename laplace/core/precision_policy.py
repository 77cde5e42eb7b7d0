"""The one place that decides in which type sums are formed and matrices are factorised: float64 where there is one.

A posterior variance is a difference of nearly equal numbers, and the root of a covariance turns a relative error ε into
√ε, so that what is summed or factorised is widened first, and narrowed again where it is held. Devices without float64,
Apple's MPS, do with float32; numbers on the CPU are float64 for any of them.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

WITHOUT_FLOAT64 = frozenset({"mps"})
"""Types of devices that have no float64."""


def wide_dtype(device: torch.device | str | None = None) -> torch.dtype:
    """The widest floating-point type of a device; None is the CPU."""
    kind = "cpu" if device is None else torch.device(device).type
    return torch.float32 if kind in WITHOUT_FLOAT64 else torch.float64


def widened(tensor: Tensor) -> Tensor:
    """The tensor in the widest type of its device; itself if it has that type."""
    return tensor.to(wide_dtype(tensor.device))


_FAST_FLOAT64 = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)})
"""Compute capabilities of cards with a float64 unit for every two of float32; the others have one for 32 or 64."""


def has_fast_float64(device: torch.device) -> bool:
    """Whether products in float64 take no more than about twice the time of those in float32."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in _FAST_FLOAT64


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type in which rows of a type are multiplied for a sum over batches, which itself is in the widest one.

    On cards whose float64 is slow it is that of the rows, or float32: the rounding of a batch's products remains.
    """
    return wide_dtype(device) if has_fast_float64(device) else torch.promote_types(dtype, torch.float32)


def held_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type in which numbers of a type are held on a device: float64 only where there is one."""
    return wide_dtype(device) if dtype == torch.float64 else dtype


_ROOT_ERROR = 1e-5
"""Relative error of a variance, at most, that is a sum of squares of products in a type narrower than float64."""


EIGENBASIS_ERROR = 1e-3
"""The same where outputs are rotated into an eigenbasis: most rows are far from the bound."""


def root_dtype(
    dtype: torch.dtype, largest: float, smallest: float, device: torch.device, error: float = _ROOT_ERROR
) -> torch.dtype:
    """The type of products v = L φ with a root L of P⁻¹ of which variances are the squares |v|².

    Rounding is ε |L| |φ| ≤ ε |φ| / √λmin, and |v| ≥ |φ| / √λmax, so that the relative error is ε √(λmax / λmin): the
    square root of what is lost in φᵀ P⁻¹ φ.

    Args:
        dtype: Of the posterior: the type, where it is precise enough.
        largest: λmax of P.
        smallest: λmin of P.
        device: Where the products are formed.
        error: The relative error that is allowed.
    """
    precise = smallest > 0 and torch.finfo(dtype).eps * (largest / smallest) ** 0.5 <= error
    return dtype if precise else wide_dtype(device)


def exponent_share(dtype: torch.dtype) -> float:
    """Share of float64's exponents that a type has: 1, and an eighth of float32; x ** share is in its range."""
    return math.log(torch.finfo(dtype).max) / math.log(sys.float_info.max)


def at_least_single(f: Tensor) -> torch.dtype:
    """At least float32, for numbers of a lower precision."""
    return torch.promote_types(f.dtype, torch.float32)
