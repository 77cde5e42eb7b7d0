"""The network at sampled weights: vectorised passes give what a pass for each sample gives, and nothing else shows."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, vector_to_parameters

from laplace.engines import at_weights
from laplace.engines.at_weights import LEAST_SAMPLES, one_by_one, outputs_at, vectorised
from laplace.errors import InvalidInputs, MemoryWarning
from laplace.weights.problem import ParameterSlice, Problem
from tests import fresh

SAMPLES, BUDGET = 24, 2**30
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Attention(nn.Module):
    """Two heads over tokens, and the mean over them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


class Recurrent(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer, self.head = kind(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).tanh()).tanh())


def mlp(*extra: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), *extra, nn.Tanh(), nn.Linear(5, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


class Positive(nn.Module):
    """A weight as the logarithm of its exponential and 1."""

    def forward(self, weight: Tensor) -> Tensor:
        return functional.softplus(weight)


def parametrised(layer: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), layer(nn.Linear(5, 5)), nn.Tanh(), nn.Linear(5, 3))


def positive(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Positive())
    return layer


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "linear": (mlp, X),
    "layer norm": (lambda: mlp(nn.LayerNorm(5)), X),
    "batch norm": (lambda: mlp(nn.BatchNorm1d(5)), X),
    "dropout": (lambda: mlp(nn.Dropout(0.5)), X),
    "PReLU": (lambda: mlp(nn.PReLU(5)), X),
    "in place": (lambda: mlp(nn.ReLU(inplace=True)), X),
    "convolutions": (convolutions, drawn(6, 2, 8, 8)),
    "one dimension": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(18, 3)), drawn(6, 2, 8)),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 3)),
        torch.arange(18).view(6, 3) % 7,
    ),
    "attention": (Attention, drawn(6, 3, 4)),
    "LSTM": (lambda: Recurrent(nn.LSTM), drawn(6, 3, 4)),
    "GRU": (lambda: Recurrent(nn.GRU), drawn(6, 3, 4)),
    "tied": (Tied, X),
    "parametrised": (lambda: parametrised(positive), X),
    "spectral norm": (lambda: parametrised(parametrizations.spectral_norm), X),
    "weight norm": (lambda: parametrised(parametrizations.weight_norm), X),
    "positions": (mlp, drawn(6, 3, 4)),
}


WITHOUT_RULES = {"LSTM", "GRU", "weight norm"}
"""Networks with operations that vmap has no rule for."""


def problem_of(build: Callable[[], nn.Module]) -> Problem:
    """All weights of a float64 network."""
    torch.manual_seed(0)
    model = build().double().eval()
    return Problem(model, tuple(ParameterSlice(name, p.shape) for name, p in model.named_parameters()))


def weights(problem: Problem, n: int = SAMPLES) -> Tensor:
    """Weights around the network's own, `[n, P]`."""
    mean = problem.mean()
    noise = torch.randn(n, len(mean), generator=torch.Generator().manual_seed(2), dtype=mean.dtype)
    return mean + 0.3 * noise


