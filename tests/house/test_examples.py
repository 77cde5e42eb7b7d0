"""Every script in examples/ runs, in its small form, with warnings as errors."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from torch import distributed

# A package that an example needs besides those of the tests.
NEEDS = {
    "botorch_regret": "botorch",
    "deployment": "onnxruntime",
    "language_models": "transformers",
    "lora": "peft",
    "saving": "safetensors",
    "with_accelerate": "accelerate",
    "with_lightning": "lightning",
    "with_scikit_learn": "mapie",
    "with_skorch": "skorch",
    "with_tensordict": "tensordict",
    "with_trainer": "transformers",
}
ROOT = Path(__file__).parents[2]
SHARED = ROOT / "examples" / "pretrained_data.py"  # what scripts import
EXAMPLES = sorted(set((ROOT / "examples").glob("*.py")) - {SHARED})


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
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


@pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without torch.distributed")
def test_example_runs_in_two_processes(tmp_path: Path) -> None:
    script, plot = ROOT / "examples" / "several_processes.py", tmp_path / "plot.png"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(script), "--small", "--output", str(plot)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as launched:
        try:
            output, errors = launched.communicate(timeout=240)
        finally:
            launched.terminate()  # it ends its processes then, which it could not if it were killed
    assert launched.returncode == 0, errors
    assert "2 processes, 601 data" in output and plot.exists()
