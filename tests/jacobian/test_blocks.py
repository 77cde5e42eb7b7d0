"""Blocks of the Jacobian: every contraction, selection, fold and other form is that of the dense values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laplace.core.orthogonal_basis import DenseBasis, OrthogonalBasis, ThinBasis
from laplace.jacobian.blocks import (
    Block,
    DenseBlock,
    JoinedBlock,
    LazyBlock,
    MappedBlock,
    PickedBlock,
    ProductBasis,
    SumBlock,
    from_state,
)
from laplace.jacobian.heads import HeadBlock, HeadRows, RotatedHeadBlock
from laplace.jacobian.index import IndexBlock
from laplace.jacobian.jacobian import GroupedBlock, block_kernel
from laplace.jacobian.outer import OuterBlock, unpicked
from laplace.weights.problem import Selection
from tests.reference.compare import assert_close

K, B = 3, 4
CHOSEN = torch.tensor([[5, 0, 1], [3, 4, 2], [2, 2, 0], [1, 5, 0]])  # of 6 outputs, one of them twice


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def outer(positions: int, groups: int = 1, *, inputs: int = 5, outputs: int = 2, input_first: bool = False) -> Block:
    a = draw(B, positions, groups, inputs)
    return OuterBlock(a, draw(K, B, positions, groups, outputs), input_first=input_first)


def embedding(positions: int, rows: int = 4, width: int = 3) -> Block:
    index = torch.randint(-1, rows, (B, positions))
    return IndexBlock(index, draw(K, B, positions, width), rows, index >= 0)


def lazy() -> Block:
    values = draw(K, B + 2, 7)
    return LazyBlock(lambda data: values[:, data], (K, 7), (1, B + 1), values.norm())


BLOCKS = {
    "one position": lambda: outer(1),
    "positions": lambda: outer(3),
    "groups": lambda: outer(2, 3),
    "input first": lambda: outer(2, input_first=True),
    "input first, groups": lambda: outer(1, 2, input_first=True),
    "more positions than the weight has entries": lambda: outer(20),
    "bias": lambda: OuterBlock(None, draw(K, B, 2, 1, 6)),
    "head": lambda: HeadBlock(draw(B, 5), K),
    "head's bias": lambda: HeadBlock(torch.ones(B, 1, dtype=torch.float64), K, is_bias=True),
    "some outputs of a head": lambda: HeadRows(draw(B, 5), CHOSEN, 6),
    "some outputs of a head's bias": lambda: HeadRows(torch.ones(B, 1, dtype=torch.float64), CHOSEN, 6, is_bias=True),
    "head in another basis": lambda: RotatedHeadBlock(draw(B, 5), draw(K, 2)),
    "head's bias in another basis": lambda: RotatedHeadBlock(torch.ones(B, 1).double(), draw(K, 2), is_bias=True),
    "embedding": lambda: embedding(5),
    "dense": lambda: DenseBlock(draw(K, B, 7)),
    "lazy": lazy,
    "sum": lambda: SumBlock((outer(1), outer(2))),
    "joined": lambda: JoinedBlock((outer(1), DenseBlock(draw(K, B, 2)))),
    "mapped": lambda: MappedBlock(outer(2), lambda piece: 2 * piece),
    "wide": lambda: outer(1, inputs=40, outputs=30),
    "wide, positions": lambda: outer(2, inputs=40, outputs=30),
}


def check(block: Block, truth: Tensor) -> None:
    """Every contraction and every selection, fold and other form of a block, against its dense values `[K, B, p]`."""
    check_contractions(block, truth)
    for form in (block.cast(torch.float64), block.detached(), from_state(block.detached().state())):
        check_contractions(form, truth)
    assert block.cast(torch.float32).dense().dtype == torch.float32
    index, outputs = torch.tensor([2, 0, 2]), torch.tensor([[1, 0], [0, 2], [2, 2], [2, 1]])
    assert_close(block.at(slice(1, 3)).dense(), truth[:, 1:3], "algebra")
    assert_close(block.at(index).dense(), truth[:, index], "algebra")
    check_contractions(block.select_outputs(outputs), truth[outputs.T, torch.arange(B)])
    check_contractions(block.join([block, block.at(slice(None))]), torch.cat([truth] * 3))
    check_contractions(block.join([DenseBlock(truth)]), torch.cat([truth] * 2))
    check_contractions(block.add([block, DenseBlock(truth)]), 3 * truth)
    check_contractions(block.add([block, block]), 3 * truth)
    check_contractions(block.fold_cotangents(len(truth)), truth.transpose(0, 1).flatten(0, 1)[None])
    for other in (block, block.at(index), DenseBlock(truth[:2])):
        kernel = torch.einsum("kbp,lmp->kblm", truth, other.dense())
        assert_close(block_kernel(block, other), kernel, "algebra")
        assert_close(block_kernel(other, block), kernel.permute(2, 3, 0, 1), "algebra")


def check_contractions(block: Block, truth: Tensor) -> None:
    k, b, p = truth.shape
    assert (block.n_cotangents, block.n_data, block.size) == (k, b, p)
    weights, vectors, cotangents = torch.rand(2, p, dtype=torch.float64), draw(2, p), draw(k, b)
    grams = torch.einsum("kbp,np,lbp->nbkl", truth, weights, truth)
    index = torch.randperm(p)[:3]
    assert_close(block.dense(), truth, "algebra")
    assert_close(block.by_output(), truth.transpose(0, 1).flatten(0, 1), "algebra")
    assert_close(block.entries(index), truth[..., index], "algebra")
    assert block.bound() >= truth.norm() - 1e-12
    running = torch.ones(p, dtype=torch.float64)
    block.add_squares(running)
    assert_close(running - 1, truth.square().sum((0, 1)), "algebra")
    assert_close(block.squares_per_cotangent(), truth.square().sum(1), "algebra")
    assert_close(block.weighted_norms(weights[0]), grams[0].diagonal(dim1=1, dim2=2), "algebra")
    assert_close(block.weighted_gram(weights[0]), grams[0], "algebra")
    assert_close(block.weighted_norms_each(weights), grams.diagonal(dim1=2, dim2=3), "algebra")
    assert_close(block.weighted_gram_each(weights), grams, "algebra")
    assert_close(block.apply(vectors), torch.einsum("kbp,sp->sbk", truth, vectors), "algebra")
    assert_close(block.pull(cotangents), torch.einsum("kb,kbp->p", cotangents, truth), "algebra")
    weights = torch.stack([cotangents.T, cotangents.T.square()])
    assert_close(block.combined(weights), torch.einsum("sbk,kbp->sp", weights, truth), "algebra")
    assert block.shape([]).size == p


@pytest.mark.parametrize("name", BLOCKS)
def test_every_operation_is_that_of_the_dense_block(name: str) -> None:
    block = BLOCKS[name]()
    check(block, block.dense())


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_picked_entries_are_those_of_the_dense_block(name: str, many: bool) -> None:
    whole = BLOCKS[name]()
    index = torch.randperm(whole.size)[: max(2, whole.size * 2 // 3) if many else 2]
    check(PickedBlock(whole, index), whole.dense()[..., index])


MATRICES = {
    "weight": (lambda: outer(2), (2, 5)),
    "stored by input": (lambda: outer(2, input_first=True), (5, 2)),
    "groups": (lambda: outer(1, 3), (6, 5)),
    "table": (lambda: embedding(5), (4, 3)),
    "dense": (lambda: DenseBlock(draw(K, B, 8)), (4, 2)),
    "sum": (lambda: SumBlock((outer(1), outer(2))), (2, 5)),
}


@pytest.mark.parametrize("entries", [[0, 1], [0, 2], [1, 2, 5], [3, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]])
@pytest.mark.parametrize("name", MATRICES)
def test_selected_entries_are_those_of_the_dense_block(name: str, entries: list[int]) -> None:
    make, shape = MATRICES[name]
    block, index = make(), torch.tensor(entries)
    check(block.select_entries(Selection.from_entries(index, torch.Size(shape)), index), block.dense()[..., index])


@pytest.mark.parametrize("output_first", [True, False])
@pytest.mark.parametrize("name", ["weight", "stored by input", "table", "dense"])
@pytest.mark.parametrize("sides", ["both", "left", "right"])
@pytest.mark.parametrize("is_thin", [False, True], ids=["dense", "thin"])
def test_a_block_in_a_product_of_bases(is_thin: bool, name: str, sides: str, output_first: bool) -> None:
    make, (left, right) = MATRICES[name]
    block, (first, second) = make(), (basis_of(n, is_thin=is_thin) for n in (left, right))
    basis = ProductBasis(None if sides == "right" else first, None if sides == "left" else second,
                         (1, left, right), output_first)  # fmt: skip
    pairs = ((first, "right"), (second, "left"))
    u, v = (torch.eye(len(q.matrix()[0])).double() if side == sides else q.matrix()[0] for q, side in pairs)
    truth = torch.einsum("kbcd,ce,df->kbef", block.dense().unflatten(2, (left, right)), u, v).flatten(2)
    check_contractions(block.in_basis(basis), truth)
    grouped = torch.cat([truth[:, 0::2], truth[:, 1::2]])
    check_contractions(GroupedBlock(block, 2).in_basis(basis), grouped)
    assert_close(basis.rotate(block.dense()), truth, "algebra")
    assert_close(basis.rotate(truth, back=True), block.dense(), "algebra")


@pytest.mark.parametrize(
    "name", ["weight", "stored by input", "table", "dense", "many positions", "groups", "groups by input", "head"]
)
@pytest.mark.parametrize("widths", [(1, None), (None, 1), (1, 2), (2, 1)])
def test_a_block_in_bases_of_subspaces(name: str, widths: tuple[int | None, int | None]) -> None:
    """Fewer vectors than entries on either side, whatever order is the least work; single entries have their whole."""
    others = {
        "many positions": (lambda: outer(20), (1, 2, 5), True),
        "groups": (lambda: outer(2, 3), (3, 2, 5), True),
        "groups by input": (lambda: outer(2, 3, input_first=True), (3, 5, 2), False),
        "head": (lambda: HeadBlock(draw(B, 5), K), (1, K, 5), True),
    }
    make, shape, output_first = others.get(name) or (MATRICES[name][0], (1, *MATRICES[name][1]), name == "weight")
    sides = [
        None if r is None else DenseBasis(torch.linalg.qr(draw(shape[0], n, n))[0][..., :r])
        for r, n in zip(widths, shape[1:], strict=True)
    ]
    basis, block = ProductBasis(sides[0], sides[1], shape, output_first), make()
    u, v = (
        torch.eye(n, dtype=torch.float64).expand(shape[0], -1, -1) if side is None else side.vectors
        for side, n in zip(sides, shape[1:], strict=True)
    )
    truth = torch.einsum("kbgcd,gce,gdf->kbgef", block.dense().unflatten(2, shape), u, v).flatten(2)
    rotated = block.in_basis(basis)
    assert rotated.size == basis.size == truth.shape[2]
    check_contractions(rotated, truth)
    assert_close(basis.rotate(block.dense()), truth, "algebra")
    assert unpicked(PickedBlock(PickedBlock(block, torch.arange(3)), torch.arange(2))) is unpicked(block) is block


def basis_of(n: int, *, is_thin: bool) -> OrthogonalBasis:
    """A basis by all of its vectors, or by one."""
    return ThinBasis.from_last_columns(orthogonal(n)[:, :1]) if is_thin else DenseBasis(orthogonal(n)[None])


def orthogonal(n: int) -> Tensor:
    return torch.linalg.qr(draw(n, n))[0]
