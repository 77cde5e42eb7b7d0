"""All that the data say of a posterior, as one value that is additive over batches, shards and later data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core.checks import as_count
from laplace.errors import InvalidArgument, InvalidData
from laplace.structures.base import Curvature

_NOTHING = 1e-9
"""Share of the data below which a count, a sum of weights that faded, is zero."""


@dataclass(frozen=True, eq=False)
class Fit:
    """Curvature and loss of the data: additive over batches, shards and later data.

    Attributes:
        curvature: Unit curvature.
        loss_terms: Summed unit negative log likelihood, `[1]`, or `[C]` with one noise per output.
        n_data: Number of data without ignored ones, or the sum of their weights; a `decay` multiplies it.
        n_outputs: C.
        coverage: Which layer rule or fallback explained every random parameter.
        draws: State of the engine's random numbers after the fit, which a fit of further data goes on from.
        gaps: How many targets of every output were observed, `[C]`, where some entries are missing; None if none are.
        is_weighed: Whether some of the data had weights of their own, which no other reading of the data knows.
    """

    curvature: Curvature
    loss_terms: Tensor
    n_data: float
    n_outputs: int
    coverage: dict[str, str] = field(default_factory=dict)
    draws: Tensor | None = None
    is_weighed: bool = False
    gaps: Tensor | None = None

    @property
    def n_observed(self) -> float | Tensor:
        """Number of observed targets of every output: N, or `[C]` where entries are missing."""
        return self.n_data if self.gaps is None else self.gaps

    @property
    def H(self) -> Any:
        """The unit curvature as users see it, in the dtype of the posterior."""
        return self.curvature.shown(self.loss_terms.dtype)

    @property
    def complete(self) -> Fit:
        """The fit itself; a `ManualFit` makes one here of the parts that a user assigned."""
        return self

    def __add__(self, other: Fit) -> Fit:
        self._check_matches(other)
        return replace(
            self,
            curvature=self.curvature + other.curvature,
            loss_terms=torch.add(*_same_terms(self.loss_terms, other.loss_terms)),
            n_data=as_count(self.n_data + other.n_data),
            draws=other.draws,
            is_weighed=self.is_weighed or other.is_weighed,
            gaps=self._with_gaps(other, 1.0),
        )

    def _with_gaps(self, other: Fit, sign: float) -> Tensor | None:
        """Observed targets of both, or of these without those."""
        given = self.gaps if self.gaps is not None else other.gaps
        if given is None:
            return None
        ours, theirs = (torch.as_tensor(fit.n_observed).to(given).expand_as(given) for fit in (self, other))
        return ours + sign * theirs

    def scaled(self, factor: float) -> Fit:
        """The fit of data with the weight `factor` each.

        Raises:
            UnsupportedError: The structure is no sum over data.
        """
        if factor == 1:
            return self
        return replace(
            self,
            curvature=self.curvature.scaled(factor),
            loss_terms=factor * self.loss_terms,
            n_data=as_count(factor * self.n_data),
            gaps=None if self.gaps is None else factor * self.gaps,
        )

    def minus(self, removed: Fit, *, signed: bool = False) -> Fit:
        """The fit of the data without some of them.

        Args:
            removed: What these say.
            signed: Whether the curvature may be indefinite.

        Raises:
            InvalidData: More data than were seen, or of other outputs.
            CurvatureError: The curvature would be indefinite.
            UnsupportedError: The structure is no sum over data.
        """
        self._check_matches(removed)
        left = self.n_data - removed.n_data
        if left < -_NOTHING * self.n_data:
            raise InvalidData(
                f"{removed.n_data:g} data are to be removed, but the fit has seen {self.n_data:g}; remove only data "
                "that were fitted, once, and with their present weight."
            )
        terms = self.loss_terms.dtype  # in which they differ where they were computed in other batches
        curvature = self.curvature.minus(removed.curvature, signed=signed, terms=terms)
        if left <= _NOTHING * self.n_data:  # the prior, and no rounding errors of two equal sums
            return replace(self, curvature=curvature.scaled(0), loss_terms=0 * self.loss_terms, n_data=0, gaps=None)
        loss_terms = torch.sub(*_same_terms(self.loss_terms, removed.loss_terms))
        gaps = self._with_gaps(removed, -1.0)
        return replace(self, curvature=curvature, loss_terms=loss_terms, n_data=as_count(left), gaps=gaps)

    def moved(self, device: torch.device | None, dtype: torch.dtype | None) -> Fit:
        """The same elsewhere."""
        curvature, losses = self.curvature.moved(device, dtype), self.loss_terms.to(device=device, dtype=dtype)
        gaps = None if self.gaps is None else self.gaps.to(device)
        return replace(self, curvature=curvature, loss_terms=losses, gaps=gaps)

    def _check_matches(self, other: Fit) -> None:
        if self.n_outputs != other.n_outputs:
            raise InvalidData(f"the data have {other.n_outputs} outputs, those of the former fit {self.n_outputs}.")
        if self.curvature.n_terms != other.curvature.n_terms:
            raise InvalidArgument(
                f"the former fit kept {self.curvature.n_terms} curvature terms, the new one {other.curvature.n_terms}: "
                "sigma_noise changed between one noise and one per output. Set it back to what it was, or fit all data "
                "with override=True."
            )


def _same_terms(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Loss terms of two fits, summed over the outputs where one of them, an assigned one, is for all of them."""
    if first.shape == second.shape:
        return first, second
    return first.sum().reshape(1), second.sum().reshape(1)
