"""Kronecker factors equal the reference's; tensors without factors hold their exact block."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from laplace import KronLaplace, KronSubnetLaplace
from laplace.errors import ApproximationWarning
from tests import problems as catalogue
from tests.conformance.cases import BACKENDS, SUBNETWORKS, Case, cases, few, indices, own_dense, thinned, truth
from tests.conformance.kron_truth import factored_names, kron_truth
from tests.reference import curvature
from tests.reference.compare import assert_close

SHARED = [p for p in catalogue.problems("shared") if "recurrent" not in p.tags]


@pytest.mark.parametrize("case", thinned("kron"))
def test_expand_equals_the_reference(case: Case) -> None:
    check(case, "expand", "ggn")


@pytest.mark.parametrize("case", cases(SHARED, ["all"], ["kron"]) + cases(SHARED[::3], ["mixed"], ["kron"]))
def test_reduce_equals_the_reference(case: Case) -> None:
    check(case, "reduce", "ggn")


@pytest.mark.parametrize(
    "case", cases(weights=["all"], structures=["kron"])[::3] + few("last_layer", structures=["kron"])
)
def test_empirical_fisher_equals_the_reference(case: Case) -> None:
    check(case, "expand", "ef")
    check(case, "reduce", "ef")


@pytest.mark.parametrize("weights", ["last_layer", *SUBNETWORKS])
@pytest.mark.parametrize("name", ["embedding_padding", "tied_head", "conv_transpose2d", "mlp_bernoulli_multi"])
def test_other_weights_of_odd_layers(name: str, weights: str) -> None:
    weights = "mixed" if (name, weights) == ("tied_head", "last_layer") else weights  # see test_last_layer.py
    check(Case(catalogue.get(name), "kron", weights), "expand", "ggn")


def check(case: Case, approx: str, kind: str) -> None:
    la = case.fit(kind=kind, backend_kwargs={"kfac_approx": approx})
    expected = kron_truth(case, approx, kind)
    assert_close(la.H_facs.to_matrix(), expected, "backend", label="factors")
    assert_close(la.H.to_matrix(), expected, "backend", label="eigendecomposition")
    assert_close(own_dense(la), expected, "backend", label="precision")


@pytest.mark.parametrize("case", cases(weights=["all"], structures=["kron"]) + few("mixed", structures=["kron"]))
def test_coverage_names_a_rule_or_a_rung_for_every_tensor(case: Case) -> None:
    names = truth(case.problem.name).names
    factored = factored_names(case.problem)
    coverage = case.fit().coverage()
    assert list(coverage) == [names[i] for i in case.tensor_of.unique()]
    for name, words in coverage.items():
        rule, _, form = words.partition(" → ")
        assert rule not in ("", "?", "unused")
        assert form == ("Kronecker factors" if name in factored else "exact dense block"), (name, words)


def test_embedding_holds_counts_not_a_matrix() -> None:
    case = Case(catalogue.get("embedding_padding"), "kron", "all")
    la = case.fit(4)
    counts, output = la.H.kfacs[0]
    tokens = case.problem.x.flatten()
    expected = torch.bincount(tokens[tokens != 0], minlength=9).double()
    assert_close(counts, expected / expected.sum(), "algebra")
    assert counts.ndim == 1 and output.shape == (4, 4)


class _LargeBare(nn.Module):
    """A parameter that is computed with before it is used, too large for a dense block."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(28, 28, dtype=torch.float64))
        self.head = nn.Linear(28, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(x @ self.table.sin()))


@pytest.mark.parametrize("kind", ["ggn", "ef"])
def test_a_large_tensor_without_factors_holds_its_exact_diagonal(kind: str) -> None:
    model = _LargeBare()
    x, y = torch.randn(5, 28, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    la = KronLaplace(model, "classification", backend=BACKENDS[kind])
    with pytest.warns(ApproximationWarning, match="90.0%.*'table'") as caught:
        la.fit([(x[:3], y[:3]), (x[3:], y[3:])])
    assert len(caught) == 1 and caught[0].filename == __file__
    exact = (curvature.ggn if kind == "ggn" else curvature.empirical_fisher)(model, x, y, ["table"], "classification")
    assert la.coverage()["table"].endswith("exact diagonal")
    assert_close(la.H.kfacs[0][0], exact.diagonal(), "backend")


@pytest.mark.parametrize("case", few("random", "rectangle", "mixed", structures=["kron"]))
def test_subnetwork_is_the_sub_block_of_the_whole(case: Case) -> None:
    whole = own_dense(Case(case.problem, "kron", "all").fit())
    chosen = indices(case.problem, case.weights)
    assert_close(own_dense(case.fit()), whole[chosen][:, chosen], "backend")


def test_indices_in_any_order_mean_the_ascending_ones() -> None:
    problem = catalogue.get("mlp_classification")
    chosen = indices(problem, "random")
    shuffled = chosen[torch.randperm(len(chosen))]
    fits = [KronSubnetLaplace(problem.make_model(), "classification", some) for some in (chosen, shuffled)]
    for la in fits:
        la.fit(problem.batches())
    assert torch.equal(own_dense(fits[0]), own_dense(fits[1]))
    assert torch.equal(fits[0].mean, fits[1].mean)
