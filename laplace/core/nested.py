"""Nested values of tensors: by name, as plain states and back, and in one file that is replaced at once.

Structures are dataclasses of tensors, numbers, strings, None, and dicts, lists and tuples of these. Their states are
plain values without dataclasses; a file of the format of safetensors holds such a value: its tensors, and the rest as
JSON in the metadata, where an object with the key `$tensor` names a tensor. Reading a file runs no code of it: nothing
in it names a class or a function that would be looked up.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints
from uuid import uuid4
from zipfile import is_zipfile

import torch
from torch import Tensor

from laplace.core.checks import all_finite
from laplace.core.memory import ran_out
from laplace.core.precision_policy import held_dtype
from laplace.errors import InvalidType, MissingDependency, StateError

# Values by their parts: fields of a dataclass, items of a mapping or of a sequence.


def entries(value: Any) -> dict[str, Any]:
    """Fields of a dataclass, items of a mapping or of a sequence, by name; of anything else nothing."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return {str(i): item for i, item in enumerate(value)}
    return {}


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Floating point tensors of a value, however deep in it, by the names that lead to each."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
        return
    if isinstance(value, str | int | float | None):
        return
    for key, entry in entries(value).items():
        yield from named_tensors(entry, f"{name}.{key}" if name else key)


def is_finite(value: Any) -> Tensor:
    """True, 0-dim, if every number in a value's tensors is finite."""
    return all_finite(tensor for _, tensor in named_tensors(value))


def mapped(
    value: Any, function: Callable[[Tensor], Tensor], of_others: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Any:
    """The same value with a function of every floating point tensor in its place, and another one of other tensors."""
    if isinstance(value, Tensor):
        return function(value) if value.is_floating_point() else of_others(value)
    parts = {key: mapped(entry, function, of_others) for key, entry in entries(value).items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **parts)
    if isinstance(value, Mapping):
        return parts
    return type(value)(parts.values()) if isinstance(value, list | tuple) else value


def form_of(value: Any) -> Any:
    """A state without its numbers: floating point tensors on the device "meta", others on the CPU."""
    return mapped(value, lambda tensor: tensor.to("meta"), lambda tensor: tensor.cpu())


def zeros_of(form: Any, device: torch.device) -> Any:
    """A state of a form, with zeros."""
    return move(mapped(form, lambda tensor: torch.zeros_like(tensor, device=device)), device, None)


def has_room(form: Any, other: Any) -> bool:
    """True if a form has every floating point tensor of another one, of the same shape and dtype."""
    return _shapes(other).items() <= _shapes(form).items()


def _shapes(value: Any) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in named_tensors(value)}


def state_of(value: Any) -> Any:
    """A value as tensors, numbers, strings, and lists and dicts of them."""
    if isinstance(value, Tensor | str | int | None):
        return value
    if isinstance(value, Enum):  # no string, which was returned above
        return value.name
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    parts = {key: state_of(entry) for key, entry in entries(value).items()}
    if isinstance(value, list | tuple):
        return list(parts.values())
    return parts if is_dataclass(value) or isinstance(value, Mapping) else value


def from_state(kind: Any, state: Any) -> Any:
    """The object that `state_of` was given.

    Args:
        kind: Its type, as annotations say it: a dataclass, an `Enum`, a slice, or `tuple[X, ...]`, `dict[str, X]` and
            `X | None` of what `state_of` takes.
        state: What `state_of` gave.
    """
    hints, container, part = _annotation(kind)
    if hints is not None:
        # Fields that are added to a structure later have defaults, for states that were saved before.
        return kind(**{name: from_state(hint, state[name]) for name, hint in hints.items() if name in state})
    if state is None:
        return None
    if part is None:
        return slice(*state) if kind is slice else kind[state] if _is_enum(kind) else state
    if container is tuple:
        return tuple(from_state(part, item) for item in state)
    if container in (dict, Mapping):
        return {key: from_state(part, item) for key, item in state.items()}
    return from_state(part, state)


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum) and not issubclass(kind, str)  # those are strings


