"""Ours beside laplace-torch and beside the truth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity import work
from tests.parity.deviations import PROBES, Probe
from tests.parity.run import PAGE, interpreter, side_by_side, written
from tests.parity.truths import TRUTHS
from tests.reference.compare import assert_close

# Means over samples: the standard errors of their estimates, from above.
_SAMPLED = {"correlation": 20_000**-0.5}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parity") / "state.pt"
    work.save(path)
    return path


# Packages whose curvature a probe asks for.
_NEEDS = {"sampled_curvature": "curvlinops", "one_by_one": "asdl", "tokens": "asdl", "reflection": "backpack"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.key)
def test_what_differs_is_right_here(probe: Probe, state: Path) -> None:
    if probe.key in _NEEDS:
        pytest.importorskip(_NEEDS[probe.key])
    torch.set_default_dtype(torch.float64)
    try:
        actual = torch.as_tensor(probe.measure(state)).flatten()
    finally:
        torch.set_default_dtype(torch.float32)
    truth = torch.as_tensor(TRUTHS[probe.key](state)).flatten()
    error = _SAMPLED.get(probe.key)
    kind = "mc" if error else "algebra"
    assert_close(actual, truth, kind, standard_error=error, label=probe.name)


def test_every_probe_has_a_truth() -> None:
    assert [probe.key for probe in PROBES] == list(TRUTHS)


def test_side_by_side(tmp_path: Path) -> None:
    python = interpreter()
    if python is None:
        pytest.skip("LAPLACE_TORCH names no Python that has laplace-torch; `make parity` makes one")
    found, section = side_by_side(python, tmp_path)
    assert not found.faults, "\n".join(found.faults)
    text = PAGE.read_text("utf-8")
    assert written(text, section) == text, "docs/differences.md is not what was found: run `make parity`"
