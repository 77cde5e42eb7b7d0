"""A second device gives the CPU's numbers, and is waited for no more often than it has to be."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from laplace.structures import STRUCTURES
from tests import fresh
from tests.other_device import cases, device

pytestmark = pytest.mark.skipif(not device.is_supported(), reason="this PyTorch lets no device be registered in Python")


@cache
def report() -> dict[str, Any]:
    """What a process found: a device that is registered stays, so that it is none of the tests' own."""
    (done,) = fresh.run("from tests.other_device.cases import main; main()", timeout=280)
    assert done.status == 0, done.errors
    return json.loads(done.output.splitlines()[-1])


def test_the_device_refuses_what_an_accelerator_refuses() -> None:
    found = report()["device"]
    assert not found["accepted"] and found["seen"] == {"to the device": 3, "to the host": 1, "_local_scalar_dense": 1}


def test_every_case_has_the_numbers_of_the_cpu() -> None:
    found = report()["numbers"]
    assert list(found) == list(cases.CASES)
    wrong = {name: error for name, error in found.items() if error}
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in wrong.items())


def bounds(name: str) -> dict[str, dict[str, int]]:
    """The largest counts that are expected, of three batches of a fit and of one prediction of each kind.

    The host waits once for all conditions on eight batches, and reads these in one copy: as often for five as for
    eight.
    """
    structure = name.rpartition(", ")[-1]
    # Moments of y are checked once more; of an uncertain noise it is asked twice where they say something, of counts
    # once whether the dtype holds them.
    likelihood = name.partition(", ")[0]
    asks_of_noise = likelihood in ("heteroscedastic", "mean_log_variance")
    of_moments = 3 if asks_of_noise else 2 * (likelihood == "poisson")
    of_samples = int(likelihood not in ("classification", "bernoulli"))
    readings = cases.READINGS[structure] if structure in cases.READINGS else 1
    assert readings == 1 or STRUCTURES[structure].n_passes > 1
    return {
        "fit": {},
        "fit to data of the host": {"to the device": 2 * 3 * readings},
        # Variances of this structure are computed anew where they cancel, which has to be asked.
        "glm": {"to the host": 2 if structure == "lowrank_kron" else 1, "_local_scalar_dense": of_moments},
        "nn": {"to the host": 1, "_local_scalar_dense": of_samples},
        # A step asks whether labels are ignored, then whether outputs and targets are right; an epoch for its losses.
        "training": {"_local_scalar_dense": 2 * 3, "to the host": 2 * 3 + 2},
    }


def test_reads_and_copies_are_few() -> None:
    found = report()["counts"]
    wrong = [
        f"{name}: {part}: {what}: {count} times, {bounds(name)[part].get(what, 0)} expected at most"
        for name, parts in found.items()
        for part, counted in parts.items()
        for what, count in counted.items()
        if count > bounds(name)[part].get(what, 0)
    ]
    assert len(found) == len(cases.COUNTED) + 1
    assert not wrong, "\n".join(wrong)


def test_steps_of_the_evidence_are_read_together() -> None:
    found = report()["tuning"]
    assert len(found) == 3
    assert all(counted == {} for counted in found.values()), found
