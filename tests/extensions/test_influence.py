"""Influence against gradients and precisions multiplied out, and against refits without an input."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import Laplace
from laplace.errors import InvalidArgument, InvalidData, ModelChangedError, NotFittedError, UnsupportedError
from laplace.likelihoods import Categorical
from tests import problems as catalogue
from tests.reference.compare import assert_close


def batches(x: Tensor, y: Tensor, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def fitted(problem: Any, weights: str = "all", structure: str = "kron", **options: Any) -> Any:
    kind: Any = Laplace
    la = kind(problem.make_model(), problem.likelihood, weights, structure, prior_precision=2.0, **options)
    la.fit(problem.batches(4))
    return la


def gradients(la: Any, x: Any, y: Tensor) -> Tensor:
    """Gradients `[B, P]` of the loss over σ² at every input, by the Jacobian and autograd."""
    jacobians = la.backend.last_layer_jacobians if la.snapshot().problem.head else la.backend.jacobians
    jacobian, f = jacobians(x)[:2]
    f = f.detach().requires_grad_()
    loss = la.likelihood_object.loss_terms(f, y).sum() / la.sigma_noise.square()
    (slope,) = torch.autograd.grad(loss, f)
    return torch.einsum("bc,bcp->bp", slope, jacobian)


def dense(la: Any) -> Tensor:
    precision = la.posterior_precision
    if hasattr(precision, "to_matrix"):
        return precision.to_matrix()
    return precision.diag() if precision.ndim == 1 else precision


@pytest.mark.parametrize("structure", ["full", "block", "kron", "ekfac", "diag"])
@pytest.mark.parametrize("name", ["mlp_classification", "mlp_regression", "conv2d", "mlp_soft_labels"])
def test_it_is_the_dense_formula(name: str, structure: str) -> None:
    problem = catalogue.get(name)
    options: dict[str, Any] = {"sigma_noise": 0.7} if problem.likelihood == "regression" else {}
    la = fitted(problem, structure=structure, **options)
    rows = gradients(la, problem.x, problem.y)
    expected = rows[:3] @ torch.linalg.solve(dense(la), rows.T)
    found = laplace.influence(la, problem.batches(4), problem.x[:3], problem.y[:3])
    assert found.indices is None
    assert_close(found.scores, expected.detach(), "backend")
    errors = laplace.label_errors(la, problem.batches(4))
    own = (rows * torch.linalg.solve(dense(la), rows.T).T).sum(1).detach()
    assert_close(errors.self_influence, own, "backend")
    assert torch.equal(errors.indices, errors.self_influence.argsort(descending=True, stable=True))
    likelihood, f = la.likelihood_object, la.predictive_moments(problem.x)[0]
    each = [likelihood.loss_terms(f[i : i + 1], problem.y[i : i + 1]).sum() for i in range(len(f))]
    assert_close(errors.loss, torch.stack(each) / la.sigma_noise.square(), "backend")


LAYERS = ["layer_norm", "lora", "reused_module", "conv2d_grouped", "conv1d", "residual_cnn", "transformer", "lstm",
          "embedding", "tied_head", "weight_norm", "pair"]  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_of_layers_of_every_kind(name: str) -> None:
    problem = catalogue.get(name)
    la = fitted(problem, structure="diag")
    rows = gradients(la, problem.x, problem.y)
    expected = rows[:2] / la.posterior_precision @ rows.T
    found = laplace.influence(la, problem.batches(4), problem.x[:2], problem.y[:2]).scores
    assert_close(found, expected.detach(), "backend")


def test_a_head_and_a_subnetwork() -> None:
    problem = catalogue.get("mlp_classification")
    head = fitted(problem, "last_layer", "full")
    some = fitted(problem, "subnetwork", "full", subnetwork_indices=torch.tensor([0, 3, 7, 11, 20]))
    for la in (head, some):
        rows = gradients(la, problem.x, problem.y)
        expected = rows[:2] @ torch.linalg.solve(dense(la), rows.T)
        assert_close(
            laplace.influence(la, problem.batches(4), problem.x[:2], problem.y[:2]).scores, expected.detach(), "backend"
        )


def test_the_exact_curvature_by_conjugate_gradients() -> None:
    problem = catalogue.get("mlp_classification")
    exact = fitted(problem, structure="full")
    la = fitted(problem, structure="matrix_free", structure_kwargs={"tolerance": 1e-10, "dense_below": 0})
    asked = problem.batches(4), problem.x[:3], problem.y[:3]
    assert_close(laplace.influence(la, *asked).scores, laplace.influence(exact, *asked).scores, "backend")
    assert la.solve_reports["solutions"].residual <= 1e-10


def test_the_largest_are_streamed() -> None:
    problem = catalogue.get("mlp_classification")
    la = fitted(problem)
    whole = laplace.influence(la, problem.batches(4), problem.x[:3], problem.y[:3]).scores
    found = laplace.influence(la, problem.batches(3), problem.x[:3], problem.y[:3], top=4)
    assert found.scores.shape == found.indices.shape == (3, 4)
    assert_close(found.scores, whole.gather(1, found.indices), "backend")
    assert_close(found.scores.abs(), whole.abs().sort(1, descending=True).values[:, :4], "backend")
    assert (
        laplace.influence(la, problem.batches(3), problem.x[:3], problem.y[:3], top=10**6).scores.shape == whole.shape
    )


@pytest.mark.parametrize("structure", ["full", "ekfac", "diag"])
def test_few_combinations_of_the_queries_are_the_best_ones(structure: str) -> None:
    problem = catalogue.get("mlp_classification")
    la = fitted(problem, structure=structure)
    asked = problem.batches(4), problem.x[:6], problem.y[:6]
    rows = gradients(la, problem.x, problem.y)
    root = torch.linalg.cholesky(dense(la))
    white = torch.linalg.solve_triangular(root, rows.T, upper=False).T  # P^(−½) g
    size = white[:6].norm(dim=1, keepdim=True)
    u, s, v = torch.linalg.svd(white[:6] / size, full_matrices=False)
    found = laplace.influence(la, *asked, rank=3)
    assert_close(found.scores, (size * u[:, :3] * s[:3] @ v[:3] @ white.T).detach(), "backend")
    assert found.kept == pytest.approx(float(s[:3].square().sum() / s.square().sum()))
    whole = laplace.influence(la, *asked)
    assert torch.equal(laplace.influence(la, *asked, rank=6).scores, whole.scores) and whole.kept == 1.0


def test_queries_without_a_gradient_lose_nothing() -> None:
    model = nn.Linear(2, 2)
    model.weight.data.zero_()
    model.bias.data = torch.tensor([0.0, 800.0])
    x, y = torch.randn(6, 2), torch.ones(6, dtype=torch.long)
    la = Laplace(model, "classification", "all", "full")
    la.fit([(x, y)])
    found = laplace.influence(la, [(x, y)], x, y, rank=2)
    assert found.kept == 1.0
    assert not found.scores.any()


def test_a_batch_of_ignored_labels_keeps_the_precision() -> None:
    model, x, y = nn.Linear(2, 2), torch.randn(6, 2), torch.arange(6) % 2
    la = Laplace(model, "classification", "all", "kron")
    la.fit([(x, y)])
    scores = laplace.influence(la, [(x[:2], torch.full((2,), -100)), (x, y)], x, y).scores
    assert scores.dtype == laplace.influence(la, [(x, y)], x, y).scores.dtype == torch.float32
    assert not scores[:, :2].any()


def test_damping_is_another_prior_precision() -> None:
    problem = catalogue.get("mlp_classification")
    la, other = fitted(problem), fitted(problem)
    other.prior_precision = 9.0
    asked = problem.batches(4), problem.x[:3], problem.y[:3]
    assert_close(laplace.influence(la, *asked, damping=9.0).scores, laplace.influence(other, *asked).scores, "algebra")
    assert float(la.prior_precision) == 2.0
    with pytest.raises(InvalidArgument, match="positive"):
        laplace.influence(la, *asked, damping=0.0)


def classifier(n: int, seed: int = 0) -> tuple[Any, Tensor, Tensor]:
    """A logistic regression at the mode of its posterior, δ = 1."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=source, dtype=torch.float64)
    y = (2 * x[:, :3] + torch.randn(n, 3, generator=source, dtype=torch.float64)).argmax(1)
    return mode(x, y, torch.ones(n, dtype=torch.float64)), x, y


