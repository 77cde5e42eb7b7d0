"""AGENTS.md and llms.txt are what would be written, every call of the page runs, and tasks are solved by its names."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laplace
from laplace import Laplace, errors
from tests.agents import page, solutions
from tests.agents.tasks import GIVEN, TASKS, Solution, classifier

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of PEFT


def namespace() -> dict[str, Any]:
    """What the page supposes: networks, data, and two fitted posteriors."""
    torch.manual_seed(0)
    found: dict[str, Any] = {
        name: make() for name, make in GIVEN.items() if name not in ("peft_model", "transformer", "batch")
    }
    found |= {"inputs": found["line"], "classifier": classifier(), "nn": nn, "torch": torch, "laplace": laplace}
    found |= {"labels": found["x"][:, :3].argmax(1), "Laplace": Laplace}
    la = found["la"] = Laplace(found["model"], "classification")
    la.fit(found["train_loader"])
    other = found["other"] = Laplace(found["model"], "classification")
    other.fit(found["val_loader"])
    return found


def test_the_pages_are_what_would_be_written() -> None:
    assert page.with_choices(page.text()) == page.text(), "run `python -m tests.agents.page`"
    assert page.LLMS.read_text("utf-8") == page.llms(), "run `python -m tests.agents.page`"
    assert len(page.text().splitlines()) <= 170


def test_files_that_the_pages_name_exist() -> None:
    for path in (page.AGENTS, page.LLMS):
        prose = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", re.sub(r"`[^`\n]+`", "", prose))
        assert not [target for target in targets if not (page.ROOT / target).exists()]


def test_calls_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    scope = namespace()
    for name in ("The five calls", "More calls"):
        for code in page.blocks(page.section(name)):
            exec(compile(code, f"AGENTS.md, {name}", "exec"), scope)


@pytest.mark.parametrize(("mistake", "error", "mend"), page.rows(page.section("What not to do")))
def test_mistakes_raise_what_the_page_says_and_mends_run(mistake: str, error: str, mend: str) -> None:
    scope = namespace()
    with pytest.raises(getattr(errors, error)):
        exec(mistake, scope)
    exec(mend, scope)


@pytest.mark.parametrize(("name", "instead"), page.rows(page.section("Names that do not exist")))
def test_names_that_do_not_exist(name: str, instead: str) -> None:
    scope = namespace()
    with pytest.raises(AttributeError):
        eval(name, scope)
    if instead.startswith("laplace.integrations"):
        module, _, instead = instead.rpartition(".")
        pytest.importorskip("sklearn")
        assert hasattr(importlib.import_module(module), instead)
    else:
        eval(instead, scope)


def names_of(solution: Solution) -> Iterator[str]:
    """Names, attributes, keywords and strings of a solution, but for its parameters and variables, and torch."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(solution))).body
    assert isinstance(function, ast.FunctionDef)
    nodes = [node for statement in function.body[1:] for node in ast.walk(statement)]
    own = {argument.arg for argument in function.args.args}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id not in own | {"torch"} | set(dir(builtins)):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_there_are_twenty_tasks_and_more() -> None:
    mine = [task for task in TASKS if task.solution.__module__ == solutions.__name__]
    assert len(mine) >= 20
    assert all(task.solution.__doc__ for task in mine)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.solution.__name__)
def test_a_task_is_solved_by_names_of_the_page(task: Any, tmp_path: Path) -> None:
    assert not set(names_of(task.solution)) - page.names()
    assert task.check(task.solve(tmp_path))


def test_a_name_that_is_not_on_the_page_is_found() -> None:
    def solution(model: Any) -> Any:
        """A task."""
        la = Laplace(model, "multiclass")
        return la.prior_prec

    assert set(names_of(solution)) - page.names() == {"multiclass", "prior_prec"}
