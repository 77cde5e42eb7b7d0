"""Grid search on validation data: batches outside, candidates inside, so that the network runs once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product

import torch
from torch import Tensor

from laplace.core.arguments import positive
from laplace.core.batch import Inputs
from laplace.core.checks import named
from laplace.core.hyperparameters import Hyperparameters
from laplace.core.precision_policy import wide_dtype, widened
from laplace.core.processes import Processes
from laplace.errors import CurvatureError, InvalidArgument, InvalidData
from laplace.network.model_guard import autograd_mode
from laplace.tuning.candidates import MixedCandidates, Predict
from laplace.tuning.group import PosteriorGroup
from laplace.tuning.objectives import Objective, Prediction, Running
from laplace.tuning.validation import Targets, ValidationLoss, entropy_of

_RANGES = {"prior_precision": (-4, 4), "sigma_noise": (-2, 2), "temperature": (-2, 2)}
"""Exponents of 10 between which a grid lies that the caller does not give."""
_SIZES = (100, 25, 11)
"""Its number of values per hyper-parameter, when one, two or three are tuned."""
_AS_GOOD = 1e-3
"""Part of the losses' range, and of the network's loss, by which a posterior must beat the network."""


@dataclass(frozen=True, eq=False)
class Grid:
    """All combinations of some values of the tuned hyper-parameters.

    Attributes:
        axes: Values of each, ascending or as the caller gave them, `[n]`.
        settings: The candidates, the last axis running fastest; scalar priors.
    """

    axes: dict[str, Tensor]
    settings: list[Hyperparameters]

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of values per axis."""
        return tuple(len(values) for values in self.axes.values())

    def index_of(self, place: int) -> list[int]:
        """Index of a candidate on every axis, as `torch.unravel_index` gives it, which imports SymPy."""
        steps = (math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        return [place // step % n for step, n in zip(steps, self.shape, strict=True)]

    def last_per_noise(self) -> list[int]:
        """Places of one candidate for every noise, whose other hyper-parameters are the last of their axes."""
        shape, places = self.shape, torch.arange(len(self.settings)).view(self.shape)
        where = tuple(slice(None) if name == "sigma_noise" else n - 1 for name, n in zip(self.axes, shape, strict=True))
        return places[where].reshape(-1).tolist()

    @classmethod
    def over(cls, axes: dict[str, Tensor], now: Hyperparameters) -> Grid:
        """A grid around what a posterior has now.

        Args:
            axes: Values of the tuned hyper-parameters, `[n]` each.
            now: The values of the others; of a vector noise the ratios are kept if it is not tuned.
        """
        shapes = {name: (1,) if name == "prior_precision" else getattr(now, name).shape for name in axes}
        settings = [
            replace(now, **{name: v.expand(shapes[name]) for name, v in zip(axes, values, strict=True)})
            for values in product(*axes.values())
        ]
        return cls(axes, settings)


def make_axes(
    names: tuple[str, ...], given: Mapping[str, Tensor | Sequence[float]] | None, like: Tensor
) -> dict[str, Tensor]:
    """Values of every tuned hyper-parameter, `[n]`: the caller's, or powers of 10.

    Raises:
        InvalidArgument: Values of something that is not tuned, none, or values that are not positive.
    """
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


@dataclass(frozen=True, eq=False)
class GridResult:
    """Result of a search on a grid.

    Attributes:
        place: Index of the best candidate among the settings.
        values: The loss of every candidate, float64, in the grid's shape; NaN or infinite where it has none.
        notes: What the caller should know.
    """

    place: int
    values: Tensor
    notes: list[str]


def search_grid(group: PosteriorGroup, grid: Grid, loss: ValidationLoss) -> GridResult:
    """The candidate with the smallest loss.

    Raises:
        InvalidData: No validation data.
        InvalidArgument: No candidate with a finite loss, or none that meets the thresholds.
    """
    first, objective, data = group.first, loss.objective, loss.data
    with autograd_mode(), torch.no_grad():
        candidates = group.candidates(grid.settings, loss.predictive, whole_covariance=objective.whole_covariance)
        of_network = grid.last_per_noise() if "prior_precision" in grid.axes else []
        losses = Losses(candidates, objective, data.processes, of_network)
        losses.read(data.batches(first, label="grid search"))
        values = losses.results()
        entropies = None
        if data.ood_loader is not None:
            entropies = Losses(candidates, entropy_of(group.likelihood), data.processes, of_network)
            entropies.read((name, x, None) for name, x in data.ood_inputs(first))
            values = data.less_entropy(values, entropies.results(), entropies.n_data, losses.n_data)

        def network() -> Tensor:
            own = losses.results_of_network()
            if entropies is None:
                return own
            return data.less_entropy(own, entropies.results_of_network(), entropies.n_data, losses.n_data)

        place = _best(values, objective)
        values = values.view(grid.shape)
        return GridResult(place, values, _notes(values, place, grid, objective, network))


@dataclass(frozen=True)
class _Seen:
    """Sums of every candidate over the data of one process.

    Attributes:
        scores: Sum and number of data of every score, for every candidate; None where its posterior does not exist.
        n_data: Data seen.
    """

    scores: list[list[tuple[Tensor, int]] | None]
    n_data: int


class Losses:
    """The running losses of all candidates.

    Args:
        candidates: What predicts.
        objective: Makes a running loss for every candidate, or for several at once.
        processes: Those that see the other shards of the data; None where all data are seen here.
        of_network: Candidates at whose noise and mixture weights the networks' own predictions are scored, too.

    Attributes:
        n_data: Data seen.
    """

    def __init__(
        self,
        candidates: MixedCandidates,
        objective: Objective,
        processes: Processes | None = None,
        of_network: Sequence[int] = (),
    ) -> None:
        self.candidates = candidates
        self.objective = objective
        self.processes = processes
        self.of_network = of_network
        self.n_data = 0
        noises = [setting.sigma_noise for setting in candidates.settings]
        self._together = objective.many and all(noise is noises[0] for noise in noises)
        self._groups: list[slice] = []
        self._running: list[tuple[slice, Running]] = []
        self._failed: set[int] = set()

    def read(self, data: Iterable[tuple[str, Inputs, Tensor | None]]) -> None:
        """Takes in batches with their names, and what other processes find in theirs.

        Raises:
            InvalidData: There are no data in any process.
            ProcessError: Another process failed.
            UnsupportedError: Losses of parts of the data do not add up, and there are several processes.
        """

        def attempt() -> _Seen | None:
            for name, x, y in data:
                with named(name):
                    self.update(x, y)
            return None if self.processes is None or not self._running else self._seen()

        if self.processes is None:
            attempt()
        else:
            self._take([seen for seen in self.processes.agreed(attempt) if seen is not None])

    def _seen(self) -> _Seen:
        """Sums of scores of every candidate, whichever are predicted together here."""
        rows: list[list[tuple[Tensor, int]] | None] = []
        for part, running in self._running:
            size, scores = part.stop - part.start, running.scores()
            if part.start in self._failed:  # in one batch or more: its sums are of some data, or of none
                rows += [None] * size
                continue
            totals = [torch.as_tensor(score.total).cpu() for score in scores]
            for i in range(size):
                rows.append(
                    [(total if size == 1 else total[i], one.count) for total, one in zip(totals, scores, strict=True)]
                )
        return _Seen(rows, self.n_data)

    def _take(self, seen: list[_Seen]) -> None:
        """Puts the sums of all processes in the place of this one's."""
        if not seen:
            raise InvalidData(
                "the validation loaders gave no data, or all are ignored; the hyper-parameters are as they were."
            )
        self.n_data, self._failed, self._running = sum(one.n_data for one in seen), set(), []
        for i, rows in enumerate(zip(*(one.scores for one in seen), strict=True)):
            running = self.objective.fresh()
            self._running.append((slice(i, i + 1), running))
            known = [row for row in rows if row is not None]
            if len(known) < len(rows):
                self._failed.add(i)
                continue
            for score, parts in zip(running.scores(), zip(*known, strict=True), strict=True):
                score.total = torch.stack([total for total, _ in parts]).sum(0)
                score.count = sum(count for _, count in parts)

    def update(self, x: Inputs, y: Tensor | None) -> None:
        """Takes in one batch; without targets, one of out-of-distribution inputs."""
        predict, outputs, positions = self.candidates.prepare(x)
        targets = Targets.of(self.candidates.posterior, outputs[0], y, positions)
        self.n_data += targets.n_data
        settings = self.candidates.settings
        if not self._groups:
            n = len(settings)
            self._groups = self.candidates.groups(len(outputs[0]))
            parts = self._groups if self._together else [slice(i, i + 1) for i in range(n)]
            parts = [*parts, *(slice(i, i + 1) for i in range(n, n + len(self.of_network)))]
            self._running = [(part, self.objective.fresh()) for part in parts]
        noises = [*(setting.sigma_noise for setting in settings), *(settings[i].sigma_noise for i in self.of_network)]
        predictions = chain(
            (part for group in self._groups for part in self._predicted(predict, group)),
            (self.candidates.of_networks(outputs, i) for i in self.of_network),
        )
        for (part, running), prediction in zip(self._running, predictions, strict=True):
            if prediction is None:
                self._failed.add(part.start)
            else:
                targets.update(running, prediction, noises[part.start])

    def _predicted(self, predict: Predict, group: slice) -> list[Prediction | None]:
        """The predictions of a group, as one or candidate by candidate; None where a posterior does not exist."""
        size = group.stop - group.start
        apart = size > 1 and not self._together
        try:
            prediction = predict(group)
        except (CurvatureError, torch.linalg.LinAlgError):
            return [None] * (size if apart else 1)
        if not apart:
            return [prediction]
        if isinstance(prediction, tuple):
            rows: list[Prediction] = list(zip(*prediction, strict=True))
        else:
            rows = list(prediction)
        return [None if _is_nan(row) else row for row in rows]

    def results(self) -> Tensor:
        """The losses, float64, `[n]`; infinite where a posterior does not exist."""
        return self._results(0, len(self.candidates.settings))

    def results_of_network(self) -> Tensor:
        """The losses of the networks' own predictions, float64, `[len(of_network)]`."""
        n = len(self.candidates.settings)
        return self._results(n, n + len(self.of_network))

    def _results(self, start: int, stop: int) -> Tensor:
        parts = [
            torch.full((part.stop - part.start,), math.inf, dtype=wide_dtype())
            if part.start in self._failed
            else widened(running.result().detach()).cpu().reshape(-1)
            for part, running in self._running
            if start <= part.start < stop
        ]
        return torch.cat(parts)


def _is_nan(prediction: Prediction) -> bool:
    parts = prediction if isinstance(prediction, tuple) else (prediction,)
    return any(bool(part.isnan().any()) for part in parts)


def _best(values: Tensor, objective: Objective) -> int:
    """Place of the smallest finite loss, the first of several."""
    finite = values.isfinite()
    if not finite.any():
        raise InvalidArgument(
            "no candidate of the grid has a finite validation loss; the hyper-parameters are left as they were. Check "
            "the loss, the validation data and the range of the grid."
        )
    smallest = values[finite].min()
    if objective.thresholds and smallest > 0:
        raise InvalidArgument(
            f"no candidate of the grid meets the thresholds: the nearest misses one by {smallest:.3g}; the "
            "hyper-parameters are left as they were. Lower the thresholds (a network that is right in a share a of the "
            "validation data has a mean confidence around a), or widen the grid."
        )
    return int((values == smallest).nonzero()[0])


def _notes(values: Tensor, place: int, grid: Grid, objective: Objective, network: Callable[[], Tensor]) -> list[str]:
    """Notes on losses in the grid's shape; `network` gives that of the network itself, for every noise of the grid."""
    finite = values.isfinite()
    names = " and the ".join(name.replace("_", " ") for name in grid.axes)
    notes: list[str] = []
    if not finite.all():
        notes.append(f"{int((~finite).sum())} of {values.numel()} candidates had no finite loss and were passed over")
    spread = values[finite].max() - values[finite].min()
    if objective.thresholds:
        if place == 0 and values.numel() > 1:
            notes.append("the smallest candidate meets the thresholds already; widen the grid downwards")
    elif values.numel() > 1 and spread <= 1e-7 * values[finite].abs().max():
        notes.append(f"the loss does not depend on the {names}; choose one that reads the predictive variance")
    else:
        notes += _edges(place, grid, values.flatten()[place].item(), spread.item(), network)
    return notes


def _edges(place: int, grid: Grid, loss: float, spread: float, network: Callable[[], Tensor]) -> list[str]:
    """Notes on hyper-parameters whose best value is on an edge of their axis.

    Where the prior precision grows, predictions become those of the network: if these are as good as the best, there is
    nothing to be found beyond the edge.
    """
    notes: list[str] = []
    index = dict(zip(grid.axes, grid.index_of(place), strict=True))
    for name, values in grid.axes.items():
        if len(values) < 3 or index[name] not in (0, len(values) - 1):
            continue
        value = values[index[name]]
        best = f"the best {name.replace('_', ' ')}, {value.item():g}"
        if name == "prior_precision" and bool(value == values.max()):
            own = network()[index.get("sigma_noise", 0)].item()
            if own <= loss + _AS_GOOD * min(spread, abs(own)):
                notes.append(
                    f"{best}, is the largest of the grid, and the network's own predictions are as good (a loss of "
                    f"{own:.4g}, with the posterior {loss:.4g}): a larger one only comes nearer to them"
                )
                continue
        notes.append(f"{best}, is on the edge of the grid; widen it")
    return notes
