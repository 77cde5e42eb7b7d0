"""Saving, loading, moving and describing a posterior; and states that laplace-torch saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from laplace.contract.by_hand import known_form
from laplace.contract.manual_fit import checked_tensor, with_parts, with_root, without_data
from laplace.core import nested
from laplace.core.memory import ran_out
from laplace.errors import InvalidArgument, LaplaceError, StateError, StateWarning, warn
from laplace.network.model_guard import model_lock
from laplace.network.watch import Fingerprint, ModelWatch, checksums, same_sums
from laplace.posterior.calibration import Calibration
from laplace.posterior.posterior import Fitted, Posterior
from laplace.refinement.result import REFINEMENTS, Refinement
from laplace.structures.base import Curvature, SignedOptions, move
from laplace.structures.diag import DiagCurvature
from laplace.structures.fit import Fit
from laplace.structures.kron import KronCurvature, checked_damping
from laplace.weights.problem import Problem

if TYPE_CHECKING:
    from laplace.parametric import BaseLaplace

VERSION = 1
"""Version of the format of state dicts."""


@dataclass(frozen=True, eq=False)
class State:
    """Entries of a state that are read, with their kinds; those without a default are in every state."""

    version: int
    cls_name: str
    likelihood: str
    mean: Tensor
    H: Any
    loss: Tensor
    n_data: float
    n_outputs: int
    prior_precision: Tensor
    prior_mean: Tensor
    sigma_noise: Tensor
    temperature: Tensor
    enable_backprop: bool
    dict_key_x: str
    dict_key_y: str
    layout: dict[str, list[Any]]
    weights: dict[str, Any]
    model_sums: Tensor
    precision_options: dict[str, Any]
    curvature_kind: str
    coverage: dict[str, str]
    shapes: dict[str, list[int]] | None = None
    attributes: dict[str, str] | None = None
    channel_dim: int | None = -1
    draws: Tensor | None = None
    is_weighed: bool = False
    gaps: Tensor | None = None
    refinement: dict[str, Any] | None = None
    assigned_mean: Tensor | None = None
    posterior_scale: Tensor | None = None
    calibration: dict[str, Any] | None = None


_REQUIRED = tuple(entry.name for entry in fields(State) if entry.default is MISSING)

_INPUTS = frozenset({"x", "locations"})
"""Entries of a curvature's state that hold inputs as users gave them, in which a network may read infinities."""


def save(la: BaseLaplace) -> dict[str, Any]:
    """The state: tensors, numbers, strings, lists and dicts of them.

    Nothing of the training data is among them where curvature is summed over the data. A Gaussian process on a subset
    keeps what its layers see of that subset (of a first layer the inputs themselves), a variational posterior also the
    inputs that are its locations, `matrix_free` the inputs of all data; `repr` says so.
    """
    posterior = la.snapshot()
    fit, layout, refinement = posterior.map_fit, posterior.problem.layout, posterior.refinement
    curvature = fit.curvature.state()
    return {
        "version": VERSION,
        "cls_name": type(la).__name__,
        "likelihood": la.likelihood_object.name,
        "mean": posterior.expansion_point.detach().clone(),
        "H": curvature,
        "shapes": _shapes(curvature),
        "loss": fit.loss_terms.clone(),
        "n_data": fit.n_data,
        "n_outputs": fit.n_outputs,
        "prior_precision": la.prior_precision.detach().clone(),
        "prior_mean": la.prior_mean.detach().clone(),
        "sigma_noise": la.sigma_noise.detach().clone(),
        "temperature": la.temperature.detach().clone(),
        "enable_backprop": la.enable_backprop,
        "dict_key_x": la.dict_key_x,
        "dict_key_y": la.dict_key_y,
        "layout": {"names": list(layout.names), "sizes": list(layout.sizes)},
        "weights": la.weights.state(),
        "model_sums": posterior.require_fitted().watch.fingerprint.sums,
        "attributes": dict(posterior.require_fitted().watch.fingerprint.attributes),
        "precision_options": dict(la.precision_options),
        "backend": la.backend_cls.__name__,
        "channel_dim": la.channel_dim,
        "curvature_kind": la.backend_cls.kind,
        "coverage": dict(posterior.fit.coverage),
        "draws": fit.draws,
        **({"is_weighed": True} if fit.is_weighed else {}),
        **({} if fit.gaps is None else {"gaps": fit.gaps.clone()}),
        "refinement": None if refinement is None else refinement.state(),
        **_assigned(posterior),
        **({} if posterior.calibration is None else {"calibration": posterior.calibration.state()}),
    }


