"""A subnetwork is computed for its entries alone: no tensor is made that holds more than they need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from laplace import Laplace
from laplace.weights.masks import RandomSubnetMask
from tests import grid

WIDTH, HIDDEN, N_DATA, N_OUTPUTS = 300, 200, 16, 5


class Largest(TorchDispatchMode):
    """Remembers the number of entries of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                self.entries = max(self.entries, value.numel())
        return result


# Not lowrank: its vectors pass through the layer's own weight, several at once within the memory budget.
@pytest.mark.parametrize("structure", [name for name in grid.STRUCTURES if name != "lowrank"])
def test_no_tensor_holds_more_than_the_entries_need(structure: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, N_OUTPUTS))
    indices = RandomSubnetMask(model, 60, torch.Generator().manual_seed(0)).select()
    in_first = indices[indices < WIDTH * HIDDEN]
    rows, cols = (in_first // WIDTH).unique(), (in_first % WIDTH).unique()
    x, y = torch.randn(N_DATA, WIDTH), torch.randint(N_OUTPUTS, (N_DATA,))
    la = Laplace(model, "classification", "subnetwork", structure, subnetwork_indices=indices)
    with Largest() as largest:
        la.fit([(x, y)])
        la(x)
        la(x, link_approx="mc")
    # The layer's own weight, or activations and gradients of all outputs; not rows × columns for every one of these.
    allowed = max(WIDTH * HIDDEN, N_OUTPUTS * N_DATA * WIDTH)
    assert largest.entries <= allowed
    assert N_OUTPUTS * N_DATA * len(rows) * len(cols) > 2 * allowed
