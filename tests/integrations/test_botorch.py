"""A posterior as a model of BoTorch: against dense algebra, and in BoTorch's own acquisition functions."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from laplace import Laplace, MixtureLaplace
from laplace.errors import InvalidArgument, InvalidType, ModelChangedError, UnsupportedError
from tests.reference.compare import assert_close
from tests.reference.conditioning import conditioned

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the packages' own, on import
    pytest.importorskip("botorch")
    from botorch.acquisition import (
        LogExpectedImprovement,
        UpperConfidenceBound,
        qKnowledgeGradient,
        qLogExpectedImprovement,
        qLogNoisyExpectedImprovement,
        qUpperConfidenceBound,
    )
    from botorch.acquisition.objective import ScalarizedPosteriorTransform
    from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling
    from botorch.generation import MaxPosteriorSampling
    from botorch.models.deterministic import MatheronPathModel
    from botorch.models.transforms import Log, Normalize, Standardize
    from botorch.optim import optimize_acqf
    from botorch.sampling.normal import SobolQMCNormalSampler

    from laplace.integrations.botorch import LaplaceModel

SIGMA = 0.3
STRUCTURES = ("full", "kron", "diag", "block", "lowrank", "lowrank_kron", "ekfac", "matrix_free", "gp")


def fitted(structure: str = "kron", n_outputs: int = 1, *, double: bool = True, **options: Any) -> Any:
    """A regression of two inputs on 12 data."""
    torch.manual_seed(0)
    dtype = torch.float64 if double else torch.float32
    model = nn.Sequential(nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, n_outputs)).to(dtype)
    x, y = torch.rand(12, 2, dtype=dtype), torch.randn(12, n_outputs, dtype=dtype)
    extra: dict[str, Any] = {"n_subset": 12} if structure == "gp" else {}
    la = Laplace(model, "regression", "all", structure, **({"sigma_noise": SIGMA} | extra | options))
    la.fit([(x, y)])
    return la


def points(*shape: int) -> Tensor:
    return torch.rand(*shape, 2, dtype=torch.float64)


def oracle(la: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs `[B, m]` and Jacobians `[B, m, P]` of the network by PyTorch, and P⁻¹."""
    weights = {name: p.detach().double() for name, p in la.model.named_parameters()}
    network = la.model.double()

    def f(w: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(network, w, one.unsqueeze(0))[0]

    jacobians = vmap(jacrev(f), (None, 0))(weights, x)
    rows = torch.cat([jacobians[name].flatten(2) for name in weights], 2)
    return network(x).detach(), rows, torch.linalg.inv(la.posterior().to_dense().double())


@pytest.mark.parametrize("n_outputs", [1, 2])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_moments_are_those_of_dense_algebra(structure: str, n_outputs: int) -> None:
    la = fitted(structure, n_outputs)
    model, X = LaplaceModel(la), points(2, 3, 4)
    new_X, new_Y, noise = points(3, 2), torch.randn(3, 2, n_outputs).double(), torch.rand(3, 2, n_outputs).double()
    plain, later = model.posterior(X), model.condition_on_observations(new_X, new_Y)
    noisy = model.condition_on_observations(new_X, new_Y, noise=noise)
    assert later.batch_shape == (3,)
    assert plain.mean.shape == (2, 3, 4, n_outputs)
    f, jacobian, covariance = oracle(la, torch.cat([X, new_X.expand(2, 3, 2, 2)], 2).flatten(0, 2))
    f, jacobian = f.unflatten(0, (2, 3, 6)), jacobian.unflatten(0, (2, 3, 6))
    for i in range(2):
        for j in range(3):
            rows = jacobian[i, j, :4].flatten(0, 1)
            assert_close(plain.mean[i, j], f[i, j, :4], "backend")
            assert_close(covariance_of(plain)[i, j], rows @ covariance @ rows.T, "backend")
            for posterior, variances in ((later, torch.full_like(noise, SIGMA**2)), (noisy, noise)):
                found = posterior.posterior(X)
                expected = conditioned(f[i, j], jacobian[i, j], covariance, 4, new_Y[j], variances[j])
                assert_close(found.mean[i, j].flatten(), expected[0], "backend")
                assert_close(covariance_of(found)[i, j], expected[1], "backend")


def covariance_of(posterior: Any) -> Tensor:
    """Covariance of the outputs of each batch, points major."""
    return posterior.distribution.covariance_matrix


def test_conditioning_twice_is_conditioning_on_both() -> None:
    model, X, Y = LaplaceModel(fitted(n_outputs=2)), points(5), torch.randn(5, 2).double()
    noise = torch.rand(2, 2).double()
    all_noise = torch.cat([noise, model.la.sigma_noise.square().expand(3, 2)])
    both = model.condition_on_observations(X, Y, noise=all_noise)
    twice = model.condition_on_observations(X[:2], Y[:2], noise=noise).condition_on_observations(X[2:], Y[2:])
    test = points(3, 2)
    for one, other in zip(moments(both, test), moments(twice, test), strict=True):
        assert_close(one, other, "backend")
    assert_close(model.posterior(test).mean, LaplaceModel(model.la).posterior(test).mean, "algebra")  # it is as it was


def moments(model: Any, X: Tensor) -> tuple[Tensor, Tensor]:
    posterior = model.posterior(X)
    return posterior.mean, covariance_of(posterior)


def test_conditioning_on_the_data_of_a_linear_model_is_a_fit() -> None:
    torch.manual_seed(0)
    x, y = torch.rand(12, 2).double(), torch.randn(12, 1).double()
    network = nn.Linear(2, 1).double()
    whole, part = (Laplace(network, "regression", "all", "full", sigma_noise=SIGMA) for _ in range(2))
    whole.fit([(x, y)])
    part.fit([(x[:7], y[:7])])
    for la, data in ((whole, (x, y)), (part, (x[:7], y[:7]))):
        la.refine([data])  # the weights are no mode
    test = points(4, 3)
    later = LaplaceModel(part).condition_on_observations(x[7:], y[7:])
    for one, other in zip(moments(later, test), moments(LaplaceModel(whole), test), strict=True):
        assert_close(one, other, "backend")


@pytest.mark.parametrize("structure", ["kron", "gp"])
def test_gradients_reach_points_and_observations(structure: str) -> None:
    model = LaplaceModel(fitted(structure))  # enable_backprop is off
    test, X, Y = points(2, 2).requires_grad_(), points(2).requires_grad_(), torch.randn(2, 1).double().requires_grad_()

    def value(test: Tensor, X: Tensor, Y: Tensor) -> Tensor:
        mean, covariance = moments(model.condition_on_observations(X, Y), test)
        return mean.sum() + covariance.square().sum()

    assert torch.autograd.gradcheck(value, (test, X, Y))
    with torch.no_grad():
        assert not model.posterior(test).mean.requires_grad


@pytest.mark.parametrize("n_outputs", [1, 2])
def test_no_points(n_outputs: int) -> None:
    model = LaplaceModel(fitted(n_outputs=n_outputs))
    later = model.condition_on_observations(points(2), torch.randn(2, n_outputs).double())
    for given in (model, later):
        for shape in ((0, 3), (4, 0))[n_outputs - 1 :]:  # of several outputs GPyTorch takes no empty batch
            mean, covariance = moments(given, points(*shape))
            assert mean.shape == (*shape, n_outputs)
            assert covariance.shape == (shape[0], shape[1] * n_outputs, shape[1] * n_outputs)


@pytest.mark.parametrize("n_outputs", [1, 2])
def test_noise_with_batches_of_its_own(n_outputs: int) -> None:
    model, X, noise = LaplaceModel(fitted(n_outputs=n_outputs)), points(3), torch.rand(5, 1, n_outputs).double()
    found = model.posterior(X, observation_noise=noise)
    assert found.mean.shape == found.variance.shape == (5, 3, n_outputs)
    assert found.rsample(torch.Size([2])).shape == (2, 5, 3, n_outputs)
    assert_close(found.variance, model.posterior(X).variance + noise, "backend")


@pytest.mark.parametrize("n_outputs", [1, 2])
def test_noise_of_observations(n_outputs: int) -> None:
    la = fitted(n_outputs=n_outputs, sigma_noise=torch.linspace(0.2, 0.5, n_outputs).double())
    model, X = LaplaceModel(la), points(2, 3)
    plain = covariance_of(model.posterior(X))
    noise = torch.rand(1, n_outputs).double()
    for given, added in ((True, la.sigma_noise.square().expand(n_outputs)), (noise, noise)):
        expected = plain + torch.diag(added.expand(3, -1).flatten())
        assert_close(covariance_of(model.posterior(X, observation_noise=given)), expected, "float32")


def test_transforms() -> None:
    torch.manual_seed(0)
    x, y = 5 * torch.rand(12, 2).double(), 40 + 9 * torch.randn(12, 2).double()
    into, out = Normalize(2), Standardize(2)
    inputs, targets = into(x), out(y)[0]
    la = Laplace(nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2)).double(), "regression", sigma_noise=0.2)
    la.fit([(inputs, targets)])
    model, bare = LaplaceModel(la, input_transform=into, outcome_transform=out), LaplaceModel(la)
    X, Y = 5 * points(3), 40 + 9 * torch.randn(3, 2).double()
    later = model.condition_on_observations(X, Y)
    same = bare.condition_on_observations(into(X), out(Y)[0])
    test = 5 * points(4, 2)
    scale = out.stdvs.flatten().repeat(2)
    for one, other in ((model, bare), (later, same)):
        mean, covariance = moments(other, into(test))
        found = moments(one, test)
        assert_close(found[0], out.means + out.stdvs * mean, "backend")
        assert_close(found[1], covariance * scale * scale.unsqueeze(1), "backend")
    assert_close(out.means, y.mean(0, keepdim=True), "algebra")  # new outcomes do not move it
    logs = LaplaceModel(fitted(), outcome_transform=Log())
    assert_close(logs.posterior(test).mean.log() > -99, torch.ones(4, 2, 1, dtype=torch.bool), "algebra")
    with pytest.raises(UnsupportedError, match="output_indices"):
        logs.posterior(test, output_indices=[0])


