"""Every call that an error, a warning or a report of the library advises can be made."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import Laplace
from laplace.errors import LaplaceWarning
from tests import grid
from tests.source import FILES

_PART = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"
_CALL = re.compile(rf"\b(?:la|laplace|model|prediction|x|y)(?:\.\w+)*\({_PART}\)(?:\.\w+(?:\({_PART}\))?)*")

ELSEWHERE = {
    "laplace.curvature.rules.like(known, own)",
    "model(...).logits",
    "model.enable_adapter_layers()",
    "model.gradient_checkpointing_disable()",
    "model.merge_and_unload()",
    "model.set_grad_checkpointing(False)",
    "model.unmerge_adapter()",
}
"""Methods of models of transformers, PEFT and timm, of fits in several processes and of layers of users.

Each is tested with these.
"""

MEANT = {
    "la.fit(...)": "la.fit(loader)",
    "la.to(device=..., dtype=...)": "la.to(device='cpu', dtype=torch.float64)",
    "la.to(dtype=...)": "la.to(dtype=torch.float64)",
    "laplace.load()": "laplace.load(path, model)",
    "model(...)": "model(x)",
    "model(x[…])": "model(x)",
}
"""What stands for the arguments that a text leaves out. Groups of processes are tested by themselves."""


def texts() -> Iterator[str]:
    """Strings of the library that are no docstrings, with an ellipsis where a number or a name is put in."""
    for path in FILES:
        left_out: set[int] = set()  # nodes come from the root down: known before they are seen
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Expr):
                left_out.add(id(node.value))
            elif isinstance(node, ast.JoinedStr):
                left_out |= {id(part) for part in node.values}
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
                yield node.value


ADVISED = sorted({call for text in texts() for call in _CALL.findall(text)} - ELSEWHERE)


class Two(nn.Module):
    """A network of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return self.head(x1 + x2)


class Named(nn.Module):
    """A network of a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


X, Y = grid.data()


def namespace(la: Any, loader: list[Any], path: Path, **more: Any) -> dict[str, Any]:
    """Names that texts use, for a posterior that is fitted to a loader."""
    la.fit(loader)
    path.parent.mkdir(exist_ok=True)
    torch.save(la.state_dict(), path)
    return {
        "loader": loader,
        "train_loader": loader,
        "val_loader": [grid.data(seed=8)],
        "la": la,
        "model": la.model,
        "laplace": laplace,
        "torch": torch,
        "x": X,
        "y": Y,
        "X": X,
        "Y": Y,
        "path": path,
        "n": 3,
        "n_data": len(X),
        "device": "cpu",
        "state": la.model.state_dict(),
        **more,
    }


def of_classes(path: Path) -> dict[str, Any]:
    la = Laplace(grid.network(), "classification", "all", "diag")
    found = namespace(la, [(X, Y)], path)
    return found | {"prediction": found["la"].predict(X)}


def of_values(path: Path) -> dict[str, Any]:
    x, y = grid.data("regression")
    la: Any = Laplace(grid.network("regression"), "regression", "last_layer", "full")
    return namespace(la, [(x, y)], path, x=x, y=y)


def of_a_file(path: Path) -> dict[str, Any]:
    found = of_classes(path)
    found["la"].save(path)
    return found


def calibrated(path: Path) -> dict[str, Any]:
    found = of_classes(path)
    found["la"].calibrate(found["val_loader"])
    return found


def of_two(path: Path) -> dict[str, Any]:
    return namespace(Laplace(Two(), "classification", "all", "diag"), [(X, X, Y)], path, x1=X, x2=X)


def of_names(path: Path) -> dict[str, Any]:
    batch = {"x": X, "labels": Y}
    return namespace(Laplace(Named(), "classification", "all", "diag"), [batch], path, batch={"x": X})


def of_images(path: Path) -> dict[str, Any]:
    return of_classes(path) | {"x": torch.zeros(2, 4, 4, 3), "y": torch.zeros(12, 1)}


SETTINGS: list[Callable[[Path], dict[str, Any]]] = [
    of_classes, of_values, of_a_file, calibrated, of_two, of_names, of_images,
]  # fmt: skip


@pytest.mark.parametrize("call", ADVISED)
def test_advice_can_be_followed(call: str, tmp_path: Path) -> None:
    """In one of the settings at least."""
    code, errors = compile(MEANT.get(call, call), "advice", "eval"), []
    for number, setting in enumerate(SETTINGS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LaplaceWarning)
            warnings.simplefilter("ignore", FutureWarning)  # of torch.load, before PyTorch 2.6
            try:
                eval(code, setting(tmp_path / str(number) / "posterior"))
                return
            except Exception as error:
                errors.append(f"{setting.__name__}: {error!r}")
    pytest.fail("\n".join(errors))


def test_calls_are_found() -> None:
    assert {"la.calibrate(val_loader)", "la.predict(x.clone())", "la.coverage()"} <= set(ADVISED) and len(ADVISED) > 50
