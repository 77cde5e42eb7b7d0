"""Distributions of PyTorch, of one predictive and of mixtures of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import (
    Categorical,
    Dirichlet,
    Distribution,
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
)

from laplace.core.gaussian import Gaussian
from laplace.core.positions import unrolled
from laplace.core.precision_policy import widened
from laplace.errors import CurvatureError, InvalidArgument


def normal_of(gaussian: Gaussian) -> Normal | MultivariateNormal:
    """A Gaussian over rows as a distribution of PyTorch.

    Raises:
        CurvatureError: Its covariance is singular.
    """
    positions = gaussian.positions
    if gaussian.is_diagonal:
        scale = gaussian.covariance.clamp(min=torch.finfo(gaussian.mean.dtype).tiny).sqrt()
        return Normal(unrolled(gaussian.mean, positions), unrolled(scale, positions))
    root = _density_root(gaussian.covariance, torch.finfo(gaussian.mean.dtype).eps)
    if root is None:
        raise CurvatureError(
            "the covariance of the outputs is singular, so that they have no density; ask for diagonal_output=True, or "
            "draw samples (latent_samples), which always exist."
        )
    root = root.to(gaussian.mean)
    if gaussian.is_joint or gaussian.is_grouped:
        return MultivariateNormal(gaussian.mean.reshape(root.shape[:-1]), scale_tril=root)
    return MultivariateNormal(unrolled(gaussian.mean, positions), scale_tril=unrolled(root, positions))


def _density_root(covariance: Tensor, eps: float) -> Tensor | None:
    """Cholesky factor of `[..., n, n]`, or None where an output is known from the others but for a share of eps.

    Such a share would be the rounding of the outputs' Jacobians, and a density all of its own making.
    """
    root, info = torch.linalg.cholesky_ex(widened(covariance))
    left, all_of_it = root.diagonal(dim1=-2, dim2=-1).square(), covariance.diagonal(dim1=-2, dim2=-1)
    return None if bool((info != 0).any()) or bool((left <= eps * all_of_it).any()) else root


def mixture_of(components: Sequence[Distribution], weights: Tensor) -> Distribution:
    """Σ_k π_k p_k of Gaussians or Dirichlets of one kind and batch shape, each batch entry a mixture of its own.

    One component is returned as it is.

    Args:
        components: K of `Normal`, `MultivariateNormal`, `Dirichlet`, or `Independent` of the first.
        weights: π, `[K]`.
    """
    if len(components) == 1:
        return components[0]
    batch = components[0].batch_shape
    stacked = _stacked(components, len(batch))
    logits = weights.log().expand(*batch, len(components))
    return MixtureSameFamily(Categorical(logits=logits), stacked)


def _stacked(components: Sequence[Distribution], at: int) -> Distribution:
    """One distribution with the components along a new last batch dimension, `at`."""
    first = components[0]
    if isinstance(first, Independent):
        inner = [part.base_dist for part in components if isinstance(part, Independent)]
        return Independent(_stacked(inner, at), first.reinterpreted_batch_ndims)

    def along(name: str) -> Tensor:
        like = getattr(first, name)
        return torch.stack([getattr(part, name).to(like) for part in components], at)

    if isinstance(first, Normal):
        return Normal(along("loc"), along("scale"))
    if isinstance(first, MultivariateNormal):
        return MultivariateNormal(along("loc"), scale_tril=along("scale_tril"))
    if isinstance(first, Dirichlet):
        return Dirichlet(along("concentration"))
    raise InvalidArgument(f"components are {type(first).__name__}; give Gaussians or Dirichlets.")