def at_once(problem: Problem) -> list[int]:
    """What was decided."""
    return list(problem.samples_at_once.values())


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_those_of_a_copy_with_the_weights_written_into(name: str) -> None:
    build, x = NETWORKS[name]
    problem = problem_of(build)
    thetas = weights(problem)
    other = copy.deepcopy(problem.module)
    with torch.no_grad():
        expected: list[Tensor] = []
        for theta in thetas:
            vector_to_parameters(theta, other.parameters())
            expected.append(other(x))
        samples = outputs_at(problem, x, thetas, BUDGET)
        one = one_by_one(problem, x, thetas)
    torch.testing.assert_close(samples, torch.stack(expected), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(one, torch.stack(expected), rtol=1e-10, atol=1e-10)
    assert (at_once(problem)[0] > 1) == (name not in WITHOUT_RULES)


# What vmap cannot run, or would run as another function.


class Odd(nn.Module):
    """A network that does something after its first layer."""

    def __init__(self, something: Callable[[Odd, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 5), nn.Linear(5, 3), nn.BatchNorm1d(5)
        self.register_buffer("seen", torch.zeros(5, dtype=torch.float64))
        self.calls = 0
        self.something = something

    def forward(self, x: Tensor) -> Any:
        return self.something(self, self.first(x))


class Doubled(torch.autograd.Function):
    """A function that says nothing of vmap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * grad


@dataclass
class Output:
    """What a Hugging Face model returns."""

    logits: Tensor


def branches(net: Odd, h: Tensor) -> Tensor:
    return net.second(h if h.sum() > 0 else -h)


def writes(net: Odd, h: Tensor) -> Tensor:
    net.get_buffer("seen").add_(h.sum(0))
    return net.second(h + net.get_buffer("seen"))


def counts(net: Odd, h: Tensor) -> Tensor:
    net.calls += 1
    return net.calls * net.second(h)


def counts_in_a_buffer(net: Odd, h: Tensor) -> Tensor:
    net.get_buffer("seen").add_(1)
    return net.second(h + net.get_buffer("seen"))


def normalises_in_train(net: Odd, h: Tensor) -> Tensor:
    net.norm.train()
    return net.second(net.norm(h))


LOOPED: dict[str, Callable[[Odd, Tensor], Any]] = {
    "branches": branches,
    "reads a number": lambda net, h: net.second(h * h.abs().max().item()),
    "leaves torch": lambda net, h: net.second(h + torch.from_numpy(h.detach().numpy()).sum()),
    "writes into a buffer": writes,
    "counts its calls": counts,
    "counts them in a buffer": counts_in_a_buffer,
    "dropout of its own": lambda net, h: net.second(functional.dropout(h, 0.5, training=True)),
    "draws noise": lambda net, h: net.second(h + torch.randn_like(h)),
    "draws it from Python": lambda net, h: net.second(h * random.random()),
    "a function of its own": lambda net, h: net.second(Doubled.apply(h)),
    "batch norm in train": normalises_in_train,
    "a higher-order operator": lambda net, h: net.second(torch.cond(h.sum() > 0, torch.tanh, torch.sigmoid, (h,))),
}
VECTORISED: dict[str, Callable[[Odd, Tensor], Any]] = {
    "an object": lambda net, h: Output(net.second(h)),
    "a mapping": lambda net, h: {"logits": net.second(h)},
    "keeps an activation": lambda net, h: net.second(setattr(net, "kept", h) or h),
}


@pytest.mark.parametrize("what", [*LOOPED, *VECTORISED])
def test_what_cannot_be_vectorised_takes_a_pass_for_each_sample(what: str, recwarn: pytest.WarningsRecorder) -> None:
    problem = problem_of(lambda: Odd((LOOPED | VECTORISED)[what]))
    before = copy.deepcopy(problem.module.state_dict())
    thetas = weights(problem)

    def run(function: Callable[..., Tensor], *more: Any) -> Tensor:
        torch.manual_seed(3)
        random.seed(3)
        with torch.no_grad():
            return function(problem, X, thetas, *more)

    first, again = run(outputs_at, BUDGET), run(outputs_at, BUDGET)
    expected = run(one_by_one)
    assert (at_once(problem)[0] > 1) == (what in VECTORISED)
    if what == "draws it from Python":  # the state of Python's generator is the user's own
        assert first.shape == expected.shape
    else:
        torch.testing.assert_close(first, expected, rtol=1e-10, atol=1e-10)
    assert what == "draws it from Python" or torch.equal(first, again)
    assert not recwarn.list
    assert problem.module.calls == 0 and "kept" not in vars(problem.module)
    assert all(torch.equal(before[name], tensor) for name, tensor in problem.module.state_dict().items())


def test_inputs_that_are_mappings() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, inputs: Tensor, mask: Tensor) -> Mapping[str, Tensor]:
            return {"logits": self.net(inputs * mask)}

    problem = problem_of(Named)
    x = {"inputs": X, "mask": X > 0, "labels": torch.arange(6)}
    thetas = weights(problem)
    torch.testing.assert_close(outputs_at(problem, x, thetas, BUDGET), one_by_one(problem, x, thetas))
    assert at_once(problem)[0] > 1


def test_a_fault_of_the_network_is_told_as_it_is() -> None:
    def fails(net: Odd, h: Tensor) -> Tensor:
        raise KeyError("mine")

    problem = problem_of(lambda: Odd(fails))
    with pytest.raises(KeyError, match="mine"):
        outputs_at(problem, X, weights(problem), BUDGET)
    plain = problem_of(mlp)
    with pytest.raises(InvalidInputs, match="do not fit the network"):
        outputs_at(plain, X[:, :3], weights(plain), BUDGET)


def test_a_fault_that_comes_later_is_told_too() -> None:
    problem = problem_of(mlp)
    outputs_at(problem, X, weights(problem), BUDGET)

    def fails(*_: Any) -> None:
        raise KeyError("later")

    problem.module.register_forward_pre_hook(fails)
    with pytest.raises(KeyError, match="later"):
        outputs_at(problem, X, weights(problem), BUDGET)


def test_hooks_see_every_sample() -> None:
    problem, seen = problem_of(mlp), []
    problem.module.register_forward_hook(lambda module, args, output: seen.append(output.tolist()))
    outputs_at(problem, X, weights(problem), BUDGET)
    assert len(seen) == SAMPLES


def test_hooks_of_all_modules_see_every_sample() -> None:
    problem, seen = problem_of(mlp), []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.append(output.tolist()) if type(module) is type(problem.module) else None
    )
    with handle:
        outputs_at(problem, X, weights(problem), BUDGET)
    assert len(seen) == SAMPLES


# One decision, by shapes.


def test_a_decision_is_made_once_per_shape() -> None:
    problem, passes = problem_of(mlp), []
    plain = type(problem.module).forward

    class Counted(type(problem.module)):
        def forward(self, *args: Any) -> Any:
            passes.append(len(args[0]))
            return plain(self, *args)

    problem.module.__class__ = Counted
    thetas = weights(problem)
    outputs_at(problem, X, thetas, BUDGET)
    first = len(passes)
    outputs_at(problem, X, thetas, BUDGET)
    assert len(passes) == first + 1 and len(problem.samples_at_once) == 1
    outputs_at(problem, X[:5], thetas, BUDGET)
    assert len(problem.samples_at_once) == 2


def test_wide_outputs_and_few_samples_take_a_pass_for_each() -> None:
    problem = problem_of(mlp)
    outputs_at(problem, X, weights(problem, LEAST_SAMPLES - 1), BUDGET)
    assert not problem.samples_at_once
    outputs_at(problem, drawn(10_000, 4), weights(problem), BUDGET)
    assert at_once(problem) == [1]


@pytest.mark.parametrize("budget", [2**30, 30_000, 1])
def test_a_pass_stays_within_the_budget(budget: int) -> None:
    problem = problem_of(mlp)
    thetas = weights(problem)
    expected = one_by_one(problem, X, thetas)
    torch.testing.assert_close(outputs_at(problem, X, thetas, budget), expected, rtol=1e-10, atol=1e-10)
    per_sample = 8 * (2 * thetas.shape[1] + 6 * (5 + 5 + 3))
    assert at_once(problem) == [max(1, min(budget, at_weights.CHUNK_BYTES) // per_sample)]


@pytest.mark.parametrize("size", [2, 5, SAMPLES])
def test_chunks_make_no_difference(size: int) -> None:
    problem = problem_of(convolutions)
    x, thetas = drawn(6, 2, 8, 8), weights(problem)
    whole = vectorised(problem, x, thetas, 100)
    torch.testing.assert_close(vectorised(problem, x, thetas, size), whole, rtol=1e-12, atol=1e-12)


def test_smaller_chunks_where_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
        def run(stacked: dict[str, Tensor]) -> Tensor:
            if len(next(iter(stacked.values()))) > 4:
                raise RuntimeError("DefaultCPUAllocator: not enough memory")
            return vmap(function, **options)(stacked)

        return run

    problem = problem_of(mlp)
    thetas = weights(problem)
    expected = one_by_one(problem, X, thetas)
    monkeypatch.setattr(at_weights, "vmap", small)
    with pytest.warns(MemoryWarning, match="samples of the weights at once"):
        samples = outputs_at(problem, X, thetas, BUDGET)
    torch.testing.assert_close(samples, expected, rtol=1e-10, atol=1e-10)


def test_the_compiler_is_not_imported() -> None:
    code = """
import sys, torch
from torch import nn
from laplace import Laplace
torch.func.vmap(torch.neg)(torch.ones(2))
by_vmap = "torch._dynamo" in sys.modules  # of PyTorch 2.4
net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
la = Laplace(net, "classification", "all", "diag")
la.fit([(torch.randn(5, 2), torch.arange(5) % 2)])
la(torch.randn(5, 2), pred_type="nn", link_approx="mc", n_samples=20)
assert list(la.problem.samples_at_once.values())[0] > 1
assert by_vmap or "torch._dynamo" not in sys.modules
"""
    fresh.printed(code)
