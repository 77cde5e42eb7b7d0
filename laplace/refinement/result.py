"""What a refinement found: another mean, and the curvature there."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core import nested
from laplace.structures.base import Curvature
from laplace.structures.fit import Fit

REFINEMENTS = frozenset({"map", "variational", "forget"})
"""What moved a mean."""


@dataclass(frozen=True, eq=False)
class Refinement:
    """A refined posterior N(θ̂, (s H + δ)⁻¹) of the linearised network, and how it was found.

    Attributes:
        method: `"map"` or `"variational"`; `"forget"` of a mean that was moved as data were removed.
        mean: θ̂, `[P]`; where every output is a Gaussian process of its own, the weights of each, `[C, P]`.
        fit: H and the loss, both at f_lin(x, θ̂); of a variational Gaussian H is in expectation over it.
        steps: Newton steps for the mode, updates of the covariance for a variational Gaussian.
        converged: Whether the tolerance was reached.
        distance: About how far the minimum is, in posterior standard deviations (`"map"`); the last change of the
            bound relative to its size (`"variational"`).
        values: −log joint density up to a constant (`"map"`), or the evidence lower bound (`"variational"`), in order:
            of every step that was taken.
        standard_error: Of the last bound, in nats, where expectations are over random points; else 0.
    """

    method: str
    mean: Tensor
    fit: Fit
    steps: int
    converged: bool
    distance: float
    values: tuple[float, ...]
    standard_error: float = 0.0

    @property
    def elbo(self) -> float | None:
        """The evidence lower bound of the linearised model, in nats, at the end; None for a mode."""
        return self.values[-1] if self.method == "variational" and self.values else None

    def __repr__(self) -> str:
        end = "converged" if self.converged else "NOT converged"
        error = f" ± {self.standard_error:.2g}" if self.standard_error else ""
        bound = "" if self.elbo is None else f", elbo={self.elbo:.6g}{error}"
        return f"Refinement({self.method!r}, {end} in {self.steps} steps, distance={self.distance:.2g}{bound})"

    @property
    def is_finite(self) -> bool:
        """True if mean, loss and distance are."""
        return bool(nested.is_finite([self.mean, self.fit.loss_terms])) and math.isfinite(self.distance)

    def moved(self, device: torch.device | None, dtype: torch.dtype | None) -> Refinement:
        """The same elsewhere."""
        return replace(self, mean=self.mean.to(device=device, dtype=dtype), fit=self.fit.moved(device, dtype))

    def state(self) -> dict[str, Any]:
        """Tensors, numbers and strings, from which it is made again with the unrefined fit."""
        return {
            "method": self.method,
            "mean": self.mean.clone(),
            "H": self.fit.curvature.state(),
            "loss": self.fit.loss_terms.clone(),
            "steps": self.steps,
            "converged": self.converged,
            "distance": self.distance,
            "values": list(self.values),
            **({"standard_error": self.standard_error} if self.standard_error else {}),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], fit: Fit, curvature: Curvature, device: torch.device) -> Refinement:
        """The refinement of a state, on a device, with the data's number and coverage of the unrefined fit."""
        refined = replace(fit, curvature=curvature, loss_terms=state["loss"].to(device))
        return nested.from_state(cls, state | {"mean": state["mean"].to(device), "fit": refined})
