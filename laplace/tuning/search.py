"""One search for every objective of hyper-parameters: `Search(objective, coordinates, options).run()`.

By gradients (Adam, L-BFGS) it climbs in logarithms and keeps the best value seen; by a fixed point it repeats the
equation that the best prior precision solves; on a grid it takes the best of all combinations of some values.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from torch import Tensor
from tqdm.auto import tqdm

from laplace.core.arguments import as_tensor, check_counts, check_length, on_host, positive
from laplace.core.cached import cached_property
from laplace.core.hyperparameters import Hyperparameters
from laplace.core.layout import Layout
from laplace.core.pieces import operations_are_dear
from laplace.core.precision_policy import wide_dtype, widened
from laplace.enums import PriorStructure
from laplace.errors import InvalidArgument, TuningWarning, UnsupportedError, warn
from laplace.network.model_guard import autograd_mode
from laplace.posterior.noise import unlike_outputs

if TYPE_CHECKING:
    from laplace.tuning.group import PosteriorGroup

Tuned = Literal["prior_precision", "sigma_noise", "temperature"]
"""What can be tuned."""

NAMES: tuple[Tuned, ...] = get_args(Tuned)
"""The same, in order."""


@dataclass(frozen=True, eq=False)
class TuningResult:
    """Result of `optimize_hyperparameters`: the values that were assigned, and the course of the search.

    Attributes:
        prior_precision: Prior precision δ, `[1]`, `[n_tensors]` or `[P]`.
        sigma_noise: Observation noise σ, 0-dim or `[C]`.
        temperature: Temperature T, 0-dim.
        value: The objective at these values: the log evidence (higher is better) or the loss (lower is better).
        values: The objective at every step, `[n]`, or at every point of the grid, in its shape; float64.
        grid: Values of each tuned hyper-parameter, `[n]` each, in the order of the dimensions of `values`; empty
            without a grid.
        converged: Whether the search converged; True for a grid.
        notes: Remarks, e.g. that the objective is flat, or that the best value is on an edge of the grid.
    """

    prior_precision: Tensor
    sigma_noise: Tensor
    temperature: Tensor
    value: float
    values: Tensor = field(repr=False)
    grid: dict[str, Tensor] = field(repr=False)
    converged: bool
    notes: tuple[str, ...]

    def noting(self, note: str) -> TuningResult:
        """A copy with one more note, before the others."""
        return replace(self, notes=(note, *self.notes))

    def values_of(self, names: Sequence[str] = NAMES) -> dict[str, Tensor]:
        """The hyper-parameters as a dictionary, by name."""
        return {name: getattr(self, name) for name in names}


def report(result: TuningResult) -> None:
    """Issues the notes of a result as one `TuningWarning`."""
    if result.notes:
        what = "grid search" if result.grid else "tuning"
        warn(f"{what}: {'; '.join(result.notes)}.", TuningWarning)


@dataclass(frozen=True)
class SearchOptions:
    """How a search goes on, checked.

    One by gradients ends where no entry of the gradient exceeds the tolerance times max(1, |value|); without a
    tolerance it makes all steps.
    """

    method: str  # "adam", "lbfgs" (with a strong Wolfe line search), "em" (a fixed point) or "grid"
    n_steps: int = 100  # of Adam, iterations of L-BFGS, or the largest number of fixed-point steps
    lr: float = 0.1  # step size of Adam on logarithms
    tolerance: float | None = None
    label: str = "tuning"
    progress_bar: bool = False

    def __post_init__(self) -> None:
        if self.method == "grid":
            return
        check_counts(n_steps=self.n_steps)
        if self.method == "em":
            return
        if not 0 < self.lr < math.inf:
            raise InvalidArgument(f"lr={self.lr}; it must be positive and finite.")
        if self.tolerance is not None and not 0 <= self.tolerance < math.inf:
            raise InvalidArgument(f"tolerance={self.tolerance}; it must be at least 0 and finite.")
        if self.method not in _METHODS:
            raise InvalidArgument(f"method={self.method!r}; accepted are {[*_METHODS, 'grid']}.")


class Objective(ABC):
    """What a search improves: the evidence, or a loss on validation data. Each supports some of the methods."""

    sign: ClassVar[int] = 1
    """−1 where large values are good."""

    group: PosteriorGroup

    def gradient(self, coordinates: Coordinates, logs: Tensor) -> tuple[Tensor, Tensor]:
        """The objective, 0-dim without a graph, and its gradient `[n]` at logarithms `[n]`."""
        raise UnsupportedError(f"{type(self).__name__} has no gradient; use method='grid'.")

    def fixed_point(self, delta: Tensor) -> tuple[float, Tensor]:
        """The objective at a prior precision δ, and the factor of the next one, float64."""
        raise UnsupportedError(f"{type(self).__name__} has no fixed point; use another method.")

    def losses(self, grid: GridSearch) -> tuple[Tensor, Callable[[], Tensor]]:
        """The losses of all settings, float64, `[n]`, and the networks' own ones at every noise of the grid."""
        raise UnsupportedError(f"{type(self).__name__} has no losses on a grid; use another method.")

    def remarks(self, result: TuningResult, names: Sequence[str]) -> Iterable[str | None]:
        """What users should know of a result of tuning these hyper-parameters."""
        if "sigma_noise" in names:
            for posterior in self.group.posteriors:
                yield unlike_outputs(posterior, result.sigma_noise)


