"""Classification of images whose test data are shifted step by step, with images of other kinds to be told apart.

The tasks stand in for those of Daxberger et al. (2021, 4.2): digits with rotated ones for MNIST and Rotated-MNIST, and
coloured digits before a background with noisy and blurred ones for CIFAR-10 and CIFAR-10-C. Digits from 7 on are left
out of the training and stand in for their other data sets, beside images that are no digits. Digits are `glyphs`, or
those of scikit-learn, of MNIST, or from disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from protocol.data import Part, Split, blurred, digits, glyphs, mnist, noisy, other_images, rotated, split

N_CLASSES = 7
ANGLES = (15.0, 30.0, 45.0, 60.0, 90.0, 120.0, 150.0, 180.0)
LEVELS = (1.0, 2.0, 3.0, 4.0, 5.0)


@dataclass(frozen=True)
class ShiftedTask:
    """A task.

    Attributes:
        parts: Training, validation and test data of the classes that are seen.
        shifted: The first test inputs by the intensity of a shift, of one or several kinds.
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


@dataclass(frozen=True)
class Sizes:
    """Of the parts.

    Attributes:
        train: Training data.
        validation: Validation data.
        test: Test data.
        shifted: Test data of every shift, and of every kind of other images.
    """

    train: int
    validation: int
    test: int
    shifted: int


def digit_glyphs(sizes: Sizes, n_pixels: int, noise: float, seed: int, warp: float = 1.0) -> Part:
    """As many glyphs of all ten digits as give parts of the sizes."""
    n_seen = sizes.train + sizes.validation + sizes.test
    return glyphs(round(1.1 * n_seen * 10 / N_CLASSES), n_pixels, seed=seed, noise=noise, warp=warp)


def seen_and_unseen(data: Part, sizes: Sizes, generator: torch.Generator) -> tuple[Split, Tensor]:
    """Parts of the classes that are seen, and images of the others. Of few data the parts are smaller in proportion."""
    seen = data.of_classes(range(N_CLASSES))
    wanted = sizes.train + sizes.validation + sizes.test
    share = min(1.0, len(seen) / wanted)
    parts = split(seen, (share * sizes.train / len(seen), share * sizes.validation / len(seen)), generator)
    unseen = data.of_classes(range(N_CLASSES, 10)).x
    return Split(parts.train, parts.validation, parts.test[: sizes.test]), unseen[: sizes.shifted]


def rotated_digits(data: Part, sizes: Sizes, seed: int) -> ShiftedTask:
    """Digits 0 to 6 with rotated test images; others are digits 7 to 9 and images that are no digits."""
    generator = torch.Generator().manual_seed(seed)
    parts, unseen = seen_and_unseen(data, sizes, generator)
    some = parts.test.x[: sizes.shifted]
    shifted = {angle: (rotated(some, angle),) for angle in ANGLES}
    return ShiftedTask(parts, shifted, {"unseen digits": unseen, **other_images(some, generator)})


REAL_SETS = ("scikit-learn's digits", "MNIST")


def real_sets(sizes: Sizes, n_pixels: int, noise: float, seed: int) -> dict[str, ShiftedTask]:
    """The same with scikit-learn's digits and, where they are installed, MNIST's, in the size of the glyphs."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, data in zip(REAL_SETS, (digits(), mnist()), strict=True):
        if data is not None:
            images = F.interpolate(data.x, (n_pixels, n_pixels), mode="bilinear", antialias=True)
            found[name] = rotated_digits(Part(noisy(images, noise, generator), data.y), sizes, seed)
    return found


def coloured(x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Grey images `[N, 1, H, W]` in random bright colours before smooth random dark ones, and the latter alone."""
    n_data, _, height, width = x.shape
    coarse = 0.7 * torch.rand(n_data, 3, 3, 3, generator=generator)
    background = F.interpolate(coarse, (height, width), mode="bilinear")
    colour = 0.3 + 0.7 * torch.rand(n_data, 3, 1, 1, generator=generator)
    return background * (1 - x) + colour * x, background


def coloured_digits(data: Part, sizes: Sizes, seed: int) -> ShiftedTask:
    """Coloured digits 0 to 6; shifts are noise and blur; others are digits 7 to 9, backgrounds, shuffled pixels."""
    generator = torch.Generator().manual_seed(seed)
    images, backgrounds = coloured(data.x, generator)
    parts, unseen = seen_and_unseen(Part(images, data.y), sizes, generator)
    some = parts.test.x[: sizes.shifted]
    shifted = {level: (noisy(some, 0.05 * level, generator), blurred(some, 0.2 + 0.15 * level)) for level in LEVELS}
    shuffled = other_images(some, generator)["shuffled"]
    others = {"unseen digits": unseen, "backgrounds": backgrounds[: sizes.shifted], "shuffled": shuffled}
    return ShiftedTask(parts, shifted, others)
