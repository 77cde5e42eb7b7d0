"""Kronecker-factored curvature and precision as users hold them: `Kron` and `KronDecomposed`."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import KronLaplace, Laplace
from laplace.compat.kron import Kron, KronDecomposed
from laplace.contract.users_precision import precision_of_factors
from laplace.errors import InvalidArgument
from laplace.structures.kron import KronCurvature, KronPrecision
from tests import problems as catalogue
from tests.conformance.cases import SUBNETWORKS, Case, few, priors
from tests.conformance.dense_posterior import Dense
from tests.conformance.kron_truth import dense_of_factors, kron_truth
from tests.reference import kfac
from tests.reference.compare import assert_close

NAMES = ("mlp_classification", "conv2d_grouped", "conv_transpose2d", "embedding_padding", "bare_parameter", "no_bias")
EACH = few("all", "last_layer", *SUBNETWORKS, structures=["kron"], names=NAMES)


def regression(noise: Any = 0.7, **options: Any) -> KronLaplace:
    """A posterior of two outputs, fitted."""
    la = Case(catalogue.get("mlp_regression"), "kron", "all").fit(sigma_noise=noise, prior_precision=2.0, **options)
    assert isinstance(la, KronLaplace)
    return la


def each_noise() -> dict[str, Any]:
    return {"one noise": 0.7, "one per output": torch.tensor([0.7, 1.3], dtype=torch.float64)}


@pytest.fixture
def decomposed(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Widths of the matrices that were decomposed, with how often."""
    widths: Counter[int] = Counter()
    real = torch.linalg.eigh

    def counted(matrix: Tensor, *args: Any, **options: Any) -> Any:
        widths[matrix.shape[-1]] += 1
        return real(matrix, *args, **options)

    monkeypatch.setattr(torch.linalg, "eigh", counted)
    return widths


# Values.


@pytest.mark.parametrize("case", EACH)
def test_matrices(case: Case) -> None:
    la = case.fit(temperature=0.3)
    truth = kron_truth(case, "expand", "ggn")
    assert isinstance(la.H, KronDecomposed)
    factors = la.H_facs  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(factors, Kron)
    assert len(la.H) == len(factors) == la.problem.layout.n_tensors
    for matrix in (la.H, factors, factors.decompose(), la.H * 1.0, factors.clone(), la.H.clone()):
        assert_close(matrix.to_matrix(), truth, "backend")
    for form in ("scalar", "layerwise"):
        la.prior_precision, diagonal = priors(case)[form]
        P, dense = la.posterior_precision, truth / 0.3 + torch.diag(diagonal)
        assert isinstance(P, KronDecomposed)
        for exponent in (1, -1, -0.5):
            values, vectors = torch.linalg.eigh(dense)
            power = (vectors * values**exponent) @ vectors.T
            assert_close(P.to_matrix(exponent), power, "backend", label=f"{form}, {exponent}")
        assert_close((la.H * (1 / 0.3) + la.prior_precision).to_matrix(), dense, "backend", label=form)


@pytest.mark.parametrize("damping", [True, "mean", "sum"])
@pytest.mark.parametrize("form", ["scalar", "layerwise"])
@pytest.mark.parametrize("case", EACH)
def test_damping(case: Case, form: str, damping: bool | str) -> None:
    given, _ = priors(case)[form]
    la = case.fit(damping=damping, temperature=0.3, prior_precision=given)
    P = la.posterior_precision
    assert P.damping
    assert_close(P.to_matrix(), la.evidence().precision.to_dense(), "algebra")
    if case.weights == "all" and case.problem.name != "embedding_padding":  # whose counts are no matrix
        assert_close(P.to_matrix(), Dense.damped(la, scale=1 / 0.3, form=damping), "algebra")


