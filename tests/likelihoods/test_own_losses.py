"""Losses as users write them first: those that index, those without curvature, those that couple data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.curvature import NativeEF, NativeGGN, NativeHessian
from laplace.errors import CurvatureError, UnsupportedError
from laplace.likelihoods import Categorical, LikelihoodFromLoss
from tests.reference.compare import assert_close

N = 8


class FromLoss(LikelihoodFromLoss):
    name = "own"


class Indexed(FromLoss):
    """Cross-entropy by `f[y]`."""

    def negative_log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        return -f.log_softmax(-1)[y]

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.multinomial(f.softmax(-1), n, replacement=True, generator=generator).T

    def inverse_link(self, f: Tensor) -> Tensor:
        return f.softmax(-1)


class Focal(FromLoss):
    def negative_log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        p = f.softmax(-1)[y]
        return -((1 - p) ** 0.1) * p.log()


class Ordinal(FromLoss):
    """Cumulative links with cut points at −1, 0, 1, by an index and a branch."""

    def negative_log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        cuts = torch.cat([f.new_tensor([-torch.inf]), torch.linspace(-1, 1, 3).to(f), f.new_tensor([torch.inf])])
        if int(y) == 0:
            return -torch.nn.functional.logsigmoid(cuts[1] - f[0])
        return -(torch.sigmoid(cuts[y + 1] - f[0]) - torch.sigmoid(cuts[y] - f[0])).log()


class Absolute(FromLoss):
    def negative_log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        return (f - y).abs().sum()


class Quantile(FromLoss):
    def negative_log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.maximum(0.9 * (y - f), -0.1 * (y - f)).sum()


class Huber(FromLoss):
    """Curved near the targets alone."""

    def negative_log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.huber_loss(f, y, reduction="sum", delta=0.2)


class Switched(FromLoss):
    """|f − y| to a power that can be changed."""

    power = 2

    def negative_log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        return (f - y).abs().pow(self.power).sum()


class Cox(FromLoss):
    """The partial likelihood of a datum whose risk set is itself."""

    def negative_log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        return -(f[0] - f.logsumexp(0))


class MeanLoss(Categorical):
    """A mean in the place of a sum."""

    def loss_terms(self, f: Tensor, y: Tensor) -> Tensor:
        return super().loss_terms(f, y) / len(f)


class Contrastive(Categorical):
    """Logits that are centred over the batch."""

    def loss_terms(self, f: Tensor, y: Tensor) -> Tensor:
        return super().loss_terms(f - f.mean(0), y)


def network(n_outputs: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, n_outputs)).double()


def data(n_outputs: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    x = torch.randn(N, 3, dtype=torch.float64)
    y = torch.randint(n_outputs, (N,)) if n_outputs > 1 else 3 + torch.randn(N, 1, dtype=torch.float64)
    return [(x[:5], y[:5]), (x[5:], y[5:])]


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
@pytest.mark.parametrize("backend", [NativeGGN, NativeEF])
def test_labels_that_index(backend: Any, structure: Any) -> None:
    own = Laplace(network(3), Indexed(), "all", structure, backend=backend)
    known = Laplace(network(3), "classification", "all", structure, backend=backend)
    for la in (own, known):
        la.fit(data(3))
    assert_close(own.log_marginal_likelihood(), known.log_marginal_likelihood(), "algebra")


def test_labels_that_index_with_weights_and_hessians() -> None:
    weights = torch.tensor([2.0, 1, 0.5, 1, 3])
    own, known = Indexed(), Categorical()
    batches = data(3)[:1]
    pair = [Laplace(network(3), likelihood, "all", "full", backend=NativeHessian) for likelihood in (own, known)]
    for la in pair:
        la.prior_precision = 10.0
        la.fit(batches, weight_fn=lambda x, y: weights[: len(y)].double())
    assert_close(pair[0].log_marginal_likelihood(), pair[1].log_marginal_likelihood(), "algebra")


@pytest.mark.parametrize("loss", [Focal, Ordinal])
def test_losses_that_index_fit(loss: type[FromLoss]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(N, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    la = Laplace(network(4 if loss is Focal else 1), loss(), "all", "diag")
    if loss is Focal:
        la = Laplace(network(4), loss(), "all", "diag", backend=NativeEF)
    la.fit([(x, y)])
    assert la.log_marginal_likelihood().isfinite()


def test_sample_and_inverse_link_are_not_needed_until_something_draws() -> None:
    la: Any = Laplace(network(1), Huber(), "all", "kron")
    la.fit([(x, y.clamp(-0.1, 0.1)) for x, y in data(1)])
    la.optimize_prior_precision()
    f, variance = la._glm_predictive_distribution(data(1)[0][0])
    assert f.shape == (5, 1)
    assert bool((variance > 0).all())
    with pytest.raises(UnsupportedError, match=r"define inverse_link\(f\)"):
        la(data(1)[0][0], link_approx="mc")
    drawn = Laplace(network(1), Huber(), "all", "kron", backend_kwargs={"stochastic": True})
    with pytest.raises(UnsupportedError, match=r"define sample\(f, n, generator=None\)"):
        drawn.fit(data(1))


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "lowrank", "gp", "matrix_free"])
@pytest.mark.parametrize("loss", [Absolute, Quantile])
def test_a_loss_without_curvature_is_refused(loss: type[FromLoss], structure: Any) -> None:
    options: Any = {"n_subset": 4} if structure == "gp" else {}
    la = Laplace(network(1), loss(), "all", structure, **options)
    with pytest.raises(CurvatureError, match="second derivative of exactly zero"):
        la.fit(data(1))


def test_a_refused_fit_leaves_the_former_posterior() -> None:
    loss = Switched()
    la = Laplace(network(1), loss, "all", "diag")
    la.fit(data(1))
    before = la.log_marginal_likelihood()
    loss.power = 1
    with pytest.raises(CurvatureError):
        la.fit(data(1))
    assert_close(la.log_marginal_likelihood(), before, "exact")


def test_gradients_of_a_loss_without_curvature_are_a_fisher() -> None:
    la = Laplace(network(1), Absolute(), "all", "diag", backend=NativeEF)
    la.fit(data(1))
    assert float(la.H.sum()) > 0


@pytest.mark.parametrize("backend", [NativeGGN, NativeEF, NativeHessian])
def test_a_loss_that_says_nothing_of_one_datum_is_refused(backend: Any) -> None:
    structure: Any = "diag"
    la = Laplace(network(1), Cox(), "all", structure, backend=backend)
    with pytest.raises(CurvatureError, match="risk set"):
        la.fit(data(1))


def test_saturated_data_are_fitted() -> None:
    """All residuals are on the straight part of the loss, which is curved elsewhere."""
    la = Laplace(network(1), Huber(), "all", "diag")
    la.fit(data(1))
    assert float(la.H.abs().sum()) == 0


@pytest.mark.parametrize("loss", [MeanLoss, Contrastive])
def test_a_loss_that_couples_data_is_refused(loss: type[Categorical]) -> None:
    la = Laplace(network(3), loss(), "all", "kron")
    with pytest.raises(UnsupportedError, match="no sum over data"):
        la.fit(data(3))


def test_the_librarys_own_are_not_asked() -> None:
    model = nn.Sequential(nn.Linear(1, 2)).double()
    with torch.no_grad():
        model[0].weight.fill_(1e4)  # pyright: ignore
        model[0].bias.copy_(torch.tensor([0.0, 5e3]))  # pyright: ignore
    la = Laplace(model, "classification", "all", "diag")
    la.fit([(torch.ones(3, 1, dtype=torch.float64), torch.ones(3, dtype=torch.int64))])
    assert float(la.H.sum()) == 0


class Leaky(FromLoss):
    """A convex loss of residuals, steeper on one side, by an activation whose slope is a tensor."""

    def negative_log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        return (
            nn.functional.prelu((f - y).unsqueeze(0), torch.full_like(f, 0.2)).square().sum()
            + f.square().sum().square()
        )


@pytest.mark.parametrize("n_data", [1, 2, 3, 5])
def test_hessians_of_operations_that_vmap_within_vmap_gets_wrong(n_data: int) -> None:
    """Of as many data as outputs, with numbers that are wrong; of others with an error."""
    torch.manual_seed(0)
    f, y = torch.randn(n_data, 3, dtype=torch.float64), torch.randn(n_data, 3, dtype=torch.float64)
    loss = Leaky()
    hessian = torch.autograd.functional.hessian
    exact = [hessian(lambda g, b=b: loss.negative_log_likelihood(g, y[b]), f[b]) for b in range(n_data)]
    assert_close(loss.hessian(f, y).matrix(), torch.stack(exact), "algebra")  # pyright: ignore
