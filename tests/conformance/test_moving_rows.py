"""Networks and calls in which a proof, a draw or a form must not be carried over."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.curvature import NativeGGN
from tests.reference import curvature as reference
from tests.reference.compare import assert_close


class _Sorted(nn.Module):
    """Works on the batch sorted by a first entry, and puts it back."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        z = torch.tanh(self.a(x[order]))
        return self.b(z[order.argsort()])


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_a_first_batch_that_happens_to_be_sorted(structure: str) -> None:
    torch.manual_seed(0)
    model, x, y = _Sorted().double(), torch.randn(10, 3, dtype=torch.float64), torch.randint(2, (10,))
    x[:5] = x[:5][x[:5, 0].argsort()]
    la: Any = Laplace(model, "classification", "all", structure)
    la.fit([(x[:5], y[:5]), (x[5:], y[5:])])
    whole: Any = Laplace(model, "classification", "all", structure)
    whole.fit([(x, y)])
    assert_close(la.posterior_covariance, whole.posterior_covariance, "backend")
    if structure == "full":
        names = reference.trainable_names(model)
        assert_close(la.H, reference.ggn(model, x, y, names, "classification"), "backend")


class _PutBack(nn.Module):
    """Sorts the batch, and puts the outputs back: a bias whose Jacobian is the same at every datum sees other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.b(torch.tanh(self.a(x[order])))[order.argsort()]


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_outputs_that_are_put_back(structure: str, weights: str) -> None:
    torch.manual_seed(0)
    model, x, y = _PutBack().double(), torch.randn(6, 3, dtype=torch.float64), torch.randint(2, (6,))
    la: Any = Laplace(model, "classification", weights, structure)
    la.fit([(x, y)])
    names = reference.trainable_names(model)
    truth = reference.ggn(model, x, y, names, "classification")
    truth = truth if weights == "all" else truth[-10:, -10:]
    assert_close(la.H if structure == "full" else torch.diag(la.H), truth if structure == "full" else
                 torch.diag(truth.diagonal()), "backend")  # fmt: skip


def test_gradients_for_one_datum_behind_a_batch_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ConvTranspose2d(2, 2, 2, stride=2), nn.Tanh(), nn.Flatten(),
        nn.LazyLinear(2),
    ).double()  # fmt: skip
    x = torch.randn(4, 1, 4, 5, dtype=torch.float64)
    model(x)
    la: Any = Laplace(model.eval(), "regression", "all", "diag", enable_backprop=True)
    la.fit([(x, torch.randn(4, 2, dtype=torch.float64))])
    one = x[:1].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(la(one)[1].sum(), one)
    step = torch.zeros_like(one)
    step[0, 0, 1, 2] = 1e-6
    with torch.no_grad():
        difference = (la(one + step)[1].sum() - la(one - step)[1].sum()) / 2e-6
    assert_close(gradient[0, 0, 1, 2], difference, "finite_difference")


@pytest.mark.filterwarnings("ignore::laplace.errors.DataWarning")  # data that count twice
def test_added_data_get_draws_of_their_own() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 3).double(), torch.randn(8, 3, dtype=torch.float64), torch.randint(3, (8,))
    la: Any = Laplace(model, "classification", "all", "diag", backend=NativeGGN, backend_kwargs={"stochastic": True})
    la.fit([(x, y)])
    first = la.H.clone()
    la.fit([(x, y)], override=False)
    assert not torch.allclose(la.H, 2 * first)
    la.fit([(x, y)])
    assert torch.equal(la.H, first)


def test_a_fit_with_one_noise_is_copied_under_equal_noises() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(8, 3, dtype=torch.float64)
    la: Any = Laplace(model, "regression", "all", "diag", backend_kwargs={"stochastic": True})
    la.fit([(x, torch.randn(8, 2, dtype=torch.float64))])
    la.sigma_noise = torch.tensor([0.5, 0.5])
    assert torch.equal(copy.deepcopy(la)(x)[1], la(x)[1])


class _Gated(nn.Module):
    """A layer that only some batches need, and a log of what went through."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.extra = nn.Linear(3, 3), nn.Linear(3, 3)
        self.log: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(x)
        f = self.head(x)
        return f + self.extra(x) if bool((x[:, 0] > 0).all()) else f


@pytest.mark.parametrize("order", [(0, 4), (4, 0)])
def test_kronecker_factors_of_a_layer_that_some_batches_skip(order: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, x, y = _Gated().double(), torch.randn(8, 3, dtype=torch.float64), torch.randint(3, (8,))
    x[:4, 0], x[4:, 0] = x[:4, 0].abs(), -x[4:, 0].abs()
    model.log = [x]
    la: Any = Laplace(model, "classification", "all", "kron")
    la.fit([(x[i : i + 4], y[i : i + 4]) for i in order])
    assert len(model.log) == 1
    alone: Any = Laplace(model, "classification", "all", "kron")
    alone.fit([(x[:4], y[:4])])
    for name, factor in alone.fitted().curvature.parts.factors.items():
        if name.split(":")[1] in ("2", "3"):
            assert_close(la.fitted().curvature.parts.factors[name], factor, "backend", label=name)


@pytest.mark.parametrize("link", ["probit", "bridge", "bridge_norm"])
def test_diagonal_output_is_for_samples_only(link: str) -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 3).double(), torch.randn(8, 3, dtype=torch.float64), torch.randint(3, (8,))
    la: Any = Laplace(model, "classification", "all", "full")
    la.fit([(x, y)])
    assert_close(la(x, link_approx=link, diagonal_output=True), la(x, link_approx=link), "algebra")


def test_a_prior_mean_of_a_wrong_length_is_refused_at_every_fit() -> None:
    model, x, y = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)), torch.randn(8, 3), torch.zeros(8).long()
    la: Any = Laplace(model, "classification", prior_precision=torch.ones(6), prior_mean=torch.zeros(5))
    for _ in range(2):
        with pytest.raises(ValueError, match="prior_mean"):
            la.fit([(x, y)])
