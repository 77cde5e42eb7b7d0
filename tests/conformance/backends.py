"""The backends by other packages, how each is made, and what each of its quantities should be.

A new backend is one line of `BACKENDS`. Its primitives are then compared with the dense truth over the catalogue, and
its rows of docs/backends.md are generated.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from laplace.core.batch import without_ignored
from laplace.engines.engine import CurvatureEngine
from laplace.likelihoods import get_likelihood
from laplace.structures import KronCurvature
from laplace.weights.problem import Problem
from tests import problems as catalogue
from tests.conformance.cases import Case, drawn, truth
from tests.conformance.kron_truth import dense_of_factors, kron_truth
from tests.reference import curvature as reference


@dataclass(frozen=True)
class Backend:
    """A backend by another package.

    Attributes:
        name: Of the class in `laplace.curvature`.
        package: The module that it needs.
        kind: `"ggn"`, `"ef"` or `"hessian"`.
    """

    name: str
    package: str
    kind: str

    def __str__(self) -> str:
        return self.name

    @property
    def cls(self) -> Any:
        """The class; skips the test if its package is missing."""
        pytest.importorskip(self.package)
        return getattr(importlib.import_module("laplace.curvature"), self.name)


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("CurvlinopsGGN", "curvlinops", "ggn"),
        Backend("CurvlinopsEF", "curvlinops", "ef"),
        Backend("CurvlinopsHessian", "curvlinops", "hessian"),
        Backend("BackPackGGN", "backpack", "ggn"),
        Backend("BackPackEF", "backpack", "ef"),
        Backend("AsdlGGN", "asdl", "ggn"),
        Backend("AsdlEF", "asdl", "ef"),
        Backend("AsdlHessian", "asdl", "hessian"),
    )
}

PRIMITIVES: dict[str, str] = {"full": "full", "block": "blocks", "lowrank": "matmul", "kron": "kron", "diag": "diag"}
"""The primitive of the engine that a structure reads."""


def engine_of(backend: Backend, case: Case, **options: Any) -> CurvatureEngine:
    """The engine of a backend for a case, of a fresh model.

    Args:
        backend: Which.
        case: Problem and choice of weights.
        **options: Of the constructor.
    """
    la = case.build()
    problem = la.weights.discover(case.problem.x)
    interface = backend.cls(problem.module, case.problem.likelihood, **options)
    return interface.engine(problem, get_likelihood(case.problem.likelihood))


def groups_of(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Positions of the treated tensors by the module that owns them."""
    owners: dict[str, list[int]] = {}
    for i, slot in enumerate(problem.slots):
        owners.setdefault(slot.name.rpartition(".")[0], []).append(i)
    return tuple(tuple(group) for group in owners.values())


def computed(engine: CurvatureEngine, primitive: str, case: Case, size: int | None = None) -> Tensor:
    """A primitive summed over batches, as a matrix `[P, P]`, or products `[3, P]` for `matmul`."""
    kept = [without_ignored(*_split(batch), engine.likelihood.ignore_index) for batch in case.problem.batches(size)]
    parts = [_one(engine, primitive, case, *pair) for pair in kept if pair is not None]
    if primitive != "kron":
        return torch.stack(parts).sum(0)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return dense_of_factors(total)


def _split(batch: Any) -> tuple[Any, Tensor]:
    if isinstance(batch, dict):
        return {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
    return batch


def _one(engine: CurvatureEngine, primitive: str, case: Case, x: Any, y: Tensor) -> Any:
    if primitive == "kron":
        return KronCurvature(engine.kron(x, y)[1])
    if primitive == "diag":
        return torch.diag(engine.diag(x, y)[1][0])
    if primitive == "full":
        return engine.full(x, y)[1][0]
    if primitive == "matmul":
        return engine.matmul(x, y, vectors_of(case).unsqueeze(0))[1][0]
    slices = engine.problem.layout.slices
    groups = groups_of(engine.problem)
    values = torch.zeros(2 * (engine.problem.layout.n_params,), dtype=torch.float64)
    for group, block in zip(groups, engine.blocks(x, y, groups)[1], strict=True):
        entries = torch.cat([torch.arange(slices[i].start, slices[i].stop) for i in group])
        values[entries[:, None], entries] = block[0]
    return values


def vectors_of(case: Case) -> Tensor:
    """Vectors to multiply, `[3, P]`."""
    return drawn(case, "vectors", 3, len(case.columns))


def expected(kind: str, primitive: str, case: Case, approx: str = "expand") -> Tensor:
    """What `computed` should give."""
    if primitive == "kron":
        return kron_truth(case, approx, kind)
    dense = hessian(case.problem.name)[case.columns][:, case.columns] if kind == "hessian" else case.dense(kind)
    keep: dict[str, Callable[[], Tensor]] = {
        "full": lambda: dense,
        "diag": lambda: torch.diag(dense.diagonal()),
        "matmul": lambda: vectors_of(case) @ dense,
        "blocks": lambda: dense * (case.layer_of[:, None] == case.layer_of),
    }
    return keep[primitive]()


@cache
def hessian(name: str) -> Tensor:
    """The exact Hessian of all parameters of a problem."""
    problem = catalogue.get(name)
    return reference.exact_hessian(
        problem.make_model(), problem.x, problem.y, truth(name).names, problem.likelihood
    ).detach()
