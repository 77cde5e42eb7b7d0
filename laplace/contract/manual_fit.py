"""A posterior whose data users assign part by part: checked, and put in the place of what a fit found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from laplace.contract.by_hand import form_of, known_form
from laplace.contract.fixed_root import FixedRootPrecision
from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.cached import cached_property
from laplace.core.overrides import described
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.network.model_guard import autograd_mode, same_random_state
from laplace.posterior.posterior import Fitted, Posterior
from laplace.structures.base import Curvature
from laplace.structures.fit import Fit


@dataclass(frozen=True, eq=False)
class ManualFit:
    """A fit whose curvature was assigned.

    The structure's curvature is made, of a copy, when something is first computed of it: a loop of `la.H += …` adds to
    one tensor in place, and nothing is copied for its batches.
    """

    H: Any
    structure: type[Curvature]  # Structure of the curvature that it becomes
    loss_terms: Tensor  # Summed unit negative log likelihood, `[1]`
    n_data: float = 0  # Number of data, without ignored ones
    n_outputs: int = 0
    coverage: Mapping[str, str] = field(default_factory=dict)
    draws: Tensor | None = None

    @cached_property
    def complete(self) -> Fit:
        """The fit with its curvature."""
        with torch.inference_mode(False), torch.no_grad():
            curvature = self.structure.from_state(form_of(self.structure).state(self.H, self.n_data))
        return Fit(curvature, self.loss_terms, self.n_data, self.n_outputs, dict(self.coverage), self.draws)


def H_of(posterior: Posterior) -> Any:
    """The unit curvature as users see it: what was assigned, or the fit's; before a fit zero, or an error."""
    if posterior.data is None and (form := known_form(posterior.choices.structure)) is not None:
        return form.zeros(posterior.problem, posterior.hypers.prior_mean.detach())
    return posterior.require_fitted().active_fit.H


def without_data(posterior: Posterior) -> Posterior:
    """The posterior of no data, around the network's present weights, to which a user adds data by hand."""
    posterior = posterior.with_backend_loss()
    structure, like = posterior.choices.structure, _like(posterior)
    source = ManualFit(form_of(structure).zeros(posterior.problem, like), structure, like.new_zeros(1))
    return posterior.with_data(source, posterior.cache.engine)


def restarted(posterior: Posterior, former: Fitted | None) -> Posterior:
    """A posterior of no data with the loss, numbers and Kronecker factors of `former` data; None before a fit."""
    data = posterior.require_fitted()
    if former is None:
        return replace(posterior, data=replace(data, separate_factors=_by_hand(data, posterior)))
    known = former.source
    source = replace(data.source, loss_terms=known.loss_terms, n_data=known.n_data, n_outputs=known.n_outputs)
    return replace(posterior, data=replace(data, source=source, separate_factors=former.factors_fit))


def with_parts(posterior: Posterior, **parts: Any) -> Posterior:
    """The posterior with parts of its data as a user gives them; before a fit, the others are those of no data.

    H is taken as it is, and copied when it is first used.
    """
    posterior = posterior.without_calibration(f"assigning {', '.join(parts)}")
    former = posterior if posterior.data is not None else without_data(posterior)
    data = former.require_fitted()
    if data.refinement is not None:
        raise UnsupportedError(
            f"{', '.join(parts)} is assigned to a refined posterior, of which mean and curvature are those that were "
            "found in the linearised network; assign before refine, or call fit again."
        )
    with torch.inference_mode(False), torch.no_grad():
        for name, value in parts.items():
            data = _with_part(data, former, name, value)
    return replace(former, data=data, root=None)


def batch_of(posterior: Posterior, x: Inputs, y: Tensor, n_data: int) -> tuple[Tensor, Any]:
    """Loss and H of one batch of N data."""
    form, device = form_of(posterior.choices.structure), posterior.hypers.device
    with autograd_mode(), torch.no_grad(), same_random_state(posterior.model):
        x, y = batches.to_device(x, device), y.to(device)
        summary, H = form.of_batch(posterior.engine, x, y, n_data)
    return summary.loss_terms.sum(), H


