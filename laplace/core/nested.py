"""Nested values of tensors: by name, as plain states and back, and in one file that is replaced at once.

Structures are dataclasses of tensors, numbers, strings, None, and dicts, lists and tuples of these. Their states are
plain values without dataclasses; a file of the format of safetensors holds such a value: its tensors, and the rest as
JSON in the metadata, where an object with the key `$tensor` names a tensor. Reading a file runs no code of it: nothing
in it names a class or a function that would be looked up.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, BinaryIO, Union, get_args, get_origin, get_type_hints
from uuid import uuid4
from zipfile import is_zipfile

import torch
from torch import Tensor

from laplace.core.checks import all_finite
from laplace.core.memory import ran_out
from laplace.core.precision_policy import held_dtype, wide_dtype
from laplace.errors import InvalidArgument, InvalidType, MissingDependency, StateError

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


def least(value: Any) -> float:
    """The smallest number in a value's tensors; 0 without any."""
    return min((tensor.detach().min().item() for _, tensor in named_tensors(value) if tensor.numel()), default=0.0)


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


def from_state(kind: Any, state: Any, name: str = "") -> Any:
    """The object that `state_of` was given.

    Args:
        kind: Its type, as annotations say it: a dataclass, an `Enum`, a slice, or `tuple[X, ...]`, `dict[str, X]` and
            `X | None` of what `state_of` takes. What an annotation says in other words is taken as it is.
        state: What `state_of` gave.
        name: Where the state is, for messages.

    Raises:
        StateError: Something of the state is of another kind than its annotation says; the message names it.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        if isinstance(state, kind):  # a part that was made already
            return state
        parts = _require(isinstance(state, Mapping), name, state, f"the fields of a {kind.__name__}")
        # Fields that are added to a structure later have defaults, for states that were saved before.
        hints = _hints(kind).items()
        return kind(
            **{field: from_state(hint, parts[field], f"{name}.{field}") for field, hint in hints if field in parts}
        )
    container, parts = get_origin(kind), get_args(kind)
    if container in (Union, UnionType):
        if state is None and NoneType in parts:
            return None
        return _one_of([part for part in parts if part is not NoneType], state, name)
    if container in (tuple, list):
        items = _require(isinstance(state, list | tuple), name, state, "a list")
        kinds = parts if container is tuple and Ellipsis not in parts else parts[:1] * len(items)
        _require(len(items) == len(kinds), name, state, f"a list of {len(kinds)}")
        return container(
            from_state(kind, item, f"{name}.{i}") for i, (kind, item) in enumerate(zip(kinds, items, strict=True))
        )
    if container in (dict, Mapping):
        items = _require(isinstance(state, Mapping), name, state, "a dict").items()
        return {from_state(parts[0], key, name): from_state(parts[1], item, f"{name}.{key}") for key, item in items}
    if kind is slice:
        return slice(*_require(isinstance(state, list | tuple) and len(state) == 3, name, state, "a list of three"))
    members = _members(kind)
    if members is not None:
        return members[_require(isinstance(state, str) and state in members, name, state, " or ".join(members))]
    return _require(_is_a(kind, state), name, state, f"of type {getattr(kind, '__name__', kind)}")


def _one_of(kinds: Sequence[Any], state: Any, name: str) -> Any:
    """The object of a state by the first of some annotations that it fits."""
    first, *others = kinds
    if not others:
        return from_state(first, state, name)
    try:
        return from_state(first, state, name)
    except StateError:
        return _one_of(others, state, name)


def _require(holds: bool, name: str, state: Any, expected: str) -> Any:
    """The state, if it is what was expected."""
    if not holds:
        given = repr(state)[:80] if isinstance(state, str | int | float | None) else f"a {type(state).__name__}"
        raise StateError(f"{name.lstrip('.') or 'the state'} is {given}; it must be {expected}.")
    return state


def _is_a(kind: Any, state: Any) -> bool:
    """Whether a value is of a plain type: True and False are no numbers, but every integer is a real one."""
    if kind in (int, float):
        return isinstance(state, Integral if kind is int else Real) and not isinstance(state, bool)
    return kind is Any or not isinstance(kind, type) or isinstance(state, kind)


def _members(kind: Any) -> Mapping[str, Any] | None:
    """Members of an enum by name; None of others, and of those that are strings."""
    is_enum = isinstance(kind, type) and issubclass(kind, Enum) and not issubclass(kind, str)
    return kind.__members__ if is_enum else None


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Types of the fields that a dataclass is made of."""
    hints = get_type_hints(kind)
    own = {field.name: (hints[field.name], field.default) for field in fields(kind) if field.init}
    return {name: hint | None if default is None else hint for name, (hint, default) in own.items()}


