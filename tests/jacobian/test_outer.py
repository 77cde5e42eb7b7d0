"""Outer products over positions: which entries are gathered, and positions as data."""

from __future__ import annotations

import pytest
import torch

from laplace.jacobian.blocks import (
    PickedBlock,
)
from tests.jacobian.test_blocks import BLOCKS, B, check_contractions, outer
from tests.reference.compare import assert_close


@pytest.mark.parametrize("name", ["positions", "groups", "input first", "embedding", "picked"])
def test_positions_as_data(name: str) -> None:
    block = PickedBlock(outer(2), torch.tensor([1, 4])) if name == "picked" else BLOCKS[name]()
    n_positions = {"positions": 3, "embedding": 5}.get(name, 2)
    folded = block.fold_positions(n_positions)
    assert folded is not None
    assert (folded.n_data, folded.size) == (B * n_positions, block.size)
    summed = folded.dense().unflatten(1, (B, n_positions)).sum(2)
    assert_close(summed, block.dense(), "algebra")
    check_contractions(folded, folded.dense())
    assert block.fold_positions(n_positions + 1) is None


def test_few_entries_are_gathered_and_many_contracted() -> None:
    whole = outer(1, inputs=40, outputs=30)
    assert PickedBlock(whole, torch.arange(2)).gathers
    assert not PickedBlock(whole, torch.arange(900)).gathers
    assert PickedBlock(outer(2, inputs=40, outputs=30), torch.arange(900)).gathers
