"""Networks with weights of float32 and of float64: right predictions, or a refusal before the data are read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import UnsupportedError
from tests.conformance.cases import STRUCTURE_NAMES
from tests.conformance.test_layers import posterior
from tests.reference import curvature as reference
from tests.reference.compare import assert_close

X, Y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1, 1, 0])


class _Cast(nn.Module):
    """Casts what it is given to the dtype of every layer."""

    def __init__(self, first: torch.dtype, last: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.head = nn.Linear(3, 4).to(first), nn.Linear(4, 2).to(last)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inp(x.to(self.inp.weight.dtype))).to(self.head.weight.dtype))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
def test_weights_of_two_dtypes_are_refused(
    structure: str, weights: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    model = _Cast(*dtypes)
    la = posterior(model, structure, weights)
    with pytest.raises(UnsupportedError, match=r"model\.double\(\)"):
        la.fit([(X, Y)])
    la = posterior(model.double(), structure, weights)
    la.fit([(X, Y)])
    assert la(X.double()).shape == (6, 2)


@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
def test_fixed_weights_may_have_another_dtype(structure: str) -> None:
    model = _Cast(torch.float32, torch.float64)
    model.head.requires_grad_(False)
    la = posterior(model, structure)
    la.fit([(X, Y)])
    assert la(X).isfinite().all()
    if structure == "full":
        exact = reference.ggn(model.double(), X.double(), Y, ["inp.weight", "inp.bias"], "classification")
        assert_close(la.H, exact, "float32")


def test_low_precision_beside_float32() -> None:
    model = _Cast(torch.bfloat16, torch.float32)
    la = Laplace(model, "classification", "all", "diag")
    la.fit([(X, Y)])
    assert la(X).isfinite().all()
