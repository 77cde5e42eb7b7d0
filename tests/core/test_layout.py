"""The flat parameter vector against PyTorch's own, and where its parts are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from laplace.core.layout import Layout, flatten, repeated
from laplace.errors import InvalidArgument

MODEL = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1, bias=False))
LAYOUT = Layout(
    tuple(name for name, _ in MODEL.named_parameters()), tuple(value.numel() for value in MODEL.parameters())
)


def test_the_vector_is_pytorchs() -> None:
    expected = parameters_to_vector(MODEL.parameters())
    assert torch.equal(flatten(list(MODEL.parameters())), expected)
    assert torch.equal(flatten(dict(MODEL.named_parameters())), expected)
    assert (LAYOUT.n_params, LAYOUT.n_tensors) == (12, 3)
    for part, piece, value in zip(LAYOUT.slices, LAYOUT.split(expected), MODEL.parameters(), strict=True):
        assert torch.equal(expected[part], value.flatten()) and torch.equal(piece, value.flatten())


def test_tensors_of_a_module_are_a_layer() -> None:
    assert LAYOUT.layers == ((0, 1), (2,))


def test_one_value_per_tensor_is_spread_and_its_gradient_is_a_sum() -> None:
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    spread = LAYOUT.repeat_per_tensor(values)
    assert spread.tolist() == [1.0] * 6 + [2.0] * 3 + [3.0] * 3
    (gradient,) = torch.autograd.grad((spread * torch.arange(12)).sum(), values)
    assert gradient.tolist() == [15.0, 21.0, 30.0]
    assert repeated(torch.tensor([5.0, 6.0]), (0, 2)).tolist() == [6.0, 6.0]


@pytest.mark.parametrize("value", [torch.tensor(1.0), torch.ones(11)])
def test_what_is_no_vector_is_refused(value: torch.Tensor) -> None:
    with pytest.raises(InvalidArgument, match="P = 12"):
        LAYOUT.checked(value)
