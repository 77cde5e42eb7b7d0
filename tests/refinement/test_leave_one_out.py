"""Leave-one-out predictions against refits: exact for linear Gaussian models, one Newton step elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, ParametricLaplace
from laplace.curvature import NativeEF
from laplace.errors import ApproximationWarning, InvalidArgument, InvalidData, NotFittedError, UnsupportedError
from tests import problems as catalogue

DELTA, SIGMA = 0.7, 0.4


def line(n: int = 12) -> tuple[nn.Module, Tensor, Tensor]:
    """A linear model at the mode of its posterior, with two outputs."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=source, dtype=torch.float64)
    y = torch.randn(n, 2, generator=source, dtype=torch.float64)
    model = nn.Linear(3, 2, dtype=torch.float64)
    ones = torch.cat([x, torch.ones(n, 1, dtype=torch.float64)], 1)
    precision = ones.T @ ones / SIGMA**2 + DELTA * torch.eye(4, dtype=torch.float64)
    weights = torch.linalg.solve(precision, ones.T @ y / SIGMA**2)
    with torch.no_grad():
        model.weight.copy_(weights[:3].T)
        model.bias.copy_(weights[3])
    return model, x, y


def batches(x: Tensor, y: Tensor, size: int = 5) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


POSTERIORS: dict[str, dict[str, Any]] = {
    "full": {"subset_of_weights": "all", "hessian_structure": "full"},
    "last layer": {"subset_of_weights": "last_layer", "hessian_structure": "full"},
    "gp": {"subset_of_weights": "all", "hessian_structure": "gp", "n_subset": 12},
    "matrix_free": {
        "subset_of_weights": "all",
        "hessian_structure": "matrix_free",
        "structure_kwargs": {"tolerance": 1e-12},
    },
}


