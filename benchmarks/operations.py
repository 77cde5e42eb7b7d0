"""What an accelerator pays for: operations that are dispatched, and numbers that the host reads and waits for."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_linalg_check_errors"}
_READS |= {"_unique2", "unique_dim", "unique_consecutive", "bincount"}
"""Operations whose results, or whose sizes, the host waits for."""
_COPIES = {"copy_", "_to_copy"}
_LAUNCH_NOTHING = {"_unsafe_view", "promote_types", "empty", "new_empty", "empty_like", "empty_strided"}
"""Operations that give a view without saying so, or numbers that nobody has written."""


@cache
def _about(operation: Any) -> tuple[str, bool]:
    """The name of an operation, and whether it launches nothing: it gives a view of what it is given, say."""
    returned = [result.alias_info for result in operation._schema.returns]
    name = operation._schema.name.removeprefix("aten::")
    is_view = any(alias is not None and not alias.is_write for alias in returned)
    return name, is_view or name.startswith("detach") or name in _LAUNCH_NOTHING


class Counted(TorchDispatchMode):
    """Counts within its block, those of backward passes included.

    Args:
        device: Where the network is: of tensors elsewhere nothing is read that is waited for.

    Attributes:
        operations: That are no views and compute something: each is a launch of a kernel, or several.
        reads: For which the host waits: numbers, and tensors that are copied to it.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device = device
        self.operations = 0
        self.reads = 0
        self._lists = _Lists(self)

    def __enter__(self) -> Counted:
        """Begins to count."""
        self._lists.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Ends."""
        super().__exit__(*error)
        self._lists.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and counts it."""
        result = func(*args, **(kwargs or {}))
        name, launches_nothing = _about(func)
        self.operations += not (launches_nothing or (name == "equal" and not self._is_there(args)))
        self.reads += (name in _READS and self._is_there(args)) or (name in _COPIES and _to_host(args, result))
        return result

    def _is_there(self, args: Any) -> bool:
        """Whether a tensor that is read lies on the device; states of random generators, in bytes, never do."""
        tensors = (x for x in args if isinstance(x, torch.Tensor))
        return any(x.device.type == self.device and x.dtype != torch.uint8 for x in tensors)


class _Lists(TorchFunctionMode):
    """Counts lists of numbers on the CPU, which are copies on any other device, and no operation on this one."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted = counted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function."""
        if func is torch.Tensor.tolist and self.counted.device == "cpu":
            self.counted.reads += 1
        return func(*args, **(kwargs or {}))


def _to_host(args: Any, result: Any) -> bool:
    """Whether a copy went from an accelerator to the host."""
    source = next(x for x in reversed(args[:2]) if isinstance(x, torch.Tensor))
    return result.device.type == "cpu" and source.device.type != "cpu"