def _assigned(posterior: Posterior) -> dict[str, Tensor]:
    """The mean and the root of the covariance that a user assigned."""
    root = None if posterior.root is None else posterior.root.root
    values = {"assigned_mean": posterior.require_fitted().assigned_mean, "posterior_scale": root}
    return {name: value.clone() for name, value in values.items() if value is not None}


def loaded(la: BaseLaplace, state: dict[str, Any]) -> Posterior:
    """The posterior of a state, which is checked against the object; the object is not changed."""
    if isinstance(state, dict) and "cls_name" in state and not _OURS & state.keys():
        return _loaded_from_laplace_torch(la, state)
    try:
        stored = _stored(state)
        problem = _checked(la, stored)
        _warn_of_changes(la, state, "temperature", "enable_backprop", "precision_options")
        posterior = la.snapshot().calibrated(None).with_problem(problem)
        curvature = _curvature(posterior, stored.H, problem)
        if curvature.n_terms not in (1, stored.n_outputs):
            raise StateError(f"H has {curvature.n_terms} terms; it must have one, or one for each output.")
        if isinstance(curvature, DiagCurvature) and stored.curvature_kind != "hessian" and nested.least(stored.H) < 0:
            raise StateError("H has negative entries, which no sum of squares has; it was changed or damaged.")
        return _of_state(posterior, stored, curvature)
    except BaseException as error:
        if isinstance(error, LaplaceError | Warning) or not isinstance(error, Exception) or ran_out(error):
            raise
        raise StateError(f"the state is malformed: {error!r}; save it anew from the posterior.") from error


def _stored(state: Any) -> State:
    """A state whose entries are all there, and of their kinds."""
    if not isinstance(state, dict):
        raise StateError(
            f"the state is of type {type(state).__name__}; give what la.state_dict() returned: of a file "
            "torch.load(path, weights_only=True). A file of la.save is read by laplace.load(path, model)."
        )
    missing = [key for key in _REQUIRED if key not in state]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise StateError(
            f"the state lacks {missing[:3]}{more}; it is truncated, or no state of this library: that of a network "
            "goes into model.load_state_dict."
        )
    return nested.from_state(State, state)


def _checked(la: BaseLaplace, state: State) -> Problem:
    """The problem that a state is of, if it is one of this object."""
    _expect("version", state.version, VERSION)
    _expect("class", state.cls_name, type(la).__name__)
    _expect("likelihood", state.likelihood, la.likelihood_object.name)
    _expect("kind of curvature", state.curvature_kind, la.backend_cls.kind)
    if la.channels_known:
        _expect("channel_dim", state.channel_dim, la.channel_dim)
    for key, value in la.weights.state().items():
        if value is not None and not _same(value, state.weights.get(key)):
            raise StateError(f"the state has another {key} than this object; construct it with that of the state.")
    name = state.weights.get("last_layer_name")
    problem = la.weights.problem if name is None else la.weights.named(name)
    if problem is None:
        raise StateError("the state names no last layer.")
    _expect("random parameters", tuple(state.layout["names"]), problem.layout.names)
    _expect("sizes of the random parameters", tuple(state.layout["sizes"]), problem.layout.sizes)
    nested.require_sizes("the mean", state.mean, problem.layout.n_params)
    shapes = _shapes(state.H)
    if state.shapes not in (None, shapes):
        raise StateError("the state is truncated or malformed: H has other shapes or entries than what was saved.")
    if not same_sums(state.model_sums, checksums(la.weights.model)):
        raise StateError(
            "the state was saved for other weights of the model; load the weights at which the posterior was fitted "
            "into the model first."
        )
    difference = _distance(problem, state.mean)
    if difference:
        raise StateError(
            f"the state's mean lies up to {difference:.3g} away from the network's weights, at which it was saved; it "
            "was changed or damaged since."
        )
    return problem