def test_some_outputs_and_their_sums() -> None:
    model, X = LaplaceModel(fitted(n_outputs=3)), points(2, 2)
    mean, covariance = moments(model, X)
    some = model.posterior(X, output_indices=[2, 0])
    places = torch.tensor([2, 0, 5, 3])
    assert_close(some.mean, mean[..., [2, 0]], "algebra")
    assert_close(covariance_of(some), covariance[:, places[:, None], places], "algebra")
    one = model.posterior(X, output_indices=[1])
    assert_close(covariance_of(one), covariance[:, [1, 4]][:, :, [1, 4]], "algebra")
    weights = torch.tensor([1.0, -2.0, 0.5]).double()
    added = model.posterior(X, posterior_transform=ScalarizedPosteriorTransform(weights))
    assert_close(added.mean.squeeze(-1), mean @ weights, "algebra")


@pytest.mark.parametrize("double", [True, False])
def test_results_have_the_dtype_of_the_points(double: bool) -> None:
    la = fitted(double=double)
    X = points(3, 4)
    expected = moments(LaplaceModel(la), X)
    for dtype in (torch.float64, torch.float32):
        mean, covariance = moments(LaplaceModel(la), X.to(dtype))
        assert mean.dtype == covariance.dtype == dtype
        assert_close(mean.double(), expected[0], "float32")
        assert_close(covariance.double(), expected[1], "float32")


