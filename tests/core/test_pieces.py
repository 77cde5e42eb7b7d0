"""How much is computed at once: what a cache holds on a CPU, what memory holds elsewhere."""

from __future__ import annotations

import pytest
import torch

from laplace.core import pieces

CPU, CARD = torch.device("cpu"), torch.device("xpu")
"""Operations are dear on every device but a CPU, also where nobody says how much memory it has."""


def test_a_cpu_takes_what_stays_in_its_cache() -> None:
    assert not pieces.operations_are_dear(CPU) and not pieces.operations_are_dear(torch.device("meta"))
    assert pieces.numbers_at_once(1000, CPU) == pieces.bytes_at_once(1000, CPU) == 1000
    assert pieces.share_of_memory(1000, CPU) == 1000


def test_elsewhere_pieces_are_large() -> None:
    assert pieces.operations_are_dear(CARD)
    assert pieces.numbers_at_once(1000, CARD) == 2**26 and pieces.bytes_at_once(1000, CARD) == 2**29


def test_pieces_grow_with_the_memory_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "total_memory", lambda device: 512 * 2**27)
    assert pieces.numbers_at_once(1000, CARD) == 2**27
    assert pieces.share_of_memory(1000, CARD) == 512 * 2**27 // 6
