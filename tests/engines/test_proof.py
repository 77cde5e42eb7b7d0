"""What a probe takes for equal: rounding of every dtype, also where a derivative is zero for a reason, and no more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace import DiagLaplace, FullLaplace
from laplace.engines.native.forward import record
from laplace.errors import CurvatureError
from laplace.weights.base import AllWeights
from tests.conformance.test_predictions import latent_of
from tests.reference import curvature as reference
from tests.reference.compare import assert_close

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


class _Keys(nn.Module):
    """Attention by hand: a softmax does not see the bias of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.query, self.key, self.value, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        weights = torch.softmax(self.query(h) @ self.key(h).transpose(-1, -2) / 8**0.5, -1)
        return self.head(self.norm(h + weights @ self.value(h)).mean(1))


def _two_channels(norm: nn.Module, width: int) -> nn.Module:
    """A norm over two channels gives ±1, whatever it is given."""
    return nn.Sequential(nn.Flatten(), nn.Linear(30, width), norm, nn.ReLU(), nn.Linear(width, 3))


EXACTLY_ZERO: dict[str, Callable[[], nn.Module]] = {
    "keys": _Keys,
    "group norm": lambda: _two_channels(nn.GroupNorm(4, 8), 8),
    "layer norm": lambda: _two_channels(nn.LayerNorm(2), 2),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EXACTLY_ZERO)
def test_derivatives_that_are_zero_for_a_reason_are_no_fault_of_the_model(name: str, dtype: torch.dtype) -> None:
    for seed in (1, 2, 5, 14):
        torch.manual_seed(seed)
        model = EXACTLY_ZERO[name]().to(dtype).eval()
        x, y = torch.randn(16, 5, 6).to(dtype), torch.randint(3, (16,))
        la = DiagLaplace(model, "classification")
        la.fit([(x, y)])
        assert la.H.isfinite().all()


def _over_one_number(seed: int) -> nn.Module:
    """A norm over one number gives its shift, but for rounding that its scale multiplies."""
    torch.manual_seed(seed)
    norm = nn.LayerNorm(1, eps=1e-12 if seed % 2 else 1e-5)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1), norm, nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_norms_over_one_number_do_not_mix_data(dtype: torch.dtype) -> None:
    for seed in range(12):
        model = _over_one_number(seed).to(dtype)
        x, y = 3 * torch.randn(12, 3).to(dtype), torch.randint(3, (12,))
        la = FullLaplace(model, "classification")
        la.fit([(x[:5], y[:5]), (x[5:], y[5:])])
        zero = ("0.weight", "0.bias", "2.weight", "2.bias", "3.weight")  # exactly; the rest does not depend on x
        model.double()
        rest = [name for name, _ in model.named_parameters() if name not in zero]
        exact = reference.ggn(model, x.double(), y, rest, "classification")
        of_rest = torch.cat([torch.full((p.numel(),), name in rest) for name, p in model.named_parameters()])
        size = exact.norm()
        assert (la.H[of_rest][:, of_rest] - exact).norm() < 1e-4 * size
        assert la.H[~of_rest].norm() < 1e-3 * size


class _Scaled(nn.Linear):
    """No linear layer: its output has another derivative in the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.2 * self.weight.square().sum())


class _Rolled(nn.Module):
    """A layer whose inputs are those of the next datum, on their way to and from it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.roll(1, 0)).roll(-1, 0)


WRONG: dict[str, Callable[[], nn.Module]] = {
    "scaled": lambda: _Scaled(6, 6),
    "rolled": _Rolled,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_readings_are_refused(name: str, dtype: torch.dtype) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.Sequential(WRONG[name](), nn.Tanh(), nn.Linear(6, 3)).to(dtype).eval()
        la = DiagLaplace(model, "classification")
        la.fit([(torch.randn(16, 6).to(dtype), torch.randint(3, (16,)))])
        first = next(iter(la.coverage().values()))
        assert first not in ("linear", "F.linear"), first


class _Centred(nn.Module):
    """The output of one datum depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inp(x))
        return self.head(torch.tanh(h - h.mean(0)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_data_that_depend_on_each_other_are_refused(dtype: torch.dtype) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        la = DiagLaplace(_Centred().to(dtype).eval(), "classification")
        with pytest.raises(CurvatureError, match="depends on the others"):
            la.fit([(torch.randn(16, 6).to(dtype), torch.randint(3, (16,)))])


class _Broadcast(nn.Module):
    """An activation with a parameter that all data share, and that no rule explains."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inp, self.head = nn.Linear(6, 4), nn.Linear(4, 3)
        self.parameter = nn.Parameter(0.1 + torch.rand(*{"slope": (1,), "slopes": (4,), "centres": (4, 4)}[kind]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        z = torch.cdist(h, self.parameter) if self.kind == "centres" else F.prelu(h, self.parameter)
        return self.head(z)


@pytest.mark.parametrize("n_data", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["slope", "slopes", "centres"])
def test_parameters_that_broadcast(kind: str, n_data: int) -> None:
    """Also of as many data as outputs, and after a batch of another size; by loops over data, not by vmap in vmap."""
    torch.manual_seed(0)
    model = _Broadcast(kind).double()
    x, y = torch.randn(n_data + 3, 6, dtype=torch.float64), torch.randint(3, (n_data + 3,))
    names = reference.trainable_names(model)
    jacobian, _ = reference.flat_jacobian(model, x, names)
    exact = reference.ggn(model, x, y, names, "classification")
    la = FullLaplace(model, "classification")
    la.fit([(x[:n_data], y[:n_data]), (x[n_data:], y[n_data:])])
    assert_close(la.H, exact, "backend")
    variance = latent_of(la, x[:n_data], "full").variance
    few = jacobian[:n_data]
    exact = torch.einsum("bkp,pq,bkq->bk", few, la.posterior_covariance, few)
    assert_close(variance, exact, "backend")


class _Swapped(nn.Module):
    """Applies two weights of one shape in an order that the batch decides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        inner, outer = (self.first, self.second) if x.sum() > 0 else (self.second, self.first)
        return F.linear(torch.tanh(F.linear(x, inner)), outer)


def test_an_explanation_holds_for_the_tensors_that_it_was_proven_for() -> None:
    torch.manual_seed(0)
    model, x, y = _Swapped().double(), torch.rand(4, 3, dtype=torch.float64), torch.randint(3, (4,))
    la = FullLaplace(model, "classification")
    la.fit([(x, y), (-x, y)])
    exact = sum(reference.ggn(model, data, y, ["first", "second"], "classification") for data in (x, -x))
    assert_close(la.H, exact, "backend")


class _Dropping(nn.LSTM):
    """Dropout between its layers in evaluation mode too."""

    def train(self, mode: bool = True) -> _Dropping:
        del mode
        return self

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)[0][:, -1]


def test_dropout_between_recurrent_layers_is_left_to_pytorch() -> None:
    torch.manual_seed(0)
    model, x = _Dropping(3, 2, 2, dropout=0.5, batch_first=True).double(), torch.randn(4, 3, 3, dtype=torch.float64)
    problem = AllWeights(model).problem
    assert problem is not None
    found: list[Tensor] = []
    for run in (lambda: model(x), lambda: record(problem, x, loop=False, observed=True).f):
        torch.manual_seed(1)
        found.append(run().detach())
    assert_close(found[1], found[0], "algebra")
