"""Every script in examples/ runs, in its small form, with warnings as errors."""

from __future__ import annotations

import runpy
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor, distributed

from tests import fresh

# A package that an example needs besides those of the tests.
NEEDS = {
    "botorch_regret": "botorch",
    "deployment": "onnxruntime",
    "lora": "peft",
    "saving": "safetensors",
}
ROOT = Path(__file__).parents[2]
SHARED = ROOT / "examples" / "pretrained_data.py"  # what scripts import
ELSEWHERE = {"several_processes"}  # which runs as `torchrun` would start it, below
LONGEST = {
    "bayesian_optimisation",
    "botorch_regret",
    "calibration",
    "deployment",
    "influence",
    "language_models",
    "lora",
    "noise_and_counts",
    "structures",
    "tuning",
    "why_calibrate",
    "with_trainer",
}
"""Examples that take more than a second."""
EXAMPLES = sorted(set((ROOT / "examples").glob("*.py")) - {SHARED})


@pytest.mark.timeout(150)
@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(
    "script",
    [pytest.param(path, marks=pytest.mark.nightly if path.stem in ELSEWHERE | LONGEST else ()) for path in EXAMPLES],
    ids=lambda path: path.stem,
)
def test_example_runs(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    if script.stem in NEEDS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the packages' own, on import
            pytest.importorskip(NEEDS[script.stem])
    plot = tmp_path / "plot.png"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(script.parent))  # as for a script that is run: what it shares lies beside it
    monkeypatch.setattr(sys, "argv", [str(script), "--small", "--output", str(plot)])
    runpy.run_path(str(script), run_name="__main__")
    assert plot.exists()
    assert capsys.readouterr().out


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "rounded",
    [lambda value: value, lambda value: 0 * value, lambda value: value.round(decimals=2), lambda value: -value],
    ids=["as it is", "constant", "rounded", "upside down"],
)
def test_the_search_for_the_mode_ends_whatever_the_potential_s_last_digits(rounded: Callable[[Tensor], Tensor]) -> None:
    """A potential that no step makes smaller ends it too."""
    script = runpy.run_path(str(ROOT / "examples" / "why_calibrate.py"))
    data, _ = script["load_data"]((3, 8), 0)
    potential = script["potential"]
    script["mode"].__globals__["potential"] = lambda *given: rounded(potential(*given))
    for delta in script["DELTAS"]:
        weights, hessian = script["mode"](data, delta)
        assert hessian.shape == (65, 65) and weights.isfinite().all()
        if rounded(potential(data, delta, weights)) == potential(data, delta, weights):
            assert script["gradient"](data, delta, weights).norm() < 1e-7


@pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without torch.distributed")
def test_example_runs_in_two_processes(tmp_path: Path) -> None:
    """As `torchrun` would start them."""
    example, plot = ROOT / "examples" / "several_processes.py", tmp_path / "plot.png"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    scripts = [
        f"""
import os, runpy, sys
os.environ |= {group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}}
sys.argv = {[str(example), "--small", "--output", str(plot)]}
sys.path.insert(0, {str(example.parent)!r})
runpy.run_path({str(example)!r}, run_name="__main__")
"""
        for rank in range(2)
    ]
    done = fresh.run(*scripts)
    assert not any(process.status for process in done), [process.errors for process in done]
    assert "2 processes, 601 data" in "".join(process.output for process in done) and plot.exists()