@cache
def _annotation(kind: Any) -> tuple[dict[str, Any] | None, Any, Any]:
    """Field types of a dataclass; otherwise the container type and its element type, where annotated."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return {field.name: hints[field.name] for field in fields(kind)}, None, None
    container, parts = get_origin(kind), [part for part in get_args(kind) if part is not type(None)]
    return None, container, parts[1 if container in (dict, Mapping) else 0] if parts else None


def move(state: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """A state with its tensors on another device and its floating point tensors in another dtype.

    What is float64 becomes the widest type of a device that has none.
    """
    if isinstance(state, Tensor):
        if not state.is_floating_point():
            return state.to(device=device)
        return state.to(device=device, dtype=held_dtype(dtype or state.dtype, device or state.device))
    if isinstance(state, dict):
        return {key: move(value, device, dtype) for key, value in state.items()}
    return [move(value, device, dtype) for value in state] if isinstance(state, list) else state


# Short digests of tensors, the same in every process.


def stored(tensor: Tensor) -> tuple[Tensor, ...]:
    """What a tensor keeps in memory: itself, or of a sparse one its indices and values."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return tensor.indices(), tensor.values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def n_bytes(tensor: Tensor) -> int:
    """Bytes that a tensor takes, sparse or not."""
    return sum(part.nbytes for part in stored(tensor.detach()))


