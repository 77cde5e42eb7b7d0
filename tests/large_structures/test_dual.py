"""Full posteriors of few data, factored between their rows: the same posterior, whichever side is less work."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import FullLaplace, Laplace, ParametricLaplace
from laplace.curvature import NativeEF
from laplace.large_structures.rows import RowCurvature
from laplace.structures import full
from laplace.structures.full import FullCurvature
from tests import problems as catalogue
from tests.conformance import test_evidence, test_gradients, test_prediction_gradients, test_predictions, test_samples
from tests.conformance.cases import Case, drawn, few, priors, truth
from tests.conformance.test_predictions import latent_of
from tests.reference import curvature as reference
from tests.reference import evidence, gaussian_process
from tests.reference.compare import assert_close

pytestmark = pytest.mark.portable

NAMES = ["mlp_classification", "mlp_regression", "mlp_ignored_labels", "conv2d_grouped", "transformer", "pair"]
HYPER = {"prior_precision": 0.3, "prior_mean": 0.1, "temperature": 1.6}


@pytest.fixture(autouse=True)
def rows_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every problem, however small it is and however many its data are."""
    monkeypatch.setattr(full, "is_less_work", lambda n_params, n_rows: True)
    monkeypatch.setattr(RowCurvature, "_is_less_work", property(lambda self: self.sums.is_empty))


def held(la: ParametricLaplace) -> RowCurvature:
    """The curvature, which must be held by its rows."""
    curvature = la.fitted().curvature
    assert isinstance(curvature, RowCurvature)
    return curvature


def matrix(la: ParametricLaplace) -> ParametricLaplace:
    """The same posterior by its matrix."""
    other = copy.deepcopy(la)
    other.load_state_dict(la.state_dict())
    assert type(other.fitted().curvature) is FullCurvature
    return other


def network(*widths: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(*widths[:2]), nn.Tanh(), nn.Linear(*widths[1:])).double()


def data(n_data: int, width: int = 30) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n_data, width, dtype=torch.float64, generator=generator)
    return x, torch.randint(3, (n_data,), generator=generator)


# The conformance tests that other structures pass.


PRODUCTS: list[tuple[Callable[[Case], None], list[Any]]] = [
    (test_predictions.test_latent_gaussian, few("all", "last_layer", "mixed", structures=["full"], names=NAMES)),
    (test_evidence.test_terms_of_the_evidence, few("all", "last_layer", structures=["full"], names=NAMES)),
    (test_evidence.test_posterior_under_priors_of_every_form, few("all", "last_layer", "mixed", structures=["full"])),
    (
        test_gradients.test_prior_precision_and_temperature,
        few("all", "last_layer", structures=["full"], names=NAMES[:2]),
    ),
    (test_gradients.test_noise, few("all", "last_layer", structures=["full"], names=["mlp_regression"])),
    (test_samples.test_weights, few("all", "mixed", structures=["full"], names=NAMES[:1])),
]


@pytest.mark.parametrize(
    "test, case",
    [pytest.param(test, *case.values, id=f"{test.__name__}-{case.id}") for test, cases in PRODUCTS for case in cases],
)
def test_conformance(test: Callable[[Case], None], case: Case) -> None:
    held(case.fit())
    test(case)


@pytest.mark.parametrize("case", few("all", "last_layer", structures=["full"], names=["mlp_regression"]))
def test_gradients_of_predictions(case: Case) -> None:
    la = case.fit(prior_precision=0.4)
    held(la)
    wanted = ("covariance", "variance", "joint covariance", "samples of weights", "posterior_variance", "log_prob")
    quantities = {name: test_prediction_gradients.MOMENTS[name] for name in wanted}
    for prior, _ in priors(case).values():
        test_prediction_gradients.check(la, "prior_precision", prior, case.problem.x[:3], quantities)
        la.prior_precision = prior
        for name in ("temperature", "sigma_noise"):
            test_prediction_gradients.check(
                la, name, torch.tensor(0.8, dtype=torch.float64), case.problem.x[:3], quantities
            )


