"""Removal of data that moves the mean: the fit to the rest, and what cannot be removed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import laplace
from laplace import Laplace
from laplace.errors import InvalidArgument, UnsupportedError
from tests.extensions.test_merging import DELTA, SIGMA, fitted, linear_data


@pytest.mark.parametrize("structure", ["full", "kron", "block"])
def test_forgetting_a_linear_model_is_the_fit_to_the_rest(structure: str) -> None:
    x, y = linear_data()
    la = fitted(x, y, structure, prior_mean=0.2)
    before = copy.deepcopy(la.model.state_dict())
    if structure == "full":
        laplace.forget_with_mean(la, DataLoader(TensorDataset(x[:5], y[:5]), 2))
        laplace.forget_with_mean(la, DataLoader(TensorDataset(x[5:9], y[5:9]), 2))  # from a mean that has moved
        rest = fitted(x[9:], y[9:], structure, prior_mean=0.2)
        torch.testing.assert_close(la.mean, rest.mean, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(la.posterior_precision, rest.posterior_precision, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(la.log_marginal_likelihood(), rest.log_marginal_likelihood(), rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(la(x)[0], rest(x)[0], rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(la(x)[1], rest(x)[1], rtol=1e-8, atol=1e-8)
    else:
        distance = (la.mean - fitted(x[9:], y[9:], structure, prior_mean=0.2).mean).norm()
        laplace.forget_with_mean(la, DataLoader(TensorDataset(x[:9], y[:9]), 3))
        assert (la.mean - fitted(x[9:], y[9:], structure, prior_mean=0.2).mean).norm() < 0.2 * distance
    assert all(torch.equal(t, before[name]) for name, t in la.model.state_dict().items())
    assert "as data were removed" in repr(la)


def test_a_moved_mean_survives_a_state() -> None:
    x, y = linear_data()
    la = fitted(x, y)
    laplace.forget_with_mean(la, DataLoader(TensorDataset(x[:5], y[:5]), 2))
    other = Laplace(la.model, "regression", "all", "full")
    other.load_state_dict(la.state_dict())
    torch.testing.assert_close(other.mean, la.mean)
    torch.testing.assert_close(other(x)[0], la(x)[0])


def test_weights_and_a_noise_per_output_when_forgetting() -> None:
    x, y = linear_data()
    sigma = torch.tensor([0.3, 0.5], dtype=torch.float64)
    counts = torch.arange(len(x), dtype=torch.float64) % 3 + 1
    la = Laplace(nn.Linear(4, 2).double(), "regression", "all", "full", sigma_noise=sigma, prior_precision=DELTA)
    whole = [TensorDataset(x, y, counts), TensorDataset(x[6:], y[6:], counts[6:])]

    def mode(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
        features = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        columns = []
        for c in range(2):
            gram = features.T @ (counts[:, None] * features) / sigma[c] ** 2 + DELTA * torch.eye(5, dtype=x.dtype)
            columns.append(torch.linalg.solve(gram, features.T @ (counts * y[:, c]) / sigma[c] ** 2))
        weights = torch.stack(columns, 1)
        return torch.cat([weights[:-1].T.reshape(-1), weights[-1]])

    torch.nn.utils.vector_to_parameters(mode(*whole[0].tensors), la.model.parameters())
    weigh = {tuple(row.tolist()): float(w) for row, w in zip(x, counts, strict=True)}

    def weight_fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.tensor([weigh[tuple(row.tolist())] for row in x])

    la.fit(DataLoader(TensorDataset(x, y), 8), weight_fn=weight_fn)
    laplace.forget_with_mean(la, DataLoader(TensorDataset(x[:6], y[:6]), 4), weight_fn=weight_fn)
    torch.testing.assert_close(la.mean, mode(*whole[1].tensors), rtol=1e-8, atol=1e-8)


def test_a_refined_regression_forgets_from_its_mode() -> None:
    x, y = linear_data()
    model = nn.Linear(4, 2).double()  # far from the mode
    la = Laplace(model, "regression", "all", "full", sigma_noise=SIGMA, prior_precision=DELTA)
    la.fit([(x, y)])
    la.refine([(x, y)])
    laplace.forget_with_mean(la, [(x[:7], y[:7])])
    torch.testing.assert_close(la.mean, fitted(x[7:], y[7:]).mean, rtol=1e-7, atol=1e-8)


def test_what_would_move_the_mean_wrongly_is_refused() -> None:
    x, y = linear_data()
    labels = (y[:, 0] > 0).long()
    la = Laplace(nn.Linear(4, 2).double(), "classification", "all", "full")
    la.fit([(x, labels)])
    la.refine([(x, labels)])
    with pytest.raises(UnsupportedError, match="refined"):
        laplace.forget_with_mean(la, [(x[:5], labels[:5])])
    la = fitted(x, y)
    laplace.forget_with_mean(la, [(x[:5], y[:5])])
    moved = la.mean
    with pytest.raises(InvalidArgument, match="forget_with_mean"):
        la.forget([(x[5:9], y[5:9])])
    with pytest.raises(InvalidArgument, match="override"):
        la.fit([(x[5:9], y[5:9])], override=False)
    assert torch.equal(la.mean, moved)
