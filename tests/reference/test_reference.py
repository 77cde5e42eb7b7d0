"""The reference is tested by identities and closed forms, not by the library."""

from __future__ import annotations

import copy
import math

import mpmath
import pytest
import torch
from torch import Tensor, nn

from tests import problems as catalogue
from tests.problems import PROBLEMS, Problem
from tests.reference import curvature, evidence, kfac, predictive
from tests.reference.compare import assert_close
from tests.reference.explicit import explicit

ALL = [pytest.param(problem, id=problem.name) for problem in PROBLEMS.values()]
KFAC = [pytest.param(problem, id=problem.name) for problem in catalogue.problems("kfac")]


def _sampled(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _jacobian(problem: Problem) -> tuple[nn.Module, list[str], Tensor, Tensor]:
    model = problem.make_model()
    names = curvature.trainable_names(model)
    return model, names, *curvature.flat_jacobian(model, problem.x, names)


@pytest.mark.parametrize("problem", ALL)
def test_problem_is_small_seeded_and_lives_up_to_its_tags(problem: Problem) -> None:
    model, again = problem.make_model(), problem.make_model()
    f = curvature.outputs(model, problem.x)
    assert f.dim() == 2 and f.dtype == torch.float64 and 5 <= f.shape[0] <= 7 and f.shape[1] <= 4
    assert len(f) == len(problem.y) and torch.isfinite(f).all()
    assert torch.equal(f, curvature.outputs(again, problem.x))
    names = curvature.trainable_names(model)
    assert 0 < len(curvature.flat_parameters(model, names)) <= 420
    assert not model.training
    assert ("frozen" in problem.tags) == any(not p.requires_grad for p in model.parameters())
    assert problem.head is None or isinstance(model.get_submodule(problem.head), nn.Linear)
    # every trainable parameter matters and no output is constant, else a test would compare zeros with zeros
    jacobian, _ = curvature.flat_jacobian(model, problem.x, names)
    assert jacobian.abs().amax(dim=(0, 2)).min() > 0
    sizes = [dict(model.named_parameters())[name].numel() for name in names]
    assert all(part.abs().max() > 1e-8 for part in jacobian.split(sizes, dim=2))


@pytest.mark.parametrize("problem", ALL)
def test_data_do_not_see_each_other(problem: Problem) -> None:
    model = problem.make_model()
    alone = torch.cat([curvature.outputs(model, datum) for datum in curvature.samples(problem.x)])
    assert_close(alone, curvature.outputs(model, problem.x), "algebra")


def test_batches_cover_the_data() -> None:
    pairs = catalogue.get("mlp_classification").batches(4)
    assert [len(y) for _, y in pairs] == [4, 2]
    mappings = catalogue.get("dict_input").batches(4)
    assert [len(batch["labels"]) for batch in mappings] == [4, 2]
    assert set(mappings[0]) == {"input_ids", "extra", "labels"}


def test_unknown_tag_is_an_error() -> None:
    with pytest.raises(KeyError, match="no problem has"):
        catalogue.problems("convv")


@pytest.mark.parametrize("problem", ALL)
def test_jacobian_against_finite_differences(problem: Problem) -> None:
    model, names, jacobian, f = _jacobian(problem)
    theta = curvature.flat_parameters(model, names)
    direction = _sampled(len(theta), seed=1)
    if "padding" in problem.tags:  # the padding row is a constant by definition: it moves f but has no gradient
        direction[: model.get_parameter("token.weight").shape[1]] = 0
    step = 1e-5
    ahead = curvature.outputs_at(model, problem.x, names, theta + step * direction)
    behind = curvature.outputs_at(model, problem.x, names, theta - step * direction)
    assert_close(jacobian @ direction, (ahead - behind) / (2 * step), "finite_difference")
    assert_close(f, curvature.outputs_at(model, problem.x, names, theta), "exact")


def test_model_is_left_alone() -> None:
    model = catalogue.get("lora").make_model()
    before = {name: (p.requires_grad, p.clone()) for name, p in model.named_parameters()}
    curvature.flat_jacobian(model, catalogue.get("lora").x, ["0.base.weight"])
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == before[name][0] and torch.equal(parameter, before[name][1])
        assert parameter.grad is None


@pytest.mark.parametrize("name", ["mlp_classification", "mlp_regression", "mlp_bernoulli_multi", "pair"])
def test_output_hessian_and_residual_are_derivatives_of_the_loss(name: str) -> None:
    problem = catalogue.get(name)
    f = curvature.outputs(problem.make_model(), problem.x).detach().requires_grad_()
    kind = problem.likelihood
    gradient = torch.autograd.grad(curvature.loss(f, problem.y, kind), f)[0]
    assert_close(curvature.residual(f, problem.y, kind), gradient, "algebra")

    def total(flat: Tensor) -> Tensor:
        return curvature.loss(flat.view_as(f), problem.y, kind)

    hessian = torch.autograd.functional.hessian(total, f.detach().flatten())
    assert_close(torch.block_diag(*curvature.output_hessian(f, kind, problem.y)), hessian, "algebra")


def test_ignored_labels_count_nowhere() -> None:
    problem = catalogue.get("mlp_ignored_labels")
    model = problem.make_model()
    names, kept = curvature.trainable_names(model), problem.y != curvature.IGNORED
    for function in (curvature.ggn, curvature.empirical_fisher, curvature.exact_hessian):
        whole = function(model, problem.x, problem.y, names, problem.likelihood)
        part = function(model, problem.x[kept], problem.y[kept], names, problem.likelihood)
        assert_close(whole, part, "algebra")


@pytest.mark.parametrize("problem", catalogue.problems("linear"), ids=str)
def test_ggn_is_the_hessian_of_a_linear_model(problem: Problem) -> None:
    model = problem.make_model()
    arguments = (model, problem.x, problem.y, curvature.trainable_names(model), problem.likelihood)
    assert_close(curvature.ggn(*arguments), curvature.exact_hessian(*arguments), "algebra")


@pytest.mark.parametrize("name", ["mlp_regression", "transformer", "lstm", "tied_head", "reused_module"])
def test_hessian_against_finite_differences_of_the_gradient(name: str) -> None:
    problem = catalogue.get(name)
    model, names, _, _ = _jacobian(problem)
    theta = curvature.flat_parameters(model, names)
    direction, step = _sampled(len(theta), seed=2), 1e-5

    def gradient(at: Tensor) -> Tensor:
        moved = copy.deepcopy(model)
        nn.utils.vector_to_parameters(at, [dict(moved.named_parameters())[n] for n in names])
        jacobian, f = curvature.flat_jacobian(moved, problem.x, names)
        return torch.einsum("bcp,bc->p", jacobian, curvature.residual(f, problem.y, problem.likelihood))

    expected = (gradient(theta + step * direction) - gradient(theta - step * direction)) / (2 * step)
    hessian = curvature.exact_hessian(model, problem.x, problem.y, names, problem.likelihood)
    assert_close(hessian @ direction, expected, "finite_difference")


@pytest.mark.parametrize("name", ["mlp_classification", "conv2d_grouped", "mlp_bernoulli_multi", "embedding"])
def test_ggn_times_vector_by_jvp_and_vjp(name: str) -> None:
    problem = catalogue.get(name)
    model, names, _, _ = _jacobian(problem)
    parameters = {n: p.detach() for n, p in model.named_parameters() if n in names}
    flat = _sampled(sum(p.numel() for p in parameters.values()), seed=3)
    pieces = flat.split([p.numel() for p in parameters.values()])
    tangent = {n: piece.view_as(p) for (n, p), piece in zip(parameters.items(), pieces, strict=True)}

    def forward(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, (problem.x,))

    # the double-backward form: forward-mode AD of torch warns on its first use
    def by_tensors(*values: Tensor) -> Tensor:
        return forward(dict(zip(parameters, values, strict=True)))

    f, moved = torch.autograd.functional.jvp(by_tensors, tuple(parameters.values()), tuple(tangent.values()))
    inner = curvature.output_hessian(f, problem.likelihood, problem.y)
    pulled = torch.func.vjp(forward, parameters)[1](torch.einsum("bcd,bd->bc", inner, moved))[0]
    expected = torch.cat([pulled[n].flatten() for n in names])
    actual = curvature.ggn(model, problem.x, problem.y, names, problem.likelihood) @ flat
    assert_close(actual, expected, "algebra")


def test_ggn_with_one_noise_per_output() -> None:
    problem = catalogue.get("mlp_regression")
    model, names, jacobian, _ = _jacobian(problem)
    scale = torch.tensor([0.5, 3.0], dtype=torch.float64)
    expected = sum(s * jacobian[:, c].T @ jacobian[:, c] for c, s in enumerate(scale))
    actual = curvature.ggn(model, problem.x, problem.y, names, "regression", scale)
    assert_close(actual, expected, "algebra")


def test_empirical_fisher_from_gradients_of_single_losses() -> None:
    problem = catalogue.get("mlp_regression")
    model = problem.make_model()
    names = curvature.trainable_names(model)
    expected = torch.zeros((), dtype=torch.float64)
    for x, y in zip(problem.x, problem.y, strict=True):
        total = curvature.loss(model(x[None]), y[None], "regression")
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))])
        expected = expected + gradient.outer(gradient)
    assert_close(curvature.empirical_fisher(model, problem.x, problem.y, names, "regression"), expected, "algebra")


