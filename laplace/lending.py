"""The user's model is lent, not given: whatever a call does, it finds the model as it left it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_LOCKS_GUARD = threading.Lock()


def _lock(model: nn.Module) -> threading.RLock:
    with _LOCKS_GUARD:
        return _LOCKS.setdefault(model, threading.RLock())


def unwrap(model: nn.Module) -> nn.Module:
    """The module behind `torch.compile`, on which hooks fire and torch.func works."""
    return getattr(model, "_orig_mod", model)


@contextmanager
def lent(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the length of a call, with flags and the global random state restored after it.

    Calls on one model are serialised by a lock, since hooks and substituted parameters live on the
    module while a forward pass runs.
    """
    with _lock(model):
        flags = [(module, module.training) for module in model.modules()]
        devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        try:
            with torch.random.fork_rng(devices=[d.index for d in devices]):
                for module, _ in flags:
                    module.training = False
                yield
        finally:
            for module, training in flags:
                module.training = training
