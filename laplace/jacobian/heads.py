"""Blocks of a last layer: J = I ⊗ φ, without ever building the identity."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laplace.core import nested
from laplace.core.gaussian import centred_variance_of_independent
from laplace.core.precision_policy import wide_dtype, widened
from laplace.errors import CurvatureError, UnsupportedError
from laplace.jacobian.blocks import Block, CentredBlock, ProductBasis, RankOne, TensorShape, all_of, chunks, less_mean
from laplace.jacobian.outer import OuterBlock

if TYPE_CHECKING:
    from typing_extensions import Self

    from laplace.likelihoods.output_hessian import OutputHessian


@dataclass(frozen=True, eq=False)
class _OfFeatures(Block):
    """A block of a layer whose outputs are the network's, by the layer's inputs."""

    features: Tensor  # φ, `[B, D]`; ones `[B, 1]` of a bias

    @property
    def device(self) -> torch.device:
        return self.features.device

    @property
    def contracts_factors(self) -> bool:
        return True


@dataclass(frozen=True, eq=False)
class HeadRows(_OfFeatures):
    """∂f_k / ∂W_cd = δ_kc φ_d for K outputs k of every sample, of a weight `(C, D)` or of a bias, with φ = 1 and D = 1.

    Of a vocabulary of 50,000 outputs no more than the K rows of W are read: nothing here is `[B, C]`.
    """

    outputs: Tensor  # The k of every sample, `[B, K]`
    n_outputs: int  # C
    is_bias: bool = False  # True for a bias
    kind = "head rows"

    @property
    def dims(self) -> tuple[int, int, int]:
        return self.outputs.shape[1], len(self.features), self.n_outputs * self.features.shape[1]

    def has_valid_indices(self) -> bool:
        return nested.are_indices(self.outputs, 0, self.n_outputs)

    # Other data, and the same values in another form.

    def at(self, data: slice | Tensor) -> HeadRows:
        return replace(self, features=self.features[data], outputs=self.outputs[data])

    def cast(self, dtype: torch.dtype) -> HeadRows:
        return replace(self, features=self.features.to(dtype))

    def in_basis(self, basis: ProductBasis) -> Block:
        if not basis.output_first:
            return super().in_basis(basis)
        features = self.features if basis.inputs is None else basis.inputs.rotate_folded(self.features)
        if basis.output is None:
            return replace(self, features=features)
        g = basis.output.matrix()[0][self.outputs.T]  # [K, B, O]
        return OuterBlock(None if self.is_bias else features[:, None, None], g[:, :, None, None])

    def detached(self) -> HeadRows:
        return replace(self, features=self.features.detach().clone(), outputs=self.outputs.clone())

    def kernel_by_factors(self, other: Block) -> Callable[[], Tensor] | None:
        return (lambda: self.kernel(other)) if isinstance(other, HeadRows) else None

    def kernel(self, other: HeadRows) -> Tensor:
        """φ · φ' where two samples share an output, `[K, B, L, M]`, float64."""
        products = widened(self.features) @ widened(other.features).T
        return products[None, :, None] * (self.outputs.T[:, :, None, None] == other.outputs.T)

    # Contractions: with the rows of the weights that belong to a sample's outputs.

    def dense(self) -> Tensor:
        every = torch.arange(self.n_outputs, device=self.outputs.device)
        hot = (self.outputs.T.unsqueeze(2) == every).to(self.features)  # PyTorch's own reads the numbers
        return torch.einsum("kbc,bd->kbcd", hot, self.features).flatten(2)

    def bound(self) -> Tensor:
        return self.features.norm() * self.n_cotangents**0.5

    def pull(self, cotangents: Tensor) -> Tensor:
        rows = (cotangents.unsqueeze(2) * self.features).flatten(0, 1)
        return rows.new_zeros(self.n_outputs, rows.shape[1]).index_add(0, self.outputs.T.flatten(), rows).flatten()

    def apply(self, vectors: Tensor) -> Tensor:
        rows = vectors.view(len(vectors), self.n_outputs, -1)
        parts = [torch.einsum("sbkd,bd->sbk", rows[:, at.outputs], at.features) for at in self._parts(len(vectors))]
        return torch.cat(parts, 1)

    def weighted_norms(self, weights: Tensor) -> Tensor:
        rows = weights.view(self.n_outputs, -1)
        return torch.cat([(rows[at.outputs] @ at.features.square().unsqueeze(2)).squeeze(2) for at in self._parts(1)])

    def weighted_gram(self, weights: Tensor) -> Tensor:
        norms = self.weighted_norms(weights.to(self.features.dtype)).to(weights.dtype)
        return norms.unsqueeze(2) * (self.outputs.unsqueeze(2) == self.outputs.unsqueeze(1))

    def _parts(self, n_vectors: int) -> Iterator[HeadRows]:
        for data in chunks(self.n_data, n_vectors * self.n_cotangents * self.features.shape[1], self.device):
            yield self.at(data)


