"""The table of legacy paths: lazy, complete, never in the way of a real module."""

from __future__ import annotations

import importlib
import pickle
import sys
import types

import pytest

from laplace.compat.paths import ALSO, TABLE, LegacyFinder, install
from tests.fresh import printed


@pytest.fixture
def package():
    """A package of its own, with a real submodule, that is taken away afterwards."""
    before, path = set(sys.modules), list(sys.meta_path)
    real = types.ModuleType("oldlib")
    real.__path__ = []
    sys.modules["oldlib"] = real
    yield real
    sys.meta_path[:] = path
    for name in set(sys.modules) - before:
        del sys.modules[name]


OLD = {
    "oldlib.base": {"OrderedDict": "collections:OrderedDict", "Missing": "collections:NoSuchThing"},
    "oldlib.utils": {"sqrt": "math:sqrt"},
    "oldlib.utils.circle": {"pi": "math:pi"},
    "oldlib.train": {"train": "math:cos"},
}


def test_names_come_from_their_real_modules(package):
    install(OLD, {"oldlib.base": {"hidden": "math:e"}})
    import math
    from collections import OrderedDict

    import oldlib.base as base
    from oldlib.utils import sqrt
    from oldlib.utils.circle import pi

    assert base.OrderedDict is OrderedDict
    assert sqrt is math.sqrt
    assert pi == math.pi
    assert base.hidden == math.e
    assert base.__all__ == ["OrderedDict", "Missing"]
    assert {"OrderedDict", "hidden"} <= set(dir(base))
    assert package.utils.circle.pi == math.pi


def test_unknown_names_are_errors(package):
    install(OLD, {})
    base = importlib.import_module("oldlib.base")
    with pytest.raises(AttributeError, match=r"oldlib\.base.*nothing"):
        base.nothing  # noqa: B018
    with pytest.raises(ImportError):
        from oldlib.base import nothing  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("oldlib.elsewhere")


def test_installing_twice_is_installing_once(package):
    first = install(OLD, {})
    assert install(OLD, {}) is first
    assert sum(isinstance(f, LegacyFinder) and f.table is OLD for f in sys.meta_path) == 1


def test_a_name_shared_by_module_and_function_stays_free_for_the_function(package):
    install(OLD, {})
    assert not hasattr(package, "train")
    assert importlib.import_module("oldlib.train").train is not None


def test_a_real_module_wins(package, tmp_path):
    (tmp_path / "utils.py").write_text("real = True\n")
    package.__path__ = [str(tmp_path)]
    install(OLD, {})
    assert importlib.import_module("oldlib.utils").real


def test_importing_the_modules_imports_nothing_else():
    code = (
        "from laplace.compat.paths import install; install();"
        "import laplace.utils.matrix, laplace.baselaplace;"
        "heavy = {'laplace.compat.kron', 'laplace.parametric', 'laplace.grid', 'torchmetrics',"
        "'matplotlib'};"
        "import sys; print(*heavy & set(sys.modules))"
    )
    # A package that imports its public names eagerly has those modules anyway; ours must add none of the compat ones.
    assert not {"laplace.compat.kron", "torchmetrics"} & set(printed(code))


def test_every_entry_of_the_tables_exists():
    install()
    entries = [(path, name) for table in (TABLE, ALSO) for path, names in table.items() for name in names]
    for path, name in entries:
        assert getattr(importlib.import_module(path), name) is not None


def test_star_import_and_pickle():
    install()
    from laplace.utils import Kron, kron
    from laplace.utils.enums import Likelihood

    assert callable(kron)
    assert not isinstance(kron, types.ModuleType)
    assert Kron.__module__ == "laplace.compat.kron"
    assert pickle.loads(pickle.dumps(Kron)) is Kron
    assert pickle.loads(pickle.dumps(Likelihood.REGRESSION)) is Likelihood.REGRESSION
    namespace: dict[str, object] = {}
    exec("from laplace.utils.matrix import *", namespace)
    assert namespace["Kron"] is Kron
    assert install() in sys.meta_path