@dataclass(frozen=True, eq=False)
class Search:
    """A search, by one of the methods; the posteriors are not changed."""

    objective: Objective
    coordinates: Coordinates | GridSearch
    options: SearchOptions

    def run(self) -> TuningResult:
        """The best hyper-parameters; an error where the objective is finite nowhere."""
        if isinstance(self.coordinates, GridSearch):
            result, names = self._on_grid(self.coordinates), tuple(self.coordinates.axes)
        else:
            result = (self._fixed_point if self.options.method == "em" else self._by_gradient)(self.coordinates)
            names = self.coordinates.names
        remarks = dict.fromkeys(self.objective.remarks(result, names))
        return replace(result, notes=(*result.notes, *(remark for remark in remarks if remark)))

    def _by_gradient(self, coordinates: Coordinates) -> TuningResult:
        objective, sign = self.objective, self.objective.sign
        course = minimise(lambda logs: objective.gradient(coordinates, logs), coordinates.vector(), self.options, sign)
        with torch.no_grad():
            best = coordinates.hypers(course.best)
        values = torch.tensor([sign * value for value in course.values], dtype=wide_dtype())
        notes = (*_notes_of_course(course, coordinates.names), *course.shortfall(self.options))
        return _result(best, sign * course.best_value, values, course.converged, notes)

    def _fixed_point(self, coordinates: Coordinates) -> TuningResult:
        n_steps, delta = self.options.n_steps, coordinates.start.prior_precision
        values: list[float] = []
        converged = False
        show = self.options.progress_bar
        with autograd_mode(), torch.enable_grad(), tqdm(total=n_steps, desc="em", disable=not show) as bar:
            for _ in range(n_steps):
                bar.update()
                value, factor = self.objective.fixed_point(delta)
                values.append(value)
                former = delta
                delta = (widened(delta) * factor).log().clamp(-BOUND, BOUND).exp().to(delta.dtype)
                converged = bool(((widened(delta) / widened(former)).log().abs() <= _FIXED_POINT_TOLERANCE).all())
                if converged:
                    break
        notes = [] if converged else [f"the prior precision still moved after {n_steps} steps; raise n_steps"]
        if bool((widened(delta).log().abs() >= BOUND - 1e-3).any()):
            notes.append(
                "a prior precision is at the bound of the search, 1e-10 or 1e10: it may have no finite optimum"
            )
        best = replace(coordinates.start, prior_precision=delta)
        return _result(best, values[-1], torch.tensor(values, dtype=wide_dtype()), converged, notes)

    def _on_grid(self, grid: GridSearch) -> TuningResult:
        values, of_network = self.objective.losses(grid)
        place = _smallest(values)
        values = values.view(grid.shape)
        notes = _notes_of_grid(values, place, grid, of_network)
        best = grid.settings[place]
        if "prior_precision" in grid.axes:
            best = replace(best, prior_precision=best.prior_precision.expand_as(grid.prior).clone())
        best = replace(best, sigma_noise=best.sigma_noise.clone(), temperature=best.temperature.clone())
        return _result(best, values.flatten()[place].item(), values, True, notes, grid.axes)


