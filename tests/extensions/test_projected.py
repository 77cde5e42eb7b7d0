"""Samples that are projected onto the kernel of the training data's Jacobian, against dense projections."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.utils.data import DataLoader, TensorDataset

import laplace
from laplace import Laplace
from laplace.errors import ApproximationWarning, InvalidArgument, NotFittedError

N, C = 9, 2


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, C)).double()


def data(n: int = N) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, generator=g, dtype=torch.float64), torch.randint(C, (n,), generator=g)


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """`[N, C, P]`."""
    names = dict(model.named_parameters())
    parts = jacrev(lambda tensors: functional_call(model, tensors, (x,)))(names)
    return torch.cat([part.detach().flatten(2) for part in parts.values()], 2)


def fitted(model: nn.Module, likelihood: str = "classification", **options: object) -> Laplace:
    la = Laplace(model, likelihood, "all", "diag", **options)
    x, y = data()
    la.fit(DataLoader(TensorDataset(x, y if likelihood == "classification" else x[:, :C]), 4))
    return la


@pytest.mark.parametrize("kernel", ["outputs", "loss"])
@pytest.mark.parametrize("delta", ["one", "each"])
def test_samples_are_those_of_the_dense_projection(kernel: str, delta: str) -> None:
    model, (x, y) = network(), data()
    la = fitted(model)
    n_params = la.n_params
    prior = torch.full((1,), 2.0) if delta == "one" else torch.linspace(0.5, 3.0, n_params)
    la.prior_precision = prior.double()
    found = laplace.projected(la,
        DataLoader(TensorDataset(x, y), 4), 5, kernel=kernel, tolerance=1e-6, max_sweeps=5000,
        generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    rows = jacobian(model, x)
    if kernel == "loss":
        residual = model(x).softmax(1).detach() - nn.functional.one_hot(y, C)
        rows = torch.einsum("nc,ncp->np", residual, rows)[:, None]
    deviation = la.prior_precision.rsqrt().expand(n_params)
    scaled = rows.flatten(0, 1) * deviation
    noise = torch.randn(5, n_params, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    kernel_part = noise - noise @ torch.linalg.pinv(scaled) @ scaled
    torch.testing.assert_close(found.weights, la.mean + deviation * kernel_part, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.kept, kernel_part.square().sum(1) / noise.square().sum(1), rtol=1e-4, atol=1e-5)
    assert float(found.residual.max()) <= 1e-6


def test_predictions_are_means_over_the_networks() -> None:
    model, (x, y) = network(), data()
    before = copy.deepcopy(model.state_dict())
    la = fitted(model)
    found = laplace.projected(la, [(x, y)], 4, generator=torch.Generator().manual_seed(0))
    star = torch.randn(6, 3, dtype=torch.float64)
    expected = []
    for weights in found.weights:
        other = copy.deepcopy(model)
        torch.nn.utils.vector_to_parameters(weights, other.parameters())
        expected.append(other(star).detach())
    torch.testing.assert_close(found.outputs(star), torch.stack(expected))
    torch.testing.assert_close(found(star), torch.stack(expected).softmax(2).mean(0))
    assert "4 samples" in repr(found)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    la = fitted(network(), "regression")
    mean, variance = laplace.projected(la, [(x, x[:, :C])], 4)(star)
    assert mean.shape == variance.shape == (6, C)


@pytest.mark.nightly
def test_rows_that_are_not_kept_may_come_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    la, (x, y) = fitted(network()), data()
    kept = laplace.projected(
        la, DataLoader(TensorDataset(x, y), 3), 3, tolerance=1e-4, generator=torch.Generator().manual_seed(0)
    )
    monkeypatch.setattr("laplace.extensions.projected._KEPT_BYTES", 0)
    shuffled = DataLoader(TensorDataset(x, y), 3, shuffle=True)
    found = laplace.projected(la, shuffled, 3, tolerance=1e-4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found.weights, kept.weights, rtol=1e-2, atol=1e-2)


def test_equal_seeds_give_equal_bits_and_last_layers_are_projected() -> None:
    x, y = data(4)
    la = Laplace(network(), "classification", "last_layer", "kron")
    la.fit([(x, y)])
    first, second = (laplace.projected(la, [(x, y)], 3, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first.weights, second.weights)
    torch.testing.assert_close(first.outputs(x), la.model(x).detach().expand(3, -1, -1), rtol=0.02, atol=0.02)


def test_what_is_left_of_too_many_data_is_told() -> None:
    x, y = data(40)
    la = Laplace(network(), "classification", "last_layer", "kron")
    la.fit([(x, y)])
    with pytest.warns(ApproximationWarning, match="nothing is left"):
        laplace.projected(la, [(x, y)], 3)
    la = fitted(network())
    with pytest.warns(ApproximationWarning, match="residual"):
        laplace.projected(la, DataLoader(TensorDataset(*data()), 2), 3, tolerance=1e-12, max_sweeps=2)


def test_bad_input_is_refused() -> None:
    la = fitted(network())
    for options in ({"n_samples": 0}, {"kernel": "both"}, {"max_sweeps": 0}, {"tolerance": 2.0}):
        with pytest.raises(InvalidArgument, match=next(iter(options))):
            laplace.projected(la, [data()], **options)
    with pytest.raises(NotFittedError):
        laplace.projected(Laplace(network(), "classification", "all", "diag"), [data()])