class Head(_OfFeatures):
    """A block of a layer whose outputs are the network's, in the basis of the outputs or another one."""

    is_bias: bool  # True for a bias

    @property
    def is_constant(self) -> bool:
        return self.is_bias

    def at(self, data: slice | Tensor) -> Self:
        return replace(self, features=self.features[data])

    @abstractmethod
    def cast(self, dtype: torch.dtype) -> Head:
        """The block in another dtype."""

    @abstractmethod
    def ggn_diagonal(self, hessian: OutputHessian, *, per_output: bool) -> Tensor:
        """Diagonal of Σ_b J_bᵀ Λ_b J_b, `[1, p]`, without a root of Λ."""


@dataclass(frozen=True, eq=False)
class HeadBlock(Head):
    """∂f_k / ∂W_cd = δ_kc φ_d of a weight `(C, D)`, or of a bias, with φ = 1 and D = 1."""

    n_outputs: int  # C
    is_bias: bool = False  # True for a bias
    kind = "head"

    @classmethod
    def from_block(cls, block: Block, n_outputs: int) -> HeadBlock | None:
        """The block of a head from the block of its layer (gradients are ignored); None of another layer."""
        if not isinstance(block, OuterBlock) or block.input_first:
            return None
        inputs = block.inputs
        if inputs is None:
            return cls(block.g.new_ones(block.n_data, 1), n_outputs, is_bias=True)
        return cls(inputs[:, 0, 0], n_outputs)

    # Sizes.

    @property
    def dims(self) -> tuple[int, int, int]:
        return self.n_outputs, self.features.shape[0], self.n_outputs * self.n_inputs

    @property
    def n_inputs(self) -> int:
        """Number of features D."""
        return self.features.shape[1]

    def shape(self, inputs: Sequence[Tensor]) -> TensorShape:
        del inputs
        return TensorShape(
            self.size, factored=True, n_outputs=self.n_outputs, n_inputs=self.n_inputs, is_bias=self.is_bias,
            is_head=True,
        )  # fmt: skip

    # Other data and outputs, and the same values in another form.

    def select_outputs(self, outputs: Tensor) -> HeadRows:
        return HeadRows(self.features, outputs, self.n_outputs, self.is_bias)

    def cast(self, dtype: torch.dtype) -> HeadBlock:
        return replace(self, features=self.features.to(dtype))

    def in_basis(self, basis: ProductBasis) -> Block:
        if not basis.output_first:
            return super().in_basis(basis)
        head = self if basis.inputs is None else replace(self, features=basis.inputs.rotate_folded(self.features))
        return head if basis.output is None else RotatedHeadBlock(head.features, basis.output.matrix()[0], self.is_bias)

    def centred(self) -> CentredHeadBlock:
        return CentredHeadBlock(self)

    def detached(self) -> HeadBlock:
        return replace(self, features=self.features.detach().clone())

    def rank_one(self) -> RankOne:
        return RankOne(None, self.features, self.n_outputs)

    def kernel_by_factors(self, other: Block) -> Callable[[], Tensor]:
        return lambda: self._kernel(other)

    def _kernel(self, other: Block) -> Tensor:
        features = widened(self.features)
        if isinstance(other, HeadBlock):
            eye = torch.eye(self.n_outputs, dtype=wide_dtype(features.device), device=features.device)
            return (features @ widened(other.features).T)[None, :, None] * eye[:, None, :, None]
        if isinstance(other, HeadRows):
            rows = torch.arange(self.n_outputs, device=features.device).expand(self.n_data, -1)
            return HeadRows(self.features, rows, self.n_outputs, self.is_bias).kernel(other)
        if isinstance(other, OuterBlock) and other.n_positions == other.groups == 1 and not other.input_first:
            a = features.new_ones(other.n_data, 1) if other.inputs is None else widened(other.inputs[:, 0, 0])
            return torch.einsum("bm,lmk->kblm", features @ a.T, widened(other.g[:, :, 0, 0]))
        pieces = (widened(piece).unflatten(2, (self.n_outputs, -1)) for piece in other.pieces())
        return torch.cat([torch.einsum("bd,lmkd->kblm", features, piece) for piece in pieces], 3)

    # Contractions: an output has weights of its own, and every one is a product with the features.

    def dense(self) -> Tensor:
        eye = torch.eye(self.n_outputs, dtype=self.features.dtype, device=self.features.device)
        return torch.einsum("kc,bd->kbcd", eye, self.features).flatten(2)

    def bound(self) -> Tensor:
        return self.features.norm() * self.n_outputs**0.5

    def entries(self, index: Tensor) -> Tensor:
        output, feature = index // self.n_inputs, index % self.n_inputs
        entries = self.features.new_zeros(self.n_outputs, self.n_data, len(index))
        entries[output, :, torch.arange(len(index), device=index.device)] = self.features[:, feature].T
        return entries

    def pull(self, cotangents: Tensor) -> Tensor:
        return (cotangents @ self.features).flatten()

    def add_squares(self, running: Tensor) -> None:
        running.view(self.n_outputs, -1).add_(self.features.square().sum(0))

    def squares_per_cotangent(self) -> Tensor:
        return self._on_diagonal(self.features.square().sum(0).expand(self.n_outputs, -1), per_output=True)

    def ggn_diagonal(self, hessian: OutputHessian, *, per_output: bool) -> Tensor:
        squares = self.features.square()
        return self._on_diagonal(hessian.diagonal().to(squares).T @ squares, per_output=per_output)

    def _on_diagonal(self, values: Tensor, *, per_output: bool) -> Tensor:
        """Values `[C, D]` of the entries as `[1, C·D]`, or with a row for every output, `[C, C·D]`."""
        if not per_output:
            return values.reshape(1, -1)
        rows = values.new_zeros(self.n_outputs, *values.shape)
        rows.diagonal().copy_(values.T)
        return rows.flatten(1)

    def apply(self, vectors: Tensor) -> Tensor:
        return self.features @ vectors.view(len(vectors), self.n_outputs, -1).mT

    def combined(self, weights: Tensor) -> Tensor:
        return (weights.mT @ self.features).flatten(1)

    def weighted_norms(self, weights: Tensor) -> Tensor:
        return self.features.square() @ weights.view(self.n_outputs, -1).T

    def weighted_gram(self, weights: Tensor) -> Tensor:
        return torch.diag_embed(self.weighted_norms(weights.to(self.features.dtype))).to(weights.dtype)


