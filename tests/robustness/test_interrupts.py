"""Ctrl-C at every line that puts something back: network, switches of the process and random state are as before."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from laplace.network import model_guard
from tests.network.test_model_guard import Nasty, differences, picture, prepared

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
HERE = model_guard.__file__


def network(kind: str) -> Any:
    """A network that is copied, one that runs as it is, or one with attention, whose switch is the process's."""
    model: Any = prepared(Nasty)
    if kind == "run as it is":
        holder: Any = type("Holder", (), {})()  # an object that no copy looks into
        model.holder, holder.held = holder, model
    if kind == "attention":
        model.beside = nn.TransformerEncoderLayer(4, 1, 4)
    return model


def as_it_was(model: nn.Module) -> dict[str, Any]:
    return picture(model) | {
        "gradients": torch.is_grad_enabled(),
        "fused": torch.backends.mha.get_fastpath_enabled(),
        "open": len(model_guard._FUSED),
    }


def pass_through(model: nn.Module) -> None:
    with model_guard.same_random_state(model), model_guard.private_copy(model) as module:
        own: Any = module
        own(X)
        torch.rand(2)
        own.trunk[0].register_forward_hook(lambda module, args, output: None)
        own.trunk[0]._parameters["weight"] = torch.zeros(6, 3)


def training(model: nn.Module) -> None:
    with (
        model_guard.flags_put_back(model),
        model_guard.gradients_set_aside(model),
        model_guard.hooks_put_back(model),
        model_guard.switched_off(model_guard._FUSED, *SWITCH),
    ):
        model.eval()
        model.register_forward_hook(lambda module, args, output: None)


SWITCH = torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled


class Interrupt:
    """Raises at the n-th line that runs in the module under test, once.

    Args:
        at: n, from 0; what is counted in `lines` goes on.
    """

    def __init__(self, at: int) -> None:
        self.at, self.lines = at, 0

    def __call__(self, frame: types.FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename != HERE:
            return None
        if event == "line":
            self.lines += 1
            if self.lines - 1 == self.at:
                raise KeyboardInterrupt
        return self


def interrupted(call: Callable[[], None], at: int) -> bool:
    """True if a call has a line of this number, at which it was interrupted."""
    trace, before = Interrupt(at), sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def every_line(call: Callable[[], None]) -> Iterator[int]:
    at = 0
    while interrupted(call, at):
        yield at
        at += 1


@pytest.mark.parametrize("kind", ["copied", "run as it is", "attention"])
@pytest.mark.parametrize("call", [pass_through, training])
def test_ctrl_c_at_any_line_leaves_nothing(call: Callable[[nn.Module], None], kind: str) -> None:
    model = network(kind)
    call(model)
    before, at = as_it_was(model), -1
    for at in every_line(lambda: call(model)):
        assert not differences(before, as_it_was(model)), at
    other = threading.Thread(target=call, args=(network(kind),), daemon=True)
    other.start()
    other.join(timeout=20)
    assert not other.is_alive(), "a lock is held for ever"
    assert at > 20


def test_locks_are_free_after_ctrl_c() -> None:
    model = network("run as it is")
    pass_through(model)
    locks = model_guard._locks_of(model_guard.modules_of(model))
    for _ in every_line(lambda: pass_through(model)):
        assert not any(lock._is_owned() for lock in locks)  # pyright: ignore[reportAttributeAccessIssue]
    assert len(locks) > 3
