"""Every iteration ends within its bound, also where nothing that it does makes anything better."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import laplace
from laplace import Laplace
from laplace.core.hyperparameters import Hyperparameters
from laplace.core.memory import Unit, in_slices
from laplace.errors import ApproximationWarning, LaplaceWarning, OutOfMemory, TuningWarning
from laplace.extensions.valla_training import k_means
from laplace.large_structures import krylov
from laplace.predictive.prediction import quantile
from laplace.refinement import linear_model, refine
from laplace.tuning.search import Coordinates, Objective, Search, SearchOptions, minimise
from tests.grid import data, network

pytestmark = pytest.mark.timeout(60)

START = torch.zeros(3, dtype=torch.float64)
ULP = math.ulp(5.0)


def never_better() -> dict[str, Callable[[], Iterator[float]]]:
    """Courses of values that a search meets, from 5 on."""
    return {
        "constant": lambda: itertools.repeat(5.0),
        "its last digit goes to and fro": lambda: itertools.cycle((5.0, 5.0 + ULP)),
        "its last digit grows": lambda: (5.0 + n * ULP for n in itertools.count()),
        "worse and worse": lambda: (5.0 + n for n in itertools.count()),
        "to and fro": lambda: itertools.cycle((5.0, 6.0)),
    }


courses = pytest.mark.parametrize("course", never_better().values(), ids=list(never_better()))


@dataclass
class Potential:
    """A function whose gradient promises what its values never keep."""

    values: Iterator[float]
    n_values: int = 0
    n_products: int = 0

    def value(self, at: Tensor) -> float:
        self.n_values += 1
        return next(self.values)

    def gradient(self, at: Tensor) -> Tensor:
        return torch.full_like(at, 6.6e-9)

    def hessian_at(self, at: Tensor) -> Callable[[Tensor], Tensor]:
        def product(v: Tensor) -> Tensor:
            self.n_products += 1
            return v

        return product


@courses
@pytest.mark.parametrize("tolerance", [0.0, 1e-11])
def test_newton_steps_end(course: Callable[[], Iterator[float]], tolerance: float) -> None:
    potential = Potential(course())
    found = linear_model.minimise(potential, START, lambda v: v, tolerance=tolerance, max_steps=20)
    assert not found.converged
    assert potential.n_values <= 1 + 20 * 40 and potential.n_products <= 20 * (2 * len(START) + 10)


@courses
@pytest.mark.parametrize("method", ["adam", "lbfgs"])
@pytest.mark.parametrize("slope", [1.0, 6.6e-9])
def test_searches_by_gradients_end(course: Callable[[], Iterator[float]], method: str, slope: float) -> None:
    values = course()
    signs = itertools.cycle((1.0, -1.0))

    def evaluate(logs: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tensor(next(values), dtype=torch.float64), torch.full_like(logs, slope * next(signs))

    found = minimise(evaluate, START, SearchOptions(method, n_steps=30, tolerance=0.0))
    assert len(found.values) <= 4 * 30 + 26  # a line search that has begun goes on for 25 evaluations at most
    assert found.best_value == 5.0


def test_a_fixed_point_that_is_never_reached_ends() -> None:
    class Turning(Objective):
        def __init__(self) -> None:
            self.factors = itertools.cycle((2.0, 0.5))

        def fixed_point(self, delta: Tensor) -> tuple[float, Tensor]:
            return 1.0, torch.full_like(delta, next(self.factors), dtype=torch.float64)

    start = Hyperparameters(torch.ones(1), torch.zeros(1), torch.tensor(1.0), torch.tensor(1.0))
    found = Search(Turning(), Coordinates(("prior_precision",), start), SearchOptions("em", n_steps=17)).run()
    assert not found.converged and len(found.values) == 17


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": torch.zeros_like,
    "negative": lambda v: -v,
    "turned": lambda v: v.roll(1, -1) - v.roll(-1, -1),
    "random": lambda v: torch.randn_like(v),
    "not a number": lambda v: v * math.nan,
    "far beyond": lambda v: v * 1e300,
    "singular": lambda v: v * (torch.arange(v.shape[-1]) % 2),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("relative", [0.0, 1e-30])
def test_conjugate_gradients_end(name: str, relative: float) -> None:
    n_calls = 0

    def product(v: Tensor) -> Tensor:
        nonlocal n_calls
        n_calls += 1
        return OPERATORS[name](v)

    right = torch.randn(4, 30, dtype=torch.float64)
    found = krylov.solve(product, right, lambda v: v, relative=relative, max_iterations=50)
    assert found.n_iterations == n_calls <= 50 + 4  # and its residual, after each of at most three restarts


def fitted(likelihood: str = "classification", structure: str = "full", **options: Any) -> tuple[Any, list[Any]]:
    loader = [data(likelihood)]
    la = Laplace(network(likelihood), likelihood, "last_layer", structure, **options)
    la.fit(loader)
    return la, loader


@courses
def test_a_bound_that_never_rises_ends_the_refinement(
    course: Callable[[], Iterator[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    la, loader = fitted("bernoulli")
    values, known, n_states = course(), refine._at, 0

    def at(*arguments: Any) -> Any:
        nonlocal n_states
        n_states += 1
        return replace(known(*arguments), elbo=-next(values))

    monkeypatch.setattr(refine, "_at", at)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ApproximationWarning)  # one that stays the same has converged
        la.refine(loader, "variational", max_steps=6, tolerance=1e-300)
    assert n_states <= 7


def test_projections_that_get_nowhere_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from laplace.extensions import projected

    la, loader = fitted()
    n_sweeps = 0

    def swept(self: Any, w: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal n_sweeps
        n_sweeps += 1
        return w, w.new_ones(len(w))

    monkeypatch.setattr(projected._ScaledRows, "swept", swept)
    with pytest.warns(ApproximationWarning, match="max_sweeps"):
        laplace.projected(la, loader, 3, max_sweeps=11)
    assert n_sweeps == 11


@pytest.mark.parametrize("points", [torch.ones(50, 2), torch.arange(50.0).unsqueeze(1) % 2], ids=["one", "two"])
def test_clusters_of_equal_points_end(points: Tensor) -> None:
    assert k_means(points.double(), 7, torch.Generator().manual_seed(0)).shape == (7, points.shape[1])


def test_quantiles_between_modes_far_apart_end() -> None:
    means, variances = torch.tensor([[-1e30], [1e30]]), torch.full((2, 1), 1e-30)
    assert quantile(means, variances, torch.tensor([0.5, 0.5]), 0.5).isfinite().all()


def test_slices_that_no_memory_holds_end() -> None:
    attempts: list[int] = []

    def compute(part: slice) -> None:
        attempts.append(part.stop - part.start)
        raise MemoryError

    with pytest.warns(LaplaceWarning), pytest.raises(OutOfMemory):
        list(in_slices(100, 100, compute, Unit("datum", "data", "Use fewer.")))
    assert attempts == [100, 50, 25, 12, 6, 3, 1]


@pytest.mark.parametrize("method", ["marglik", "em"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_tuning_of_a_fit_without_an_optimum_ends(method: str, structure: str) -> None:
    """A network whose last weights are zero explains nothing by them: the evidence grows up to δ = ∞."""
    model, (x, y) = network("regression"), data("regression")
    with torch.no_grad():
        for weight in list(model.parameters())[-2:]:
            weight.zero_()
    la = Laplace(model, "regression", "last_layer", structure)
    la.fit([(x, y)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)
        la.optimize_prior_precision(method=method, n_steps=40)
    assert float(la.prior_precision.max()) <= 1.01e10
