"""Questions about a posterior, solved by the functions that AGENTS.md names, whose calls run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laplace
from laplace import Laplace
from laplace.errors import ApproximationWarning
from tests.agents import page
from tests.agents.tasks import TASKS, inputs, task
from tests.agents.test_agents import names_of, namespace

pytestmark = pytest.mark.filterwarnings(f"ignore::{ApproximationWarning.__module__}.ApproximationWarning")


@task(lambda score: score.shape == (30,))
def strangers(model, train_loader, x):
    """Rank inputs by how far they are from the training data."""
    la = Laplace(model, "classification")
    la.fit(train_loader)
    return laplace.ood_score(la, x)


@task(lambda found: torch.equal(*found))
def a_function_for_ever(model, train_loader, x):
    """Draw a function that is the same at every call."""
    la = Laplace(model, "classification", "all", "kron")
    la.fit(train_loader)
    (function,) = laplace.draw(la, 1)
    return function(x), function(x)


@task(lambda indices: len(set(indices.tolist())) == 4)
def what_to_label_next(model, train_loader, x):
    """Which four of these inputs shall I label?"""
    la = Laplace(model, "classification")
    la.fit(train_loader)
    return laplace.acquire(la, x, 4).indices


@task(lambda indices: len(indices) == 30)
def wrong_labels(model, train_loader):
    """Which labels look wrong?"""
    la = Laplace(model, "classification")
    la.fit(train_loader)
    return laplace.label_errors(la, train_loader).indices


@task(lambda found: isinstance(found[0], nn.Module) and torch.allclose(found[0](inputs()), found[1], atol=1e-6))
def without_the_library(model, train_loader, x):
    """Serve predictions with PyTorch alone."""
    la = Laplace(model, "classification")
    la.fit(train_loader)
    return laplace.export(la, x), la(x)


@task(lambda found: (found[0] < found[1]).all())
def intervals_with_a_promise(regressor, regression_loader, line):
    """Intervals of a regression whose coverage is promised."""
    la = Laplace(regressor, "regression", "all", "full")
    la.fit(regression_loader)
    return laplace.conformal(la, regression_loader).interval(line, 0.9)


QUESTIONS = [task for task in TASKS if task.solution.__module__ == __name__]


@pytest.mark.parametrize("task", QUESTIONS, ids=lambda task: task.solution.__name__)
def test_a_question_is_answered_by_names_of_the_page(task: Any, tmp_path: Path) -> None:
    assert not set(names_of(task.solution)) - page.names()
    task.check(task.solve(tmp_path)) or pytest.fail(task.solution.__doc__)


def test_calls_of_the_section_run() -> None:
    scope = namespace()
    for code in page.blocks(page.section("Questions about a posterior")):
        exec(compile(code, "AGENTS.md, questions", "exec"), scope)
