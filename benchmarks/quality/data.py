"""Data sets that come with scikit-learn or are generated, split by a seed into training, validation and test data.

Inputs are standardised by the training data. Inputs that belong to no class are Gaussian noise of three times the
spread of the training data, but for digits, whose classes 8 and 9 no network sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
Array = Any
"""A NumPy array."""


@dataclass(frozen=True)
class Split:
    """The data of one run.

    Attributes:
        train: Inputs `[N, ...]` and labels `[N]` or targets `[N, 1]`, on which the network is trained and fitted.
        val: The same, for early stopping, temperature scaling and calibration.
        test: The same, for scores alone.
        shifts: Test data whose inputs were changed, by the name of the change; nothing is chosen on them.
        unseen: Inputs that belong to no class of the training data, `[M, ...]`; None in a regression.
    """

    train: Pair
    val: Pair
    test: Pair
    shifts: dict[str, Pair] = field(default_factory=dict)
    unseen: Tensor | None = None

    @property
    def n_outputs(self) -> int:
        """Number of classes C, or of targets."""
        y = self.train[1]
        return y.shape[1] if y.ndim == 2 else int(max(part[1].max() for part in (self.train, self.val, self.test))) + 1

    @property
    def is_regression(self) -> bool:
        """Whether targets are real."""
        return self.train[1].is_floating_point()


def cut(x: Array, y: Array, sizes: tuple[int, int, int], rng: np.random.Generator) -> list[tuple[Array, Array]]:
    """Training, validation and test data of these sizes, without overlap, from data in a random order."""
    if sum(sizes) > len(x):
        raise ValueError(f"{sizes} are more than the {len(x)} data there are")
    order = rng.permutation(len(x))
    ends = np.cumsum((0, *sizes))
    return [(x[order[a:b]], y[order[a:b]]) for a, b in pairwise(ends)]


def tensors(x: Array, y: Array) -> Pair:
    """Inputs in float32, labels as integers `[N]` or targets `[N, 1]` in float32."""
    labels = torch.as_tensor(y)
    kept = labels.float().unsqueeze(1) if labels.is_floating_point() else labels.long()
    return torch.as_tensor(x, dtype=torch.float32), kept


# Tables.


def table(x: Array, y: Array, sizes: tuple[int, int, int], seed: int) -> Split:
    """A table of numbers, standardised; shifted by noise on the inputs of half and of the whole spread of the data."""
    rng = np.random.default_rng(seed)
    train, val, test = cut(x, y, sizes, rng)
    mean, spread = train[0].mean(0), train[0].std(0) + 1e-8

    def scaled(part: tuple[Array, Array]) -> tuple[Array, Array]:
        return (part[0] - mean) / spread, part[1]

    train, val, test = scaled(train), scaled(val), scaled(test)
    if np.issubdtype(y.dtype, np.floating):
        centre, scale = train[1].mean(), train[1].std()
        parts = [tensors(x, (y - centre) / scale) for x, y in (train, val, test)]
        return Split(parts[0], parts[1], parts[2])
    shifts = {
        f"noise {width:g}": tensors(test[0] + width * rng.standard_normal(test[0].shape), test[1])
        for width in (0.5, 1.0)
    }
    unseen = torch.as_tensor(3.0 * rng.standard_normal((500, x.shape[1])), dtype=torch.float32)
    return Split(tensors(*train), tensors(*val), tensors(*test), shifts, unseen)


def _loaded(name: str) -> tuple[Array, Array]:
    from sklearn import datasets

    return getattr(datasets, f"load_{name}")(return_X_y=True)


def wine(seed: int) -> Split:
    """178 wines of three cultivars, 13 measurements."""
    return table(*_loaded("wine"), (100, 28, 50), seed)


def breast_cancer(seed: int) -> Split:
    """569 tumours, benign or malignant, 30 measurements."""
    return table(*_loaded("breast_cancer"), (295, 74, 200), seed)


def iris(seed: int) -> Split:
    """150 irises of three species, 4 measurements."""
    return table(*_loaded("iris"), (70, 25, 55), seed)


def moons(seed: int, n_val: int = 60) -> Split:
    """Two half circles that overlap, in the plane."""
    from sklearn.datasets import make_moons

    return table(*make_moons(140 + n_val + 1000, noise=0.3, random_state=seed), (140, n_val, 1000), seed)


def flipped(seed: int, n_val: int = 100) -> Split:
    """Two classes in 20 dimensions; a fifth of the labels were drawn at random."""
    from sklearn.datasets import make_classification

    x, y = make_classification(300 + n_val + 1000, 20, n_informative=6, flip_y=0.2, random_state=seed)
    return table(x, y, (300, n_val, 1000), seed)


def imbalanced(seed: int, n_val: int = 100) -> Split:
    """Three classes of 80, 15 and 5 per cent in 10 dimensions."""
    from sklearn.datasets import make_classification

    x, y = make_classification(
        300 + n_val + 1000, 10, n_informative=5, n_classes=3, weights=[0.8, 0.15], class_sep=0.8, random_state=seed
    )
    return table(x, y, (300, n_val, 1000), seed)


def waveform(seed: int, n_val: int = 100) -> Split:
    """Three classes of noisy waves, 21 measurements (Breiman et al., 1984)."""
    rng = np.random.default_rng(1000 + seed)
    places = np.arange(1, 22)
    waves = [np.maximum(6 - np.abs(places - centre), 0) for centre in (11, 7, 15)]
    n = 300 + n_val + 1000
    y, share = rng.integers(3, size=n), rng.random((n, 1))
    pairs = np.array([(0, 1), (0, 2), (1, 2)])[y]
    x = share * np.stack(waves)[pairs[:, 0]] + (1 - share) * np.stack(waves)[pairs[:, 1]]
    return table(x + rng.standard_normal(x.shape), y, (300, n_val, 1000), seed)


def cover_types(seed: int, n_val: int = 200) -> Split:
    """Seven uneven classes of several clusters each, 10 numbers and 20 zeros or ones, like those of forest covers."""
    from sklearn.datasets import make_classification

    made: Any = make_classification(
        1000 + n_val + 1000, 30, n_informative=12, n_redundant=6, n_classes=7, n_clusters_per_class=3, flip_y=0.05,
        weights=[0.36, 0.3, 0.1, 0.08, 0.07, 0.05], class_sep=1.5, random_state=seed,
    )  # fmt: skip
    x, y = made
    x[:, 10:] = x[:, 10:] > 0
    return table(x, y, (1000, n_val, 1000), seed)


# Images.


def rotated(images: Tensor, degrees: float) -> Tensor:
    """Images `[N, 1, H, W]` turned about their centre, with bilinear interpolation, black outside."""
    angle = math.radians(degrees)
    turn = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
    size = list(images.shape)
    grid = torch.nn.functional.affine_grid(turn.expand(len(images), 2, 3), size, align_corners=False)
    return torch.nn.functional.grid_sample(images, grid, align_corners=False)


def noisy(images: Tensor, width: float, seed: int) -> Tensor:
    """Images with Gaussian noise of this standard deviation."""
    return images + width * torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))


def images(
    x: Tensor, y: Tensor, sizes: tuple[int, int, int], seed: int, *, noise: float = 0.0, flat: bool = False
) -> Split:
    """Images `[N, 1, H, W]` of digits: 0 to 7 are split, 8 and 9 are unseen; shifted by rotation and by noise.

    Args:
        x: Images, values between 0 and 1.
        y: Digits `[N]`.
        sizes: Of training, validation and test data; the last at most.
        seed: Of the split and of the noise.
        noise: Standard deviation of noise that all images have, those of the training data too.
        flat: Whether a row of pixels is wanted, `[N, H·W]`.
    """
    rng = np.random.default_rng(seed)
    known = (y < 8).nonzero().flatten().numpy()
    sizes = (*sizes[:2], min(sizes[2], len(known) - sizes[0] - sizes[1]))
    places = [torch.as_tensor(part) for part, _ in cut(known, known, sizes, rng)]
    other = (y >= 8).nonzero().flatten()

    def made(change: Callable[[Tensor], Tensor], where: Tensor, number: int) -> Tensor:
        changed = noisy(change(x[where]), noise, 10 * seed + number) if noise else change(x[where])
        return changed.flatten(1) if flat else changed

    def as_is(images: Tensor) -> Tensor:
        return images

    train, val, test = ((made(as_is, where, number), y[where]) for number, where in enumerate(places))
    shifts = {f"rotation {angle}": (made(lambda z: rotated(z, angle), places[2], 3), test[1]) for angle in (20, 40)}  # noqa: B023
    shifts["noise 0.3"] = (made(lambda z: noisy(z, 0.3, seed), places[2], 4), test[1])
    return Split(train, val, test, shifts, made(as_is, other, 5))


def digits(seed: int, n_val: int = 200, noise: float = 0.0, flat: bool = True) -> Split:
    """1,797 images of digits, 8 × 8 pixels."""
    x, y = _loaded("digits")
    pixels = torch.as_tensor(x, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return images(pixels, torch.as_tensor(y), (600, n_val, 633), seed, noise=noise, flat=flat)


# Regressions.


def diabetes(seed: int) -> Split:
    """442 patients, 10 measurements; the progression of the disease."""
    return table(*_loaded("diabetes"), (240, 82, 120), seed)


def friedman(seed: int) -> Split:
    """Friedman's first function of 10 inputs with noise of 1."""
    from sklearn.datasets import make_friedman1

    return table(*make_friedman1(1300, noise=1.0, random_state=seed), (300, 100, 900), seed)


def housing(seed: int) -> Split:
    """A skewed price, capped above, of 8 inputs, with noise that grows with it."""
    rng = np.random.default_rng(2000 + seed)
    x = rng.standard_normal((1500, 8))
    x[:, 0] = np.exp(0.6 * x[:, 0])
    level = np.exp(0.5 * np.log(x[:, 0]) + 0.4 * np.sin(x[:, 1]) + 0.3 * x[:, 2] * x[:, 3] - 0.2 * np.abs(x[:, 4]))
    return table(x, np.minimum(level * np.exp(0.25 * rng.standard_normal(1500)), 4.0), (500, 150, 850), seed)


def sine(seed: int) -> Split:
    """A noisy sine of one input, with no training data in the middle."""
    rng = np.random.default_rng(3000 + seed)
    side = rng.choice([-1.0, 1.0], 1100)
    x = (side * rng.uniform(1.0, 4.0, 1100))[:, None]
    return table(x, np.sin(2 * x[:, 0]) + 0.3 * rng.standard_normal(1100), (150, 50, 900), seed)
