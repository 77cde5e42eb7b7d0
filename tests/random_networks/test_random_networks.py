"""A fixed set of seeds, and all that ever failed; `make test-all` and `make test-random` run more of them."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

from tests.random_networks.case import Case
from tests.random_networks.checks import CHECKS
from tests.random_networks.run import result, run, script

FAILED: dict[str, tuple[str, Case]] = {
    "a ReLU that is dead for the first batch": (
        "oracle",
        Case(0, ("closing", "tanh"), "linear", "classification", order="closed first", sizes=(2, 2, 2)),
    ),
    "the same, for data in another order": (
        "splits",
        Case(0, ("closing", "tanh"), "linear", "classification", order="closed first", sizes=(2, 2, 2)),
    ),
    "norms over one number in float32": (
        "oracle",
        Case(0, ("tanh", "layer norm of one", "twice"), structure="block", dtype="float32", sizes=(3, 2)),
    ),
    "experts that get no datum": (
        "splits",
        Case(0, ("routed", "tanh"), structure="kron", order="closed first", sizes=(1, 4)),
    ),
    "a layer that is called row by row": ("oracle", Case(0, ("row by row", "tanh"), sizes=(3, 1))),
    "a convolution and a table without a dimension for the data": (
        "oracle",
        Case(0, ("token by token", "tanh"), structure="kron", sizes=(3, 1)),
    ),
    "exports of a backend whose Jacobians are a package's": ("exported", Case(0, ("tanh",), backend="AsdlGGN")),
}
"""Cases that failed once, by what was wrong: the check, and a small case."""

NEAR: dict[str, tuple[str, Case]] = {
    "an adapter whose second factor is zero": ("oracle", Case(0, ("lora", "tanh"), structure="diag", sizes=(2, 2))),
    "a factor of zero that is a module's number": ("changes", Case(0, ("switched",), sizes=(2, 2))),
    "checkpoints around fixed weights": (
        "oracle",
        Case(0, ("linear", "checkpoint twice"), weights="subnetwork", frozen=0b0100, sizes=(2, 2)),
    ),
    "slopes without a rule, and as many data as outputs": ("oracle", Case(0, ("prelu, computed",), sizes=(2, 2))),
    "attention's key bias is forgotten": ("halves", Case(0, ("attention", "tanh"), structure="block", sizes=(2, 3))),
}
"""Small cases near faults that were found by other means."""

COUNT = int(os.environ.get("LAPLACE_TEST_SEEDS", "10"))
AT_ONCE = 10


@pytest.mark.parametrize("first", range(0, COUNT, AT_ONCE))
def test_seeds(first: int) -> None:
    found = run(range(first, min(first + AT_ONCE, COUNT)))
    print(found.report())
    assert not found.failures, "\n\n".join(
        f"# seed {seed} fails: {said}\n{script(name, case)}" for seed, name, case, said in found.failures
    )


@pytest.mark.parametrize("what", FAILED | NEAR)
def test_cases_that_failed_once(what: str) -> None:
    name, case = (FAILED | NEAR)[what]
    if case.backend == "AsdlGGN":
        pytest.importorskip("asdl")
    assert result(name, case) is None, script(name, case)


def test_a_script_stands_alone(tmp_path: Path) -> None:
    """It runs without this folder, and says what the check says."""
    case = Case(seed=1, layers=("closing", "attention"), structure="diag", sizes=(2, 1))
    for name in CHECKS:
        text = script(name, case)
        assert "random_networks" not in text
        (tmp_path / "script.py").write_text(text, "utf-8")
        runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")
