"""Backward passes from the outputs, beside those that PyTorch runs from given cotangents."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from laplace.engines.native.autograd import BackwardPasses, pull

pytestmark = pytest.mark.portable

K, B, C = 4, 5, 2


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Python's collector is off, so that what is gone was freed by its last reference."""
    gc.disable()
    yield
    gc.enable()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, C)).double()


def cotangents() -> Tensor:
    return torch.randn(K, B, C, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


X = torch.linspace(-1, 1, 3 * B, dtype=torch.float64).view(B, 3)


@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.parametrize("count", [0, 1, K])
def test_gradients_are_those_of_given_cotangents(loop: bool, count: int) -> None:
    model, u = network(), cotangents()[:count]
    hidden = model[0](X)
    f, other = model[2](model[1](hidden)), torch.ones(2, requires_grad=True)
    edges = [get_gradient_edge(hidden), other, model[2].weight]
    with torch.no_grad():
        pulled = pull(f, edges, u, loop=loop)
    expected = [
        torch.autograd.grad(f, [hidden, model[2].weight], row, retain_graph=True) for row in u
    ]  # fmt: skip
    if not count:
        assert pulled == []
        return
    assert pulled[1] is None
    for i, tensor in enumerate((pulled[0], pulled[2])):
        assert tensor is not None
        torch.testing.assert_close(tensor, torch.stack([row[i] for row in expected]))


@pytest.mark.parametrize("loop", [True, False])
def test_cotangents_of_another_dtype_and_inference_mode(loop: bool) -> None:
    model, u = network(), cotangents().float()
    f, edges = model(X), [model[0].weight]
    (expected,) = pull(f, edges, u.double(), loop=loop)
    (of_float,) = pull(f, edges, u, loop=loop)
    with torch.inference_mode():
        (inside,) = pull(f, edges, u.double(), loop=loop)
    assert expected is not None and of_float is not None and inside is not None
    assert torch.equal(of_float, expected) and torch.equal(inside, expected)


@pytest.mark.parametrize("loop", [True, False])
def test_gradients_are_differentiated_again(loop: bool) -> None:
    """By the weights, and by the cotangents, in which they are linear."""
    model, u = network(), cotangents().requires_grad_()
    f = model(X)
    (rows,) = pull(f, [model[0].weight], u, loop=loop, create_graph=True)
    assert rows is not None
    again = torch.autograd.grad(rows.square().sum(), [model[0].weight, u], retain_graph=True)
    expected = torch.stack([torch.autograd.grad(f, model[0].weight, row, create_graph=True)[0] for row in u])
    for one, other in zip(again, torch.autograd.grad(expected.square().sum(), [model[0].weight, u]), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("loop", [True, False])
def test_the_graph_is_not_kept_alive(loop: bool, create_graph: bool, no_collection: None) -> None:
    """A reference of the hook to the graph that holds it would be one that Python's collector does not see."""
    del no_collection
    model = network()
    hidden = model[1](model[0](X))
    alive = weakref.ref(hidden)
    pull(model[2](hidden), [model[0].weight], cotangents(), loop=loop, create_graph=create_graph)
    del hidden
    assert alive() is None


@pytest.mark.parametrize("loop", [True, False])
def test_several_outputs_have_a_cotangent_each(loop: bool) -> None:
    """Of other shapes and dtypes, in the dtype of each."""
    leaf = torch.linspace(-1, 1, 3, dtype=torch.float64).requires_grad_()
    outputs = [leaf.exp(), (leaf * leaf.sum()).sum(), leaf.sin().float().expand(2, 3)]
    draws = torch.Generator().manual_seed(2)
    vectors = [torch.randn(K, *output.shape, generator=draws, dtype=output.dtype) for output in outputs]
    (pulled,) = BackwardPasses(outputs, [leaf]).each(*vectors, loop=loop)
    rows = [torch.autograd.grad(outputs, leaf, row, retain_graph=True)[0] for row in zip(*vectors, strict=True)]
    torch.testing.assert_close(pulled, torch.stack(rows))