# Oracles between data, which know no matrix of weights.


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("name", ["mlp_classification", "mlp_regression", "mlp_poisson", "mlp_bernoulli_multi"])
def test_dense_gaussian_process(name: str, weights: str) -> None:
    case = Case(catalogue.get(name), "full", weights)
    problem, known = case.problem, truth(name)
    noise = {"sigma_noise": 0.45} if problem.likelihood == "regression" else {}
    variances = drawn(case, "prior", len(case.columns)).exp()
    inner = reference.output_hessian(known.f, problem.likelihood, problem.y)
    sigma = noise.get("sigma_noise", 1.0)
    scale = 1 / (sigma**2 * HYPER["temperature"])
    la = case.fit(5, **(HYPER | noise))
    loss = reference.loss(known.f, problem.y, problem.likelihood)
    for prior in (torch.full_like(variances, 0.3), variances):
        la.prior_precision = prior if prior is variances else 0.3
        ratio = gaussian_process.log_det_ratio(case.jacobian, inner, prior, scale)
        likelihood = evidence.log_likelihood(
            loss,
            len(problem.y),
            case.n_outputs,
            noise.get("sigma_noise", 1.0),
            HYPER["temperature"],
            problem.likelihood,
        )
        scatter = (prior * (case.mean - HYPER["prior_mean"]).square()).sum()
        assert_close(la.log_marginal_likelihood(), likelihood - 0.5 * (ratio + scatter), "backend", label="evidence")
        expected = gaussian_process.posterior_covariance(case.jacobian, case.jacobian, inner, prior, scale)
        assert_close(latent_of(la, problem.x, "joint").covariance, expected, "backend", label="joint")
        assert_close(
            latent_of(la, problem.x, "diagonal").covariance.flatten(), expected.diagonal(), "backend", label="diagonal"
        )
    assert "values" not in vars(held(la)), "a matrix of weights was made"


def test_weighted_data_and_empirical_fisher() -> None:
    for options in ({"class_weight": torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)}, {"backend": NativeEF}):
        case = Case(catalogue.get("mlp_classification"), "full", "all")
        la = case.build(**options) if "backend" in options else _weighted(case, **options)
        la.fit(case.problem.batches(4))
        held(la)
        same(la, matrix(la), case.problem.x)


def _weighted(case: Case, class_weight: Tensor) -> ParametricLaplace:
    from laplace.likelihoods import Categorical

    return FullLaplace(case.problem.make_model(), Categorical(class_weight=class_weight))


def same(one: ParametricLaplace, other: ParametricLaplace, x: Any, row: str = "algebra") -> None:
    """Equal evidence, variances, covariances, products and densities."""
    assert_close(one.log_marginal_likelihood(), other.log_marginal_likelihood(), row, label="evidence")
    for form in ("diagonal", "full", "joint"):
        assert_close(latent_of(one, x, form).covariance, latent_of(other, x, form).covariance, row, label=form)
    assert_close(one.posterior_variance, other.posterior_variance, row, label="variance")
    vectors = drawn(Case(catalogue.get("mlp_classification"), "full", "all"), "v", 3, len(one.mean)).to(one.mean)
    precisions = [la.evidence().precision for la in (one, other)]
    for exponent in (1, -1):
        found, expected = (precision.power(vectors, exponent) for precision in precisions)
        assert_close(found, expected, row, label=f"power {exponent}")
    eye = torch.eye(len(one.mean), dtype=one.mean.dtype)
    for precision in precisions:
        root = precision.power(eye, -0.5)
        assert_close(vectors @ root.T @ root, precisions[1].power(vectors, -1), row, label="a root")
    assert_close(one.log_prob(one.mean + 0.1), other.log_prob(one.mean + 0.1), row, label="density")


