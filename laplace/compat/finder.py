"""Modules that exist only as names: the legacy dotted paths, served by the import system.

Each path of a table becomes a module whose attributes are looked up on first use (PEP 562) in the modules where
they live now, so that making the modules imports nothing. The finder stands last on `sys.meta_path`: a real file of
the same name is always found first.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from laplace.compat.paths import ALSO, TABLE
from laplace.core.lazy import attached

Names = Mapping[str, str]
Table = Mapping[str, Names]


class LegacyFinder(MetaPathFinder, Loader):
    """Finds and fills the modules of a table.

    Args:
        table: Module path → {name: "real.module:attribute"}; these names make up `__all__`.
        also: The same for names that can be imported but are not in `__all__`.
    """

    def __init__(self, table: Table, also: Table) -> None:
        self.table = table
        self.also = also

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of the table, None for any other."""
        if fullname not in self.table:
            return None
        is_package = bool(self._children(fullname))
        return ModuleSpec(fullname, self, origin="legacy path", is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        """Gives the empty module its lazy attributes."""
        name = module.__name__
        public = self.table[name]
        children = self._children(name)
        targets = {**self.also.get(name, {}), **public}
        module.__doc__ = f"Legacy path {name}: the names of an older interface; each refers to where it lives now."
        module.__dict__["__all__"] = list(public)
        module.__dict__["__getattr__"], module.__dict__["__dir__"] = attached(name, targets, children.__contains__)

    def _children(self, name: str) -> list[str]:
        prefix = f"{name}."
        return [path.removeprefix(prefix) for path in self.table if path.startswith(prefix)]


def install(table: Table = TABLE, also: Table = ALSO) -> LegacyFinder:
    """Makes the paths of `table` importable and attributes of their packages; a repeated call does nothing.

    Args:
        table: Module path → {name: "real.module:attribute"}.
        also: Names outside `__all__`, in the same form.

    Returns:
        The finder that serves the table.
    """
    for finder in sys.meta_path:
        if isinstance(finder, LegacyFinder) and finder.table is table:
            return finder
    finder = LegacyFinder(table, also)
    sys.meta_path.append(finder)
    for path in sorted(table):
        _attach(path, finder)
    return finder


def _attach(path: str, finder: LegacyFinder) -> None:
    """Makes the module now, so that `laplace.utils.Kron` works after a bare `import laplace`.

    Making it early also settles who owns a name: where a module exports a function of its own name, the attribute of
    the package must stay the function, and only the first import of a submodule binds the attribute.
    """
    parent_name, _, leaf = path.rpartition(".")
    parent = import_module(parent_name)
    if PathFinder.find_spec(path, getattr(parent, "__path__", None)) is not None:
        return
    import_module(path)
    if leaf in finder.table[path]:
        parent.__dict__.pop(leaf, None)