def _curvature(posterior: Posterior, state: Any, problem: Problem) -> Curvature:
    """The curvature of a state, whose numbers are finite, of the random weights."""
    for name, tensor in nested.named_tensors(_without_inputs(state)):
        if not bool(nested.is_finite(tensor.detach())):
            raise StateError(f"H.{name} of the state holds NaN or infinite numbers; it was changed or damaged.")
    curvature = posterior.choices.structure.from_state(move(state, posterior.hypers.device, None))
    curvature.require_of(problem.layout, posterior.hypers.dtype)
    return curvature


def _without_inputs(state: Any) -> Any:
    """A curvature's state without what was given to the network."""
    if isinstance(state, dict):
        return {key: _without_inputs(part) for key, part in state.items() if key not in _INPUTS}
    return [_without_inputs(part) for part in state] if isinstance(state, list | tuple) else state


def _of_state(posterior: Posterior, state: State, curvature: Curvature) -> Posterior:
    """The posterior of a checked state."""
    _require_numbers(state)
    if posterior.choices.channel_dim is None and state.channel_dim not in (None, -1):
        posterior = posterior.with_channels(state.channel_dim)
    options = _checked_options(state.precision_options)
    keys = {"dict_key_x": state.dict_key_x, "dict_key_y": state.dict_key_y}
    own = vars(state)
    if state.calibration is not None:  # former states hold in their place those of the scaled covariance
        own = own | {name: state.calibration["before"][name] for name in _SCALED}
    posterior = posterior.with_choices(precision_options=options, **keys).assigned(**_as_given(own))
    like, n_params = posterior.hypers.prior_mean.detach(), posterior.problem.layout.n_params
    loss, mean = state.loss.to(like.device), state.assigned_mean
    coverage, draws = dict(state.coverage), state.draws
    gaps = None if state.gaps is None else state.gaps.to(like.device)
    fit = Fit(curvature, loss, state.n_data, state.n_outputs, coverage, draws, state.is_weighed, gaps)
    data = Fitted(
        fit, state.mean.to(like), ModelWatch(Fingerprint.from_model(posterior.model, attributes=state.attributes)),
        refinement=None if state.refinement is None else _refinement(posterior, state.refinement, fit),
        assigned_mean=None if mean is None else checked_tensor("assigned_mean", mean, posterior, (n_params,)),
    )  # fmt: skip
    posterior = replace(posterior, data=data)
    if state.posterior_scale is not None:
        posterior = with_root(posterior, state.posterior_scale)
    if state.calibration is None:
        return posterior
    calibration = Calibration.from_state(state.calibration, like.device)
    for noise in (calibration.sigma_noise, calibration.network_noise):
        posterior.assigned(prior_precision=calibration.prior_precision, sigma_noise=noise)
    if not (0 <= calibration.scale < math.inf and calibration.n_data >= 0):
        raise StateError(f"the calibration has the scale {calibration.scale} on {calibration.n_data} data.")
    repr(calibration)  # which reads its table
    return replace(posterior, calibration=calibration)


def _refinement(posterior: Posterior, state: dict[str, Any], fit: Fit) -> Refinement:
    """The refinement of a state."""
    curvature = _curvature(posterior, state["H"], posterior.problem)
    found = Refinement.from_state(state, fit, curvature, posterior.hypers.device)
    each = (fit.n_outputs,) if getattr(curvature, "independent", False) else ()  # processes with weights of their own
    sizes = (*each, posterior.problem.layout.n_params)
    nested.require_sizes("the refined mean", found.mean, *sizes, dtype=posterior.hypers.dtype)
    nested.require_sizes("the loss of the refined mean", found.fit.loss_terms, len(fit.loss_terms))
    _expect("terms of the refined H", curvature.n_terms, fit.curvature.n_terms)
    if not (found.is_finite and found.method in REFINEMENTS):
        raise StateError(f"the state's refinement by {found.method!r} holds numbers that are not finite, or no method.")
    return found


