"""Storeys in import order, and how much code they hold (`tests/storeys.py`)."""

from __future__ import annotations

import re

import pytest

from tests.source import (
    FILES,
    ROOT,
    file_of,
    for_type_checkers,
    import_graph,
    imports,
    in_function,
    name_of,
    where,
)  # fmt: skip
from tests.storeys import OBJECTS, STOREYS, code, storey_of


def test_every_file_has_a_storey() -> None:
    assert [name_of(path) for path in FILES if storey_of(name_of(path)) is None] == ["__init__.py"]
    rooms = [room for storey in STOREYS for room in storey.rooms]
    assert len(set(rooms)) == len(rooms)
    assert not [room for room in rooms if not (ROOT / "laplace" / room).exists()]


def test_files_import_their_own_storey_and_those_below() -> None:
    """Objects that users hold import within their methods what these call; but nothing imports an extension."""
    wrong = []
    for path, node, dotted in imports():
        name, imported = name_of(path), file_of(dotted) if dotted.startswith("laplace.") else None
        if imported is None or for_type_checkers(node) or imported.name == "__init__.py":
            continue
        here, there = storey_of(name), storey_of(name_of(imported))
        if here is None or there is None or there <= here:
            continue
        is_extension = STOREYS[there].name == "extensions"
        if is_extension or not (name in OBJECTS and in_function(node)):
            wrong.append(f"{where(path, node)} {STOREYS[here].name} imports {dotted} of {STOREYS[there].name}")
    assert not wrong


def test_storeys_hold_no_more_than_they_may() -> None:
    """To raise a number of `tests/storeys.py` takes a line of CHANGELOG.md that says what for."""
    found = code()
    assert not {s.name: (found[s.name], s.most) for s in STOREYS if found[s.name] > s.most}
    # Nor is there room that nobody asked for.
    assert not {s.name: (found[s.name], s.most) for s in STOREYS if found[s.name] < 0.97 * s.most}


@pytest.mark.parametrize(("name", "most"), [("structures/kron.py", 30), ("grid.py", 65)])
def test_a_module_reaches_few_others(name: str, most: int) -> None:
    """What has to be read, from the ground up, to understand Kronecker factors, which know engines by type, or the
    classes of the grid, whose methods import what they call.
    """
    graph, reached, left = import_graph(), set[str](), [name]
    while left:
        new = graph[left.pop()] - reached
        reached |= new
        left += new
    assert len([name for name in reached if not name.endswith("__init__.py")]) <= most


def test_the_design_tells_the_storeys() -> None:
    page = (ROOT / "docs" / "design.md").read_text("utf-8")
    told = re.findall(r"^\d\. \*\*(.+?)\*\*", page, re.MULTILINE)
    assert [each.lower() for each in told] == [storey.name for storey in STOREYS]


ACROSS = (
    "agents", "catalogue", "clients", "conformance", "downstream", "fixtures", "house", "models", "operations",
    "other_device", "parity", "pretrained", "random_networks", "reference", "robustness",
)  # fmt: skip
"""Folders of tests that go through all storeys, or hold what tests of several use."""


def test_tests_are_where_their_code_is() -> None:
    """A folder of tests has the name of a package, and a module of tests beside them that of a module at the top."""
    tests, package = ROOT / "tests", ROOT / "laplace"
    folders = [path.name for path in tests.iterdir() if path.is_dir() and list(path.glob("*.py"))]
    assert set(ACROSS) <= set(folders)
    assert not [name for name in folders if name not in ACROSS and not (package / name / "__init__.py").exists()]
    loose = [path.name.removeprefix("test_") for path in tests.glob("test_*.py")]
    assert not [name for name in loose if not (package / name).exists()]


OTHERWISE = {
    "core/extensions.py": "house/test_extensions.py",
    "contract/users_predictions.py": "contract/test_user_hooks.py",
    "curvature/curvlinops.py": "conformance/test_backends.py",
    "curvature/packages.py": "conformance/test_backends.py",
    "curvature/rules.py": "engines/test_functions.py",
    "engines/cost.py": "large_fits/test_planning.py",
    "engines/engine.py": "conformance/test_curvature.py",
    "engines/layer_inputs.py": "posterior/test_tilt.py",
    "engines/native/engine.py": "conformance/test_layers.py",
    "engines/native/forward.py": "conformance/test_layers.py",
    "engines/native/kinds.py": "conformance/test_hessian.py",
    "engines/native/rules.py": "conformance/test_layers.py",
    "engines/profile.py": "large_fits/test_planning.py",
    "engines/sinks.py": "conformance/test_curvature.py",
    "enums.py": "house/test_types.py",
    "fitting/checks.py": "fitting/test_data_as_users_have_it.py",
    "gp/heads.py": "tuning/test_held_out.py",
    "gp/reading.py": "gp/test_subset.py",
    "integrations/encoder.py": "integrations/test_decision.py",
    "integrations/probly.py": "clients/wrappers.py",
    "jacobian/index.py": "jacobian/test_blocks.py",
    "network/input_errors.py": "fitting/test_data_as_users_have_it.py",
    "parametric.py": "conformance/test_evidence.py",
    "predictive/latent.py": "conformance/test_predictions.py",
    "predictive/predict.py": "conformance/test_predictions.py",
    "recipe.py": "test_saving.py",
    "refinement/result.py": "refinement/test_refine.py",
}
"""Modules without tests under their name: tables of names, and what the tests of a whole, named here, go through."""


def test_a_module_has_its_tests_under_its_name() -> None:
    """In the folder of its package; an equation or a decision of its own belongs into no list of others."""
    tests, without = ROOT / "tests", []
    for path in FILES:
        room, name = path.relative_to(ROOT / "laplace").parts[:-1][:1], f"test_{path.stem.lstrip('_')}.py"
        if path.stem != "__init__" and not tests.joinpath(*room, name).exists():
            without.append(name_of(path))
    assert without == sorted(OTHERWISE)
    assert not [name for name in OTHERWISE.values() if not (tests / name).exists()]
