"""Weights that are used by PyTorch's functions: right blocks, Kronecker factors, and the values of PyTorch's layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace import DiagLaplace, FullLaplace, KronLaplace
from laplace.curvature import rules
from laplace.engines.native.forward import record
from laplace.errors import InvalidArgument
from laplace.weights.base import AllWeights
from tests.conformance.test_layers import posterior
from tests.conformance.test_predictions import latent_of
from tests.reference import curvature as reference
from tests.reference import kfac
from tests.reference.compare import assert_close


class _Attends(nn.Module):
    """Attention between three unequal inputs, with masks of every kind."""

    def __init__(self, options: dict[str, Any], call: dict[str, Any], same: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **options)
        self.head, self.call, self.same = nn.Linear(4, 3), call, same

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.attention.batch_first else x.transpose(0, 1)
        keys = h if self.same else h[..., : self.attention.kdim].cos()
        values = h if self.same else h[..., : self.attention.vdim].sin()
        out, weights = self.attention(h, keys, values, **self.call)
        out = out if self.attention.batch_first else out.transpose(0, 1)
        f = self.head(torch.tanh(out)).mean(1)
        return f if weights is None else f + weights.flatten(1).square().sum(1, keepdim=True)


TOKENS = 4
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
PADDED = torch.zeros(3, TOKENS, dtype=torch.bool)
PADDED[1, 2:] = PADDED[2, 3:] = True
ATTENTION: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "plain": ({}, {"need_weights": False}, True),
    "data first": ({"batch_first": True}, {}, True),
    "weights of heads": ({}, {"average_attn_weights": False}, True),
    "no biases": ({"bias": False, "batch_first": True}, {}, True),
    "three inputs": ({"batch_first": True}, {"need_weights": False}, False),
    "three widths": ({"kdim": 3, "vdim": 2, "batch_first": True}, {}, False),
    "three widths, no bias": ({"kdim": 3, "vdim": 2, "bias": False}, {}, False),
    "causal": ({}, {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}, True),
    "causal with weights": ({}, {"attn_mask": CAUSAL, "is_causal": True}, True),
    "masked by numbers": ({}, {"attn_mask": torch.linspace(-1, 1, 16).double().view(4, 4)}, False),
    "masked by head": ({}, {"attn_mask": torch.linspace(-1, 1, 96).double().view(6, 4, 4)}, False),
    "padded": ({"batch_first": True}, {"key_padding_mask": PADDED}, False),
    "padded and masked": ({}, {"key_padding_mask": PADDED, "attn_mask": CAUSAL, "need_weights": False}, True),
    "added keys": ({"add_bias_kv": True, "add_zero_attn": True}, {}, True),
}


def observed(model: nn.Module, x: Tensor) -> Tensor:
    """Outputs of a watched pass."""
    problem = AllWeights(model).problem
    assert problem is not None
    return record(problem, x, loop=False, observed=True).f.detach()


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_that_of_pytorch(name: str) -> None:
    torch.manual_seed(0)
    model, x = _Attends(*ATTENTION[name]).double().eval(), torch.randn(3, TOKENS, 4, dtype=torch.float64)
    assert_close(observed(model, x), model(x).detach(), "algebra")
    la = FullLaplace(model, "classification")
    y = torch.tensor([0, 1, 2])
    la.fit([(x, y)])
    exact = reference.ggn(model, x, y, reference.trainable_names(model), "classification")
    assert_close(la.H, exact, "backend")
    fallback = {n for n, words in la.coverage().items() if "fallback" in words}
    assert bool(fallback) == (name == "added keys"), fallback


class _Reads(nn.Module):
    def __init__(self, cell: nn.RNNBase, x: Tensor) -> None:
        super().__init__()
        self.cell, self.start = cell, None
        self.head = nn.Linear(self._out(x), 3)

    def _out(self, x: Tensor) -> int:
        return self.cell(x)[0].shape[-1]

    def forward(self, x: Tensor) -> Tensor:
        out, last = self.cell(x if self.cell.batch_first else x.transpose(0, 1))
        ends = last if isinstance(last, tuple) else (last,)
        out = out if self.cell.batch_first else out.transpose(0, 1)
        states = sum(end.square().sum((0, 2)) for end in ends)
        return self.head(out[:, 1]) + states[:, None] * self.head.bias  # pyright: ignore


CELLS: dict[str, Callable[[], nn.RNNBase]] = {
    "lstm": lambda: nn.LSTM(3, 2, 2, batch_first=True),
    "lstm both ways, projected": lambda: nn.LSTM(3, 3, 2, proj_size=2, bidirectional=True),
    "lstm without biases": lambda: nn.LSTM(3, 2, bias=False, batch_first=True),
    "gru both ways": lambda: nn.GRU(3, 2, 2, bidirectional=True, batch_first=True),
    "gru without biases": lambda: nn.GRU(3, 2, bias=False),
    "tanh": lambda: nn.RNN(3, 2, batch_first=True),
    "relu": lambda: nn.RNN(3, 2, nonlinearity="relu", bidirectional=True),
}


@pytest.mark.parametrize("name", CELLS)
def test_recurrence_is_that_of_pytorch(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 3, dtype=torch.float64)
    model = _Reads(CELLS[name]().double(), x).double().eval()
    assert_close(observed(model, x), model(x).detach(), "algebra")
    la = FullLaplace(model, "classification")
    y = torch.tensor([0, 1, 2, 0])
    la.fit([(x, y)])
    exact = reference.ggn(model, x, y, reference.trainable_names(model), "classification")
    assert_close(la.H, exact, "backend")
    assert not any("fallback" in words for n, words in la.coverage().items() if n.startswith("cell"))


class _Steps(nn.Module):
    """A cell that is called step by step."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        assert state is not None
        return self.head(state[0] * state[1] if isinstance(state, tuple) else state)


