"""Hyper-parameters as the vector of logarithms that a search moves; priors of other structures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from laplace.core.argument_checks import as_tensor, check_length, positive
from laplace.core.hyperparameters import Hyperparameters
from laplace.core.layout import Layout
from laplace.core.precision_policy import widened
from laplace.enums import PriorStructure
from laplace.errors import InvalidArgument

Tuned = Literal["prior_precision", "sigma_noise", "temperature"]
"""What can be tuned."""

NAMES: tuple[Tuned, ...] = get_args(Tuned)
"""The same, in order."""


@dataclass(frozen=True)
class Coordinates:
    """The logarithms of the tuned hyper-parameters as one vector.

    Attributes:
        names: Which are tuned, out of `NAMES`.
        start: The values to begin with; those that are not tuned keep them.
    """

    names: tuple[str, ...]
    start: Hyperparameters

    def vector(self) -> Tensor:
        """Logarithms of the start, `[n]`, float64."""
        return widened(torch.cat([getattr(self.start, name).reshape(-1) for name in self.names])).log()

    def hypers(self, logs: Tensor) -> Hyperparameters:
        """The hyper-parameters at a vector of logarithms `[n]`, with its graph."""
        shapes = [getattr(self.start, name).shape for name in self.names]
        numbers = logs.exp().to(self.start.prior_precision.dtype)
        parts = (numbers,) if len(shapes) == 1 else numbers.split([shape.numel() for shape in shapes])
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