def mode(x: Tensor, y: Tensor, weights: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(5, 3, dtype=torch.float64)
    optimizer = torch.optim.LBFGS(
        model.parameters(), 1.0, 200, tolerance_grad=1e-11, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weights @ nn.functional.cross_entropy(model(x), y, reduction="none")
        loss = loss + 0.5 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    return model


def test_it_tells_refits_of_a_linear_head_without_an_input() -> None:
    model, x, y = classifier(600)
    _, queries, targets = classifier(30, seed=1)
    la = Laplace(model, "classification", "all", "full", prior_precision=1.0)
    la.fit(batches(x, y))
    found = laplace.influence(la, batches(x, y, 100), queries, targets).scores[:, :60]
    before = nn.functional.cross_entropy(model(queries), targets, reduction="none")
    rises = []
    for i in range(60):
        weights = torch.ones(len(x), dtype=torch.float64)
        weights[i] = 0
        after = nn.functional.cross_entropy(mode(x, y, weights)(queries), targets, reduction="none")
        rises.append((after - before).detach())
    pair = torch.stack([found.flatten(), torch.stack(rises, 1).flatten()])
    assert torch.corrcoef(pair)[0, 1] >= 0.999
    total = torch.stack([found.sum(0), torch.stack(rises, 1).sum(0)])  # on the loss of all queries
    assert torch.corrcoef(total)[0, 1] >= 0.999


def test_flipped_labels_come_first() -> None:
    source = torch.Generator().manual_seed(3)
    x = torch.randn(200, 5, generator=source, dtype=torch.float64)
    y = x[:, :3].argmax(1)
    flipped = torch.randperm(200, generator=source)[:20]
    y[flipped] = (y[flipped] + 1) % 3
    model = mode(x, y, torch.ones(200, dtype=torch.float64))
    la = Laplace(model, "classification", "all", "kron", prior_precision=1.0)
    la.fit(batches(x, y, 50))
    worst = laplace.label_errors(la, batches(x, y, 50)).indices[:40]
    assert len(set(worst.tolist()) & set(flipped.tolist())) >= 16


def test_a_refined_posterior_has_the_gradients_of_its_mode() -> None:
    model, x, y = classifier(40)
    with torch.no_grad():
        model.weight.mul_(0.3)
    la = Laplace(model, "classification", "all", "full", prior_precision=1.0)
    la.fit([(x, y)])
    la.refine([(x, y)])
    best = Laplace(mode(x, y, torch.ones(40).double()), "classification", "all", "full", prior_precision=1.0)
    best.fit([(x, y)])
    expected = laplace.influence(best, [(x, y)], x[:5], y[:5]).scores
    torch.testing.assert_close(laplace.influence(la, [(x, y)], x[:5], y[:5]).scores, expected, rtol=1e-5, atol=1e-7)


def test_tokens_of_an_input_count_together() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)).double()
    x, y = torch.randint(7, (6, 5)), torch.randint(7, (6, 5))
    la = Laplace(model, "classification", "all", "diag", prior_precision=2.0)
    la.fit([(x, y)])
    rows = []
    for tokens, labels in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(model(tokens), labels, reduction="sum")
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    g = torch.stack(rows)
    assert_close(laplace.influence(la, [(x, y)], x[:2], y[:2]).scores, g[:2] / la.posterior_precision @ g.T, "backend")