class _Packed(nn.Module):
    """Sequences of unequal lengths, which PyTorch's own function runs."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(3, 2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 0, 0] > 0).long()
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.cell(packed)[1][0][0])


STEPS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: _Steps(nn.LSTMCell(3, 2)),
    "gru": lambda: _Steps(nn.GRUCell(3, 2, bias=False)),
    "tanh": lambda: _Steps(nn.RNNCell(3, 2)),
    "relu": lambda: _Steps(nn.RNNCell(3, 2, nonlinearity="relu")),
    "packed": _Packed,
}


@pytest.mark.parametrize("name", STEPS)
def test_single_steps_and_packed_sequences(name: str) -> None:
    torch.manual_seed(0)
    model, x = STEPS[name]().double(), torch.randn(4, 2, 3, dtype=torch.float64)
    assert_close(observed(model, x), model(x).detach(), "algebra")
    la = FullLaplace(model, "classification")
    y = torch.tensor([0, 1, 2, 0])
    la.fit([(x, y)])
    assert_close(la.H, reference.ggn(model, x, y, reference.trainable_names(model), "classification"), "backend")
    words = la.coverage()["cell.weight_hh" if name != "packed" else "cell.weight_hh_l0"]
    assert words.startswith("fallback" if name == "packed" else "F.linear, 2 uses")


class _Repeated(nn.Module):
    """One layer that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.hidden, self.head = nn.Linear(3, 24), nn.Linear(24, 24), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        for _ in range(3):
            h = torch.tanh(self.hidden(h))
        return self.head(h)


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_positions_of_a_large_reused_layer_are_those_of_all_calls(approx: str) -> None:
    torch.manual_seed(0)
    model, x = _Repeated().double(), torch.randn(5, 3, dtype=torch.float64)
    y, names = torch.tensor([0, 1, 2, 0, 1]), reference.trainable_names(model)
    la = KronLaplace(model, "classification", backend_kwargs={"kfac_approx": approx})
    la.fit([(x[:3], y[:3]), (x[3:], y[3:])])
    truth = kfac.kfac(model, x, y, names, "classification", approx)
    truth["hidden.bias"] = [[reference.ggn(model, x, y, ["hidden.bias"], "classification")]]  # small, hence exact
    assert la.coverage()["hidden.weight"] == "linear, 3 uses → Kronecker factors"
    assert_close(la.H_facs.to_matrix(), kfac.dense_kfac(truth, names), "backend")


class _TiedByFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.hidden = nn.Embedding(5, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.hidden(self.token(x).mean(1))), self.token.weight)


class _Adapted(nn.Linear):
    """An adapter: its own forward, of a linear layer with a trainable correction."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.down, self.up = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.t()


class _Head(nn.Linear):
    """As a library derives its heads."""


@pytest.mark.parametrize("structure", ["kron", "ekfac", "full"])
def test_a_subclass_of_a_layer_is_one(structure: str) -> None:
    x, y, evidence = torch.randn(6, 3), torch.randint(3, (6,)), []
    for kind in (nn.Linear, _Head):
        torch.manual_seed(0)
        la = posterior(nn.Sequential(kind(3, 30), nn.Tanh(), kind(30, 3)), structure)
        la.fit([(x, y)])
        evidence.append(la.log_marginal_likelihood())
    assert torch.equal(*evidence)


class _Standardised(nn.Linear):
    """Not linear in its weight: the rule of its base class must be refused."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / self.weight.norm(dim=1, keepdim=True), self.bias)


