"""Precisions close to one that is known by its products, whose inverses and roots are cheap: its preconditioners.

A sketch of the dominant eigenpairs takes their directions out of the spectrum and leaves the rest at the prior's
(Frangella, Tropp and Udell, 2023), at two products with a few vectors for all hyper-parameters. Kronecker factors have
the scale of every layer; where data are few beside the weights, they spread curvature over directions that have none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.core.hyperparameters import GaussianPrior
from laplace.core.random_numbers import standard_normal
from laplace.structures import subspace
from laplace.structures.held_data import DataProducts
from laplace.structures.low_rank_precision import LowRankPrecision, Subspace

_OVERSAMPLING = 10
"""Vectors of the sketch besides those that are kept."""

_SKETCH_BYTES = 2**29
"""Bytes of the directions at most: of the largest networks fewer are kept."""


def sketch(products: DataProducts, rank: int, seed: int) -> Subspace:
    """Dominant eigenpairs of Σ_e H_e, by one step of subspace iteration from random vectors.

    Args:
        products: Of the data.
        rank: Eigenpairs to keep.
        seed: Of the random vectors.
    """
    like, n_params = products.like, products.n_params
    rank = min(rank, n_params, _SKETCH_BYTES // (like.element_size() * n_params))
    width = min(rank + _OVERSAMPLING, n_params) if rank else 0
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator(device=like.device).manual_seed(seed)
        basis = subspace.orthonormalise_(standard_normal((width, n_params), like, generator))
        one = like.new_ones(1)
        if width:
            basis = subspace.orthonormalise_(products.curved(basis, one))
        pairs = subspace.rayleigh_ritz_(basis, products.curved(basis, one) if width else basis)
        count = int((pairs.values > 0).long().cumprod(0)[:rank].sum())
        return Subspace(pairs.vectors[:count].clone(), torch.diag(pairs.values[:count]).unsqueeze(0))


def low_rank(directions: Subspace, weights: Tensor, prior: GaussianPrior) -> LowRankPrecision:
    """The precision of a sketch; several terms count by the mean of their weights."""
    return LowRankPrecision(directions, weights.mean().view(1), prior)
