"""A structure of three things: what follows from its matrix and at what cost; the library's own need none of it."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import FullLaplace, ParametricLaplace
from laplace.contract import dense_defaults as module
from laplace.errors import CurvatureError, SlowWarning, UnsupportedError
from laplace.structures import STRUCTURES, Curvature, CurvatureFromDense, DenseDefaults, PrecisionFromDense
from laplace.structures.base import DataPass
from tests import grid
from tests.reference.compare import assert_close

ROOT = Path(__file__).parents[2]
quiet = pytest.mark.filterwarnings("ignore::laplace.errors.SlowWarning")


@dataclass(frozen=True)
class PlainCurvature(CurvatureFromDense):
    """The whole matrix, of which nothing is said but that."""

    matrix: Tensor
    name = "plain"

    @classmethod
    def from_batch(cls, engine: Any, x: Any, y: Tensor) -> tuple[Any, PlainCurvature]:
        summary, matrix = engine.full(x, y)
        return summary, cls(matrix)

    def __add__(self, other: PlainCurvature) -> PlainCurvature:
        return replace(self, matrix=self.matrix + other.matrix)

    def to_dense(self) -> Tensor:
        return self.matrix.clone()


class PlainLaplace(ParametricLaplace):
    """All weights, that structure."""

    structure = PlainCurvature


@dataclass(frozen=True)
class RootCurvature(PlainCurvature):
    """The same as a square root, which adds up in another way than its matrix."""

    name = "root"

    @classmethod
    def from_batch(cls, engine: Any, x: Any, y: Tensor) -> tuple[Any, RootCurvature]:
        summary, matrix = engine.full(x, y)
        values, vectors = torch.linalg.eigh(matrix)
        return summary, cls((vectors * values.clamp(min=0).sqrt().unsqueeze(1)).mT)

    def __add__(self, other: PlainCurvature) -> RootCurvature:
        return RootCurvature(torch.cat([self.matrix, other.matrix], 1))

    def to_dense(self) -> Tensor:
        return self.matrix.mT @ self.matrix


class RootLaplace(PlainLaplace):
    """All weights, that structure."""

    structure = RootCurvature


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> set[type[Curvature]]:
    """Structures of which a warning was given: none so far."""
    structures: set[type[Curvature]] = set()
    monkeypatch.setattr(module, "_warned", structures)
    return structures


def data() -> tuple[Tensor, Tensor]:
    x, y = grid.data("classification")
    return x.double(), y


def fitted(kind: type[ParametricLaplace], **options: Any) -> ParametricLaplace:
    la = kind(grid.network().double().eval(), "classification", **options)
    x, y = data()
    la.fit([(x[:7], y[:7]), (x[7:], y[7:])])
    return la


# What it is.


@quiet
@pytest.mark.parametrize("kind", [PlainLaplace, RootLaplace])
def test_it_is_the_full_posterior(kind: type[ParametricLaplace]) -> None:
    la, full = fitted(kind, prior_precision=0.3), fitted(FullLaplace, prior_precision=0.3)
    x, _ = data()
    pairs = {
        "evidence": (la.log_marginal_likelihood(), full.log_marginal_likelihood()),
        "prediction": (la(x), full(x)),
        "joint": (la.predict(x, joint=True).latent_variance, full.predict(x, joint=True).latent_variance),
        "covariance": (la.posterior_covariance, full.posterior_covariance),
        "scale": (la.posterior_scale, full.posterior_scale),
        "precision": (la.posterior_precision, full.posterior_precision),
        "density": (la.log_prob(la.mean + 1), full.log_prob(full.mean + 1)),
    }
    for label, (mine, theirs) in pairs.items():
        assert_close(mine, theirs, "backend", label=label)
    draws = [p.sample(4, generator=torch.Generator().manual_seed(0)) for p in (la, full)]
    assert_close(draws[0], draws[1], "backend", label="samples")
    la.optimize_prior_precision(method="gridsearch", val_loader=[data()], grid_size=5)
    full.optimize_prior_precision(method="gridsearch", val_loader=[data()], grid_size=5)
    assert_close(la.prior_precision, full.prior_precision, "backend", label="grid")


@quiet
def test_data_fade_and_are_removed_where_fields_are_sums() -> None:
    la, full = fitted(PlainLaplace), fitted(FullLaplace)
    x, y = data()
    for posterior in (la, full):
        posterior.fit([(x[:3], y[:3])], override=False, decay=0.5)
        posterior.forget([(x[:3], y[:3])])
    assert_close(la.log_marginal_likelihood(), full.log_marginal_likelihood(), "backend")
    with pytest.raises(CurvatureError, match="removed data"):
        la.forget([(x[:3] * 9, y[:3])])


@pytest.mark.filterwarnings("ignore::laplace.errors.DataWarning")  # data that count twice
@quiet
def test_fields_that_are_no_sums_are_refused_by_name() -> None:
    la = fitted(RootLaplace)
    x, y = data()
    with pytest.raises(UnsupportedError, match=r"'root' has no scaled .* Write scaled of RootCurvature"):
        la.fit([(x, y)], override=False, decay=0.5)
    with pytest.raises(UnsupportedError, match=r"'root' has no minus"):
        la.forget([(x[:7], y[:7])])


@quiet
def test_it_is_saved_and_moved_by_its_fields() -> None:
    la = fitted(RootLaplace)
    other = RootLaplace(la.model, "classification")
    other.load_state_dict(la.state_dict())
    assert torch.equal(other.H.matrix, la.H.matrix)
    assert la.state_dict()["H"].keys() == {"matrix"}
    assert la.to(dtype=torch.float32).H.matrix.dtype == torch.float32


@quiet
def test_a_structure_of_several_readings() -> None:
    """`DenseDefaults` alone: how the data are read is the structure's own affair."""

    class Twice(DataPass):
        def __init__(self, engine: Any, number: int) -> None:
            self.engine, self.number, self.total = engine, number, None

        def add(self, x: Any, y: Tensor) -> Any:
            summary, matrix = self.engine.full(x, y)
            self.total = matrix if self.total is None else self.total + matrix
            return summary

        def finish(self) -> Any:
            assert self.total is not None
            return ReadTwice(self.total) if self.number == 2 else Twice(self.engine, 2)

    @dataclass(frozen=True)
    class ReadTwice(DenseDefaults):
        matrix: Tensor
        name = "twice"
        n_passes = 2

        @classmethod
        def first_pass(cls, engine: Any, options: Any) -> DataPass:
            return Twice(engine, 1)

        def __add__(self, other: ReadTwice) -> ReadTwice:
            return ReadTwice(self.matrix + other.matrix)

        def to_dense(self) -> Tensor:
            return self.matrix.clone()

    class TwiceLaplace(ParametricLaplace):
        structure = ReadTwice

    la, full = fitted(TwiceLaplace), fitted(FullLaplace)
    assert_close(la.log_marginal_likelihood(), full.log_marginal_likelihood(), "backend")


