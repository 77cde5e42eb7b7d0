"""The bound on the confidence far from the data, against its formula in float64 and predictions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, MixtureLaplace, confidence_bound
from laplace.errors import InvalidArgument, NotFittedError
from laplace.extensions import confidence
from tests import grid
from tests.reference import mixture as reference
from tests.reference.compare import assert_close


def batches(likelihood: str) -> list[tuple[Tensor, Tensor]]:
    return [(x.double(), y.double() if y.is_floating_point() else y) for x, y in grid.batches(likelihood)]


def relu_networks(n: int) -> list[nn.Module]:
    """Trained ReLU networks without biases, float64."""
    x, y = (part.double() if part.is_floating_point() else part for part in grid.data("classification"))
    found: list[nn.Module] = []
    for seed in range(n):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(3, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False)).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        found.append(model)
    return found


@pytest.mark.parametrize("n_components", [1, 3], ids=["lemma 1", "theorem 2"])
@pytest.mark.parametrize("structure", ["full", "kron"])
def test_confidence_far_away_is_bounded(n_components: int, structure: str) -> None:
    """Lemma 1 and theorem 2: at δx for any δ the confidence keeps below the bound, while MAP's goes to 1."""
    models = relu_networks(n_components)
    mixture = MixtureLaplace(
        models, "classification", "last_layer", structure, weights=[1 / n_components] * n_components
    )
    mixture.fit(batches("classification"))
    rows = [la.mean.view(3, 8) for la in mixture.components]
    covariances = [la.posterior_covariance for la in mixture.components]
    for x in torch.randn(10, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64):
        for scale in (1.0, 1e2, 1e5):
            far = (scale * x).unsqueeze(0)
            bound = reference.confidence_bound(mixture.weights, rows, covariances)
            assert_close(confidence_bound(mixture, far)[0], bound, "algebra")
            assert 1 / 3 < bound < 1
            assert mixture(far).max().item() <= bound
        with torch.no_grad():
            certain = sum(model(1e5 * x).softmax(0).max().item() for model in models) / n_components
        assert certain > bound >= mixture(1e5 * x.unsqueeze(0)).max().item()


ALPHAS = torch.logspace(-4, 9, 27, dtype=torch.float64)


def heads(rows: list[Tensor], roots: list[Tensor], weights: list[float]) -> MixtureLaplace:
    """A mixture of linear heads `[C, D]` without biases, each with a root of the covariance of its weights."""
    parts: list[Any] = []
    for mean, root in zip(rows, roots, strict=True):
        layer = nn.Linear(mean.shape[1], len(mean), bias=False).double()
        layer.weight.data.copy_(mean)
        la = Laplace(layer, "classification", "last_layer", "diag" if root.ndim == 1 else "full")
        la.fit([(torch.ones(1, mean.shape[1], dtype=torch.float64), torch.zeros(1, dtype=torch.long))])
        la.posterior_scale = root
        parts.append(la)
    return MixtureLaplace(parts, weights=weights)


def test_the_class_may_be_another_further_out() -> None:
    """The first class is predicted at x, where its variance tells little, the second far away."""
    rows = torch.tensor([[1.01], [1.0], [0.0]], dtype=torch.float64)
    variances = torch.tensor([100.0, 1e-4, 100.0], dtype=torch.float64)
    la = heads([rows], [variances.sqrt()], [1.0])
    x = torch.full((1, 1), 1e-4, dtype=torch.float64)
    p = la(ALPHAS.unsqueeze(1) * x)
    assert p[0].argmax() == 0 and p[-1].argmax() == 1 and p[-1].max() > 0.99
    bound = confidence_bound(la, x)
    assert bool((p.amax(1) <= bound).all())
    assert_close(bound[0], reference.confidence_bound(torch.ones(1), [rows], [variances.diag()]), "algebra")


@pytest.mark.parametrize("seed", range(40))
def test_no_confidence_of_random_mixtures_exceeds_it(seed: int) -> None:
    """At αx, α from 1e-4 to 1e9, of heads whose means and variances are of sizes far apart."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    n_components, n_classes, width = 1 + seed % 3, 2 + seed % 4, 1 + seed % 5
    rows, roots = [], []
    for _ in range(n_components):
        rows.append(drawn(n_classes, width) * (10 ** drawn(n_classes, 1)))
        spread = 10 ** drawn(n_classes * width)
        roots.append(spread if seed % 2 else spread.unsqueeze(1) * drawn(len(spread), len(spread)))
    weights = drawn(n_components).abs()
    mixture = heads(rows, roots, (weights / weights.sum()).tolist())
    x = drawn(6, width)
    p = mixture((ALPHAS.view(-1, 1, 1) * x).flatten(0, 1))
    bound = confidence_bound(mixture, x)
    assert bool((p.amax(1).view(len(ALPHAS), -1) <= bound * (1 + 1e-9)).all())
    covariances = [root.square().diag() if root.ndim == 1 else root @ root.T for root in roots]
    assert_close(bound, reference.confidence_bound(mixture.weights, rows, covariances) + 0 * bound, "algebra")


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_the_bound_holds_of_any_head(structure: str) -> None:
    """With biases and float32 too: rows of weight and bias together."""
    x = torch.randn(50, 3) * torch.logspace(-1, 3, 50).unsqueeze(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    la = Laplace(model, "classification", "last_layer", structure, prior_precision=0.1)
    with pytest.raises(NotFittedError):
        confidence_bound(la, x)
    la.fit([(x, torch.arange(50) % 3)])
    bound = confidence_bound(la, x)
    assert bound.shape == (50,)
    assert bool((la(x).amax(1) <= bound + 1e-6).all())
    row = torch.cat([torch.arange(8), torch.tensor([24])])
    covariance = la.posterior_covariance.double()[row][:, row]
    ratio = la.mean[row].double().norm() / (torch.pi / 8 * torch.linalg.eigvalsh(covariance)[0]).sqrt()
    assert_close(confidence._ratios(la)[0], ratio, "float32")
    with pytest.raises(InvalidArgument, match="last_layer"):
        confidence_bound(Laplace(model, "classification", "all", "diag"), x)
    with pytest.raises(InvalidArgument, match="'regression'"):
        confidence_bound(Laplace(model, "regression", "last_layer", "diag"), x)


def test_the_bound_tightens_with_the_uncertainty() -> None:
    """The paper's two limits: λ_min → 0 bounds by 1, λ_min → ∞ by 1/C."""
    rows, weights = [torch.ones(3, 2, dtype=torch.float64)], torch.ones(1)
    for scale, limit in ((1e-6, 1.0), (1e12, 1 / 3)):
        covariance = [scale * torch.eye(6, dtype=torch.float64)]
        assert_close(reference.confidence_bound(weights, rows, covariance), limit, "float32")
