"""Low rank by corrected eigenvalues: columns chosen and weighed by the exact diagonal in products of eigenvectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, ParametricLaplace
from laplace.curvature import NativeEF
from laplace.errors import InvalidArgument
from laplace.large_structures.ekfac import EkfacCurvature
from laplace.large_structures.lowrank_kron import LowRankKronCurvature
from tests import problems as catalogue
from tests.conformance.cases import Case, cases, drawn, few, own_dense, thinned, truth
from tests.conformance.kron_truth import kron_truth
from tests.large_structures.test_lowrank_kron import DISTINCT, DISTINCT_CASES, decaying
from tests.pairs import turns
from tests.reference import corrected, kfac
from tests.reference.compare import assert_close

pytestmark = pytest.mark.turns

WHOLE = {"rank": 1000, "corrected": True}


def fit(case: Case, batch_size: int | None = 4, kind: str = "ggn", **options: Any) -> ParametricLaplace:
    return case.fit(batch_size, kind, **{"structure_kwargs": WHOLE, **options})


def held(la: ParametricLaplace) -> LowRankKronCurvature:
    found = la.fitted().curvature
    assert isinstance(found, LowRankKronCurvature)
    return found


def columns(la: ParametricLaplace) -> list[tuple[Tensor, Tensor]]:
    """U `[p, k]` and Λ* `[E, k]` of every tensor."""
    found = held(la).columns
    return [(own.combined(torch.eye(len(own), dtype=torch.float64)).T, own.values) for own in found]


def blocks_of(case: Case, dense: Tensor) -> list[Tensor]:
    """The blocks of the tensors of a case on the diagonal of a dense matrix."""
    return [dense[case.tensor_of == i][:, case.tensor_of == i] for i in case.tensor_of.unique()]


def expected(case: Case, la: ParametricLaplace, exact: Tensor) -> Tensor:
    """U diag(Uᵀ H U) Uᵀ of every tensor, scaled and filled up to the exact diagonal."""
    parts: list[Tensor] = []
    for (u, _), block in zip(columns(la), blocks_of(case, exact), strict=True):
        lowrank = u @ torch.diag((u.T @ block @ u).diagonal()) @ u.T
        parts.append(corrected.with_diagonal(lowrank, block.diagonal()))
    return torch.block_diag(*parts)


def check(case: Case, la: ParametricLaplace, kind: str = "ggn", approx: str = "expand") -> None:
    """Orthonormal eigenvectors of the factors that leave nothing out, exact eigenvalues, exact diagonal."""
    if any(block.index is not None for block in held(la).blocks):
        pytest.skip("single entries have the columns of their tensors, which are not orthonormal within them")
    exact = case.dense(kind)
    both = zip(columns(la), blocks_of(case, kron_truth(case, approx, kind)), blocks_of(case, exact), strict=True)
    for (u, values), product, block in both:
        if not u.shape[1]:
            continue
        assert_close(u.T @ u, torch.eye(u.shape[1], dtype=torch.float64), "algebra", label="orthonormal")
        inside = u.T @ product @ u
        assert_close(inside, torch.diag(inside.diagonal()), "backend", label="the basis of the factors")
        assert_close(values.sum(0), (u.T @ block @ u).diagonal(), "backend", label="eigenvalues")
        assert_close(values.sum(), block.trace(), "backend", label="trace")
    assert_close(own_dense(la), expected(case, la, exact), "backend", label="curvature")


@pytest.mark.parametrize("case", [case for case in thinned("lowrank_kron") if "random" not in str(case.id)])
def test_all_columns(case: Case) -> None:
    check(case, fit(case))


@pytest.mark.parametrize("case", few("all", "last_layer", "rectangle", structures=["lowrank_kron"]))
def test_empirical_fisher(case: Case) -> None:
    check(case, fit(case, 2, kind="ef"), "ef")


@pytest.mark.parametrize("name", ["shared_positions", "conv2d", "pair_cat"])
def test_reduce(name: str) -> None:
    case = Case(catalogue.get(name), "lowrank_kron", "all")
    check(case, fit(case, backend_kwargs={"kfac_approx": "reduce"}), approx="reduce")


@pytest.mark.parametrize(("case", "rank"), turns(DISTINCT_CASES, [1, 2, 5, 1000]), ids=str)
def test_equals_the_reference(case: Case, rank: int) -> None:
    """From factors and eigenvectors of its own; all of the eigenvectors of either side are candidates."""
    problem, names = case.problem, truth(case.problem.name).names
    la = fit(case, structure_kwargs={"rank": rank, "oversampling": 500, "corrected": True})
    chosen = [names[i] for i in case.tensor_of.unique()]
    factors = kfac.kfac(problem.make_model(), problem.x, problem.y, chosen, problem.likelihood)
    blocks = [
        corrected.lowrank_ekfac(factors[name], block, rank)
        for name, block in zip(chosen, blocks_of(case, case.dense()), strict=True)
    ]
    assert_close(own_dense(la), torch.block_diag(*blocks), "backend")


@pytest.mark.parametrize("case", cases(DISTINCT, ["all", "last_layer"], ["lowrank_kron"]))
@pytest.mark.turns
def test_all_columns_are_those_of_ekfac(case: Case) -> None:
    """U Λ* Uᵀ with all columns is ekfac's curvature; beside it is what the exact diagonal has more, or less."""
    la, other = fit(case), Case(case.problem, "ekfac", case.weights).fit()
    assert isinstance(other.fitted().curvature, EkfacCurvature)
    lowrank = torch.block_diag(*(u @ torch.diag(values.sum(0)) @ u.T for u, values in columns(la)))
    whole = own_dense(other)
    assert_close(lowrank, whole, "backend")
    assert_close(own_dense(la), corrected.with_diagonal(whole, case.dense().diagonal()), "backend")


