"""A network that fails at any forward pass of any call: nothing has changed, and the error says what happened."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import ELLA, FunctionalLaplace, MixtureLaplace, VaLLA
from laplace.errors import ApproximationWarning, InvalidData, LaplaceError, TuningWarning
from tests import grid
from tests.network.test_model_guard import seed
from tests.pairs import ALL
from tests.robustness.faults import (
    Broken,
    Fault,
    model_with,
    nan,
    nothing_changes,
    posterior_bits,
    raising,
    same_bits,
)

X = grid.data(seed=8)[0]
BATCHES = grid.batches()
VALIDATION: dict[str, Any] = {"val_loader": grid.batches(seed=4), "n_samples": 3}


@pytest.fixture(autouse=True)
def whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits run whole batches twice, not two data: one that fails there is tried again on the whole batch."""
    monkeypatch.setattr("laplace.network.watch.ROWS", len(X))


def quietly(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        for category in (TuningWarning, ApproximationWarning):
            warnings.simplefilter("ignore", category)
        return call()


def read(la: Any, *args: Any) -> Any:
    prediction = la.predict(X, *args, n_samples=3, generator=seed())
    return prediction.probabilities, prediction.decomposition


# Whatever runs the network.
CALLS: dict[str, Callable[[Any], Any]] = {
    "fit": lambda la: la.fit(BATCHES),
    "fit more": lambda la: la.fit(BATCHES, override=False),
    "fit, faded": lambda la: la.fit(BATCHES, override=False, decay=0.5),
    "fit of a subset": lambda la: la.fit(BATCHES, subset=7, generator=seed()),
    "forget": lambda la: la.forget(BATCHES[:1]),
    "plan": lambda la: la.plan(BATCHES),
    "glm": lambda la: la(X),
    "joint": lambda la: la(X, link_approx="mc", joint=True, generator=seed()),
    "nn": lambda la: la(X, "nn", n_samples=3, generator=seed()),
    "nn samples": lambda la: la.functional_samples(X, "nn", n_samples=3, generator=seed()),
    "predict": lambda la: read(la),
    "predict nn": lambda la: read(la, "nn"),
    "variances": lambda la: la.functional_variance_fast(X),
    "grid": lambda la: la.optimize_prior_precision(method="gridsearch", grid_size=3, **VALIDATION),
    "nn grid": lambda la: la.optimize_prior_precision("nn", "gridsearch", grid_size=3, **VALIDATION),
    "descent": lambda la: la.optimize_hyperparameters(
        ("prior_precision", "temperature"), "nll", "lbfgs", n_steps=2, **VALIDATION
    ),
    "foreign inputs": lambda la: la.optimize_hyperparameters(
        objective="nll", ood_loader=[(X, X)], grid={"prior_precision": [0.5, 1.0, 2.0]}, **VALIDATION
    ),
    "refine": lambda la: la.refine(BATCHES, max_steps=2),
    "refine, variational": lambda la: la.refine(BATCHES, method="variational", max_steps=1),
}
POSTERIORS: dict[str, Callable[[nn.Module], Any]] = {
    f"{weights}-{structure}": lambda model, w=weights, s=structure: grid.make(w, s, model=model, prior_precision=2.0)
    for weights, structure in grid.CELLS
} | {
    "gp": lambda model: FunctionalLaplace(model, "classification", 7, prior_precision=2.0),
    "ella": lambda model: ELLA(model, "classification", 7, 4, prior_precision=2.0),
}
# Every call with one posterior or another, and the fit of every posterior.
ROWS = [f"{weights}-{structure}" for weights, structure in grid.DIAGONAL]
TABLE = [(ROWS[i % 3], call) for i, call in enumerate(CALLS) if "variational" not in call]
TABLE += [("last_layer-diag", "refine, variational")]  # a full or a diagonal covariance
TABLE += [(name, "fit") for name in POSTERIORS if name != ROWS[0]]
TABLE += [("gp", "glm"), ("gp", "grid"), ("ella", "glm"), ("all-lowrank_kron", "fit more")]


class Injected:
    """A fitted posterior whose network can fail, and what a call of it does if the network does not.

    Attributes:
        fault: Of the network.
        passes: How often the call runs the network.
        before: The posterior's bits.
        after: Those after a call without a fault.
    """

    def __init__(self, name: str, call: str) -> None:
        self.fault, self.twin_fault = Fault(), Fault()
        self.model = model_with(self.fault)
        self.la, twin = POSTERIORS[name](self.model), POSTERIORS[name](model_with(self.twin_fault))
        self.la.fit(BATCHES)
        twin.fit(BATCHES)
        self.before = posterior_bits(self.la)
        assert same_bits(self.before, posterior_bits(twin))
        self.twin_fault.disarm()
        quietly(lambda: CALLS[call](twin))
        self.passes, self.after = self.twin_fault.passes, posterior_bits(twin)

    @property
    def places(self) -> list[int]:
        """The first and the last pass; where all is tested also the middle one."""
        return sorted({0, self.passes - 1, *([self.passes // 2] if ALL else [])})


@pytest.mark.filterwarnings("ignore::laplace.errors.DataWarning")  # data that count twice
@pytest.mark.parametrize(("name", "call"), TABLE, ids=str)
@pytest.mark.turns
def test_a_failing_pass_changes_nothing(name: str, call: str) -> None:
    injected = Injected(name, call)
    assert injected.passes > 0
    for number, at in enumerate(injected.places):
        error = (Broken, KeyboardInterrupt)[(number + len(name)) % 2]
        with nothing_changes(injected.model):
            injected.fault.arm(at, raising(error, f"pass {at} failed"))
            with pytest.raises(error, match=f"pass {at} failed"):
                quietly(lambda: CALLS[call](injected.la))
            injected.fault.disarm()
        assert same_bits(injected.before, posterior_bits(injected.la)), at
    if call not in ("plan", "nn grid"):  # of which one reads no numbers, the other drops the candidate
        nan_is_refused(injected, call)


def nan_is_refused(injected: Injected, call: str) -> None:
    """In a pass whose outputs are read; of one whose outputs are not, nothing is seen."""
    for at in injected.places:
        with nothing_changes(injected.model):
            injected.fault.arm(at, nan)
            try:
                quietly(lambda: CALLS[call](injected.la))
                refused = False
            except LaplaceError as error:
                refused = "NaN" in str(error)
            injected.fault.disarm()
        expected = injected.before if refused else injected.after
        assert same_bits(expected, posterior_bits(injected.la)), at
        assert refused or at > 0 or injected.la.structure.name == "gp"  # whose first pass a fit only looks at
        if not refused:
            break


# Data.


def poisoned(k: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of which number k holds one NaN."""
    batches = [(x.clone(), y) for x, y in BATCHES]
    batches[k][0][1, 2] = torch.nan
    return batches


READERS: dict[str, Callable[[Any, list[Any]], Any]] = {
    "fit": lambda la, batches: la.fit(batches),
    "fit more": lambda la, batches: la.fit(batches, override=False),
    "fit of a subset": lambda la, batches: la.fit(batches, subset=11, generator=seed()),
    "forget": lambda la, batches: la.forget(batches),
    "grid": lambda la, batches: la.optimize_prior_precision(method="gridsearch", grid_size=3, val_loader=batches),
    "refine": lambda la, batches: la.refine(batches, max_steps=2),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("weights", "structure"), grid.DIAGONAL)
def test_nan_in_one_batch(weights: str, structure: str, reader: str) -> None:
    """The batch is named."""
    fault = Fault()
    model = model_with(fault)
    la = grid.make(weights, structure, model=model)
    la.fit(BATCHES)
    before = posterior_bits(la)
    for k in range(3):
        with nothing_changes(model), pytest.raises(InvalidData, match=rf"(?s)batch {k}\b.*(NaN|finite)"):
            quietly(partial(READERS[reader], la, poisoned(k)))
        assert same_bits(before, posterior_bits(la))


class Changing:
    """A loader whose readings are what a list says, the last one for all that follow."""

    def __init__(self, *readings: list[Any]) -> None:
        self.readings, self.read = readings, 0

    def __iter__(self) -> Iterator[Any]:
        self.read += 1  # by a generator, so that an iterator that is not read does not count
        yield from self.readings[min(self.read, len(self.readings)) - 1]


@pytest.mark.parametrize("second", [BATCHES[:2], BATCHES + BATCHES[:1], []], ids=["fewer", "more", "none"])
@pytest.mark.parametrize("structure", grid.REREAD)
def test_a_loader_that_changes_its_length(structure: str, second: list[Any]) -> None:
    model = model_with(Fault())
    la = grid.make("all", structure, model=model)
    la.fit(BATCHES)
    before = posterior_bits(la)
    seen = sum(len(y) for _, y in second)
    message = rf"reading 2 of the loader gave {seen} data.*first one 12.*'{structure}'.*same data" if second else (
        rf"reading 2 of the loader gave no data.*'{structure}'.*list of batches"
    )  # fmt: skip
    for override in (True, False):
        with nothing_changes(model), pytest.raises(InvalidData, match=message):
            la.fit(Changing(BATCHES, second), override=override)
        assert same_bits(before, posterior_bits(la))
    resplit = grid.batches(size=4)
    la.fit(Changing(BATCHES, resplit))  # the same data in other batches
    assert la.n_data == 12


# Several networks, and training.


@pytest.mark.parametrize("call", ["fit", "glm", "nn", "grid"])
def test_a_mixture_whose_second_network_fails(call: str) -> None:
    fault = Fault()
    models = [grid.network(), model_with(fault)]
    mixture = MixtureLaplace(models, "classification", "all", "kron", weights="evidence")
    mixture.fit(BATCHES)

    def bits() -> list[Any]:
        return [bit for la in mixture.components for bit in posterior_bits(la)] + [mixture(X), mixture.weights]

    before = bits()
    fault.disarm()
    quietly(lambda: CALLS[call](mixture))
    passes = fault.passes
    mixture.prior_precision = 1.0
    mixture.fit(BATCHES)
    assert same_bits(before, bits())
    for at in sorted({0, passes // 2, passes - 1}):
        for error in (Broken, KeyboardInterrupt):
            with nothing_changes(models[0]), nothing_changes(models[1]):
                fault.arm(at, raising(error, "now"))
                with pytest.raises(error, match="now"):
                    quietly(lambda: CALLS[call](mixture))
                fault.disarm()
            assert same_bits(before, bits()), (at, error)


def test_a_variational_posterior_whose_training_is_interrupted() -> None:
    fault = Fault()
    model = model_with(fault)
    la = VaLLA(model, "classification", X[:4].clone())
    options: dict[str, Any] = {"iterations": 3}
    la.fit(BATCHES, **options)
    before = posterior_bits(la)
    fault.disarm()
    twin = VaLLA(model, "classification", X[:4].clone())
    twin.fit(BATCHES, **options)
    passes = fault.passes
    for at in sorted({0, passes // 2, passes - 1}):
        with nothing_changes(model):
            fault.arm(at, raising(KeyboardInterrupt, "now"))
            with pytest.raises(KeyboardInterrupt, match="now"):
                la.fit(BATCHES, **options)
            fault.disarm()
        assert same_bits(before, posterior_bits(la)), at
