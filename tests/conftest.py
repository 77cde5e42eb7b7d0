"""Fixtures of all tests, and the line that counts tests skipped for want of an optional package."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

from tests.pairs import ALL, chosen

hypothesis.settings.register_profile("laplace", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("laplace")

gc.disable()  # until all tests are collected, see below

THREADS = int(os.environ.get("LAPLACE_TEST_THREADS", "1"))
"""Threads of PyTorch inside a test; `make test-portable` tries others."""

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
LONG = (
    "tests/extensions",
    "tests/fitting",
    "tests/large_fits",
    "tests/house",
    "tests/other_device",
    "tests/contract/test_dense_defaults",
)
"""What starts processes, compiles, or runs examples: first of all."""
_MISSING = re.compile(r"could not import '([\w.]+)'")


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts from one seed, one number of threads and float32, whatever ran before it."""
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` writes down the stack for every kind of device
    torch.set_num_threads(THREADS)
    yield
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    if dtype != torch.float32:
        pytest.fail(f"the test left {dtype} as default dtype")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that this machine has."""
    return torch.device(request.param)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of large products of parameters every pair of values is tried, not every combination, see `tests.pairs`."""
    if not ALL:
        kept = chosen(items)
        left = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in left])
        items[:] = kept
    if hasattr(config, "workerinput"):  # no worker is left with a long file at the end
        items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def pytest_collection_finish() -> None:
    """Tests and modules stay to the end: they are not looked through whenever garbage is collected."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests run in one process, see `tests.scheduling`."""
    if config.getvalue("dist") == "load":  # which is the default
        from tests.scheduling import ByFile

        config.option.loadscopereorder = False
        return ByFile(config, log)
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says which optional packages tests were skipped for, and what a run of several workers cost."""
    missing: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        found = _MISSING.search(str(report.longrepr))
        if found is not None:
            missing[found.group(1)] += 1
    if missing:
        packages = ", ".join(f"{name} ({count})" for name, count in sorted(missing.items()))
        terminalreporter.write_line(
            f"{missing.total()} skipped for want of an optional package: {packages}; "
            "the extras `backends` and `integrations`, and `make pretrained`, bring them.",
            yellow=True,
        )
    if config.pluginmanager.has_plugin("dsession"):  # whose workers have ended
        from tests.scheduling import BUDGET, processor_time

        allowed = "" if ALL else f"; `make test` has {BUDGET} s"
        terminalreporter.write_line(f"{processor_time():.0f} s of processor time over all workers{allowed}.")


@pytest.fixture
def fresh_accelerate() -> None:
    """Forgets what others in this process set up: accelerate knows one precision per process."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
