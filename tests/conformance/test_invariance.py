"""What must not matter: batch size and order, shards, ignored data, the form of a batch, the memory budget."""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import ParametricLaplace
from laplace.errors import DataWarning, LaplaceError
from tests import problems as catalogue
from tests.conformance.backends import BACKENDS
from tests.conformance.cases import BACKENDS as NATIVE
from tests.conformance.cases import FEW, STRUCTURE_NAMES, SUMMING, Case, cases, drawn, few, own_dense
from tests.conformance.kron_truth import kron_truth
from tests.conformance.test_predictions import latent_of
from tests.pairs import turns
from tests.reference.compare import assert_close

pytestmark = pytest.mark.turns


def same(one: ParametricLaplace, other: ParametricLaplace, label: str = "", kind: str = "backend") -> None:
    """Two posteriors hold the same numbers."""
    assert_close(own_dense(one), own_dense(other), kind, label=f"curvature {label}")
    assert_close(one.log_likelihood, other.log_likelihood, kind, label=f"log likelihood {label}")
    assert (one.n_data, one.n_outputs) == (other.n_data, other.n_outputs)
    assert_close(one.mean, other.mean, "exact", label=f"mean {label}")


@pytest.mark.parametrize(
    "case",
    cases(weights=["all"], structures=["kron"])
    + few("all", "last_layer", "mixed", structures=["full", "diag"], names=FEW[:4]),
)
def test_batch_size_and_order(case: Case) -> None:
    """Also with a last batch that is smaller, down to one datum."""
    whole = case.fit()
    same(case.fit(2), whole, "batches of 2")
    la = case.build()
    la.fit(case.problem.batches(len(case.problem.y) - 1))
    same(la, whole, "a last batch of one")
    la.fit(case.problem.batches(4)[::-1])
    same(la, whole, "in reverse order")


@pytest.mark.parametrize("case", few("all", "last_layer", "random", structures=SUMMING))
def test_shards_add_up(case: Case) -> None:
    """fit(a); fit(b, override=False) equals fit(a + b); fit(a) again forgets."""
    batches, kind = case.problem.batches(4), "ef" if case.weights == "random" else "ggn"
    whole = case.fit(kind=kind)
    la = case.build(backend=whole.backend_cls)
    la.fit(batches[:1], override=False)
    la.fit(batches[1:], override=False)
    same(la, whole, "two fits")
    x = case.problem.x
    assert_close(latent_of(la, x, "full").covariance, latent_of(whole, x, "full").covariance, "backend")
    la.fit(batches)
    same(la, whole, "override")


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", structures=SUMMING, names=["mlp_regression"]))
def test_shards_with_several_noises(case: Case) -> None:
    sigma = drawn(case, "sigma", case.n_outputs).exp()
    batches = case.problem.batches(4)
    la = case.build(sigma_noise=sigma)
    la.fit(batches[:1])
    la.fit(batches[1:], override=False)
    whole = case.fit(sigma_noise=sigma)
    assert_close(la.log_marginal_likelihood(), whole.log_marginal_likelihood(), "backend")
    assert_close(la.posterior_variance, whole.posterior_variance, "backend")


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", names=["mlp_regression"]))
def test_shards_with_and_without_terms_do_not_add(case: Case) -> None:
    """One term and one per output are no sum: that is refused, and the former posterior stays."""
    batches = case.problem.batches(4)
    for first, second in ((1.0, torch.ones(2)), (torch.ones(2), 1.0)):
        la = case.build(sigma_noise=first)
        la.fit(batches[:1])
        before = own_dense(la)
        la.sigma_noise = second
        with pytest.raises(LaplaceError, match="sigma_noise"):
            la.fit(batches[1:], override=False)
        assert torch.equal(own_dense(la), before)


