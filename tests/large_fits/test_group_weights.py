"""Weights of data in fits over processes: what one process says of the same weighted data, or an error in all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from laplace.errors import InvalidData, LaplaceError, ProcessError
from tests.large_fits import ranks
from tests.large_fits.test_group import assert_same, batches, data, found, make

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without torch.distributed")

STRUCTURES = ("full", "kron", "diag", "lowrank", "ekfac", "lowrank_kron", "block")


def weigh(x: Tensor, y: Tensor) -> Tensor:
    """A weight that a datum tells, 0 of some."""
    return torch.where(x[:, 0] > 1, 0.0, 1 + x[:, 1].square())


def nothing(x: Tensor, y: Tensor) -> Tensor:
    return torch.zeros(len(y))


def _fits(rank: int) -> list[dict[str, Any]]:
    group = distributed.group.WORLD
    results: list[dict[str, Any]] = []
    for structure in STRUCTURES:
        la = make("all", structure)
        la.fit(batches(*((0, 12), (12, 23))[rank]), group=group, weight_fn=weigh)
        results.append(found(la))
    la = make("all", "kron")
    x, y = data()
    loader = DataLoader(TensorDataset(x, y), 5, sampler=DistributedSampler(TensorDataset(x, y), shuffle=True, seed=3))
    la.fit(loader, group=group, weight_fn=weigh)  # of 23 data, of which one is repeated to fill up
    results.append(found(la))
    half = batches(0, 12) if rank == 0 else batches(12, 23)
    la.forget(half[:1], group=group, weight_fn=weigh)
    results.append(found(la))
    la.fit(half, group=group, weight_fn=weigh if rank == 0 else nothing)
    results.append(found(la))
    return results


def test_weighted_fits_are_those_of_one_process(tmp_path: Path) -> None:
    both = ranks.run(_fits, folder=tmp_path)
    alone: list[dict[str, Any]] = []
    for structure in STRUCTURES:
        la = make("all", structure)
        la.fit(batches(), weight_fn=weigh)
        alone.append(found(la))
    la = make("all", "kron")
    la.fit(batches(), weight_fn=weigh)
    alone.append(found(la))
    la.forget([batches(0, 12)[0], batches(12, 23)[0]], weight_fn=weigh)
    alone.append(found(la))
    la.fit(batches(0, 12), weight_fn=weigh)
    alone.append(found(la))
    for said in both:
        for one, expected in zip(said, alone, strict=True):
            assert one.pop("n_data") == pytest.approx(expected["n_data"], rel=1e-12)
            assert_same(one, expected)


def _refusals(rank: int) -> list[tuple[bool, str, Any]]:
    group, half = distributed.group.WORLD, batches(*((0, 12), (12, 23))[rank])
    la = make("all", "kron")
    la.fit(half, group=group)
    seen: list[tuple[bool, str, Any]] = []
    ways: list[dict[str, Any]] = [
        {"weight_fn": weigh if rank == 0 else lambda x, y: -torch.ones(len(y))},
        {"weight_fn": nothing},
    ]
    for way in ways:
        with pytest.raises(LaplaceError) as refused:
            la.fit(half, group=group, **way)
        error = refused.value
        seen.append((isinstance(error, ProcessError | InvalidData), str(error), la.n_data))
    return seen


def test_weights_that_are_none_are_errors_of_all(tmp_path: Path) -> None:
    for negative, none in ranks.run(_refusals, folder=tmp_path):
        assert negative[0]
        assert "from -1 to -1" in negative[1]
        assert none[0]
        assert "gave no data" in none[1]
        assert negative[2] == none[2] == 23