ACQUISITIONS = {
    "LogExpectedImprovement": lambda model: (LogExpectedImprovement(model, 0.5), 1),
    "qLogExpectedImprovement": lambda model: (qLogExpectedImprovement(model, 0.5), 3),
    "UpperConfidenceBound": lambda model: (UpperConfidenceBound(model, 0.2), 1),
    "qUpperConfidenceBound": lambda model: (qUpperConfidenceBound(model, 0.2), 3),
    "qLogNoisyExpectedImprovement": lambda model: (qLogNoisyExpectedImprovement(model, points(6)), 2),
    "qKnowledgeGradient": lambda model: (qKnowledgeGradient(model, num_fantasies=2), 1),
    "PathwiseThompsonSampling": lambda model: (PathwiseThompsonSampling(model), 2),
}


@pytest.mark.parametrize("structure", ["kron", "gp"])
@pytest.mark.parametrize("name", ACQUISITIONS)
@pytest.mark.filterwarnings("ignore")  # jitter, and searches that end at their last iteration
def test_acquisition_functions(name: str, structure: str) -> None:
    model = LaplaceModel(fitted(structure))
    for given in (model, model.condition_on_observations(points(2), torch.randn(2, 1).double())):
        acquisition, q = ACQUISITIONS[name](given)
        bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
        found, value = optimize_acqf(acquisition, bounds, q, 2, 8, options={"maxiter": 3})
        assert found.shape == (q, 2)
        assert value.isfinite()


def test_upper_bounds_are_those_of_the_posterior() -> None:
    la = fitted()
    X = points(5, 1)
    mean, variance = la(X.squeeze(1), diagonal_output=True)
    expected = (mean + 2 * variance.sqrt()).squeeze(1)
    assert_close(UpperConfidenceBound(LaplaceModel(la), 4.0)(X), expected, "backend")


@pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning")
def test_the_best_of_many_points_by_samples() -> None:
    found = MaxPosteriorSampling(LaplaceModel(fitted()), replacement=False)(points(2, 30), num_samples=4)
    assert found.shape == (2, 4, 2)


def test_fantasies() -> None:
    model, X = LaplaceModel(fitted(n_outputs=2)), points(3, 2)
    fantasies = model.fantasize(X, SobolQMCNormalSampler(torch.Size([4]), seed=0))
    assert fantasies.batch_shape == (4, 3)
    posterior = fantasies.posterior(points(3, 5))
    assert posterior.mean.shape == (4, 3, 5, 2)
    assert posterior.variance.shape == (4, 3, 5, 2)
    own = fantasies.posterior(X).variance
    assert (own < model.posterior(X).variance).all()
    given = model.fantasize(X, SobolQMCNormalSampler(torch.Size([4]), seed=0), observation_noise=torch.tensor([[0.1]]))
    assert given.batch_shape == (4, 3)


@pytest.mark.nightly
@pytest.mark.parametrize(("n_outputs", "later"), [(2, True), (1, False), (1, True), (2, False)])
def test_function_samples_have_the_moments_of_the_posterior(n_outputs: int, later: bool) -> None:
    model, X, count = LaplaceModel(fitted(n_outputs=n_outputs)), points(3), 20000
    if later:
        model = model.condition_on_observations(points(2), torch.randn(2, n_outputs).double())
    values = MatheronPathModel(model, sample_shape=torch.Size([count]), seed=0)(X)
    assert values.shape == (count, 3, n_outputs)
    mean, covariance = moments(model, X)
    rows = values.flatten(1) - mean.flatten()
    scale = covariance.abs().max()
    assert rows.mean(0).abs().max() < 0.04 * scale.sqrt()
    assert (rows.T @ rows / count - covariance).abs().max() < 0.05 * scale


def test_function_samples_are_functions() -> None:
    torch.manual_seed(0)
    path = MatheronPathModel(LaplaceModel(fitted()), sample_shape=torch.Size([3]), seed=1)
    X = points(5, 3, 4)  # of each function its own points
    each = torch.stack(
        [path(X[:, s])[s] if X[:, s].ndim == 2 else path(X[:, s].unsqueeze(1))[:, s] for s in range(3)], 1
    )
    assert_close(path(X), each, "backend")
    leaf = X.clone().requires_grad_()
    path(leaf).sum().backward()
    assert leaf.grad is not None
    assert (leaf.grad != 0).all()
    with pytest.raises(InvalidArgument, match="batch dimensions"):
        path(points(5, 2, 4))
    batched = LaplaceModel(fitted()).condition_on_observations(points(2, 1), torch.randn(2, 1, 1).double())
    with pytest.raises(UnsupportedError, match="batches"):
        MatheronPathModel(batched, sample_shape=torch.Size([3]))


def test_function_samples_stay_those_of_their_posterior() -> None:
    la, X = fitted(), points(4)
    model = LaplaceModel(la).condition_on_observations(points(2), torch.randn(2, 1).double())
    path = MatheronPathModel(model, sample_shape=torch.Size([3]), seed=0)
    expected = path(X)
    la.prior_precision = 30.0
    assert_close(path(X), expected, "algebra")
    with torch.no_grad():
        la.model[0].weight.mul_(1.5)
    with pytest.raises(ModelChangedError):
        path(X)


def test_what_is_no_gaussian_process_is_refused() -> None:
    la = fitted()
    with pytest.raises(InvalidType, match="MixtureLaplace"):
        LaplaceModel(MixtureLaplace([la]))  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnsupportedError, match="regression"):
        LaplaceModel(Laplace(nn.Linear(2, 3), "classification"))
    model = LaplaceModel(la)
    with pytest.raises(InvalidArgument, match="m = 1"):
        model.condition_on_observations(points(3), torch.randn(3, 2).double())
    with pytest.raises(InvalidArgument, match="noises"):
        model.condition_on_observations(points(3), torch.randn(3, 1).double(), noises=1)
    for wrong in (-0.01, float("nan")):
        noise = torch.full((3, 1), wrong).double()
        with pytest.raises(InvalidArgument, match="noise"):
            model.condition_on_observations(points(3), torch.randn(3, 1).double(), noise=noise)
        with pytest.raises(InvalidArgument, match="noise"):
            model.posterior(points(3), observation_noise=noise)
    with pytest.raises(InvalidArgument, match="NaN"):
        model.condition_on_observations(points(3), torch.full((3, 1), float("nan")).double())
