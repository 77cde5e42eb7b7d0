"""Dominant Kronecker eigenvectors with the exact diagonal, against the dense construction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.curvature import NativeGGN
from laplace.errors import LaplaceError
from laplace.large_structures import kronecker_eigenvectors
from laplace.large_structures.lowrank_kron import LowRankKronCurvature
from tests import problems as catalogue
from tests.conformance.cases import Case, drawn, few, own_dense, thinned, truth
from tests.conformance.kron_truth import factored_names, kron_truth
from tests.pairs import turns
from tests.reference import corrected, kfac
from tests.reference.compare import assert_close

pytestmark = pytest.mark.turns

# Output sides without repeated eigenvalues, where the eigenvectors at a cut are defined.
DISTINCT = catalogue.problems("kfac", "classification", without=("saturated", "ignored_labels"))
DISTINCT_CASES = [Case(problem, "lowrank_kron", "all") for problem in DISTINCT]


def expected(case: Case, exact: Tensor, kron: Tensor) -> Tensor:
    """All of the Kronecker product, with the exact diagonal; the diagonal alone where there are no factors."""
    names, diagonal = truth(case.problem.name).names, torch.diag(exact.diagonal())
    inside = torch.tensor([names[i] in factored_names(case.problem) for i in case.tensor_of])
    return torch.where(inside[:, None], corrected.with_diagonal(kron, exact.diagonal()), diagonal)


@pytest.mark.parametrize("case", thinned("lowrank_kron"))
def test_all_columns(case: Case) -> None:
    assert_close(own_dense(case.fit(4)), expected(case, case.dense(), kron_truth(case)), "backend")


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", structures=["lowrank_kron"]))
def test_empirical_fisher(case: Case) -> None:
    exact, kron = case.dense("ef"), kron_truth(case, kind="ef")
    assert_close(own_dense(case.fit(4, kind="ef")), expected(case, exact, kron), "backend")


@pytest.mark.parametrize(("case", "rank"), turns(DISTINCT_CASES, [1, 2, 5]), ids=str)
def test_truncated(case: Case, rank: int) -> None:
    """Oversampling covers the sides, so that the search is exact."""
    problem, names = case.problem, truth(case.problem.name).names
    la = case.fit(4, structure_kwargs={"rank": rank, "oversampling": 500})
    chosen = [names[i] for i in case.tensor_of.unique()]
    factors = kfac.kfac(problem.make_model(), problem.x, problem.y, chosen, problem.likelihood)
    exact, blocks = case.dense(), []
    for i, name in zip(case.tensor_of.unique(), chosen, strict=True):
        inside = case.tensor_of == i
        blocks.append(corrected.lowrank_kron(factors[name], exact[inside][:, inside], rank))
    assert_close(own_dense(la), torch.block_diag(*blocks), "backend")


@pytest.mark.parametrize("is_corrected", [False, True])
@pytest.mark.parametrize("case", few(structures=["lowrank_kron"]))
def test_diagonal_is_exact_and_the_sum_semi_definite_at_every_rank(case: Case, is_corrected: bool) -> None:
    for options in ({}, {"rank": 1, "oversampling": 0}, {"rank": 3, "oversampling": 1, "seed": 7}):
        held = own_dense(case.fit(4, structure_kwargs={**options, "corrected": is_corrected}))
        exact = case.dense()
        assert_close(held.diagonal(), exact.diagonal(), "backend", label=f"diagonal, {options}")
        assert torch.linalg.eigvalsh(held).min() > -1e-12 * exact.trace()


@pytest.mark.parametrize("names", [["mlp_regression"], ["conv2d_regression"]])
def test_terms_of_several_noises(names: list[str]) -> None:
    """The columns are those of the sum, their weights those of each term, the diagonal exact at every noise."""
    for weights in ("all", "last_layer", "mixed"):
        case = Case(catalogue.get(names[0]), "lowrank_kron", weights)
        sigma = drawn(case, "noise", case.n_outputs).exp()
        la = case.fit(4, sigma_noise=sigma)
        assert_close(own_dense(la), expected(case, case.dense(), kron_truth(case)), "backend", label="equal noises")
        for scale in (sigma**-2, torch.rand_like(sigma)):
            held, exact = own_dense(la, scale), case.dense(output_scale=scale)
            assert_close(held.diagonal(), exact.diagonal(), "backend", label="diagonal")
            assert torch.linalg.eigvalsh(held).min() > -1e-12 * exact.trace()


@pytest.mark.parametrize("case", few("all", "last_layer", "random", structures=["lowrank_kron"]))
def test_shards_of_low_rank(case: Case) -> None:
    """Stacked and truncated: the diagonal stays exact, and what was not cut off adds up."""
    batches = case.problem.batches(4)
    for options in ({"rank": 1000}, {"rank": 2}):
        la = case.build(structure_kwargs=options)
        la.fit(batches[:1])
        la.fit(batches[1:], override=False)
        held, exact = own_dense(la), case.dense()
        assert_close(held.diagonal(), exact.diagonal(), "backend", label="diagonal")
        if options["rank"] == 1000:
            assert_close(held, expected(case, exact, kron_truth(case)), "backend", label="all")
        assert torch.linalg.eigvalsh(held).min() > -1e-12 * exact.trace()


class _Decaying(nn.Module):
    """A wide layer whose inputs and output gradients have quickly decaying spectra."""

    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        decay = 0.6 ** torch.arange(width, dtype=torch.float64)
        self.register_buffer("scale", decay)
        self.hidden = nn.Linear(width, width, bias=False, dtype=torch.float64)
        self.head = nn.Linear(width, 3, dtype=torch.float64)
        self.head.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(x * self.scale)) * self.scale)


def decaying(width: int = 60, n_data: int = 300) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(n_data, width, dtype=torch.float64)
    return _Decaying(width), x, torch.randint(3, (n_data,))


def test_seeds_decide_and_the_global_generator_is_left_alone() -> None:
    model, x, y = decaying(20, 60)

    def fitted(seed: int) -> Tensor:
        options = {"rank": 3, "oversampling": 0, "seed": seed}
        la = Laplace(model, "classification", "all", "lowrank_kron", structure_kwargs=options)
        la.fit([(x, y)])
        return own_dense(la)

    state = torch.get_rng_state()
    assert torch.equal(fitted(1), fitted(1)) and not torch.allclose(fitted(1), fitted(2), rtol=1e-9)
    assert torch.equal(state, torch.get_rng_state())


def test_no_factor_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of a whole side leaves the fit: k (I + O) numbers and the diagonal are kept."""
    monkeypatch.setattr("laplace.jacobian.patches.group_gram", None)
    model, x, y = decaying()
    la = Laplace(model, "classification", "all", "lowrank_kron", structure_kwargs={"rank": 4, "oversampling": 2})
    la.fit([(x, y)])
    held = la.fitted().curvature
    assert isinstance(held, LowRankKronCurvature)
    numbers = sum(t.numel() for side in held.sides.values() for t in (side.basis, side.cores))
    assert numbers == 4 * (60 + 60) + 2 * 4 * 4
    assert held.diagonal.shape == (1, 3600)