def test_what_is_missing_is_refused_when_the_class_is_used() -> None:
    class Incomplete(CurvatureFromDense):
        name = "incomplete"

    with pytest.raises(TypeError, match="to_dense"):
        Incomplete()  # pyright: ignore


# What it costs.


def test_it_is_said_once_that_it_is_slow(told: set[type[Curvature]]) -> None:
    la = fitted(PlainLaplace)
    with pytest.warns(SlowWarning, match=r"'plain' has no variance .* 38 × 38 .* PrecisionFromDense") as caught:
        la(data()[0])
    assert len(caught) == 1
    la.sample(2)
    fitted(PlainLaplace).log_marginal_likelihood()
    assert told == {PlainCurvature}


def test_above_the_memory_budget_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEMORY_BUDGET", 48 * 37**2)
    la = fitted(PlainLaplace)
    queries: dict[str, Callable[[], Any]] = {
        "logdet_ratio": la.log_marginal_likelihood,
        "variance": lambda: la(data()[0]),
        "power": lambda: la.sample(3),
        "scaled": lambda: la.fit([data()], override=False, decay=0.5),
        "minus": lambda: la.forget([data()]),
    }
    queries_of_power = (
        lambda: la.square_norm(la.mean),
        lambda: la.posterior_variance,
        lambda: la.posterior_scale,
        lambda: la.posterior_precision,
    )
    for method, query in [*queries.items(), *(("power", query) for query in queries_of_power)]:
        with pytest.raises(UnsupportedError, match=rf"'plain' has no {method} .*memory budget.* Write {method} in "):
            query()


def test_what_is_overridden_needs_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    class Faster(PrecisionFromDense):
        def quad(self, vectors: Tensor) -> Tensor:
            matrix = torch.tensordot(self.weights, self.curvature.matrix, 1)  # pyright: ignore
            return ((vectors @ matrix) * vectors).sum(-1) + vectors.square() @ self.prior.diagonal()

    class FasterCurvature(PlainCurvature):
        def precision(self, weights: Tensor, prior: Any, **options: Any) -> Faster:
            return Faster(self, weights, prior, options)

    class FasterLaplace(PlainLaplace):
        structure = FasterCurvature

    monkeypatch.setattr(module, "MEMORY_BUDGET", 0)
    la, full = fitted(FasterLaplace), fitted(FullLaplace)
    assert_close(la.square_norm(la.mean + 1), full.square_norm(la.mean + 1), "backend")
    with pytest.raises(UnsupportedError, match="Write power in Faster"):
        la.sample(1)


