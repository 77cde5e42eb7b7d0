"""Quantities that are computed when they are first read, and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from laplace.network.model_guard import autograd_mode


class LazyQuantity(property):
    """A property that is computed when it is first read, whatever grad mode the reader is in, and kept.

    Its owner says by `create_graph` whether it can be differentiated. Before Python 3.12 `functools.cached_property`
    has one lock for all owners: predictions in several threads would wait for each other.
    """

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        super().__init__(compute)
        self.compute = compute
        self.name = compute.__name__

    def __get__(self, owner: Any, cls: type | None = None) -> Any:
        if owner is None:
            return self
        if self.name in owner.__dict__:
            return owner.__dict__[self.name]
        with autograd_mode(), torch.set_grad_enabled(owner.create_graph):
            # Of two threads that read one object at once the first has its result kept; both drew the same numbers.
            return owner.__dict__.setdefault(self.name, self.compute(owner))


lazy = LazyQuantity
