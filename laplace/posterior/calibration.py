"""What a calibration chose: a value beside the posterior, by which its predictions are made.

A posterior with precision P = s H + δ at temperature T, s = 1 / (σ² T), has at temperature c T and prior precision δ/c
the precision P/c: its covariance is scaled by c, the cold posterior of Wenzel et al. (2020, arXiv:2002.02405). With
another noise σ', T c σ²/σ'² keeps it. As c → 0 the predictions become those of the network. Predictions are asked of
the posterior at these hyper-parameters (`Posterior.predictive`); those of the posterior itself stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core import nested
from laplace.core.content import Content
from laplace.core.hyperparameters import Hyperparameters
from laplace.errors import InvalidArgument
from laplace.posterior.tilt import Tilt

_VANISHING = 1e-12
"""Scale of a covariance that stands for none, at δ ≥ 1 and σ ≥ 1: predictions are then the network's to rounding."""

_CHOSEN_AT = ("prior_precision", "sigma_noise", "temperature")
"""Hyper-parameters that a calibration is of."""

_CHOICE = ("scale", "held_out", "n_data", "network_nll", "posterior_nll", "standard_error")
"""Attributes by which two choices differ."""

_LEAST_SCALE = 1e-18
"""The smallest scale, at which a precision is still finite in float32."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Choice of `la.calibrate`: prior precision δ, scale c of the covariance and noise σ, or the network itself.

    The posterior's covariance is c Σ, where Σ is the covariance at `prior_precision`, at `network_noise` σ₀ and at the
    temperature T of the posterior: that of a posterior at δ/c and T c σ₀²/σ². `la.prior_precision`, `la.temperature`
    and `la.sigma_noise` stay what they are, and the evidence is theirs.

    Attributes:
        scale: c; 0 for the network itself.
        prior_precision: δ, `[1]`, `[n_tensors]` or `[P]`.
        sigma_noise: σ, 0-dim or `[C]`.
        network_noise: σ₀, the noise that suits the network best; without a noise to choose, that before the call.
        before: Prior, noise and temperature of the posterior, for which it was chosen.
        held_out: Words for the data that decided.
        n_data: Number of these data.
        link_approx: Link approximation of the predictions that were scored.
        network_nll: Mean negative log predictive density of the network on these data, in nats; in regression with the
            noise that suits it best.
        posterior_nll: That of the chosen posterior; equal to the network's, where the network was chosen.
        standard_error: Paired standard error of their difference over the data.
        caution: Number of standard errors that were added to every difference before the smallest was chosen.
        table: Every candidate: factors of the former δ `[n]`, scales `[m]`, noises `[s]` or `[s, C]`, differences of
            the NLL from the network's and their paired standard errors `[n, m, s]`, by name.
        approximate: Why the held-out score is only a forecast; empty where it is none.
        reference: What posteriors are compared with: `"network"`, or after `la.refine` `"refined mean"`, the linearised
            network at θ̂, which is what stays of a refined posterior without its covariance.
        tilt: The width that follows the input, on which the candidates of the table are, which are compared with the
            network of this width; None without it.
        others: Of a mixture the widths of its other components, each by its own network's inputs, by one factor.
        untilted: Why there is none.
    """

    scale: float
    prior_precision: Tensor
    sigma_noise: Tensor
    network_noise: Tensor
    before: Hyperparameters = field(repr=False)
    held_out: str
    n_data: int
    link_approx: str
    network_nll: float
    posterior_nll: float
    standard_error: float
    caution: float
    table: dict[str, Tensor] = field(repr=False)
    approximate: str = ""
    reference: str = "network"
    tilt: Tilt | None = None
    others: tuple[Tilt | None, ...] = ()
    untilted: str = ""
    _content: Content | None = field(default=None, repr=False)  # of validation data, to know them again; in no state
    _undo: Callable[[], None] | None = field(default=None, repr=False)

    @property
    def is_network(self) -> bool:
        """True if no posterior predicted better than the `reference`, which is what the object then predicts."""
        return self.scale == 0

    @property
    def hypers(self) -> Hyperparameters:
        """Prior, noise and temperature that give the posterior its covariance c Σ."""
        scale = self.scale or self._vanishing()
        with torch.inference_mode(False):  # a tensor made in inference mode could never be differentiated
            ratio = (self.network_noise / self.sigma_noise).square().mean()
            return replace(
                self.before,
                prior_precision=self.prior_precision / scale,
                sigma_noise=self.sigma_noise,
                temperature=self.before.temperature * scale * ratio,
            )

    @property
    def sentence(self) -> str:
        """What predictions are, in a sentence."""
        own = f"the {self.reference} itself" if self.is_network else f"the covariance times {self.scale:.3g}"
        prior = f"prior precision {_number(self.prior_precision)}"
        width = "" if self.tilt is None else f"; {self.tilt.sentence(len(self.others) + 1)}"
        return f"calibrated on {self.held_out}: {own}, {prior}{width}"

    def is_of(self, hypers: Hyperparameters) -> bool:
        """True if it was chosen at these prior precisions, noises and temperature."""
        pairs = [(getattr(self.before, name), getattr(hypers, name)) for name in _CHOSEN_AT]
        return all(torch.equal(ours, theirs.detach().to(ours)) for ours, theirs in pairs)

    def of_components(self, count: int) -> tuple[Calibration, ...]:
        """What each of so many components of a mixture predicts by: the same but for the width, which is its own.

        Raises:
            InvalidArgument: It has widths of another number of networks.
        """
        if self.tilt is None and not any(self.others):
            return (self,) * count
        tilts = (self.tilt, *self.others)
        if len(tilts) != count:
            raise InvalidArgument(
                f"this calibration has the width of {len(tilts)} network{'s' * (len(tilts) > 1)}, which follows their "
                f"inputs, the object has {count}; call la.calibrate."
            )
        return (self,) if count == 1 else tuple(replace(self, tilt=tilt, others=()) for tilt in tilts)

    @staticmethod
    def of_mixture(components: Sequence[Calibration]) -> Calibration | None:
        """The one that all components of a mixture predict by; None of components that were calibrated alone."""
        first = components[0]
        if any(getattr(one, name) != getattr(first, name) for one in components for name in _CHOICE):
            return None
        others = tuple(one.tilt for one in components[1:])
        return replace(first, others=others) if first.tilt is not None or any(others) else first

    def is_copy_of(self, other: Calibration | None) -> bool:
        """True if both are of one choice, whichever object or component they belong to."""
        return other is not None and self.table is other.table

    def _vanishing(self) -> float:
        """A scale at which the covariance, at most c / δ where there are no data, is nothing beside 1 and beside σ²."""
        prior, noise = self.prior_precision.min().item(), self.sigma_noise.min().item()
        return max(_VANISHING * min(1.0, prior) * min(1.0, noise**2), _LEAST_SCALE)

    def undo(self) -> None:
        """The same as `la.calibration = None`, where this is the calibration of `la`.

        Raises:
            InvalidArgument: The object has another calibration by now, or none.
        """
        if self._undo is None:
            raise InvalidArgument("this calibration belongs to no object; use that of la.calibration.")
        self._undo()

    def bound(self, undo: Callable[[], None] | None) -> Calibration:
        """The same with what undoes it; None for a calibration that is stored."""
        return replace(self, _undo=undo)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the object that it belongs to."""
        return self._values() | {"_undo": None}

    def _values(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __repr__(self) -> str:
        names = [f"on {self.held_out}"] + [f"link_approx={self.link_approx!r}"] * bool(self.link_approx)
        lines = [", ".join(names), f"{self.reference:<10} NLL {self.network_nll:.4f}"]
        if self.tilt is not None:
            gap = self.tilt.nll - self.network_nll
            told = self.tilt.sentence(len(self.others) + 1)
            lines.append(f"by input   NLL {self.tilt.nll:.4f}, {gap:+.4f} ± {self.tilt.standard_error:.4f}: {told}")
        elif self.untilted:
            lines.append(f"by input   no width: {self.untilted}")
        if self.is_network:
            lines.append(
                f"chosen: the {self.reference} itself; of {self.table['differences'].numel()} posteriors none was "
                f"better beyond {self.caution:.2g} standard errors"
            )
        else:
            gap = self.posterior_nll - self.network_nll
            name = "posterior".ljust(max(10, len(self.reference)))
            lines.append(
                f"{name} NLL {self.posterior_nll:.4f}, {gap:+.4f} ± {self.standard_error:.4f} (paired standard error; "
                "chosen on these data)"
            )
            lines.append(f"chosen: prior precision {_change(self.before.prior_precision, self.prior_precision)}, "
                         f"covariance times {self.scale:.3g}")  # fmt: skip
        if not torch.equal(self.before.sigma_noise, self.sigma_noise):
            edge = ", an edge of what was tried" if self._at_an_edge() else ""
            lines.append(f"        noise {_change(self.before.sigma_noise, self.sigma_noise)}{edge}")
        lines += [f"approximate: {self.approximate}"] * bool(self.approximate)
        return "Calibration(\n  " + "\n  ".join(lines) + "\n)"

    def _at_an_edge(self) -> bool:
        """True if the noise is the smallest or the largest of several that were tried."""
        tried = self.table["sigma_noise"].to(self.sigma_noise)
        return len(tried) > 1 and any(torch.allclose(tried[end], self.sigma_noise) for end in (0, -1))

    # States.

    def moved(self, device: torch.device | None, dtype: torch.dtype | None) -> Calibration:
        """The same elsewhere."""
        return replace(
            self,
            prior_precision=self.prior_precision.to(device=device, dtype=dtype),
            sigma_noise=self.sigma_noise.to(device=device, dtype=dtype),
            network_noise=self.network_noise.to(device=device, dtype=dtype),
            before=self.before.moved(device, dtype),
            tilt=None if self.tilt is None else self.tilt.moved(device, dtype),
            others=tuple(None if one is None else one.moved(device, dtype) for one in self.others),
        )

    def state(self) -> dict[str, Any]:
        """Tensors, numbers and strings, from which it is made again."""
        state = self._values() | {"before": self.before.state(), "table": dict(self.table)}
        state["tilt"] = nested.state_of(self.tilt)
        return {name: value for name, value in state.items() if name not in ("others", "_undo", "_content")}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> Calibration:
        """The calibration of a state, on a device."""
        before = Hyperparameters.from_state(state["before"], device)
        moved = {name: state[name].to(device) for name in ("prior_precision", "sigma_noise", "network_noise")}
        tilt = state.get("tilt")
        made = {"before": before, "tilt": None if tilt is None else Tilt.from_state(tilt, device)}
        return nested.from_state(cls, state | moved | made)


def _change(former: Tensor, chosen: Tensor) -> str:
    """A hyper-parameter before and after, as words."""
    if torch.equal(former, chosen):
        return f"as it was, {_number(chosen)}"
    return f"{_number(former)} → {_number(chosen)}"


def _number(value: Tensor) -> str:
    plain = value.detach()
    if plain.numel() == 1:
        return f"{plain.item():.4g}"
    return f"{plain.min().item():.4g} to {plain.max().item():.4g}"
