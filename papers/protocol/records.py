"""Scores of one seed, of all seeds, and their files."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Key:
    """Which number: of a method, by a measure, under a condition (a data set, a shift, a setting)."""

    condition: str
    method: str
    measure: str


@dataclass
class Scores:
    """The numbers of one seed.

    Attributes:
        values: By condition, method and measure.
        minutes: Of processor time, that they took.
    """

    values: dict[Key, float] = field(default_factory=dict)
    minutes: float = 0.0

    def add(self, condition: str, method: str, measures: dict[str, float]) -> None:
        """Puts the numbers of a method under a condition."""
        for measure, value in measures.items():
            self.values[Key(condition, method, measure)] = float(value)

    def __getitem__(self, key: tuple[str, str, str]) -> float:
        return self.values[Key(*key)]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its standard error; NaN where there is one seed."""

    mean: float
    error: float
    n_seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if math.isnan(self.error) else f"{self.mean:.3f} ± {self.error:.3f}"


def estimate(values: list[float]) -> Estimate:
    """Mean and standard error s / √n of numbers, one per seed."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Estimate(statistics.fmean(values), error, len(values))


@dataclass(frozen=True)
class Records:
    """Scores of all seeds. What takes long may be there for some of them only; the first has everything.

    Attributes:
        seeds: In their order.
        scores: Of every seed.
    """

    seeds: tuple[int, ...]
    scores: tuple[Scores, ...]

    def __getitem__(self, key: tuple[str, str, str]) -> list[float]:
        """The numbers of a condition, method and measure, one per seed that has it."""
        return [scores[key] for scores in self.scores if Key(*key) in scores.values]

    def __contains__(self, key: tuple[str, str, str]) -> bool:
        return Key(*key) in self.scores[0].values

    def of(self, statistic: Callable[[Scores], float]) -> Estimate:
        """The mean over the seeds that have the numbers of a statistic, with its standard error."""
        found = []
        for scores in self.scores:
            with suppress(KeyError):
                found.append(statistic(scores))
        return estimate(found)

    def estimate(self, condition: str, method: str, measure: str) -> Estimate:
        """Mean over seeds, with its standard error."""
        return estimate(self[condition, method, measure])

    def conditions(self) -> list[str]:
        """In the order in which they were added."""
        return list(dict.fromkeys(key.condition for key in self.scores[0].values))

    def methods(self, condition: str) -> list[str]:
        """Those of a condition, in the order in which they were added."""
        return list(dict.fromkeys(key.method for key in self.scores[0].values if key.condition == condition))

    def measures(self, condition: str) -> list[str]:
        """Those of a condition, in the order in which they were added."""
        return list(dict.fromkeys(key.measure for key in self.scores[0].values if key.condition == condition))

    @property
    def minutes(self) -> float:
        """Processor time of all seeds."""
        return sum(scores.minutes for scores in self.scores)


def _path(folder: Path, settings: object, seed: int) -> Path:
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
    return folder / digest / f"{seed}.json"


def save_scores(scores: Scores, folder: Path, settings: object, seed: int) -> None:
    """Writes the scores of a finished seed; a run that is killed while it writes leaves no half of a file."""
    path = _path(folder, settings, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [[key.condition, key.method, key.measure, value] for key, value in scores.values.items()]
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"settings": repr(settings), "minutes": scores.minutes, "values": rows}, indent=1))
    part.replace(path)


def load_scores(folder: Path, settings: object, seed: int) -> Scores | None:
    """The scores of a seed with these settings; None where it is not finished."""
    path = _path(folder, settings, seed)
    if not path.exists():
        return None
    stored = json.loads(path.read_text())
    return Scores({Key(*row[:3]): row[3] for row in stored["values"]}, stored["minutes"])
