"""Samples of equal seeds agree wherever and however they are drawn: by other instructions, threads and slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from laplace.errors import MemoryWarning
from tests.pairs import nightly
from tests.robustness import drawn

pytestmark = pytest.mark.portable

DTYPES = (torch.float32, torch.float64)

ELSEWHERE: dict[str, tuple[int, dict[str, str]]] = {
    "plain": (1, {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}),
    "AVX2, other matrix products, two threads": (2, {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"}),
}
"""Threads and environment of processes that stand for other machines."""


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Fails unless all samples are as near as they must be."""
    apart = {name: share for name, share in drawn.differences(found, expected) if not share <= 1}
    assert found.keys() == expected.keys()
    assert not apart, f"times what is allowed: {apart}"


@pytest.mark.parametrize("machine", ["plain", *nightly("AVX2, other matrix products, two threads")])
def test_on_other_machines(machine: str, tmp_path: Path) -> None:
    """Every posterior fitted and sampled with other instructions, in a process of its own."""
    threads, environment = ELSEWHERE[machine]
    here, found = drawn.everything(), drawn.elsewhere(tmp_path, threads, **environment)
    check(found, here)
    if machine == "plain" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert any(not torch.equal(found[name][0], here[name][0]) for name in here), "the setting changed nothing"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("weights", "structure"), drawn.CELLS)
@pytest.mark.turns
def test_of_a_few_data_at_once(weights: str, structure: str, dtype: torch.dtype) -> None:
    """Also where the data leave little of the prior's variance."""
    la, memory = drawn.fitted(weights, structure, dtype)
    for prior_precision in (1.0, 1e-4):
        la.prior_precision = prior_precision
        expected = drawn.samples(la, dtype)
        with memory.of(5), pytest.warns(MemoryWarning):
            found = drawn.samples(la, dtype)
        check(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("weights", "structure"), drawn.CELLS)
def test_of_a_batch_and_of_its_parts(weights: str, structure: str, dtype: torch.dtype) -> None:
    """The covariance of each datum colours its noise alike in every batch."""
    la, _ = drawn.fitted(weights, structure, dtype)
    x = drawn.inputs(dtype)
    known = la.predict(x)
    noise = torch.randn(drawn.N_SAMPLES, *known.latent_mean.shape, dtype=dtype)

    def coloured(x: Tensor, noise: Tensor) -> Tensor:
        return la.predict(x).latent._colouring()(noise)

    whole = coloured(x, noise)
    parts = torch.cat([coloured(a, e) for a, e in zip(x.split(5), noise.split(5, 1), strict=True)], 1)
    moments = known.latent_mean, known.latent_variance.sqrt()
    check({"noise": (parts, *moments)}, {"noise": (whole, *moments)})
