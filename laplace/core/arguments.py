"""Checks of arguments: numbers and flags, and calls with missing, unknown or surplus names."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, wraps
from inspect import Parameter
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from laplace.core.overrides import is_ours
from laplace.errors import InvalidArgument, InvalidCall, InvalidType, LaplaceError

if TYPE_CHECKING:
    from typing_extensions import Self


# Numbers, counts and flags.


def as_tensor(name: str, value: Any, *, like: Tensor) -> Tensor:
    """A copy of a real scalar or of a tensor of at most one dimension, like `like`, with the caller's graph."""
    if isinstance(value, Tensor):
        if value.is_complex() or value.layout is not torch.strided:
            raise InvalidArgument(f"{name} must be real; a tensor of {value.dtype}, {value.layout} was given.")
        if value.ndim > 1 or value.numel() == 0:
            shape = tuple(value.shape)
            raise InvalidArgument(f"{name} must be a scalar or a vector; a tensor of shape {shape} was given.")
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidType(f"{name} must be a real number or a tensor; {type(value).__name__} was given.")
    with torch.inference_mode(False):  # a tensor made in inference mode could never be differentiated
        if isinstance(value, Tensor):
            return value.to(device=like.device, dtype=like.dtype, copy=True)
        return torch.tensor(float(value), dtype=like.dtype, device=like.device)


def on_host(given: float | Tensor, value: Tensor) -> Tensor:
    """What is checked of a value on a device: itself, or the number that it was given as, which nobody waits for."""
    return value if isinstance(given, Tensor) else torch.tensor(float(given), dtype=value.dtype)


def positive(name: str, value: Tensor) -> Tensor:
    """The value, if every entry is positive and finite."""
    plain = value.detach()
    if plain.numel() == 1 and 0 < plain.item() < math.inf:
        return value
    accepted = (plain > 0) & (plain < math.inf)
    if not bool(accepted.all()):
        bad = plain[~accepted] if plain.ndim else plain
        raise InvalidArgument(f"{name} must be positive and finite; {bad.flatten()[0].item():g} was given.")
    return value


def finite(name: str, value: Tensor) -> Tensor:
    """The value, if every entry is finite."""
    plain = value.detach()
    if not (math.isfinite(plain.item()) if plain.numel() == 1 else bool(plain.isfinite().all())):
        raise InvalidArgument(f"{name} must be finite.")
    return value


def check_length(name: str, value: Tensor, accepted: dict[str, int]) -> None:
    """Checks the length of a vector against the accepted ones."""
    if value.numel() not in accepted.values():
        lengths = ", ".join(f"{length} ({what})" for what, length in accepted.items())
        raise InvalidArgument(f"{name} has length {value.numel()}; accepted are {lengths}.")


