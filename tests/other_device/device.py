"""A second device in software, `other:0`: tensors there hold tensors of the CPU, and refuse to be mixed with these.

`set_up()` registers it with PyTorch for the rest of the process, which therefore should be one of its own. What runs
there gives the CPU's numbers, to the bit, and is refused where an accelerator refuses: tensors of one dimension or more
of two devices in one operation, a generator of another device. `SEEN` counts what an accelerator waits for: numbers
that the host reads, and copies from one device to the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ClassVar

import torch
from torch import Tensor

NAME = "other"
SEEN: Counter[str] = Counter()
"""Reads and copies by name, since it was last cleared."""

_CPU = torch.device("cpu")

_GLOBAL_SEED = 12
"""Where the global generator of the device starts, every time: it does not have the CPU's numbers."""

_READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_linalg_check_errors", "_unique2"}
"""Operations whose results, or the sizes of these, the host waits for."""
_READS |= {"unique_dim", "unique_consecutive", "repeat_interleave", "bincount"}
_COPIES = {"copy_", "_to_copy"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
"""Operations whose indices may be the host's: they are copied."""
_TAKE_NUMBERS = {"fill_", "masked_fill", "masked_fill_", "where"} | _INDEXING
"""Operations besides the pointwise ones that take a tensor of the host without dimensions for a number."""


def is_supported() -> bool:
    """Whether this PyTorch lets Python register a device."""
    from torch.utils import backend_registration

    return "_setup_privateuseone_for_python_backend" in vars(backend_registration)


class OtherTensor(Tensor):
    """A tensor that says it lies on `other:0`. What it holds is a tensor of the CPU of the same shape and strides."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor) -> OtherTensor:
        options = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        return Tensor._make_wrapper_subclass(cls, raw.shape, device=torch.device(NAME, 0), **options)

    def __init__(self, raw: Tensor) -> None:
        self.raw = raw

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, *args, **(kwargs or {}))

    def __repr__(self) -> str:
        return f"OtherTensor({self.raw!r})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 else repr(self)

    def __getitem__(self, index: Any) -> Tensor:  # type: ignore[override]
        return Tensor.__getitem__(self, _index(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        Tensor.__setitem__(self, _index(index), value)

    def new_tensor(self, values: Any, *, dtype: Any = None, device: Any = None) -> Tensor:  # type: ignore[override]
        dtype = self.dtype if dtype is None else dtype
        return torch.tensor(values, dtype=dtype, device=self.device if device is None else device)

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")
        return self.detach().cpu().numpy()

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def __array__(self, dtype: Any = None) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copy = self.detach().clone().requires_grad_(self.requires_grad)
            for name, value in vars(self).items():
                if name != "raw":
                    setattr(copy, name, value)
            memo[id(self)] = copy
        return memo[id(self)]

    def takes_over(self, raw: Tensor) -> None:
        """Holds another tensor from now on, as after `x.data = y` and changes of shape in place."""
        self.raw = raw
        Tensor.data.__set__(self, OtherTensor(raw))  # type: ignore[attr-defined]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, OtherTensor):
            raise RuntimeError("incompatible tensor type: a tensor of another device was assigned to `.data`")
        self.takes_over(value.raw)


def _index(index: Any) -> Any:
    """An index whose lists are tensors of the second device, as PyTorch makes them in C++."""
    if isinstance(index, tuple):
        return tuple(map(_index, index))
    if not isinstance(index, list):
        return index
    return torch.tensor(index, device=torch.device(NAME, 0), dtype=None if index else torch.long)


def _from_values(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor` or `torch.as_tensor`, whose way to a device in C++ passes Python by."""

    @wraps(make)
    def made(values: Any, *, device: Any = None, requires_grad: bool = False, **options: Any) -> Tensor:
        if device is None or torch.device(device).type != NAME or isinstance(values, OtherTensor):
            return make(values, device=device, **options, **({"requires_grad": True} if requires_grad else {}))
        return make(values, **options).to(device).requires_grad_(requires_grad)

    return made


class OtherGenerator(torch.Generator):
    """A generator of the second device. Its numbers are those of the CPU's generator of the same seed."""

    alive: ClassVar[set[int]] = set()
    """Which these are in C++: operations are given other objects of Python for them."""

    def __init__(self) -> None:
        self.alive.add(self._cdata)

    def __del__(self) -> None:
        self.alive.discard(self._cdata)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(NAME, 0)


_CpuGenerator = torch.Generator


class _GeneratorOfDevice(type(torch.Generator)):
    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return OtherGenerator() if torch.device(device).type == NAME else _CpuGenerator(device)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _CpuGenerator)


class Generator(metaclass=_GeneratorOfDevice):
    """`torch.Generator` with the second device among its devices."""


class _Operation:
    """What is asked of an operation whenever it runs."""

    def __init__(self, op: Any) -> None:
        self.name = op.name().split("::")[1].split(".")[0]
        self.writes = op._schema.is_mutable
        self.draws = torch.Tag.nondeterministic_seeded in op.tags
        self.takes_numbers = torch.Tag.pointwise in op.tags or self.name in _TAKE_NUMBERS


