"""Deleting, merging and comparing posteriors, against dense algebra and refits of linear models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import laplace
from laplace import Laplace
from laplace.errors import ApproximationWarning, InvalidArgument, InvalidType, NotFittedError, UnsupportedError

SIGMA, DELTA = 0.3, 2.0


def linear_data(n: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g, dtype=torch.float64)
    return x, x @ torch.randn(4, 2, generator=g, dtype=torch.float64) + 0.3 * torch.randn(
        n, 2, generator=g, dtype=torch.float64
    )


def ridge(x: Tensor, y: Tensor, prior_mean: float = 0.0) -> nn.Linear:
    """The mode of a linear model with noise SIGMA and prior precision DELTA."""
    features = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    gram = features.T @ features / SIGMA**2 + DELTA * torch.eye(5, dtype=x.dtype)
    weights = torch.linalg.solve(gram, features.T @ y / SIGMA**2 + DELTA * prior_mean)
    model = nn.Linear(4, y.shape[1]).double()
    with torch.no_grad():
        model.weight.copy_(weights[:-1].T)
        model.bias.copy_(weights[-1])
    return model


def fitted(x: Tensor, y: Tensor, structure: str = "full", prior_mean: float = 0.0, **options: object) -> Laplace:
    la = Laplace(
        ridge(x, y, prior_mean), "regression", "all", structure, sigma_noise=SIGMA, prior_precision=DELTA,
        prior_mean=prior_mean, **options,
    )  # fmt: skip
    la.fit(DataLoader(TensorDataset(x, y), 7))
    return la


@pytest.mark.parametrize("prior_mean", [0.0, 0.2])
def test_merging_linear_models_is_one_fit_to_all_data(prior_mean: float) -> None:
    x, y = linear_data(60)
    parts = [fitted(x[i::3], y[i::3], prior_mean=prior_mean) for i in range(3)]
    states = [copy.deepcopy(part.model.state_dict()) for part in parts]
    merged, whole = laplace.merge(parts), fitted(x, y, prior_mean=prior_mean)
    torch.testing.assert_close(merged.mean, whole.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(merged.posterior_precision, whole.posterior_precision, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(merged.log_marginal_likelihood(), whole.log_marginal_likelihood(), rtol=1e-8, atol=1e-8)
    for value, expected in zip(merged(x), whole(x), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-8)
    assert merged.n_data == 60
    merged.check_unchanged()
    for part, state in zip(parts, states, strict=True):
        assert all(torch.equal(t, state[name]) for name, t in part.model.state_dict().items())
        part.check_unchanged()


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "diag", "block", "lowrank", "lowrank_kron"])
def test_the_merged_mean_solves_its_equation(structure: str) -> None:
    x, y = linear_data(60)
    parts = [fitted(x[i::2], y[i::2], structure) for i in range(2)]
    merged = laplace.merge(parts)
    dense = [part.posterior().to_dense() for part in parts]
    prior = DELTA * torch.eye(10, dtype=torch.float64)
    right = sum(p @ part.mean for p, part in zip(dense, parts, strict=True))
    torch.testing.assert_close(
        merged.mean, torch.linalg.solve(dense[0] + dense[1] - prior, right), rtol=1e-7, atol=1e-8
    )


@pytest.mark.parametrize("weights", ["all", "last_layer", "subnetwork"])
def test_networks_merge_whatever_has_a_distribution(weights: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(30, 4), torch.randint(3, (30,))
    options = {"subnetwork_indices": torch.tensor([1, 4, 21, 40])} if weights == "subnetwork" else {}
    parts = []
    for half in range(2):
        own = copy.deepcopy(model)
        if weights == "last_layer":
            with torch.no_grad():
                own[2].weight.add_(0.1 * half)
        la = Laplace(own, "classification", weights, "full", **options)
        la.fit(DataLoader(TensorDataset(x[half::2], y[half::2]), 5))
        parts.append(la)
    merged = laplace.merge(parts)
    assert torch.isfinite(merged(x)).all()
    torch.testing.assert_close(merged.mean, merged.problem.mean(), rtol=0, atol=0)
    theirs, own = (dict(la.weights.model.named_parameters()) for la in (merged, parts[0]))
    if weights == "last_layer":
        assert torch.equal(theirs["0.weight"], own["0.weight"])
    if weights == "subnetwork":
        assert torch.equal(theirs["0.weight"].flatten()[5:], own["0.weight"].flatten()[5:])


def test_what_cannot_be_merged_is_named() -> None:
    x, y = linear_data()
    la, other = fitted(x, y), fitted(x, y)
    with pytest.raises(InvalidArgument, match="at least two"):
        laplace.merge([la])
    with pytest.raises(InvalidType, match="Linear"):
        laplace.merge([la, la.model])  # type: ignore[list-item]
    with pytest.raises(InvalidArgument, match="structure and weights"):
        laplace.merge([la, fitted(x, y, "diag")])
    for name in ("prior_precision", "sigma_noise", "temperature", "prior_mean"):
        changed = copy.deepcopy(other)
        setattr(changed, name, 0.7)
        with pytest.raises(InvalidArgument, match=name):
            laplace.merge([la, changed])
    with pytest.raises(NotFittedError):
        laplace.merge([la, Laplace(nn.Linear(4, 2).double(), "regression", "all", "full")])
    net = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).double()
    pair = []
    for half in range(2):
        own = copy.deepcopy(net)
        own[1].running_mean += half  # pyright: ignore
        pair.append(Laplace(own, "regression", "all", "full"))
        pair[-1].fit(DataLoader(TensorDataset(x, y), 10))
    with pytest.raises(InvalidArgument, match=r"1\.running_mean"):
        laplace.merge(pair)
    free = Laplace(nn.Linear(4, 2).double(), "regression", "all", "matrix_free")
    free.fit(DataLoader(TensorDataset(x, y), 10))
    with pytest.raises(UnsupportedError, match="matrix_free"):
        laplace.merge([free, free])


def test_squared_gradients_of_adam_are_the_empirical_fisher() -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    y = model(x).argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.9999))
    for i in torch.randperm(200).repeat(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        optimizer.step()
    la = laplace.from_optimizer(optimizer, model, 200, batch_size=1, n_outputs=3)
    exact = Laplace(model, "classification", "all", "diag", backend=laplace.curvature.NativeEF)
    exact.fit(DataLoader(TensorDataset(x, y), 50))
    torch.testing.assert_close(la.H, exact.H, rtol=0.05, atol=1e-3 * float(exact.H.max()))
    assert torch.isfinite(la(x)).all()
    assert la.n_data == 200
    twice = laplace.from_optimizer(optimizer, model, 200, batch_size=2)
    torch.testing.assert_close(twice.H, 2 * la.H)


def test_an_optimizer_without_squares_is_refused() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(InvalidArgument, match="'weight'"):
        laplace.from_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, 10, batch_size=2)
    with pytest.raises(InvalidArgument, match="n_data"):
        laplace.from_optimizer(torch.optim.Adam(model.parameters()), model, 0)


def test_the_posterior_of_ivon_is_its_own() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hess = torch.rand(8)
    optimizer.param_groups[0].update(hess=hess, ess=50.0, weight_decay=0.02)
    la = laplace.from_optimizer(optimizer, model, 50)
    torch.testing.assert_close(la.posterior_variance, 1 / (50 * (hess + 0.02)))


def test_the_posterior_of_the_ivon_package_is_its_own() -> None:
    ivon = pytest.importorskip("ivon", reason="pip install --no-deps ivon-opt")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = ivon.IVON(model.parameters(), lr=0.1, ess=40, weight_decay=0.01, hess_init=0.5)
    x, y = torch.randn(40, 3), torch.randint(2, (40,))
    for _ in range(5):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    la = laplace.from_optimizer(optimizer, model, 40)
    mean = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.testing.assert_close(la.mean, mean.detach())
    drawn = []
    for _ in range(4000):
        with optimizer.sampled_params():
            drawn.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    ratio = torch.stack(drawn).var(0) / la.posterior_variance
    assert ((ratio - 1).abs() < 5 * (2 / 4000) ** 0.5).all()


# What would be wrong in silence.


def test_likelihoods_with_other_parameters_do_not_merge() -> None:
    x, y = linear_data()
    labels, parts = (y[:, 0] > 0).long(), []
    for weight in (1.0, 9.0):
        likelihood = laplace.likelihoods.Categorical(class_weight=torch.tensor([1.0, weight], dtype=torch.float64))
        parts.append(Laplace(nn.Linear(4, 2).double(), likelihood, "all", "full"))
        parts[-1].fit([(x, labels)])
    with pytest.raises(InvalidArgument, match="parameters of the likelihood"):
        laplace.merge(parts)


def test_averages_of_rmsprop_are_corrected_and_groups_of_ivon_have_their_priors() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.0, alpha=0.99)
    x, y = torch.randn(1, 3), torch.zeros(1, dtype=torch.long)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    with pytest.warns(ApproximationWarning, match="batch_size"):
        la = laplace.from_optimizer(optimizer, model, 1)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])  # pyright: ignore
    torch.testing.assert_close(la.H, gradient.square(), rtol=1e-4, atol=1e-8)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    for group, decay in zip(optimizer.param_groups, (0.01, 0.5), strict=True):
        group.update(hess=torch.ones(sum(p.numel() for p in group["params"])), ess=10.0, weight_decay=decay)
    la = laplace.from_optimizer(optimizer, model, 10)
    torch.testing.assert_close(la.prior_precision, torch.tensor([0.1, 5.0]))
