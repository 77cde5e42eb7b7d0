"""Sums over positions of probabilities, by the dense covariance between all pairs of positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev


def probabilities(model: nn.Module, x: Tensor) -> Tensor:
    """Softmax over dimension 1 as rows, `[B, T, C]`."""
    return model(x).softmax(1).flatten(2).transpose(1, 2)


def jacobian(model: nn.Module, x: Tensor, names: list[str], *, of_logits: bool = False) -> Tensor:
    """Derivatives of the probabilities, or the logits, of every position by some tensors, `[B, T, C, P]`."""
    own = dict(model.named_parameters())

    def run(tensors: dict[str, Tensor]) -> Tensor:
        f = functional_call(model, {**own, **tensors}, (x,))
        return (f if of_logits else f.softmax(1)).flatten(2).transpose(1, 2)

    rows = jacrev(run)({name: own[name].detach() for name in names})
    return torch.cat([rows[name].flatten(3) for name in names], 3)


def precision(model: nn.Module, x: Tensor, counts: Tensor, names: list[str], prior: float) -> Tensor:
    """Σ Jᵀ (diag(p) − ppᵀ) J + δ I over the positions that count, `[B, T]`."""
    rows, p = jacobian(model, x, names, of_logits=True), probabilities(model, x).detach()
    hessian = torch.diag_embed(p) - p.unsqueeze(3) * p.unsqueeze(2)
    total = torch.einsum("btcp,btcd,bt,btdq->pq", rows, hessian, counts, rows)
    return total + prior * torch.eye(len(total), dtype=total.dtype)


def totals(
    model: nn.Module, x: Tensor, names: list[str], covariance: Tensor, numbers: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums `[B, K]` and their covariance, from that of probabilities at all pairs of positions.

    Args:
        model: Network with outputs `[B, C, *positions]`.
        x: Inputs.
        names: Tensors with a distribution.
        covariance: Of these, `[P, P]`.
        numbers: For the classes, `[K, C]`.
        weights: For the positions, `[B, T]`.
    """
    rows = torch.einsum("kc,btcp->btkp", numbers, jacobian(model, x, names))
    pairs = torch.einsum("btkp,pq,bslq->btksl", rows, covariance, rows)  # [B, T, K, T, K]
    mean = torch.einsum("bt,btc,kc->bk", weights, probabilities(model, x).detach(), numbers)
    return mean, torch.einsum("bt,btksl,bs->bkl", weights, pairs, weights)
