"""Samples of weights and outputs: their moments, their independence, and the generator they come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from laplace import ParametricLaplace
from tests import problems as catalogue
from tests.conformance.cases import SUBNETWORKS, Case, few, priors, truth
from tests.conformance.test_predictions import covariance_of
from tests.reference import curvature as reference
from tests.reference import predictive
from tests.reference.compare import assert_close

pytestmark = [pytest.mark.portable, pytest.mark.turns]

SAMPLES = 4000


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same_moments(draws: Tensor, mean: Tensor, covariance: Tensor, label: str) -> None:
    """Draws `[S, n]` against N(mean, covariance), each moment within its standard error."""
    count, variances = len(draws), covariance.diagonal()
    floor = 1e-12 * variances.max()
    assert_close(draws.mean(0), mean, "mc", standard_error=((variances + floor) / count).sqrt(), label=f"{label}: mean")
    error = ((variances.outer(variances) + covariance.square()) / count).sqrt() + floor
    centred = draws - mean
    assert_close(centred.T @ centred / count, covariance, "mc", standard_error=error, label=f"{label}: covariance")


@pytest.mark.parametrize("case", few(names=["mlp_classification", "conv2d_regression", "bare_parameter"]))
def test_weights(case: Case) -> None:
    la = case.fit()
    for prior, _ in priors(case).values():
        la.prior_precision = prior
        _check_weights(case, la)


def _check_weights(case: Case, la: ParametricLaplace) -> None:
    theta = la.sample(SAMPLES, generator=seeded())
    if case.weights in SUBNETWORKS:
        known = truth(case.problem.name)
        whole = known.theta[known.trainable]
        inside = torch.isin(known.trainable.nonzero().flatten(), case.columns)
        assert torch.equal(theta[:, ~inside], whole[~inside].expand(SAMPLES, -1)), "untreated weights moved"
        theta = theta[:, inside]
    same_moments(theta, case.mean, covariance_of(la), "weights")


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed"))
def test_network_runs_at_the_sampled_weights(case: Case) -> None:
    """`pred_type="nn"` is the network itself at `la.sample`, for equal seeds."""
    la = case.fit(prior_precision=4.0)
    theta = la.sample(3, generator=seeded())
    known, problem = truth(case.problem.name), case.problem
    places = known.trainable.nonzero().flatten() if case.weights in SUBNETWORKS else case.columns
    expected: list[Tensor] = []
    for one in theta:
        whole = known.theta.index_copy(0, places, one)
        expected.append(reference.outputs_at(problem.make_model(), problem.x, known.names, whole))
    latents = torch.stack(expected)
    actual = la.functional_samples(problem.x, "nn", n_samples=3, generator=seeded())
    assert_close(actual, latents, "algebra", label="functional_samples")
    linked = _linked(case, latents)
    assert_close(la.predictive_samples(problem.x, "nn", n_samples=3, generator=seeded()), linked, "algebra")
    prediction = la(problem.x, "nn", n_samples=3, generator=seeded())
    if problem.likelihood in ("regression", "reward_modeling"):
        assert_close(prediction[0], latents.mean(0), "algebra", label="mean")
        assert_close(prediction[1], latents.var(0), "algebra", label="variance")
    else:
        assert_close(prediction, linked.mean(0), "algebra", label="probabilities")


def _linked(case: Case, latents: Tensor) -> Tensor:
    if case.problem.likelihood == "regression":
        return latents
    return torch.sigmoid(latents) if case.problem.likelihood == "bernoulli" else torch.softmax(latents, -1)


def test_noise_of_observations_is_added_to_sampled_predictions_too() -> None:
    case = Case(catalogue.get("mlp_regression"), "kron", "all")
    la = case.fit(sigma_noise=torch.tensor([0.5, 2.0], dtype=torch.float64))
    mean, variance = la(case.problem.x, "nn", generator=seeded())
    same, noisy = la(case.problem.x, "nn", generator=seeded(), observation_noise=True)
    assert torch.equal(mean, same)
    assert_close(noisy - variance, torch.tensor([0.25, 4.0]).expand_as(variance), "algebra")


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", names=["mlp_classification", "mlp_regression"]))
def test_outputs_row_by_row_and_joint(case: Case) -> None:
    la = case.fit(prior_precision=0.4)
    f, x = truth(case.problem.name).f, case.problem.x
    joint = predictive.functional_covariance(case.jacobian, covariance_of(la))
    same_row = torch.block_diag(*[torch.ones(case.n_outputs, case.n_outputs)] * len(f)).double()
    wanted: list[tuple[dict[str, Any], Tensor]] = [
        ({"joint": True}, joint),
        ({}, joint * same_row),  # independent in different rows, whatever the posterior says
        ({"diagonal_output": True}, torch.diag(joint.diagonal())),
    ]
    for options, covariance in wanted:
        draws = la.functional_samples(x, n_samples=SAMPLES, generator=seeded(), **options)
        same_moments(draws.flatten(1), f.flatten(), covariance, str(options))


@pytest.mark.parametrize("case", few("all", names=["mlp_classification"]))
def test_joint_probabilities_use_the_covariance_between_rows(case: Case) -> None:
    """Two equal inputs have equal draws when joint, and unequal ones else."""
    la = case.fit(prior_precision=0.4)
    x = case.problem.x[:1].repeat(2, 1)
    joint = la.predictive_samples(x, n_samples=20, joint=True, generator=seeded())
    alone = la.predictive_samples(x, n_samples=20, generator=seeded())
    assert (joint[:, 0] - joint[:, 1]).abs().max() < 1e-6 < 1e-2 < (alone[:, 0] - alone[:, 1]).abs().max()


PATHS: dict[str, Callable[[ParametricLaplace, Any, torch.Generator | None], Any]] = {
    "sample": lambda la, x, g: la.sample(5, generator=g),
    "functional_samples": lambda la, x, g: la.functional_samples(x, n_samples=5, generator=g),
    "functional_samples joint": lambda la, x, g: la.functional_samples(x, n_samples=5, generator=g, joint=True),
    "functional_samples diagonal": lambda la, x, g: la.functional_samples(x, "glm", 5, True, g),
    "functional_samples nn": lambda la, x, g: la.functional_samples(x, "nn", n_samples=5, generator=g),
    "predictive_samples": lambda la, x, g: la.predictive_samples(x, n_samples=5, generator=g),
    "predictive_samples nn": lambda la, x, g: la.predictive_samples(x, "nn", n_samples=5, generator=g),
    "call mc": lambda la, x, g: la(x, link_approx="mc", n_samples=5, generator=g),
    "call mc joint": lambda la, x, g: la(x, link_approx="mc", n_samples=5, joint=True, generator=g),
    "call mc diagonal": lambda la, x, g: la(x, link_approx="mc", n_samples=5, diagonal_output=True, generator=g),
    "call nn": lambda la, x, g: la(x, "nn", n_samples=5, generator=g),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", few("all", "last_layer", names=["mlp_classification"]))
def test_generator_decides(case: Case, path: str) -> None:
    la, x, draw = case.fit(), case.problem.x, PATHS[path]
    state = torch.get_rng_state()
    assert torch.equal(draw(la, x, seeded(1)), draw(la, x, seeded(1))), "equal seeds"
    assert not torch.equal(draw(la, x, seeded(1)), draw(la, x, seeded(2))), "other seeds"
    shared = seeded(1)
    assert not torch.equal(draw(la, x, shared), draw(la, x, shared)), "a generator moves on"
    assert torch.equal(state, torch.get_rng_state()), "the global generator was used"
    torch.manual_seed(5)
    first = draw(la, x, None)
    assert not torch.equal(first, draw(la, x, None))
    torch.manual_seed(5)
    assert torch.equal(first, draw(la, x, None)), "without a generator the global seed decides"