def _result(
    best: Hyperparameters,
    value: float,
    values: Tensor,
    converged: bool,
    notes: Iterable[str],
    axes: dict[str, Tensor] | None = None,
) -> TuningResult:
    hypers = best.prior_precision, best.sigma_noise, best.temperature
    return TuningResult(*hypers, value, values, axes or {}, converged, tuple(notes))


# ----------------------------------------------------------------------------------------------------------------------
# Coordinates: hyper-parameters as logarithms
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coordinates:
    """The logarithms of the tuned hyper-parameters as one vector."""

    names: tuple[str, ...]  # which are tuned, out of `NAMES`
    start: Hyperparameters  # values to begin with; those that are not tuned keep them

    @classmethod
    def around(cls, group: PosteriorGroup, names: tuple[str, ...], structure: str | None) -> Coordinates:
        """Coordinates that start at the present values, a tuned prior precision in the structure that is asked for."""
        now = group.hypers(names)
        prior = _restructured(now.prior_precision, structure, group.layout)
        return cls(names, replace(now, prior_precision=prior) if "prior_precision" in names else now)

    def vector(self) -> Tensor:
        """Logarithms of the start, `[n]`, float64."""
        return widened(torch.cat([getattr(self.start, name).reshape(-1) for name in self.names])).log()

    def hypers(self, logs: Tensor) -> Hyperparameters:
        """The hyper-parameters at a vector of logarithms `[n]`, with its graph."""
        return self.from_numbers(logs.exp().to(self.start.dtype))

    def from_numbers(self, numbers: Tensor) -> Hyperparameters:
        """The hyper-parameters of which these are the numbers, `[n]`."""
        shapes = [getattr(self.start, name).shape for name in self.names]
        parts = (numbers,) if len(shapes) == 1 else numbers.split([shape.numel() for shape in shapes])
        values = {name: part.view(shape) for name, shape, part in zip(self.names, shapes, parts, strict=True)}
        return replace(self.start, **values)


def checked_names(tune: str | Sequence[str], *, has_noise: bool, by_evidence: bool) -> tuple[str, ...]:
    """The names of what is tuned, in the order of `NAMES`."""
    names = (tune,) if isinstance(tune, str) else tuple(str(name) for name in tune)
    unknown = [name for name in names if name not in NAMES]
    if not names or unknown:
        raise InvalidArgument(f"tune={tune!r}; give one or more of {list(NAMES)}.")
    if "sigma_noise" in names and not has_noise:
        raise InvalidArgument("tune holds 'sigma_noise', but the likelihood has no observation noise; leave it out.")
    if "temperature" in names and by_evidence:
        # d/dT of −loss/T − ½ log det(H/T + δ) is loss/T² + ½ tr((H/T + δ)⁻¹ H)/T² ≥ 0 (the GGN, losses ≥ 0).
        raise InvalidArgument(
            "tune holds 'temperature', but the evidence never falls in it: p(y | f)^(1/T) is no normalised density, "
            "and T = ∞ explains all data. Tune the temperature on validation data, by objective='nll' for example."
        )
    return tuple(name for name in NAMES if name in names)


def prior_in_structure(
    init: float | Tensor, structure: str, layout: Layout, like: Tensor, name: str = "init_prior_prec"
) -> Tensor:
    """A prior precision in the asked structure: a vector keeps its own, a scalar is repeated.

    `name` is that of the caller's argument, for messages.
    """
    lengths = _lengths(structure, layout)
    value = as_tensor(name, init, like=like)
    positive(name, on_host(init, value))
    value = value.detach().reshape(-1)
    if value.numel() == 1:
        return value.repeat(lengths[structure])
    check_length(name, value, lengths)
    return value


