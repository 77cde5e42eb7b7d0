"""What makes a posterior again beside network and state: its class and its arguments, as a file holds them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import nn

from laplace import curvature
from laplace.core import nested
from laplace.core.batch import ForwardFn
from laplace.core.registry import Cell, Registry
from laplace.errors import InvalidType, UnsupportedError
from laplace.network.model_guard import model_lock
from laplace.posterior.posterior import Choices

if TYPE_CHECKING:
    from laplace.parametric import BaseLaplace

_IN_STATE = ("sigma_noise", "prior_precision", "prior_mean")
"""Arguments whose present values are in the state."""

_LAYERS = "torch.nn."
"""Where PyTorch's own layers are, whose names do not change."""

CALLS: Registry[Callable[..., ForwardFn]] = Registry("forward_fn")
"""Calls of a network that files of mixtures hold: dataclasses of plain values, by their `saved_as`."""
CALLS.refer("head", "laplace.extensions.mimo:HeadCall")

_INSTEAD = "save its state, torch.save(la.state_dict(), path), and load that into an object that you make"


@dataclass(frozen=True)
class Recipe:
    """Class and arguments by which a posterior is made again, besides its network."""

    cell: Cell  # names of its cell of the grid, by which its class is found
    cls_name: str  # name of the class, for messages
    arguments: Mapping[str, Any]  # arguments of its constructor, by name
    # arguments that no file without code can hold, by name, each as of `described`; an empty text for an argument that
    # nobody knows any more
    objects: Mapping[str, str]
    network: Mapping[str, str]  # dtypes and shapes of the network's tensors, and classes of PyTorch's layers, by name

    def plain(self) -> dict[str, Any]:
        """The recipe as a file holds it."""
        return {"cell": list(self.cell)} | {f.name: getattr(self, f.name) for f in fields(self) if f.name != "cell"}

    @classmethod
    def from_object(cls, la: BaseLaplace) -> Recipe:
        """The recipe of a posterior."""
        kind, choices = type(la), la.snapshot().choices
        key = vars(kind).get("_key")
        if key is None:
            raise UnsupportedError(
                f"la.save of a {kind.__name__}, a class that Laplace(...) does not find by names; give the class a "
                f"_key of its own (docs/add_a_structure.md), or {_INSTEAD}."
            )
        if choices.with_loss_of(la.snapshot().cache.backend).loss is not None:
            raise UnsupportedError(f"la.save of a posterior whose backend has a loss that was assigned; {_INSTEAD}.")
        known, names = _known(la, choices), sorted(_parameters(kind))
        if "structure_kwargs" in names:
            options = {field.name for field in fields(kind.structure.options)}.difference(names)
            known["structure_kwargs"] = {name: known[name] for name in sorted(options)}
        arguments = {name: known[name] for name in names if name in known and _is_plain(known[name])}
        objects = {name: described(known[name]) if name in known else "" for name in names if name not in arguments}
        return cls(Cell.from_key(key), kind.__name__, arguments, objects, outline(la.weights.model))


def outline(model: nn.Module) -> dict[str, str]:
    """Dtypes and shapes of a network's parameters and buffers, and classes of PyTorch's own layers, by name.

    Activations, say, which have no tensors: with another one the same weights are another network.
    """
    with model_lock(model):
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        shapes = {name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in tensors.items()}
        layers = {name: _layer(type(module)) for name, module in model.named_modules() if not module._modules}
        return shapes | {name: kind.__name__ for name, kind in layers.items() if kind is not nn.Module}


def _layer(kind: type) -> type:
    """The class of PyTorch that a class of layers is, or derives from."""
    return next(base for base in kind.__mro__ if base.__module__.startswith(_LAYERS))


def described(value: Any) -> str:
    """Name of a class or function, or of the class of another object, with options that are not its default ones."""
    named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    options: list[str] = []
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        default = {field.name: field.default for field in fields(value)}
        options = [f"{k}={v!r}" for k, v in own.items() if _is_options(v) and v != default[k]]
    return str(named.__name__) + (f"({', '.join(options)})" if options else "")


def _is_options(value: Any) -> bool:
    """True of a number, a string, None, and tuples of these, which are the same text wherever they are equal."""
    if isinstance(value, tuple):
        return all(map(_is_options, value))
    return value is None or type(value) in (bool, int, float, str)


def _is_plain(value: Any) -> bool:
    """True if a file can hold a value."""
    try:
        nested.encoded(value, "", {})
    except InvalidType:
        return False
    return True


def _known(la: BaseLaplace, choices: Choices) -> dict[str, Any]:
    """Arguments that some constructor of a posterior takes, by name: the inverse of `NamedPosterior._construct`."""
    weights = {name: choices.weights_options.get(own) for name, own in la.weights_type.arguments.items()}
    structure = {field.name: getattr(choices.structure_options, field.name) for field in fields(la.structure.options)}
    likelihood = choices.likelihood
    return {
        "likelihood": likelihood.value if isinstance(likelihood, Enum) else likelihood,
        "temperature": la.temperature.item(),
        "enable_backprop": la.enable_backprop,
        "dict_key_x": la.dict_key_x,
        "dict_key_y": la.dict_key_y,
        "backend": None if choices.backend_cls is curvature.NativeGGN else choices.backend_cls,
        "backend_kwargs": choices.backend_kwargs,
        "asdl_fisher_kwargs": choices.asdl_fisher_kwargs,
        "forward_fn": choices.forward_fn,
        "channel_dim": choices.channel_dim,
        "weights_options": choices.weights_options,
        "precision_options": choices.precision_options,
        **choices.precision_options,
        **weights,
        **structure,
    }


def _parameters(cls: type) -> set[str]:
    """Names of a constructor's arguments; of one that passes on what it is given, also of those that it calls."""
    names = set[str]()
    for base in cls.__mro__:
        parameters = inspect.signature(base.__init__).parameters.values()
        open_ended = {p.name for p in parameters if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        names |= {p.name for p in parameters} - open_ended
        if not open_ended:
            break
    return names - {"self", "model", *_IN_STATE}
