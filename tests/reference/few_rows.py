"""Kronecker-factored posteriors of multilayer perceptrons, from the rows that their factors sum, in float64.

The block of a weight is s (GᵀG) ⊗ (AᵀA) / N + δ, of a bias s GᵀG + δ, with the inputs of N data as rows of A
`[N, I]` and their output gradients, weighted by a root of the output Hessian, as rows of G `[N·C, O]`. Singular values
of the rows give eigenvalues whose smallest ones no sum of products has rounded, and right singular vectors a basis.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def rows(model: nn.Sequential, x: Tensor, *, classification: bool) -> list[tuple[Tensor, Tensor]]:
    """A and G of every Linear module, in order, float64.

    Of a classification Λ = diag(p) − p pᵀ has the root of columns √p_k (e_k − p), which cancels nothing; of a
    regression it is the identity.
    """
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    hidden = x.double()
    for module in model:
        if isinstance(module, nn.Linear):
            inputs.append(hidden.detach())
            bias = torch.zeros(()) if module.bias is None else module.bias
            hidden = hidden @ module.weight.double().T + bias.double()
            outputs.append(hidden)
        else:
            hidden = module(hidden)
    p, eye = torch.softmax(hidden.detach(), 1), torch.eye(hidden.shape[1], dtype=torch.float64)
    roots = eye.expand(len(x), -1, -1)  # [N, C, K]
    if classification:
        roots = p.sqrt().unsqueeze(1) * (eye - p.unsqueeze(2))
    columns = roots.unbind(2)
    found = [torch.autograd.grad((hidden * column).sum(), outputs, retain_graph=True) for column in columns]
    return [(a, torch.cat(g)) for a, g in zip(inputs, zip(*found, strict=True), strict=True)]


def eigen(matrix_rows: Tensor) -> tuple[Tensor, Tensor]:
    """All n eigenvalues of the sum of products of rows `[R, n]`, zeros among them, and eigenvectors `[n, n]`."""
    _, roots, vectors = torch.linalg.svd(matrix_rows, full_matrices=True)
    values = torch.zeros(matrix_rows.shape[1], dtype=torch.float64)
    values[: len(roots)] = roots.square()
    return values, vectors.T


class Posterior:
    """P of all weights and biases, tensor by tensor.

    Args:
        layers: A and G of every layer; the model has biases.
        deltas: δ of every tensor.
        scale: S.
    """

    def __init__(self, layers: list[tuple[Tensor, Tensor]], deltas: Sequence[float], scale: float = 1.0) -> None:
        self.blocks: list[tuple[Tensor, Tensor]] = []
        self.ratios: list[Tensor] = []
        remaining = iter(deltas)
        for a, g in layers:
            (left, u), (right, v) = eigen(g), eigen(a)
            for values, basis in ((torch.outer(left, right / len(a)).flatten(), torch.kron(u, v)), (left, u)):
                delta = next(remaining)
                self.ratios.append(scale * values / delta)
                self.blocks.append((scale * values + delta, basis))

    def logdet_ratio(self) -> float:
        """Log det P − log det P₀."""
        return float(torch.stack([ratios.log1p().sum() for ratios in self.ratios]).sum())

    def power(self, exponent: float) -> Tensor:
        """P^exponent, `[P, P]`."""
        return torch.block_diag(*[(basis * values**exponent) @ basis.T for values, basis in self.blocks])
