"""Kronecker-factored curvature: one product of two small matrices per weight, exact blocks where there is none.

The block of a tensor seen as a matrix (first dimension × the rest) is left ⊗ right / positions. Factors are
*sums* over data and positions, so that curvatures of batches, shards and later data simply add up; for a
linear layer left = Σ g gᵀ and right / positions is the mean of a aᵀ (Martens & Grosse, 2015; Ritter et al., 2018).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.core import linalg, nested
from laplace.core.batch import Inputs
from laplace.core.cached import cached_property, keeps_last
from laplace.core.checks import all_finite
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.inference import kept_for_later
from laplace.core.layout import Layout, linked
from laplace.core.linalg import power
from laplace.core.orthogonal_basis import DenseBasis
from laplace.core.precision_policy import EIGENBASIS_ERROR, root_dtype, wide_dtype, widened
from laplace.engines.cost import DOUBLE, Cost, SideCosts, widest_gradient
from laplace.engines.kron_parts import UNUSED, Factor, KronBlock, KronParts
from laplace.enums import DampingForm
from laplace.errors import CurvatureError, InvalidArgument
from laplace.jacobian.blocks import Block, MappedBlock
from laplace.jacobian.heads import norms_along_basis
from laplace.jacobian.jacobian import Jacobian
from laplace.structures.base import AdditiveCurvature, Curvature, other_structure
from laplace.structures.precision import (
    Form,
    Precision,
    SpectralScan,
    mean_weight,
    require_positive,
    warn_if_rounded,
    weighted,
)
from laplace.structures.spectra import (
    BlockSpectrum,
    FactorEigen,
    Spectra,
    decomposed,
    dense_spectrum,
    diag_spectrum,
    followed,
    grouped_by_shape,
    input_eigen,
    kron_spectrum,
    picked_matrix,
    values_at,
    without_rows,
)

if TYPE_CHECKING:
    from laplace.compat.kron import KronDecomposed
    from laplace.engines.engine import BatchSummary, CurvatureEngine
    from laplace.engines.profile import BatchProfile


# The curvature: factors that add up, and their eigendecompositions.


_INPUT_DIMS = 3
"""Dimensions of input sides that are matrices, `[G, n, n]`; output sides have one more, of their terms."""


@dataclass(frozen=True)
class KronCurvature(AdditiveCurvature):
    """Kronecker factors of every random parameter tensor."""

    parts: KronParts  # The factors
    name = "kron"
    matrix_dims = _INPUT_DIMS
    by_layer = True
    is_wide = True

    def units(self, layout: Layout) -> tuple[tuple[int, ...], ...]:
        return linked([block.reads for block in self.parts.blocks])

    @property
    def n_terms(self) -> int:
        return self.parts.n_terms

    def input_moments(self, place: int) -> Factor | None:
        block = self.parts.blocks[place]
        side = None if block.kind != "kron" or block.input is None else self.parts.every[block.input]
        return side if side is not None and side.ndim == _INPUT_DIMS else None

    @classmethod
    def from_batch(cls, engine: CurvatureEngine, x: Inputs, y: Tensor) -> tuple[BatchSummary, KronCurvature]:
        summary, parts = engine.kron(x, y)
        return summary, cls(parts)

    @classmethod
    def cost(cls, profile: BatchProfile, options: Any) -> Cost:
        sides = SideCosts.from_profile(profile)
        fitted = sides.held(profile.n_terms)
        gradients = profile.n_data * profile.itemsize * widest_gradient(profile)
        return Cost(
            columns=True,
            fitted=fitted,
            running=2 * fitted,
            adding=3 * fitted,
            pieces=2 * sides.largest * DOUBLE + (0 if profile.is_head else profile.at_once * gradients),
            posterior=(DOUBLE + profile.itemsize) * sides.bases
            + 4 * DOUBLE * sides.largest
            + (DOUBLE + 3 * profile.itemsize) * profile.n_params,
            projecting=3 * profile.piece_bytes(profile.shared_sizes, profile.n_outputs)
            + 2 * profile.n_outputs * (profile.n_outputs * profile.itemsize if profile.is_head else gradients),
        )

    def __add__(self, other: Curvature) -> KronCurvature:
        if not isinstance(other, KronCurvature):
            return NotImplemented
        return KronCurvature(self.parts + other.parts).kept()

    def with_batch(self, engine: CurvatureEngine, x: Inputs, y: Tensor) -> tuple[BatchSummary, KronCurvature]:
        """Rows are added to rows: what is kept of them is found once, after the last batch."""
        summary, parts = engine.kron(x, y)
        return summary, KronCurvature(self.parts + parts)

    def is_finite(self) -> Tensor:
        """True, 0-dim, if all is finite; of sides that are known by rows, their squares."""
        traces = [side.trace for side in self.parts.thin.values()]
        sums = [factor for factor in self.parts.factors.values() if factor.ndim]  # and no numbers of positions
        return all_finite([*sums, *traces])

    def kept(self, *, additive: bool = False) -> KronCurvature:
        """Eigenpairs in the place of rows, which a fit does not outlive; matrices, where sums are to add up."""
        return KronCurvature(self.parts.dense() if additive else without_rows(self.parts))

    def scaled(self, factor: float) -> KronCurvature:
        """Every factor is a sum over data, the number of positions too, and left ⊗ right / positions scales once."""
        return KronCurvature(self.parts.scaled(factor))

    def minus(self, removed: Curvature, *, signed: bool = False, terms: torch.dtype | None = None) -> KronCurvature:
        if not isinstance(removed, KronCurvature):
            raise other_structure(self.name, removed.name)
        mine, theirs = self.parts.dense().factors, removed.parts.dense().factors
        blocks = self.parts.merged(removed.parts)
        factors: dict[str, Tensor] = {}
        for key, is_matrix in (pair for block in blocks for pair in self._roles(block)):
            if key not in factors:
                remaining = linalg.remaining_matrix if is_matrix else linalg.remaining_entries
                factors[key] = remaining(*_both(mine.get(key), theirs.get(key)), signed=signed, terms=terms)
        return KronCurvature(KronParts(factors, blocks))

    def _roles(self, block: KronBlock) -> Iterator[tuple[str, bool]]:
        """Keys that a block reads, and whether each holds matrices `[..., n, n]` rather than independent entries."""
        every = self.parts.every
        yield block.output, block.kind in ("kron", "dense")
        if block.input is not None:
            yield block.input, block.input in every and every[block.input].ndim > 1
        if block.positions is not None:
            yield block.positions, False

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> KronPrecision:
        return KronPrecision(self.spectra(weights), weights, prior, damping=Damping.from_options(options))

    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> SpectralScan:
        weights = weights.detach()
        return spectral_scan(self.spectra(weights), weights, layout, damping=Damping.from_options(options))

    def spectra(self, weights: Tensor) -> Spectra:
        """Eigendecomposition of every block at these weights: once per fit, unless ratios of several terms change."""
        blocks = self._decomposed(None if self.n_terms == 1 else weights / weights.mean())
        return self._of_blocks((blocks, weights.dtype))

    @keeps_last
    def _of_blocks(self, key: tuple[tuple[BlockSpectrum, ...], torch.dtype]) -> Spectra:
        return Spectra(*key, factored=True, summed=self.parts.summed)

    @keeps_last
    def _unit_spectra(self, dtype: torch.dtype) -> Spectra:
        """Eigendecomposition of H itself, beside that of terms at the last weights."""
        ones = self.parts.like.new_ones(self.n_terms, dtype=dtype)
        return self.spectra(ones) if self.n_terms == 1 else Spectra(self._blocks(ones), dtype, factored=True)

    @keeps_last
    def _decomposed(self, weights: Tensor | None) -> tuple[BlockSpectrum, ...]:
        return self._blocks(weights)

    def _blocks(self, weights: Tensor | None) -> tuple[BlockSpectrum, ...]:
        sides = self._sides(weights)
        return tuple(self._spectrum(block, weights, sides) for block in self.parts.blocks)

    def _sides(self, weights: Tensor | None) -> dict[str, FactorEigen]:
        """The eigendecompositions of all sides but counts, by key; `weights` are those of the terms, None of one."""
        factors, thin = self.parts.factors, self.parts.thin
        keys = dict.fromkeys(key for block in self.parts.blocks for key in _sides_of(block))
        sides = {key: FactorEigen.of_thin(thin[key]) for key in keys if key in thin}
        matrices = {key: factors[key].shape[-3:] for key in keys if key in factors and factors[key].ndim >= _INPUT_DIMS}
        for some in grouped_by_shape(matrices):
            totals = [self._side(key, weights) for key in some]
            for key, total, (values, vectors) in zip(some, totals, decomposed(totals), strict=True):
                if total.requires_grad:
                    values, vectors = values_at(total, vectors), followed(total, vectors)
                sides[key] = FactorEigen(values, DenseBasis(vectors))
        return sides

    def _side(self, key: str, weights: Tensor | None) -> Tensor:
        """A side `[G, n, n]`, of an output side the sum of its terms."""
        factor = self.parts.factors[key]
        if factor.ndim == _INPUT_DIMS:
            return factor if weights is None else widened(factor)
        return factor[0] if weights is None else self._total(key, weights)

    def _spectrum(self, block: KronBlock, weights: Tensor | None, sides: Mapping[str, FactorEigen]) -> BlockSpectrum:
        if block.kind in ("diag", UNUSED):
            return diag_spectrum(self._total(block.output, weights))
        if block.kind == "dense":
            return dense_spectrum(self._total(block.output, weights))
        if block.index is not None:
            return dense_spectrum(self._picked(block, block.index, self._total(block.output, weights)))
        output = sides[block.output]
        return kron_spectrum(block, output, input_eigen(self.parts, block, output, sides))

    def _total(self, key: str, weights: Tensor | None) -> Tensor:
        """The weighted sum of the terms of an output side, or of an exact block, float64."""
        terms = widened(self.parts.matrix(key))
        return terms[0] if weights is None else torch.tensordot(widened(weights), terms, 1)

    def _picked(self, block: KronBlock, index: Tensor, output: Tensor) -> Tensor:
        """Single entries of a product as a dense block."""
        inputs = None if block.input is None else widened(self.parts.matrix(block.input)) / self.parts.positions(block)
        return picked_matrix(output, inputs, index, input_first=block.input_first)

    @property
    def kfacs(self) -> list[list[Tensor]]:
        """Factors per tensor: `[left, right]` with left ⊗ right its block, `[left]` of a bias, or a dense block."""
        return self.parts.kfacs()

    def public(self) -> KronDecomposed:
        return self.shown(self.parts.like.dtype)

    def shown(self, dtype: torch.dtype) -> KronDecomposed:
        from laplace.compat.kron import KronDecomposed  # legacy values are imported when read

        parts, like = self.parts, self.parts.like
        return KronDecomposed(
            lambda: self._unit_spectra(dtype).factor_vectors,
            lambda: _public_values(self._unit_spectra(dtype), like.new_ones(()), None),
            like.new_zeros(len(parts.blocks), dtype=dtype),
            factors=lambda: [[factor.to(dtype) for factor in block] for block in _public_factors(parts)],
        )

    def state(self) -> dict[str, Any]:
        state = nested.state_of(without_rows(self.parts))
        return {name: part for name, part in state.items() if part or name != "thin"}  # as before there were any

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> KronCurvature:
        return cls(nested.from_state(KronParts, state))

    def require_of(self, layout: Layout, dtype: torch.dtype) -> None:
        del dtype  # factors may be wider
        self.parts.require_of(layout)

    def forms(self) -> tuple[str, ...]:
        return tuple(_STORED_AS[block.kind] for block in self.parts.blocks)

    def without_factors(self) -> tuple[int, ...]:
        return tuple(i for i, form in enumerate(self.forms()) if form == "exact diagonal")


def _public_factors(parts: KronParts) -> list[list[Tensor]]:
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


_STORED_AS = {"kron": "Kronecker factors", "dense": "exact dense block", "diag": "exact diagonal", UNUSED: "zero"}


def _sides_of(block: KronBlock) -> tuple[str, ...]:
    """Keys of the sides whose eigenvectors are those of a block."""
    if block.kind != "kron" or block.index is not None:
        return ()
    return (block.output,) if block.input is None else (block.output, block.input)


def _both(a: Tensor | None, b: Tensor | None) -> tuple[Tensor, Tensor]:
    """Two factors; a missing one is replaced by zeros."""
    if a is None:
        return torch.zeros_like(b), b  # pyright: ignore[reportReturnType, reportArgumentType]
    return a, torch.zeros_like(a) if b is None else b


# Damping of Kronecker factors: √δ on either side, in the normalisation of each paper.


DAMPINGS: tuple[DampingForm, ...] = (False, True, "mean", "sum")


@dataclass(frozen=True)
class Damping:
    """(b √s B + √δ) ⊗ (a √s A + √δ) for s B ⊗ A + δ, B a sum over N data, A a mean [Redux, appendix B, damping]."""

    output: float = 1.0  # Factor b of the output side
    input: float = 1.0  # Factor a of the input side

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Damping | None:
        """From the options `damping` and, where that names a paper's normalisation, `n_data` of a precision.

        `True` takes the factors as they are, `"mean"` gives both √N times a mean (Ritter et al., 2018)
        [Mixtures, algorithm 1], `"sum"` makes both sums [Linearization, eq. A.4].
        """
        form = options.get("damping", False)
        if not form:
            return None
        if form is True:
            return cls()
        n_data = float(options["n_data"])
        return cls(n_data**-0.5, n_data**0.5) if form == "mean" else cls(1.0, n_data)

    def sides(self, *, output_first: bool) -> tuple[float, float]:
        """Factors of the left and of the right side."""
        return (self.output, self.input) if output_first else (self.input, self.output)


def checked_damping(form: Any) -> DampingForm:
    """A form of damping as users give it."""
    if not isinstance(form, bool | str) or form not in DAMPINGS:
        raise InvalidArgument(
            f"damping={form!r}; accepted are False, True (factors as they are kept: the output side a sum, the input "
            "side a mean), 'mean' (both √N times a mean: Ritter et al., 2018) and 'sum' (both sums: Immer et al.)."
        )
    return form


# The posterior precision of any block-diagonal curvature, `block` too, in the eigenbasis of every block.


@dataclass(frozen=True, eq=False)
class KronPrecision(Precision):
    """P with blocks U (s λ + δ) Uᵀ, or with Ritter et al.'s damping U ((√s λ_l + √δ)(√s λ_r + √δ)) Uᵀ.

    A prior that is constant in a block is added exactly [Linearization, eq. A.3], and so is any prior to a dense or
    diagonal block; a prior that varies within a Kronecker block enters by its diagonal in the eigenbasis.
    """

    spectra: Spectra  # The eigendecomposition of every block
    weights: Tensor  # Scale of every curvature term, `[E]`
    prior: GaussianPrior  # δ
    # Replaces s B ⊗ A + δ by (b √s B + √δ) ⊗ (a √s A + √δ) (Ritter et al., 2018); None adds δ exactly
    damping: Damping | None = None

    @property
    def _weight(self) -> Tensor:
        """s: the spectra of several terms hold the ratios of their weights to the mean already."""
        return mean_weight(self.weights)

    def _varies(self, i: int) -> bool:
        """True if the prior varies within a dense block, which then has no fixed eigenbasis."""
        return self.spectra[i].matrix is not None and self._priors[i].numel() > 1

    @cached_property
    def _priors(self) -> tuple[Tensor, ...]:
        """δ of every block's entries: `[1]` where it is one number, else `[p]`."""
        return self.spectra.priors(self.prior)

    # Evidence.

    def logdet_ratio(self) -> Tensor:
        """One pass over all eigenvalues, O(P), where the prior is constant in every block and nothing dampens."""
        is_one = self.prior.is_scalar
        if self.damping is not None or not (is_one or all(delta.numel() == 1 for delta in self._priors)):
            blocks = torch.stack([self._block_logdet(i) for i in range(len(self.spectra))])
            return blocks.sum() - self.prior.logdet()
        if self.spectra.signed:
            with torch.no_grad():
                self._require_positive(torch.cat([self._values(i) for i in range(len(self.spectra))]))
        deltas = self.prior.precision if is_one else torch.cat(self._priors)
        return self.spectra.log_det_ratio(self._weight, deltas)

    def _block_logdet(self, i: int) -> Tensor:
        if self._varies(i):
            return 2 * self._cholesky(i).diagonal().log().sum()
        values = self._require_positive(self._values(i))
        repeats = self.spectra[i].size / values.numel()
        return values.log().sum() * repeats

    def _values(self, i: int) -> Tensor:
        """Eigenvalues of the posterior block, `[p]`, differentiable [Linearization, appendix A.1, eigenvalues]."""
        spectrum = self.spectra[i]
        prior = self.spectra.prior(i, self._priors[i])
        left, right = spectrum.left_values, spectrum.right_values
        if self.damping is None or spectrum.is_bias or left is None or right is None:
            return self._weight * spectrum.values + prior
        root, scale = widened(prior).sqrt().view(-1, *_folded(spectrum, prior)), widened(self._weight).sqrt()
        of_left, of_right = self.damping.sides(output_first=spectrum.output_first)
        damped = (of_left * scale * left.unsqueeze(2) + root) * (of_right * scale * right.unsqueeze(1) + root)
        return damped.flatten()

    def eigenvalues(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Eigenvalues of every block, `[p]`, without gradient; the prior must not vary within dense blocks."""
        with torch.no_grad():
            return tuple(self._require_positive(self._values(i)).to(dtype) for i in range(len(self.spectra)))

    def _require_positive(self, values: Tensor) -> Tensor:
        """Some eigenvalues of P if they are positive, as they must be; an error counts those of all blocks."""
        if self.spectra.signed and bool((values <= 0).any()):
            require_positive(torch.cat([block for _, block in self._decomposed]))
            require_positive(values)
        return values

    def _dense_block(self, i: int, *, projected: bool = False) -> Tensor:
        """s·H + diag(δ) of a dense block with a varying prior, float64; `projected`: without the rounding of H."""
        matrix, prior = self.spectra[i].matrix, self._priors[i]
        if matrix is None:
            return torch.diag(self._values(i))
        if projected and self.spectra.signed:
            matrix = linalg.significant_part(matrix, self.spectra.dtype)
        elif projected:
            matrix = linalg.positive_part(matrix)
        return widened(self._weight) * matrix + torch.diag(widened(prior).expand(len(matrix)))

    def _cholesky(self, i: int) -> Tensor:
        """Cholesky factor of a dense block with a varying prior, in float64."""
        factor = linalg.cholesky(self._dense_block(i))
        if factor is None:
            factor = linalg.cholesky(self._dense_block(i, projected=True))
        if factor is None:
            for _, values in self._decomposed:
                self._require_positive(values)
            raise CurvatureError("the posterior precision is not positive definite; give a larger prior precision.")
        return factor

    def quad(self, vectors: Tensor) -> Tensor:
        parts = vectors.split([spectrum.size for spectrum in self.spectra], -1)
        total = torch.zeros((), dtype=vectors.dtype, device=vectors.device)
        for i, (spectrum, part) in enumerate(zip(self.spectra, parts, strict=True)):
            exact = widened(part)
            if spectrum.matrix is None:
                total = total + (spectrum.rotate(exact).square() * self._values(i)).sum(-1)
            else:  # by the block itself, whose derivative in the weights of several terms no eigenbasis has
                product = widened(self._weight) * (exact @ spectrum.matrix) + widened(self._priors[i]) * exact
                total = total + (product * exact).sum(-1)
        return total.to(vectors.dtype)

    # Predictions.

    @cached_property
    def _posterior(self) -> tuple[EigenBlock, ...]:
        """Every posterior block, in the posterior's dtype, or in float64 where rotated outputs need it."""
        pairs = [(spectrum, self._require_positive(values)) for spectrum, values in self._decomposed]
        blocks: list[EigenBlock] = []
        for i, ((spectrum, values), dtype) in enumerate(zip(pairs, self._dtypes(pairs), strict=True)):
            if self._moves(i) and spectrum.basis is not None:
                precision = self._dense_block(i, projected=self.spectra.signed and self._varies(i))
                blocks.append(MovingBlock(spectrum, values.detach(), precision, dtype))
            else:
                blocks.append(EigenBlock(spectrum.cast(dtype), values.to(dtype)))
        return tuple(blocks)

    def _dtypes(self, pairs: Sequence[tuple[BlockSpectrum, Tensor]]) -> list[torch.dtype]:
        """Types in which outputs are rotated into the eigenbasis of every block; without one nothing is rounded."""
        one = self._weight.detach().new_ones(1)
        read: list[Tensor] = []
        for (spectrum, values), prior in zip(pairs, self._priors, strict=True):
            matters = spectrum.is_rotated and spectrum.size > 0
            low, high, least = (*values.aminmax(), prior.amin()) if matters else (one[0],) * 3
            read.append(torch.stack([low.detach().to(one), high.detach().to(one), least.detach()]))
        extremes = torch.stack(read).tolist()
        if self.spectra.summed is not None:
            least = torch.finfo(self._dtype).tiny
            warn_if_rounded(max(high / max(prior, least) for _, high, prior in extremes), self.spectra.summed)
        return [root_dtype(self._dtype, high, low, one.device, EIGENBASIS_ERROR) for low, high, _ in extremes]

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of the posterior."""
        return self.prior.precision.dtype

    def _moves(self, i: int) -> bool:
        """True if the eigenvectors of a dense block depend on a hyper-parameter that requires a gradient."""
        matrix = self.spectra[i].matrix
        if matrix is None or not torch.is_grad_enabled():
            return False
        follows = self._priors[i].requires_grad or self.weights.requires_grad
        return matrix.requires_grad or (self._varies(i) and follows)

    @property
    def _decomposed(self) -> list[tuple[BlockSpectrum, Tensor]]:
        """Basis and eigenvalues of every posterior block, float64, without gradient where both move."""
        decomposed: list[tuple[BlockSpectrum, Tensor]] = []
        for i, spectrum in enumerate(self.spectra):
            if not self._varies(i):
                decomposed.append((spectrum, self._values(i)))
                continue
            with torch.no_grad():
                if self.spectra.signed:
                    own = dense_spectrum(self._dense_block(i, projected=True), signed=wide_dtype(self._weight.device))
                    decomposed.append((own, own.values))
                else:
                    own = dense_spectrum(self._dense_block(i))
                    # P is at least its prior, also where rounding of H says less.
                    decomposed.append((own, own.values.maximum(widened(self._priors[i].min()))))
        return decomposed

    def variance(self, jacobian: Jacobian, form: Form) -> Tensor:
        dtype = self._dtype if form == "diagonal" else jacobian.summed_in(self._dtype)

        def of_block(i: int, block: Block) -> Tensor:
            own = self._posterior[i]
            block = block if own.values.dtype == self._dtype else block.cast(own.values.dtype)
            return own.variance(block, form, wide=jacobian.wide).to(dtype)

        return self.spectra.regrouped(jacobian).sum_over_blocks(of_block)

    @cached_property
    def axes(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Those of the output side, which all tensors of a layer share; of factors alone, whose sides are known."""
        first = self.spectra[0]
        shared = self.spectra.factored and all(
            spectrum.output_first and spectrum.left is first.left and spectrum.shape is not None
            and spectrum.shape[0] == 1
            for spectrum in self.spectra
        )  # fmt: skip
        return first.left.matrix()[0] if shared and first.left is not None else None

    def variance_along_axes(self, jacobian: Jacobian) -> Tensor:
        def of_block(i: int, block: Block) -> Tensor:
            own = self._posterior[i]
            return own.variance_along_axes(block.cast(own.values.dtype))

        return jacobian.sum_over_blocks(of_block)

    def power(self, vectors: Tensor, exponent: float) -> Tensor:
        """In the prior's dtype where that is enough; its root, of samples, symmetric [Redux, appendix B, samples]."""
        parts = vectors.split([spectrum.size for spectrum in self.spectra], -1)
        pairs = zip(self._posterior, parts, strict=True)
        return torch.cat([own.times(part.to(own.values.dtype), exponent).to(vectors) for own, part in pairs], -1)

    # What `KronDecomposed` of laplace-torch offers, for users of `la.posterior_precision`.

    def bmm(self, vectors: Tensor, exponent: float = -1) -> Tensor:
        """P^exponent v of vectors `[..., P]`; P⁻¹ v by default."""
        return self.power(vectors, exponent)

    def inv_square_form(self, vectors: Tensor) -> Tensor:
        """W P⁻¹ Wᵀ of `[B, K, P]`, `[B, K, K]`."""
        return vectors @ self.bmm(vectors, exponent=-1).transpose(1, 2)

    def diag(self, exponent: float = 1) -> Tensor:
        """Diagonal of P^exponent, `[P]`."""
        return torch.cat([block.diagonal(exponent).to(self._dtype) for block in self._posterior])

    def diagonal_of_inverse(self) -> Tensor:
        return self.diag(exponent=-1)

    def to_matrix(self, exponent: float = 1) -> Tensor:
        """P^exponent, `[P, P]`."""
        return torch.block_diag(*[block.matrix(exponent).to(self._dtype) for block in self._posterior])

    def to_dense(self) -> Tensor:
        return self.to_matrix()

    @property
    def public(self) -> KronDecomposed | KronPrecision:
        """P by the factors of every tensor, if eigenvalues are their products and a prior is constant in a tensor."""
        from laplace.compat.kron import KronDecomposed  # legacy values are imported when read

        if not self.spectra.factored or not self.prior.is_constant_per_tensor:
            return self
        deltas = torch.cat([delta.view(1) for delta in self.prior.per_block()])
        spectra, scale, damping = self.spectra, self._weight, self.damping
        return KronDecomposed(
            lambda: spectra.factor_vectors, lambda: _public_values(spectra, scale, damping), deltas, damping is not None
        )

    @property
    def covariance(self) -> Tensor:
        return self.to_matrix(exponent=-1)

    @property
    def scale(self) -> Tensor:
        return self.to_matrix(exponent=-0.5)


def _folded(spectrum: BlockSpectrum, prior: Tensor) -> tuple[int, int]:
    """Trailing shape in which a prior in the eigenbasis meets `[G, L, R]` eigenvalues."""
    return (1, 1) if prior.numel() == 1 or spectrum.shape is None else spectrum.shape[1:]


def spectral_scan(spectra: Spectra, weights: Tensor, layout: Layout, *, damping: Damping | None = None) -> SpectralScan:
    """Functional variances at many scalar priors from spectra that are known."""

    def project(jacobian: Jacobian, dtype: torch.dtype) -> Jacobian:
        return spectra.project(jacobian, [spectrum.cast(dtype) for spectrum in spectra])

    def precisions(delta: Tensor) -> tuple[Tensor, ...]:
        prior = GaussianPrior(delta, weights.new_zeros(()), layout)
        return KronPrecision(spectra, weights, prior, damping=damping).eigenvalues(delta.dtype)

    return SpectralScan(project, precisions, mean_weight(weights) * spectra.largest)


@dataclass(frozen=True, eq=False)
class EigenBlock:
    """A block P = U diag(λ) Uᵀ of a posterior precision, in a basis that does not depend on hyper-parameters."""

    spectrum: BlockSpectrum  # U, in the dtype of Jacobians or float64
    values: Tensor  # λ, `[p]`, in the same

    @cached_property
    def _variances(self) -> Tensor:
        return 1 / self.values

    @cached_property
    def _constants(self) -> dict[tuple[Form, bool], Tensor]:
        """Variances by Jacobians that are those of every datum, as they were asked for."""
        return {}

    def variance(self, block: Block, form: Form, *, wide: bool) -> Tensor:
        """J P⁻¹ Jᵀ, as of `Precision.variance`."""
        if not block.is_constant or form == "joint" or self.values.requires_grad:
            return weighted(self.spectrum.project(block), self._variances, form, wide=wide)
        if (form, wide) not in self._constants:
            own = weighted(self.spectrum.project(block.at(slice(0, 1))), self._variances, form, wide=wide)
            self._constants[form, wide] = own
        return self._constants[form, wide].expand(block.n_data, *[-1] * (1 if form == "diagonal" else 2))

    def variance_along_axes(self, block: Block) -> Tensor:
        """As of `Precision.variance_along_axes`."""
        return norms_along_basis(self.spectrum.project(block), self._variances)

    def times(self, vectors: Tensor, exponent: float) -> Tensor:
        """P^exponent v of vectors `[..., p]`."""
        return self.spectrum.rotate(self.spectrum.rotate(vectors) * self.values.pow(exponent), back=True)

    def diagonal(self, exponent: float) -> Tensor:
        """Diagonal of P^exponent, `[p]`."""
        return self.spectrum.diagonal(self.values**exponent)

    def matrix(self, exponent: float) -> Tensor:
        """P^exponent, `[p, p]`."""
        return self.times(torch.eye(self.spectrum.size, dtype=self.values.dtype, device=self.values.device), exponent)


@dataclass(frozen=True, eq=False)
class MovingBlock(EigenBlock):
    """A dense block whose eigenvectors move with hyper-parameters that require a gradient: λ and U are constants."""

    precision: Tensor  # P with its graph, `[p, p]`, float64
    dtype: torch.dtype  # Of Jacobians

    def variance(self, block: Block, form: Form, *, wide: bool) -> Tensor:
        root = self.matrix(-0.5)
        rotated = MappedBlock(block, lambda piece: piece.to(root) @ root)
        return weighted(rotated, root.new_ones(len(root)), form, wide=wide)

    def times(self, vectors: Tensor, exponent: float) -> Tensor:
        return vectors @ self.matrix(exponent).to(vectors)

    def diagonal(self, exponent: float) -> Tensor:
        return self.matrix(exponent).diagonal()

    def matrix(self, exponent: float) -> Tensor:
        (vectors,) = self.spectrum.factor_vectors
        return power(self.precision, (self.values, vectors.detach()), exponent).to(self.dtype)


def _public_values(spectra: Spectra, scale: Tensor, damping: Damping | None) -> list[list[Tensor]]:
    """Eigenvalues of s·H by factor, the scale spread evenly over the factors of a block, times those of a damping."""

    def of_block(block: BlockSpectrum) -> list[Tensor]:
        values = block.factor_values
        factors: tuple[float, ...] = (1.0,) * len(values)
        if damping is not None and len(values) == 2:
            factors = damping.sides(output_first=block.output_first)
        root = widened(scale) ** (1 / len(values))
        return [(factor * root * side).to(spectra.dtype) for factor, side in zip(factors, values, strict=True)]

    with kept_for_later(), torch.enable_grad():
        return [of_block(block) for block in spectra]
