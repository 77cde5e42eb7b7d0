"""Types of the public surface: what a type checker finds in users' scripts, and that it knows the whole grid."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from collections import defaultdict
from enum import Enum
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import laplace
from laplace import enums, typed
from laplace.core.registry import Cell
from laplace.enums import HessianStructure
from laplace.errors import InvalidArgument
from laplace.factory import class_of
from laplace.function_space import FAMILIES
from laplace.likelihoods import LIKELIHOODS
from laplace.likelihoods.links import LINKS
from laplace.parametric import CELLS, ParametricLaplace
from laplace.structures import STRUCTURES, DiagCurvature, KronCurvature
from laplace.weights import WEIGHTS, AllWeights, LastLayer
from tests import grid
from tests.house.test_readme import blocks
from tests.source import PACKAGE, ROOT, tree

SCRIPTS = Path(__file__).parent / "typed"
NAMED = [cls for cls in vars(laplace).values() if isinstance(cls, type) and issubclass(cls, laplace.BaseLaplace)]


# Users' scripts.


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[int]]:
    """Lines with errors of the scripts and of the README's examples, by the name of the file."""
    pytest.importorskip("pyright")
    readme = tmp_path_factory.mktemp("typed") / "readme.py"
    readme.write_text("\n".join(text for language, text in blocks() if language == "python"), "utf-8")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(
        [*command, *map(str, sorted(SCRIPTS.glob("*.py"))), str(readme)], cwd=ROOT, capture_output=True, text=True
    )
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 3
    lines = defaultdict(set)
    for finding in report["generalDiagnostics"]:
        lines[Path(finding["file"]).name].add(finding["range"]["start"]["line"] + 1)
    return lines


def test_mistakes_are_found(findings: dict[str, set[int]]) -> None:
    lines = (SCRIPTS / "mistakes.py").read_text("utf-8").splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith("# mistake")}
    assert len(marked) > 10
    assert findings["mistakes.py"] == marked


@pytest.mark.parametrize("script", ["right.py", "readme.py"])
def test_right_scripts_have_no_findings(findings: dict[str, set[int]], script: str) -> None:
    assert not findings[script]


# What type checkers are told is what is there.


@pytest.mark.parametrize(
    ("accepted", "names"),
    [
        (enums.WeightsName, WEIGHTS),
        (enums.StructureName, [*STRUCTURES, "gp"]),
        (enums.FamilyName, FAMILIES),
        (enums.LikelihoodName, LIKELIHOODS),
        (enums.LinkName, LINKS),
        (enums.PredTypeName, enums.PredType),
        (enums.TuningMethodName, enums.TuningMethod),
        (enums.PriorStructureName, enums.PriorStructure),
        (enums.FeatureReductionName, enums.FeatureReduction),
    ],
)
def test_strings_that_are_accepted_are_those_of_the_enum_and_the_registry(accepted: object, names: object) -> None:
    enum, strings = get_args(accepted)
    assert issubclass(enum, Enum)
    assert get_args(strings) == tuple(member.value for member in enum)
    assert set(get_args(strings)) == set(map(str, names))


def overloads() -> list[ast.FunctionDef]:
    nodes = ast.walk(tree(PACKAGE / "factory.py"))
    found = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "Laplace"]
    return [node for node in found if any(ast.unparse(by) == "overload" for by in node.decorator_list)]


def chosen(overload: ast.FunctionDef) -> tuple[object, ...]:
    """The names of an overload's cell; a class stands for registered parts. Of what is left out, the default."""
    given = {arg.arg: ast.unparse(arg.annotation) for arg in [*overload.args.args, *overload.args.kwonlyargs]}
    axes = {"subset_of_weights": "t.Last", "hessian_structure": "t.Kron", "functional_approximation": "t.Sod"}
    kinds = [given.get(axis, default) for axis, default in axes.items()]
    return tuple(kind if kind.startswith("type[") else value_of(kind) for kind in kinds)


def value_of(kind: str) -> str:
    """`"t.All"` → `"all"`; an enum's member is accepted beside its value."""
    text, member = get_args(getattr(typed, kind.removeprefix("t.")))[:2] if kind != "t.AnyStructure" else ("", "")
    assert text == member
    return text


def returned(overload: ast.FunctionDef) -> str:
    return ast.unparse(overload.returns).rpartition(".")[2]


def options_of(overload: ast.FunctionDef) -> type:
    (name,) = re.findall(r"Unpack\[t\.(\w+)\]", ast.unparse(overload.args.kwarg.annotation))
    return getattr(typed, name)


