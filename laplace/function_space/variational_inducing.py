"""Inducing outputs: single outputs of the network at M locations, whose Jacobians carry a variational posterior."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.precision_policy import widened
from laplace.core.random_numbers import uniform
from laplace.engines.engine import CurvatureEngine
from laplace.errors import InvalidArgument, InvalidData
from laplace.jacobian.jacobian import Jacobian, Scales, kernel
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.labels import classes_of
from laplace.structures.gp.dual import Span, jacobians
from laplace.structures.gp.subset import Pool, joined

STRATEGIES = ("random", "kmeans")
"""How locations are chosen from the data."""

_CANDIDATES = 100
"""Data per centre that k-means looks at: a random sample of more says nothing new."""

_ROUNDS = 100


@dataclass(frozen=True, eq=False)
class Inducing(Span):
    """A = Lᵀ J_Z: the rows of J of the inducing outputs, mixed by a lower triangle.

    Attributes:
        parts: J_Z, with one cotangent.
        root: L, `[M, M]`, float64.
    """

    parts: tuple[Jacobian, ...]
    root: Tensor

    @cached_property
    def kernel(self) -> Tensor:
        """J_Z J_Zᵀ, `[M, M]`, float64, with the graph of the parts."""
        return torch.cat([self.cross(part)[:, 0] for part in self.parts])

    def cross(self, jacobian: Jacobian) -> Tensor:
        """J J_Zᵀ of B data, `[B, C, M]`, float64."""
        return torch.cat([kernel(jacobian, part)[..., 0] for part in self.parts], 2)

    def gram(self, weights: Tensor | None, scales: Scales) -> Tensor:
        """Lᵀ K L, `[M, M]`: the posterior is none of a prior per tensor, and L knows its weights."""
        return self.root.T @ self.kernel @ self.root

    def lift(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        return self.root.to(rows) @ rows

    def lower(self, outputs: Tensor, weights: Tensor | None) -> Tensor:
        return outputs.flatten(1) @ self.root.to(outputs)


@dataclass(frozen=True, eq=False)
class Places:
    """Locations of the inducing outputs.

    Attributes:
        x: Locations, inputs of M data.
        classes: Which output of each, `[M]`, or None for the first.
        labels: The targets that came with the locations, or None.
    """

    x: Inputs
    classes: Tensor | None = None
    labels: Tensor | None = None

    @property
    def trainable(self) -> bool:
        """True if the locations are real numbers that can be moved."""
        return isinstance(self.x, Tensor) and self.x.is_floating_point()

    def settled(self, f: Tensor, likelihood: Likelihood) -> Places:
        """The places with one output each, given the network's outputs there `[M, C]`.

        A class label names its output, a soft one that of its most probable class; data of other targets take the
        outputs in turn.

        Raises:
            InvalidArgument: The classes do not fit the locations or the outputs.
        """
        count, n_outputs = f.shape
        classes = self.classes
        if classes is None and self.labels is not None:
            hard = classes_of(widened(self.labels), likelihood)
            labels = self.labels if hard is None else hard
            named = labels.ndim == 1 and not labels.is_floating_point() and labels.amax() < n_outputs
            classes = labels if named else torch.arange(count) % n_outputs
        if classes is None:
            classes = torch.zeros(count)
        classes = classes.to(device=f.device, dtype=torch.long)
        if len(classes) != count:
            raise InvalidArgument(f"inducing_classes has {len(classes)} entries for {count} inducing locations.")
        if not bool(((classes >= 0) & (classes < n_outputs)).all()):
            raise InvalidArgument(
                f"inducing_classes lie between {int(classes.min())} and {int(classes.max())}; the network has "
                f"{n_outputs} outputs, 0 to {n_outputs - 1}."
            )
        return Places(self.x, classes)


def inducing_jacobians(engine: CurvatureEngine, places: Places, *, create_graph: bool = False) -> tuple[Jacobian, ...]:
    """J_Z, one cotangent; with `create_graph` it can be differentiated with respect to the locations."""
    parts: list[Jacobian] = []
    start = 0
    for jacobian, f in jacobians(engine, places.x, create_graph=create_graph):
        stop = start + len(f)
        rows = jacobian.select_outputs(_classes(places)[start:stop].unsqueeze(1))
        parts.append(rows if create_graph else rows.detached())
        start = stop
    return tuple(parts)


def _classes(places: Places) -> Tensor:
    """The outputs.

    Raises:
        InvalidArgument: They are not settled.
    """
    if places.classes is None:
        raise InvalidArgument("the inducing outputs are not settled.")
    return places.classes


# Choices among the data.


def make_pool(strategy: str, count: int, generator: torch.Generator) -> Pool:
    """Pool of the data that a strategy chooses from."""
    return Pool(count * (_CANDIDATES if strategy == "kmeans" else 1), lambda x, y: uniform((len(y),), y, generator))


def chosen(strategy: str, count: int, pool: Pool, generator: torch.Generator) -> Places:
    """M places among the data of a pool.

    Raises:
        InvalidData: Fewer than M data, or data of several shapes.
        InvalidArgument: K-means of inputs that are no real vectors.
    """
    pool.size = count if pool.seen < count else min(pool.size, pool.seen)
    whole = None
    for rows in pool.chunks():
        both = rows if whole is None else joined(whole, rows, pool.size)
        if both is None:
            raise InvalidData(
                f"inducing_locations={strategy!r} needs inputs of one shape; give the locations themselves."
            )
        whole = both
    if whole is None:
        raise InvalidData("no data were read.")
    if strategy == "random":
        return Places(whole.x, labels=whole.y)
    if not isinstance(whole.x, Tensor) or not whole.x.is_floating_point():
        raise InvalidArgument(
            "inducing_locations='kmeans' averages inputs, which takes a tensor of real numbers; use 'random', or give "
            "the locations themselves."
        )
    points = widened(whole.x.flatten(1))
    centres = k_means(points, count, generator)
    nearest = torch.cdist(centres, points).argmin(1)
    return Places(centres.to(whole.x.dtype).view(count, *whole.x.shape[1:]), labels=whole.y[nearest])


def k_means(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Centres `[M, D]` of points `[n, D]`: Lloyd's algorithm from the start of Arthur and Vassilvitskii (2007).

    Args:
        points: float64.
        count: M.
        generator: Source of the start.
    """
    # Every further centre is drawn with the squared distance from the nearest one before as its weight.
    picks = uniform((count,), points, generator)
    centres = points[(picks[:1] * len(points)).long()]
    for pick in picks[1:]:
        weights = torch.cdist(points, centres).amin(1).square()
        reached = weights.cumsum(0)
        place = torch.searchsorted(reached, pick * reached[-1], right=True).clamp(max=len(points) - 1)
        centres = torch.cat([centres, points[place].unsqueeze(0)])
    former = torch.full((len(points),), -1, device=points.device)
    for _ in range(_ROUNDS):
        nearest = torch.cdist(points, centres).argmin(1)
        if torch.equal(nearest, former):
            break
        former = nearest
        counts = torch.bincount(nearest, minlength=count).unsqueeze(1)
        sums = torch.zeros_like(centres).index_add(0, nearest, points)
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
    return centres
