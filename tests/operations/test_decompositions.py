"""No batch of matrices is decomposed where a device would take one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from laplace import Laplace
from laplace.core import eigen, gaussian

C = 40  # Outputs: more than a device decomposes at once


class Batches(TorchDispatchMode):
    """Shapes of the batches of large matrices that were decomposed."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "eigh" in str(func) and _is_slow(args[0]):
            self.shapes.append(args[0].shape)
        return func(*args, **(kwargs or {}))


def _is_slow(matrix: Tensor) -> bool:
    return matrix.shape[-1] > 32 and matrix[..., 0, 0].numel() > 1


@pytest.mark.filterwarnings("ignore::laplace.errors.ApproximationWarning")  # of a network that was not trained
@pytest.mark.parametrize("weights", ["last_layer", "all"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag", "ekfac", "lowrank"])
def test_nothing_that_is_asked_of_a_posterior_decomposes_batches(
    structure: Any, weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links, samples of outputs, targets and weights, evidences and left-out predictions."""
    for module in (eigen, gaussian):
        monkeypatch.setattr(module, "goes_one_by_one", _is_slow)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, C)).eval()
    x, y = torch.randn(60, 5), torch.arange(60) % C
    la = Laplace(model, "classification", weights, structure)
    with Batches() as found:
        la.fit([(x, y)])
        la(x[:4])
        la(x[:4], link_approx="mc", n_samples=3)
        la.functional_samples(x[:4], n_samples=3)
        la.predictive_samples(x[:4], n_samples=3)
        la.functional_samples(x[:2], n_samples=3, joint=True)
        la.sample(3)
        la.log_marginal_likelihood()
        if structure == "kron":
            la.leave_one_out([(x, y)])
    assert not found.shapes