@pytest.mark.parametrize("kind", ["ggn", "ef"])
@pytest.mark.parametrize("case", few("all", "last_layer", "random", names=["mlp_ignored_labels"]))
def test_ignored_labels_count_nowhere(case: Case, kind: str) -> None:
    problem = case.problem
    kept = problem.y != -100
    alone = case.build(backend=case.fit(kind=kind).backend_cls)
    alone.fit([(problem.x[kept], problem.y[kept])])
    for size in (7, 2, 1):  # one of the batches of one holds nothing but an ignored label
        la = case.fit(size, kind=kind)
        same(la, alone, f"batches of {size}")
        assert_close(la.log_marginal_likelihood(), alone.log_marginal_likelihood(), "backend")
    assert la.n_data == int(kept.sum())


class Whole(nn.Module):
    """Takes the whole mapping."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, data: Mapping[str, Tensor]) -> Tensor:
        return self.net(data["input_ids"])


class Named(Whole):
    """Names its inputs, as the models of a language library do."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is None
        return self.net(input_ids)


class Spread(Whole):
    """Takes keywords only."""

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.net(inputs["input_ids"])


@pytest.mark.filterwarnings("ignore:grid search")
@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", names=["mlp_classification", "transformer"]))
@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("wrapper", [Whole, Named, Spread])
def test_mappings_equal_pairs(wrapper: type[Whole], kind: type[Mapping[str, Tensor]], case: Case) -> None:
    """Fit, every prediction, and tuning."""
    problem = case.problem
    batches = problem.batches(4)
    mapped = [kind({"input_ids": x, "labels": y}) for x, y in batches]
    named = {"last_layer_name": f"net.{problem.head}"} if case.weights == "last_layer" else {}
    pairs, la = case.fit(4), case.build(wrapper(problem.make_model()), **named)
    la.fit(mapped)
    same(la, pairs)
    for form in ({"input_ids": problem.x}, {"input_ids": problem.x, "labels": problem.y}):
        latents = [latent_of(one, x, "full") for one, x in ((pairs, problem.x), (la, kind(form)))]
        assert_close(latents[1].mean, latents[0].mean, "backend", label="mean")
        assert_close(latents[1].covariance, latents[0].covariance, "backend", label="covariance")
        draws = [one.functional_samples(x, "nn", n_samples=3, generator=torch.Generator().manual_seed(0))
                 for one, x in ((pairs, problem.x), (la, kind(form)))]  # fmt: skip
        assert_close(draws[1], draws[0], "algebra", label="samples")
    values = [
        one.optimize_hyperparameters(
            objective="nll", val_loader=loader, grid={"prior_precision": [0.1, 1.0, 7.0]}
        ).values
        for one, loader in ((pairs, batches), (la, mapped))
    ]
    assert_close(values[1], values[0], "backend", label="validation losses")


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed"))
def test_predictions_do_not_depend_on_the_batch(case: Case) -> None:
    la = case.fit(prior_precision=0.5)
    x = case.problem.x
    whole = latent_of(la, x, "full")
    for part in (slice(0, 1), slice(1, 4)):
        gaussian = latent_of(la, x[part], "full")
        assert_close(gaussian.mean, whole.mean[part], "backend", label="mean")
        assert_close(gaussian.covariance, whole.covariance[part], "backend", label="covariance")


BUDGETS = (1, 2000)
SPLIT = ["full", "block", "lowrank"]  # what the packages' engines compute a few vectors at a time


@pytest.mark.parametrize(
    "case", few("all", "last_layer", "mixed", names=["mlp_classification", "conv2d_grouped", "bare_parameter"])
)
def test_memory_budget_changes_nothing(case: Case) -> None:
    """Neither the curvature nor predictions, nor the draws for equal seeds."""
    kind = "ef" if case.weights == "mixed" else "ggn"
    check_budgets(case, backend=NATIVE[kind])


