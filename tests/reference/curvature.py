"""Jacobians and curvatures by plain loops: one backward pass per datum and output.

Nothing is vectorised, no hook decides which parameter a layer explains, and the network is a private copy, so the
numbers are right for every module that autograd can differentiate. All curvatures refer to the *unit* negative log
likelihood (noise 1, temperature 1).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.reference import likelihoods

IGNORED = -100
SOFTMAX = ("classification", "reward_modeling")


def trainable_names(model: nn.Module) -> list[str]:
    """Names of the parameters that require a gradient, tied tensors once, in the model's order."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def outputs(model: nn.Module, x: Any) -> Tensor:
    """Network outputs `[B, C]`, also of a model that returns an object with `.logits`."""
    result = model(x)
    return result if isinstance(result, Tensor) else result.logits


def flat_parameters(model: nn.Module, names: Sequence[str]) -> Tensor:
    """The named parameters, flattened row-major and joined, `[P]`."""
    tensors = dict(model.named_parameters())
    return torch.cat([tensors[name].detach().flatten() for name in names])


def outputs_at(model: nn.Module, x: Any, names: Sequence[str], theta: Tensor) -> Tensor:
    """Outputs `[B, C]` with the named parameters set to theta, `[P]`, on a copy of the model."""
    network = copy.deepcopy(model)
    tensors = dict(network.named_parameters())
    start = 0
    with torch.no_grad():
        for name in names:
            size = tensors[name].numel()
            tensors[name].copy_(theta[start : start + size].view_as(tensors[name]))
            start += size
        return outputs(network, x)


