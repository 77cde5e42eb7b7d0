"""Predictions of the linearised network and their links against dense algebra."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from laplace import ParametricLaplace
from laplace.core.gaussian import GaussianOutputs
from laplace.errors import LaplaceError
from laplace.predictive import latent
from tests import problems as catalogue
from tests.conformance.cases import FEW, Case, by_turns, drawn, few, priors, truth
from tests.reference import curvature as reference
from tests.reference import likelihoods, predictive
from tests.reference.compare import assert_close

pytestmark = pytest.mark.portable

SOFTMAX = ("mlp_classification", "conv2d_grouped")
REGRESSIONS = ("mlp_regression", "conv2d_regression", "mlp_regression_single", "embedding_positions")


def covariance_of(la: ParametricLaplace) -> Tensor:
    """P⁻¹ from the dense precision."""
    return torch.linalg.inv(la.evidence().precision.to_dense())


def latent_of(la: ParametricLaplace, x: Any, form: str) -> GaussianOutputs:
    """The latent Gaussian before any link."""
    return latent.linearised(la.engine, la.posterior(), x, form, create_graph=la.enable_backprop)


@pytest.mark.parametrize("case", by_turns() + few("last_layer", "rectangle", "mixed"))
def test_latent_gaussian(case: Case) -> None:
    la = case.fit(prior_precision=0.4)
    x, jacobian, covariance = case.problem.x, case.jacobian, covariance_of(la)
    variance = predictive.functional_variance(jacobian, covariance)
    joint = predictive.functional_covariance(jacobian, covariance)
    for form, expected in (("full", variance), ("diagonal", variance.diagonal(dim1=1, dim2=2)), ("joint", joint)):
        gaussian = latent_of(la, x, form)
        assert_close(gaussian.mean, truth(case.problem.name).f, "backend", label=f"mean, {form}")
        assert_close(gaussian.covariance, expected, "backend", label=form)
    assert_close(la.functional_variance(jacobian), variance, "algebra", label="functional_variance")
    assert_close(la.functional_covariance(jacobian), joint, "algebra", label="functional_covariance")


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed"))
def test_latent_gaussian_under_other_priors(case: Case) -> None:
    la = case.fit(**({"damping": True} if case.structure == "kron" else {}))
    for form in ("layerwise", "diag"):
        la.prior_precision = priors(case)[form][0]
        _check_forms(case, la)


def _check_forms(case: Case, la: ParametricLaplace) -> None:
    joint = predictive.functional_covariance(case.jacobian, covariance_of(la))
    outputs = case.n_outputs
    assert_close(latent_of(la, case.problem.x, "joint").covariance, joint, "backend", label="joint")
    rows = [joint[i : i + outputs, i : i + outputs] for i in range(0, len(joint), outputs)]
    assert_close(latent_of(la, case.problem.x, "full").covariance, torch.stack(rows), "backend", label="full")
    variances = joint.diagonal().view(-1, outputs)
    assert_close(latent_of(la, case.problem.x, "diagonal").covariance, variances, "backend", label="diagonal")


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", names=(*FEW, "embedding_positions")))
@pytest.mark.turns
def test_scan_over_priors(case: Case) -> None:
    """What a grid search sees at its candidates, all at once or one by one, is what the posterior says there."""
    deltas = torch.tensor([1e-3, 0.4, 30.0], dtype=torch.float64)
    fits = [case.fit(temperature=0.7)]
    if case.structure == "kron":
        fits.append(case.fit(temperature=0.7, damping=True))
    if case.problem.likelihood == "regression":
        fits.append(case.fit(sigma_noise=drawn(case, "sigma", case.n_outputs).exp()))
    for la in fits:
        found = la.evidence()
        scan = found.fit.curvature.scan(found.weights, la.problem.layout, **found.options)
        for diagonal, form in ((False, "full"), (True, "diagonal")):
            jacobians = [jacobian for jacobian, _ in la.engine.jacobian(case.problem.x)]
            functions = [scan.variances(jacobian, diagonal=diagonal) for jacobian in jacobians]
            together = torch.cat([variances(deltas) for variances in functions], 1)
            for delta, found_at in zip(deltas, together, strict=True):
                la.prior_precision = delta
                expected = latent_of(la, case.problem.x, form).covariance
                alone = [variances(la.prior_precision)[0] for variances in functions]
                assert_close(torch.cat(alone), expected, "backend", label=form)
                assert_close(found_at, expected, "backend", label=form)
        jacobian = case.jacobian - case.jacobian.mean(1, keepdim=True)
        for delta in deltas:
            la.prior_precision = delta
            expected = predictive.functional_variance(jacobian, covariance_of(la)).diagonal(dim1=1, dim2=2)
            functions = [scan.centred_variances(jacobian) for jacobian, _ in la.engine.jacobian(case.problem.x)]
            found_at = torch.cat([variances(la.prior_precision)[0] for variances in functions])
            assert_close(found_at, expected, "backend", label="centred")
            assert_close(latent_of(la, case.problem.x, "centred").covariance, expected, "backend", label="centred")


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", names=REGRESSIONS))
def test_regression(case: Case) -> None:
    """Forms and shapes of the contract, with and without the noise of the observations."""
    sigma = drawn(case, "sigma", case.n_outputs).exp() if case.n_outputs > 1 else torch.tensor(0.7)
    la = case.fit(sigma_noise=sigma, prior_precision=0.4)
    x, (n_data, outputs) = case.problem.x, truth(case.problem.name).f.shape
    joint = predictive.functional_covariance(case.jacobian, covariance_of(la))
    blocks = predictive.functional_variance(case.jacobian, covariance_of(la))
    noise = sigma.double().square().expand(outputs)
    f = truth(case.problem.name).f
    for noisy in (False, True):
        added = noise * noisy
        mean, variance = la(x, observation_noise=noisy)
        assert_close(mean, f, "backend")
        assert_close(variance, blocks + torch.diag(added), "backend", label="full")
        mean, variance = la(x, diagonal_output=True, observation_noise=noisy)
        assert_close(mean, f, "backend")
        assert_close(variance, blocks.diagonal(dim1=1, dim2=2) + added, "backend", label="diagonal")
        mean, variance = la(x, joint=True, observation_noise=noisy)
        assert_close(mean, f.flatten(), "backend")
        assert_close(variance, joint + torch.diag(added.repeat(n_data)), "backend", label="joint")


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", names=SOFTMAX))
@pytest.mark.parametrize("link", ["probit", "probit_centred", "bridge", "bridge_norm"])
@pytest.mark.turns
def test_softmax_links(case: Case, link: str) -> None:
    la = case.fit(prior_precision=0.4)
    f, variance = truth(case.problem.name).f, predictive.functional_variance(case.jacobian, covariance_of(la))
    expected = getattr(predictive, link)(f, variance)
    assert_close(la(case.problem.x, link_approx=link), expected, "backend", label=link)
    assert_close(la.predictive(case.problem.x, "glm", link, 10), expected, "backend", label="predictive")
    # diagonal_output is for sampled links alone
    assert_close(la(case.problem.x, link_approx=link, diagonal_output=True), expected, "backend", label="diagonal")


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", names=["mlp_classification", "mlp_bernoulli_multi"]))
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.turns
def test_monte_carlo_links(case: Case, diagonal: bool) -> None:
    la = case.fit(prior_precision=0.4)
    f, variance = truth(case.problem.name).f, predictive.functional_variance(case.jacobian, covariance_of(la))
    variance = torch.diag_embed(variance.diagonal(dim1=1, dim2=2)) if diagonal else variance
    link = "softmax" if case.problem.likelihood == "classification" else "sigmoid"
    generator = torch.Generator().manual_seed(1)
    expected, error = predictive.monte_carlo(f, variance, 20_000, generator, link)
    options = {"link_approx": "mc", "n_samples": 20_000, "generator": torch.Generator().manual_seed(2)}
    actual = la(case.problem.x, diagonal_output=diagonal, **options)
    assert_close(actual, expected, "mc", standard_error=error * 2**0.5)
    if not diagonal:
        assert_close(la(case.problem.x, joint=True, **options), expected, "mc", standard_error=error * 2**0.5)


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", names=["mlp_poisson", "mlp_heteroscedastic"]))
@pytest.mark.turns
def test_moments_of_targets(case: Case) -> None:
    """E[y] and Var(y), with the noise, under every link and form; aleatoric and epistemic parts."""
    la = case.fit(prior_precision=4.0)
    f, variance = truth(case.problem.name).f, predictive.functional_variance(case.jacobian, covariance_of(la))
    expected, aleatoric, epistemic = likelihoods.moments(f, variance, case.problem.likelihood)
    for options in ({}, {"link_approx": "mc"}, {"diagonal_output": True}, {"joint": True}):
        mean, spread = la(case.problem.x, **options)
        assert_close(mean, expected, "backend", label=f"mean, {options}")
        assert_close(spread, aleatoric + epistemic, "backend", label=f"variance, {options}")
    found = la.predict(case.problem.x, n_samples=10)
    assert_close(found.variance, aleatoric + epistemic, "backend")
    assert_close(found.decomposition.aleatoric, aleatoric, "backend")
    assert_close(found.decomposition.epistemic, epistemic, "backend")


@pytest.mark.parametrize("case", few("all", "last_layer", names=["mlp_bernoulli_single", "mlp_bernoulli_multi"]))
def test_bernoulli(case: Case) -> None:
    la = case.fit(prior_precision=0.4)
    f, variance = truth(case.problem.name).f, predictive.functional_variance(case.jacobian, covariance_of(la))
    assert_close(la(case.problem.x), predictive.bernoulli_probit(f, variance), "backend")
    for link in ("bridge", "bridge_norm"):
        with pytest.raises(LaplaceError, match="probit"):
            la(case.problem.x, link_approx=link)


@pytest.mark.parametrize("case", few("all", "random", names=["pair", "pair_view", "pair_cat"]))
def test_reward_modelling(case: Case) -> None:
    """Pairs give latents or, while fitting, preference probabilities; single items give rewards."""
    la = case.fit(prior_precision=0.4)
    problem, covariance = case.problem, covariance_of(la)
    variance = predictive.functional_variance(case.jacobian, covariance)
    mean, actual = la(problem.x)
    assert_close(mean, truth(problem.name).f, "backend")
    assert_close(actual, variance, "backend", label="variance of pairs")
    preferences = la(problem.x, fitting=True)
    assert_close(preferences, predictive.probit(mean, variance), "backend", label="preferences")
    single, f = reference.flat_jacobian(problem.make_model(), problem.x[:, 0], truth(problem.name).names)
    reward, spread = la(problem.x[:, 0])
    assert_close(reward, f, "backend", label="rewards")
    assert_close(spread, predictive.functional_variance(single[:, :, case.columns], covariance), "backend")
    samples = la.predictive_samples(problem.x, n_samples=50)
    assert_close(samples.sum(2), torch.ones(50, len(mean)), "algebra", label="probabilities of pairs")
    assert samples.std(0).min() > 0
    assert la.predictive_samples(problem.x[:, 0], n_samples=50).std(0).min() > 0


@pytest.mark.parametrize("case", few("all", "last_layer"))
def test_without_data_the_prior_decides(case: Case) -> None:
    """A huge prior precision gives the network's own prediction."""
    la = case.fit(prior_precision=1e12)
    f = truth(case.problem.name).f
    if case.problem.likelihood in ("regression", "reward_modeling"):
        mean, variance = la(case.problem.x)
        assert_close(mean, f, "backend")
        assert variance.abs().max() < 1e-9
        return
    link = torch.sigmoid if case.problem.likelihood == "bernoulli" else lambda z: torch.softmax(z, 1)
    assert (la(case.problem.x) - link(f)).abs().max() < 1e-9


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("case", few("all", "last_layer", "random", names=FEW[:3]))
@pytest.mark.turns
def test_gradients_switched_off_change_nothing(case: Case, mode: Any) -> None:
    outside, la = case.fit(prior_precision=2.0), case.build()

    def numbers(posterior: ParametricLaplace, x: Tensor) -> list[Tensor]:
        sampled = posterior(x, "nn", n_samples=3, generator=torch.Generator().manual_seed(0))
        predictions = [posterior(x), sampled]
        found = [posterior.log_marginal_likelihood(), posterior.posterior_variance, posterior.sample(2)]
        return found + [part for one in predictions for part in (one if isinstance(one, tuple) else [one])]

    torch.manual_seed(0)
    expected = numbers(outside, case.problem.x)
    with mode():
        la.fit([tuple(part.clone() for part in batch) for batch in case.problem.batches()])
        la.prior_precision = 2.0
        torch.manual_seed(0)
        for actual, wanted in zip(numbers(la, case.problem.x.clone()), expected, strict=True):
            assert_close(actual, wanted, "algebra")
    # what was fitted and set under the mode is of use outside of it
    torch.manual_seed(0)
    for actual, wanted in zip(numbers(la, case.problem.x), expected, strict=True):
        assert_close(actual, wanted, "algebra")
    for prior, _ in priors(case).values():
        la.prior_precision = prior.clone().requires_grad_()
        la.log_marginal_likelihood().backward()
    la.enable_backprop, la.prior_precision = True, 2.0
    latent_of(la, case.problem.x.clone().requires_grad_(), "full").covariance.sum().backward()


def test_options_without_meaning_are_refused() -> None:
    la = Case(catalogue.get("mlp_classification"), "kron", "all").fit()
    x = catalogue.get("mlp_classification").x
    for options in (
        {"observation_noise": True},
        {"pred_type": "gp"},
        {"link_approx": "logit"},
        {"n_samples": 0},
        {"generator": 3},
        {"not_an_option": 1},
    ):
        with pytest.raises(LaplaceError):
            la(x, **options)
