"""Some outputs of a head: of the weights of a layer whose outputs are the network's, an output has one row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core.precision_policy import widened
from laplace.jacobian.blocks import BLOCKS, Block
from laplace.jacobian.contractions import CHUNK_BYTES, ProductBasis
from laplace.jacobian.outer import OuterBlock

_BYTES = 8


@dataclass(frozen=True, eq=False)
class HeadRows(Block):
    """∂f_k / ∂W_cd = δ_kc φ_d for K outputs k of every datum, of a weight `(C, D)` or of a bias, with φ = 1 and D = 1.

    Of a vocabulary of 50,000 outputs no more than the K rows of W are read: nothing here is `[B, C]`.

    Attributes:
        features: φ, `[B, D]`; ones `[B, 1]` of a bias.
        outputs: The k of every datum, `[B, K]`.
        n_outputs: C.
        is_bias: True for a bias.
    """

    features: Tensor
    outputs: Tensor
    n_outputs: int
    is_bias: bool = False

    @property
    def size(self) -> int:
        return self.n_outputs * self.features.shape[1]

    @property
    def n_cotangents(self) -> int:
        return self.outputs.shape[1]

    @property
    def n_data(self) -> int:
        return len(self.features)

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
        return replace(self, features=self.features.detach().contiguous(), outputs=self.outputs.contiguous())

    def state(self) -> dict[str, Any]:
        return {
            "kind": "head rows", "features": self.features, "outputs": self.outputs, "n_outputs": self.n_outputs,
            "is_bias": self.is_bias,
        }  # fmt: skip

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> HeadRows:
        return cls(state["features"], state["outputs"], state["n_outputs"], state["is_bias"])

    def kernel_by_factors(self, other: Block) -> Callable[[], Tensor] | None:
        return (lambda: self.kernel(other)) if isinstance(other, HeadRows) else None

    def kernel(self, other: HeadRows) -> Tensor:
        """φ · φ' where two data have an output in common, `[K, B, L, M]`, float64."""
        products = widened(self.features) @ widened(other.features).T
        return products[None, :, None] * (self.outputs.T[:, :, None, None] == other.outputs.T)

    # Contractions: with the rows of the weights that belong to a datum's outputs.

    @property
    def contracts_factors(self) -> bool:
        return True

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
        """Consecutive data, so few that the rows of their outputs fit a chunk."""
        step = max(1, CHUNK_BYTES // (_BYTES * n_vectors * self.n_cotangents * self.features.shape[1]))
        for start in range(0, self.n_data, step):
            yield self.at(slice(start, start + step))


BLOCKS.register("head rows")(HeadRows)
