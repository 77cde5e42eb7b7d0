"""Heads with many outputs: no matrix of outputs × outputs is made, and columns are those of the dense factors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laplace import Laplace
from tests.reference.compare import assert_close
from tests.reference.curvature import output_hessian

C, D, T = 3000, 4, 5


class Largest(TorchDispatchMode):
    """Remembers the most numbers that an operation gave, without views that repeat them."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in tree_leaves(result):
            if isinstance(part, Tensor) and part.layout == torch.strided:
                self.numbers = max(self.numbers, part.untyped_storage().nbytes() // part.element_size())
        return result


class NextToken(nn.Module):
    """A table of tokens, and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(C, D)
        self.head = nn.Linear(D, C, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(x)))


@pytest.mark.parametrize("structure", ["diag", "lowrank_kron"])
def test_no_matrix_between_outputs(structure: str) -> None:
    x = torch.randint(C, (3, T))
    la = Laplace(NextToken(), "classification", "last_layer", structure)
    labels = torch.randint(C, (3, T)).index_fill(1, torch.tensor([T - 1]), -100)
    with Largest() as largest:
        la.plan([(x, labels)])
        la.fit([(x, labels)])
        assert la(x).shape == (3, T, C)
        assert la(x, outputs=10, link_approx="mc", n_samples=3).shape == (3, T, 10)
        assert la.predictive_moments(x, outputs=x.unsqueeze(-1))[1].shape == (3, T, 1, 1)
        la.log_marginal_likelihood()
    assert largest.numbers <= 20 * 3 * T * C < C * C


def test_columns_are_those_of_the_dense_factors() -> None:
    """The output side is known by its products with 15 vectors alone, of 200 outputs."""
    model = nn.Linear(D, 200).double()
    with torch.no_grad():
        model.bias -= 0.6 * torch.arange(200)
    x, y = torch.randn(30, D, dtype=torch.float64), torch.randint(200, (30,))
    options = {"rank": 5, "oversampling": 10}
    la = Laplace(model, "classification", "last_layer", "lowrank_kron", structure_kwargs=options)
    la.fit([(x[:10], y[:10]), (x[10:], y[10:])])
    inner = output_hessian(model(x).detach(), "classification", y)
    output, inputs = inner.sum(0), x.T @ x / len(x)
    products = torch.outer(torch.linalg.eigvalsh(output), torch.linalg.eigvalsh(inputs)).flatten()
    curvature = la.fitted().curvature
    columns = curvature.columns[0]
    largest = columns.values[0].sort(descending=True).values
    assert_close(largest, products.sort(descending=True).values[:5], "float32")  # what the search leaves
    dense = columns.left.unsqueeze(2) * columns.right.unsqueeze(1)
    applied = torch.einsum("cd,kde,ef->kcf", output, dense, inputs)
    rest = applied - columns.values[0].view(-1, 1, 1) * dense
    assert (rest.flatten(1).norm(dim=1) < 1e-3 * columns.values[0]).all()
    diagonal = torch.einsum("bc,bd->cd", inner.diagonal(dim1=1, dim2=2), x.square())
    assert_close(curvature.diagonal[0][: 200 * D], diagonal.flatten(), "algebra")