@pytest.mark.parametrize("name", ["mlp_regression", "conv2d_regression"])
def test_one_noise_per_output(name: str) -> None:
    case = Case(catalogue.get(name), "full", "all")
    sigma = drawn(case, "sigma", case.n_outputs).mul(0.3).exp()
    for weights in ("all", "last_layer") if name == "mlp_regression" else ("all",):
        la = Case(case.problem, "full", weights).fit(4, sigma_noise=sigma, temperature=1.3)
        for prior in (0.2, *(prior for prior, _ in priors(Case(case.problem, "full", weights)).values())):
            la.prior_precision = prior
            same(la, matrix(la), case.problem.x)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_float32_networks_lose_no_digits_between_the_sides(likelihood: str) -> None:
    problem = catalogue.get(f"mlp_{likelihood}")
    y = problem.y.float() if likelihood == "regression" else problem.y
    for weights in ("all", "last_layer"):
        la = Laplace(problem.make_model().float(), likelihood, weights, "full", prior_precision=1e-3)
        la.fit([(problem.x.float(), y)])
        other = matrix(la)
        for form in ("diagonal", "full", "joint"):
            found, expected = (latent_of(one, problem.x.float(), form).covariance for one in (la, other))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0 if form == "diagonal" else 1e-5)
        torch.testing.assert_close(la.log_marginal_likelihood(), other.log_marginal_likelihood(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_heads_of_data_that_repeat_keep_their_digits_under_weak_priors(likelihood: str) -> None:
    """Beside the singular value decomposition of the rows, in which nothing cancels."""
    model, (x, y) = network(20, 24, 3), data(6, 20)
    x, y = 10 * x.repeat(4, 1), y.repeat(4)
    la = Laplace(model, likelihood, "last_layer", "full")
    la.fit([(x, y if likelihood == "classification" else x[:, :3])])
    at = torch.cat([x[:2], x[:2] + 3])
    seen = torch.cat([part.dense().flatten(0, 1) for part in held(la).rows.parts])
    jacobian = torch.cat([part.dense() for part, _ in la.engine.jacobian(at)])
    _, singular, span = torch.linalg.svd(seen, full_matrices=False)
    inside = jacobian @ span.T
    outside = (jacobian - inside @ span).square().sum(2)
    for prior in (1.0, 1e-3, 1e-6):
        la.prior_precision = prior
        expected = inside.square() @ (1 / (prior + singular.square())) + outside / prior
        found = latent_of(la, at, "diagonal").covariance
        torch.testing.assert_close(found, expected, rtol=1e-11 / prior, atol=0)


# Invariance.


@pytest.mark.parametrize("name", ["mlp_classification", "conv2d_grouped", "embedding_padding"])
def test_batches_and_their_order_change_nothing(name: str) -> None:
    """Samples neither: their root is a symmetric one, whichever row is the first."""
    case = Case(catalogue.get(name), "full", "all")
    whole, order = case.fit(), torch.randperm(len(case.problem.y), generator=torch.Generator().manual_seed(3))
    x, y = case.problem.x[order], case.problem.y[order]
    for size in (1, 3):
        la = case.build()
        la.fit([(x[i : i + size], y[i : i + size]) for i in range(0, len(y), size)])
        same(la, whole, case.problem.x)
        found, expected = (one.sample(3, generator=torch.Generator().manual_seed(0)) for one in (la, whole))
        assert_close(found, expected, "backend", label="samples")


def test_a_loader_may_fill_its_tensors_anew() -> None:
    case = Case(catalogue.get("mlp_classification"), "full", "all")
    x, y = torch.empty_like(case.problem.x[:2]), torch.empty_like(case.problem.y[:2])

    class Refilled:
        def __iter__(self) -> Any:
            for i in range(0, 6, 2):
                x.copy_(case.problem.x[i : i + 2])
                y.copy_(case.problem.y[i : i + 2])
                yield x, y

    la, expected = case.build(), case.build()
    la.fit(Refilled())
    x.fill_(7)
    expected.fit([(case.problem.x[:6], case.problem.y[:6])])
    held(la)
    same(la, expected, case.problem.x)