def with_root(posterior: Posterior, root: Any) -> Posterior:
    """The posterior with P⁻¹ = L Lᵀ as a user gives L, `[P, P]` or `[P]`, until hyper-parameters or data change."""
    posterior.require_fitted()
    n_params = posterior.problem.layout.n_params
    values = checked_tensor("posterior_scale", root, posterior, (n_params, n_params), (n_params,))
    if values.ndim == 1 and bool((values < 0).any()):
        raise InvalidArgument("posterior_scale holds negative standard deviations; they must be at least 0.")
    return replace(posterior.without_calibration("assigning posterior_scale"), root=FixedRootPrecision(values))


def checked_H(posterior: Posterior, H: Any) -> Any:
    """A curvature of a user in the posterior's dtype and on its device, checked; the same object where it has both."""
    choices = posterior.choices
    form = form_of(choices.structure)
    return form.checked(H, posterior.problem, _like(posterior), choices.precision_options)


def _by_hand(data: Fitted, posterior: Posterior, H: Any = None) -> ManualFit:
    """The fit of the same data with another curvature; None for none."""
    now, structure = data.source, posterior.choices.structure
    return ManualFit(H, structure, now.loss_terms, now.n_data, now.n_outputs, now.coverage, now.draws)


def _with_part(data: Fitted, posterior: Posterior, name: str, value: Any) -> Fitted:
    if name == "H_facs":
        if value is None:
            return replace(data, separate_factors=_by_hand(data, posterior))
        if data.separate_factors is not None and data.separate_factors.H is not None:
            return replace(data, separate_factors=_by_hand(data, posterior, checked_H(posterior, value)))
        data, name = replace(data, separate_factors=None), "H"
    if name in ("H", "loss") and posterior.hypers.sigma_noise.numel() > 1:
        raise UnsupportedError(
            f"{name} is assigned where every output has its own noise, which takes one {name} per output; use one "
            "noise."
        )
    if name == "H":
        return replace(data, source=_by_hand(data, posterior, checked_H(posterior, value)))
    if name == "mean":
        mean = checked_tensor("mean", value, posterior, (posterior.problem.layout.n_params,))
        return replace(data, assigned_mean=None if torch.equal(mean, data.expansion_point) else mean)
    number = _number(name, value)
    if name == "loss":
        return replace(data, source=replace(data.source, loss_terms=_like(posterior).new_tensor([number])))
    if number < 0 or (name == "n_outputs" and number != int(number)):
        accepted = "an integer of at least 0" if name == "n_outputs" else "at least 0"
        raise InvalidArgument(f"{name}={value!r}; it must be {accepted}.")
    return replace(data, source=replace(data.source, **{name: int(number) if number == int(number) else number}))


def _number(name: str, value: Any) -> float:
    """A finite real number, or the one in a tensor."""
    single = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    number = value.item() if single else value
    if isinstance(number, bool) or not isinstance(number, Real) or not abs(float(number)) < float("inf"):
        given = described(value) if isinstance(value, Tensor) and not single else repr(value)
        raise InvalidArgument(f"{name} is {given}; it must be a finite number.")
    return int(number) if isinstance(number, Integral) else float(number)


def checked_tensor(name: str, value: Any, posterior: Posterior, *shapes: tuple[int, ...]) -> Tensor:
    """A copy of a tensor that has one of some shapes, and is finite."""
    if not isinstance(value, Tensor) or value.is_complex() or tuple(value.shape) not in shapes:
        accepted = " or ".join(str(list(shape)) for shape in shapes)
        raise InvalidArgument(
            f"{name} is {described(value)}; it must be a real tensor {accepted}, with one row for each parameter."
        )
    with torch.inference_mode(False):
        copy = value.detach().to(_like(posterior), copy=True)
    if not bool(copy.isfinite().all()):
        raise InvalidArgument(f"{name} holds NaN or infinite entries; it must be finite.")
    return copy


def _like(posterior: Posterior) -> Tensor:
    return posterior.hypers.prior_mean.detach()
