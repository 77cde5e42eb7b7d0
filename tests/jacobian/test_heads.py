"""Heads: blocks and their kernels against dense ones, and their full curvature in pieces of rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import Laplace
from laplace.core.orthogonal_basis import DenseBasis
from laplace.jacobian import full_sum
from laplace.jacobian.blocks import (
    DenseBlock,
    ProductBasis,
)
from laplace.jacobian.heads import HeadBlock, HeadRows
from laplace.jacobian.jacobian import block_kernel
from laplace.jacobian.outer import OuterBlock
from tests.conformance.cases import own_dense
from tests.conformance.test_layers import SoftmaxByHand
from tests.jacobian.test_blocks import CHOSEN, B, K, check, check_contractions, draw, orthogonal
from tests.reference import curvature as reference
from tests.reference.compare import assert_close

OTHER = {"regression": torch.ones(9, 3).double(), "bernoulli": torch.ones(9, 3).double()}
"""Targets that are no labels; no GGN depends on them."""


@pytest.mark.parametrize("likelihood", ["classification", "regression", "bernoulli", "by hand"])
@pytest.mark.parametrize("size", [1, 600, 5000], ids="{} bytes".format)
def test_rows_in_pieces(likelihood: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of an output Hessian without structure, `"by hand"`."""
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(9, 4).double(), OTHER.get(likelihood, torch.arange(9) % 3)
    name = "classification" if likelihood == "by hand" else likelihood
    expected = reference.ggn(network, x, y, ["2.weight", "2.bias"], name)
    monkeypatch.setattr(full_sum, "CHUNK_BYTES", size)
    la = Laplace(network, SoftmaxByHand() if likelihood == "by hand" else likelihood, "last_layer", "full")
    la.fit([(x[:7], y[:7]), (x[7:], y[7:])])
    assert_close(own_dense(la), expected, "backend")


def test_repeated_data_under_a_weak_prior() -> None:
    """Directions that no datum has hold no rounding, with which a small prior precision would compete."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(40, 4)
    with torch.no_grad():
        head.weight.copy_(torch.randn(4, 40, generator=generator) / 2)
    x, y = torch.randn(20, 40, generator=generator).repeat(20, 1), torch.arange(400) % 4
    la = Laplace(head, "classification", "last_layer", "full", prior_precision=1e-4)
    la.fit([(x[i : i + 50], y[i : i + 50]) for i in range(0, 400, 50)])
    exact = nn.Linear(40, 4).double()
    exact.load_state_dict(head.state_dict())
    curvature = reference.ggn(exact, x.double(), y, ["weight", "bias"], "classification")
    precision = curvature + 1e-4 * torch.eye(len(curvature), dtype=torch.float64)
    new = torch.randn(5, 40, generator=generator)
    rows = torch.autograd.functional.jacobian(
        lambda w, b: nn.functional.linear(new.double(), w, b), (exact.weight.detach(), exact.bias.detach())
    )
    jacobian = torch.cat([part.flatten(2) for part in rows], 2)
    expected = jacobian @ torch.linalg.solve(precision, jacobian.mT)
    actual = la.predictive_moments(new)[1].double()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("is_bias", [False, True])
def test_a_head_is_a_block_whose_gradients_are_the_identity(is_bias: bool) -> None:
    phi = torch.ones(B, 1, dtype=torch.float64) if is_bias else draw(B, 5)
    truth = torch.einsum("kc,bd->kbcd", torch.eye(K, dtype=torch.float64), phi)
    head, u, v = HeadBlock(phi, K, is_bias), orthogonal(K), torch.eye(1).double() if is_bias else orthogonal(5)
    check(head, truth.flatten(2))
    rotated = head.in_basis(ProductBasis(DenseBasis(u[None]), None if is_bias else DenseBasis(v[None]), (1, K, len(v))))
    check(rotated, torch.einsum("kbcd,ce,df->kbef", truth, u, v).flatten(2))


def outer_of(head: HeadBlock) -> OuterBlock:
    """The block of a head with the identity for output gradients."""
    g = torch.eye(head.n_outputs, dtype=head.features.dtype)[:, None, None, None].expand(-1, head.n_data, -1, -1, -1)
    return OuterBlock(head.features[:, None, None], g)


def test_kernels_of_heads() -> None:
    x, y, outputs = HeadBlock(draw(B, 5), K), HeadBlock(draw(2, 5), K), torch.tensor([[2, 1], [0, 1]])
    some = y.select_outputs(outputs)
    assert_close(some.dense(), y.dense()[outputs.T, torch.arange(2)], "algebra")
    for first in (x, some):
        for other in (y, some, some.at(slice(1, 2)), outer_of(y), DenseBlock(y.dense())):
            truth = torch.einsum("kbp,lmp->kblm", first.dense(), other.dense())
            assert_close(block_kernel(first, other), truth, "algebra")
            assert_close(block_kernel(other, first), truth.permute(2, 3, 0, 1), "algebra")


@pytest.mark.parametrize("is_bias", [False, True])
def test_some_outputs_of_a_head_in_another_basis(is_bias: bool) -> None:
    phi = torch.ones(B, 1, dtype=torch.float64) if is_bias else draw(B, 5)
    block, u, v = HeadRows(phi, CHOSEN, 6, is_bias), orthogonal(6), orthogonal(phi.shape[1])
    truth = block.dense().unflatten(2, (6, -1))
    for left, right in ((u, None), (None, v), (u, v)):
        if is_bias and right is not None:
            continue
        bases = [None if q is None else DenseBasis(q[None]) for q in (left, right)]
        rotated = block.in_basis(ProductBasis(bases[0], bases[1], (1, 6, len(v))))
        expected = truth if left is None else torch.einsum("kbcd,ce->kbed", truth, left)
        expected = expected if right is None else torch.einsum("kbcd,de->kbce", expected, right)
        check_contractions(rotated, expected.flatten(2))