def test_damping_in_the_normalisation_of_each_paper() -> None:
    """Of one layer, from the means over the data by hand: √N × means on either side, or sums."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2, bias=False)).double()
    x, delta = torch.randn(7, 3, dtype=torch.float64), 0.6
    a, b = x.T @ x / 7, torch.eye(2, dtype=torch.float64)  # of regression B is I for every datum
    eye_a, eye_b = (delta**0.5 * torch.eye(n, dtype=torch.float64) for n in (3, 2))
    expected = {
        True: torch.kron(7 * b + eye_b, a + eye_a),
        "mean": torch.kron(7**0.5 * b + eye_b, 7**0.5 * a + eye_a),
        "sum": torch.kron(7 * b + eye_b, 7 * a + eye_a),
    }
    for form, matrix in expected.items():
        la = KronLaplace(model, "regression", prior_precision=delta, damping=form)
        la.fit([(x[:3], torch.zeros(3, 2).double()), (x[3:], torch.zeros(4, 2).double())])
        assert_close(la.posterior().to_dense(), matrix, "algebra")
        again = KronLaplace(model, "regression", damping=form)
        again.load_state_dict(la.state_dict())
        assert again.damping == form
        assert_close(again.log_marginal_likelihood(), la.log_marginal_likelihood(), "exact")
    assert "'sum'" in repr(la)
    with pytest.raises(InvalidArgument, match=r"damping='means'.*'mean'.*'sum'"):
        KronLaplace(model, "regression", damping="means")


@pytest.mark.parametrize("noise", each_noise())
def test_one_curvature_for_every_noise(noise: str) -> None:
    """H is the sum of the terms of all outputs; P weighs each by its own noise."""
    la = regression(each_noise()[noise])
    curvature = la.fitted().curvature
    assert isinstance(curvature, KronCurvature)
    assert_close(la.H.to_matrix(), dense_of_factors(curvature), "algebra")
    assert_close(la.posterior_precision.to_matrix(), la.posterior().to_dense(), "algebra")
    assert_close(la.posterior_precision.logdet(), la.log_det_posterior_precision, "algebra")


@pytest.mark.parametrize("damping", [False, True])
@pytest.mark.parametrize("noise", each_noise())
@pytest.mark.turns
def test_gradients_lead_to_prior_and_noise(noise: str, damping: bool) -> None:
    la = regression(each_noise()[noise], damping=damping)
    vectors = torch.randn(2, 3, la.n_params, dtype=torch.float64)
    layers = la.problem.layout.n_tensors

    def queries(prior: Tensor, sigma: Tensor) -> tuple[Tensor, ...]:
        la.prior_precision, la.sigma_noise = prior, sigma
        P = la.posterior_precision
        return P.logdet(), P.inv_square_form(vectors), P.diag(-1), P.bmm(vectors, exponent=-0.5)

    prior = torch.linspace(0.5, 2, layers, dtype=torch.float64).requires_grad_()
    sigma = torch.as_tensor(each_noise()[noise], dtype=torch.float64).clone().requires_grad_()
    assert torch.autograd.gradcheck(queries, (prior, sigma), rtol=1e-4, atol=1e-6)


def test_a_graph_is_not_lost_where_a_matrix_is_first_read_without_gradients() -> None:
    la = regression()
    la.prior_precision = prior = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    la.sigma_noise = sigma = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    P = la.posterior_precision
    with torch.no_grad():
        P.to_matrix()
    slopes = torch.autograd.grad(P.logdet(), (prior, sigma))
    assert_close(torch.stack(slopes), torch.stack(torch.autograd.grad(la.log_det_posterior_precision, (prior, sigma))),
                 "algebra")  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_matrices_have_the_posterior_s_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype), torch.randn(9, 3, dtype=dtype)
    la = KronLaplace(model, "classification")
    la.fit([(x, torch.arange(9) % 2)])
    wide = torch.promote_types(dtype, torch.float32)
    for matrix in (la.H, la.posterior_precision, la.H_facs.decompose()):
        tensors = [t for blocks in (matrix.eigenvectors, matrix.eigenvalues) for block in blocks for t in block]
        assert {tensor.dtype for tensor in (*tensors, matrix.deltas, matrix.logdet(), matrix.to_matrix())} == {wide}
    with torch.inference_mode():
        inside = la.posterior_precision
        inside.to_matrix()
    assert not any(side.is_inference() for block in la.H.eigenvectors for side in block)


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_matrices_are_of_the_documented_classes_themselves(weights: str) -> None:
    """Code asks for `type(la.H)`, and dispatches on it."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(9, 3)
    la = Laplace(model, "classification", weights, "kron")
    la.fit([(x, torch.arange(9) % 2)])
    for matrix in (la.H, copy.deepcopy(la.H), la.H + 1.0, 2.0 * la.H, la.posterior_precision, la.H_facs.decompose()):
        assert type(matrix) is KronDecomposed
    assert type(la.H_facs) is type(la.H.factors) is Kron
    assert hasattr(la.H, "kfacs") and not hasattr(la.posterior_precision, "kfacs")


# What is computed, and when.


@pytest.mark.parametrize("noise", each_noise())
def test_nothing_is_decomposed_that_was_not_asked_for(noise: str, decomposed: Counter[int]) -> None:
    la = regression(each_noise()[noise])
    decomposed.clear()
    H, factors = la.H, la.H_facs
    assert len(H) == len(factors) == len(H.kfacs)
    assert_close(H.deltas, torch.zeros(len(H)), "exact")
    assert_close(factors.to_matrix(), Kron(H.kfacs).to_matrix(), "exact")
    assert not decomposed
    H.to_matrix()
    once = decomposed.copy()
    assert once
    la.H.to_matrix()
    la.H.logdet()
    assert decomposed == once
    if noise == "one noise":  # whose precision has the eigenvectors of H
        la.posterior_precision.to_matrix()
        la(catalogue.get("mlp_regression").x)
        assert decomposed == once


