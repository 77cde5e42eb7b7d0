"""Recurrent layers where cuDNN runs them: it has no backward pass of them in evaluation mode."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.engines.native.autograd import without_cudnn
from laplace.errors import UnsupportedError
from tests.reference.compare import assert_close

N, LENGTH, WIDTH = 5, 4, 3
X = torch.randn(N, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 2
CELLS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}


class _AsCudnn(torch.autograd.Function):
    """Identity whose backward pass raises what that of cuDNN raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent functions whose results come from cuDNN, where that is on, and the call is none of training."""

    def emulated(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        def run(*args: Any) -> tuple[Tensor, ...]:
            results = function(*args)
            training = args[6] if isinstance(args[3], bool) else args[7]  # of packed sequences the second
            off = training or not torch.backends.cudnn.enabled or not results[0].requires_grad
            return results if off else tuple(_AsCudnn.apply(result) for result in results)

        return run

    for name in (*CELLS, "rnn_relu"):
        monkeypatch.setattr(torch._VF, name, emulated(getattr(torch._VF, name)), raising=False)


class Recurrent(nn.Module):
    """A recurrent layer between a linear one and the head."""

    def __init__(self, cell: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.cell = CELLS[cell](WIDTH, 4, batch_first=True)
        self.head = nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(torch.tanh(self.first(x)))[0][:, -1])


class Functional(nn.Module):
    """The recurrent function itself, of weights that belong to no layer of PyTorch's."""

    def __init__(self, *, with_images: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        own = nn.LSTM(WIDTH, 4, batch_first=True)
        self.weights = nn.ParameterList([nn.Parameter(weight.detach()) for weight in own.parameters()])
        self.head = nn.Linear(4, 2)
        self.images = nn.Conv1d(WIDTH, WIDTH, 1) if with_images else nn.Identity()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.images(x.mT).mT
        states = (x.new_zeros(1, len(x), 4),) * 2
        h = torch._VF.lstm(x, states, list(self.weights), True, 1, 0.0, self.training, False, True)[0]
        return self.head(h[:, -1])


def dense_jacobian(model: nn.Module) -> Tensor:
    """J in training mode, `[N, 2, P]`."""
    parameters, rows = list(model.parameters()), []
    for value in model.train()(X).flatten():
        gradients = torch.autograd.grad(value, parameters, retain_graph=True)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    model.eval()
    return torch.stack(rows).view(N, 2, -1)


def ggn(model: nn.Module) -> Tensor:
    J, p = dense_jacobian(model), torch.softmax(model(X), -1).detach()
    return torch.einsum("bcp,bcd,bdq->pq", J, torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1), J)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{cell: lambda cell=cell: Recurrent(cell) for cell in CELLS},
    "function": Functional,
}


def test_the_emulation_raises() -> None:
    with pytest.raises(RuntimeError, match="only be called in training mode"):
        Recurrent("lstm").eval()(X).sum().backward()


@pytest.mark.parametrize("structure", ["full", "kron", "matrix_free"])
@pytest.mark.parametrize("name", MODELS)
def test_all_weights_are_fitted(name: str, structure: Any) -> None:
    model = MODELS[name]().eval()
    truth = ggn(model)
    la = Laplace(model, "classification", "all", structure)
    la.fit([(X, Y)])
    assert torch.backends.cudnn.enabled
    _, variance = la._glm_predictive_distribution(X)
    if structure != "kron":
        J = dense_jacobian(model)
        expected = J @ torch.linalg.inv(truth + torch.eye(len(truth), dtype=truth.dtype)) @ J.mT
        # conjugate gradients stop at their tolerance
        assert_close(variance, expected, "float32" if structure == "matrix_free" else "algebra")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"pred_type": "nn", "link_approx": "mc"}], ids=["glm", "nn"])
def test_predictions_have_gradients_in_the_inputs(name: str, options: dict[str, Any]) -> None:
    la = Laplace(MODELS[name]().eval(), "classification", "all", "diag", enable_backprop=True)
    la.fit([(X, Y)])
    x = X.clone().requires_grad_()
    la(x, **options).square().sum().backward()
    assert x.grad is not None and bool((x.grad != 0).any())


def test_a_frozen_recurrent_layer_is_differentiated_through() -> None:
    model = Recurrent("lstm").eval()
    for parameter in model.cell.parameters():
        parameter.requires_grad_(False)
    la = Laplace(model, "classification", "all", "full")
    la.fit([(X, Y)])
    n_first = WIDTH * (WIDTH + 1)
    for parameter in model.cell.parameters():
        parameter.requires_grad_()
    own = [*range(n_first), *range(len(truth := ggn(model)))[-10:]]
    assert_close(la.H, truth[own][:, own], "algebra")


def test_a_last_layer_keeps_cudnn() -> None:
    seen: list[bool] = []
    model = Recurrent("gru").eval()
    model.cell.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.enabled))
    Laplace(model, "classification", "last_layer", "kron").fit([(X, Y)])
    assert seen and all(seen)


def test_a_function_beside_convolutions_is_refused_with_the_remedy() -> None:
    """Convolutions keep cuDNN, unless a recurrent layer is among the modules."""
    with pytest.raises(UnsupportedError, match=r"torch\.backends\.cudnn\.flags\(enabled=False\)"):
        Laplace(Functional(with_images=True).eval(), "classification", "all", "diag").fit([(X, Y)])


def test_cudnn_is_put_back_when_the_last_call_of_any_thread_ends() -> None:
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with without_cudnn(Functional()):
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=other)
    with without_cudnn(Functional()):
        thread.start()
        entered.wait(10)
    assert not torch.backends.cudnn.enabled
    left.set()
    thread.join()
    assert torch.backends.cudnn.enabled
