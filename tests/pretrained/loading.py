"""How the tests load real networks and data: skipped where a package is missing, and compared before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from examples.pretrained_data import NotInstalled


def loaded(load: Callable[..., Any], *args: Any) -> Any:
    """What a function of `examples/pretrained_data.py` returns; the test is skipped where its package is missing."""
    try:
        return load(*args)
    except NotInstalled as missing:
        pytest.skip(str(missing))


@contextmanager
def lent(model: nn.Module) -> Iterator[None]:
    """Fails if a model, or the state of the random numbers, is not the same bits afterwards."""

    def bits() -> tuple[dict[str, Any], dict[str, Any], torch.Tensor]:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        ways = {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()}
        ways |= {name: module.training for name, module in model.named_modules()}
        return state, ways, torch.get_rng_state()

    state, ways, randomness = bits()
    yield
    after, ways_after, randomness_after = bits()
    assert all(torch.equal(value, after[name]) for name, value in state.items())
    assert ways == ways_after
    assert torch.equal(randomness, randomness_after)
