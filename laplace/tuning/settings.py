"""Hyper-parameters as values: a setting, and the vector of logarithms that a search moves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laplace.core.hyperparameters import as_tensor, check_length, positive
from laplace.core.layout import Layout
from laplace.core.overrides import EVIDENCE, HYPERPARAMETERS, is_overridden
from laplace.enums import PriorStructure
from laplace.errors import InvalidArgument
from laplace.evidence import Evidence

if TYPE_CHECKING:
    from laplace.posterior.parametric import ParametricLaplace

NAMES = ("prior_precision", "sigma_noise", "temperature")
"""What can be tuned."""


@dataclass(frozen=True)
class Setting:
    """One value of every hyper-parameter.

    Attributes:
        prior_precision: δ, `[1]`, `[n_tensors]` or `[P]`.
        sigma_noise: σ, 0-dim or `[C]`.
        temperature: T, 0-dim.
    """

    prior_precision: Tensor
    sigma_noise: Tensor
    temperature: Tensor

    @classmethod
    def of(cls, la: ParametricLaplace) -> Setting:
        """What a posterior has now, without a graph."""
        return cls(la.prior_precision.detach(), la.sigma_noise.detach(), la.temperature.detach())

    def evidence(self, la: ParametricLaplace) -> Evidence:
        """The evidence of a posterior at this setting; the posterior is not changed."""
        if is_overridden(la, *HYPERPARAMETERS):
            with self.held_by(la):
                return la.evidence()
        now = la.evidence()
        prior = replace(now.prior, precision=self.prior_precision)
        return replace(now, prior=prior, sigma_noise=self.sigma_noise, temperature=self.temperature)

    def log_evidence(self, la: ParametricLaplace) -> Tensor:
        """Log p(D) of a posterior at this setting, 0-dim, with its graph, by a user's own terms where there are any."""
        if not is_overridden(la, "log_marginal_likelihood", *EVIDENCE):
            return self.evidence(la).log_marginal_likelihood
        with self.held_by(la):
            return la.log_marginal_likelihood()

    def held_by(self, la: ParametricLaplace) -> AbstractContextManager[None]:
        """The posterior at this setting for the length of a block: for what users' own methods compute of it."""
        return la.held(prior_precision=self.prior_precision, sigma_noise=self.sigma_noise, temperature=self.temperature)

    def assign(self, la: ParametricLaplace, names: Sequence[str] = NAMES) -> None:
        """Gives a posterior these values, all of them or, if one is refused, none."""
        former = Setting.of(la)
        try:
            for name in names:
                setattr(la, name, getattr(self, name))
        except BaseException:
            for name in names:
                setattr(la, name, getattr(former, name))
            raise


@dataclass(frozen=True)
class Coordinates:
    """The logarithms of the tuned hyper-parameters as one vector.

    Attributes:
        names: Which are tuned, out of `NAMES`.
        start: The values to begin with; those that are not tuned keep them.
    """

    names: tuple[str, ...]
    start: Setting

    def vector(self) -> Tensor:
        """Logarithms of the start, `[n]`, float64."""
        return torch.cat([getattr(self.start, name).reshape(-1) for name in self.names]).double().log()

    def setting(self, logs: Tensor) -> Setting:
        """The setting at a vector of logarithms `[n]`, with its graph."""
        shapes = [getattr(self.start, name).shape for name in self.names]
        parts = logs.exp().to(self.start.prior_precision.dtype).split([shape.numel() for shape in shapes])
        values = {name: part.view(shape) for name, shape, part in zip(self.names, shapes, parts, strict=True)}
        return replace(self.start, **values)


def checked_names(tune: str | Sequence[str], *, has_noise: bool, by_evidence: bool) -> tuple[str, ...]:
    """The names of what is tuned, in the order of `NAMES`.

    Raises:
        InvalidArgument: None, an unknown name, a noise without a noisy likelihood, or a temperature by the evidence.
    """
    names = (tune,) if isinstance(tune, str) else tuple(str(name) for name in tune)
    unknown = [name for name in names if name not in NAMES]
    if not names or unknown:
        raise InvalidArgument(f"tune={tune!r}; give one or more of {list(NAMES)}.")
    if "sigma_noise" in names and not has_noise:
        raise InvalidArgument("tune holds 'sigma_noise', but the likelihood has no observation noise; leave it out.")
    if "temperature" in names and by_evidence:
        # d/dT of −loss/T − ½ log det(H/T + δ) is loss/T² + ½ tr((H/T + δ)⁻¹ H)/T² ≥ 0 (the GGN, losses ≥ 0).
        raise InvalidArgument(
            "tune holds 'temperature', but the evidence never falls in it: p(y | f)^(1/T) is no normalised density, "
            "and T = ∞ explains all data. Tune the temperature on validation data, by objective='nll' for example."
        )
    return tuple(name for name in NAMES if name in names)


def spread(init: float | Tensor, structure: str, layout: Layout, like: Tensor, name: str = "init_prior_prec") -> Tensor:
    """A prior precision in the asked structure: a vector keeps its own, a scalar is spread over it.

    `name` is that of the caller's argument, for messages.

    Raises:
        InvalidArgument: Unknown structure, or a vector whose length fits nothing.
    """
    lengths = _lengths(structure, layout)
    value = positive(name, as_tensor(name, init, like=like)).detach().reshape(-1)
    if value.numel() == 1:
        return value.repeat(lengths[structure])
    check_length(name, value, lengths)
    return value


def restructured(prior: Tensor, structure: str | None, layout: Layout) -> Tensor:
    """A prior precision in another structure: repeated where it gets longer, else the geometric mean of what it was.

    Args:
        prior: δ, `[1]`, `[n_tensors]` or `[P]`.
        structure: `"scalar"`, `"layerwise"`, `"diag"`, or None for the present one.
        layout: Which entries belong to which tensor.

    Raises:
        InvalidArgument: Unknown structure.
    """
    if structure is None:
        return prior
    length = _lengths(structure, layout)[structure]
    if prior.numel() == length:
        return prior
    if length == layout.n_params and prior.numel() == layout.n_tensors:
        return layout.repeat_per_tensor(prior)
    if length == layout.n_tensors and prior.numel() == layout.n_params:
        return torch.stack([part.log().mean().exp() for part in layout.split(prior)])
    return prior.log().mean().exp().repeat(length)


def _lengths(structure: str, layout: Layout) -> dict[str, int]:
    """Number of precisions in every structure.

    Raises:
        InvalidArgument: Unknown structure.
    """
    lengths = {
        str(PriorStructure.SCALAR): 1,
        str(PriorStructure.LAYERWISE): layout.n_tensors,
        str(PriorStructure.DIAG): layout.n_params,
    }
    if structure not in lengths:
        raise InvalidArgument(f"prior_structure={structure!r}; accepted are {list(lengths)}.")
    return lengths