@pytest.mark.parametrize("kind", ["ggn", "ef"])
@pytest.mark.parametrize("name", ["mlp_classification", "mlp_regression", "wide_mlp", "frozen_bias", "lora"])
def test_kfac_is_exact_for_one_datum_without_positions(name: str, kind: str) -> None:
    problem = catalogue.get(name)
    model, x, y = problem.make_model(), problem.x[:1], problem.y[:1]
    names = curvature.trainable_names(model)
    function = curvature.ggn if kind == "ggn" else curvature.empirical_fisher
    sizes = [dict(model.named_parameters())[n].numel() for n in names]
    blocks = torch.block_diag(*[torch.ones(size, size, dtype=torch.float64) for size in sizes])
    for approx in ("expand", "reduce"):
        factors = kfac.kfac(model, x, y, names, problem.likelihood, approx, kind)
        expected = function(model, x, y, names, problem.likelihood) * blocks
        assert_close(kfac.dense_kfac(factors, names), expected, "algebra")


def test_kfac_reduce_of_a_bias_is_exact() -> None:
    problem = catalogue.get("conv2d")
    model = problem.make_model()
    factors = kfac.kfac(model, problem.x, problem.y, ["0.bias"], problem.likelihood, "reduce")
    expected = curvature.ggn(model, problem.x, problem.y, ["0.bias"], problem.likelihood)
    assert_close(kfac.dense_block(factors["0.bias"]), expected, "algebra")


