"""A fit of several parts, each saved when it is done: a loop that goes on where it was interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace
from laplace import Laplace

STRUCTURES = ("full", "block", "diag", "kron")
"""Structures whose curvature is the same sum, however the data are split."""

Parts = Sequence[DataLoader[Any]]


def fit_parts(path: Path, model: nn.Module, structure: Any, parts: Parts, *, until: int) -> Any:
    """The loop of docs/saving.md, which is interrupted after so many parts of its own."""
    la = laplace.load(path, model) if path.exists() else Laplace(model, "classification", "all", structure)
    end = 0
    for part in parts:
        end += len(part.dataset)  # type: ignore[arg-type]
        if la.n_data < end:
            if until == 0:
                return None
            until -= 1
            la.fit(part, override=False)
            la.save(path)
    return la


@pytest.mark.parametrize("structure", STRUCTURES)
def test_parts_go_on_where_they_were_interrupted(structure: Any, tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), torch.randn(15, 4).double()
    y = torch.randint(3, (len(x),), generator=torch.Generator().manual_seed(0))
    parts = [DataLoader(TensorDataset(x[i::3], y[i::3]), 4) for i in range(3)]
    path = tmp_path / "parts.safetensors"
    assert fit_parts(path, model, structure, parts, until=1) is None
    assert fit_parts(path, model, structure, parts, until=1) is None
    la = fit_parts(path, model, structure, parts, until=1)
    whole = Laplace(model, "classification", "all", structure)
    whole.fit([(x, y)])
    assert la.n_data == whole.n_data == len(x)
    torch.testing.assert_close(la(x), whole(x))
    torch.testing.assert_close(la.log_marginal_likelihood(), whole.log_marginal_likelihood())