def _require_numbers(state: State) -> None:
    """Refuses a loss and numbers of data that no fit has."""
    nested.require_sizes("the loss", state.loss, None)
    if len(state.loss) not in (1, state.n_outputs) or not bool(nested.is_finite(state.loss.detach())):
        raise StateError(
            f"the state's loss is {state.loss.tolist()[:8]}; it must be finite, one number or one per output."
        )
    if not (0 <= state.n_data < math.inf and state.n_outputs >= 0):
        raise StateError(f"the state is of {state.n_data!r} data with {state.n_outputs} outputs; it was changed.")
    if state.sigma_noise.numel() not in (1, state.n_outputs):
        raise StateError(f"sigma_noise has {state.sigma_noise.numel()} entries, the state {state.n_outputs} outputs.")
    if state.gaps is not None:
        nested.require_sizes("gaps", state.gaps, state.n_outputs)
        if not bool(nested.is_finite(state.gaps.detach()) & (state.gaps >= 0).all()):
            raise StateError("the numbers of observed targets of the state must be finite and at least 0.")
    if state.draws is not None:
        source = torch.Generator()
        if state.draws.dtype != torch.uint8 or state.draws.ndim != 1:
            raise StateError("the state's draws are no state of a torch.Generator.")
        if len(state.draws) == len(source.get_state()):  # of another device they are shorter
            source.set_state(state.draws.cpu())


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a structure's precision, of which those of the library have values that it knows."""
    checks = {"damping": checked_damping, "indefinite": SignedOptions}
    for name in checks.keys() & options.keys():
        checks[name](options[name])
    return dict(nested.from_state(dict[str, Any], options))


def _as_given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters of a state as users give them: a 0-dim tensor is a number, which would come back as `[1]`."""
    return {n: values[n] if values[n].ndim else values[n].item() for n in _HYPER_PARAMETERS}


def _warn_of_changes(la: BaseLaplace, state: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if state[name] != getattr(la, name):
            warn(f"{name} changes from {getattr(la, name)} to {state[name]}.", StateWarning)


def _expect(what: str, given: Any, expected: Any) -> None:
    if given != expected:
        raise StateError(f"the state's {what} is {given!r}, this object's {expected!r}; load it into a matching one.")


def _shapes(value: Any, name: str = "H") -> dict[str, list[int]]:
    """Shapes of all entries of a curvature's state, by their place in it; none of what is no tensor."""
    if isinstance(value, Tensor):
        return {name: list(value.shape)}
    if not isinstance(value, dict | list | tuple):
        return {name: []}
    parts = nested.entries(value).items()
    return {place: shape for key, part in parts for place, shape in _shapes(part, f"{name}.{key}").items()}


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, Tensor):
        return isinstance(theirs, Tensor) and torch.equal(mine.cpu(), theirs.cpu())
    return mine == theirs