@pytest.mark.parametrize("kind", POSTERIORS)
def test_a_linear_gaussian_model_is_refitted(kind: str) -> None:
    model, x, y = line()
    la = Laplace(model, "regression", prior_precision=DELTA, sigma_noise=SIGMA, **POSTERIORS[kind])
    la.fit(batches(x, y))
    state = copy.deepcopy(model.state_dict())
    found = la.leave_one_out(batches(x, y, 4))
    ones = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    for i in range(len(x)):
        others = torch.arange(len(x)) != i
        precision = ones[others].T @ ones[others] / SIGMA**2 + DELTA * torch.eye(4, dtype=torch.float64)
        mean = ones[i] @ torch.linalg.solve(precision, ones[others].T @ y[others] / SIGMA**2)
        variance = ones[i] @ torch.linalg.solve(precision, ones[i])
        density = torch.distributions.Normal(mean, (variance + SIGMA**2).sqrt())
        torch.testing.assert_close(found.mean[i], mean, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(found.covariance[i], variance * torch.eye(2).double(), rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(found.log_score[i], density.log_prob(y[i]).sum(), rtol=1e-8, atol=1e-8)
    assert found.distance < 1e-6 and not found.clipped.any()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def classifier(n: int = 60) -> tuple[nn.Module, Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=source, dtype=torch.float64)
    y = (2 * x[:, :3] + 1.5 * torch.randn(n, 3, generator=source, dtype=torch.float64)).argmax(1)
    torch.manual_seed(0)
    return nn.Linear(4, 3, dtype=torch.float64), x, y


def refined(model: nn.Module, x: Tensor, y: Tensor, structure: str = "full", **options: Any) -> ParametricLaplace:
    la = Laplace(model, "classification", "all", structure, prior_precision=1.0, **options)
    la.fit(batches(x, y, 20))
    la.refine(batches(x, y, 20))
    return la


def dense_posterior(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mode and precision of a logistic regression on x with a bias, δ = 1, by Newton steps: `[3·D]`, classes major."""
    rows = torch.kron(torch.eye(3, dtype=x.dtype), x.unsqueeze(1)).view(len(x), 3, -1)
    theta = torch.zeros(rows.shape[2], dtype=x.dtype)
    identity = torch.eye(len(theta), dtype=x.dtype)
    for _ in range(30):
        probs = (rows @ theta).softmax(1)
        inner = probs.diag_embed() - probs.unsqueeze(2) * probs.unsqueeze(1)
        precision = torch.einsum("bcp,bcd,bdq->pq", rows, inner, rows) + identity
        gradient = torch.einsum("bcp,bc->p", rows, probs - nn.functional.one_hot(y, 3)) + theta
        theta = theta - torch.linalg.solve(precision, gradient)
    return theta, precision


def test_scores_of_classes_are_those_of_refits() -> None:
    model, x, y = classifier(50)
    found = refined(model, x, y).leave_one_out(batches(x, y))
    inputs = torch.cat([x, torch.ones(50, 1, dtype=x.dtype)], 1)
    scores = []
    for i in range(50):
        others = torch.arange(50) != i
        theta, precision = dense_posterior(inputs[others], y[others])
        row = torch.kron(torch.eye(3, dtype=x.dtype), inputs[i])
        variance = (row @ torch.linalg.solve(precision, row.T)).diagonal()
        scores.append(((row @ theta) / (1 + torch.pi / 8 * variance).sqrt()).log_softmax(0)[y[i]])
    expected = torch.stack(scores)
    ranks = [values.argsort().argsort().double() for values in (found.log_score, expected)]
    assert torch.corrcoef(torch.stack(ranks))[0, 1] >= 0.99
    assert float((found.log_score - expected).abs().max()) < 0.2  # one Newton step
    assert abs(float((found.log_score - expected).mean())) < 0.01


def test_it_is_the_dense_formula() -> None:
    model, x, y = classifier(20)
    la = refined(model, x, y)
    found = la.leave_one_out(batches(x, y))
    jacobian = torch.zeros(20, 3, 15, dtype=torch.float64)
    for c in range(3):
        jacobian[:, c, 4 * c : 4 * c + 4] = x
        jacobian[:, c, 12 + c] = 1
    theta = la.mean
    f = jacobian @ theta
    probs = f.softmax(1)
    inner = probs.diag_embed() - probs.unsqueeze(2) * probs.unsqueeze(1)
    precision = torch.einsum("bcp,bcd,bdq->pq", jacobian, inner, jacobian) + torch.eye(15).double()
    sigma = jacobian @ torch.linalg.inv(precision) @ jacobian.mT
    gradient = probs - nn.functional.one_hot(y, 3)
    without = sigma @ torch.linalg.inv(torch.eye(3).double() - inner @ sigma)
    torch.testing.assert_close(found.covariance, without, rtol=1e-6, atol=1e-8)
    mean = f + (without @ gradient.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(found.mean, mean, rtol=1e-6, atol=1e-8)
    leverage = (inner @ sigma).diagonal(dim1=1, dim2=2).sum(1)
    torch.testing.assert_close(found.leverage, leverage, rtol=1e-6, atol=1e-8)
    influence = torch.einsum("bc,bcd,bd->b", gradient, without, gradient)
    torch.testing.assert_close(found.self_influence, influence, rtol=1e-6, atol=1e-8)


def test_flipped_labels_have_the_largest_influence() -> None:
    source = torch.Generator().manual_seed(3)
    x = torch.randn(200, 5, generator=source, dtype=torch.float64)
    clean = x[:, :3].argmax(1)
    flipped = torch.randperm(200, generator=source)[:20]
    y = clean.clone()
    y[flipped] = (y[flipped] + 1) % 3
    torch.manual_seed(0)
    found = refined(nn.Linear(5, 3, dtype=torch.float64), x, y).leave_one_out(batches(x, y, 50))
    worst = found.self_influence.argsort(descending=True)[:40]
    assert len(set(worst.tolist()) & set(flipped.tolist())) >= 16


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_batches_do_not_matter(structure: str) -> None:
    model, x, y = classifier()
    la = refined(model, x, y, structure)
    first, second = (la.leave_one_out(batches(x, y, size)) for size in (7, 60))
    torch.testing.assert_close(first.mean, second.mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(first.log_score, second.log_score, rtol=1e-6, atol=1e-8)


def test_inputs_that_kronecker_factors_cannot_lose_are_counted_or_refused() -> None:
    model, x, y = classifier(8)
    x[0] *= 300
    la = Laplace(model, "classification", "all", "kron", prior_precision=1e-4)
    la.fit([(x, y)])
    with pytest.raises(UnsupportedError, match="of 8 inputs cannot be removed"):
        la.leave_one_out([(x, y)])


def test_a_network_that_is_no_mode_is_warned_of() -> None:
    model, x, y = classifier()
    la = Laplace(model, "classification", "all", "full", prior_precision=1.0)
    la.fit(batches(x, y))
    with pytest.warns(ApproximationWarning, match="from the mode of its prior"):
        la.leave_one_out(batches(x, y))


@pytest.mark.parametrize("structure", ["diag", "lowrank", "lowrank_kron"])
def test_structures_that_lose_inputs_are_refused(structure: str) -> None:
    model, x, y = classifier()
    la = Laplace(model, "classification", "all", structure)
    la.fit(batches(x, y))
    with pytest.raises(UnsupportedError, match=f"'{structure}' has no leave-one-out"):
        la.leave_one_out(batches(x, y))


def test_bad_input_is_refused() -> None:
    model, x, y = classifier()
    la = Laplace(model, "classification", "all", "full")
    with pytest.raises(NotFittedError):
        la.leave_one_out(batches(x, y))
    la.fit(batches(x, y))
    with pytest.raises(InvalidData, match="the fit has seen 60"):
        la.leave_one_out(batches(x[:50], y[:50]))
    with pytest.raises(InvalidData, match="the loss of these data"):
        la.leave_one_out(batches(x, y.flip(0)))
    with pytest.raises(InvalidArgument, match="link_approx='mc'"):
        la.leave_one_out(batches(x, y), link_approx="mc")
    subset = Laplace(model, "classification", "all", "gp", 20)
    subset.fit(batches(x, y))
    with pytest.raises(UnsupportedError, match="n_subset of all of them"):
        subset.leave_one_out(batches(x, y))
    ef = Laplace(model, "classification", "all", "full", backend=NativeEF)
    ef.fit(batches(x, y))
    with pytest.raises(UnsupportedError, match="NativeEF"):
        ef.leave_one_out(batches(x, y))
    whole = Laplace(model, "classification", "all", "gp", 60)
    whole.fit(batches(x, y))
    with pytest.raises(InvalidData, match="the loss of these data"):
        whole.leave_one_out(batches(x, y.flip(0)))
    problem = catalogue.get("mlp_heteroscedastic")
    other = Laplace(problem.make_model(), problem.likelihood, "all", "full")
    other.fit(problem.batches(4))
    with pytest.raises(UnsupportedError, match="no leave-one-out score"):
        other.leave_one_out(problem.batches(4))
