"""A width that follows the input: how far the inputs of a network's layers are from those of the training data.

The leverage of an input in a layer is aᵀ (A + ρ tr(A)/d)⁻¹ a, with the layer's inputs a and A = Σ a aᵀ over the
training data, up to a constant. r(x) is its mean over layers, in units of its median on held-out data: 1 for a typical
input, and large where inputs are long, or in directions that the training data do not have, as the variance of a
Gaussian process.

A `Tilt` is this distance with one factor c ≥ 0, which held-out data choose (not the scale of a covariance, which
`Calibration` calls c). At the typical input the network keeps its confidence. With the posterior's covariance Σ:

    f ~ N(f̂ / T, Σ),   T² = (1 + v) / (1 + c),   v = c r + max(0, r/r_far − 1)        (classes, labels)
    f ~ N(f̂, Σ + σ² v / (1 + c)),   noise σ² / (1 + c)                                (regression)

By the probit link the first says what N(s f̂, (1 + v) Σ + (8/π) v) says with s² = 1 + c, a posterior whose mean is off
the mode, and whose width grows with r as that of a Gaussian process. But a Gaussian's tails are lighter than those of
the logistic distribution that the probit stands for: samples of the second are surer than the network. So every link,
and every sample, has the first. In a regression T² scales the variance of y. Beyond r_far, farther than every held-out
input, T² grows with r whatever c is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core import linalg, nested
from laplace.core.gaussian import GaussianOutputs
from laplace.core.pieces import operations_are_dear
from laplace.core.precision_policy import widened
from laplace.engines.kron_parts import Factor, ThinFactor, dense
from laplace.errors import StateError, UnsupportedError
from laplace.likelihoods.base import Likelihood

RIDGE = 1e-3
"""ρ, of the mean square of the inputs' entries; from 10⁻⁴ to 10⁻² it makes no difference."""

WIDEST = 8192
"""Inputs of a layer beyond which it is left out: a square matrix of so many numbers is kept for every layer."""


def applies_to(likelihood: Likelihood) -> bool:
    """True of logits, whose size is a confidence, and of a regression with a noise."""
    return likelihood.activation is not None or likelihood.has_noise


_PANEL = 192
"""Rows of a triangle that are multiplied at once: of a wide one little more than half is."""


@dataclass(frozen=True, eq=False)
class Leverage:
    """Leverages of the inputs of one layer, ‖W a‖² with Wᵀ W = (A + ρ tr(A)/d)⁻¹ times a number."""

    layer: str  # Name of the module
    root: Tensor  # W, lower triangular, `[G, d, d]`

    @classmethod
    def from_moments(cls, layer: str, moments: Factor) -> Leverage | None:
        """From A of every group, `[G, d, d]`; None without data, of inputs that are all zero, and of wide layers."""
        width = moments.width if isinstance(moments, ThinFactor) else moments.shape[-1]
        if width > WIDEST:
            return None
        matrix = widened(dense(moments)).clone()  # of wide layers every copy costs as much as a product
        diagonal = matrix.diagonal(dim1=-2, dim2=-1)
        mean_square = diagonal.mean(-1, keepdim=True)
        if not bool((mean_square > 0).all() & mean_square.isfinite().all()):
            return None
        diagonal += RIDGE * mean_square
        triangles = linalg.cholesky(matrix)
        if triangles is None:  # of an assigned A that is no sum of squares
            return None
        return cls(layer, torch.stack([linalg.inverse_of_lower(triangle) for triangle in triangles]))

    def mean_over_positions(self, inputs: Tensor) -> Tensor:
        """The mean over positions of inputs `[B, T, G, d]`, `[B]`."""
        root = self.root
        if root.shape[0] == 1:
            return _squared_norms(root[0], inputs.to(root).squeeze(2)).mean(1)
        return torch.einsum("btgd,ged->btge", inputs.to(root), root).square().sum((2, 3)).mean(1)

    def scaled(self, factor: float) -> Leverage:
        """Leverages times a number."""
        return replace(self, root=self.root * math.sqrt(factor))

    def moved(self, device: torch.device | None, dtype: torch.dtype | None) -> Leverage:
        """The same elsewhere."""
        return replace(self, root=self.root.to(device=device, dtype=dtype))


def _squared_norms(lower: Tensor, x: Tensor) -> Tensor:
    """‖W x‖² of a lower triangular W `[d, d]`, of x `[..., d]`, at little more than half the cost of the product."""
    step = len(lower) if operations_are_dear(lower.device) else _PANEL
    parts = [
        (x[..., : start + step] @ lower[start : start + step, : start + step].T).square().sum(-1)
        for start in range(0, len(lower), step)
    ]
    return torch.stack(parts).sum(0)


