"""Types of the public surface: what a type checker finds in users' scripts, and that it knows the whole grid."""

from __future__ import annotations

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
from torch import nn

import laplace
from laplace import enums
from laplace.curvature import CurvatureInterface
from laplace.enums import HessianStructure
from laplace.errors import InvalidArgument
from laplace.function_space import FAMILIES
from laplace.grid import classes, from_names
from laplace.likelihoods import LIKELIHOODS
from laplace.likelihoods.links import LINKS
from laplace.parametric import ParametricLaplace
from laplace.structures import STRUCTURES, DiagCurvature, KronCurvature
from laplace.weights import WEIGHTS, AllWeights, LastLayer
from tests import grid
from tests.house import stubs
from tests.house.test_readme import blocks
from tests.registries import temporarily
from tests.source import PACKAGE, ROOT

SCRIPTS = Path(__file__).parent / "typed"
NAMED = [laplace.BaseLaplace, ParametricLaplace, laplace.BaseFunctionalLaplace, *classes()]


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


def test_stubs_are_up_to_date() -> None:
    texts = stubs.stubs()
    assert set(texts) == set(PACKAGE.rglob("*.pyi"))
    stale = [path.relative_to(ROOT) for path, text in texts.items() if path.read_text("utf-8") != text]
    assert not stale, "run python -m tests.house.stubs"


def test_every_cell_has_a_class_that_is_public() -> None:
    cells = {cls._key for cls in classes() if "_key" in vars(cls)}
    assert {cell[0] for cell in cells} == set(WEIGHTS)
    assert {cell[1] for cell in cells} == {*STRUCTURES, "gp"}
    assert {cell[2] for cell in cells if len(cell) > 2} == set(FAMILIES) - {"sod"}
    assert {cls.__name__ for cls in classes()} <= set(laplace.__all__)
    assert all(getattr(laplace, cls.__name__) is cls for cls in classes())


@pytest.mark.parametrize("cls", NAMED, ids=lambda cls: cls.__name__)
def test_every_class_says_its_arguments(cls: type) -> None:
    signature = inspect.signature(cls)
    section = re.search(r"^Args:\n((?:    .*\n?)+)", cls.__doc__, re.MULTILINE)
    described = re.findall(r"^    (\w+): ", section[1], re.MULTILINE)
    assert described == list(signature.parameters)
    assert inspect.getdoc(cls).count("Args:") == 1


@pytest.mark.parametrize("names", [("all", "full"), ("last_layer", "diag")])
def test_help_sorts_all_members_by_task(names: tuple[str, str]) -> None:
    la = from_names(nn.Linear(2, 2), "classification", *names)
    listed = type(la).__doc__.partition("\nMembers by task:\n")[2]  # pyright: ignore
    named = re.findall(r"\w+", re.sub(r"^    \w[\w -]*:|la\(x\)", "", listed, flags=re.MULTILINE))
    assert len(named) == len(set(named))
    assert set(named) == set(dir(la)) - {"feature_reduction", "last_layer_name"}


@pytest.mark.parametrize("cls", NAMED, ids=lambda cls: cls.__name__)
def test_the_signature_of_a_class_is_that_of_its_constructor(cls: type) -> None:
    """Of itself Python 3.10 would show that of `__new__`."""
    of_class, of_constructor = (list(inspect.signature(each).parameters) for each in (cls, cls.__init__))
    assert ["self", *of_class] == of_constructor
    hints = get_type_hints(cls.__init__)  # as tools resolve them that make objects of configurations
    assert hints["backend"] == type[CurvatureInterface] | None


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
    with temporarily(STRUCTURES, WEIGHTS):

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
