"""Members that users' classes define: which there are, and the refusal of those that would have no effect.

A public method or property of a user's class takes effect wherever the library needs what it computes. What would be
ignored in silence, a private hook of a similar library or of this one, is refused when the class is created or the
attribute assigned.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import Any, Generic, Protocol

from torch import Tensor

from laplace.errors import InvalidArgument, ReadOnlyError, UnsupportedError

_LIBRARY = __name__.split(".")[0]

_BACKEND = "write a curvature backend, a class derived from CurvatureInterface, and pass it as backend="
_STRUCTURE = "write a structure, a class derived from Curvature, and bind it as `structure`"
_COVARIANCE = "override functional_variance and functional_covariance"
_PREDICTION = "override __call__, or functional_variance for the covariance alone"
_WEIGHTS = "override sample for the weights, or functional_samples and predictive_samples for what they lead to"
_TUNING = "pass loss= to optimize_prior_precision, or override optimize_prior_precision"
_KERNELS = "override functional_variance and functional_covariance, or write a structure"

HOOKS: dict[str, str] = {
    "_check_H_init": _STRUCTURE,
    "_rescale_factors": _STRUCTURE,
    "_compute_scale": "override posterior_scale or posterior_precision",
    "_posterior_scale": "override posterior_scale",
    "_H_factor": "pass a likelihood object with a curvature_scale of its own, or set sigma_noise and temperature",
    "_check_fit": "read is_fitted, or call fitted()",
    "_check_jacobians": "override functional_variance, which is given the Jacobians",
    "_glm_forward_call": _PREDICTION,
    "_glm_predictive_distribution": _COVARIANCE,
    "_glm_functional_samples": "override functional_samples",
    "_glm_predictive_samples": "override predictive_samples",
    "_nn_forward_call": _PREDICTION,
    "_nn_functional_samples": _WEIGHTS,
    "_nn_predictive_samples": _WEIGHTS,
    "_nn_predictive_classification": _WEIGHTS,
    "_nn_predictive_regression": _WEIGHTS,
    "_gridsearch": _TUNING,
    "_validate": _TUNING,
    "_find_last_layer": "pass last_layer_name=",
    "_last_layer_name": "pass last_layer_name=",
    "_device": "call la.to(device)",
    "_dtype": "call la.to(dtype=...)",
    "_backend_cls": "pass backend=, or assign backend_cls before fit",
    "_backend_kwargs": "pass backend_kwargs=",
    "_asdl_fisher_kwargs": "pass asdl_fisher_kwargs=",
    "_jacobians": _BACKEND,
    "_kernel_batch": _KERNELS,
    "_kernel_star": _KERNELS,
    "_kernel_batch_star": _KERNELS,
    "_store_K_batch": _KERNELS,
    "_build_L": _KERNELS,
    "_build_Sigma_inv": _KERNELS,
    "_mean_scatter_term_batch": "override scatter",
}
"""Private hooks of laplace-torch without an effect here, and what has one."""

_OF_FITS = {"_curv_closure": _BACKEND, "_init_H": _STRUCTURE}
"""Hooks of fits by hand, and what has an effect where a structure's curvature is not summed by hand."""

_PYTHONS = (object, ABC, Generic, Protocol)
"""Bases that are nobody's."""

_FREE = frozenset({"_key", "_abc_impl", "_originals"})
"""Private names of the library's classes that users may define: the key by which `Laplace(...)` finds a class."""

HELD = frozenset({"_posterior"})
"""Private attributes of objects: a definition in a class would be hidden by them."""

_FIXED = {"model": "the network", "likelihood": "the likelihood", "structure": "the structure"}
"""Public attributes that are read when an object is made, and never again."""

_MISSPELT = {
    "prior_prec": "prior_precision",
    "prior_precison": "prior_precision",
    "prior_precisions": "prior_precision",
    "precision": "prior_precision",
    "delta": "prior_precision",
    "noise": "sigma_noise",
    "sigma": "sigma_noise",
    "noise_sigma": "sigma_noise",
    "temp": "temperature",
}
"""Names by which hyper-parameters are assigned by mistake; the assignment would leave them as they are."""

