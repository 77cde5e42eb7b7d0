"""Passes over data have running sums with one name: those of shards, added and put back, give the fit of all data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from laplace import Laplace, ParametricLaplace
from laplace.errors import InvalidData, UnsupportedError
from laplace.structures import STRUCTURES, Curvature
from laplace.structures.base import DataPass
from tests import problems as catalogue
from tests.conformance.cases import Case, own_dense
from tests.pairs import nightly
from tests.reference.compare import assert_close

ADDING = [name for name in STRUCTURES if name != "matrix_free"]
"""Structures of which shards add up; others hold the data."""

Batches = Sequence[tuple[Any, Tensor]]


def read(data_pass: DataPass, batches: Batches) -> None:
    for x, y in batches:
        data_pass.add(x, y)


def fitted_in_shards(passes: list[DataPass], shards: list[Batches]) -> list[Curvature]:
    """The curvature that every process finds, of which each reads its own data and all share their sums."""
    found: list[Any] = list(passes)
    while isinstance(found[0], DataPass):
        for data_pass, batches in zip(found, shards, strict=True):
            read(data_pass, batches)
        shared = [data_pass.sums() for data_pass in found]
        totals = {name: sum(sums[name] for sums in shared[1:]) + shared[0][name] for name in shared[0]}
        for sums in shared:
            for name, tensor in sums.items():  # as an all-reduce does
                tensor.copy_(totals[name])
        found = [data_pass.finish() for data_pass in found]
    return found


def dense(la: ParametricLaplace, curvature: Curvature) -> Tensor:
    """Σ_e H_e, `[P, P]`."""
    weights = torch.ones(curvature.n_terms, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    la.prior_precision = one
    return curvature.precision(weights, la.prior).to_dense() - torch.eye(la.problem.layout.n_params, dtype=one.dtype)


@pytest.mark.parametrize("noise", ["one", "per output"])
@pytest.mark.parametrize("structure", ADDING)
def test_sums_of_shards_are_those_of_all_data(structure: str, noise: str) -> None:
    case = Case(catalogue.get("mlp_regression"), structure, "all")
    la = case.build(sigma_noise=torch.tensor([0.7, 1.3])) if noise == "per output" else case.build()
    batches = case.problem.batches(2)
    la.fit(batches)
    whole = own_dense(la)
    with torch.no_grad():
        passes = [la.structure.first_pass(la.engine, la.structure_options) for _ in range(2)]
        for curvature in fitted_in_shards(passes, [batches[:1], batches[1:]]):
            assert type(curvature) is la.structure
            assert_close(dense(la, curvature), whole, "backend")


@pytest.mark.parametrize("structure", ADDING)
def test_sums_are_the_tensors_that_batches_are_added_to(structure: str) -> None:
    case = Case(catalogue.get("mlp_classification"), structure, "all")
    la = case.fit()
    (batch, *_) = case.problem.batches(4)
    with torch.no_grad():
        data_pass = la.structure.first_pass(la.engine, la.structure_options)
        read(data_pass, [batch])
        once = {name: tensor.clone() for name, tensor in data_pass.sums().items()}
        read(data_pass, [batch])
        assert once
        for name, tensor in data_pass.sums().items():
            upper = torch.ones_like(tensor, dtype=torch.bool)
            if structure in ("full", "block"):  # of sums only the upper block triangle counts
                upper = upper.triu()
            assert_close(tensor[upper], 2 * once[name][upper], "algebra", label=name)


def test_sums_of_no_batch_are_refused() -> None:
    case = Case(catalogue.get("mlp_classification"), "kron", "all")
    la = case.fit()
    data_pass = la.structure.first_pass(la.engine, la.structure_options)
    with pytest.raises(InvalidData, match="no batch"):
        data_pass.sums()


def test_what_chooses_among_the_data_is_no_sum() -> None:
    model, x, y = torch.nn.Linear(3, 2), torch.randn(12, 3), torch.randn(12, 2)
    for options in ({"n_subset": 4}, {"functional_approximation": "nystrom", "n_eigenvalues": 2, "subsample_size": 8}):
        la = Laplace(model, "regression", "all", "gp", **options)
        la.fit([(x, y)])
        with pytest.raises(UnsupportedError, match="does not add up"):
            la.structure.first_pass(la.engine, la.structure_options).sums()


@pytest.mark.parametrize("structure", ["full", *nightly("block")])
def test_matrices_of_shards_have_one_form_whatever_their_batches(structure: str) -> None:
    """Of a network that is large enough for sums by pairs of layers, of which another shard's batches know nothing."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 40), torch.nn.Tanh(), torch.nn.Linear(40, 30), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(30, 5)).double()
    x, y = torch.randn(60, 16, dtype=torch.float64), torch.randint(5, (60,))
    batches = [(x[:8], y[:8]), (x[8:16], y[8:16]), (x[16:], y[16:])]
    # A budget of output gradients within which the large batch goes one backward pass at a time.
    la = Laplace(model, "classification", "all", structure, backend_kwargs={"memory_budget": 2**15})
    la.fit(batches)
    whole = own_dense(la)
    with torch.no_grad():
        passes = [la.structure.first_pass(la.engine, la.structure_options) for _ in range(2)]
        for curvature in fitted_in_shards(passes, [batches[:2], batches[2:]]):
            assert_close(dense(la, curvature), whole, "backend")
