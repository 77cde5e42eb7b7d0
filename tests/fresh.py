"""Scripts in processes that have imported PyTorch and nothing else: forks of one that did, which saves seconds."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Done:
    """How a script ended: `status` is 0 if it did well, and negative if a signal ended it."""

    status: int
    output: str
    errors: str


def run(*scripts: str, timeout: float = 240) -> list[Done]:
    """Runs scripts at the same time, each in a process of its own, for so many seconds at most."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps([scripts, folder, timeout]), file=server.stdin, flush=True)
        statuses: list[int] = json.loads(server.stdout.readline())
        read = [[Path(folder, f"{i}.{stream}").read_text("utf-8") for stream in (1, 2)] for i in range(len(scripts))]
    return [Done(status, *streams) for status, streams in zip(statuses, read, strict=True)]


def printed(script: str) -> list[str]:
    """Words that a script prints, in which warnings are errors, but for one of PyTorch 2.4 about pickles."""
    strict = "import warnings; warnings.simplefilter('error')\n"
    strict += "warnings.filterwarnings('ignore', category=FutureWarning, module='torch.storage')\n"
    (done,) = run(strict + script)
    assert not done.status, done.errors
    return done.output.split()


@cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.fresh"]
    server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)  # it ends with its input
    return server


def _serve() -> None:
    import torch  # noqa: F401

    for line in sys.stdin:
        scripts, folder, timeout = json.loads(line)
        children = [_start(script, f"{folder}/{i}") for i, script in enumerate(scripts)]
        print(json.dumps(_statuses(children, time.monotonic() + timeout)), flush=True)


def _start(script: str, path: str) -> int:
    child = os.fork()
    if child:
        return child
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(os.open(f"{path}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
    status = 1
    try:
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _statuses(children: Sequence[int], end: float) -> list[int]:
    found: dict[int, int] = {}
    while len(found) < len(children):
        for child in set(children) - set(found):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                found[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.01)
    return [found[child] for child in children]


if __name__ == "__main__":
    _serve()