_READ_ONLY: dict[str, str] = {
    "backend": "pass backend= (a class) and backend_kwargs= to the constructor",
    "last_layer_name": "pass last_layer_name= to the constructor",
    "subnetwork_indices": "pass subnetwork_indices= to the constructor",
    "damping": "pass damping= to the constructor",
    "prior_precision_diag": "assign prior_precision, one number, one per tensor or one per parameter",
}
"""What cannot be assigned, and what to do instead."""

HYPERPARAMETERS = (
    "prior", "prior_precision", "prior_precision_diag", "prior_mean", "sigma_noise", "temperature", "mean", "loss",
    "n_data", "n_outputs", "H", "evidence",
)  # fmt: skip
"""What decides the precision and every term of the evidence."""

MOMENTS = ("posterior_precision", "posterior_scale", "posterior_covariance", "posterior_variance")
"""Moments of the posterior, each of which follows from those before it."""

EVIDENCE = (
    "log_likelihood", "scatter", "log_det_ratio", "log_det_prior_precision", "log_det_posterior_precision",
    "posterior_precision",
)  # fmt: skip
"""Terms of the log evidence."""

COVARIANCES = ("functional_variance", "functional_covariance")

POSTERIOR = (*HYPERPARAMETERS, *MOMENTS, *COVARIANCES, "posterior")
"""What the covariance of linearised outputs follows from."""

PREDICTIONS = ("__call__", "functional_variance_fast", "functional_samples", "predictive_samples")
"""What predictions at given inputs follow from, besides covariances and samples of the weights."""

FITTING = ("curvature_of", "start_fit", *_OF_FITS)
"""What a fit sums up, batch by batch."""

_KNOWN = frozenset(
    (*POSTERIOR, *FITTING, *EVIDENCE, *PREDICTIONS, "sample", "square_norm", "log_marginal_likelihood", "predictive")
)
"""All of these."""

_ORIGINALS = "_originals"
"""Where a class keeps what the library defines of them: every class its own, so that it lives as long as the class."""


def overridden(cls: type) -> frozenset[str]:
    """Names of the members that a user's class, or a user's assignment to one of the library's, defines."""
    return frozenset(
        name for name, original in getattr(cls, _ORIGINALS).items() if getattr(cls, name, None) is not original
    )


def is_overridden(la: object, *names: str) -> bool:
    """True if the class of an object, or a user's assignment to it, defines one of them."""
    cls, originals = type(la), getattr(type(la), _ORIGINALS)
    return any(getattr(cls, name, None) is not originals[name] for name in names)


def _owner(cls: type, name: str) -> type | None:
    return next((base for base in cls.__mro__ if name in vars(base)), None)


def remember(cls: type) -> None:
    """Keeps what a class of the library defines of the members that users may override."""
    setattr(cls, _ORIGINALS, {name: getattr(cls, name, None) for name in _KNOWN})


def check_class(cls: type, root: type, known_form: Callable[[Any], object]) -> None:
    """Refuses a class of a user's that would be ignored in part; `known_form` of a structure is None without a form."""
    library = [base for base in cls.__mro__ if is_ours(base)]
    known = [base for base in library if _ORIGINALS in vars(base)]
    originals = {
        name: next((vars(base)[_ORIGINALS][name] for base in known if name in vars(base)), None) for name in _KNOWN
    }
    setattr(cls, _ORIGINALS, originals)
    private = HELD.union(*map(vars, library)) - _FREE
    structure = getattr(cls, "structure", None)
    by_hand = structure is not None and known_form(structure) is not None
    derived = any(issubclass(base, root) and base is not root for base in library)
    users = [base for base in cls.__mro__ if base not in (*library, *_PYTHONS)]
    for name in (name for base in users for name in vars(base) if _owner(cls, name) is base):
        if not name.startswith("_") or name.startswith("__"):
            continue
        if (name in _OF_FITS and by_hand) or (name in HOOKS | _OF_FITS and not derived):
            continue  # of a class that derives from the root alone every call is its own
        if name in HOOKS or name in _OF_FITS:
            raise UnsupportedError(
                f"class {cls.__name__} defines {name}, a private hook that this library never calls: it would have no "
                f"effect. Instead, {(HOOKS | _OF_FITS)[name]}."
            )
        if name in private:
            raise UnsupportedError(
                f"class {cls.__name__} defines {name}, which is private to this library and may change or have no "
                "effect. Override a public method or property (docs/extending.md, Subclassing), or choose another name."
            )