@pytest.mark.parametrize(("name", "structure"), turns(BACKENDS, SPLIT))
def test_memory_budget_of_other_packages_changes_nothing(name: str, structure: str) -> None:
    case = Case(catalogue.get("mlp_classification"), structure, "mixed")
    backend, options = BACKENDS[name], dict(case.exactly.get("structure_kwargs", {}))
    if backend.kind == "hessian":
        options["indefinite"] = "abs"
    check_budgets(case, backend=backend.cls, structure_kwargs=options)


def check_budgets(case: Case, **options: Any) -> None:
    x, batches = case.problem.x, case.problem.batches()
    plain = case.build(**options)
    plain.fit(batches)
    for budget in BUDGETS:
        la = case.build(backend_kwargs={"memory_budget": budget}, **options)
        la.fit(batches)
        precisions = [one.evidence().precision.to_dense() for one in (la, plain)]
        assert_close(*precisions, "backend", label=f"precision, budget {budget}")
        assert_close(la.log_likelihood, plain.log_likelihood, "backend", label=f"log likelihood, budget {budget}")
        for form in ("full", "diagonal", "joint"):
            one, other = latent_of(la, x, form), latent_of(plain, x, form)
            assert_close(one.covariance, other.covariance, "backend", label=f"{form}, budget {budget}")
        for pred_type, joint in (("glm", False), ("glm", True), ("nn", False)):
            if joint and len(case.columns) <= 3 * len(x):
                continue  # a singular covariance has many roots, and rounding chooses among them
            draws = [
                p.functional_samples(x, pred_type, 4, joint=joint, generator=torch.Generator().manual_seed(0))
                for p in (la, plain)
            ]
            assert_close(draws[0], draws[1], "backend", label=f"samples, {pred_type}")


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", names=["conv2d_grouped", "embedding_padding"]))
def test_pieces_of_one_datum_change_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too large for a chunk is contracted datum by datum."""
    plain, x = case.fit(), case.problem.x
    expected = {form: latent_of(plain, x, form).covariance for form in ("full", "diagonal", "joint")}
    chunked = [m for name, m in sys.modules.items() if name.startswith("laplace.") and "CHUNK_BYTES" in vars(m)]
    assert len(chunked) > 1
    for module in chunked:
        monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    la = case.fit()
    same(la, plain)
    for form, covariance in expected.items():
        assert_close(latent_of(la, x, form).covariance, covariance, "backend", label=form)


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", names=["mlp_regression", "conv2d_regression"]))
def test_memory_budget_keeps_the_terms_of_several_noises(case: Case) -> None:
    sigma = drawn(case, "sigma", case.n_outputs).exp()
    plain = case.fit(sigma_noise=sigma)
    for budget in BUDGETS:
        la = case.fit(sigma_noise=sigma, backend_kwargs={"memory_budget": budget})
        assert_close(own_dense(la, sigma**-2), own_dense(plain, sigma**-2), "backend", label=f"budget {budget}")


@pytest.mark.parametrize(
    "case", few("all", "mixed", structures=["kron"], names=["shared_positions", "conv2d", "pair_cat"])
)
def test_small_batches_keep_the_reduce_approximation(case: Case) -> None:
    la = case.fit(4, backend_kwargs={"kfac_approx": "reduce"})
    assert_close(own_dense(la), kron_truth(case, "reduce"), "backend")


def test_data_loaders_with_workers_and_order_of_their_own() -> None:
    problem = catalogue.get("mlp_classification")
    data = torch.utils.data.TensorDataset(problem.x, problem.y)
    options: list[dict[str, Any]] = [{"batch_size": 4}, {"batch_size": 4, "shuffle": True}, {"batch_size": 1}]
    for structure in STRUCTURE_NAMES:
        case = Case(problem, structure, "all")
        for option in options:
            la = case.build()
            la.fit(torch.utils.data.DataLoader(data, **option))
            same(la, case.fit())
        la = case.build()
        with pytest.warns(DataWarning, match="drop_last"):
            la.fit(torch.utils.data.DataLoader(data, batch_size=4, drop_last=True))
        assert la.n_data == 4
