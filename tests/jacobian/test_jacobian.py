"""Jacobians: data that are grouped, of several chunks, and their states."""

from __future__ import annotations

import pytest
import torch

from laplace.errors import StateError
from laplace.jacobian.blocks import (
    DenseBlock,
    from_state,
)
from laplace.jacobian.jacobian import GroupedBlock, block_kernel
from tests.jacobian.test_blocks import BLOCKS, B, check, check_contractions, draw, lazy
from tests.reference.compare import assert_close


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "mapped"])  # whose bound is that of a rotation
def test_groups_are_data_with_the_outputs_of_their_rows(name: str) -> None:
    whole = BLOCKS[name]()
    truth = torch.cat([whole.dense()[:, 0::2], whole.dense()[:, 1::2]])  # the first rows of both groups, and the second
    block = GroupedBlock(whole, 2)
    check_contractions(block, truth)
    check_contractions(block.cast(torch.float64), truth)
    check_contractions(block.at(slice(1, 2)), truth[:, 1:])
    check_contractions(block.at(torch.tensor([1, 0, 1])), truth[:, [1, 0, 1]])
    for other in (whole, DenseBlock(whole.dense())):
        kernel = torch.einsum("kbp,lmp->kblm", truth, other.dense())
        assert_close(block_kernel(block, other), kernel, "algebra")
        assert_close(block_kernel(other, block), kernel.permute(2, 3, 0, 1), "algebra")


def test_cotangents_of_several_chunks_are_joined_whether_they_are_held_or_not() -> None:
    """The last chunk of a fallback may be small enough to be held where the ones before it are not."""
    block, last = lazy(), DenseBlock(draw(1, B, 7))
    joined = block.join([last])
    truth = torch.cat([block.dense(), last.values])
    check(joined.at(slice(None)), truth)
    assert_close(joined.at(slice(1, 3)).dense(), truth[:, 1:3], "algebra")


def test_a_state_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(StateError, match="'unheard'"):
        from_state({"kind": "unheard"})
