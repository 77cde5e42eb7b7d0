"""Classification of images whose test data are shifted step by step, with images of other kinds to be told apart.

The tasks stand in for those of Daxberger et al. (2021, 4.2): digits with rotated ones for MNIST and Rotated-MNIST, and
coloured digits before a background with noisy and blurred ones for CIFAR-10 and CIFAR-10-C. Classes from 7 on are
left out of the training and stand in for their other data sets, beside images that are no digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from protocol.data import Part, Split, blurred, digits, mislabelled, noisy, other_images, rotated, split

N_CLASSES = 7
ANGLES = (15.0, 30.0, 45.0, 60.0, 90.0, 120.0, 150.0, 180.0)
LEVELS = (1.0, 2.0, 3.0, 4.0, 5.0)


@dataclass(frozen=True)
class ShiftedTask:
    """A task.

    Attributes:
        parts: Training, validation and test data of the classes that are seen.
        shifted: Test inputs by the intensity of a shift, of one or several kinds.
        others: Inputs of other kinds, by their names.
    """

    parts: Split
    shifted: dict[float, tuple[Tensor, ...]]
    others: dict[str, Tensor]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ShiftedTask:
        """The same with a function applied to all inputs, e.g. one that makes images smaller."""
        parts = Split(*(Part(change(p.x), p.y) for p in (self.parts.train, self.parts.validation, self.parts.test)))
        shifted = {level: tuple(change(x) for x in kinds) for level, kinds in self.shifted.items()}
        return ShiftedTask(parts, shifted, {name: change(x) for name, x in self.others.items()})


def seen_and_unseen(data: Part, n_train: int, label_noise: float, generator: torch.Generator) -> tuple[Split, Tensor]:
    """Parts of the classes that are seen, a share of the training labels drawn anew, and images of the others."""
    seen = data.of_classes(range(N_CLASSES))
    share = n_train / len(seen)
    parts = split(seen, (share, min(share, 0.2)), generator)
    train = Part(parts.train.x, mislabelled(parts.train.y, label_noise, N_CLASSES, generator))
    unseen = data.of_classes(range(N_CLASSES, 10)).x
    return Split(train, parts.validation, parts.test), unseen


def rotated_digits(n_train: int, noise: float, seed: int, path: Path | None = None) -> ShiftedTask:
    """Noisy digits 0 to 6 with rotated test images; others are digits 7 to 9 and images that are no digits."""
    generator = torch.Generator().manual_seed(seed)
    data = digits(path)
    parts, unseen = seen_and_unseen(Part(noisy(data.x, noise, generator), data.y), n_train, 0.0, generator)
    shifted = {angle: (rotated(parts.test.x, angle),) for angle in ANGLES}
    return ShiftedTask(parts, shifted, {"unseen digits": unseen, **other_images(parts.test.x, generator)})


def coloured(x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Grey images `[N, 1, H, W]` in random bright colours before smooth random dark ones, and the latter alone."""
    n_data, _, height, width = x.shape
    coarse = 0.7 * torch.rand(n_data, 3, 3, 3, generator=generator)
    background = F.interpolate(coarse, (height, width), mode="bilinear")
    colour = 0.3 + 0.7 * torch.rand(n_data, 3, 1, 1, generator=generator)
    return background * (1 - x) + colour * x, background


def coloured_digits(n_train: int, label_noise: float, seed: int, path: Path | None = None) -> ShiftedTask:
    """Coloured digits 0 to 6; shifts are noise and blur; others are digits 7 to 9, backgrounds, shuffled pixels."""
    generator = torch.Generator().manual_seed(seed)
    data = digits(path)
    images, backgrounds = coloured(data.x, generator)
    parts, unseen = seen_and_unseen(Part(images, data.y), n_train, label_noise, generator)
    shifted = {
        level: (noisy(parts.test.x, 0.05 * level, generator), blurred(parts.test.x, 0.2 + 0.15 * level))
        for level in LEVELS
    }
    shuffled = other_images(parts.test.x, generator)["shuffled"]
    others = {"unseen digits": unseen, "backgrounds": backgrounds[: len(unseen)], "shuffled": shuffled}
    return ShiftedTask(parts, shifted, others)