@pytest.mark.parametrize("problem", KFAC)
def test_kfac_factors_have_the_right_shape_and_trace(problem: Problem) -> None:
    model = problem.make_model()
    names = curvature.trainable_names(model)
    factors = kfac.kfac(model, problem.x, problem.y, names, problem.likelihood)
    reduced = kfac.kfac(model, problem.x, problem.y, names, problem.likelihood, "reduce")
    for name in names:
        size = dict(model.named_parameters())[name].numel()
        assert kfac.dense_block(factors[name]).shape == (size, size)
        if "shared" not in problem.tags:
            assert_close(kfac.dense_block(factors[name]), kfac.dense_block(reduced[name]), "algebra")


@pytest.mark.parametrize("problem", catalogue.problems("kfac", "conv"), ids=str)
def test_patches_times_weight_is_the_convolution(problem: Problem) -> None:
    module = problem.make_model().get_submodule("0")
    rows = kfac.patches(module, problem.x)  # [groups, B·T, I]
    weight = module.get_parameter("weight")
    split = weight.unflatten(0, (len(rows), -1)).flatten(2)  # [groups, O, I]
    expected = module(problem.x)
    if module.bias is not None:
        expected = expected - module.get_parameter("bias").view(1, -1, *[1] * (expected.dim() - 2))
    by_rows = torch.einsum("gri,goi->rgo", rows, split).flatten(1).unflatten(0, (len(problem.x), -1))
    assert_close(by_rows.transpose(1, 2), expected.flatten(2), "algebra")


