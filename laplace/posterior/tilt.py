"""A width that follows the input: how far the inputs of a network's layers are from those of the training data.

The leverage of an input in a layer is aᵀ (A + ρ tr(A)/d)⁻¹ a, with the layer's inputs a and A = Σ a aᵀ over the
training data, up to a constant. r(x) is its mean over layers, in units of its median on held-out data: 1 for a typical
input, and large where inputs are long, or in directions that the training data do not have, as the variance of a
Gaussian process.

It enters as a posterior whose mean is off the mode, so that the typical input keeps the network's confidence:

    f ~ N(s f̂, (8/π) v K),   s² = 1 + c,   v = c r + max(0, r/r_far − 1)        (classes, labels)
    f ~ N(f̂, σ² v / (1 + c)),   noise σ² / (1 + c)                              (regression)

With K = 1 on the diagonal and 1/C elsewhere every logit, and its difference from the mean of the others, has the
variance (8/π) v, so that both probit links say the softmax at the temperature T(x)² = (1 + v) / (1 + c), and samples
nearly so, whatever C is. In a regression T(x)² scales the variance of y. Beyond r_far, farther than every held-out
input, T² grows with r whatever c is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core import nested
from laplace.core.gaussian import Gaussian
from laplace.core.precision_policy import widened
from laplace.engines.kron_parts import Factor, ThinFactor, dense
from laplace.errors import StateError, UnsupportedError
from laplace.likelihoods.base import Likelihood

RIDGE = 1e-3
"""ρ, of the mean square of the inputs' entries; from 10⁻⁴ to 10⁻² it makes no difference."""

WIDEST = 8192
"""Inputs of a layer beyond which it is left out: a square matrix of so many numbers is kept for every layer."""

_PROBIT = 8 / math.pi


def applies_to(likelihood: Likelihood) -> bool:
    """True of logits, whose size is a confidence, and of a regression with a noise."""
    return likelihood.activation is not None or likelihood.has_noise


@dataclass(frozen=True, eq=False)
class Leverage:
    """Leverages of the inputs of one layer, ‖W a‖² with Wᵀ W = (A + ρ tr(A)/d)⁻¹ times a number."""

    layer: str  # Name of the module
    root: Tensor  # W, `[G, d, d]`

    @classmethod
    def of(cls, layer: str, moments: Factor) -> Leverage | None:
        """From A of every group, `[G, d, d]`; None without data, of inputs that are all zero, and of wide layers."""
        width = moments.width if isinstance(moments, ThinFactor) else moments.shape[-1]
        if width > WIDEST:
            return None
        matrix = widened(dense(moments))
        mean_square = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
        if not bool((mean_square > 0).all() & mean_square.isfinite().all()):
            return None
        eye = torch.eye(width, dtype=matrix.dtype, device=matrix.device)
        triangle, failed = torch.linalg.cholesky_ex(matrix + RIDGE * mean_square[:, None, None] * eye)
        if bool(failed.any()):  # of an assigned A that is no sum of squares
            return None
        return cls(layer, torch.linalg.solve_triangular(triangle, eye.expand_as(triangle), upper=False))

    def at(self, inputs: Tensor) -> Tensor:
        """The mean over positions of inputs `[B, T, G, d]`, `[B]`."""
        root = self.root
        if root.shape[0] == 1:
            moved = inputs.to(root).squeeze(2) @ root[0].T
            return moved.square().sum(-1).mean(1)
        return torch.einsum("btgd,ged->btge", inputs.to(root), root).square().sum((2, 3)).mean(1)

    def scaled(self, factor: float) -> Leverage:
        """Leverages times a number."""
        return replace(self, root=self.root * math.sqrt(factor))

    def moved(self, device: torch.device | None, dtype: torch.dtype | None) -> Leverage:
        """The same elsewhere."""
        return replace(self, root=self.root.to(device=device, dtype=dtype))


