"""The exact Hessian: its numbers, and what becomes of the negative directions that it may have."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.curvature import NativeHessian
from laplace.errors import CurvatureError, TuningWarning
from tests import problems as catalogue
from tests.conformance.cases import drawn
from tests.conformance.test_gradients import check
from tests.reference import curvature as reference
from tests.reference import evidence
from tests.reference.compare import assert_close

STRUCTURES = ("full", "lowrank", "block", "diag")
MODES = ("error", "clamp", "abs")
NAMES = ("mlp_classification", "mlp_regression", "mlp_bernoulli_multi", "conv2d_regression", "pair", "transformer")


def fitted(name: str, structure: str, mode: str = "error", **options: Any) -> Any:
    problem = catalogue.get(name)
    chosen: dict[str, Any] = {"indefinite": mode}
    if structure == "lowrank":
        chosen["rank"] = 10_000
    model = problem.make_model()
    la = Laplace(model, problem.likelihood, "all", structure, backend=NativeHessian, structure_kwargs=chosen, **options)
    la.fit(problem.batches(4))
    return la


def exact(name: str, output: int | None = None) -> Tensor:
    """∇² of the unit negative log likelihood, `[P, P]`; of one output's (regression), if given."""
    problem = catalogue.get(name)
    model = problem.make_model()
    names = reference.trainable_names(model)
    if output is None:
        return reference.exact_hessian(model, problem.x, problem.y, names, problem.likelihood)
    only = _Output(model, output)
    y = problem.y[:, output : output + 1]
    return reference.exact_hessian(only, problem.x, y, [f"net.{n}" for n in names], problem.likelihood)


class _Output(torch.nn.Module):
    def __init__(self, net: torch.nn.Module, index: int) -> None:
        super().__init__()
        self.net, self.index = net, index

    def forward(self, x: Any) -> Tensor:
        return reference.outputs(self.net, x)[:, self.index : self.index + 1]


@cache
def same_layer(name: str) -> Tensor:
    """Whether two entries belong to tensors of one module, `[P, P]`."""
    model = catalogue.get(name).make_model()
    tensors = dict(model.named_parameters())
    owners = [n.rpartition(".")[0] for n in reference.trainable_names(model) for _ in range(tensors[n].numel())]
    numbers = torch.tensor([owners.index(owner) for owner in owners])
    return numbers.unsqueeze(0) == numbers.unsqueeze(1)


def mended(dense: Tensor, structure: str, mode: str, name: str) -> Tensor:
    """What a structure keeps of a matrix of a problem, without negative eigenvalues if so wished."""
    if structure == "diag":
        dense = torch.diag(dense.diagonal())
    if structure == "block":
        dense = dense * same_layer(name)
    if mode == "error":
        return dense
    values, vectors = torch.linalg.eigh(dense)
    return (vectors * (values.clamp(min=0) if mode == "clamp" else values.abs())) @ vectors.T


def needed_prior(dense: Tensor) -> float:
    """A scalar prior under which P is positive definite, and would be far from it if H were scaled wrongly."""
    return 1.5 * max(-torch.linalg.eigvalsh(dense).min().item(), 0.1)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", NAMES)
def test_curvature_is_the_second_derivative(name: str, structure: str) -> None:
    la, dense = fitted(name, structure), exact(name)
    held = la.H
    if structure == "lowrank":
        held = (held[0] * held[1]) @ held[0].T
    if structure == "block":
        held, dense = torch.block_diag(*held), dense * same_layer(name)
    expected = dense.diagonal() if structure == "diag" else dense
    assert_close(held, expected, "backend")
    assert torch.linalg.eigvalsh(dense).min() < -1e-3, "the problem has no negative direction: nothing is tested"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", NAMES[:4])
