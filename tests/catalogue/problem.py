"""What a problem is, and how an entry of the catalogue becomes one."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Problem:
    """A network, its data and what is special about it.

    Attributes:
        name: Unique name.
        make_model: Returns a fresh network, always with the same float64 weights, in eval mode.
        x: Inputs of the whole batch: a tensor or a mapping of tensors.
        y: Targets.
        likelihood: Name of the likelihood.
        tags: Traits to select by, the likelihood among them.
        head: Name of the last Linear module, or None where there is no last layer to speak of.
    """

    name: str
    make_model: Callable[[], nn.Module]
    x: Any
    y: Tensor
    likelihood: str
    tags: frozenset[str]
    head: str | None = None

    def __str__(self) -> str:
        return self.name

    def batches(self, size: int | None = None) -> list[Any]:
        """The data as a loader would give it: pairs `(x, y)`, or mappings with the targets under `labels`."""
        size = size or len(self.y)
        parts = [slice(start, start + size) for start in range(0, len(self.y), size)]
        if isinstance(self.x, Tensor):
            return [(self.x[part], self.y[part]) for part in parts]
        return [{**{k: v[part] for k, v in self.x.items()}, "labels": self.y[part]} for part in parts]


PROBLEMS: dict[str, Problem] = {}


def _build(name: str, factory: Callable[[], nn.Module], spread: float) -> nn.Module:
    """A network with random, nowhere trivial weights and statistics; the global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(zlib.crc32(name.encode()))
        model = factory().double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=spread)
            for buffer_name, buffer in model.named_buffers():
                if buffer_name.endswith("running_mean"):
                    buffer.normal_(0.0, 0.4)
                elif buffer_name.endswith("running_var"):
                    buffer.uniform_(0.5, 1.5)
        return model


def _targets(likelihood: str, n_data: int, n_outputs: int, generator: torch.Generator) -> Tensor:
    if likelihood == "regression":
        return torch.randn(n_data, n_outputs, dtype=torch.float64, generator=generator)
    if likelihood == "bernoulli":
        return torch.randint(2, (n_data, n_outputs), generator=generator).double()
    if likelihood == "poisson":
        return torch.poisson(torch.full((n_data, n_outputs), 2.0, dtype=torch.float64), generator=generator)
    if likelihood in ("heteroscedastic", "mean_log_variance"):
        return torch.randn(n_data, n_outputs // 2, dtype=torch.float64, generator=generator)
    return torch.randint(n_outputs, (n_data,), generator=generator)


def add(
    name: str,
    factory: Callable[[], nn.Module],
    shape: tuple[int, ...] | dict[str, tuple[int, ...]],
    n_outputs: int,
    likelihood: str = "classification",
    tags: str = "",
    *,
    head: str | None = "head",
    n_data: int = 6,
    tokens: int | None = None,
    spread: float = 0.2,
    ignored: tuple[int, ...] = (),
    soft: bool = False,
) -> None:
    """Registers a problem with inputs `[n_data, *shape]` (indices below `tokens`, if given), and labels, maybe soft."""
    if name in PROBLEMS:
        raise ValueError(f"a problem called {name!r} exists already")
    generator = torch.Generator().manual_seed(zlib.crc32(b"data " + name.encode()))

    def draw(size: tuple[int, ...]) -> Tensor:
        if tokens is not None:
            return torch.randint(tokens, (n_data, *size), generator=generator)
        return torch.randn(n_data, *size, dtype=torch.float64, generator=generator)

    x = {key: draw(size) for key, size in shape.items()} if isinstance(shape, dict) else draw(shape)
    y = _targets(likelihood, n_data, n_outputs, generator)
    if soft:
        y = torch.randn(n_data, n_outputs, dtype=torch.float64, generator=generator).mul(2).softmax(1)
    if ignored:
        y[list(ignored)] = -100
    traits = {likelihood, *tags.split(), *(["single_output"] if n_outputs == 1 else [])}
    PROBLEMS[name] = Problem(name, partial(_build, name, factory, spread), x, y, likelihood, frozenset(traits), head)