class _Pair(nn.Module):
    """One layer on two halves of the inputs: in two calls, or in one with two positions."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.together = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), together

    def forward(self, x: Tensor) -> Tensor:
        if self.together:
            return self.head(torch.tanh(self.layer(x.unflatten(1, (2, 3)))).sum(1))
        return self.head(torch.tanh(self.layer(x[:, :3])) + torch.tanh(self.layer(x[:, 3:])))


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_calls_of_one_module_are_positions(approx: str) -> None:
    x, y, names = _sampled(5, 6), torch.tensor([0, 1, 1, 0, 1]), ["layer.weight", "layer.bias"]
    apart, together = (kfac.kfac(_Pair(t), x, y, names, "classification", approx) for t in (False, True))
    assert_close(kfac.dense_kfac(apart, names), kfac.dense_kfac(together, names), "algebra")


@pytest.mark.parametrize("name", ["transformer", "attention_time_major", "patches", "lstm", "lstm_time_major", "gru"])
def test_layers_that_are_written_out_have_the_same_outputs(name: str) -> None:
    problem = catalogue.get(name)
    model = problem.make_model()
    network, names = explicit(model)
    assert_close(curvature.outputs(network, problem.x), curvature.outputs(model, problem.x), "algebra")
    assert all(torch.equal(network.get_parameter(new), model.get_parameter(old)) for old, new in names.items())


@pytest.mark.parametrize("vector", [False, True])
def test_evidence_is_exact_for_bayesian_linear_regression(vector: bool) -> None:
    problem = catalogue.get("one_layer_regression")
    model = problem.make_model()
    names = curvature.trainable_names(model)
    sigma = torch.tensor([0.4, 0.7, 1.1] if vector else [0.6] * 3, dtype=torch.float64)
    theta = curvature.flat_parameters(model, names)
    prior = _sampled(len(theta), seed=4).exp()
    prior_mean = 0.3 * _sampled(len(theta), seed=5)
    jacobian, _ = curvature.flat_jacobian(model, problem.x, names)
    design, targets = jacobian.flatten(0, 1), problem.y.flatten()
    noise = sigma.repeat(len(problem.y))
    mean, covariance, expected = evidence.bayesian_linear_regression(design, targets, noise, prior, prior_mean)

    hessian = curvature.ggn(model, problem.x, problem.y, names, "regression", sigma.square().reciprocal())
    assert_close(evidence.posterior_covariance(hessian, prior), covariance, "algebra")
    f = curvature.outputs_at(model, problem.x, names, mean)
    loss = 0.5 * (f - problem.y).square().sum(0)
    loglik = evidence.log_likelihood(loss, *f.shape, sigma=sigma)
    assert_close(loglik, torch.distributions.Normal(f, sigma).log_prob(problem.y).sum(), "algebra")
    actual = evidence.log_marginal_likelihood(hessian, mean, prior, prior_mean, 1.0, loglik)
    assert_close(actual, expected, "algebra")


def test_scale_and_temperature_of_the_evidence() -> None:
    loss = torch.tensor(3.0, dtype=torch.float64)
    assert_close(evidence.log_likelihood(loss, 4, 2, temperature=2.0, likelihood="classification"), -1.5, "exact")
    expected = -3.0 / (0.25 * 2.0) - 8 * math.log(0.5 * math.sqrt(2 * math.pi))
    assert_close(evidence.log_likelihood(loss, 4, 2, 0.5, 2.0), expected, "exact")
    with pytest.raises(ValueError, match="vector of noises"):
        evidence.log_likelihood(loss, 4, 2, torch.ones(2))


def test_functional_covariance_holds_the_variances() -> None:
    jacobian, root = _sampled(4, 3, 5), _sampled(5, 5, seed=6)
    joint = predictive.functional_covariance(jacobian, root @ root.T)
    variance = predictive.functional_variance(jacobian, root @ root.T)
    for b in range(4):
        assert_close(joint[3 * b : 3 * b + 3, 3 * b : 3 * b + 3], variance[b], "algebra")


@pytest.mark.parametrize("link", ["bridge", "bridge_norm"])
@pytest.mark.parametrize("spread", [1.0, 300.0])
@pytest.mark.parametrize("classes", [2, 3, 7])
def test_bridge_against_fifty_digits(link: str, spread: float, classes: int) -> None:
    root = _sampled(2, classes, classes, seed=7)
    mean, variance = spread * _sampled(2, classes, seed=8), root @ root.mT
    actual = getattr(predictive, link)(mean, variance)
    with mpmath.workdps(50):
        expected = [_bridge_by_formula(m.tolist(), v.tolist(), link) for m, v in zip(mean, variance, strict=True)]
    assert_close(actual, expected, "algebra")
    assert_close(actual.sum(1), torch.ones(2), "algebra")


def _bridge_by_formula(mean: list[float], variance: list[list[float]], link: str) -> list[float]:
    size, one = len(mean), mpmath.mpf(1)
    rows = [mpmath.fsum(row) for row in variance]
    total, shift = mpmath.fsum(rows), mpmath.fsum(mean)
    mu = [one * m - r * shift / total for m, r in zip(mean, rows, strict=True)]
    d = [one * variance[k][k] - rows[k] ** 2 / total for k in range(size)]
    if link == "bridge_norm":
        c = mpmath.fsum(d) / size / mpmath.sqrt(one * size / 2)
        mu, d = [m / mpmath.sqrt(c) for m in mu], [v / c for v in d]
    inverse = mpmath.fsum(mpmath.exp(-m) for m in mu)
    alpha = [(1 - one * 2 / size + mpmath.exp(m) / size**2 * inverse) / v for m, v in zip(mu, d, strict=True)]
    return [float(a / mpmath.fsum(alpha)) for a in alpha]


def test_probit_is_near_monte_carlo() -> None:
    mean, root = _sampled(3, 3, seed=9), 0.2 * _sampled(3, 3, 3, seed=10)
    sampled, error = predictive.monte_carlo(mean, root @ root.mT, 20_000, torch.Generator().manual_seed(0))
    assert error.max() < 1e-2
    assert (predictive.probit(mean, root @ root.mT) - sampled).abs().max() < 0.02
    one, v = mean[:, :1], (root @ root.mT)[:, :1, :1]
    binary, error = predictive.monte_carlo(one, v, 20_000, torch.Generator().manual_seed(1), link="sigmoid")
    assert (predictive.bernoulli_probit(one, v) - binary).abs().max() < 0.005


def test_monte_carlo_of_a_certain_latent_is_the_link() -> None:
    mean = _sampled(2, 3, seed=11)
    nothing = torch.zeros(2, 3, 3, dtype=torch.float64)
    sampled, error = predictive.monte_carlo(mean, nothing, 10, torch.Generator().manual_seed(0))
    assert_close(sampled, torch.softmax(mean, 1), "mc", standard_error=error)


def test_comparison_reports_the_worst_entries() -> None:
    expected = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    actual = expected.clone()
    actual[1, 0] += 1e-3
    with pytest.raises(AssertionError, match=r"1 of 4 entries[\s\S]*\[1, 0\] got 3\.001, expected 3"):
        assert_close(actual, expected, "algebra")
    with pytest.raises(AssertionError, match="shape"):
        assert_close(actual[0], expected, "algebra")
    with pytest.raises(AssertionError, match="entries differ"):
        assert_close(expected * float("nan"), expected, "algebra")
    with pytest.raises(ValueError, match="standard_error"):
        assert_close(expected, expected, "mc")
    assert_close(torch.tensor([math.inf, math.nan]), torch.tensor([math.inf, math.nan]), "algebra")
