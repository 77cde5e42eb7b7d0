"""What both packages have found, beside the truth: what is equal, what differs and why, and what fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.parity.deviations import PROBES
from tests.parity.oracle import Truth, oracle
from tests.parity.truths import TRUTHS
from tests.parity.work import Posterior, posteriors
from tests.reference.compare import assert_close


@dataclass(frozen=True)
class Numbers:
    """What `measure.py` has saved: arrays, exceptions by name, and who has measured."""

    arrays: dict[str, np.ndarray]
    failures: dict[str, str]
    about: dict[str, Any]

    @classmethod
    def load(cls, path: Path) -> Numbers:
        """From a file."""
        with np.load(path) as saved:
            arrays = {name: saved[name] for name in saved.files}
        about = json.loads(str(arrays.pop("about")))
        return cls(arrays, about.pop("failures"), about)


@dataclass(frozen=True)
class Difference:
    """A reason why numbers differ on purpose.

    Attributes:
        what: What is asked for.
        applies: Whether a quantity of a posterior is one of these numbers.
        example: The one that the table shows.
        there: Truth that laplace-torch must have instead, where what it computes is known.
    """

    what: str
    applies: Callable[[Posterior, str], bool]
    example: str
    there: str | None = None


_CURVATURE_FREE = ("mean", "loss", "n_data", "log likelihood", "scatter", "prediction: mean")

DIFFERENCES = (
    Difference(
        "empirical Fisher, regression: evidence",
        lambda p, q: p.empirical and p.likelihood == "regression" and q not in _CURVATURE_FREE,
        "mlp/regression/all/full/CurvlinopsEF/evidence",
    ),
    Difference(
        "`CurvlinopsEF`, last layer, `diag`: log det P / P₀",
        lambda p, q: (
            (p.subset, p.structure, p.backend) == ("last_layer", "diag", "CurvlinopsEF") and q not in _CURVATURE_FREE
        ),
        "mlp/classification/last_layer/diag/CurvlinopsEF/log det ratio",
    ),
    Difference(
        "`kron`: derivative of the evidence by log σ",
        lambda p, q: p.structure == "kron" and q == "evidence gradient: σ",
        "mlp/regression/all/kron/default/evidence gradient: σ",
    ),
    Difference(
        "`BackPackGGN`, `kron`, convolutions (a convention of its own; this library has KFAC-expand): evidence",
        lambda p, q: (
            (p.model, p.subset, p.structure, p.backend) == ("lenet", "all", "kron", "BackPackGGN")
            and q not in _CURVATURE_FREE
        ),
        "lenet/classification/all/kron/BackPackGGN/evidence",
    ),
    Difference(
        "tuning by evidence where Adam goes too far (laplace-torch keeps the last δ, this library the best): δ",
        lambda p, q: q == "tuned δ",
        "mlp/classification/all/kron/default/tuned δ",
        there="tuned δ, last",
    ),
    Difference(
        "`gp` on all data, regression: evidence",
        lambda p, q: p.structure == "gp" and p.likelihood == "regression" and q == "evidence",
        "mlp/regression/all/gp/default/evidence",
    ),
    Difference(
        "`gp` on all data, regression, several outputs (exchanged in the kernel of test and training data): variance",
        lambda p, q: (
            (p.subset, p.structure, p.likelihood) == ("all", "gp", "regression")
            and q in ("output variance", "prediction: variance", "prediction: joint covariance")
        ),
        "mlp/regression/all/gp/default/prediction: variance",
    ),
    Difference(
        "`gp` on all data, classification: probability of a class (probit)",
        lambda p, q: p.structure == "gp" and p.likelihood == "classification",
        "mlp/classification/all/gp/default/probabilities: probit",
    ),
)


@dataclass
class Comparison:
    """What comes of the comparison.

    Attributes:
        equal: How many quantities are equal.
        differing: Keys of those that differ on purpose.
        failing: Posteriors that laplace-torch cannot fit, and its exception.
        faults: Sentences; empty if all is as it should be.
    """

    equal: int = 0
    differing: dict[Difference, list[str]] = field(default_factory=dict)
    failing: dict[Posterior, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def compare(theirs: Numbers, ours: Numbers, state: Path) -> Comparison:
    """Every number of ours with the truth, and every number of theirs with ours or with a reason."""
    found = Comparison(faults=[f"{key}: {error} here" for key, error in ours.failures.items()])
    for p in posteriors():
        if f"{p}/fit" in theirs.failures:
            found.failing[p] = theirs.failures[f"{p}/fit"]
        truths = oracle(p, state)
        for key in [key for key in ours.arrays if key.startswith(f"{p}/")]:
            _one(found, p, key, theirs, ours, truths)
    found.faults += [f"{d.what}: nothing differs any more" for d in DIFFERENCES if d not in found.differing]
    return found


def _one(found: Comparison, p: Posterior, key: str, theirs: Numbers, ours: Numbers, truths: Any) -> None:
    quantity = key.removeprefix(f"{p}/")
    truth = truths[quantity]() if truths is not None and quantity in truths else None
    if truth is not None and (said := _apart(ours.arrays[key], truth)):
        found.faults.append(f"here and in truth: {key}: {said}")
    reason = next((d for d in DIFFERENCES if d.applies(p, quantity)), None)
    if key not in theirs.arrays:
        if p not in found.failing and reason is None:
            found.faults.append(f"{key}: {theirs.failures.get(key)} there, without a reason")
        return
    want = truth if truth is not None else Truth(torch.from_numpy(ours.arrays[key]))
    said = _apart(theirs.arrays[key], want)
    if not said:
        found.equal += 1
    elif reason is not None and (reason.there is None or not _apart(theirs.arrays[key], truths[reason.there]())):
        found.differing.setdefault(reason, []).append(key)
    else:
        found.faults.append(f"here and there, without a reason: {key}: {said}")


def _apart(got: np.ndarray, truth: Truth) -> str:
    """How far a number is from the truth, or nothing if it is not."""
    kind = "algebra" if truth.standard_error is None else "mc"
    value = truth.value.detach()
    got = got.reshape(value.shape) if got.size == value.numel() else got
    try:
        assert_close(got, value, kind, standard_error=truth.standard_error)
    except AssertionError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Row:
    """A line of the table: what, and the number there, here and in truth."""

    what: str
    theirs: str
    ours: str
    truth: str

    def __str__(self) -> str:
        return f"| {self.what} | {self.theirs} | {self.ours} | {self.truth} |"


def rows(theirs: Numbers, ours: Numbers, state: Path) -> list[Row]:
    """The deliberate differences: an example of every reason, and every probe."""
    by_name = {str(p): p for p in posteriors()}
    table: list[Row] = []
    for difference in DIFFERENCES:
        name, _, quantity = difference.example.rpartition("/")
        truths = oracle(by_name[name], state)
        value = truths[quantity]().value if truths is not None else torch.nan
        cells = [_first(n.arrays[difference.example]) for n in (theirs, ours)]
        table.append(Row(difference.what, *[_shown(cell) for cell in cells], _shown(_first(value))))
    for probe in PROBES:
        cells = [_cell(numbers, f"probe/{probe.key}", probe.digits) for numbers in (theirs, ours)]
        table.append(Row(probe.name, *cells, _shown(_first(TRUTHS[probe.key](state)), probe.digits)))
    return table


def _cell(numbers: Numbers, key: str, digits: int) -> str:
    return _shown(_first(numbers.arrays[key]), digits) if key in numbers.arrays else numbers.failures[key]


def _first(value: Any) -> float:
    return torch.as_tensor(value).detach().flatten()[0].item()


def _shown(value: float, digits: int = 6) -> str:
    """Five significant digits of a number that means something to so many decimals."""
    return f"{round(value, digits) + 0.0:.5g}"
