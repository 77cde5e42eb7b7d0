"""The two tasks of Eschenhagen et al. (2021) that stand for MNIST-R and CIFAR-10-C, and what is measured on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from laplace.metrics import maximum_calibration_error
from protocol.corruptions import CORRUPTIONS, SEVERITIES, corrupted
from protocol.data import Part, Split, digits, glyphs, noisy, other_images, rotated, split
from protocol.measures import classification, detection

Predict = Callable[[Tensor], Tensor]
ANGLES = (15, 30, 45, 60, 90, 120, 150, 180)


@dataclass(frozen=True)
class Task:
    """Data to train and tune on, and shifted and OOD images.

    Attributes:
        name: Begins the names of its conditions.
        parts: Training, validation and test data.
        shifts: The first test inputs by the level of their shift (an angle, a severity), `[N, …]` per kind of shift.
        ood: Images that are of no class, by name.
    """

    name: str
    parts: Split
    shifts: dict[int, list[Tensor]]
    ood: dict[str, Tensor]

    def everything(self) -> Tensor:
        """All inputs that are predicted, in the order in which `scores` reads them: test, shifted, OOD."""
        shifted = [x for kinds in self.shifts.values() for x in kinds]
        return torch.cat([self.parts.test.x, *shifted, *self.ood.values()])

    def scores(self, p: Tensor) -> dict[str, dict[str, float]]:
        """The measures of probabilities `[·, C]` of everything, by condition.

        Of a level they are the means over the kinds of shift, and "shifted" is the mean over all levels (figure 10).
        """
        y, name = self.parts.test.y, self.name
        kinds_of_shift = [x for kinds in self.shifts.values() for x in kinds]
        blocks = iter(p.split([len(y), *map(len, kinds_of_shift), *map(len, self.ood.values())]))
        inside = next(blocks)
        found = {f"{name}, test": _measures(inside, y)}
        for level, kinds in self.shifts.items():
            found[f"{name}, level {level}"] = mean_of([_measures(next(blocks), y[: len(x)]) for x in kinds])
        found[f"{name}, shifted"] = mean_of([found[f"{name}, level {level}"] for level in self.shifts])
        apart = {kind: detection(inside, next(blocks)) for kind in self.ood}
        found |= {f"{name}, {kind}": measures for kind, measures in apart.items()}
        found[f"{name}, OOD"] = mean_of(list(apart.values()))
        return found


def _measures(p: Tensor, y: Tensor) -> dict[str, float]:
    return classification(p, y) | {"MCE": float(maximum_calibration_error(p, y))}


def mean_of(found: list[dict[str, float]]) -> dict[str, float]:
    """Mean of every measure."""
    return {measure: sum(each[measure] for each in found) / len(found) for measure in found[0]}


@dataclass(frozen=True)
class DataSettings:
    """How many data, and how hard they are.

    Attributes:
        n_train: Images to train on.
        n_validation: Images to tune on.
        n_test: Images to test on, at most.
        n_shifted: The first of these, that are shifted, and as many that are of no class.
        noise: Standard deviation of the noise of every image, in units of the brightest pixel.
        warp: How far glyphs are moved and turned.
        size: Their pixels, in a row.
    """

    n_train: int = 5000
    n_validation: int = 2000
    n_test: int = 3000
    n_shifted: int = 600
    noise: float = 0.14
    warp: float = 0.5
    size: int = 8


def noisy_digits(how: DataSettings, seed: int, path: Path | None, generator: torch.Generator) -> Split:
    """Glyphs, or the digits of a path, every one with noise of its own that it keeps."""
    n_images = how.n_train + how.n_validation + how.n_test
    data = glyphs(n_images, how.size, seed=seed, warp=how.warp) if path is None else digits(path)
    parts = split(data, (how.n_train / len(data), how.n_validation / len(data)), generator)
    train, validation, test = (
        Part(noisy(part.x, how.noise, generator), part.y)
        for part in (parts.train, parts.validation, parts.test[: how.n_test])
    )
    return Split(train, validation, test)


def rotated_task(how: DataSettings, seed: int, path: Path | None = None) -> Task:
    """In place of MNIST-R: test glyphs rotated by up to 180 degrees."""
    generator = torch.Generator().manual_seed(seed)
    parts = noisy_digits(how, seed, path, generator)
    shifts = {angle: [rotated(parts.test.x[: how.n_shifted], angle)] for angle in ANGLES}
    return Task("rotated", parts, shifts, other_images(parts.test.x[: how.n_shifted], generator))


def corrupted_task(how: DataSettings, seed: int, path: Path | None = None) -> Task:
    """In place of CIFAR-10-C: test glyphs with eight corruptions at five severities."""
    generator = torch.Generator().manual_seed(seed)
    parts = noisy_digits(how, seed, path, generator)
    shifts = {
        severity: [corrupted(parts.test.x[: how.n_shifted], name, severity, generator) for name in CORRUPTIONS]
        for severity in SEVERITIES
    }
    return Task("corrupted", parts, shifts, other_images(parts.test.x[: how.n_shifted], generator))


MAKERS: Mapping[str, Callable[[DataSettings, int, Path | None], Task]] = {
    "rotated": rotated_task,
    "corrupted": corrupted_task,
}