@pytest.mark.parametrize(("rank", "oversampling"), [(2, 1), (4, 0), (3, 4)])
def test_fewer_candidates_than_products(rank: int, oversampling: int) -> None:
    """All products of k + oversampling vectors of either side, with exact eigenvalues; the k largest are kept."""
    model, x, y = decaying(8, 40)
    options = {"rank": rank, "oversampling": oversampling, "corrected": True}
    la = Laplace(model, "classification", "all", "lowrank_kron", structure_kwargs=options)
    la.fit(list(zip(x.split(15), y.split(15), strict=True)))
    curvature = held(la)
    (block,), (table,) = curvature.blocks, curvature.corrected or ()
    assert block.input is not None and table.shape == (1, 1, rank + oversampling, rank + oversampling)
    outputs, inputs = (curvature.sides[key].basis[0] for key in (block.output, block.input))
    candidates, exact = torch.kron(outputs, inputs), _dense(model, x, y)
    values = (candidates.T @ exact @ candidates).diagonal()
    assert_close(table[0, 0].T.flatten(), values, "backend", label="eigenvalues")
    kept = values.argsort(descending=True)[:rank]
    lowrank = candidates[:, kept] @ torch.diag(values[kept]) @ candidates[:, kept].T
    assert_close(own_dense(la), corrected.with_diagonal(lowrank, exact.diagonal()), "backend")


