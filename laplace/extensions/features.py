"""Where the training data lie in the features of the last layer, class by class, and how far from them others are.

A scatter Σ (φ − μ)(φ − μ)ᵀ is kept by its eigenpairs, so that a distance takes products alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from laplace.core import eigen
from laplace.core.precision_policy import widened
from laplace.errors import InvalidData

_NEGLIGIBLE = 1e-12
"""Share of the features' squares within their classes that is rounding."""


@dataclass(frozen=True, eq=False)
class Scatter:
    """Σ (φ − μ)(φ − μ)ᵀ of n features, `[D, D]`, by r eigenpairs beside which all eigenvalues are 0."""

    values: Tensor  # `[r]`
    vectors: Tensor  # `[D, r]`

    @classmethod
    def of_matrix(cls, matrix: Tensor) -> Scatter:
        values, vectors = eigen.eigh(0.5 * (matrix + matrix.T))
        return cls(values.clamp(min=0), vectors)

    @classmethod
    def of_rows(cls, centred: Tensor) -> Scatter:
        """Of features less their mean, `[n, D]`."""
        _, roots, vectors = torch.linalg.svd(centred, full_matrices=False)
        return cls(roots.square(), vectors.T)

    def solved(self, vectors: Tensor, scale: Tensor | float, ridge: Tensor) -> Tensor:
        """(scale · S + ridge · I)⁻¹ v of vectors `[B, D]`."""
        inside = vectors @ self.vectors
        rest = vectors - inside @ self.vectors.T
        return (inside / (scale * self.values + ridge)) @ self.vectors.T + rest / ridge

    def shrunk(self, n: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and ridge of the covariance that n features lead to by oracle approximating shrinkage.

        It is (1 − ρ) S/n + ρ tr(S/n)/D with ρ of [Chen et al., 2010, eq. 23] without its terms 2/D, and exists with
        fewer features than dimensions.
        """
        width, values = len(self.vectors), self.values / n
        mean, square = values.sum() / width, values.square().sum() / width**2
        gap = ((n + 1) * (square - mean.square() / width)).clamp(min=0)
        share = ((square + mean.square()) / gap).clamp(max=1)
        return (1 - share) / n, share * mean


@dataclass(frozen=True, eq=False)
class FeatureStatistics:
    """Means and scatters of the training features φ `[D]`, float64; without labels of classes there is one class."""

    layer: str  # Name of the last layer in the network
    counts: Tensor  # Features of every class that has any, `[K]`
    means: Tensor  # `[K, D]`
    tied: Scatter  # Around the means of their classes
    by_class: tuple[Scatter, ...] = ()  # Of every class, where they were asked for

    def mahalanobis(self, features: Tensor) -> Tensor:
        """Squared distance to the nearest class with the covariance that all share (Lee et al., 2018), `[B]`."""
        scale, ridge = self.tied.shrunk(self.counts.sum())
        whitening = self.tied.vectors / (scale * self.tied.values + ridge).sqrt()  # `[D, D]`: a tied scatter has all
        centre = self.means.mean(0)
        points, means = (features - centre) @ whitening, (self.means - centre) @ whitening
        return torch.cdist(points, means, compute_mode="donot_use_mm_for_euclid_dist").square().amin(1)

    def classwise_mahalanobis(self, features: Tensor) -> Tensor:
        """The same with a covariance for every class, of those that have one, `[B]`."""
        distances = []
        for n, mean, scatter in zip(self.counts, self.means, self.by_class, strict=True):
            scale, ridge = scatter.shrunk(n)
            if bool(ridge > 0):
                offsets = features - mean
                distances.append((offsets * scatter.solved(offsets, scale, ridge)).sum(1))
        if not distances:
            raise InvalidData(
                "no class has training features that differ; use method='mahalanobis', or give more data."
            )
        return torch.stack(distances).amin(0)

    def classwise_leverage(self, features: Tensor, ridge: Tensor) -> Tensor:
        """Smallest leverage φᵀ (Σ φφᵀ + ridge · I)⁻¹ φ over the classes, with a 1 among the features, `[B]`.

        By the mean and the offset φ − μ from it, so that no two large numbers are subtracted.
        """
        leverages = []
        for n, mean, scatter in zip(self.counts, self.means, self.by_class, strict=True):
            offsets, solved_mean = features - mean, scatter.solved(mean.unsqueeze(0), 1.0, ridge)[0]
            own = (offsets * scatter.solved(offsets, 1.0, ridge)).sum(1)
            cross, of_mean = offsets @ solved_mean, mean @ solved_mean + 1 / ridge
            leverages.append(own + (of_mean + 2 * cross - n * cross.square()) / (1 + n * of_mean))
        return torch.stack(leverages).amin(0)


@dataclass(eq=False)
class FeatureSums:
    """Sums over training features, batch by batch; of every class's scatter only where `by_class`."""

    by_class: bool
    _shift: Tensor | None = None  # About the features' mean, so that no two large sums are subtracted
    _counts: Tensor = field(default_factory=lambda: torch.zeros(0))
    _sums: Tensor = field(default_factory=lambda: torch.zeros(0))
    _gram: Tensor = field(default_factory=lambda: torch.zeros(0))
    _rows: dict[int, Tensor] = field(default_factory=dict)

    def add(self, features: Tensor, labels: Tensor, n_classes: int) -> None:
        """Takes in features `[B, D]` with the classes `[B]` that they are of."""
        rows, width = widened(features), features.shape[1]
        if self._shift is None:
            self._shift = rows.mean(0)
            self._counts, self._sums = rows.new_zeros(n_classes), rows.new_zeros(n_classes, width)
            self._gram = rows.new_zeros(width, width)
        rows = rows - self._shift
        self._counts += torch.bincount(labels, minlength=n_classes).to(rows)
        self._sums.index_add_(0, labels, rows)
        self._gram += rows.T @ rows
        for label in labels.unique().tolist() if self.by_class else ():
            own = [self._rows[label]] if label in self._rows else []
            self._rows[label] = _no_longer_than_twice_its_width(torch.cat([*own, rows[labels == label]]))

    def statistics(self, layer: str) -> FeatureStatistics:
        """What the sums come to; of classes without data nothing."""
        if self._shift is None:
            raise InvalidData("train_loader gave no data, or all are ignored; give the data of the fit.")
        seen = self._counts > 0
        counts, means = self._counts[seen], self._sums[seen] / self._counts[seen].unsqueeze(1)
        tied = Scatter.of_matrix(self._gram - means.T @ (counts.unsqueeze(1) * means))
        if not bool(tied.values.sum() > _NEGLIGIBLE * self._gram.trace()):
            raise InvalidData("the features of the last layer are the same at all training data of a class.")
        by_class = []
        for label, n, mean in zip(seen.nonzero().flatten().tolist(), counts, means, strict=True):
            if self.by_class:
                rows = self._rows[label]
                raw = len(rows) == int(n) and len(rows) < rows.shape[1]
                matrix = rows - mean if raw else rows.T @ rows - n * torch.outer(mean, mean)
                by_class.append(Scatter.of_rows(matrix) if raw else Scatter.of_matrix(matrix))
        return FeatureStatistics(layer, counts, means + self._shift, tied, tuple(by_class))


def _no_longer_than_twice_its_width(rows: Tensor) -> Tensor:
    """The rows `[n, D]`, or where they are many a triangle `[D, D]` with the same sum of outer products."""
    return rows if len(rows) <= 2 * rows.shape[1] else torch.linalg.qr(rows, mode="r").R
