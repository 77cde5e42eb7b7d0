"""Names that are imported when they are first read, of packages (PEP 562) and of tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

Targets = Mapping[str, str]
"""Name → where its object lives, `"real.module:attribute"`."""


def lazy_names(module: str, names: str | Iterable[str]) -> dict[str, str]:
    """`{name: "module:name"}` for names that are given as one string or as an iterable."""
    listed = names.split() if isinstance(names, str) else names
    return {name: f"{module}:{name}" for name in listed}


def imported(target: str) -> Any:
    """The object at `"real.module:attribute"`, whose module is imported if it was not yet."""
    where, _, attribute = target.partition(":")
    try:
        return getattr(import_module(where), attribute)
    except AttributeError as error:  # which would be taken for that of a name that is not there
        raise ImportError(f"{target} cannot be imported: {error}", name=where) from error


Hooks = tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]


def attach(package: str, names: Mapping[str, str] | None = None, own: str = "") -> Hooks:
    """`__getattr__`, `__dir__` and `__all__` of a package whose names and submodules are imported when first read.

    Type checkers read its stub, `__init__.pyi`, which `python -m tests.house.stubs` makes of the same table.

    Args:
        package: Name of the package, `__name__`.
        names: Module → its names of the package, separated by spaces.
        own: Names that the package itself defines.
    """
    table = names or {}
    targets = {name: target for module, listed in table.items() for name, target in lazy_names(module, listed).items()}
    read, listing = attached(package, targets, lambda name: _is_module(f"{package}.{name}"))
    return read, listing, sorted([*targets, *own.split()])


def _is_module(name: str) -> bool:
    return name in sys.modules or find_spec(name) is not None


def attached(
    module: str, targets: Targets, is_submodule: Callable[[str], bool]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a module: what is read once stays in it.

    Nothing is locked here: threads that read a name at once get one object, by the import system's own locks.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807  (the name that PEP 562 gives it)
        if name in targets:
            value = imported(targets[name])
        elif name.isidentifier() and not name.startswith("__") and is_submodule(name):
            value = import_module(f"{module}.{name}")
        else:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=sys.modules[module])
        setattr(sys.modules[module], name, value)
        return value

    def __dir__() -> list[str]:  # noqa: N807
        return sorted({*vars(sys.modules[module]), *targets})

    return __getattr__, __dir__
