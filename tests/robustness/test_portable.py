"""Every weights × structure × likelihood: a fit in float32 says what one in float64 does, on every machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from laplace import Laplace
from laplace.errors import UnsupportedError
from laplace.likelihoods.links import LINKS
from tests import grid
from tests.reference.compare import assert_close
from tests.robustness import drawn

pytestmark = pytest.mark.portable

EXACTLY: dict[str, dict[str, Any]] = {"lowrank": {"structure_kwargs": {"rank": 40}}}
"""Options with which a structure keeps all eigenvectors, and none by chance."""

PREDICTIVES: list[dict[str, Any]] = [{"link_approx": link} for link in LINKS if link != "mc"]
PREDICTIVES += [{"joint": True}, {"diagonal_output": True}]


def fitted(weights: str, structure: str, likelihood: str, dtype: torch.dtype) -> Any:
    model = drawn.with_even_weights(grid.network(likelihood).to(dtype))
    options = {"subnetwork_indices": grid.INDICES} if weights == "subnetwork" else {}
    la = Laplace(model, likelihood, weights, structure, **options, **EXACTLY.get(structure, {}))
    la.fit(
        [
            (drawn.even(x).to(dtype), of_dtype(drawn.even(y) if y.is_floating_point() else y, dtype))
            for x, y in grid.batches(likelihood)
        ]
    )
    return la


def of_dtype(y: Tensor, dtype: torch.dtype) -> Tensor:
    return y.to(dtype) if y.is_floating_point() else y


def numbers(la: Any, likelihood: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Evidence, moments, predictions by every link, all without random numbers."""
    x = drawn.even(grid.data(likelihood, seed=8)[0]).to(dtype)
    found = {"evidence": la.log_marginal_likelihood(), "variances": la.posterior_variance}
    for options in PREDICTIVES:
        try:
            predicted = la(x, **options)
        except UnsupportedError:
            continue
        for i, part in enumerate(predicted if isinstance(predicted, tuple) else [predicted]):
            found[f"{options} {i}"] = part
    return found


@pytest.mark.filterwarnings("ignore:link_approx='delta'")
@pytest.mark.parametrize("likelihood", grid.LIKELIHOODS)
@pytest.mark.parametrize("structure", grid.STRUCTURES)
@pytest.mark.parametrize("weights", grid.WEIGHTS)
@pytest.mark.turns
def test_in_both_precisions(weights: str, structure: str, likelihood: str) -> None:
    found, expected = (
        numbers(fitted(weights, structure, likelihood, dtype), likelihood, dtype)
        for dtype in (torch.float32, torch.float64)
    )
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name], value, "float32_solve", label=name)