class _Mixture(nn.Module):
    """Scales and shifts of all kinds, of vectors, of tokens, and of nothing but outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.scale, self.shift = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.randn(4))
        self.rows, self.sharpness = nn.Parameter(torch.randn(4, 1)), nn.Parameter(torch.tensor(0.7))
        self.table = nn.Embedding(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x) * (1 + self.scale) - self.shift
        h = torch.tanh(h + self.table(torch.arange(x.shape[1])[None])) * self.rows.exp()
        h += self.rows[: x.shape[1]]
        return self.sharpness * self.head(h.mean(1))


OTHERS: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "tied by a function": (_TiedByFunction, {"token.weight": "F.embedding + F.linear, 2 uses"}),
    "adapted": (lambda: nn.Sequential(_Adapted(), nn.Tanh(), nn.Linear(4, 3)), {"0.weight": "F.linear"}),
    "standardised": (
        lambda: nn.Sequential(_Standardised(3, 4), nn.Tanh(), nn.Linear(4, 3)),
        {"0.weight": "fallback: torch.func vmap", "0.bias": "linear"},
    ),
    "scales and shifts": (
        _Mixture,
        {"scale": "scale", "shift": "sum with all data", "rows": "scale + sum with all data, 2 uses",
         "sharpness": "scale", "table.weight": "sum with all data"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("n_data", [4, 1])
def test_functions_explain_what_modules_do_not(name: str, n_data: int) -> None:
    torch.manual_seed(0)
    build, rules_expected = OTHERS[name]
    model = build().double().eval()
    x = torch.randint(5, (n_data, 3)) if name.startswith("tied") else torch.randn(n_data, 3, dtype=torch.float64)
    x = torch.randn(n_data, 4, 3, dtype=torch.float64) if name.startswith("scales") else x
    y = torch.randint(3, (n_data,))
    names = reference.trainable_names(model)
    exact = reference.ggn(model, x, y, names, "classification")
    la = FullLaplace(model, "classification")
    la.fit([(x, y)])
    assert_close(la.H, exact, "backend")
    assert {tensor: la.coverage()[tensor] for tensor in rules_expected} == rules_expected
    for structure in ("kron", "ekfac", "lowrank_kron", "diag"):  # all take these blocks
        other = posterior(model, structure)
        other.fit([(x, y)])
        assert other(x).isfinite().all()
    diag = DiagLaplace(model, "classification")
    diag.fit([(x, y)])
    assert_close(diag.H, exact.diagonal(), "backend")


def test_predictions_differentiate_in_the_inputs() -> None:
    """Variances follow the inputs through what was watched, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), _Mixture()).double().eval()
    x = torch.randn(3, 4, 2, dtype=torch.float64)
    la = FullLaplace(model, "classification", enable_backprop=True)
    la.fit([(x, torch.tensor([0, 1, 2]))])

    def variance(inputs: Tensor) -> Tensor:
        return latent_of(la, inputs, "full").covariance.diagonal(dim1=1, dim2=2).sum()

    (gradient,) = torch.autograd.grad(variance(x.requires_grad_()), x)
    step = torch.randn_like(x)
    change = (variance(x.detach() + 1e-5 * step) - variance(x.detach() - 1e-5 * step)) / 2e-5
    assert_close((gradient * step).sum(), change.detach(), "finite_difference")


class _Own(nn.Module):
    """A layer whose product no function of PyTorch shows."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(size_out, size_in)), nn.Parameter(torch.zeros(size_out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight) + self.bias


class _OwnOther(_Own):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight.square().sum()


class _Functional(nn.Module):
    """Arguments by name, in any order, with options, and inside a transform of torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4, 4))
        self.third, self.bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))
        self.members = nn.Parameter(torch.randn(2, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(F.linear(weight=self.first, input=x, bias=self.bias))
        h = torch.addmm(self.bias, h, mat2=self.second, beta=0.5).sin()
        f = torch.matmul(input=h, other=self.third)
        return torch.func.vmap(lambda w: F.linear(f, w))(self.members).mean(0)


def test_arguments_by_name_and_options() -> None:
    torch.manual_seed(0)
    model, x, y = _Functional().double(), torch.randn(4, 3, dtype=torch.float64), torch.randint(3, (4,))
    la = FullLaplace(model, "classification")
    la.fit([(x, y)])
    exact = reference.ggn(model, x, y, reference.trainable_names(model), "classification")
    assert_close(la.H, exact, "backend")
    found = la.coverage()
    assert (found["first"], found["third"]) == ("F.linear", "torch.matmul")
    assert all("fallback" in found[name] for name in ("second", "bias", "members"))


def test_a_rule_for_a_layer_of_ones_own_in_one_line() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(3, (6,))
    before = KronLaplace(nn.Sequential(_Own(3, 4), nn.Linear(4, 3)).double(), "classification")
    before.fit([(x, y)])
    assert before.coverage()["0.weight"] == "fallback: torch.func vmap → exact dense block"
    rules.like(nn.Linear, _Own)
    rules.like(nn.Linear, _Own)  # a cell of a notebook that runs again
    for layer, rule in ((_Own, "linear → Kronecker factors"), (_OwnOther, "fallback")):
        model = nn.Sequential(layer(3, 4), nn.Linear(4, 3)).double()
        la = KronLaplace(model, "classification")
        la.fit([(x, y)])
        assert la.coverage()["0.weight"].startswith(rule)
    with pytest.raises(InvalidArgument, match="known=Tanh"):
        rules.like(nn.Tanh, _Own)


def test_a_small_share_of_diagonals_and_large_vectors_are_not_warned_of() -> None:
    model = nn.Sequential(nn.Linear(3, 600), nn.LayerNorm(600), nn.Linear(600, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la = KronLaplace(model, "classification")
        la.fit([(torch.randn(4, 3), torch.randint(3, (4,)))])
    assert la.coverage()["1.weight"] == "layer norm → exact diagonal"