def check_counts(least: int = 1, /, **counts: Any) -> None:
    """Refuses numbers of samples, steps or data that are none."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            accepted = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise InvalidArgument(f"{name}={value!r}; it must be {accepted}.")


def check_flag(name: str, value: Any, remedy: str) -> None:
    """Refuses what is neither True nor False."""
    if not isinstance(value, Integral | np.bool_):
        raise InvalidType(f"{name} must be True or False; {type(value).__name__} was given. {remedy}")


# Calls with missing, unknown or surplus arguments: errors that say which name was meant, and what a missing one is.


P = ParamSpec("P")
R = TypeVar("R")

_CLOSE = 0.6
"""Similarity of two names (0 to 1) from which one may be a misspelling of the other."""

_MISSING = {
    "likelihood": "one of 'classification', 'regression', 'bernoulli', 'poisson', 'heteroscedastic', "
    "'mean_log_variance' and 'reward_modeling'",
    "subnetwork_indices": "int64 indices of the flattened trainable parameters, which a mask of laplace.utils gives: "
    "LargestMagnitudeSubnetMask(model, n_params_subnet=100).select()",
    "n_subset": "how many data the Gaussian process is of, e.g. n_subset=200 (all data: their number)",
    "subsample_size": "how many data the directions are of, e.g. subsample_size=200",
    "n_eigenvalues": "how many of their directions are kept, e.g. n_eigenvalues=20",
    "inducing_locations": "inputs at which the posterior is represented, [M, …], or None with num_inducing=, which "
    "takes training inputs",
    "train_loader": "batches (x, y), a DataLoader or a list: [(x, y)]",
    "x": "inputs [B, …]; a mapping is one argument, la(batch)",
}
"""What to pass for an argument without a default."""

_ELSEWHERE = {
    "last_layer_name": "it is an argument of subset_of_weights='last_layer'",
    "feature_reduction": "it is an argument of subset_of_weights='last_layer'",
    "subnetwork_indices": "it is an argument of subset_of_weights='subnetwork'",
    "damping": "it is an argument of hessian_structure='kron'",
    "n_subset": "it is an argument of hessian_structure='gp'",
    "prior_precision": "give it to the constructor, or assign la.prior_precision",
    "sigma_noise": "give it to the constructor, or assign la.sigma_noise",
    "temperature": "give it to the constructor, or assign la.temperature",
    "seed": "give generator=torch.Generator().manual_seed(seed) where random numbers are drawn",
}
"""Where names belong that are arguments of other calls than the one that they were given to."""


class _ConstructorSignature:
    """Signature of a class for `inspect.signature`: its constructor's arguments, also where `__new__` would come first.

    That is so in Python 3.10. An object of the class has the signature of its own `__call__`.
    """

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        whole = inspect.signature(owner.__init__)
        return whole.replace(parameters=list(whole.parameters.values())[1:])


class CheckedConstructor:
    """Refuses unknown arguments of a constructor with errors of this library; the constructor stays a plain function.

    A class of the library describes in its docstring the arguments that its bases do not have. All those of its
    constructor are in its help, in order, in the words of the class or of the nearest base.
    """

    __signature__ = _ConstructorSignature()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if is_ours(cls) and cls.__doc__ is not None:
            cls.__doc__ = _with_arguments(cls.__doc__, cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """An object, if the arguments fit; without any, as in copies, the constructor itself says what it needs."""
        if args or kwargs:
            check_call(cls.__init__, cls.__name__, (None, *args), kwargs)
        return super().__new__(cls)


_SECTION = re.compile(r"^Args:\n((?: {4}.*\n?)+)\n*", re.MULTILINE)
_ARGUMENT = re.compile(r"^ {4}(\w+): .*(?:\n {8}.*)*", re.MULTILINE)
_AFTER = re.compile(r"^(?=(?:Attributes|Returns|Raises|Warns):$)|\Z", re.MULTILINE)


def _with_arguments(docstring: str, cls: type) -> str:
    """The docstring of a class with the arguments of its constructor."""
    text = inspect.cleandoc(docstring)
    described = {
        m[1]: m[0] for doc in (*(base.__doc__ for base in reversed(cls.__bases__)), text) for m in _arguments(doc)
    }
    accepted = inspect.signature(cls.__init__).parameters
    derived = () if "__init__" in vars(cls) else _arguments(text)  # some belong to classes that are derived from it
    further = [m[1] for m in derived if m[1] not in accepted]
    known = [described[name] for name in (*accepted, *further) if name in described]
    if not known:
        return docstring
    head, *rest = _AFTER.split(_SECTION.sub("", text), maxsplit=1)
    return "\n".join([head.rstrip(), "", "Args:", *known, "", *rest]).rstrip()


def _arguments(docstring: str | None) -> list[re.Match[str]]:
    section = _SECTION.search(inspect.cleandoc(docstring or ""))
    return [] if section is None else list(_ARGUMENT.finditer(section[1]))


def came_from_inside(error: Exception) -> bool:
    """True of an error that a called function raised, and not the call itself; asked where the call is.

    A frame that kept the traceback, which holds the frame, would keep all that it refers to until memory is collected.
    """
    trace = error.__traceback__
    return trace is None or trace.tb_next is not None


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Makes Python's errors about a function's own arguments those of this library; a right call costs nothing."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if isinstance(error, LaplaceError) or came_from_inside(error):
                raise
        check_call(function, function.__name__, args, kwargs)
        return function(*args, **kwargs)

    return call


def check_call(
    function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any], also: Iterable[str] = ()
) -> None:
    """Checks that a function can be called with arguments."""
    if _fit(function, args, kwargs):
        return
    signature = _signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        parameters = {key: p for key, p in signature.parameters.items() if key != "self"}
        known = [*also, *(key for key, p in parameters.items() if p.kind is not Parameter.VAR_KEYWORD)]
        unknown = [key for key in kwargs if key not in known]
        if unknown and not any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()):
            raise InvalidCall(unknown_argument(name, unknown[0], known)) from None
        given = [*list(signature.parameters)[: len(args)], *kwargs]
        lacking = [key for key, p in parameters.items() if _is_required(p) and key not in given]
        if lacking:
            raise InvalidCall(f"{name}() needs {' and '.join(map(_described, lacking))}.") from None
        raise InvalidCall(f"{name}(): {error}; accepted are, in this order, {', '.join(known)}.") from None


def _fit(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if arguments fit; False where a closer look has to tell."""
    places, names, required = _accepted(function)
    given = {*places[: len(args)], *kwargs}
    return len(given) == len(args) + len(kwargs) and names >= given >= required


@lru_cache(256)
def _accepted(function: Callable[..., Any]) -> tuple[tuple[str, ...], frozenset[str], frozenset[str]]:
    """Names of a function's arguments by position, of all that can be given, and of those that must be."""
    parameters = _signature(function).parameters
    places = tuple(name for name, p in parameters.items() if p.kind is Parameter.POSITIONAL_OR_KEYWORD)
    names = {*places, *(name for name, p in parameters.items() if p.kind is Parameter.KEYWORD_ONLY)}
    required = (name for name, parameter in parameters.items() if _is_required(parameter))
    return places, frozenset(names), frozenset(required)


@lru_cache(256)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def unknown_argument(name: str, given: str, accepted: Sequence[str]) -> str:
    """Message about an unknown argument: the accepted name that was meant, where it belongs, or all names."""
    meant = hint(given, accepted) or f"accepted are {', '.join(accepted)}."
    return f"{name}() has no argument {given!r}; {meant}"


def hint(given: str, accepted: Sequence[str]) -> str:
    """The accepted name that an unknown one may stand for, or where it belongs; empty if neither is known."""
    near = nearest(given, accepted)
    if given in _ELSEWHERE and given not in accepted:
        return f"{_ELSEWHERE[given]}."
    return "" if near is None else f"did you mean {near!r}?"


def nearest(given: str, accepted: Sequence[str]) -> str | None:
    """The accepted name that a given one resembles, or is a part of; None if there is none."""
    others = [name for name in accepted if name != given]
    close = difflib.get_close_matches(given, others, 1, _CLOSE)
    parts = [name for name in others if len(given) > 3 and given in name]
    return next(iter(close or parts), None)


def _is_required(parameter: Parameter) -> bool:
    return parameter.default is Parameter.empty and parameter.kind not in (
        Parameter.VAR_KEYWORD,
        Parameter.VAR_POSITIONAL,
    )


def _described(name: str) -> str:
    return f"{name!r}, {_MISSING[name]}" if name in _MISSING else repr(name)