def test_a_backend_without_sketches_forms_the_factors() -> None:
    class Plain(NativeGGN):
        def diag(self, x: Any, y: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
            return super().diag(x, y, **options)

    problem = catalogue.get("mlp_classification")
    case = Case(problem, "lowrank_kron", "all")
    la = case.build(backend=Plain, structure_kwargs={"rank": 3})
    la.fit(problem.batches(4))
    assert_close(own_dense(la), own_dense(case.fit(4, structure_kwargs={"rank": 3})), "backend")


@pytest.mark.parametrize(
    "case", few("all", "random", structures=["lowrank_kron"], names=["mlp_classification", "conv2d"])
)
def test_pieces_change_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers() -> list[Tensor]:
        la = case.fit(prior_precision=0.3, structure_kwargs={"rank": 4})
        delta = torch.full((len(case.columns),), 0.7, dtype=torch.float64, requires_grad=True)
        value = la.log_marginal_likelihood(delta)
        (gradient,) = torch.autograd.grad(value, delta)
        variance = la.functional_variance(case.jacobian)
        return [
            value.detach(),
            gradient,
            la.posterior_variance,
            variance,
            la.sample(3, torch.Generator().manual_seed(0)),
        ]

    whole = numbers()
    monkeypatch.setattr(kronecker_eigenvectors, "CHUNK_BYTES", 1)
    for one, other in zip(whole, numbers(), strict=True):
        assert_close(other, one, "algebra")


def test_float32_variances_where_little_is_left() -> None:
    """A prior so weak that the columns take away nearly all of a variance: computed again in float64."""
    model, x, y = decaying(8, 40)
    variances: list[Tensor] = []
    for dtype in (torch.float64, torch.float32):
        la = Laplace(model.to(dtype), "classification", "all", "lowrank_kron", prior_precision=1e-6)
        la.fit([(x.to(dtype), y)])
        variances.append(la.functional_variance(la.backend.jacobians(x.to(dtype))[0]).diagonal(dim1=1, dim2=2))
    assert (variances[1] > 0).all()
    assert_close(variances[1], variances[0], "float32_ill")


@pytest.mark.parametrize("options", [{"rank": 0}, {"rank": 1.5}, {"oversampling": -1}, {"ranks": 3}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(LaplaceError, match=next(iter(options))):
        Laplace(nn.Linear(2, 2), "classification", "all", "lowrank_kron", structure_kwargs=options)


def test_coverage_says_how_many_columns() -> None:
    la = Case(catalogue.get("bare_parameter"), "lowrank_kron", "all").fit(structure_kwargs={"rank": 2})
    forms = {words.partition(" → ")[2] for words in la.coverage().values()}
    assert forms == {"2 Kronecker columns and the exact diagonal", "exact diagonal"}


def test_state_round_trip() -> None:
    case = Case(catalogue.get("conv2d_grouped"), "lowrank_kron", "mixed")
    la = case.fit(structure_kwargs={"rank": 3})
    other = case.build()
    other.load_state_dict(la.state_dict())
    assert torch.equal(own_dense(la), own_dense(other))
    assert torch.equal(la(case.problem.x), other(case.problem.x))
