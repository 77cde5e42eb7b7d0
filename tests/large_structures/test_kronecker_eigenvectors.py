"""Columns that are Kronecker products of eigenvectors: their search, and its seeds."""

from __future__ import annotations

import pytest
import torch

from laplace import Laplace
from tests import problems as catalogue
from tests.conformance.cases import Case, own_dense
from tests.conformance.kron_truth import kron_truth
from tests.large_structures.test_lowrank_kron import decaying, expected
from tests.reference.compare import assert_close

pytestmark = pytest.mark.turns


@pytest.mark.parametrize("name", ["shared_positions", "conv2d", "pair_cat"])
def test_reduce(name: str) -> None:
    case = Case(catalogue.get(name), "lowrank_kron", "all")
    la = case.fit(4, backend_kwargs={"kfac_approx": "reduce"})
    assert_close(own_dense(la), expected(case, case.dense(), kron_truth(case, "reduce")), "backend")


@pytest.mark.nightly
def test_search_finds_the_columns_of_a_decaying_spectrum() -> None:
    model, x, y = decaying()
    found = {}
    for oversampling in (5, 100):
        options = {"rank": 5, "oversampling": oversampling}
        la = Laplace(model, "classification", "all", "lowrank_kron", structure_kwargs=options)
        la.fit(list(zip(x.split(100), y.split(100), strict=True)))
        found[oversampling] = own_dense(la)
    exact, near = found[100], found[5]
    apart = exact - torch.diag(exact.diagonal())
    assert (near - exact).norm() < 1e-3 * apart.norm() and apart.norm() > 0.1 * exact.norm()
    assert_close(near.diagonal(), exact.diagonal(), "backend")
