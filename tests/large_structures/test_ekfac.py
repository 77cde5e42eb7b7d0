"""Eigenvalue-corrected Kronecker curvature: its basis diagonalises the factors, its eigenvalues are exact there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from laplace.errors import LaplaceError
from laplace.large_structures.ekfac import EkfacCurvature
from tests import problems as catalogue
from tests.conformance.cases import Case, cases, drawn, few, own_dense, thinned, truth
from tests.conformance.kron_truth import factored_names, kron_truth
from tests.reference import corrected, kfac
from tests.reference.compare import assert_close

KFAC = catalogue.problems("kfac")


def held(la: Any) -> EkfacCurvature:
    """The curvature of a fitted posterior."""
    found = la.fitted().curvature
    assert isinstance(found, EkfacCurvature)
    return found


def basis_of(la: Any) -> Tensor:
    """U of all tensors, `[P, P]`."""
    bases = held(la).bases
    return torch.block_diag(*[b.rotate(torch.eye(b.size, dtype=torch.float64), back=True).T for b in bases])


def factored(case: Case) -> Tensor:
    """Which treated entries belong to a tensor with Kronecker factors, `[P]`."""
    names = truth(case.problem.name).names
    return torch.tensor([names[i] in factored_names(case.problem) for i in case.tensor_of])


def in_basis(case: Case, exact: Tensor, basis: Tensor) -> Tensor:
    """What should be held: U diag(Uᵀ H U) Uᵀ of every tensor with factors, the exact block of every other."""
    mixed = basis @ torch.diag((basis.T @ exact @ basis).diagonal()) @ basis.T
    same = case.tensor_of[:, None] == case.tensor_of
    return torch.where(factored(case)[:, None], mixed, exact) * same


def check(case: Case, la: Any, kind: str = "ggn", approx: str = "expand") -> None:
    basis, eye = basis_of(la), torch.eye(len(case.columns), dtype=torch.float64)
    assert_close(basis @ basis.T, eye, "algebra", label="orthonormal")
    product = basis.T @ kron_truth(case, approx, kind) @ basis
    inside = factored(case)
    within = product[inside][:, inside]
    assert_close(within, torch.diag(within.diagonal()), "backend", label="the basis of the factors")
    assert_close(own_dense(la), in_basis(case, case.dense(kind), basis), "backend", label="curvature")


@pytest.mark.parametrize("case", thinned("ekfac"))
@pytest.mark.turns
def test_ggn(case: Case) -> None:
    check(case, case.fit())


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", structures=["ekfac"]))
def test_empirical_fisher_in_batches(case: Case) -> None:
    check(case, case.fit(2, kind="ef"), "ef")


@pytest.mark.parametrize("name", ["shared_positions", "conv2d", "pair_cat"])
def test_reduce(name: str) -> None:
    case = Case(catalogue.get(name), "ekfac", "all")
    check(case, case.fit(backend_kwargs={"kfac_approx": "reduce"}), approx="reduce")


@pytest.mark.parametrize("case", cases(KFAC, ["all"], ["ekfac"])[::3])
def test_equals_the_reference(case: Case) -> None:
    """From factors and eigenvectors of its own; what a repeated eigenvalue leaves open is the identity in both."""
    problem, names = case.problem, truth(case.problem.name).names
    chosen = [names[i] for i in case.tensor_of.unique()]
    factors = kfac.kfac(problem.make_model(), problem.x, problem.y, chosen, problem.likelihood)
    exact, blocks = case.dense(), []
    for i, name in zip(case.tensor_of.unique(), chosen, strict=True):
        inside = case.tensor_of == i
        blocks.append(corrected.ekfac(factors[name], exact[inside][:, inside]))
    assert_close(own_dense(case.fit()), torch.block_diag(*blocks), "backend")


@pytest.mark.parametrize("case", few("all", "last_layer", "rectangle", structures=["ekfac"]))
def test_nearer_to_the_exact_curvature_than_kron(case: Case) -> None:
    exact = case.dense() * (case.tensor_of[:, None] == case.tensor_of)
    kron = own_dense(Case(case.problem, "kron", case.weights).fit())
    assert (own_dense(case.fit()) - exact).norm() <= (kron - exact).norm() * (1 + 1e-10) + 1e-13 * exact.norm()


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", structures=["ekfac"], names=["mlp_regression"]))
def test_terms_of_several_noises_are_exact_in_one_basis(case: Case) -> None:
    sigma = drawn(case, "noise", case.n_outputs).exp()
    la = case.fit(sigma_noise=sigma)
    for scale in (sigma**-2, torch.rand_like(sigma)):
        expected = in_basis(case, case.dense(output_scale=scale), basis_of(la))
        assert_close(own_dense(la, scale), expected, "backend")


@pytest.mark.parametrize("case", few("all", "last_layer", "random", structures=["ekfac"]))
def test_sum_of_two_fits(case: Case) -> None:
    """The basis is that of all data; the diagonal in it is that of the sum of what both fits held."""
    batches = case.problem.batches(4)
    parts = [case.build(), case.build()]
    for la, batch in zip(parts, (batches[:1], batches[1:]), strict=True):
        la.fit(batch)
    both = case.build()
    both.fit(batches[:1])
    both.fit(batches[1:], override=False)
    whole = case.fit()
    inside, basis = factored(case), basis_of(both)
    product = (basis.T @ kron_truth(case) @ basis)[inside][:, inside]
    assert_close(product, torch.diag(product.diagonal()), "backend", label="the basis of the summed factors")
    assert_close(own_dense(both), in_basis(case, own_dense(parts[0]) + own_dense(parts[1]), basis), "backend")
    assert_close(own_dense(both).trace(), case.dense().trace(), "backend", label="trace")
    assert both.n_data == whole.n_data


@pytest.mark.filterwarnings("ignore::laplace.errors.DataWarning")  # data that count twice
@pytest.mark.parametrize(
    "case", few("all", "random", structures=["ekfac"], names=["mlp_classification", "conv2d_grouped"])
)
def test_the_same_data_twice_is_twice_the_curvature(case: Case) -> None:
    la = case.fit()
    once = own_dense(la)
    la.fit(case.problem.batches(), override=False)
    assert_close(own_dense(la), 2 * once, "backend")


def test_prior_that_varies_within_a_block_is_said_to_be_approximated() -> None:
    case = Case(catalogue.get("mlp_classification"), "ekfac", "all")
    la = case.fit(prior_precision=torch.rand(len(case.columns)) + 0.1)
    assert "eigenbasis" in repr(la)
    la.prior_precision = 1.0
    assert "their eigenbasis" not in repr(la)
    assert set(la.coverage().values()) == {"linear → exact diagonal in the Kronecker eigenbasis"}


def test_damping_is_refused() -> None:
    with pytest.raises(LaplaceError, match="damping=True"):
        Case(catalogue.get("mlp_classification"), "ekfac", "random").build(damping=True)


def test_a_stream_is_refused() -> None:
    problem = catalogue.get("mlp_classification")
    la = Case(problem, "ekfac", "all").build()
    with pytest.raises(LaplaceError, match="2 times"):
        la.fit(iter(problem.batches()))


def test_state_keeps_the_basis() -> None:
    case = Case(catalogue.get("conv2d_grouped"), "ekfac", "mixed")
    la = case.fit()
    other = case.build()
    other.load_state_dict(la.state_dict())
    assert torch.equal(own_dense(la), own_dense(other)) and torch.equal(basis_of(la), basis_of(other))
