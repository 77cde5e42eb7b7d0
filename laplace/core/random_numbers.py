"""Random numbers: drawn where the generator lives, then moved, so that equal seeds give equal numbers.

Seeds of our own are those of a generator of the host: every device then has the numbers of the CPU.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from laplace.core.precision_policy import wide_dtype
from laplace.errors import InvalidType

_AT_ONCE = 2**24
"""Numbers that are drawn at once where draws are read one after another."""

_ALIGNED = 16
"""Draws in all parts but the last are a multiple of this, and no fewer are left for the last: a processor's generator
then gives the numbers of a single call."""

_DRAWN_RATE = 1e15
"""Rate above which a count is its rate, to seven digits or more: PyTorch's integers end soon."""


def check_generator(generator: torch.Generator | None) -> None:
    """Checks a source of randomness."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InvalidType(f"generator must be a torch.Generator; {type(generator).__name__} was given.")


def replayed(generator: torch.Generator | None, device: torch.device) -> Callable[[], torch.Generator]:
    """Generators that all start where the given one is now, or, without one, where the global seed leads at first."""
    if generator is not None:
        state = generator.get_state()
        torch.randint(2, (1,), generator=generator, device=generator.device)  # the next prediction draws others

        def same() -> torch.Generator:
            copy = torch.Generator(device=generator.device)
            copy.set_state(state)
            return copy

        return same
    seeds: list[int] = []

    def seeded() -> torch.Generator:
        if not seeds:
            seeds.append(drawn_seed())
        return torch.Generator(device=device).manual_seed(seeds[0])

    return seeded


def standard_normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Independent N(0, 1) numbers of a shape, on the device and in the dtype of `like`.

    One call draws all numbers: whoever works in chunks draws first and splits afterwards, so that the
    result does not depend on the chunk.
    """
    device = like.device if generator is None else generator.device
    return torch.randn(shape, generator=generator, device=device, dtype=like.dtype).to(like.device)


def standard_normal_parts(
    n: int, shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None = None
) -> Iterator[Tensor]:
    """Independent N(0, 1) numbers `[n, *shape]` in consecutive parts of n, whose sizes follow from the shape alone."""
    most = _AT_ONCE // max(1, math.prod(shape))
    at_once = most // _ALIGNED * _ALIGNED or max(1, most)
    start = 0
    while start < n:
        rest = n - start
        size = at_once if rest >= at_once + _ALIGNED else rest
        yield standard_normal((size, *shape), like, generator)
        start += size


def seeded(method: Callable[..., Any], generator: torch.Generator | None) -> Callable[..., Any]:
    """A user's method with a source of randomness: as an argument if it takes one, else as the global seed."""
    if generator is None:
        return method
    known = inspect.signature(method).parameters.values()
    if any(p.name == "generator" or p.kind is p.VAR_KEYWORD for p in known):
        return partial(method, generator=generator)

    def with_seed(*args: Any, **options: Any) -> Any:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(drawn_seed(generator))
            return method(*args, **options)

    return with_seed


def drawn_seed(generator: torch.Generator | None = None) -> int:
    """A seed from a source of randomness, which it advances; None is the global one."""
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**62, (1,), generator=generator, device=device))


def another(generator: torch.Generator | None) -> torch.Generator | None:
    """A generator of numbers other than those that this one gives, which it advances; None for the global one."""
    if generator is None:
        return None
    return torch.Generator(device=generator.device).manual_seed(drawn_seed(generator))


@contextmanager
def global_numbers(generator: torch.Generator | None) -> Iterator[None]:
    """Global random numbers that follow a source of randomness, for code that takes none; the global state is kept."""
    if generator is None:
        yield
        return
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), _DrawnOn(generator.device):
        torch.manual_seed(drawn_seed(generator))
        yield


class _DrawnOn(TorchDispatchMode):
    """Draws on one device whatever is drawn of tensors of others, as distributions do on that of their parameters."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation."""
        kwargs = kwargs or {}
        like = next((x for x in args if isinstance(x, Tensor)), None)
        if like is None or like.device == self.device or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        drawn = func(*tree_map_only(Tensor, lambda tensor: tensor.to(self.device), args), **kwargs)
        return like.copy_(drawn) if func._schema.is_mutable else drawn.to(like.device)


def poisson(rates: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Counts with these rates, in their shape and dtype; infinite ones have the largest number of it."""
    device = rates.device if generator is None else generator.device
    drawn = torch.poisson(rates.clamp(max=_DRAWN_RATE).to(device), generator=generator).to(rates.device)
    return torch.where(rates > _DRAWN_RATE, rates.clamp(max=torch.finfo(rates.dtype).max), drawn)


def uniform(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Independent uniform numbers in [0, 1), float64 (fine enough for rare classes), on the device of `like`."""
    device = like.device if generator is None else generator.device
    return torch.rand(shape, generator=generator, device=device, dtype=wide_dtype(device)).to(
        like.device, wide_dtype(like.device)
    )