_operation = cache(_Operation)


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operation: unwraps its tensors, runs it on the CPU, and wraps what it gives.

    Raises:
        RuntimeError: Tensors or a generator of two devices.
    """
    about, flat = _operation(op), _leaves(args) + _leaves(tuple(kwargs.values()))
    others = [x for x in flat if isinstance(x, OtherTensor)]
    hosts = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, OtherTensor)]
    asked = kwargs.get("device")
    goes_there = bool(others) if asked is None else torch.device(asked).type == NAME
    if about.name in _COPIES:
        _count_copy(args, goes_there)
    elif others and hosts:
        _check_hosts(about, args, hosts)
    if goes_there and any(isinstance(x, _CpuGenerator) and x._cdata not in OtherGenerator.alive for x in flat):
        raise RuntimeError(f"{about.name}: expected a generator of {NAME}, and one of the cpu was given")
    if about.name in _READS:
        SEEN[about.name] += 1
    if about.draws and goes_there and not any(isinstance(x, _CpuGenerator) for x in flat):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_GLOBAL_SEED)
            return _run(op, args, kwargs, others, hosts, goes_there)
    return _run(op, args, kwargs, others, hosts, goes_there)


def _run(op: Any, args: Any, kwargs: Any, others: list[OtherTensor], hosts: list[Tensor], goes_there: bool) -> Any:
    """Runs an operation on the CPU's tensors."""
    asked = kwargs.get("device")
    on_host = {key: _raw(value) for key, value in kwargs.items() if key != "pin_memory"}
    if asked is not None:
        on_host["device"] = _CPU
    result = op(*_raw(args), **on_host)
    if _operation(op).writes:
        for wrapper in others:
            if wrapper.shape != wrapper.raw.shape or wrapper.stride() != wrapper.raw.stride():
                wrapper.takes_over(wrapper.raw)
    return _there(result, {id(x): x for x in hosts} | {id(x.raw): x for x in others}) if goes_there else result


def _leaves(value: Any) -> list[Any]:
    return [leaf for x in value for leaf in _leaves(x)] if isinstance(value, list | tuple) else [value]


def _raw(value: Any) -> Any:
    """The CPU's tensors in place of those that hold them."""
    if isinstance(value, OtherTensor):
        return value.raw
    return type(value)(map(_raw, value)) if type(value) in (list, tuple) else value


def _there(value: Any, known: dict[int, Tensor]) -> Any:
    """Results on the second device: the tensors that were given, where an operation returns these, else new ones."""
    if isinstance(value, Tensor):
        return known[id(value)] if id(value) in known else OtherTensor(value)
    return type(value)(_there(x, known) for x in value) if type(value) in (list, tuple) else value


def _count_copy(args: tuple[Any, ...], goes_there: bool) -> None:
    """Notes a copy to the other device, or from there."""
    if len(args) > 1 and isinstance(args[1], Tensor):  # copy_(to, source)
        goes_there, source = isinstance(args[0], OtherTensor), isinstance(args[1], OtherTensor)
    else:
        source = isinstance(args[0], OtherTensor)
    if goes_there is not source:
        SEEN["to the device" if goes_there else "to the host"] += 1


def _check_hosts(about: _Operation, args: tuple[Any, ...], hosts: list[Tensor]) -> None:
    """Refuses tensors of the CPU beside those of the device, but for numbers and indices."""
    to = args[0]
    if about.name in _INDEXING and isinstance(to, OtherTensor):
        indices = {id(x) for x in args[1] if isinstance(x, Tensor) and not isinstance(x, OtherTensor)}
        if indices:
            SEEN["to the device"] += len(indices)
        hosts = [x for x in hosts if id(x) not in indices]
    writes_there = about.writes and isinstance(to, Tensor) and not isinstance(to, OtherTensor)
    if hosts and (writes_there or any(x.ndim > 0 or not about.takes_numbers for x in hosts)):
        shapes = [tuple(x.shape) for x in hosts]
        raise RuntimeError(
            f"{about.name}: expected all tensors to be on one device, but found {NAME}:0 and cpu (of shapes {shapes})"
        )


def _eye(n: int, m: int | None = None, **options: Any) -> Tensor:
    return OtherTensor(torch.eye(n, n if m is None else m, dtype=options.get("dtype")))


def set_up() -> None:
    """Registers the device with PyTorch, for the rest of the process."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME)
    torch.tensor, torch.as_tensor = _from_values(torch.tensor), _from_values(torch.as_tensor)
    torch.Generator = Generator  # type: ignore[misc, assignment]
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(run, "PrivateUse1")
    own = torch.library.Library("aten", "IMPL")
    own.impl("eye", _eye, "PrivateUse1")
    _LIBRARIES.extend((everything, own))


_LIBRARIES: list[torch.library.Library] = []
"""Registrations last as long as these objects."""