def require_sizes(name: str, tensor: Any, *sizes: int | None, dtype: torch.dtype | None = None) -> None:
    """Requires of a part of a state that it is a dense tensor of real numbers and these sizes; None for any.

    Raises:
        StateError: It is not.
    """
    is_dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.dtype in _SUMMED
    fits = is_dense and tensor.ndim == len(sizes) and dtype in (None, tensor.dtype)
    if not fits or any(m not in (None, n) for m, n in zip(sizes, tensor.shape, strict=True)):
        given = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        wanted = ", ".join("any" if size is None else str(size) for size in sizes)
        raise StateError(f"{name} is {given}; it must be a dense tensor of {dtype or 'float32 or float64'} [{wanted}].")


def are_indices(tensor: Tensor, first: int, stop: int) -> bool:
    """True if the entries of a tensor in a state are integers of a range."""
    return tensor.dtype == torch.int64 and bool(((tensor >= first) & (tensor < stop)).all())


def require_unit(name: str, vectors: Tensor, dim: int) -> None:
    """Requires of vectors in a state that they have the length 1.

    Args:
        name: What they are.
        vectors: On any device.
        dim: Dimension in which their entries are.

    Raises:
        StateError: They have not.
    """
    if not bool(((vectors.norm(dim=dim) - 1).abs() < _UNIT).all()):
        raise StateError(f"{name} are no unit vectors; they were changed or damaged.")


_UNIT = 1e-3
"""Rounding of the length of an eigenvector in single precision, at most."""


_SUMMED = (torch.float32, wide_dtype())
"""Dtypes of sums over data."""