@dataclass(frozen=True)
class CentredHeadBlock(CentredBlock):
    """A head's outputs less their mean: no two of its outputs share a weight, so that their variances are enough."""

    def weighted_norms(self, weights: Tensor) -> Tensor:
        return centred_variance_of_independent(self.whole.weighted_norms(weights))


@dataclass(frozen=True, eq=False)
class RotatedHeadBlock(Head):
    """A head in another basis of its outputs: J_k = Σ_o u_ko (the head's row o)."""

    basis: Tensor  # u, `[C, O]`
    is_bias: bool = False  # True for a bias

    @property
    def head(self) -> HeadBlock:
        """The head with outputs in this basis."""
        return HeadBlock(self.features, self.basis.shape[1], self.is_bias)

    @property
    def dims(self) -> tuple[int, int, int]:
        return len(self.basis), len(self.features), self.basis.shape[1] * self.features.shape[1]

    def centred(self) -> RotatedHeadBlock:
        return replace(self, basis=less_mean(self.basis))

    def cast(self, dtype: torch.dtype) -> RotatedHeadBlock:
        return replace(self, features=self.features.to(dtype), basis=self.basis.to(dtype))

    def dense(self) -> Tensor:
        return torch.einsum("co,bd->cbod", self.basis, self.features).flatten(2)

    def bound(self) -> Tensor:
        return self.basis.norm() * self.features.norm()

    def pull(self, cotangents: Tensor) -> Tensor:
        return self.head.pull(self.basis.T @ cotangents)

    def add_squares(self, running: Tensor) -> None:
        running += torch.outer(self.basis.square().sum(0), self.features.square().sum(0)).flatten()

    def squares_per_cotangent(self) -> Tensor:
        return (self.basis.square().unsqueeze(2) * self.features.square().sum(0)).flatten(1)

    def ggn_diagonal(self, hessian: OutputHessian, *, per_output: bool) -> Tensor:
        squares = self.features.square()
        basis = self.basis.to(squares)
        if not per_output:
            return (hessian.diagonal_in(basis).T.to(squares) @ squares).reshape(1, -1)
        sums = hessian.diagonal().to(squares).T @ squares  # [C, D]
        return (basis.square().unsqueeze(2) * sums.unsqueeze(1)).flatten(1)

    def apply(self, vectors: Tensor) -> Tensor:
        return self.head.apply(vectors) @ self.basis.T

    @property
    def _different(self) -> HeadBlock:
        """The head without repeated rows: one row for a bias, whose rows are all equal."""
        return self.head.at(slice(0, 1)) if self.is_bias else self.head

    def weighted_norms(self, weights: Tensor) -> Tensor:
        return (self._different.weighted_norms(weights) @ self.basis.square().T).expand(self.n_data, -1)

    def weighted_gram(self, weights: Tensor) -> Tensor:
        head = self._different
        norms = head.weighted_norms(weights.to(head.features.dtype)).to(weights.dtype)
        basis = self.basis.to(weights.dtype)
        return ((basis * norms.unsqueeze(1)) @ basis.T).expand(self.n_data, -1, -1)