def test_reading_the_curvature_does_not_displace_a_precision_s_factorisation(decomposed: Counter[int]) -> None:
    la = regression(each_noise()["one per output"])
    la.log_marginal_likelihood()
    la.H.to_matrix()
    decomposed.clear()
    la.log_marginal_likelihood()
    la.posterior_precision.to_matrix()
    assert not decomposed


def test_eigenvectors_are_shared_by_all_readings() -> None:
    la = regression()
    first, second = la.posterior_precision, la.posterior_precision
    for a, b, c in zip(first.eigenvectors, second.eigenvectors, la.H.eigenvectors, strict=True):
        assert a is not b
        assert all(x is y is z for x, y, z in zip(a, b, c, strict=True))


# Objects that may be written to.


def test_edits_belong_to_one_object() -> None:
    """Pieces and attributes are assigned, lists rewritten: of the posterior nothing changes."""
    la, x = regression(), catalogue.get("mlp_regression").x
    before = la(x)[1].clone(), la.log_marginal_likelihood().clone(), la.H.to_matrix()
    P, H = la.posterior_precision, la.H
    dense = P.to_matrix()
    for matrix in (P, H):
        for block in matrix.eigenvalues:
            block[0] = 2 * block[0]
        matrix.deltas *= 2
    assert_close(P.to_matrix(), 2 * dense, "algebra")
    assert_close(P.bmm(dense), 0.5 * torch.eye(la.n_params), "algebra")
    assert_close(P.logdet(), (2 * dense).logdet(), "algebra")
    assert_close(H.to_matrix(), 2 * before[2], "algebra")
    P.eigenvectors = [[torch.eye(q.shape[-1], dtype=q.dtype) for q in block] for block in P.eigenvectors]
    assert_close(P.to_matrix(), torch.diag(P.diag()), "algebra")
    for block in P.eigenvalues:
        block[0] += 1
    for after in (la, copy.deepcopy(la)):
        assert_close(after(x)[1], before[0], "exact")
        assert_close(after.log_marginal_likelihood(), before[1], "exact")
        assert_close(after.H.to_matrix(), before[2], "exact")


def test_what_is_written_into_eigenvectors_does_not_reach_the_posterior() -> None:
    la, x = regression(), catalogue.get("mlp_regression").x
    before = la(x)[1].clone()
    for block in la.H.eigenvectors:
        for side in block:
            side.zero_()
    la.H_facs.kfacs[0][0].zero_()
    la.prior_precision = 3.0
    la.prior_precision = 2.0
    assert_close(la(x)[1], before, "exact")


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda matrix: pickle.loads(pickle.dumps(matrix))])
def test_copies_carry_values(copied: Any) -> None:
    la = regression()
    for matrix in (la.H, la.posterior_precision, la.H_facs):
        again = copied(matrix)
        assert type(again) is type(matrix)
        assert_close(again.to_matrix(), matrix.to_matrix(), "exact")
    assert_close(Kron(copied(la.H).kfacs).to_matrix(), la.H_facs.to_matrix(), "exact")
    assert b"Spectr" not in pickle.dumps(la.posterior_precision)


def test_clones_and_detached_matrices() -> None:
    la = regression()
    la.prior_precision = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    P, dense = la.posterior_precision, la.posterior_precision.to_matrix().detach()
    assert P.clone().logdet().requires_grad
    assert not P.detach().logdet().requires_grad
    again = P.detach().clone()
    for tensor in (again.deltas, *(side for block in again.eigenvectors for side in block)):
        tensor.zero_()
    assert_close(P.to_matrix(), dense, "exact")
    factors = la.H_facs
    twin = factors.clone()
    twin.kfacs[0][0].zero_()
    assert_close(factors.to_matrix(), la.H_facs.to_matrix(), "exact")
    assert_close(factors.detach().to_matrix(), factors.to_matrix(), "exact")


# Where there are no factors.


@pytest.mark.parametrize(("structure", "form"), [("kron", "diag"), ("ekfac", "scalar"), ("block", "scalar")])
def test_other_precisions_answer_alike(structure: str, form: str) -> None:
    """A prior that varies within a tensor has no δ per tensor, corrected eigenvalues are no products."""
    case = Case(catalogue.get("mlp_regression"), structure, "all")
    la = case.fit(prior_precision=priors(case)[form][0])
    P = la.posterior_precision
    assert isinstance(P, KronPrecision)
    eye = torch.eye(la.n_params, dtype=torch.float64)
    assert_close(P.bmm(eye), la.posterior_covariance, "algebra")
    assert_close(P.bmm(eye, exponent=1), P.to_matrix(), "algebra")