def test_posterior_in_every_mode(name: str, structure: str, mode: str) -> None:
    la, dense = fitted(name, structure, mode, temperature=0.6), mended(exact(name), structure, mode, name) / 0.6
    delta = needed_prior(dense) if mode == "error" else 0.2
    sizes = torch.tensor(la.problem.layout.sizes)
    layerwise = delta * (1 + torch.arange(len(sizes), dtype=torch.float64))
    diagonal = delta * (1 + drawn(catalogue.get(name), "prior", len(dense)).square())
    for prior in (torch.tensor([delta], dtype=torch.float64), layerwise, diagonal):
        la.prior_precision = prior
        whole = prior.repeat_interleave(sizes) if len(prior) == len(sizes) else prior.expand(len(dense))
        precision = dense + torch.diag(whole)
        covariance = torch.linalg.inv(precision)
        assert_close(la.log_det_ratio, precision.logdet() - whole.log().sum(), "algebra", label="log det ratio")
        assert_close(la.evidence().precision.to_dense(), precision, "backend", label="precision")
        assert_close(la.posterior_covariance, covariance, "backend", label="covariance")
        assert_close(la.posterior_variance, covariance.diagonal(), "backend", label="variance")
        jacobian, _ = reference.flat_jacobian(la.model, catalogue.get(name).x, la.problem.layout.names)
        expected = torch.einsum("bcp,pq,bdq->bcd", jacobian, covariance, jacobian)
        assert_close(la.functional_variance(jacobian), expected, "backend", label="functional variance")
        found = la._latent(catalogue.get(name).x, "full").covariance
        assert_close(found, expected, "backend", label="of the network")
        scale = la.posterior_scale if structure != "diag" else torch.diag(la.posterior_scale)
        assert_close(scale @ scale.T, covariance, "backend", label="scale")
        check(la, "prior_precision", prior, some=3)
        la.prior_precision = prior
        check(la, "temperature", torch.tensor(0.6, dtype=torch.float64))
        la.temperature = 0.6


@pytest.mark.parametrize("structure", STRUCTURES)
def test_samples_under_an_indefinite_curvature(structure: str) -> None:
    name = "mlp_regression"
    delta = needed_prior(exact(name))
    la = fitted(name, structure, prior_precision=delta)
    covariance = la.posterior_covariance
    draws = la.sample(20_000, generator=torch.Generator().manual_seed(0)) - la.mean
    error = ((covariance.diagonal().outer(covariance.diagonal()) + covariance.square()) / len(draws)).sqrt()
    assert_close(draws.T @ draws / len(draws), covariance, "mc", standard_error=error)
    if structure != "diag":
        assert la.posterior_variance.max() > 1 / delta, "no direction is wider than the prior"


@pytest.mark.parametrize("structure", STRUCTURES)
def test_indefinite_precision_is_refused_when_it_is_used(structure: str) -> None:
    """`fit` succeeds: the prior may be changed afterwards. A refusal changes nothing."""
    name = "mlp_classification"
    x = catalogue.get(name).x
    dense = mended(exact(name), structure, "error", name)
    la = fitted(name, structure, prior_precision=1e-3)
    negative = int((torch.linalg.eigvalsh(dense) + 1e-3 <= 0).sum())
    uses: list[Any] = [la.log_marginal_likelihood, lambda: la(x), la.sample, lambda: la.posterior_variance]
    uses += [lambda: la(x, "nn"), lambda: la.log_marginal_likelihood(torch.full((la.n_params,), 1e-3))]
    for use in uses:
        la.prior_precision = 1e-3
        with pytest.raises(CurvatureError, match=rf"{negative} directions.*'indefinite': 'clamp'"):
            use()
    la.prior_precision = needed_prior(dense)
    assert la.log_marginal_likelihood().isfinite() and la(x).isfinite().all()
    before = la(x)
    with pytest.raises(CurvatureError):
        la.prior_precision = 1e-3
        la(x)
    la.prior_precision = needed_prior(dense)
    assert torch.equal(la(x), before)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_grid_search_passes_over_priors_that_are_too_small(structure: str) -> None:
    name = "mlp_classification"
    la = fitted(name, structure)
    with pytest.warns(TuningWarning, match="passed over"):
        la.optimize_prior_precision(method="gridsearch", val_loader=catalogue.get(name).batches(), grid_size=7)
    assert la.log_marginal_likelihood().isfinite()


