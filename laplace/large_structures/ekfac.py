"""Eigenvalue-corrected Kronecker factors: the Kronecker eigenbasis with the exact diagonal of the curvature in it.

With left ⊗ right = U (λ_l ⊗ λ_r) Uᵀ the correction replaces λ_l ⊗ λ_r by λ*_p = Σ_kb (u_pᵀ J_kb)² = (Uᵀ H U)_pp, the
diagonal matrix that is closest to Uᵀ H U in Frobenius norm (George et al., 2018, "Fast Approximate Natural Gradient
Descent in a Kronecker-factored Eigenbasis").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core import nested
from laplace.core.batch import Inputs
from laplace.core.cached import cached_property, keeps_last
from laplace.core.checks import all_finite
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.inference import kept_for_later
from laplace.core.layout import Layout
from laplace.core.orthogonal_basis import DenseBasis, OrthogonalBasis
from laplace.core.precision_policy import wide_dtype, widened
from laplace.engines.cost import DOUBLE, Cost, SideCosts, widest_gradient
from laplace.engines.engine import Bases, BatchSummary, CurvatureEngine
from laplace.engines.kron_parts import Factor, KronBlock, KronParts
from laplace.engines.profile import BatchProfile
from laplace.engines.sinks import DiagSink
from laplace.errors import InvalidArgument, StateError
from laplace.structures.base import Curvature, DataPass, SumPass, require_finite, require_read
from laplace.structures.diag import DiagCurvature
from laplace.structures.kron import KronCurvature, KronPrecision, spectral_scan
from laplace.structures.precision import SpectralScan
from laplace.structures.spectra import BlockSpectrum, Spectra, diag_spectrum, values_at

# Corrected eigenvalues: the diagonal of the curvature in a basis, which a reading of its own sums up.
#
# (Uᵀ H U)_pp = Σ_kb (u_pᵀ J_kb)² (George et al., 2018, "Fast Approximate Natural Gradient Descent in a
# Kronecker-factored Eigenbasis").


class Correction(DataPass):
    """The last reading of a structure whose bases are known by then."""

    def __init__(self, engine: CurvatureEngine, bases: Bases) -> None:
        self.engine = engine  # Computes the numbers of a batch
        self.bases = bases  # U of every tensor
        # The sum so far, `[E, n]` for n vectors of all bases; None before the first batch
        self.corrected: Tensor | None = None

    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        # An eigenvalue of zero is known to the rounding of the largest one, as in the factors.
        sink = DiagSink(self.bases, self.corrected, wide_dtype(self.engine.problem.device))
        summary = self.engine.accumulate(x, y, sink)
        self.corrected = sink.values
        require_finite(all_finite([self.corrected]))
        return summary

    def sums(self) -> dict[str, Tensor]:
        return {} if self.corrected is None else {"corrected": self.corrected}

    def make_room(self, form: Any) -> None:
        if self.corrected is None:
            self.corrected = nested.zeros_of(form, self.engine.problem.device)["corrected"]

    def read(self) -> Tensor:
        """The diagonals of all data, `[E, n]`."""
        return require_read(self.corrected)


@dataclass(frozen=True, eq=False)
class EkfacCurvature(Curvature):
    """U diag(λ*) Uᵀ for every tensor with Kronecker factors; the exact block, or exact diagonal, of every other.

    Under a vector noise every term has corrected eigenvalues of its own, in the eigenbasis of the sum of the terms, so
    that (Uᵀ H U)_pp is exact at all noises. Of a subnetwork the basis is that of the selected sub-block.

    The sum of two fits is an approximation: the factors add up, the eigenbasis is that of their sums, and of the
    corrected curvatures U_i diag(λ*_i) U_iᵀ only the diagonal in the new basis is kept. The trace is exact; a fit to
    all data at once has the exact diagonal as well.
    """

    kron: KronCurvature  # Factors and exact blocks
    # U of every tensor, in float64; the identity where the block is exact
    bases: tuple[BlockSpectrum, ...]
    corrected: Tensor  # λ*, `[E, P]`; where the block is exact, its diagonal
    name = "ekfac"
    n_passes = 2
    by_layer = True
    is_wide = True

    def units(self, layout: Layout) -> tuple[tuple[int, ...], ...]:
        return self.kron.units(layout)

    def input_moments(self, place: int) -> Factor | None:
        return self.kron.input_moments(place)

    @property
    def n_terms(self) -> int:
        return len(self.corrected)

    @classmethod
    def first_pass(cls, engine: CurvatureEngine, options: Any) -> DataPass:
        return _Factors(engine)

    @classmethod
    def cost(cls, profile: BatchProfile, options: Any) -> Cost:
        kron, diag = KronCurvature.cost(profile, None), DiagCurvature.cost(profile, None)
        sides = SideCosts.from_profile(profile)
        bases = sides.squares * DOUBLE
        unfolded = sides.squares - sides.bases  # of thin sides, whose bases have all their vectors here
        between = kron.fitted + 2 * bases  # with the factors' own decomposition
        columns = 0 if profile.is_head else profile.at_once
        gradients = 2 * columns * profile.n_data * DOUBLE * widest_gradient(profile)
        wide = DOUBLE // profile.itemsize
        return Cost(
            columns=True,
            fitted=kron.fitted + bases + wide * diag.fitted,
            running=max(kron.running, kron.fitted + bases + wide * diag.running),
            adding=max(kron.adding, between + 4 * DOUBLE * sides.largest, kron.fitted + bases + wide * diag.adding),
            pieces=max(kron.pieces, 2 * wide * diag.pieces + gradients),
            posterior=kron.posterior + (DOUBLE + profile.itemsize) * unfolded,
            projecting=kron.projecting,
        )

    def __add__(self, other: Curvature) -> EkfacCurvature:
        if not isinstance(other, EkfacCurvature):
            return NotImplemented
        kron = self.kron + other.kron
        bases = eigenbases(KronCurvature(kron.parts))  # whose decomposition is not kept
        return EkfacCurvature(kron, bases, self._diagonal_in(bases) + other._diagonal_in(bases))

    def scaled(self, factor: float) -> EkfacCurvature:
        return replace(self, kron=self.kron.scaled(factor), corrected=factor * self.corrected)

    def _diagonal_in(self, bases: tuple[BlockSpectrum, ...]) -> Tensor:
        """Diagonal of Vᵀ U diag(λ*) Uᵀ V for other bases V, `[E, P]`: Σ_i (v_j · u_i)² λ*_i."""
        parts = self.corrected.split([basis.size for basis in self.bases], 1)
        pairs = zip(self.bases, bases, parts, strict=True)
        return torch.cat([_squared_products(old, new).rotate(part) for old, new, part in pairs], 1)

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> KronPrecision:
        if options.get("damping"):
            raise InvalidArgument(
                "damping=True with hessian_structure='ekfac': corrected eigenvalues are no products of two factors "
                "that could be dampened; use damping=False, or hessian_structure='kron'."
            )
        return KronPrecision(self.spectra(weights), weights, prior)

    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> SpectralScan:
        weights = weights.detach()
        return spectral_scan(self.spectra(weights), weights, layout)

    def spectra(self, weights: Tensor) -> Spectra:
        """Corrected eigenvalues at these weights in their bases, float64: once per fit, unless terms are weighted."""
        blocks = self._blocks(None if self.n_terms == 1 else weights / weights.mean())
        return self._of_blocks((blocks, weights.dtype))

    @keeps_last
    def _of_blocks(self, key: tuple[tuple[BlockSpectrum, ...], torch.dtype]) -> Spectra:
        return Spectra(*key)

    @keeps_last
    def _blocks(self, weights: Tensor | None) -> tuple[BlockSpectrum, ...]:
        if weights is None:  # of one term
            weights = torch.ones_like(self.corrected[:, 0])
        values = (widened(weights) @ widened(self.corrected)).clamp(min=0)
        exact = iter(() if self._exact is None else self._exact.spectra(weights))
        spectra: list[BlockSpectrum] = []
        for block, basis, part in zip(
            self.kron.parts.blocks, self._wide_bases, values.split([b.size for b in self.bases]), strict=True
        ):
            spectra.append(_with_values(basis, part) if block.kind == "kron" else next(exact))
        return tuple(spectra)

    @cached_property
    def _wide_bases(self) -> tuple[BlockSpectrum, ...]:
        with kept_for_later():
            wide = (basis.cast(wide_dtype(basis.values.device)) for basis in self.bases)
            pairs = zip(self.kron.parts.blocks, wide, strict=True)
            return tuple(_with_sides(self.kron.parts, block, basis) for block, basis in pairs)

    @cached_property
    def _exact(self) -> KronCurvature | None:
        """The tensors without Kronecker factors, whose blocks need no correction."""
        blocks = tuple(block for block in self.kron.parts.blocks if block.kind != "kron")
        return KronCurvature(KronParts(self.kron.parts.factors, blocks)) if blocks else None

    def shown(self, dtype: torch.dtype) -> EkfacCurvature:
        return self

    def state(self) -> dict[str, Any]:
        # The bases are kept, and not found again: where eigenvalues meet, another machine finds other vectors.
        bases = [_parts(basis) for basis in self.bases]
        return {"kron": self.kron.state(), "bases": bases, "corrected": self.corrected}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> EkfacCurvature:
        kron, corrected = KronCurvature.from_state(state["kron"]), state["corrected"]
        parts = corrected[0].split([block.size for block in kron.parts.blocks])
        bases = tuple(_basis_of(part, **basis) for basis, part in zip(state["bases"], parts, strict=True))
        return nested.from_state(cls, {"kron": kron, "bases": bases, "corrected": corrected})

    def require_of(self, layout: Layout, dtype: torch.dtype) -> None:
        self.kron.require_of(layout, dtype)
        nested.require_sizes("the corrected eigenvalues", self.corrected, None, layout.n_params)
        for block, basis, name in zip(self.kron.parts.blocks, self.bases, layout.names, strict=True):
            if block.kind == "kron":
                basis.require_size(block.size, name, self.corrected.dtype)
                form, own = (basis.shape, basis.output_first), (self.kron.parts.shape(block), not block.input_first)
                if block.index is None and form != own:
                    raise StateError(f"the eigenbasis of {name!r} has the form {form}, its factors {own}.")

    def forms(self) -> tuple[str, ...]:
        corrected = "exact diagonal in the Kronecker eigenbasis"
        blocks = self.kron.parts.blocks
        return tuple(corrected if b.kind == "kron" else form for b, form in zip(blocks, self.kron.forms(), strict=True))

    def without_factors(self) -> tuple[int, ...]:
        return self.kron.without_factors()


def _parts(basis: BlockSpectrum) -> dict[str, Any]:
    """The parts of a basis, for states."""
    left, right = (None if side is None else side.matrix() for side in (basis.left, basis.right))
    return {
        "left": left,
        "right": right,
        "shape": basis.shape,
        "basis": basis.basis,
        "output_first": basis.output_first,
    }


def _basis_of(values: Tensor, left: Tensor | None, right: Tensor | None, **rest: Any) -> BlockSpectrum:
    """The basis of what a state holds, with any eigenvalues."""
    sides = [nested.from_state(Tensor | None, side) for side in (left, right)]
    left_basis, right_basis = (None if side is None else DenseBasis(side) for side in sides)
    return nested.from_state(BlockSpectrum, {"values": values, "left": left_basis, "right": right_basis, **rest})


class _Factors(SumPass[KronCurvature]):
    """The first reading: Kronecker factors."""

    def __init__(self, engine: CurvatureEngine) -> None:
        super().__init__(KronCurvature, engine)

    def finish(self) -> DataPass:
        kron = self._read().kept()
        parts = KronCurvature(kron.parts)  # without its decomposition
        return _DiagonalInEigenbases(self.engine, parts, eigenbases(kron))


class _DiagonalInEigenbases(Correction):
    """The second reading: the diagonal in the eigenbases."""

    def __init__(self, engine: CurvatureEngine, kron: KronCurvature, bases: tuple[BlockSpectrum, ...]) -> None:
        super().__init__(engine, bases)
        self.kron, self.eigenbases = kron, bases

    def finish(self) -> Curvature:
        return EkfacCurvature(self.kron, self.eigenbases, self.read())


def eigenbases(kron: KronCurvature) -> tuple[BlockSpectrum, ...]:
    """The eigenbasis of the sum of all terms, of every block with factors; the identity elsewhere."""
    ones = kron.parts.like.new_ones(kron.n_terms)
    spectra = kron.spectra(ones)
    return tuple(
        _basis(block, spectrum, ones.dtype) for block, spectrum in zip(kron.parts.blocks, spectra, strict=True)
    )


def _basis(block: KronBlock, spectrum: BlockSpectrum, dtype: torch.dtype) -> BlockSpectrum:
    """The basis by its vectors: those of eigenvalue 0 have corrected eigenvalues of their own."""
    if block.kind != "kron":
        return diag_spectrum(spectrum.values.to(dtype))
    left, right = (None if side is None else DenseBasis(side.matrix()) for side in (spectrum.left, spectrum.right))
    plain = replace(spectrum, values=spectrum.values.to(dtype), matrix=None, left_values=None, right_values=None)
    return replace(plain, left=left, right=right).cast(dtype)


def _with_sides(parts: KronParts, block: KronBlock, basis: BlockSpectrum) -> BlockSpectrum:
    """The basis of a product with the eigenvalues of its factors, which say where it is one of many."""
    if block.kind != "kron" or basis.shape is None:
        return basis
    left, right = (basis.left, basis.right) if basis.output_first else (basis.right, basis.left)
    output = _side_values(widened(parts.matrix(block.output)).sum(0), left)
    inputs = None if block.input is None else _side_values(widened(parts.matrix(block.input)), right)
    values = (output, inputs) if basis.output_first else (inputs, output)
    return replace(basis, left_values=values[0], right_values=values[1])


def _side_values(matrix: Tensor, basis: OrthogonalBasis | None) -> Tensor | None:
    """Eigenvalues `[G, n]` of a factor `[G, n, n]` or `[n, n]`; none are needed of one that is diagonal as it is."""
    if basis is None:
        return None
    return values_at(matrix if matrix.ndim == 3 else matrix.unsqueeze(0), basis.matrix())


def _with_values(basis: BlockSpectrum, values: Tensor) -> BlockSpectrum:
    """A block with these eigenvalues; where its basis is dense a prior that varies within it is added exactly."""
    if basis.basis is None:
        return replace(basis, values=values)
    return replace(basis, values=values, matrix=(basis.basis * values) @ basis.basis.T)


def _squared_products(old: BlockSpectrum, new: BlockSpectrum) -> BlockSpectrum:
    """(Uᵀ V)² entry by entry, whose `rotate` maps a diagonal in the basis U to that in the basis V."""
    return replace(
        new,
        left=_products(old.left, new.left),
        right=_products(old.right, new.right),
        basis=_between(old.basis, new.basis),
    )


def _products(old: OrthogonalBasis | None, new: OrthogonalBasis | None) -> DenseBasis | None:
    matrices = (None if side is None else side.matrix() for side in (old, new))
    squares = _between(*matrices)
    return None if squares is None else DenseBasis(squares)


def _between(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    """Squares of Uᵀ V; None stands for the identity."""
    if old is None:
        return None if new is None else new.square()
    return (old.transpose(-1, -2) if new is None else old.transpose(-1, -2) @ new).square()
