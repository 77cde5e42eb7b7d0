"""Loading what `la.save` wrote: classes and likelihoods are found by their names in the registries alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from laplace.core import nested
from laplace.core.memory import ran_out
from laplace.core.registry import Cell
from laplace.errors import InvalidArgument, InvalidCall, InvalidType, LaplaceError, StateError
from laplace.grid import class_of
from laplace.mixture import MixtureLaplace
from laplace.network.model_guard import require_module, unwrap
from laplace.parametric import ParametricLaplace
from laplace.recipe import CALLS, described, outline
from laplace.weights.last_layer import network_of

_COMPARED = ("likelihood", "backend")
"""Objects that are compared with those of the posterior that was saved, by their class and its plain options."""


def load(
    path: str | os.PathLike[str],
    model: nn.Module | Sequence[nn.Module],
    *,
    device: torch.device | str | None = None,
    **objects: Any,
) -> Any:
    """Loads a posterior that `la.save` wrote, given the same network.

    No code from the file is run. Classes and likelihoods are looked up by name: register your own before the call.

    Args:
        path: The file.
        model: The network, with the weights at which the posterior was fitted. For a mixture: the networks of the
            components, in their order, or the one network that all of them share.
        device: Device to which posterior and network are moved, as by `la.to`; None for where the network is.
        **objects: Constructor arguments that the file cannot store: a `backend` other than the native GGN, a likelihood
            object, `forward_fn`, and `backend_kwargs` with objects in them. For a mixture: one for all components, or a
            list with one entry per component.

    Returns:
        An object of the class that was saved, which makes the same predictions.

    Raises:
        FileNotFoundError: There is no such file.
        InvalidCall: An object is missing, or one too many was given; the message names it.
        InvalidType: The network was given in place of the file.
        MissingDependency: safetensors is not installed.
        StateError: The file is damaged, of another version, not written by `la.save`, or of another network; its class
            is not registered; or an object has another class than the one in use when the file was saved.
    """
    if isinstance(path, nn.Module):
        raise InvalidType(f"path is a {type(path).__name__}; the file comes first: laplace.load(path, model).")
    saved = nested.read(path)
    with _naming_file(path):
        recipe, state = saved["recipe"], saved["state"]
        parts = recipe["components"] if "components" in recipe else [recipe]
        needed = {str(name): str(kind) for part in parts for name, kind in part["objects"].items()}
    missing = [f"{name}= (it was {needed[name] or 'unknown'})" for name in sorted(needed.keys() - objects.keys())]
    if missing:
        raise InvalidCall(f"laplace.load() needs {' and '.join(missing)}: no file without code can hold it.")
    unknown = sorted(objects.keys() - needed.keys())
    if unknown:
        raise InvalidCall(
            f"laplace.load() was given {', '.join(unknown)}; of this posterior it accepts "
            f"{', '.join(sorted(needed)) or 'none'} beside device, for the file holds all other arguments."
        )
    with _naming_file(path):
        made = [
            _made(part, network, {name: own[place] for name, own in _spread(objects, len(parts)).items()})
            for place, (part, network) in enumerate(zip(parts, _networks(model, recipe, len(parts)), strict=True))
        ]
        la = MixtureLaplace(made) if "components" in recipe else made[0]
        la.load_state_dict(state)
    return la if device is None else la.to(device)


@contextmanager
def _naming_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns whatever goes wrong with what a file holds into an error that names the file."""
    try:
        yield
    except Exception as error:
        if isinstance(error, Warning) or ran_out(error):
            raise
        reason = str(error) if isinstance(error, LaplaceError) else f"it is damaged, {error!r}."
        raise StateError(f"{os.fspath(path)!r} holds a posterior that could not be loaded: {reason}") from error


def _networks(model: Any, recipe: Mapping[str, Any], count: int) -> list[Any]:
    """The network of every component; of a single posterior the one that was given."""
    if "components" not in recipe or (isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList)):
        return [model] * count
    if len(model) != count:
        raise InvalidArgument(
            f"{len(model)} networks were given, it has {count} components; give as many, in their order."
        )
    return [*model]


def _spread(objects: Mapping[str, Any], count: int) -> dict[str, list[Any]]:
    """The objects of every component."""
    spread = {name: value if isinstance(value, list) else [value] * count for name, value in objects.items()}
    for name, values in spread.items():
        if len(values) != count:
            raise InvalidArgument(f"{name}= has {len(values)} entries, it has {count} components.")
    return spread


def _made(recipe: Mapping[str, Any], model: Any, objects: Mapping[str, Any]) -> ParametricLaplace:
    """A posterior, not fitted, of a class that is registered."""
    _check_network(recipe["network"], outline(unwrap(require_module(network_of(model)))))
    own = {name: objects[name] for name in recipe["objects"]}
    for name in _COMPARED:
        if name in own and described(own[name]) != recipe["objects"][name]:
            raise InvalidArgument(
                f"{name}={own[name]!r} was given, a {described(own[name])}; it was saved with a "
                f"{recipe['objects'][name]}."
            )
    cls = class_of(Cell.from_key(tuple(recipe["cell"])))
    if described(cls) != recipe["cls_name"]:
        raise InvalidArgument(
            f"its class {recipe['cls_name']!r} is not registered; for {recipe['cell']} Laplace(...) has "
            f"{described(cls)}."
        )
    for name in CALLS:
        if name in recipe:
            own["forward_fn"] = CALLS[name](*recipe[name])
    return cls(model, **recipe["arguments"], **own)


def _check_network(saved: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Refuses a network with other tensors or layers; their values are compared by those who load the state."""
    differing = [name for name in {**saved, **given} if saved.get(name) != given.get(name)]
    if differing:
        parts = [f"{name!r} was {saved.get(name, 'none')}, is {given.get(name, 'none')}" for name in differing[:3]]
        more = f", and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise StateError(f"it is of another network: {'; '.join(parts)}{more}.")
