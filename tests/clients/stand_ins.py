"""Empty modules in the place of torchvision and of packages that need it, for wrappers that import them.

A torchvision of the index does not import beside a CPU build of PyTorch. The wrappers read images, augmentations and
networks from it that no Laplace approximation uses: every name of these modules is an empty class. A pytest plugin, so
that it is there before anything is imported; where torchvision can be imported, nothing is put in its place.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PACKAGES = ("torchvision", "timm", "segmentation_models_pytorch")


class _Empty(type):
    """Of classes every attribute of which is another one, and which are called with anything."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _empty(name)


def _empty(name: str) -> Any:
    return _Empty(name, (), {"__init__": lambda *_args, **_kwargs: None, "__module__": __name__})


class Finder(MetaPathFinder, Loader):
    """Finds modules of packages that are not there."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _empty(name)

        module.__dict__.update(__getattr__=attribute, __version__="0")


missing = tuple(name for name in PACKAGES if find_spec(name) is None)
if missing:
    sys.meta_path.append(Finder(missing))


def pytest_report_header() -> str:
    return f"stand-ins, which no Laplace approximation uses: {', '.join(missing) or 'none'}"
