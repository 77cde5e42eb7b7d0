"""The rows of the table: a data set, a network, and how it is trained."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.quality import data
from benchmarks.quality.data import Split
from benchmarks.quality.networks import Made, cnn, head, mlp, small_mlp

KRON = ("last layer, kron", "all weights, kron")
WITH_FULL = (*KRON, "last layer, full")
SMALL = (*WITH_FULL, "all weights, full")


@dataclass(frozen=True)
class Row:
    """A data set and a network.

    Attributes:
        name: Of the row.
        network: The network, in words.
        split: The data of a seed.
        make: Makes the network.
        posteriors: Keys of `methods.POSTERIORS`.
        options: Of `networks.trained`.
        refits: Whether the network is a head on features that have not seen the labels, which `calibrate` refits
            where it has no validation data.
    """

    name: str
    network: str
    split: Callable[[int], Split]
    make: Made = mlp
    posteriors: tuple[str, ...] = WITH_FULL
    options: dict[str, Any] = field(default_factory=dict)
    refits: bool = False


def mnist(seed: int) -> Split:
    """1,000 images of MNIST, 28 × 28 pixels."""
    from examples import pretrained_data

    pixels, labels = pretrained_data.mnist()
    return data.images(pixels.unsqueeze(1).float() / 255, labels, (1000, 300, 1000), seed)


def efficientnet(seed: int) -> Split:
    """Features of 600 images of MNIST by an EfficientNet that was trained on ImageNet alone."""
    from examples import pretrained_data

    features, labels = pretrained_data.efficientnet_features()
    known = (labels < 8).nonzero().flatten().numpy()
    parts = data.cut(known, known, (600, 300, 1000), np.random.default_rng(seed))
    train, val, test = ((features[where], labels[where]) for where, _ in parts)
    shifts = {name: (made[parts[2][0]], test[1]) for name, made in _shifted_features().items()}
    return Split(train, val, test, shifts, features[labels >= 8])


@lru_cache(maxsize=1)
def _shifted_features() -> dict[str, Tensor]:
    """Features of rotated and of noisy images, `[5000, 1280]`, kept beside those of `pretrained_data`."""
    from examples import pretrained_data

    path = Path(tempfile.gettempdir()) / "laplace-pretrained" / "efficientnet_lite0_mnist_64_shifted.pt"
    if not path.exists():
        pixels = pretrained_data.mnist()[0].unsqueeze(1).float() / 255
        changed = {"rotation 20": data.rotated(pixels, 20.0), "noise 0.3": data.noisy(pixels, 0.3, 0)}
        network = pretrained_data.efficientnet()
        found = {
            name: pretrained_data.features(network, (image.squeeze(1).clamp(0, 1) * 255).byte())
            for name, image in changed.items()
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{torch.randint(2**31, ()).item()}")
        torch.save(found, unfinished)
        unfinished.replace(path)
    return torch.load(path, weights_only=True)


MLP, SMALL_MLP = "MLP 64-64", "MLP 32-32"
HEAD = {"epochs": 300, "patience": 0, "lr": 3e-3, "batch_size": 200}
"""To the end, as the heads of frozen networks are trained: the weights of the last epoch."""

CLASSIFICATION = (
    Row("digits", MLP, data.digits),
    Row("noisy digits", MLP, partial(data.digits, noise=0.4)),
    Row(
        "digits, augmented", "CNN, BatchNorm", partial(data.digits, flat=False), cnn,
        options={"augment": True, "epochs": 60},
    ),
    Row("MNIST 1,000", "CNN, BatchNorm", mnist, cnn, options={"epochs": 12, "patience": 4}),
    *(
        Row(
            f"MNIST 600, weight decay {decay:g}", "head of a frozen EfficientNet", efficientnet, head,
            ("last layer, kron",), {**HEAD, "weight_decay": decay}, refits=True,
        )
        for decay in (0.0, 0.001, 0.01)
    ),
    Row("waveform", MLP, data.waveform),
    Row("cover types", MLP, data.cover_types),
    Row("flipped labels", MLP, data.flipped),
    Row("imbalanced", MLP, data.imbalanced),
    Row("breast cancer", MLP, data.breast_cancer),
    Row("moons", SMALL_MLP, data.moons, small_mlp, SMALL),
    Row("wine", SMALL_MLP, data.wine, small_mlp, SMALL),
    Row("iris", SMALL_MLP, data.iris, small_mlp, SMALL),
)  # fmt: skip


def boston(seed: int) -> Split:
    """506 districts of Boston, 13 measurements; the median price of a house."""
    from mlxtend.data import boston_housing_data

    x, y = boston_housing_data()
    return data.table(x.astype(float), y.astype(float), (280, 90, 136), seed)


def auto_mpg(seed: int) -> Split:
    """392 cars, 7 measurements; miles per gallon."""
    from mlxtend.data import autompg_data

    x, y = autompg_data()
    return data.table(np.asarray(x, float)[:, :7], np.asarray(y, float), (220, 70, 102), seed)


REGRESSION = (
    Row("diabetes", MLP, data.diabetes),
    Row("Friedman 1", MLP, data.friedman),
    Row("housing-like", MLP, data.housing),
    Row("sine with a gap", SMALL_MLP, data.sine, small_mlp, SMALL),
    Row("auto-mpg", MLP, auto_mpg),
    Row("Boston", MLP, boston),
)
ROWS = {row.name: row for row in (*CLASSIFICATION, *REGRESSION)}
