"""The penalty of former tasks, the negative log density of their posterior; quadratic forms with half the work."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from laplace.parametric import ParametricLaplace
from laplace.posterior.learning import require_held
from laplace.training.trained_weights import random_weights


def quadratic_penalty(la: ParametricLaplace, theta: Tensor | None = None) -> Tensor:
    """Quadratic penalty ½ (θ − θ*)ᵀ P (θ − θ*): the posterior's negative log density, without its normaliser.

    Before `fit` it is the one of the prior, ½ (θ − μ₀)ᵀ diag(δ) (θ − μ₀), so that the first task needs no special case.
    Add it to the *summed* loss of a task, or divided by N to the mean loss.

    Args:
        la: The posterior of the former tasks.
        theta: Weights θ, `[P]`; None for the network's present weights, with their graph.

    Returns:
        The penalty in nats, 0-dim, differentiable in θ.

    Raises:
        NotFittedError: The last layer is not known yet.
        UnsupportedError: A structure (`"matrix_free"`) whose curvature cannot be used after the weights change.
    """
    require_held(la.snapshot(), "a penalty on weights that train on")
    theta = random_weights(la) if theta is None else theta
    if not la.is_fitted:
        return 0.5 * la.prior.quad(theta)
    return half_quadratic(theta - la.snapshot().mean, la.posterior())


class SymmetricProduct(Protocol):
    """A symmetric matrix that is known by its products."""

    def product(self, vectors: Tensor) -> Tensor:
        """M v of vectors `[..., P]`, same shape, without gradient."""
        ...


def half_quadratic(vector: Tensor, matrix: SymmetricProduct) -> Tensor:
    """½ vᵀ M v, 0-dim, differentiable in v; value and gradient take one product."""
    return _HalfQuadratic.apply(vector, matrix)  # pyright: ignore[reportReturnType]


class _HalfQuadratic(torch.autograd.Function):
    """½ vᵀ M v, whose gradient M v is known with the value: autograd would pay for it a second time."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, matrix: SymmetricProduct) -> Tensor:
        product = matrix.product(vector)
        ctx.save_for_backward(vector, product)
        ctx.matrix = matrix
        return 0.5 * (vector @ product)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        vector, product = ctx.saved_tensors
        if torch.is_grad_enabled():
            product = _Product.apply(vector, ctx.matrix)
        return grad_outputs[0] * product, None


class _Product(torch.autograd.Function):
    """M v, whose gradient is one more product."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, matrix: SymmetricProduct) -> Tensor:
        ctx.matrix = matrix
        return matrix.product(vector)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Product.apply(grad_outputs[0], ctx.matrix), None  # pyright: ignore[reportReturnType]
