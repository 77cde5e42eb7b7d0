"""What is injected: a network that fails at a forward pass of one's choice, memory that holds a few things at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from laplace.engines.native.autograd import BackwardPasses
from laplace.function_space import BaseFunctionalLaplace
from tests import grid
from tests.network.test_model_guard import differences, picture, prepared, seed


class Broken(RuntimeError):
    """What a user's network raises; a RuntimeError, as most errors of PyTorch are."""


class Fault:
    """Counts forward passes, and acts at one of them. The library puts a network's attributes back, not this."""

    def __init__(self) -> None:
        self.disarm()

    def disarm(self) -> None:
        self.passes, self.at, self.act = 0, -1, lambda f: f

    def arm(self, at: int, act: Callable[[Tensor], Tensor]) -> None:
        self.passes, self.at, self.act = 0, at, act

    def __call__(self, f: Tensor) -> Tensor:
        self.passes += 1
        return self.act(f) if self.passes - 1 == self.at else f


class Faulty(nn.Module):
    """Writes to buffers and attributes, draws random numbers, and then fails if its fault says so."""

    def __init__(self, fault: Fault, n_outputs: int = 3) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5))
        self.head = nn.Linear(4, n_outputs)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.h = self.trunk(x)
        torch.rand(1)
        self.head.seen = True
        return self.fault(self.head(self.h))


def raising(error: type[BaseException], *args: Any) -> Callable[[Tensor], Tensor]:
    def act(f: Tensor) -> Tensor:
        raise error(*args)

    return act


def nan(f: Tensor) -> Tensor:
    """NaN in the place of outputs whose graph stays what it is."""
    f.detach().fill_(torch.nan)
    return f


def model_with(fault: Fault) -> nn.Module:
    """In the middle of its use, as a user's network is."""
    return prepared(lambda: Faulty(fault))


def leaves(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in leaves(value)]
    return [leaf for value in state for leaf in leaves(value)] if isinstance(state, (list, tuple)) else [state]


def posterior_bits(la: Any) -> list[Any]:
    """All that decides what a posterior says: its state, evidence, and predictions of both kinds."""
    x = grid.data(seed=8)[0]
    found = [la.state_dict(), la.log_marginal_likelihood().detach(), la(x)]
    if not isinstance(la, BaseFunctionalLaplace) and (la.refinement is None or la.problem.head is not None):
        found.append(la(x, "nn", n_samples=3, generator=seed()))
    return leaves(found)


def same_bits(one: list[Any], other: list[Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b

    return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))


@contextmanager
def nothing_changes(model: nn.Module) -> Iterator[None]:
    """Fails unless a model is after the block what it was before, values and identities."""
    before = picture(model)
    yield
    torch.set_rng_state(before["random state"])  # numbers that a call drew before it failed
    assert not differences(before, picture(model))


@contextmanager
def memory_for(count: int) -> Iterator[None]:
    """Vectorised backward passes of more than `count` vectors run out of memory, as they do on a CPU."""
    vectorised = BackwardPasses.vectorised

    def little_vectorised(passes: BackwardPasses, *cotangents: Tensor) -> list[Tensor | None]:
        if len(cotangents[0]) > count:
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.")
        return vectorised(passes, *cotangents)

    with mock.patch.object(BackwardPasses, "vectorised", little_vectorised):
        yield


class Memory:
    """Holds the activations of so many data."""

    def __init__(self) -> None:
        self.most = self.unlimited = 10**9

    def take(self, x: Tensor) -> None:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    @contextmanager
    def of(self, most: int) -> Iterator[None]:
        self.most = most
        yield
        self.most = self.unlimited


class Large(nn.Module):
    """A network whose activations may be too large for more than a few data at once."""

    def __init__(self, net: nn.Module, memory: Memory) -> None:
        super().__init__()
        self.net, self.memory = net, memory

    def forward(self, x: Tensor) -> Tensor:
        self.memory.take(x)
        return self.net(x)