def test_a_network_of_single_numbers() -> None:
    """One prior per parameter is one per tensor."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 1, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)
    la = Laplace(nn.Linear(1, 1).double(), "regression", "all", "kron", prior_precision=torch.tensor([1.0, 3.0]))
    la.fit([(x, y)])
    assert_close(
        la.posterior_precision.to_matrix(), torch.diag(torch.tensor([x.square().sum() + 1, 6.0 + 3])), "algebra"
    )


# Matrices that users give back.


@pytest.mark.parametrize("damping", [False, True])
@pytest.mark.parametrize("case", EACH)
def test_a_given_matrix_is_a_posterior(case: Case, damping: bool) -> None:
    """Predictions, samples and densities by the factors of a matrix are those of the matrix."""
    la = case.fit(prior_precision=priors(case)["layerwise"][0], damping=damping)
    curvature, layout = la.fitted().curvature, la.problem.layout
    assert isinstance(curvature, KronCurvature)
    given = precision_of_factors(la.posterior_precision, curvature.parts.blocks, layout, torch.float64)
    dense = la.evidence().precision.to_dense()
    with torch.no_grad():
        jacobian, _ = next(iter(la.snapshot().engine.jacobian(case.problem.x)))
    rows = jacobian.dense()
    covariance = torch.linalg.inv(dense)
    assert_close(given.to_dense(), dense, "algebra")
    assert_close(given.variance(jacobian, "full"), rows @ covariance @ rows.mT, "algebra")
    assert_close(given.variance(jacobian, "diagonal"), (rows @ covariance * rows).sum(2), "algebra")
    assert_close(given.variance(jacobian, "joint"), rows.flatten(0, 1) @ covariance @ rows.flatten(0, 1).T, "algebra")
    assert_close(given.logdet(), dense.logdet(), "algebra")
    assert_close(given.quad(rows[:, 0]), ((rows[:, 0] @ dense) * rows[:, 0]).sum(1), "algebra")
    noise = torch.eye(layout.n_params, dtype=torch.float64)
    root = given.sample(noise)
    assert_close(root @ root.T, covariance, "algebra")


class Tempered(KronLaplace):
    """A precision of a user's own, of the library's parts."""

    factor = 1.0

    @property
    def posterior_precision(self) -> Any:
        P = super().posterior_precision
        return P * self.factor + 0.5


def test_a_precision_of_a_user_s_own() -> None:
    problem = catalogue.get("mlp_regression")
    la = Tempered(problem.make_model(), "regression", prior_precision=2.0)
    la.fit([(problem.x, problem.y)])
    plain = KronLaplace(problem.make_model(), "regression", prior_precision=2.0)
    plain.fit([(problem.x, problem.y)])
    la.factor = 3.0
    dense = 3 * plain.posterior_precision.to_matrix() + 0.5 * torch.eye(la.n_params)
    assert isinstance(la.posterior(), KronPrecision)
    rows = la.backend.jacobians(problem.x)[0]
    assert_close(la(problem.x)[1], rows @ torch.linalg.inv(dense) @ rows.mT, "backend")
    assert_close(la.log_det_posterior_precision, dense.logdet(), "backend")
    la.prior_precision = prior = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(la.log_det_posterior_precision, prior)
    assert_close(slope, 3 * torch.linalg.inv(dense).trace(), "backend")
    la.factor = 0.0
    la.prior_precision = 2.0
    assert_close(la.posterior_variance, torch.full((la.n_params,), 2.0), "algebra")


def test_a_precision_of_a_user_s_own_that_is_none() -> None:
    problem = catalogue.get("mlp_regression")

    class Negative(KronLaplace):
        @property
        def posterior_precision(self) -> Any:
            return super().posterior_precision + (-1e6)

    class Foreign(KronLaplace):
        @property
        def posterior_precision(self) -> Any:
            return Kron([[torch.eye(3, dtype=torch.float64)]]).decompose() + 1.0

    for cls, words in (
        (Negative, "posterior_precision of class Negative is not positive definite"),
        (Foreign, "shape"),
    ):
        la = cls(problem.make_model(), "regression")
        la.fit([(problem.x, problem.y)])
        with pytest.raises(InvalidArgument, match=words):
            la(problem.x)


def test_rows_of_factors_by_hand() -> None:
    """Q (λ₁ ⊗ λ₂ + δ) Qᵀ of the lists, as scripts write it."""
    la = regression()
    P = la.posterior_precision
    blocks = []
    for vectors, values, delta in zip(P.eigenvectors, P.eigenvalues, P.deltas, strict=True):
        Q = kfac.kron(*vectors) if len(vectors) == 2 else vectors[0]
        table = torch.outer(*values).flatten() if len(values) == 2 else values[0]
        blocks.append((Q * (table + delta)) @ Q.T)
    assert_close(torch.block_diag(*blocks), la.evidence().precision.to_dense(), "algebra")
