"""Nested values in one file: they come back exactly, and a write or read that fails harms nothing."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("safetensors")


import laplace
from laplace.core import nested
from laplace.errors import (
    InvalidArgument,
    InvalidType,
    StateError,
)
from tests import grid
from tests.test_state import assert_same


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "posterior.safetensors"


@pytest.mark.parametrize("fault", ["serialising", "replacing", "synchronising"])
def test_a_failed_write_leaves_the_former_file(fault: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    la = grid.fitted("all", "kron")
    la.save(path)
    former = path.read_bytes()

    def fail(*args: Any, **options: Any) -> None:
        raise OSError("disk full")

    place = {
        "serialising": "safetensors.torch.save",
        "replacing": "pathlib.Path.replace",
        "synchronising": "os.fsync",
    }
    la.prior_precision = 3.0
    with monkeypatch.context() as patched, pytest.raises(OSError, match="disk full"):
        patched.setattr(place[fault], fail)
        la.save(path)
    assert path.read_bytes() == former and os.listdir(path.parent) == [path.name]
    la.save(str(path))
    assert laplace.load(str(path), grid.network()).prior_precision.item() == 3
    with pytest.raises(FileNotFoundError):
        la.save(path.parent / "missing" / "file")


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_a_file_keeps_its_mode_and_a_link_its_target(path: Path) -> None:
    la, link = grid.fitted("all", "diag"), path.with_name("link")
    former = os.umask(0o027)
    try:
        la.save(path)
    finally:
        os.umask(former)
    assert path.stat().st_mode & 0o777 == 0o640
    path.chmod(0o664)
    link.symlink_to(path)
    la.prior_precision = 3.0
    la.save(link)
    assert path.stat().st_mode & 0o777 == 0o664 and link.is_symlink()
    assert laplace.load(path, grid.network()).prior_precision.item() == 3


@pytest.mark.skipif(os.name != "posix", reason="pipes and devices")
def test_what_is_no_file_is_refused(path: Path) -> None:
    """And not replaced by one; nor waited for."""
    la, pipe = grid.fitted("all", "diag"), path.with_name("pipe")
    os.mkfifo(pipe)
    for place in (pipe, path.parent, Path("/dev/null")):
        with pytest.raises(InvalidArgument, match=f"'{place}' is a"):
            la.save(place)
    for place in (pipe, Path("/dev/zero")):
        with pytest.raises(InvalidArgument, match="is a pipe, a device"):
            laplace.load(place, la.weights.model)
    for wrong in (3, None):
        for act in (lambda place: la.save(place), lambda place: laplace.load(place, la.weights.model)):
            with pytest.raises(InvalidType, match="give the path of a file"):
                act(wrong)
            with pytest.raises(InvalidArgument, match="NUL"):
                act("a\0b")


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="files without a name")
def test_a_process_that_is_killed_leaves_the_former_file_alone(path: Path) -> None:
    la = grid.fitted("all", "full")
    la.save(path)
    for _ in range(5):
        child = os.fork()
        if child == 0:
            while True:
                la.save(path)
        time.sleep(0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert len(os.listdir(path.parent)) == 1
        assert_same(la, laplace.load(path, grid.network()))


def test_a_file_that_is_cut_off_while_it_is_read_ends_no_process(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is mapped into memory ends it; bytes that were read stay."""
    la, read, cut = grid.fitted("all", "kron"), Path.read_bytes, list[Path]()
    la.save(path)

    def then_cut(self: Path) -> bytes:
        whole = read(self)
        os.truncate(self, 100)
        cut.append(self)
        return whole

    monkeypatch.setattr(Path, "read_bytes", then_cut)
    assert_same(la, laplace.load(path, grid.network()))
    assert cut == [path]
    with pytest.raises(StateError, match="no posterior that could be loaded"):
        laplace.load(path, grid.network())


SHARED = torch.arange(24.0).reshape(4, 6)


VALUES: dict[str, Any] = {
    "plain": {"a": [1, -0.0, 1e-320, True, None, "ü\n\udc80", 2**70], "b": (), "": {}, "$": 1},
    "numbers": [math.inf, -math.inf, complex(1, -0.0), complex(math.inf, 2), 0.1 + 0.2],
    "keys": {1: "one", None: 2, 4.5: 3, "x": {(1, 2): [()]}},
    "nested": {"a": [{"b": ({"c": [torch.ones(2)]},)}], "a.0.b": torch.zeros(1), "a.0": [torch.zeros(2)]},
    "shared": [SHARED, SHARED, SHARED[1:3], SHARED.T, SHARED[:, ::2], SHARED.reshape(2, 2, 6).permute(2, 0, 1)],
    "expanded": [torch.ones(1).expand(5), torch.ones(3, 1).expand(3, 4).T, torch.empty(0, 3).T, torch.tensor(2.0)],
    "complex": [torch.complex(SHARED, -SHARED), torch.complex(SHARED, SHARED).to(torch.complex128).T.conj()],
    "dtypes": [torch.ones(3).to(d) for d in (torch.bool, torch.int8, torch.float16, torch.bfloat16, torch.uint8)],
}


def assert_equal(value: Any, other: Any) -> None:
    assert type(value) is type(other)
    if isinstance(value, Tensor):
        assert value.dtype == other.dtype and torch.equal(value, other)
    elif isinstance(value, dict):
        assert list(value) == list(other) and [*map(type, value)] == [*map(type, other)]
        for mine, theirs in zip(value.values(), other.values(), strict=True):
            assert_equal(mine, theirs)
    elif isinstance(value, list | tuple):
        assert len(value) == len(other)
        for mine, theirs in zip(value, other, strict=True):
            assert_equal(mine, theirs)
    else:
        assert repr(value) == repr(other)


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_exactly(name: str, path: Path) -> None:
    nested.write(path, VALUES[name])
    assert_equal(VALUES[name], nested.read(path))


def test_the_order_in_memory_comes_back(path: Path) -> None:
    """Sums of products depend on it, to the bit."""
    tensors = [SHARED.T, SHARED.reshape(2, 2, 6).permute(2, 0, 1)]
    nested.write(path, tensors)
    assert [tensor.stride() for tensor in nested.read(path)] == [tensor.stride() for tensor in tensors]


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.float32, {"a": [nn.Linear(1, 1)]}, lambda: None])
def test_other_values_are_refused(value: Any, path: Path) -> None:
    with pytest.raises(InvalidType, match="without a pickle"):
        nested.write(path, value)
    assert not path.exists()
