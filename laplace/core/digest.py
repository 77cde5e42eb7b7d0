"""Short digests of tensors, the same in every process."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor


def digest(tensors: Iterable[Tensor], *, before: str = "", most: int | None = None) -> str:
    """A digest of the shapes, dtypes and bytes of tensors.

    Args:
        tensors: On any device.
        before: Digest of what comes before them.
        most: Entries of a tensor that are looked at, evenly spaced; None for all.
    """
    total = hashlib.sha256(before.encode())
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        flat = flat if most is None else flat[:: _step(len(flat), most)]
        total.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        plain = flat.cpu().clone(memory_format=torch.contiguous_format)  # of one entry any stride counts as contiguous
        total.update(plain.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _step(size: int, most: int) -> int:
    """From one entry to the next, of so many at most: coprime to the size, or some images' borders alone are met."""
    step = max(1, -(-size // most))
    while math.gcd(step, size) > 1:
        step += 1
    return step