def is_ours(part: Any) -> bool:
    """True if a class or function belongs to the library."""
    return part.__module__.partition(".")[0] == _LIBRARY


def require_structure(la: object, root: type) -> None:
    """Raises `UnsupportedError` if the class of a new object chooses no structure, and computes nothing itself."""
    cls = type(la)
    fitting = _owner(cls, "fit")
    own = is_overridden(la, *FITTING, *MOMENTS, *COVARIANCES) or (fitting is not None and not is_ours(fitting))
    if _owner(cls, "structure") is root and not own:
        raise UnsupportedError(
            f"class {cls.__name__} has no structure of the curvature; derive it from a class that has one, such as "
            "FullLaplace, KronLaplace or DiagLLLaplace, or bind one: `structure = ...` (docs/add_a_structure.md), or "
            "define curvature_of and posterior_precision (docs/extending.md)."
        )


def undefined(la: object, name: str, instead: str) -> UnsupportedError:
    """The error of a method that needs a posterior over weights; a class without one defines `instead`."""
    return UnsupportedError(
        f"class {type(la).__name__} has no {name}; define {instead}, or derive it from ParametricLaplace, the base of "
        "posteriors over weights."
    )


def check_assignment(la: object, name: str, value: Any) -> None:
    """Raises `ReadOnlyError` at an assignment that would be ignored; new attributes are free."""
    if name in HOOKS and name != "_posterior_scale":
        raise ReadOnlyError(f"{name} is assigned, but this library never reads it: instead, {HOOKS[name]}.")
    if name in _FIXED and getattr(la, name, value) != value:
        raise ReadOnlyError(
            f"{name} is assigned, but {_FIXED[name]} is read when the object is made: make a new one, "
            f"{type(la).__name__}(...)."
        )
    if name in _MISSPELT and is_ours(type(la)) and _owner(type(la), name) is None:
        raise ReadOnlyError(f"{name} is assigned, but nothing reads it; did you mean {_MISSPELT[name]!r}?")
    if name == "__call__":
        raise ReadOnlyError(
            "__call__ is assigned to an object, where Python never looks for it; override it in a class."
        )
    if name in _KNOWN and callable(getattr(type(la), name, None)):
        raise ReadOnlyError(
            f"{name} is assigned to an object, of which nothing reads it; override it in a class, "
            f"`class Mine({type(la).__name__}): def {name}(self, ...)` (docs/extending.md, Subclassing)."
        )


def check_backend_assignment(backend: object, name: str) -> None:
    """Raises `ReadOnlyError` where a library's backend is given a factor of its loss, which reaches no curvature."""
    if name == "factor" and is_ours(type(backend)):
        raise ReadOnlyError(
            f"{name} of {type(backend).__name__} is assigned, but the curvature is that of the likelihood: instead, "
            "pass a likelihood object of your own (docs/extending.md, A likelihood), or reshape targets in the loader."
        )


def refused(la: object, name: str, error: AttributeError) -> AttributeError:
    """Error for an assignment that Python refused; for a computed property it says what to do."""
    owner = _owner(type(la), name)
    member = None if owner is None else vars(owner)[name]
    if owner is None or not is_ours(owner) or not isinstance(member, property) or member.fset is not None:
        return error
    remedy = _READ_ONLY.get(name, "it is computed: to compute it in another way, override it in a class of your own")
    return ReadOnlyError(f"{name} of {type(la).__name__} cannot be assigned; {remedy}.")


def require_positive(la: Any, name: str, value: Tensor) -> Tensor:
    """The value that a user's member gave, if all of it is positive (`InvalidArgument`)."""
    if not bool((value > 0).all()):
        raise InvalidArgument(f"{name} of class {type(la).__name__} holds values that are not positive.")
    return value


def require_shape(la: Any, name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    """The value that a user's member gave, if it is a tensor of this shape (`InvalidArgument`)."""
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        raise wrong_shape(la, name, value, str(list(shape)))
    return value


def wrong_shape(la: Any, name: str, value: Any, expected: str) -> InvalidArgument:
    """The error of a user's member that gave something else than expected."""
    return InvalidArgument(f"{name} of class {type(la).__name__} gave {described(value)}; it must be {expected}.")


def described(value: Any) -> str:
    """Words for what was given, for messages."""
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
