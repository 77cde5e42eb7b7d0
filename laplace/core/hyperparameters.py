"""Hyper-parameters and the Gaussian prior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from laplace.core import nested
from laplace.core.layout import Layout
from laplace.core.precision_policy import widened


@dataclass(frozen=True, eq=False)
class Hyperparameters:
    """One value of every hyper-parameter, with the caller's graph."""

    prior_precision: Tensor  # δ, `[1]`, `[n_tensors]` or `[P]`
    prior_mean: Tensor  # μ₀, 0-dim, `[1]` or `[P]`
    sigma_noise: Tensor  # σ, 0-dim or `[C]`
    temperature: Tensor  # T, 0-dim

    @classmethod
    def unit(cls, like: Tensor) -> Hyperparameters:
        """A standard normal prior, unit noise and temperature, on the device and in the dtype of a tensor."""
        one = torch.ones((), device=like.device, dtype=like.dtype)
        return cls(one.reshape(1), torch.zeros_like(one), one, one)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of them all."""
        return self.prior_precision.dtype

    @property
    def device(self) -> torch.device:
        """Device of them all."""
        return self.prior_precision.device

    @property
    def requires_grad(self) -> bool:
        """True if one that the posterior precision depends on requires a gradient."""
        return any(value.requires_grad for value in (self.prior_precision, self.sigma_noise, self.temperature))

    def detached(self, *names: str) -> Hyperparameters:
        """The same values without a graph: those of some names, or all."""
        chosen = names or tuple(field.name for field in fields(self))
        return replace(self, **{name: getattr(self, name).detach() for name in chosen})

    def moved(self, device: torch.device | None, dtype: torch.dtype | None) -> Hyperparameters:
        """The same values elsewhere, without a graph."""
        values = {field.name: getattr(self, field.name).detach() for field in fields(self)}
        return Hyperparameters(**{name: value.to(device=device, dtype=dtype) for name, value in values.items()})

    def state(self) -> dict[str, Tensor]:
        """The values by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], device: torch.device) -> Hyperparameters:
        """The hyper-parameters of a state, on a device."""
        return nested.from_state(cls, nested.move(dict(state), device, None))


@dataclass(frozen=True, eq=False)
class GaussianPrior:
    """A diagonal Gaussian prior over the random parameters."""

    precision: Tensor  # δ, `[1]`, `[n_tensors]` or `[P]`; gradients flow through every method
    mean: Tensor  # μ0, 0-dim or `[P]`
    layout: Layout  # which entries belong to which tensor

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

    def squares(self, theta: Tensor) -> Tensor:
        """(θ − μ0)², summed over the entries that share a precision: in the shape of δ."""
        squares = (theta - self.mean).square()
        if self.is_scalar:
            return squares.sum().view(1)
        if not self.is_constant_per_tensor:
            return squares
        return torch.stack([part.sum() for part in self.layout.split(squares)])

    def quad(self, theta: Tensor) -> Tensor:
        """(θ − μ0)ᵀ diag(δ) (θ − μ0), 0-dim, −2 log p(θ) up to a constant [Redux, eq. 2]."""
        return (self.precision * self.squares(theta)).sum()
