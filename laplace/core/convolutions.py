"""Convolutions of PyTorch that multiply faster than its matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.core.checks import numbers_are_known

_VECTOR = 16
"""Channels that a kernel takes at once: of other numbers it takes longer than a matrix product."""

_SUMMED = 64
"""Terms of a sum from which on a kernel repays that it lays out the sums anew."""


def are_fast(x: Tensor, n_terms: int, *channels: int) -> bool:
    """True if gradients of a convolution's weight, sums of products, take less time than matrix products of the same.

    That holds of PyTorch's float32 kernels on x86, which read every number from a cache and know the widest vectors of
    a processor. The others, of which some are slow, are not asked.

    Args:
        x: Images, or gradients of the convolution's outputs.
        n_terms: Positions that every sum is over.
        channels: Numbers of channels, of a group.
    """
    x86 = torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available()
    x86 = x86 and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    known = x86 and x.device.type == "cpu" and x.dtype == torch.float32 and numbers_are_known()
    return known and n_terms >= _SUMMED and all(n % _VECTOR == 0 for n in channels)