def test_every_cell_has_its_class() -> None:
    told = defaultdict(set)
    for overload in overloads():
        cell = chosen(overload)
        if not any(name == "" or name.startswith("type[") for name in cell):
            told[Cell(*cell)].add(returned(overload))
    assert told == {cell: {class_of(cell).__name__} for cell in CELLS if is_the_library_s(cell)}
    assert {cell.weights for cell in told} == set(WEIGHTS)
    assert {cell.structure for cell in told} == {*STRUCTURES, "gp"}
    assert {cell.family for cell in told} == set(FAMILIES)


def is_the_library_s(cell: Cell) -> bool:
    return class_of(cell).__module__.startswith("laplace.")


def test_every_cell_is_reached_by_position_and_the_last_layer_s_without_its_name() -> None:
    ways = defaultdict(list)
    for overload in overloads():
        ways[chosen(overload)].append([arg.arg for arg in overload.args.args[2:]])
    whole = ["subset_of_weights", "hessian_structure"]
    assert all(whole in way for way in ways.values())
    last = {cell: way for cell, way in ways.items() if cell[0] == "last_layer" and cell[1] != "kron"}
    assert all([] in way for way in last.values())


@pytest.mark.parametrize("overload", overloads(), ids=lambda overload: str(overload.lineno))
def test_arguments_are_those_of_the_constructor(overload: ast.FunctionDef) -> None:
    cls = getattr(laplace, returned(overload))
    parameters = dict(list(inspect.signature(cls.__init__).parameters.items())[3:])
    options = options_of(overload)
    assert set(options.__annotations__) == set(parameters)
    required = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    assert options.__required_keys__ == required
    there, here = get_type_hints(cls.__init__), get_type_hints(options)
    assert {name: there[name] for name in parameters} == here


@pytest.mark.parametrize("cls", NAMED, ids=lambda cls: cls.__name__)
def test_every_class_says_its_arguments(cls: type) -> None:
    signature = inspect.signature(cls)
    section = re.search(r"^Args:\n((?:    .*\n?)+)", cls.__doc__, re.MULTILINE)
    described = re.findall(r"^    (\w+): ", section[1], re.MULTILINE)
    assert described == list(signature.parameters)
    assert inspect.getdoc(cls).count("Args:") == 1


@pytest.mark.parametrize("cls", NAMED, ids=lambda cls: cls.__name__)
def test_the_signature_of_a_class_is_that_of_its_constructor(cls: type) -> None:
    """Of itself Python 3.10 would show that of `__new__`."""
    of_class, of_constructor = (list(inspect.signature(each).parameters) for each in (cls, cls.__init__))
    assert ["self", *of_class] == of_constructor


def test_a_class_of_the_user_s_keeps_its_docstring_and_its_signature() -> None:
    class Mine(laplace.DiagLaplace):
        """As it was written."""

        def __init__(self, model: object, width: int = 3) -> None:
            super().__init__(model, "classification", prior_precision=width)

    assert Mine.__doc__ == "As it was written."
    assert list(inspect.signature(Mine).parameters) == ["model", "width"]
    assert inspect.signature(Mine(grid.network())) == inspect.signature(Mine(grid.network()).__call__)


# Classes in the place of names, at run time.


def test_registered_parts_are_given_by_their_classes() -> None:
    by_class = laplace.Laplace(grid.network(), "classification", LastLayer, KronCurvature)
    assert type(by_class) is laplace.KronLLLaplace
    with STRUCTURES.temporarily(), WEIGHTS.temporarily():

        @STRUCTURES.register("mine")
        class Mine(DiagCurvature):
            """A structure."""

        @WEIGHTS.register("others")
        class Others(AllWeights):
            """A choice of weights."""

        la = laplace.Laplace(grid.network(), "classification", Others, Mine)
        assert isinstance(la, ParametricLaplace)
        assert (la.structure, la.weights_type) == (Mine, Others)
        assert type(la) is type(laplace.Laplace(grid.network(), "classification", "others", "mine"))
        online = laplace.OnlineLaplace(grid.network(), grid.batches("classification"), "classification", Mine)
        assert online.la.structure is Mine


def test_parts_that_are_not_registered_are_refused() -> None:
    class Unknown(DiagCurvature):
        """Nobody's."""

    with pytest.raises(InvalidArgument, match=r"hessian_structure=.*Unknown.*register\('a name'\)"):
        laplace.Laplace(grid.network(), "classification", "all", Unknown)
    with pytest.raises(InvalidArgument, match="subset_of_weights=3 is not registered"):
        laplace.Laplace(grid.network(), "classification", 3)
    assert type(laplace.Laplace(grid.network(), "classification", "all", HessianStructure.DIAG)) is laplace.DiagLaplace