@dataclass(frozen=True, eq=False)
class Widening:
    """What a width makes of covariances of the outputs at some inputs."""

    inflation: Tensor  # Factor of the posterior's covariance, `[B]`
    own: Tensor  # Variances of its own, `[B, 1]` or `[B, C]`
    correlation: float  # Of its own, between outputs

    def covariance(self, covariance: Tensor, *, diagonal: bool, centred: bool = False) -> Tensor:
        """Of variances `[..., B, C]`, also those of outputs less their mean, or of covariances `[..., B, C, C]`."""
        if diagonal:
            share = (1 - self.correlation) * (1 - 1 / covariance.shape[-1]) if centred else 1.0
            return self.inflation[:, None] * covariance + share * self.own
        return self.inflation[:, None, None] * covariance + self._blocks(covariance.shape[-1])

    def between(self, covariance: Tensor, n_outputs: int) -> Tensor:
        """Of covariances between inputs, `[B·C, B·C]` or `[B/n, n·C, n·C]`."""
        groups = covariance.reshape(-1, *covariance.shape[-2:])
        roots = self.inflation.sqrt().repeat_interleave(n_outputs).view(len(groups), -1)
        own = [torch.block_diag(*each) for each in self._blocks(n_outputs).unflatten(0, (len(groups), -1))]
        return (roots.unsqueeze(2) * groups * roots.unsqueeze(1) + torch.stack(own)).view_as(covariance)

    def _blocks(self, n_outputs: int) -> Tensor:
        """Its own covariances, `[B, C, C]`."""
        eye = torch.eye(n_outputs, dtype=self.own.dtype, device=self.own.device)
        shape = self.correlation + (1 - self.correlation) * eye
        return self.own.expand(-1, n_outputs).unsqueeze(-1) * shape


@dataclass(frozen=True, eq=False)
class Tilt:
    """A width that follows the input, as above.

    Attributes:
        width: c.
        far: r_far.
        leverages: Those of every layer, in units in which r is their mean.
        nll: Mean negative log predictive density on the held-out data, of the network with this width.
        standard_error: Paired standard error of its difference from the network's.
        correlation: Of its own variances, between outputs: 1/C of C classes, 0 of labels and of a regression.
    """

    width: float
    far: float
    leverages: tuple[Leverage, ...]
    nll: float
    standard_error: float
    correlation: float = 0.0

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers whose inputs are read."""
        return tuple(each.layer for each in self.leverages)

    @property
    def sentence(self) -> str:
        """What it does, in words."""
        count = len(self.leverages)
        layers = f"{count} layer{'s' * (count != 1)}"
        if not self.width:
            return f"beyond r = {self.far:.3g} the width grows with the inputs of {layers}"
        return f"the width follows the inputs of {layers}, c = {self.width:.3g}, and more beyond r = {self.far:.3g}"

    def distance(self, inputs: Mapping[str, Tensor], n_rows: int | None = None) -> Tensor:
        """r of every row, `[R]`, of inputs of every layer `[B, T, G, d]`, whose rows or their data are B.

        A layer that the network did not call does not count.
        """
        parts = [each.at(inputs[each.layer]) for each in self.leverages if each.layer in inputs]
        if not parts:
            raise UnsupportedError(
                f"the network called none of the layers {list(self.layers)}, by whose inputs its predictions are "
                "calibrated, with inputs of one batch: set la.calibration = None, or calibrate anew."
            )
        r = torch.stack(parts).mean(0)
        return r if n_rows is None else r.repeat_interleave(n_rows // len(r))

    def excess(self, r: Tensor) -> Tensor:
        """v, of the shape of r."""
        return self.width * r + (r / self.far - 1).clamp(min=0)

    @property
    def stretch(self) -> float:
        """s, the factor of logits."""
        return math.sqrt(1 + self.width)

    # On moments of the outputs.

    def mean(self, likelihood: Likelihood, mean: Tensor) -> Tensor:
        """The latents' mean, from the network's outputs `[B, C]`."""
        return mean if likelihood.has_noise else self.stretch * mean

    def noise(self, likelihood: Likelihood, sigma: Tensor) -> Tensor:
        """The noise that is left of σ: the rest is the latents' variance."""
        return sigma / self.stretch if likelihood.has_noise else sigma

    def at(self, likelihood: Likelihood, sigma: Tensor, r: Tensor) -> Widening:
        """What becomes of the posterior's covariances at inputs with r, `[B]`; σ is that before `noise`."""
        v = self.excess(r)
        if likelihood.has_noise:
            own = v[:, None] * (sigma.to(v).square() / (1 + self.width)).reshape(1, -1)
            return Widening(torch.ones_like(v), own, 0.0)
        return Widening(1 + v, _PROBIT * v[:, None], self.correlation)

    def gaussian(
        self, likelihood: Likelihood, sigma: Tensor, r: Tensor, posterior: Gaussian, *, centred: bool = False
    ) -> Gaussian:
        """The latents, from those of the posterior with its scaled covariance; between inputs it adds nothing.

        With `centred` variances are those of outputs less their mean.
        """
        covariance, widening = posterior.covariance, self.at(likelihood, sigma, r.to(posterior.covariance))
        if posterior.is_joint or posterior.is_grouped:
            covariance = widening.between(covariance, posterior.mean.shape[1])
        else:
            covariance = widening.covariance(covariance, diagonal=posterior.is_diagonal, centred=centred)
        return replace(posterior, mean=self.mean(likelihood, posterior.mean), covariance=covariance)

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
