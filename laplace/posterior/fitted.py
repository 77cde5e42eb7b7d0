"""The data's part of a posterior: what a fit found, or what a user assigned in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from laplace.errors import UnsupportedError
from laplace.fitting import Fit
from laplace.fitting.content import Content
from laplace.network.fingerprint import ModelWatch
from laplace.posterior.refined import Refinement
from laplace.structures.base import Curvature
from laplace.structures.by_hand import ByHand


@dataclass(frozen=True, eq=False)
class FitByHand:
    """A fit whose curvature was assigned.

    The structure's curvature is made, of a copy, when something is first computed of it: a loop of `la.H += …` adds to
    one tensor in place, and nothing is copied for its batches.

    Attributes:
        H: The unit curvature as it was assigned.
        structure: Structure of the curvature that it becomes.
        loss_terms: Summed unit negative log likelihood, `[1]`.
        n_data: Number of data, without ignored ones.
        n_outputs: C.
        coverage: As of `Fit`, of the fit before.
        draws: As of `Fit`.
    """

    H: Any
    structure: type[Curvature]
    loss_terms: Tensor
    n_data: float = 0
    n_outputs: int = 0
    coverage: Mapping[str, str] = field(default_factory=dict)
    draws: Tensor | None = None

    @cached_property
    def complete(self) -> Fit:
        """The fit with its curvature."""
        with torch.inference_mode(False), torch.no_grad():
            state = form_of(self.structure).state(self.H, self.n_data)
            curvature = self.structure.from_state(state)
        return Fit(curvature, self.loss_terms, self.n_data, self.n_outputs, dict(self.coverage), self.draws)


def form_of(structure: type[Curvature]) -> ByHand:
    """The form that a structure's curvature has in the hands of users.

    Raises:
        UnsupportedError: It has none.
    """
    if structure.by_hand is None:
        raise UnsupportedError(
            f"hessian_structure={structure.name!r} has no curvature that could be assigned or summed by hand; use "
            "'full', 'kron' or 'diag', call fit, or load a state."
        )
    return structure.by_hand


@dataclass(frozen=True, eq=False)
class Fitted:
    """Curvature and loss of data at the weights that a network had at the fit.

    Attributes:
        source: Curvature and loss at the network's own outputs, as they were found or assigned.
        mean: θ*, the network's weights, around which predictions are linearised, `[P]`.
        watch: Notices that the network was changed since.
        refinement: What inference in the linearised network found; None without it.
        assigned_mean: Mean of the Gaussian, `[P]`, where a user assigned another one than θ*.
        apart: Sums whose Kronecker factors are shown in place of those of H, in loops that restart H alone; an H of
            None has no factors.
        content: Digest of the data that were fitted; None where it is not known, as of a state, and after `forget`.
    """

    source: Fit | FitByHand
    mean: Tensor
    watch: ModelWatch
    refinement: Refinement | None = None
    assigned_mean: Tensor | None = None
    apart: Fit | FitByHand | None = None
    content: Content | None = None

    @property
    def fit(self) -> Fit:
        """Curvature and loss at the network's own outputs."""
        return self.source.complete

    def settled(self) -> Fitted:
        """The same with a complete fit, which nothing changes that is written into an assigned H."""
        return self if self.source is self.fit else replace(self, source=self.fit)

    @property
    def present(self) -> Fit | FitByHand:
        """Curvature and loss, found or assigned; after a refinement, at the outputs of the linearised network."""
        return self.source if self.refinement is None else self.refinement.fit

    @property
    def factored(self) -> Fit | FitByHand:
        """Sums whose Kronecker factors are shown."""
        return self.present if self.apart is None else self.apart

    @property
    def centre(self) -> Tensor:
        """Mean of the Gaussian, `[P]`."""
        if self.refinement is not None:
            return self.refinement.mean
        return self.mean if self.assigned_mean is None else self.assigned_mean

    def moved(self, model: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> Fitted:
        """The same elsewhere, for a network that was moved there."""
        mean = self.assigned_mean
        return Fitted(
            self.fit.moved(device, dtype),
            self.mean.to(device=device, dtype=dtype),
            ModelWatch(self.watch.fingerprint.moved(model, device, dtype)),
            None if self.refinement is None else self.refinement.moved(device, dtype),
            None if mean is None else mean.to(device=device, dtype=dtype),
            content=self.content,
        )
