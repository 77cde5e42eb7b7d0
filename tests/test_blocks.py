"""Entries of blocks of factors: gathered where they are few, contracted with zeros elsewhere where they are many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laplace.jacobian.blocks import Block, DenseBlock, PickedBlock, SumBlock
from laplace.jacobian.factors import IndexBlock, OuterBlock
from laplace.jacobian.heads import HeadBlock
from laplace.jacobian.kernels import block_kernel
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
    "head": lambda: HeadBlock(draw(B, 5), K),
    "head's bias": lambda: HeadBlock(torch.ones(B, 1, dtype=torch.float64), K, is_bias=True),
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


@pytest.mark.parametrize("is_bias", [False, True])
def test_a_head_is_a_block_whose_gradients_are_the_identity(is_bias: bool) -> None:
    phi = torch.ones(B, 1, dtype=torch.float64) if is_bias else draw(B, 5)
    head = HeadBlock(phi, K, is_bias)
    truth = torch.einsum("kc,bd->kbcd", torch.eye(K, dtype=torch.float64), phi).flatten(2)
    weights, vectors, c = torch.rand(head.size, dtype=torch.float64), draw(2, head.size), draw(K, B)
    assert_close(head.dense(), truth, "algebra")
    assert_close(head.weighted_norms(weights), torch.einsum("kbp,p->bk", truth.square(), weights), "algebra")
    assert_close(head.weighted_gram(weights), torch.einsum("kbp,p,lbp->bkl", truth, weights, truth), "algebra")
    assert_close(head.sum_of_squares(), truth.square().sum((0, 1))[None], "algebra")
    assert_close(head.sum_of_squares(apart=True), truth.square().sum(1), "algebra")
    assert_close(head.apply(vectors), torch.einsum("kbp,sp->sbk", truth, vectors), "algebra")
    assert_close(head.pull(c), torch.einsum("kb,kbp->p", c, truth), "algebra")
    assert head.bound() >= truth.norm() - 1e-12
    u, v = (torch.linalg.qr(draw(n, n))[0] for n in (K, phi.shape[1]))
    rotated = torch.einsum("kbcd,ce,df->kbef", truth.unflatten(2, (K, -1)), u, v).flatten(2)
    assert_close(head.project(u[None], None if is_bias else v[None]).dense(), rotated if not is_bias else rotated / v,
                 "algebra")  # fmt: skip


def test_kernels_of_heads() -> None:
    x, y, outputs = HeadBlock(draw(B, 5), K), HeadBlock(draw(2, 5), K), torch.tensor([2, 0])
    for other in (y, y.at(outputs), y.multiplied()):
        truth = torch.einsum("kbp,lmp->kblm", x.dense(), other.dense().expand(-1, 2, -1))
        assert_close(block_kernel(x, other), truth, "algebra")
        assert_close(block_kernel(other, x), truth.permute(2, 3, 0, 1), "algebra")
    assert_close(y.at(outputs).dense()[0], y.dense()[outputs, torch.arange(2)], "algebra")