@quiet
def test_it_is_planned_for_and_no_fit_is_refused_by_it() -> None:
    la = fitted(PlainLaplace)
    plan = la.plan([data()])
    assert plan.chosen.structure == "plain" and plan.kept_bytes == 8 * 38**2
    model = nn.Linear(60_000, 2)  # of which a matrix would take 115 GB

    @dataclass(frozen=True)
    class Nothing(PlainCurvature):
        @classmethod
        def from_batch(cls, engine: Any, x: Any, y: Tensor) -> tuple[Any, PlainCurvature]:
            summary, diagonal = engine.diag(x, y)
            return summary, cls(diagonal)

    class NothingLaplace(PlainLaplace):
        structure = Nothing

    wide = NothingLaplace(model, "classification")
    wide.fit([(torch.randn(2, 60_000), torch.tensor([0, 1]))])
    assert wide.is_fitted


# The library's own structures.


def own_structures() -> Iterator[type[Curvature]]:
    """Every structure in the library, those over functions included."""
    for found in pkgutil.walk_packages(laplace.__path__, "laplace."):
        if not found.name.startswith("laplace.integrations."):  # which need their packages, and have no structures
            importlib.import_module(found.name)
    pending = [Curvature]
    while pending:
        for structure in pending.pop().__subclasses__():
            pending.append(structure)
            if structure.__module__.startswith("laplace.") and structure.__module__ != module.__name__:
                yield structure


def test_no_structure_of_the_library_derives_from_the_defaults() -> None:
    structures = set(own_structures())
    assert structures >= set(dict(STRUCTURES.items()).values()) and len(structures) > len(STRUCTURES)
    assert not [structure for structure in structures if issubclass(structure, DenseDefaults)]


TOUR: dict[str, Callable[[ParametricLaplace], Any]] = {
    "evidence": lambda la: la.log_marginal_likelihood(),
    "densities": lambda la: (la.log_prob(la.mean), la.log_det_posterior_precision),
    "predictions": lambda la: la(grid.data()[0]),
    "joint predictions": lambda la: la(grid.data()[0], joint=True),
    "sampled predictions": lambda la: la(grid.data()[0], "nn", n_samples=2),
    "moments": lambda la: (la.posterior_variance, la.posterior_covariance, la.posterior_scale, la.posterior_precision),
    "a grid": lambda la: la.optimize_prior_precision(method="gridsearch", val_loader=grid.batches(), grid_size=3),
    "tuning": lambda la: la.optimize_prior_precision(n_steps=3),
    "losses of validation": lambda la: la.optimize_hyperparameters(
        objective="nll", method="adam", val_loader=grid.batches(), n_steps=2
    ),
    "further data": lambda la: la.fit(grid.batches(), override=False, decay=0.9),
    "a plan": lambda la: la.plan(grid.batches()),
    "a state": lambda la: la.load_state_dict(la.state_dict()),
    "a move": lambda la: la.to(dtype=torch.float64),
    "the curvature": lambda la: (la.H, repr(la)),
}


@pytest.mark.filterwarnings("ignore::laplace.errors.TuningWarning")
@pytest.mark.parametrize("structure", STRUCTURES)
def test_no_public_call_of_them_reaches_a_matrix_by_default(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise AssertionError(f"a dense default was reached: {args}")

    monkeypatch.setattr(DenseDefaults, "require_dense", refused)
    for call in TOUR.values():
        call(grid.fitted("all", structure))


# The documented example goes through all that the registry's structures do.


@pytest.mark.nightly
def test_the_documented_structure_passes_the_conformance_suite() -> None:
    """In a process of its own, whose registry has it; with all weights, a last layer and subnetworks."""
    suites = [f"tests/{name}" for name in ("test_state.py", "posterior/test_forgetting.py")]
    suites += [f"tests/{name}" for name in ("conformance", "tuning", "training", "test_tunable.py")]
    options = ["-q", "-p", "no:cacheprovider", "-n", "0", "-p", "tests.conformance.tridiagonal"]
    # That of decay compares with a table of truths, which has those of the library's structures.
    chosen = ["-k", "tridiagonal and not decay_weighs", "-W", "ignore::laplace.errors.SlowWarning"]
    command = [sys.executable, "-m", "pytest", *options, *chosen, *suites]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    passed = int(done.stdout.rsplit(" passed", 1)[0].rsplit(maxsplit=1)[-1])
    assert passed > 700, done.stdout[-300:]


def test_the_documented_structure_is_short() -> None:
    page = (ROOT / "docs" / "add_a_structure.md").read_text("utf-8")
    example = page.split("```python\n")[1].split("```")[0]
    assert len(example.strip().splitlines()) <= 40
