"""The Gaussian prior N(μ0, diag(δ)⁻¹): one precision, one per tensor, or one per parameter."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laplace.core.layout import Layout
from laplace.core.precision_policy import widened


@dataclass(frozen=True)
class GaussianPrior:
    """A diagonal Gaussian prior over the random parameters.

    Attributes:
        precision: δ, `[1]`, `[n_tensors]` or `[P]`; gradients flow through every method.
        mean: μ0, 0-dim or `[P]`.
        layout: Which entries belong to which tensor.
    """

    precision: Tensor
    mean: Tensor
    layout: Layout

    @property
    def is_scalar(self) -> bool:
        """One precision for all parameters."""
        return self.precision.numel() == 1

    @property
    def is_constant_per_tensor(self) -> bool:
        """One precision for all entries of each tensor."""
        sizes, count = self.layout.sizes, self.precision.numel()
        per_tensor = count == len(sizes) and (count != sum(sizes) or all(size == 1 for size in sizes))
        return self.is_scalar or per_tensor

    def diagonal(self) -> Tensor:
        """δ of every parameter, `[P]`."""
        if self.is_scalar:
            return self.precision.expand(self.layout.n_params)
        if self.precision.numel() == self.layout.n_params:
            return self.precision
        return self.layout.repeat_per_tensor(self.precision)

    def per_block(self) -> tuple[Tensor, ...]:
        """δ of every tensor's entries: `[1]` where it is one number, else `[p]`."""
        if self.is_scalar:
            return (self.precision,) * self.layout.n_tensors
        if self.is_constant_per_tensor:
            return tuple(self.precision.split(1))
        return self.layout.split(self.precision)

    def logdet(self) -> Tensor:
        """Σ log δ over all parameters, 0-dim, float64: log det P − log det P₀ is a small difference of large sums."""
        logs = widened(self.precision).log()
        if self.is_constant_per_tensor and not self.is_scalar:
            return logs @ logs.new_tensor(self.layout.sizes)
        return logs.sum() * (self.layout.n_params // logs.numel())

    def quad(self, theta: Tensor) -> Tensor:
        """(θ − μ0)ᵀ diag(δ) (θ − μ0), 0-dim."""
        squares = (theta - self.mean).square()
        return (self.precision * squares.sum()).sum() if self.is_scalar else self.diagonal() @ squares