def norms_along_basis(block: Block, weights: Tensor) -> Tensor:
    """v with J diag(w) Jᵀ = u diag(v) uᵀ of a head in another basis u of its outputs, `[B, O]`."""
    if not isinstance(block, RotatedHeadBlock):
        raise UnsupportedError(f"a block of kind {block.kind!r} is none of a head; ask for `variance`.")
    return block._different.weighted_norms(weights).expand(block.n_data, -1)


def as_head(block: Block) -> Head | None:
    """The block if it is a head in some basis, else None."""
    return block if isinstance(block, Head) else None


def unrotated(blocks: Sequence[Block]) -> list[HeadBlock]:
    """The blocks of a head in the basis of its outputs."""
    heads = all_of(HeadBlock, blocks)
    if heads is None:
        raise CurvatureError("a head's outer products are those in the basis of its outputs; these blocks are rotated.")
    return heads


def gradients_are(block: Block, cotangents: Tensor) -> bool:
    """True if a layer's output gradients are the cotangents `[1, ...]`: its rows are those of the network."""
    if not isinstance(block, OuterBlock) or block.groups > 1:
        return False
    g = block.g[0, :, 0, 0]
    return g.numel() == cotangents.numel() and bool(torch.equal(g.flatten(), cotangents.to(g).flatten()))
