"""States that laplace-torch saved: recognised by their keys, checked against the network, and read.

Such a state holds mean, curvature and hyper-parameters, but no checksums of the network: instead the mean must have the
values of its weights. The kind of curvature is not in it either, and is taken to be that of the object's backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from laplace.base import BaseLaplace
from laplace.core.memory import ran_out
from laplace.errors import LaplaceError, StateError, StateWarning, warn
from laplace.posterior.manual_fit import with_parts, without_data
from laplace.posterior.posterior import Posterior
from laplace.weights.problem import Problem

_READ = ("FullLaplace", "KronLaplace", "DiagLaplace", "FullLLLaplace", "KronLLLaplace", "DiagLLLaplace")
"""Classes whose states are read; of others they lack what predictions need."""

_REQUIRED = (
    "mean", "H", "loss", "n_data", "n_outputs", "likelihood", "prior_precision", "prior_mean", "sigma_noise",
    "temperature", "enable_backprop",
)  # fmt: skip

_HYPERS = ("sigma_noise", "temperature", "prior_precision", "prior_mean")

_HERE = frozenset({"version", "layout", "weights", "model_sums"})
"""Keys of this library's states alone."""


def is_of_laplace_torch(state: Mapping[str, Any]) -> bool:
    """True if laplace-torch saved a state."""
    return "cls_name" in state and not _HERE & state.keys()


def loaded(la: BaseLaplace, state: Mapping[str, Any]) -> Posterior:
    """The posterior of a state of laplace-torch; the object is not changed."""
    try:
        problem = _checked(la, state)
        for key in ("temperature", "enable_backprop"):
            if state[key] != getattr(la, key):
                warn(f"{key} changes from {getattr(la, key)} to {state[key]}.", StateWarning)
        return _of_state(la.snapshot().uncalibrated().with_problem(problem), state)
    except Exception as error:
        if isinstance(error, StateError | Warning) or ran_out(error):
            raise
        reason = str(error).removesuffix(".") if isinstance(error, LaplaceError) else repr(error)
        _refuse(f"saved this state, which does not fit this object: {reason}", error)


def _checked(la: BaseLaplace, state: Mapping[str, Any]) -> Problem:
    """The problem that a state is of, if it is one of this object."""
    _check_class(la, state["cls_name"])
    missing = [key for key in _REQUIRED if key not in state]
    if missing:
        _refuse(f"saved this state, which lacks {missing}; it is truncated")
    if state["likelihood"] != la.likelihood_object.name:
        likelihood = la.likelihood_object.name
        _refuse(f"saved this state for likelihood={str(state['likelihood'])!r}, this object has {likelihood!r}")
    mean, numbers = state["mean"], (float(state["n_data"]), float(state["n_outputs"]))
    if not isinstance(mean, Tensor) or 0 in numbers:
        _refuse("saved this state before a fit: there is nothing to load")
    if not isinstance(state["enable_backprop"], bool):
        _refuse(f"saved this state with enable_backprop={state['enable_backprop']!r}; it must be True or False")
    problem = _problem(la, state)
    _check_mean(problem, mean)
    return problem


def _check_class(la: BaseLaplace, name: Any) -> None:
    """Refuses states of other classes than this object's, and of those that are not read."""
    own, choices = type(la).__name__, la.snapshot().choices
    whole = la.weights.state().keys() <= {"last_layer_name"}
    if name == own and whole and choices.structure.by_hand is not None:
        return
    if name in _READ:
        _refuse(f"saved the state of a {name}, this object is a {own}; load it into a {name}")
    _refuse(f"saved the state of a {name}; only those of {', '.join(_READ)} can be read: call fit again")


def _problem(la: BaseLaplace, state: Mapping[str, Any]) -> Problem:
    """The random weights of this object, of the last layer that the state names."""
    given, own = state.get("_last_layer_name"), la.weights.state().get("last_layer_name")
    if given is not None and own not in (None, given):
        _refuse(f"saved this state of the last layer {given!r}, this object has {own!r}; construct it with that name")
    problem = la.weights.problem if given is None else la.weights.named(given)
    if problem is None:
        _refuse("saved this state without the name of the last layer; construct the object with last_layer_name=")
    return problem


def _check_mean(problem: Problem, mean: Tensor) -> None:
    """Requires the values of the network's weights, to the rounding of the coarser dtype."""
    weights = problem.mean().detach()
    if mean.shape != weights.shape:
        _refuse(f"saved this state of {mean.numel()} parameters, this object has {weights.numel()}")
    dtypes = {mean.dtype, *(problem.tensor(slot.name).dtype for slot in problem.slots)}
    rounding = max(torch.finfo(dtype).eps for dtype in dtypes)
    values = mean.to(weights)
    if not torch.allclose(values, weights, rtol=4 * rounding, atol=torch.finfo(weights.dtype).tiny):
        largest = (values - weights).abs().max().item()
        _refuse(
            f"saved this state at other weights of the network, up to {largest:.3g} away from those that it has; load "
            "the weights at which it was fitted into the model first"
        )


def _of_state(posterior: Posterior, state: Mapping[str, Any]) -> Posterior:
    """The posterior of a checked state."""
    from laplace.compat.kron import Kron  # legacy values are imported by those who use them

    posterior = posterior.assigned(**{name: _plain(state[name]) for name in _HYPERS})
    H = Kron(state["H"]) if isinstance(state["H"], list) else state["H"]
    numbers = {name: state[name] for name in ("loss", "n_data", "n_outputs")}
    made = with_parts(without_data(posterior), H=H, **numbers)
    return replace(made, data=made.require_fitted().completed())


def _plain(value: Any) -> Any:
    """A single number as such: as a tensor it would come back with its dimensions."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _refuse(reason: str, cause: Exception | None = None) -> NoReturn:
    raise StateError(f"laplace-torch {reason}.") from cause