def move(state: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """A state with its tensors on another device and its floating point tensors in another dtype.

    What is float64 becomes the widest type of a device that has none.
    """

    def moved(tensor: Tensor) -> Tensor:
        held = held_dtype(dtype or tensor.dtype, device or tensor.device)
        return tensor.detach().to(device=device, dtype=held)

    return mapped(state, moved, lambda tensor: tensor.to(device=device))


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


def digest(tensors: Iterable[Tensor], *, before: str = "") -> str:
    """A digest of the shapes, dtypes and bytes of tensors.

    Args:
        tensors: On any device.
        before: Digest of what comes before them.
    """
    total = hashlib.sha256(before.encode())
    for tensor in tensors:
        total.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        for part in stored(tensor.detach()):
            flat = part.reshape(-1)
            plain = flat.cpu().clone(memory_format=torch.contiguous_format)  # of one entry any stride is contiguous
            total.update(plain.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


# Files.

VERSION = "1"
"""Version of the format of the files."""

_VERSION, _VALUE, _DIGEST = "laplace_format", "laplace", "laplace_digest"
"""Entries of the metadata; that of the digest, of the tensors and the value, tells files that were damaged."""

_INSTALL = "needs safetensors: pip install safetensors. Without it use"


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A new file that is written in a block, and takes the place of another one at its end.

    After an error the former one is there, and so is it after a kill, with nothing beside it where the system has files
    without a name. It keeps mode and, where that is allowed, owner of the former one; a link stays, its target changes.

    Raises:
        InvalidArgument: There is something else than a regular file.
    """
    path = Path(os.path.realpath(path))
    former = _regular(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    new = path.with_name(f"{path.name}.{uuid4().hex}.new")
    unnamed = _unnamed_file(path.parent)
    try:
        with new.open("xb") if unnamed is None else os.fdopen(unnamed, "wb") as file:
            yield file
            file.flush()
            if former is not None and os.name == "posix":
                with suppress(PermissionError):
                    os.fchown(file.fileno(), former.st_uid, former.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(former.st_mode))
            os.fsync(file.fileno())
            if unnamed is not None:
                # With a descriptor of a folder, which it does not read, the link that /proc has is followed.
                os.link(f"{_DESCRIPTORS}/{file.fileno()}", new, src_dir_fd=file.fileno())
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


_DESCRIPTORS = "/proc/self/fd"
"""Where Linux has the files that a process holds open, by their numbers."""


def _unnamed_file(folder: Path) -> int | None:
    """Descriptor of a file without a name, which is gone with the process; None where the system has none."""
    flag = getattr(os, "O_TMPFILE", None)
    if flag is None or not os.path.isdir(_DESCRIPTORS):
        return None
    try:
        return os.open(folder, flag | os.O_RDWR, 0o666)
    except OSError:  # of file systems that have none; of others the file with a name raises it
        return None


def _regular(path: Path) -> os.stat_result | None:
    """What the system says of a regular file; None if there is none.

    Raises:
        InvalidArgument: It is a folder, a pipe or a device, or no name of a file.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InvalidArgument(f"{str(path)!r} is no name of a file: {error}.") from error
    if not stat.S_ISREG(found.st_mode):
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, a device or a socket"
        raise InvalidArgument(f"{str(path)!r} is {what}; give the path of a file.")
    return found


def as_path(path: Any) -> Path:
    """A path as users give it.

    Raises:
        InvalidType: It is none.
        InvalidArgument: No file has such a name.
    """
    if not isinstance(path, str | os.PathLike):
        raise InvalidType(f"path is a {type(path).__name__}; give the path of a file, a str or a pathlib.Path.")
    if "\0" in os.fsdecode(path):
        raise InvalidArgument(f"path={os.fsdecode(path)!r} holds a character NUL, which no name of a file has.")
    return Path(os.fsdecode(path))


def write(path: str | os.PathLike[str], value: Any) -> None:
    """Writes a value; the file is whole, or the former one."""
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise MissingDependency(f"la.save {_INSTALL} torch.save(la.state_dict(), path).") from error
    path = as_path(path)
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encoded(value, "", tensors), allow_nan=False)
    tensors = _apart(tensors)
    with replaced(path) as file:
        file.write(save(tensors, _metadata(text, tensors)))


def read(path: str | os.PathLike[str]) -> Any:
    """The value that was written, with tensors on the CPU that are copies of what is in the file."""
    path = as_path(path)
    if path.is_dir():
        raise StateError(f"{str(path)!r} is a folder; give the file that la.save wrote.")
    if _regular(path) is not None and is_zipfile(path):
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
    """Metadata and tensors of a file, which is read as a whole: one that is mapped may be cut off meanwhile."""
    try:
        from safetensors.torch import load
    except ImportError as error:
        raise MissingDependency(f"laplace.load {_INSTALL} la.load_state_dict(torch.load(path)).") from error
    whole = path.read_bytes()
    parts = load(whole)  # which has looked at the header
    tensors = {name: parts.pop(name).clone() for name in list(parts)}  # as PyTorch aligns them
    size = int.from_bytes(whole[:_LENGTH], "little")
    return json.loads(whole[_LENGTH : _LENGTH + size]).get("__metadata__", {}), tensors


_LENGTH = 8
"""Bytes at the beginning of a file of safetensors that say how long its header is, which is JSON."""


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
        case Tensor() if value.layout is torch.strided:
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
            given = f"a tensor of {value.layout}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
            raise InvalidType(f"{name} is {given}, which cannot be written without a pickle.")


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
