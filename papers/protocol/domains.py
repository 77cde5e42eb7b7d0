"""Tasks whose test data come from the domains of the training data and from others, as those of WILDS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from protocol.data import Part


@dataclass(frozen=True)
class Sizes:
    """Numbers of data.

    Attributes:
        train: To train on.
        validation: Of the same domains.
        test: Of the same domains, and as many of others.
    """

    train: int
    validation: int
    test: int

    @property
    def known(self) -> int:
        """Data of the domains that are trained on."""
        return self.train + self.validation + self.test


@dataclass(frozen=True)
class Domains:
    """Data of a task.

    Attributes:
        train: To train on.
        validation: Of the same domains.
        known: Test data of the same domains.
        unknown: Test data of others.
    """

    train: Part
    validation: Part
    known: Part
    unknown: Part

    @classmethod
    def of(cls, known: Part, unknown: Part, sizes: Sizes) -> Domains:
        """Parts of data that are in random order."""
        end = sizes.train + sizes.validation
        return cls(known[: sizes.train], known[sizes.train : end], known[end:], unknown)

    @classmethod
    def read(cls, path: Path) -> Domains:
        """From an `.npz` with `x_` and `y_` of `train`, `validation`, `known` and `unknown`."""
        with np.load(path) as arrays:
            parts = [
                Part(torch.tensor(arrays[f"x_{part}"]), torch.tensor(arrays[f"y_{part}"]))
                for part in ("train", "validation", "known", "unknown")
            ]
        return cls(*parts)


@dataclass(frozen=True)
class DomainTask:
    """A task, its sibling for training before, and the network for both.

    Attributes:
        name: Of WILDS' data set, of which the shape is.
        likelihood: "classification" or "regression".
        n_outputs: Classes, or 1.
        n_sibling_outputs: Those of the sibling.
        structure: Of the last layer's curvature: "kron" where it is large (C.3).
        make: Data from sizes and a generator.
        make_sibling: Data of the sibling from their number and a generator.
        network: From example inputs, the number of outputs and a seed; its last module is the head.
    """

    name: str
    likelihood: Literal["classification", "regression"]
    n_outputs: int
    n_sibling_outputs: int
    structure: Literal["full", "kron"]
    make: Callable[[Sizes, torch.Generator], Domains]
    make_sibling: Callable[[int, torch.Generator], Part]
    network: Callable[[Tensor, int, int], nn.Sequential]