def _dense(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    la = Laplace(model, "classification", "all", "full")
    la.fit([(x, y)])
    return own_dense(la)


def test_ranks_by_corrected_eigenvalues() -> None:
    """Large inputs and large gradients of different data: the largest product of eigenvalues is of no datum."""
    model = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    x, gradients = ([[10.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [12.0, 0.0]])
    data = [(torch.tensor(x, dtype=torch.float64), -torch.tensor(gradients, dtype=torch.float64))]
    kept: dict[bool, tuple[Tensor, Tensor]] = {}
    for choice in (False, True):
        options = {"rank": 1, "corrected": choice}
        la = Laplace(model, "regression", "all", "lowrank_kron", backend=NativeEF, structure_kwargs=options)
        la.fit(data)
        ((u, values),) = columns(la)
        kept[choice] = u.square().flatten(), values.flatten()
    entries = torch.eye(4, dtype=torch.float64)
    assert_close(kept[False][0], entries[0], "algebra")  # output 0, input 0
    assert_close(kept[True][0], entries[1], "algebra")  # output 0, input 1
    assert_close(kept[True][1], [144.0], "algebra")


@pytest.mark.parametrize("case", few("all", "last_layer", "rectangle", structures=["lowrank_kron"]))
def test_nearer_to_the_exact_curvature_than_products(case: Case) -> None:
    """Before the diagonal is made exact: of the same columns no other weights are nearer."""
    exact = case.dense()
    own, plain = columns(fit(case)), columns(case.fit(4))
    for (u, values), (v, products), block in zip(own, plain, blocks_of(case, exact), strict=True):
        near = (u @ torch.diag(values.sum(0)) @ u.T - block).norm()
        assert near <= (v @ torch.diag(products.sum(0)) @ v.T - block).norm() * (1 + 1e-9) + 1e-12 * exact.norm()


@pytest.mark.parametrize("weights", ["all", "last_layer", "rectangle"])
@pytest.mark.parametrize("name", ["mlp_regression", "conv2d_regression"])
def test_terms_of_several_noises(name: str, weights: str) -> None:
    """The columns are those of the sum, their eigenvalues exact for every term."""
    case = Case(catalogue.get(name), "lowrank_kron", weights)
    sigma = drawn(case, "noise", case.n_outputs).exp()
    la = fit(case, sigma_noise=sigma)
    check(case, la)
    for scale in (sigma**-2, torch.rand_like(sigma)):
        assert_close(own_dense(la, scale), expected(case, la, case.dense(output_scale=scale)), "backend")


@pytest.mark.parametrize("case", few("all", "last_layer", "random", structures=["lowrank_kron"]))
def test_sums_of_two_fits(case: Case) -> None:
    """The diagonal stays exact; of both curvatures the diagonal in the new columns is kept, with all of the trace."""
    batches = case.problem.batches(4)
    la = case.build(structure_kwargs=WHOLE)
    alone: list[LowRankKronCurvature] = []
    for part in (batches[:1], batches[1:]):
        la.fit(part)
        alone.append(held(la))
    la.fit(batches[:1], override=False)
    dense, exact = own_dense(la), case.dense()
    assert_close(dense.diagonal(), exact.diagonal(), "backend", label="diagonal")
    assert torch.linalg.eigvalsh(dense).min() > -1e-12 * exact.trace()
    tables = [curvature.corrected or () for curvature in (*alone, held(la))]
    for first, second, both in zip(*tables, strict=True):
        assert_close(first.sum() + second.sum(), both.sum(), "backend", label="trace")


def test_a_fit_of_the_other_kind_is_not_added() -> None:
    case = Case(catalogue.get("mlp_classification"), "lowrank_kron", "all")
    la, other = fit(case), case.build()
    other.load_state_dict(la.state_dict())
    with pytest.raises(InvalidArgument, match="corrected"):
        other.fit(case.problem.batches(4), override=False)


def test_single_entries_have_the_columns_of_their_tensor() -> None:
    """Entries of every row and column: the candidates and their eigenvalues are those of the whole tensor."""
    model, x, y = decaying(6, 40)
    options: dict[str, Any] = {"structure_kwargs": {"rank": 4, "corrected": True}}
    whole = Laplace(model, "classification", "all", "lowrank_kron", **options)
    some = torch.tensor([0, 7, 13, 14, 21, 28, 35])
    part = Laplace(model, "classification", "subnetwork", "lowrank_kron", subnetwork_indices=some, **options)
    for la in (whole, part):
        la.fit([(x, y)])
    (all_of_it,), (those,) = held(whole).corrected or (), held(part).corrected or ()
    assert_close(those, all_of_it, "algebra")
    (u, values), (rows, _) = columns(whole)[0], columns(part)[0]
    assert_close(rows, u[some], "algebra")
    lowrank = u[some] @ torch.diag(values[0]) @ u[some].T
    assert_close(own_dense(part), corrected.with_diagonal(lowrank, _dense(model, x, y).diagonal()[some]), "backend")


def test_state_round_trip_and_words() -> None:
    case = Case(catalogue.get("bare_parameter"), "lowrank_kron", "mixed")
    la = fit(case, structure_kwargs={"rank": 2, "corrected": True})
    other = case.build()
    other.load_state_dict(la.state_dict())
    assert torch.equal(own_dense(la), own_dense(other))
    assert torch.equal(la(case.problem.x), other(case.problem.x))
    words = {form.partition(" → ")[2] for form in la.coverage().values()}
    assert any(form.endswith("corrected Kronecker columns and the exact diagonal") for form in words)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n_outputs", [3, 25])
@pytest.mark.parametrize("is_corrected", [False, True])
def test_outputs_that_are_alike(is_corrected: bool, n_outputs: int, dtype: torch.dtype) -> None:
    """All outputs of a regression have the same eigenvalues: no rounding decides which have columns, and in what basis.

    Of 25 outputs the search finds 20 directions, any of which would do; of 3 two have a column.
    """
    torch.manual_seed(0)
    size = {"rank": 2, "oversampling": 1} if n_outputs == 3 else {}
    model = nn.Sequential(nn.Linear(4, 15), nn.Tanh(), nn.Linear(15, n_outputs)).to(dtype)
    x, y = torch.randn(41, 4, dtype=dtype), torch.randn(41, n_outputs, dtype=dtype)
    variances: list[Tensor] = []
    for sizes in ([5, 36], [41], [3, 1, 37]):
        sigma = torch.linspace(0.4, 1.3, n_outputs, dtype=dtype)
        options: dict[str, Any] = {"sigma_noise": sigma, "structure_kwargs": {"corrected": is_corrected, **size}}
        la = Laplace(model, "regression", "last_layer", "lowrank_kron", prior_precision=0.7, **options)
        la.fit(list(zip(x.split(sizes), y.split(sizes), strict=True)))
        variances.append(la.predict(x).latent_covariance)
    for other in variances[1:]:
        assert_close(other, variances[0], "backend" if dtype == torch.float64 else "float32")