def digest(tensors: Iterable[Tensor], *, before: str = "", most: int | None = None) -> str:
    """A digest of the shapes, dtypes and bytes of tensors.

    Args:
        tensors: On any device.
        before: Digest of what comes before them.
        most: Entries of a tensor that are looked at, evenly spaced; None for all.
    """
    total = hashlib.sha256(before.encode())
    for tensor in tensors:
        total.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        for part in stored(tensor.detach()):
            flat = part.reshape(-1)
            flat = flat if most is None else flat[:: _step(len(flat), most)]
            plain = flat.cpu().clone(memory_format=torch.contiguous_format)  # of one entry any stride is contiguous
            total.update(plain.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _step(size: int, most: int) -> int:
    """From one entry to the next, of so many at most: coprime to the size, or some images' borders alone are met."""
    step = max(1, -(-size // most))
    while math.gcd(step, size) > 1:
        step += 1
    return step


# Files.

VERSION = "1"
"""Version of the format of the files."""

_VERSION, _VALUE, _DIGEST = "laplace_format", "laplace", "laplace_digest"
"""Entries of the metadata; that of the digest, of the tensors and the value, tells files that were damaged."""

_INSTALL = "needs safetensors: pip install 'laplace-bayes[integrations]' or pip install safetensors. Without it use"


@contextmanager
def replaced(path: Path, new: Path) -> Iterator[Path]:
    """A file beside another one, whose place it takes at the end of a block; after an error the former one is there."""
    try:
        yield new
        with new.open("rb+") as file:
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the folder's entry, which elsewhere cannot be synchronised
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write(path: str | os.PathLike[str], value: Any) -> None:
    """Writes a value; the file is whole, or the former one."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise MissingDependency(f"la.save {_INSTALL} torch.save(la.state_dict(), path).") from error
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encoded(value, "", tensors), allow_nan=False)
    tensors = _apart(tensors)
    path = Path(path)
    with replaced(path, path.with_name(f"{path.name}.{uuid4().hex}.new")) as new:
        new.touch()  # Python says it better than safetensors if the folder is not there, or not to be written to
        try:
            save_file(tensors, new, _metadata(text, tensors))
        except SafetensorError as error:
            raise StateError(
                f"{str(path)!r} could not be written: {error}; the former file, if any, is kept."
            ) from error


def read(path: str | os.PathLike[str]) -> Any:
    """The value that was written, with tensors on the CPU that are copies of what is in the file."""
    path = Path(path)
    if path.is_dir():
        raise StateError(f"{str(path)!r} is a folder; laplace.checkpoint.load(la, path) reads what is in one.")
    if is_zipfile(path):
        raise StateError(
            f"{str(path)!r} holds no posterior that could be loaded: torch.save wrote it, and this reads files of "
            "la.save; a state of la.state_dict() goes into la.load_state_dict(torch.load(path, weights_only=True))."
        )
    try:
        metadata, tensors = _contents(path)
        if metadata.get(_VERSION) != VERSION:
            version = metadata.get(_VERSION)
            other = "nothing that la.save wrote" if version is None else f"version {version!r} of the format"
            raise StateError(f"it holds {other}; version {VERSION!r} is read.")
        if metadata != _metadata(metadata[_VALUE], tensors):
            raise StateError("its contents are not those that were written: it is damaged.")
        return decoded(json.loads(metadata[_VALUE]), tensors)
    except Exception as error:  # of files that are none, whatever json and safetensors raise
        if isinstance(error, FileNotFoundError | PermissionError | MissingDependency) or ran_out(error):
            raise
        raise StateError(f"{str(path)!r} holds no posterior that could be loaded: {error or repr(error)}") from error


def _contents(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a file."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise MissingDependency(f"laplace.load {_INSTALL} la.load_state_dict(torch.load(path)).") from error
    with safe_open(path, "pt") as file:
        # Without the copy a tensor is the file itself, and changes with it.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  (no mapping)
        return file.metadata() or {}, tensors


def _metadata(text: str, tensors: dict[str, Tensor]) -> dict[str, str]:
    """All metadata of a file with a value and its tensors."""
    names = sorted(tensors)
    of_all = digest((tensors[name] for name in names), before="\n".join([text, *names]))
    return {"format": "pt", _VERSION: VERSION, _VALUE: text, _DIGEST: of_all}


# Values as JSON.


def encoded(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON says it, exactly; tensors are added to others, by name."""
    match value:
        case None | bool():
            return value
        case int():
            return int(value)
        case str():
            return str.__str__(value)  # of an enum its value
        case float():
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        case complex():
            return {"$complex": [encoded(part, name, tensors) for part in (value.real, value.imag)]}
        case Tensor():
            return _named(value, name, tensors)
        case list():
            return [encoded(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        case tuple():
            return {"$tuple": encoded(list(value), name, tensors)}
        case dict() if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encoded(item, f"{name}.{key}".lstrip("."), tensors) for key, item in value.items()}
        case dict():
            return {
                "$dict": [encoded([key, item], f"{name}.{i}", tensors) for i, (key, item) in enumerate(value.items())]
            }
        case _:
            raise InvalidType(f"{name} is of type {type(value).__name__}, which cannot be written without a pickle.")


def _named(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Adds a tensor, and says how it follows from what the file holds of it, its order in memory included."""
    if tensor.layout is not torch.strided:
        raise InvalidType(f"{name} is a sparse tensor, which no file of la.save holds: give inputs by to_dense().")
    entry: dict[str, Any] = {"$tensor": name if name not in tensors else f"{name} ({len(tensors)})"}
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        entry["complex"], tensor = True, torch.view_as_real(tensor)
    if not tensor.is_contiguous() and 0 not in tensor.stride():
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        entry["order"], tensor = order, tensor.permute(order)
    tensors[entry["$tensor"]] = tensor
    return entry


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors on the CPU, contiguous and without shared memory, as safetensors takes them; copied where need be."""
    apart: dict[str, Tensor] = {}
    places = set[int]()
    for name, tensor in tensors.items():
        plain = tensor.cpu().contiguous()
        apart[name] = plain.clone() if plain.untyped_storage().data_ptr() in places else plain
        places.add(plain.untyped_storage().data_ptr())
    return apart


def decoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value that `encoded` was given."""
    match value:
        case {"$float": str(text)}:
            return float(text)
        case {"$complex": [real, imaginary]}:
            return complex(decoded(real, tensors), decoded(imaginary, tensors))
        case {"$tensor": str(name)}:
            return _restored(tensors[name], value)
        case {"$tuple": list(items)}:
            return tuple(decoded(items, tensors))
        case {"$dict": list(items)}:
            return dict(decoded(items, tensors))
        case dict():
            if any(key.startswith("$") for key in value):
                raise StateError(f"its metadata has {sorted(value)}, which no value is written as.")
            return {key: decoded(item, tensors) for key, item in value.items()}
        case list():
            return [decoded(item, tensors) for item in value]
        case _:
            return value


def _restored(tensor: Tensor, entry: dict[str, Any]) -> Tensor:
    """A tensor as it was, in its order in memory."""
    if "order" in entry:
        order = entry["order"]
        tensor = tensor.permute(sorted(range(len(order)), key=order.__getitem__))
    return torch.view_as_complex(tensor) if "complex" in entry else tensor
