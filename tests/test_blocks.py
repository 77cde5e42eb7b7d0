"""Entries of blocks of factors: gathered where they are few, contracted with zeros elsewhere where they are many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laplace.curvature.blocks import Block, DenseBlock, PickedBlock, SumBlock
from laplace.curvature.factors import IndexBlock, OuterBlock
from tests.reference.compare import assert_close

K, B = 3, 4


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def outer(positions: int, groups: int = 1, *, inputs: int = 5, outputs: int = 2, input_first: bool = False) -> Block:
    a = draw(B, positions, groups, inputs)
    return OuterBlock(a, draw(K, B, positions, groups, outputs), B, input_first=input_first)


def embedding(positions: int, rows: int = 4, width: int = 3) -> Block:
    index = torch.randint(-1, rows, (B, positions))
    return IndexBlock(index, draw(K, B, positions, width), rows, index >= 0)


BLOCKS = {
    "one position": lambda: outer(1),
    "positions": lambda: outer(3),
    "groups": lambda: outer(2, 3),
    "input first": lambda: outer(2, input_first=True),
    "input first, groups": lambda: outer(1, 2, input_first=True),
    "more positions than the weight has entries": lambda: outer(20),
    "bias": lambda: OuterBlock(None, draw(K, B, 2, 1, 6), B),
    "embedding": lambda: embedding(5),
    "dense": lambda: DenseBlock(draw(K, B, 7)),
    "sum": lambda: SumBlock((outer(1), outer(2))),
    "wide": lambda: outer(1, inputs=40, outputs=30),
    "wide, positions": lambda: outer(2, inputs=40, outputs=30),
}


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_picked_entries_are_those_of_the_dense_block(name: str, many: bool) -> None:
    whole = BLOCKS[name]()
    index = torch.randperm(whole.size)[: max(2, whole.size * 2 // 3) if many else 2]
    truth = whole.dense()[..., index]
    picked = PickedBlock(whole, index)
    weights = torch.rand(len(index), dtype=torch.float64)
    grams = torch.einsum("kbp,p,lbp->bkl", truth, weights, truth)
    assert_close(picked.dense(), truth, "algebra")
    assert_close(whole.entries(index), truth, "algebra")
    assert_close(picked.rows(slice(1, 3)).dense(), truth[:, 1:3], "algebra")
    assert_close(picked.sum_of_squares(), truth.square().sum((0, 1))[None], "algebra")
    assert_close(picked.sum_of_squares(apart=True), truth.square().sum(1), "algebra")
    assert_close(picked.weighted_norms(weights), grams.diagonal(dim1=1, dim2=2), "algebra")
    assert_close(picked.weighted_gram(weights), grams, "algebra")
    assert_close(picked.apply(weights[None]), torch.einsum("kbp,p->bk", truth, weights)[None], "algebra")


def test_few_entries_are_gathered_and_many_contracted() -> None:
    whole = outer(1, inputs=40, outputs=30)
    assert PickedBlock(whole, torch.arange(2)).multiplies_out
    assert not PickedBlock(whole, torch.arange(900)).multiplies_out
    assert PickedBlock(outer(2, inputs=40, outputs=30), torch.arange(900)).multiplies_out
