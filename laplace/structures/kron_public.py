"""Kronecker-factored curvature and precision as users hold them, by the names of an older interface.

Every reading gives an object of its own, with its own lists: assigning their entries changes that object and not the
posterior. Eigenvectors are the same tensors in all objects of one fit, and copies of those that the posterior uses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from laplace.compat.kronecker import Kron, KronDecomposed
from laplace.compat.kronecker.scalars import Scalar
from laplace.core.inference import kept_for_later
from laplace.core.precision_policy import widened
from laplace.engines.kron_parts import KronParts
from laplace.errors import InvalidArgument
from laplace.structures.kron import Damping
from laplace.structures.spectra import BlockSpectrum, Spectra, picked_matrix


class DecomposedCurvature(KronDecomposed):
    """The unit curvature H, whose eigendecomposition is made when it is first read.

    Args:
        parts: Its factors.
        spectra: Computes the eigendecomposition.
    """

    def __init__(self, parts: KronParts, spectra: Callable[[], Spectra]) -> None:
        self._parts = parts
        one, deltas = parts.like.new_ones(()), parts.like.new_zeros(len(parts.blocks))
        super().__init__(lambda: spectra().factor_vectors, lambda: _scaled_values(spectra(), one, None), deltas)

    def __add__(self, deltas: Scalar) -> KronDecomposed:
        """As of `KronDecomposed`; the factors of other data are refused by name.

        Raises:
            InvalidArgument: A `Kron`: its input sides are means over other data than those of the fit, whose sum would
                be twice a mean.
        """
        if isinstance(deltas, Kron):
            raise InvalidArgument(
                "a Kron was added to the curvature of a fit: input sides of Kronecker factors are means over the data, "
                "and do not add up. Use la.fit(loader, override=False); or sum all data by hand, la.start_fit() and "
                "la.H += la.curvature_of(x, y, n_data)[1] for every batch, with n_data the number of all of them."
            )
        return super().__add__(deltas)

    __radd__ = __add__

    @cached_property
    def kfacs(self) -> list[list[Tensor]]:
        """Factors F₁, F₂ of every block F₁ ⊗ F₂, one of a bias, and blocks without factors."""
        return _factors(self._parts)

    @property
    def factors(self) -> Kron:
        """H by its factors, without an eigendecomposition."""
        return Kron(self.kfacs)


def decomposed_precision(spectra: Spectra, scale: Tensor, deltas: Tensor, *, damping: Damping | None) -> KronDecomposed:
    """The precision s·H + δ, with the graph that leads to both.

    Args:
        spectra: Eigendecomposition of the factors of H.
        scale: Factor s, 0-dim.
        deltas: Prior precision of every tensor, `[L]`.
        damping: As of `KronPrecision`.
    """
    return KronDecomposed(
        lambda: spectra.factor_vectors, lambda: _scaled_values(spectra, scale, damping), deltas, damping is not None
    )


def _scaled_values(spectra: Spectra, scale: Tensor, damping: Damping | None) -> list[list[Tensor]]:
    """Eigenvalues of s·H, the scale spread evenly over the factors of a block, times those of a damping."""
    with kept_for_later(), torch.enable_grad():
        return [
            [
                (own * widened(scale) ** (1 / len(sides)) * values).to(spectra.dtype)
                for own, values in zip(_of_sides(block, len(sides), damping), sides, strict=True)
            ]
            for block, sides in ((block, block.factor_values) for block in spectra)
        ]


def _of_sides(block: BlockSpectrum, n_sides: int, damping: Damping | None) -> tuple[float, ...]:
    if damping is None or n_sides == 1:
        return (1.0,) * n_sides
    return damping.sides(output_first=block.output_first)


def _factors(parts: KronParts) -> list[list[Tensor]]:
    """Factors of every tensor's block; a dense block of a selection that is not rows × columns."""
    blocks: list[list[Tensor]] = []
    for block, factors in zip(parts.blocks, parts.kfacs(), strict=True):
        if block.index is None:
            blocks.append(factors)
            continue
        output = parts.matrix(block.output).sum(0)
        inputs = None if block.input is None else parts.matrix(block.input) / parts.positions(block)
        blocks.append([picked_matrix(output, inputs, block.index, input_first=block.input_first)])
    return blocks