def test_ignored_labels_are_left_out_and_class_weights_count() -> None:
    model, x, y = classifier(20)
    y[3] = -100
    la = Laplace(model, Categorical(class_weight=torch.tensor([1.0, 2.0, 0.5]).double()), "all", "full")
    la.fit(batches(x, y))
    scores = laplace.influence(la, batches(x, y), x[:2], y[:2]).scores
    assert scores.shape == (2, 20) and not scores[:, 3].any()
    with pytest.raises(InvalidData, match="ignored"):
        laplace.influence(la, batches(x, y), x[3:4], y[3:4])


def test_bad_input_is_refused_and_nothing_changes() -> None:
    model, x, y = classifier(20)
    la = Laplace(model, "classification", "all", "full")
    for call in (lambda la: laplace.influence(la, [(x, y)], x, y), lambda la: laplace.label_errors(la, [(x, y)])):
        with pytest.raises(NotFittedError):
            call(la)
    la.fit([(x, y)])
    state = copy.deepcopy(model.state_dict())
    for top in (0, -1, 1.5):
        with pytest.raises(InvalidArgument, match="top="):
            laplace.influence(la, [(x, y)], x, y, top=top)  # pyright: ignore[reportArgumentType]
        with pytest.raises(InvalidArgument, match="rank="):
            laplace.influence(la, [(x, y)], x, y, rank=top)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidData):
        laplace.influence(la, [], x, y)
    with pytest.raises(InvalidData):
        laplace.influence(la, [(x, y)], x, y + 5)
    with pytest.raises(InvalidData):
        laplace.label_errors(la, [(x * torch.nan, y)])
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    weighed = Laplace(model, "classification", "all", "full")
    weighed.fit([(x, y)], weight_fn=lambda x, y: 1 + torch.arange(len(y)) % 2)
    with pytest.raises(UnsupportedError, match="weights"):
        laplace.influence(weighed, [(x, y)], x, y)
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(ModelChangedError):
        laplace.influence(la, [(x, y)], x, y)


def test_places_are_those_of_the_loader_and_calibration_changes_nothing() -> None:
    model, x, y = classifier(60)
    la = Laplace(model, "classification", "all", "full", prior_precision=1.0)
    ignored = y.clone()
    ignored[:7] = -100
    loader = batches(x, ignored)
    la.fit(loader)
    found, whole = laplace.label_errors(la, loader), laplace.influence(la, loader, x[10:13], y[10:13])
    assert found.self_influence.shape == (60,) and whole.scores.shape == (3, 60)
    assert not found.self_influence[:7].any() and not whole.scores[:, :7].any()
    top = laplace.influence(la, loader, x[10:13], y[10:13], top=4)
    torch.testing.assert_close(whole.scores.gather(1, top.indices), top.scores)
    assert int(found.indices[0]) == int(found.self_influence.argmax()) >= 7
    with pytest.raises(InvalidData, match="ignored"):
        laplace.influence(la, loader, x[:3], ignored[:3])
    chosen = la.calibrate([(x + 0.1, y)])
    scores = laplace.label_errors(la, loader).self_influence
    la.calibration.undo()
    la.prior_precision = chosen.prior_precision
    torch.testing.assert_close(scores, laplace.label_errors(la, loader).self_influence)
