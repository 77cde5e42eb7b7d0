"""The suite comes to an end: a test that does not is stopped, and a worker that dies takes one test with it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CONFTEST = """
from tests.scheduling import ByFile
def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False
    return ByFile(config, log)
"""
FINE = "def test_1(): pass\ndef test_2(): pass\ndef test_3(): pass\n"
TURNS = "\ndef test_turns():\n    while True: pass\n"
DIES = "\ndef test_dies():\n    import os; os.kill(os.getpid(), 9)\n"
WAITS = """
def test_waits():  # holding the interpreter, where no signal is heard
    import ctypes
    lock, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    library.pthread_mutex_lock(lock); library.pthread_mutex_lock(lock)
"""
AFTER = "def test_after(): pass\n"


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="locks and signals of Linux")
def test_what_never_ends_is_stopped_and_all_else_runs(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    texts = {"conftest": CONFTEST, "test_1": FINE, "test_2": TURNS + AFTER, "test_3": FINE, "test_4": DIES + AFTER}
    texts |= {"test_5": FINE, "test_6": WAITS + AFTER, "test_7": FINE}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text, "utf-8")
    settings = [
        "-o",
        "timeout=0.5",
        "-o",
        "faulthandler_timeout=1",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:hypothesispytest",
        "-n",
        "1",
    ]
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), *settings, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert re.search(r"\b3 failed, 15 passed\b", done.stdout), done.stdout + done.stderr
    assert "Timeout (>0.5s)" in done.stdout
    # pytest repeats whole messages in its summary where the variable `CI` is set.
    assert set(re.findall(r"crashed while running .*test_(dies|waits)'", done.stdout)) == {"dies", "waits"}
    assert "in test_waits" in done.stderr  # the traceback of faulthandler