@dataclass(frozen=True, eq=False)
class Tilt:
    """A width that follows the input, as above.

    Attributes:
        width: c.
        far: r_far.
        leverages: Those of every layer, in units in which r is their mean.
        nll: Mean negative log predictive density on the held-out data, of the network with this width.
        standard_error: Paired standard error of its difference from the network's.
    """

    width: float
    far: float
    leverages: tuple[Leverage, ...]
    nll: float
    standard_error: float

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers whose inputs are read."""
        return tuple(each.layer for each in self.leverages)

    def sentence(self, n_networks: int = 1) -> str:
        """What it does, in words; with others for the networks of a mixture."""
        count = len(self.leverages)
        layers = f"{count} layer{'s' * (count != 1)}" + f" of each of {n_networks} networks" * (n_networks > 1)
        if not self.width:
            return f"beyond r = {self.far:.3g} the width grows with the inputs of {layers}"
        return f"the width follows the inputs of {layers}, c = {self.width:.3g}, and more beyond r = {self.far:.3g}"

    def distance(self, inputs: Mapping[str, Tensor], n_rows: int | None = None) -> Tensor:
        """r of every row, `[R]`, of inputs of every layer `[B, T, G, d]`, whose rows or their data are B.

        A layer that the network did not call does not count.
        """
        parts = [each.mean_over_positions(inputs[each.layer]) for each in self.leverages if each.layer in inputs]
        if not parts:
            raise UnsupportedError(
                f"the network called none of the layers {list(self.layers)}, by whose inputs its predictions are "
                "calibrated, with inputs of one batch: set la.calibration = None, or calibrate anew."
            )
        r = torch.stack(parts).mean(0)
        return r if n_rows in (None, len(r)) else r.repeat_interleave(n_rows // len(r))

    def excess(self, r: Tensor) -> Tensor:
        """v, of the shape of r."""
        return self.width * r + (r / self.far - 1).clamp(min=0)

    # On moments of the outputs.

    def mean(self, likelihood: Likelihood, mean: Tensor, r: Tensor) -> Tensor:
        """The latents' mean, from the network's outputs `[..., R, C]`: logits at the temperature T(x)."""
        if likelihood.has_noise:
            return mean
        return mean * ((1 + self.width) / (1 + self.excess(r.to(mean)))).sqrt()[:, None]

    def noise(self, likelihood: Likelihood, sigma: Tensor) -> Tensor:
        """The noise that is left of σ: the rest is the latents' variance."""
        return sigma / math.sqrt(1 + self.width) if likelihood.has_noise else sigma

    def variance(self, likelihood: Likelihood, sigma: Tensor, r: Tensor) -> Tensor | None:
        """What becomes a variance of the latents of σ, that before `noise`: `[R, 1]` or `[R, C]`; None of logits."""
        if not likelihood.has_noise:
            return None
        return self.excess(r)[:, None] * (sigma.to(r).square() / (1 + self.width)).reshape(1, -1)

    def gaussian(self, likelihood: Likelihood, sigma: Tensor, r: Tensor, posterior: GaussianOutputs) -> GaussianOutputs:
        """The latents, from those of the posterior with its scaled covariance; between inputs it adds nothing."""
        covariance, n_outputs = posterior.covariance, posterior.mean.shape[1]
        own = self.variance(likelihood, sigma, r.to(covariance))
        if own is not None and posterior.is_diagonal:
            covariance = covariance + own
        elif own is not None:
            entries = own.expand(-1, n_outputs).reshape(covariance.shape[:-1])
            covariance = covariance + torch.diag_embed(entries)
        return replace(posterior, mean=self.mean(likelihood, posterior.mean, r), covariance=covariance)

    # States.

    def moved(self, device: torch.device | None, dtype: torch.dtype | None) -> Tilt:
        """The same elsewhere."""
        return replace(self, leverages=tuple(each.moved(device, dtype) for each in self.leverages))

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> Tilt:
        """That of a state, on a device.

        Raises:
            StateError: Numbers that no choice has.
        """
        found: Tilt = nested.from_state(cls, state)
        numbers_are_right = 0 <= found.width < math.inf and 0 < found.far < math.inf
        roots = [each.root for each in found.leverages]
        if not (numbers_are_right and roots and all(bool(nested.is_finite(root)) for root in roots)):
            raise StateError("the calibration's width by the input holds numbers that no choice has; it was changed.")
        for each in found.leverages:
            nested.require_sizes(
                f"the root of {each.layer!r}", each.root, None, each.root.shape[-1], each.root.shape[-1]
            )
        return found.moved(device, None)