def checked_device(device: torch.device | str) -> torch.device:
    """A device by its name."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(
            f"device={device!r} is no device; accepted are 'cpu', 'cuda', 'cuda:0', 'mps', … or a torch.device, and a "
            "dtype as dtype=..."
        ) from error


def moved_with_model(la: BaseLaplace, device: torch.device | str | None, dtype: torch.dtype | None) -> Posterior:
    """The posterior elsewhere, after the model was moved there."""
    to = None if device is None else checked_device(device)
    if not isinstance(dtype, torch.dtype | None):
        raise InvalidArgument(f"dtype={dtype!r} is no dtype; give torch.float32 or torch.float64, for example.")
    la.snapshot().check_unchanged()
    with model_lock(la.weights.model):
        la.weights.model.to(device=to, dtype=dtype)
    return la.snapshot().moved(to, None if dtype is None else torch.promote_types(dtype, torch.float32))


def describe(la: BaseLaplace) -> str:
    """One line per fact: what was chosen, what was fitted, at which hyper-parameters."""
    posterior = la.snapshot()
    size = "found at fit" if la.n_params is None else f"{la.n_params:,} parameters in {la.n_layers} tensors"
    lines = [
        f"likelihood={la.likelihood_object.name!r}, weights={size}, backend={la.backend_cls.__name__}",
        f"prior_precision={_values(la.prior_precision)}, prior_mean={_values(la.prior_mean)}, "
        f"temperature={_values(la.temperature)}"
        + (f", sigma_noise={_values(la.sigma_noise)}" if la.likelihood_object.has_noise else ""),
    ]
    if posterior.data is None:
        lines.append("not fitted")
    else:
        fit = posterior.fit
        lines.append(f"fitted to {fit.n_data:,.10g} data with {fit.n_outputs} outputs")
        if posterior.calibration is not None:
            lines.append(posterior.calibration.sentence)
        lines += [note for note in (fit.curvature.note, prior_note(posterior), refined_note(posterior)) if note]
    return f"{type(la).__name__}(\n  " + ",\n  ".join(lines) + "\n)"


def prior_note(posterior: Posterior) -> str | None:
    """Says so where a prior is approximated by its diagonal in a Kronecker eigenbasis, or dampens."""
    damping = posterior.choices.precision_options.get("damping")
    if damping:
        factors = "" if damping is True else f", factors as {damping!r}"
        return f"damping: (√s A + √δ) ⊗ (√s B + √δ) instead of s A ⊗ B + δ{factors}"
    from laplace.large_structures.ekfac import EkfacCurvature

    in_eigenbases = issubclass(posterior.choices.structure, KronCurvature | EkfacCurvature)
    if in_eigenbases and not posterior.evidence.prior.is_constant_per_tensor:
        return "the prior varies within Kronecker blocks: its diagonal in their eigenbasis is used"
    return None


def refined_note(posterior: Posterior) -> str | None:
    """Says how a refined posterior came about."""
    refinement = posterior.refinement
    if refinement is None:
        return None
    if refinement.method == "forget":
        return f"mean moved by {refinement.distance:.2g} standard deviations, as data were removed"
    end = "converged" if refinement.converged else "not converged"
    return f"refined to the {_REFINED[refinement.method]} of the linearised network, {end} in {refinement.steps} steps"


_REFINED = {"map": "mode", "variational": "variational Gaussian"}


def _values(tensor: Tensor) -> str:
    plain = tensor.detach()
    if plain.numel() == 1:
        return f"{plain.item():.4g}"
    return f"[{plain.numel()} values from {plain.min().item():.4g} to {plain.max().item():.4g}]"


# States that laplace-torch saved: recognised by their keys, checked against the network, and read.
#
# Such a state holds mean, curvature and hyper-parameters, but no checksums of the network: instead the mean must have
# the values of its weights. The kind of curvature is not in it either, and is taken to be that of the backend.

_OURS = frozenset({"version", "layout", "weights", "model_sums"})
"""Keys of this library's states alone."""

_LEGACY_CLASSES = ("FullLaplace", "KronLaplace", "DiagLaplace", "FullLLLaplace", "KronLLLaplace", "DiagLLLaplace")
"""Classes whose states are read; of others they lack what predictions need."""

_LEGACY_KEYS = (
    "mean", "H", "loss", "n_data", "n_outputs", "likelihood", "prior_precision", "prior_mean", "sigma_noise",
    "temperature", "enable_backprop",
)  # fmt: skip

_SCALED = ("sigma_noise", "temperature", "prior_precision")
_HYPER_PARAMETERS = (*_SCALED, "prior_mean")