def _restructured(prior: Tensor, structure: str | None, layout: Layout) -> Tensor:
    """A prior precision in another structure: repeated where it gets longer, else the geometric mean of what it was."""
    if structure is None:
        return prior
    length = _lengths(structure, layout)[structure]
    if prior.numel() == length:
        return prior
    if length == layout.n_params and prior.numel() == layout.n_tensors:
        return layout.repeat_per_tensor(prior)
    if length == layout.n_tensors and prior.numel() == layout.n_params:
        return torch.stack([part.log().mean().exp() for part in layout.split(prior)])
    return prior.log().mean().exp().repeat(length)


def _lengths(structure: str, layout: Layout) -> dict[str, int]:
    """Number of precisions in every structure."""
    lengths = {
        str(PriorStructure.SCALAR): 1,
        str(PriorStructure.LAYERWISE): layout.n_tensors,
        str(PriorStructure.DIAG): layout.n_params,
    }
    if structure not in lengths:
        raise InvalidArgument(f"prior_structure={structure!r}; accepted are {list(lengths)}.")
    return lengths


# ----------------------------------------------------------------------------------------------------------------------
# By gradients: Adam or L-BFGS on logarithms, and the best value seen
# ----------------------------------------------------------------------------------------------------------------------

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps a vector of logarithms `[n]` to a value, 0-dim, and its gradient `[n]`."""

BOUND = 23.0
"""Largest |log| that a search reaches from a start within it: 1e-10 to 1e10."""

_FIXED_POINT_TOLERANCE = 1e-3
"""Change of log δ at which a fixed point has converged."""

_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-8
"""Constants of Adam: the two decays, and what keeps the step finite."""

_FUSED = frozenset({"cpu", "cuda"})
"""Types of devices on which a step is one operation in every release that is accepted."""

_AT_ONCE = 128
"""Steps of Adam whose values are read together, where none of them decides about the next: every reading of a number
waits for the device."""

_HELD = 2**24
"""Numbers of the gradients that are held until then."""


@dataclass(frozen=True)
class _Point:
    """What was computed at logarithms `[n]` within the bound."""

    logs: Tensor
    value: Tensor  # 0-dim
    gradient: Tensor  # `[n]`


def _read(points: Sequence[_Point]) -> list[tuple[float, float]]:
    """The value and the largest slope of every point (NaN where an entry of its gradient is), in one transfer."""
    if not points:
        return []
    slopes = torch.stack([point.gradient for point in points]).abs().amax(1)
    values = torch.stack([point.value for point in points])
    return list(zip(*torch.stack([widened(values), widened(slopes)]).tolist(), strict=True))


@dataclass
class Course:
    """The course of a search by gradients, and the best value that it saw."""

    best: Tensor  # where that was, `[n]`
    sign: int = 1  # −1 where large values are good: all that is held here is made small
    best_value: float = math.inf
    slope: float = math.inf  # largest entry of the gradient there
    values: list[float] = field(default_factory=list)
    bad: int = 0  # how many values or gradients were not finite
    converged: bool = False  # whether the gradient vanished, or nothing got better any more

    def record(self, logs: Tensor, value: float, slope: float) -> bool:
        """Takes note of an evaluation and its largest slope; False where they are not finite."""
        value *= self.sign
        self.values.append(value)
        if not math.isfinite(value) or not math.isfinite(slope):
            self.bad += 1
            return False
        if value < self.best_value:
            self.best, self.best_value, self.slope = logs, value, slope
        return True

    def is_flat(self) -> bool:
        """True if all values were the same number but for rounding."""
        finite = [value for value in self.values if math.isfinite(value)]
        return len(finite) > 1 and max(finite) - min(finite) <= 1e-7 * abs(max(finite, key=abs))

    def at_bound(self) -> bool:
        """True if the best value lies where the search was stopped."""
        return bool((self.best.abs() >= BOUND).any())

    def shortfall(self, options: SearchOptions) -> tuple[str, ...]:
        """A note where a search should have converged and did not."""
        if options.tolerance is None or self.converged or self.is_flat():
            return ()
        slope = f"largest slope {self.slope:.2g} per log unit"
        return (f"the search did not converge in {options.n_steps} steps ({slope}); raise n_steps",)


def _notes_of_course(course: Course, tuned: Sequence[str]) -> list[str]:
    notes: list[str] = []
    names = _listed(tuned)
    if course.bad:
        notes.append(f"the objective was NaN or infinite in {course.bad} of {len(course.values)} steps")
    if course.is_flat() and course.slope == 0:
        notes.append(f"the objective does not depend on the {names}; choose one that reads the predictive variance")
    if course.at_bound():
        notes.append(
            f"the best value has a hyper-parameter at the bound of the search, 1e-10 or 1e10: the {names} may have no "
            "finite optimum"
        )
    return notes


def _listed(names: Iterable[str]) -> str:
    return " and the ".join(name.replace("_", " ") for name in names)


class _Finished(Exception):
    """A signal out of the line search, never seen by callers: the gradient is small enough, or there is none."""


def minimise(evaluate: Evaluate, start: Tensor, options: SearchOptions, sign: int = 1) -> Course:
    """Makes a function of logarithms times the sign small, by Adam or L-BFGS from a start `[n]`.

    Raises:
        InvalidArgument: No finite value at the start.
    """
    course, tolerance = Course(start.detach(), sign), options.tolerance or 0.0
    upper = start.detach().abs().clamp(min=BOUND)
    bounds = -upper, upper
    total = options.n_steps + 1 if options.method == "adam" else None

    with tqdm(total=total, desc=options.label, disable=not options.progress_bar) as bar:

        def evaluated(inside: Tensor) -> _Point:
            value, gradient = evaluate(inside)
            bar.update()
            return _Point(inside, value, gradient)

        def recorded(point: _Point, value: float, slope: float) -> bool:
            is_finite = course.record(point.logs, value, slope)
            if is_finite and slope <= tolerance * max(1.0, abs(value)):
                course.converged = True
                raise _Finished
            return is_finite

        with contextlib.suppress(_Finished):
            method = _METHODS[options.method]
            course.converged = method(evaluated, recorded, start.detach().clone(), bounds, options, course)
        if len(course.values) == 1 and course.slope == 0:  # a minimum, or a flat function?
            beside = _Point(start + 1, *evaluate(start + 1))
            course.record(beside.logs, *_read([beside])[0])
    if not math.isfinite(course.best_value):
        raise InvalidArgument(
            "the objective is not finite where the search starts; check the data, the fit and the start."
        )
    return course


Bounds = tuple[Tensor, Tensor]
"""The smallest and the largest logarithms, `[n]`."""
Evaluated = Callable[[Tensor], _Point]
"""Evaluates at logarithms `[n]` within the bounds."""
Recorded = Callable[[_Point, float, float], bool]
"""Takes note of a point with its value and slope; False where they are not finite."""


def _adam(
    evaluated: Evaluated, recorded: Recorded, logs: Tensor, bounds: Bounds, options: SearchOptions, course: Course
) -> bool:
    """After a value that is not finite Adam begins anew at the best point, with half the step size.

    Outside of the bounds the gradient is that of the nearest point within.
    """
    lr, left = course.sign * options.lr, options.n_steps + 1
    at_once = max(1, min(_AT_ONCE, _HELD // logs.numel()))
    update = _AdamUpdate(logs, lr, left)
    while left:
        points: list[_Point] = []
        for _ in range(min(left, 1 if options.tolerance else at_once)):
            try:
                points.append(evaluated(logs.clamp(*bounds)))
            except Exception:
                if all(math.isfinite(value + slope) for value, slope in _read(points)):
                    raise
                break  # a consequence of a point that was not finite
            logs = update(logs, points[-1].gradient)
        for point, read in zip(points, _read(points), strict=True):
            left -= 1
            if not recorded(point, *read):
                if not math.isfinite(course.best_value):
                    return False
                lr, logs = lr / 2, course.best.clone()
                update = _AdamUpdate(logs, lr, left)
                break
    return False


class _AdamUpdate:
    """Steps of Adam [Kingma and Ba, 2015, algorithm 1].

    PyTorch's optimiser computes the same, and imports PyTorch's compiler with its first step: most of a second. The one
    operation that it calls for all of a step is called here where operations are dear.

    Args:
        like: Logarithms, `[n]`.
        lr: The step size, below zero to make values large.
        n_steps: Steps at most.
    """

    def __init__(self, like: Tensor, lr: float, n_steps: int) -> None:
        self.lr = lr
        self.n = 0
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)
        fused = operations_are_dear(like.device) and like.device.type in _FUSED
        self.numbers = torch.arange(1.0, n_steps + 1, device=like.device).unbind() if fused else ()

    def __call__(self, logs: Tensor, gradient: Tensor) -> Tensor:
        self.n += 1
        if self.numbers:
            torch._fused_adam_(
                [logs], [gradient], [self.first], [self.second], [], [self.numbers[self.n - 1]], lr=abs(self.lr),
                beta1=_BETA_1, beta2=_BETA_2, weight_decay=0.0, eps=_EPSILON, amsgrad=False, maximize=self.lr < 0,
            )  # fmt: skip
            return logs
        self.first.lerp_(gradient, 1 - _BETA_1)
        self.second.mul_(_BETA_2).addcmul_(gradient, gradient, value=1 - _BETA_2)
        deviation = self.second.sqrt().div_(math.sqrt(1 - _BETA_2**self.n)).add_(_EPSILON)
        return logs.addcdiv(self.first, deviation, value=-self.lr / (1 - _BETA_1**self.n))


def _lbfgs(
    evaluated: Evaluated, recorded: Recorded, logs: Tensor, bounds: Bounds, options: SearchOptions, course: Course
) -> bool:
    """Outside of the bounds nothing changes; from what is not finite, a very bad value, a line search steps back."""
    logs.requires_grad_()
    n_steps = options.n_steps
    optimizer = torch.optim.LBFGS(
        [logs], lr=1.0, max_iter=n_steps, max_eval=4 * n_steps, tolerance_grad=0.0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        point = evaluated(logs.detach().clamp(*bounds))
        is_finite = recorded(point, *_read([point])[0])
        if not is_finite and not math.isfinite(course.best_value):
            raise _Finished
        slopes = course.sign * point.gradient
        logs.grad = slopes.where(point.logs == logs.detach(), 0.0) if is_finite else torch.zeros_like(logs)
        return logs.new_tensor(course.values[-1] if is_finite else 1e3 * (1 + abs(course.best_value)))

    optimizer.step(closure)
    spent = optimizer.state[logs]
    return spent["n_iter"] < n_steps and spent["func_evals"] < 4 * n_steps


_METHODS: dict[str, Callable[[Evaluated, Recorded, Tensor, Bounds, SearchOptions, Course], bool]] = {
    "adam": _adam,
    "lbfgs": _lbfgs,
}

# ----------------------------------------------------------------------------------------------------------------------
# On a grid
# ----------------------------------------------------------------------------------------------------------------------

_RANGES = {"prior_precision": (-4, 4), "sigma_noise": (-2, 2), "temperature": (-2, 2)}
"""Exponents of 10 between which a grid lies that the caller does not give."""
_SIZES = (100, 25, 11)
"""Its number of values per hyper-parameter, when one, two or three are tuned."""
_AS_GOOD = 1e-3
"""Part of the losses' range, and of the network's loss, by which a posterior must beat the network."""


@dataclass(frozen=True, eq=False)
class GridSearch:
    """All combinations of some values of the tuned hyper-parameters."""

    axes: dict[str, Tensor]  # values of each, ascending or as the caller gave them, `[n]`
    now: Hyperparameters  # values of the others; a noise per output keeps its ratios, whose geometric mean is tuned
    prior: Tensor  # a prior precision in the structure in which a tuned one is written: the posterior is the same

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of values per axis."""
        return tuple(len(values) for values in self.axes.values())

    @cached_property
    def settings(self) -> list[Hyperparameters]:
        """The candidates, the last axis running fastest; tuned priors are scalar."""
        noise = self.now.sigma_noise
        scales = {"prior_precision": torch.ones_like(self.now.prior_precision[:1])}
        scales |= {"sigma_noise": noise / noise.log().mean().exp()} if noise.ndim else {}
        return [
            replace(self.now, **{name: v * scales.get(name, 1) for name, v in zip(self.axes, values, strict=True)})
            for values in product(*self.axes.values())
        ]

    def index_of(self, place: int) -> list[int]:
        """Index of a candidate on every axis, as `torch.unravel_index` gives it, which imports SymPy."""
        steps = (math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        return [place // step % n for step, n in zip(steps, self.shape, strict=True)]

    def last_per_noise(self) -> list[int]:
        """Places of one candidate for every noise, whose other hyper-parameters are the last of their axes."""
        shape, places = self.shape, torch.arange(math.prod(self.shape)).view(self.shape)
        where = tuple(slice(None) if name == "sigma_noise" else n - 1 for name, n in zip(self.axes, shape, strict=True))
        return places[where].reshape(-1).tolist()


def make_axes(
    names: tuple[str, ...], given: Mapping[str, Tensor | Sequence[float]] | None, like: Tensor
) -> dict[str, Tensor]:
    """Values of every tuned hyper-parameter, `[n]`: the caller's, or powers of 10."""
    given = given or {}
    unknown = [name for name in given if name not in names]
    if unknown:
        raise InvalidArgument(f"grid has values for {unknown}, which are not tuned; tune={names}.")
    axes: dict[str, Tensor] = {}
    for name in names:
        if name not in given:
            low, high = _RANGES[name]
            axes[name] = torch.logspace(low, high, _SIZES[len(names) - 1], dtype=like.dtype, device=like.device)
            continue
        values = torch.as_tensor(given[name], dtype=like.dtype, device=like.device).detach()
        if values.ndim != 1 or not len(values):
            raise InvalidArgument(f"grid[{name!r}] has shape {list(values.shape)}; give one or more values, [n].")
        axes[name] = positive(f"grid[{name!r}]", values)
    return axes


def _smallest(values: Tensor) -> int:
    """Place of the smallest finite loss, the first of several."""
    finite = values.isfinite()
    if not finite.any():
        raise InvalidArgument(
            "no candidate of the grid has a finite validation loss; the hyper-parameters are left as they were. Check "
            "the loss, the validation data and the range of the grid."
        )
    return int((values == values[finite].min()).nonzero()[0])


def _notes_of_grid(values: Tensor, place: int, grid: GridSearch, of_network: Callable[[], Tensor]) -> list[str]:
    finite = values.isfinite()
    notes: list[str] = []
    if not finite.all():
        notes.append(f"{int((~finite).sum())} of {values.numel()} candidates had no finite loss and were passed over")
    width = (values[finite].max() - values[finite].min()).item()
    if values.numel() > 1 and width <= 1e-7 * values[finite].abs().max():
        names = _listed(grid.axes)
        notes.append(f"the loss does not depend on the {names}; choose one that reads the predictive variance")
    else:
        notes += _notes_of_edges(place, grid, values.flatten()[place].item(), width, of_network)
    return notes


def _notes_of_edges(
    place: int, grid: GridSearch, loss: float, width: float, of_network: Callable[[], Tensor]
) -> Iterable[str]:
    """Notes on hyper-parameters whose best value is on an edge of their axis.

    Where the prior precision grows, predictions become those of the network: if these are as good as the best, there is
    nothing to be found beyond the edge.
    """
    index = dict(zip(grid.axes, grid.index_of(place), strict=True))
    for name, values in grid.axes.items():
        if len(values) < 3 or index[name] not in (0, len(values) - 1):
            continue
        value = values[index[name]]
        best = f"the best {name.replace('_', ' ')}, {value.item():g}"
        if name == "prior_precision" and bool(value == values.max()):
            network = of_network()[index.get("sigma_noise", 0)].item()
            if network <= loss + _AS_GOOD * min(width, abs(network)):
                yield (
                    f"{best}, is the largest of the grid, and the network's own predictions are as good (a loss of "
                    f"{network:.4g}, with the posterior {loss:.4g}): a larger one only comes nearer to them"
                )
                continue
        yield f"{best}, is on the edge of the grid; widen it"
