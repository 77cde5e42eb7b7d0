"""Registries that forget at the end of a block what was registered in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from laplace.core.registry import Registry


@contextmanager
def temporarily(*registries: Registry[Any]) -> Iterator[None]:
    """Forgets at the end of a block what is registered in it."""
    former = [dict(registry._entries) for registry in registries]
    try:
        yield
    finally:
        for registry, entries in zip(registries, former, strict=True):
            registry._entries = entries
