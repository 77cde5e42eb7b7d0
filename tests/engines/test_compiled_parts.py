"""Networks with parts that `torch.compile` has compiled, which keep the hooks that were there when they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import UnsupportedError
from laplace.network.model_guard import hooks_fire
from tests.versions import newer_torch

X = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3)
Y = torch.arange(6) % 3


def network(part: str) -> nn.Module:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model: Any = nn.Sequential(nn.Linear(3, 4), inner, nn.Linear(4, 3)).double()
    if part == "wrapped":
        model[1] = torch.compile(inner, backend="eager")
    elif part == "in place":
        inner.compile(backend="eager")
    return model


def answers(part: str, structure: str) -> list[Tensor]:
    la: Any = Laplace(network(part), "classification", "all", structure, enable_backprop=True)
    la.fit([(X, Y)])
    x = X.clone().requires_grad_()
    probabilities = la(x)
    (gradient,) = torch.autograd.grad(probabilities[:, 0].sum(), x)
    return [la.log_marginal_likelihood().detach(), probabilities.detach(), gradient, la(X)]


@pytest.mark.parametrize("part", ["wrapped", "in place"])
def test_an_older_compiler_is_refused_where_gradients_are_asked(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.compiler, "set_stance", raising=False)
    with pytest.raises(UnsupportedError, match="derivatives of derivatives"), hooks_fire(network(part), required=True):
        pass
    with hooks_fire(network(part)), hooks_fire(network(""), required=True):
        pass


@newer_torch("the compiler warns of hooks, or raises")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of the compiler, which looks at activations
@pytest.mark.parametrize("part", ["wrapped", "in place"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_a_compiled_part_changes_nothing(part: str, structure: str) -> None:
    torch._dynamo.reset()
    for actual, expected in zip(answers(part, structure), answers("", structure), strict=True):
        torch.testing.assert_close(actual, expected)
