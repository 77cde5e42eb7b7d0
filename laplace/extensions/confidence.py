"""The bound on the confidence of last-layer posteriors far from the data (Eschenhagen et al., 2021)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core import eigen
from laplace.core.batch import Inputs
from laplace.core.precision_policy import widened
from laplace.errors import InvalidArgument
from laplace.likelihoods.categorical import Categorical
from laplace.mixture.mixture import MixtureLaplace
from laplace.parametric import ParametricLaplace


def confidence_bound(posterior: ParametricLaplace | MixtureLaplace, x: Inputs) -> Tensor:
    """Upper bound on the confidence at αx for every α > 0, however far from the data: `[B]`, float64.

        max_c Σ_k π_k / (1 + Σ_{i≠c} exp(−(b_i + b_c))),    b_i = ‖μ_i‖ / √((π/8) λ_min(Σ_i)),

    for the probit link; μ_i and Σ_i are mean and covariance of the weights of output i under component k, with its bias
    [Mixtures, theorem 2], of one posterior [Mixtures, lemma 1]. The sum bounds the probability of class c. The
    theorem takes the class that is predicted at x; at αx it may be another, so that the largest sum bounds the
    confidence. It is the same for every x, and holds for every network with a linear head, since
    |m_i| / √(1 + (π/8) C_ii) ≤ b_i for any features.

    Args:
        posterior: A fitted last-layer posterior for classification, or a mixture of such.
        x: Inputs of B data.

    Raises:
        InvalidArgument: Another choice of weights, a head that is no `nn.Linear`, or another likelihood.
        NotFittedError: Before `fit`.
    """
    parts = posterior.components if isinstance(posterior, MixtureLaplace) else [posterior]
    with torch.no_grad():
        bounds = [_bounds(la) for la in parts]
        weights = posterior.weights.tolist() if isinstance(posterior, MixtureLaplace) else [1.0]
        terms = [weight * bound.to(bounds[0]) for weight, bound in zip(weights, bounds, strict=True)]
        return torch.stack(terms).sum(0).max().expand(batches.size(x, parts[0].dict_key_x)).clone()


def _bounds(la: ParametricLaplace) -> Tensor:
    """Upper bound on the probability of every class under one posterior, `[C]`."""
    b = _ratios(la)
    pairs = (b.unsqueeze(0) + b.unsqueeze(1)).neg().exp().fill_diagonal_(0)
    return 1 / (1 + pairs.sum(1))


def _ratios(la: ParametricLaplace) -> Tensor:
    """b_i of every output, `[C]` [Mixtures, eq. 11]: infinite where a variance is zero."""
    rows, mean, precision = _rows(la), la.snapshot().mean, la.posterior()
    ratios: list[Tensor] = []
    for row in rows:
        units = mean.new_zeros(len(row), len(mean))
        units[torch.arange(len(row)), row] = 1
        smallest = eigen.eigvalsh(widened(precision.solve(units)[:, row]))[0].clamp(min=0)
        ratios.append(widened(mean[row]).norm() / (math.pi / 8 * smallest).sqrt())
    return torch.stack(ratios)


def _rows(la: ParametricLaplace) -> list[Tensor]:
    """Indices of the random weights of every output.

    Raises:
        InvalidArgument: There is no linear head with softmax outputs.
    """
    if not isinstance(la.likelihood_object, Categorical):
        raise InvalidArgument(
            f"confidence_bound is for the probabilities of classes; likelihood={la.likelihood_object.name!r} has none."
        )
    problem = la.problem
    shapes = [tuple(slot.shape) for slot in problem.slots]
    if problem.head is None or len(shapes[0]) != 2 or any(slot.entries is not None for slot in problem.slots):
        raise InvalidArgument(
            "confidence_bound is for subset_of_weights='last_layer' with an nn.Linear head; make such a posterior."
        )
    n_outputs = shapes[0][0]
    index = torch.arange(problem.layout.n_params, device=problem.device)
    parts = [index[place].view(n_outputs, -1) for place in problem.layout.slices]
    return list(torch.cat(parts, 1))