def flat_jacobian(model: nn.Module, x: Any, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Jacobian of the outputs with respect to the named parameters.

    Args:
        model: The network; it is copied, not touched.
        x: Inputs of the whole batch.
        names: Parameters in the order of the columns, each flattened row-major; a tied tensor is named once.

    Returns:
        J, `[B, C, P]`, and f, `[B, C]`.
    """
    network, tensors = _copy_for_grad(model, names)
    f = outputs(network, x)
    rows = [torch.stack([_gradient(f[b, c], tensors) for c in range(f.shape[1])]) for b in range(f.shape[0])]
    return torch.stack(rows), f.detach()


def output_hessian(f: Tensor, likelihood: str, y: Tensor | None = None) -> Tensor:
    """Hessian Λ of the unit negative log likelihood with respect to f, `[B, C, C]`.

    Args:
        f: Outputs, `[B, C]`.
        likelihood: `"regression"` (I), `"classification"` and `"reward_modeling"` (diag p − ppᵀ), `"bernoulli"`
            (diag p(1 − p), p the sigmoid), or one of `likelihoods.DENSITIES` (the Fisher information).
        y: Targets; only the ignored labels among them matter, whose Λ is zero (soft labels `[B, C]` do not).
    """
    if likelihood == "regression":
        return torch.eye(f.shape[1], dtype=f.dtype).repeat(f.shape[0], 1, 1)
    if likelihood == "bernoulli":
        p = torch.sigmoid(f)
        return torch.diag_embed(p * (1 - p))
    if likelihood in likelihoods.DENSITIES:
        return likelihoods.fisher(f, likelihood)
    p = torch.softmax(f, dim=1)
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return hessian if y is None or y.ndim == 2 else hessian * (y != IGNORED)[:, None, None]


def residual(f: Tensor, y: Tensor, likelihood: str) -> Tensor:
    """Gradient of the unit negative log likelihood with respect to f, `[B, C]`; zero for ignored labels."""
    if likelihood == "regression":
        return f - y
    if likelihood == "bernoulli":
        return torch.sigmoid(f) - y
    if likelihood in likelihoods.DENSITIES:
        return likelihoods.gradient(f, y, likelihood)
    if y.ndim == 2:
        return torch.softmax(f, dim=1) * y.sum(1, keepdim=True) - y
    counted = y != IGNORED
    hot = nn.functional.one_hot(torch.where(counted, y, 0), f.shape[1])
    return (torch.softmax(f, dim=1) - hot) * counted[:, None]


def loss(f: Tensor, y: Tensor, likelihood: str) -> Tensor:
    """Unit negative log likelihood summed over the batch, 0-dim."""
    if likelihood == "regression":
        return 0.5 * (y - f).square().sum()
    if likelihood == "bernoulli":
        return nn.functional.binary_cross_entropy_with_logits(f, y.to(f.dtype), reduction="sum")
    if likelihood in likelihoods.DENSITIES:
        return likelihoods.nll(f, y, likelihood).sum()
    return nn.functional.cross_entropy(f, y, reduction="sum", ignore_index=IGNORED)


def ggn(
    model: nn.Module, x: Any, y: Tensor, names: Sequence[str], likelihood: str, output_scale: Tensor | None = None
) -> Tensor:
    """Generalised Gauss–Newton Σ_b J_bᵀ Λ_b J_b, `[P, P]` (Martens 2020, eq. 9).

    Args:
        model: The network.
        x: Inputs.
        y: Targets.
        names: Parameters, in the order of the columns.
        likelihood: Name of the likelihood.
        output_scale: `[C]`, for regression with one noise per output: 1/σ_c², entering as √s Λ √s.
    """
    jacobian, f = flat_jacobian(model, x, names)
    inner = output_hessian(f, likelihood, y)
    if output_scale is not None:
        root = output_scale.sqrt()
        inner = root[:, None] * inner * root[None, :]
    return torch.einsum("bcp,bcd,bdq->pq", jacobian, inner, jacobian)


def empirical_fisher(model: nn.Module, x: Any, y: Tensor, names: Sequence[str], likelihood: str) -> Tensor:
    """Empirical Fisher Σ_b (J_bᵀ r_b)(J_bᵀ r_b)ᵀ, `[P, P]`, r the gradient of the unit negative log likelihood."""
    jacobian, f = flat_jacobian(model, x, names)
    gradients = torch.einsum("bcp,bc->bp", jacobian, residual(f, y, likelihood))
    return gradients.T @ gradients


def exact_hessian(model: nn.Module, x: Any, y: Tensor, names: Sequence[str], likelihood: str) -> Tensor:
    """Hessian of the summed unit negative log likelihood, `[P, P]`, one backward pass per row."""
    network, tensors = _copy_for_grad(model, names)
    # Fused attention has no second derivative, and the fused weight norm a wrong one.
    with sdpa_kernel(SDPBackend.MATH), mock.patch.object(torch, "_weight_norm", _weight_norm):
        total = loss(outputs(network, x), y, likelihood)
        gradient = torch.cat([g.flatten() for g in _grads(total, tensors, create_graph=True)])
        return torch.stack([_gradient(entry, tensors) for entry in gradient])


def _weight_norm(v: Tensor, g: Tensor, dim: int) -> Tensor:
    rows = v.movedim(dim, 0).flatten(1).square().sum(1).sqrt()
    return v / rows.view([-1 if d == dim else 1 for d in range(v.ndim)]) * g


def samples(x: Any) -> Iterator[Any]:
    """Batches of one datum each, of a tensor or of a mapping of tensors."""
    count = len(x) if isinstance(x, Tensor) else len(next(iter(x.values())))
    for n in range(count):
        yield x[n : n + 1] if isinstance(x, Tensor) else {key: value[n : n + 1] for key, value in x.items()}


def _copy_for_grad(model: nn.Module, names: Sequence[str]) -> tuple[nn.Module, list[Tensor]]:
    """A copy whose named parameters, and only those, require a gradient; and these parameters."""
    network = copy.deepcopy(model)
    tensors = dict(network.named_parameters())
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in names)
    return network, [tensors[name] for name in names]


def _grads(scalar: Tensor, tensors: Sequence[Tensor], create_graph: bool = False) -> tuple[Tensor, ...]:
    if not scalar.requires_grad:  # nothing of it depends on the tensors
        return tuple(torch.zeros_like(tensor) for tensor in tensors)
    return torch.autograd.grad(
        scalar, tensors, retain_graph=True, create_graph=create_graph, allow_unused=True, materialize_grads=True
    )


def _gradient(scalar: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Gradient of a scalar, flattened and joined, `[P]`, without a graph."""
    return torch.cat([g.detach().flatten() for g in _grads(scalar, tensors)])
