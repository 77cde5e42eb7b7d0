"""The one place that decides how much is computed at once, which depends on where.

A CPU is fast on pieces that stay in its caches from one operation to the next, and an operation costs it little. On any
other device an operation costs 5 to 40 µs however little it does, its caches are emptied by the next one, and thousands
of its processors wait while a piece is small: pieces are as large as memory allows, and work is preferred that takes
few operations.
"""

from __future__ import annotations

from functools import cache

import torch

_CHEAP = frozenset({"cpu", "meta"})
"""Types of devices on which an operation costs little; on the meta device there are only shapes."""

_NUMBERS = 2**26
"""Numbers of a piece where operations are dear: what is computed of them takes many times what it takes to begin."""


def operations_are_dear(device: torch.device) -> bool:
    """True if an operation takes longer to begin than many numbers take to compute."""
    return device.type not in _CHEAP


@cache
def total_memory(device: torch.device) -> int:
    """Bytes of a card, whatever is free of them now; 0 where nobody says."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def share_of_memory(least: int, device: torch.device) -> int:
    """Bytes that a batch may hold at once: those that a CPU holds, or a sixth of a card.

    Results do not depend on what else is held there, and where there is no room for so much less is tried.
    """
    return max(least, total_memory(device) // 6)


def numbers_at_once(in_cache: int, device: torch.device) -> int:
    """Numbers of a piece on a device, of which a CPU is given as many as stay `in_cache`."""
    return max(in_cache, _numbers(device)) if operations_are_dear(device) else in_cache


def bytes_at_once(in_cache: int, device: torch.device) -> int:
    """The same in bytes, of numbers in float64."""
    return max(in_cache, 8 * _numbers(device)) if operations_are_dear(device) else in_cache


def _numbers(device: torch.device) -> int:
    return max(_NUMBERS, total_memory(device) // 512)