@pytest.mark.parametrize("mode", ["clamp", "abs"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_term_of_several_noises_is_mended(structure: str, mode: str) -> None:
    name = "mlp_regression"
    outputs = catalogue.get(name).y.shape[1]
    sigma = torch.linspace(0.5, 1.4, outputs, dtype=torch.float64)
    la = fitted(name, structure, mode, sigma_noise=sigma)
    terms = [mended(exact(name, output), structure, mode, name) for output in range(outputs)]
    for noise in (sigma, sigma.flip(0)):
        la.sigma_noise = noise
        precision = torch.eye(la.n_params) + sum(t / s**2 for t, s in zip(terms, noise, strict=True))
        assert_close(la.log_det_ratio, precision.logdet(), "algebra", label="log det ratio")
        assert_close(la.posterior_covariance, torch.linalg.inv(precision), "backend", label="covariance")
        check(la, "sigma_noise", noise)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_mode_is_part_of_the_state(structure: str) -> None:
    name = "mlp_classification"
    la = fitted(name, structure, "abs", prior_precision=0.05)
    other = fitted(name, structure, "abs")
    other.load_state_dict(copy.deepcopy(la.state_dict()))
    assert torch.equal(la.log_marginal_likelihood(), other.log_marginal_likelihood())


class Square(nn.Module):
    """f = (100 a, b²): at b = 0.1 and targets of 1 the Hessian is diag(10⁴, −1.94)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.01, 0.1], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([100 * self.w[0], self.w[1] ** 2]).expand(len(x), 2)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_negative_direction_that_is_small_is_one_all_the_same(structure: str) -> None:
    data = [(torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64))]
    la = Laplace(Square(), "regression", "all", structure, backend=NativeHessian)
    la.fit(data)
    la.prior_precision = 3.0
    assert_close(la.log_det_ratio, torch.tensor([1e4 / 3, -1.94 / 3], dtype=torch.float64).log1p().sum(), "algebra")
    for prior in (1.0, torch.tensor([1.0, 1.5])):
        with pytest.raises(CurvatureError, match="1 directions"):
            la.log_marginal_likelihood(prior)


@pytest.mark.parametrize("structure", ["full", "lowrank", "block"])
def test_float32_rounding_of_a_singular_hessian_is_no_negative_direction(structure: str) -> None:
    """A linear network's Hessian is its GGN, with more weights than data: zeros that rounding makes negative.

    The evidence is known without any matrix over weights: per output det(I + ΦΦᵀ/δ) of the features Φ of five data.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 2)
    x, y = torch.randn(5, 30), torch.randn(5, 2)
    la = Laplace(model, "regression", "all", structure, backend=NativeHessian)
    la.fit([(x, y)])
    theta = reference.flat_parameters(model, ["weight", "bias"]).double()
    features = torch.cat([x, torch.ones(5, 1)], 1).double()
    loss = 0.5 * (model(x).detach() - y).double().square().sum()
    for delta in (1e-7, 1e-3, torch.full((62,), 1e-6)):
        prior = torch.as_tensor(delta).double().expand(62)
        log_det = 2 * torch.linalg.slogdet(torch.eye(5).double() + features @ features.T / prior[0]).logabsdet
        expected = evidence.log_likelihood(loss, 5, 2) - 0.5 * (log_det + (prior * theta.square()).sum())
        assert_close(la.log_marginal_likelihood(delta), expected, "float32_solve")


class _Square(torch.autograd.Function):
    """x², whose derivative 2x is right, and whose second derivative belongs to the entry before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * (x.detach() + (x - x.detach()).roll(1, -1)) * gradients[0]


class _Squared(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return nn.functional.linear(input, _Square.apply(self.weight), self.bias)


def test_a_second_derivative_that_is_wrong_is_noticed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_Squared(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randint(2, (7,))
    la: Any = Laplace(model, "classification", "all", "full", backend=NativeHessian)
    with pytest.raises(CurvatureError, match=r"not symmetric.*NativeGGN"):
        la.fit([(x, y)])
