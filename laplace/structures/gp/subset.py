"""Data that a function-space posterior keeps: the best M of a stream by a score, read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.positions import require_none
from laplace.core.precision_policy import widened
from laplace.core.random_numbers import uniform
from laplace.engines.engine import CurvatureEngine, outputs
from laplace.errors import InvalidArgument, InvalidData
from laplace.jacobian.jacobian import kernel_at
from laplace.structures.gp.observed import POSITIONS, observed

SELECTIONS = ("random", "top", "leverage")
"""Names of the scores."""

Score = Callable[[Inputs, Tensor], Tensor]
"""Scores of the data of a batch, `[B]`: large is kept."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Some data of one batch.

    Attributes:
        x: Inputs of n data.
        y: Targets.
        scores: `[n]`, float64.
        batches: Numbers of the batches that they are from, for messages.
    """

    x: Inputs
    y: Tensor
    scores: Tensor
    batches: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.y)

    def where(self, keep: Tensor) -> Rows:
        """The rows of a mask `[n]`."""
        return Rows(batches.select(self.x, keep, len(self)), self.y[keep], self.scores[keep], self.batches)


class Pool:
    """The M data with the largest scores of all that were read, in the order in which they came.

    With random scores this is a sample without replacement, however many data there are, read once.

    Args:
        size: M.
        score: The scores of a batch.
        balanced: Whether class labels take turns: first the best datum of every class, then the second.
    """

    def __init__(self, size: int, score: Score, *, balanced: bool = False) -> None:
        self.size = size
        self.score = score
        self.balanced = balanced
        self.seen = 0
        self._read = 0
        self._rows: list[Rows] = []
        self._longest = 1

    def add(self, x: Inputs, y: Tensor) -> None:
        """Takes in a batch."""
        scores = widened(self.score(x, y))
        if not bool(scores.isfinite().all()):
            raise InvalidData("the scores of the data are not finite; the inputs or weights hold NaN or infinity.")
        self._rows.append(Rows(x, y, scores, (self._read,)))
        self.seen += len(y)
        self._read += 1
        self._longest = max(self._longest, len(y))
        counts = [len(rows) for rows in self._rows]
        if sum(counts) <= self.size:
            # Whole batches are copied: a loader may fill the same tensors anew.
            x = batches.transform(x, torch.clone)
            self._rows[-1] = Rows(x, y.clone(), scores, self._rows[-1].batches)
            return
        # A stable order: of equal scores the earlier datum stays.
        order = torch.cat([rows.scores for rows in self._rows]).sort(descending=True, stable=True).indices
        if self.balanced:
            order = order[_turns(torch.cat([rows.y for rows in self._rows])[order]).sort(stable=True).indices]
        keep = torch.zeros(len(order), dtype=torch.bool, device=order.device)
        keep[order[: self.size]] = True
        best = [rows.where(mask) for rows, mask in zip(self._rows, keep.split(counts), strict=True)]
        self._rows = [rows for rows in best if len(rows)]

    def chunks(self) -> Iterator[Rows]:
        """The data, in pieces no longer than the longest batch.

        Raises:
            InvalidData: Fewer data were read than are to be kept.
        """
        if self.seen < self.size:
            raise InvalidData(
                f"{self.size} data are to be kept, but the loader gave only {self.seen}; give a smaller "
                "n_subset (subsample_size, num_inducing)."
            )
        pending: Rows | None = None
        for rows in self._rows:
            both = None if pending is None else joined(pending, rows, self._longest)
            if both is None and pending is not None:
                yield pending
            pending = both or rows
        if pending is not None:
            yield pending


def _turns(labels: Tensor) -> Tensor:
    """Number of data of the same class before each label, `[n]`.

    A datum that is left out once stays so: whatever comes later never leaves fewer in front of it.
    """
    turns = torch.zeros_like(labels)
    for label in labels.unique():
        same = labels == label
        turns[same] = torch.arange(int(same.sum()), device=labels.device)
    return turns


def joined(first: Rows, second: Rows, longest: int) -> Rows | None:
    """Both, or None where their inputs have other shapes or parts that are no rows, or they are too many."""
    if len(first) + len(second) > longest or type(first.x) is not type(second.x):
        return None
    ours, theirs = batches.tensors(first.x), batches.tensors(second.x)
    if len(ours) != len(theirs) or first.y.shape[1:] != second.y.shape[1:]:
        return None
    for a, b in zip(ours, theirs, strict=True):
        rows = a.ndim and b.ndim and len(a) == len(first) and len(b) == len(second)
        if not rows or a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
            return None
    following = iter(theirs)
    x = batches.transform(first.x, lambda tensor: torch.cat([tensor, next(following)]))
    scores = torch.cat([first.scores, second.scores])
    return Rows(x, torch.cat([first.y, second.y]), scores, (*first.batches, *second.batches))


def make_score(selection: str, engine: CurvatureEngine, generator: torch.Generator) -> Score:
    """A score by its name.

    Args:
        selection: `"random"`; `"top"`: tr Λ_n, the criterion of Pan et al. (2020, "Continual deep learning by
            functional regularisation of memorable past"), which takes a forward pass of all data; `"leverage"`:
            tr(Λ_n J_n J_nᵀ), which takes their Jacobians.
        engine: Knows the network.
        generator: Source of random scores.

    Raises:
        InvalidArgument: Another name, or a criterion that is the same for all data.
    """
    if selection == "random":
        return lambda x, y: uniform((len(y),), y, generator)
    if selection == "top":
        if engine.likelihood.has_noise:
            raise InvalidArgument(
                "selection='top' ranks data by their output Hessian, which is constant for a regression; use "
                "'leverage' or 'random'."
            )
        return lambda x, y: _trace(engine, x, y)
    if selection == "leverage":
        return lambda x, y: _leverage(engine, x, y)
    raise InvalidArgument(f"selection={selection!r}; accepted are {list(SELECTIONS)}.")


def _trace(engine: CurvatureEngine, x: Inputs, y: Tensor) -> Tensor:
    rows = outputs(engine, x)
    require_none(rows.positions, *POSITIONS)
    f = rows.values
    y = engine.checked(f, y)
    return engine.likelihood.hessian(f, y).diagonal().sum(1)


def _leverage(engine: CurvatureEngine, x: Inputs, y: Tensor) -> Tensor:
    scores: list[Tensor] = []
    for jacobian, f, targets in observed(engine, x, y):
        hessian = widened(engine.likelihood.hessian(f, targets).matrix())
        scores.append((kernel_at(jacobian) * hessian).sum((1, 2)))
    return torch.cat(scores)