def _loaded_from_laplace_torch(la: BaseLaplace, state: Mapping[str, Any]) -> Posterior:
    """The posterior of a state of laplace-torch; the object is not changed."""
    try:
        problem = _checked_legacy(la, state)
        _warn_of_changes(la, state, "temperature", "enable_backprop")
        return _of_legacy_state(la.snapshot().calibrated(None).with_problem(problem), state)
    except Exception as error:
        if isinstance(error, StateError | Warning) or ran_out(error):
            raise
        reason = str(error).removesuffix(".") if isinstance(error, LaplaceError) else repr(error)
        _refuse(f"saved this state, which does not fit this object: {reason}", error)


def _checked_legacy(la: BaseLaplace, state: Mapping[str, Any]) -> Problem:
    """The problem that a state is of, if it is one of this object."""
    _check_legacy_class(la, state["cls_name"])
    missing = [key for key in _LEGACY_KEYS if key not in state]
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
    problem = _legacy_problem(la, state)
    _check_legacy_mean(problem, mean)
    return problem


def _check_legacy_class(la: BaseLaplace, name: Any) -> None:
    """Refuses states of other classes than this object's, and of those that are not read."""
    own, choices = type(la).__name__, la.snapshot().choices
    whole = la.weights.state().keys() <= {"last_layer_name"}
    if name == own and whole and known_form(choices.structure) is not None:
        return
    if name in _LEGACY_CLASSES:
        _refuse(f"saved the state of a {name}, this object is a {own}; load it into a {name}")
    _refuse(f"saved the state of a {name}; only those of {', '.join(_LEGACY_CLASSES)} can be read: call fit again")


def _legacy_problem(la: BaseLaplace, state: Mapping[str, Any]) -> Problem:
    """The random weights of this object, of the last layer that the state names."""
    given, own = state.get("_last_layer_name"), la.weights.state().get("last_layer_name")
    if given is not None and own not in (None, given):
        _refuse(f"saved this state of the last layer {given!r}, this object has {own!r}; construct it with that name")
    problem = la.weights.problem if given is None else la.weights.named(given)
    if problem is None:
        _refuse("saved this state without the name of the last layer; construct the object with last_layer_name=")
    return problem


def _check_legacy_mean(problem: Problem, mean: Tensor) -> None:
    """Requires the values of the network's weights."""
    n_params = problem.layout.n_params
    if tuple(mean.shape) != (n_params,):
        _refuse(f"saved this state of {mean.numel()} parameters, this object has {n_params}")
    largest = _distance(problem, mean)
    if largest:
        _refuse(
            f"saved this state at other weights of the network, up to {largest:.3g} away from those that it has; load "
            "the weights at which it was fitted into the model first"
        )


def _distance(problem: Problem, mean: Tensor) -> float:
    """Largest distance of a mean from the network's weights; 0 up to the rounding of the coarser dtype."""
    weights = problem.mean().detach()
    dtypes = {mean.dtype, *(problem.tensor(slot.name).dtype for slot in problem.slots)}
    rounding = max(torch.finfo(dtype).eps for dtype in dtypes)
    values = mean.detach().to(weights)
    if torch.allclose(values, weights, rtol=4 * rounding, atol=torch.finfo(weights.dtype).tiny):
        return 0.0
    return (values - weights).abs().max().item()


def _of_legacy_state(posterior: Posterior, state: Mapping[str, Any]) -> Posterior:
    """The posterior of a checked state."""
    from laplace.compat.kron import Kron  # legacy values are imported by those who use them

    posterior = posterior.assigned(**{name: _as_number(state[name]) for name in _HYPER_PARAMETERS})
    H = Kron(state["H"]) if isinstance(state["H"], list) else state["H"]
    numbers = {name: state[name] for name in ("loss", "n_data", "n_outputs")}
    made = with_parts(without_data(posterior), H=H, **numbers)
    return replace(made, data=made.require_fitted().completed())


def _as_number(value: Any) -> Any:
    """A single number as such: as a tensor it would come back with its dimensions."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _refuse(reason: str, cause: Exception | None = None) -> NoReturn:
    raise StateError(f"laplace-torch {reason}.") from cause
