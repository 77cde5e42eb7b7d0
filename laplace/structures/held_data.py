"""Data that a posterior holds so that it can ask the network for products with their curvature, H = Σ Jᵀ Λ J."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.precision_policy import widened
from laplace.engines.engine import CurvatureEngine, LinearMap, OutputCurvature, detached
from laplace.likelihoods.output_hessian import OutputHessian
from laplace.structures.base import those_known


@dataclass(frozen=True, eq=False)
class HeldBatch:
    """Inputs of one batch with the curvature of its loss in the outputs, at which nothing but J is asked for later.

    Attributes:
        x: Inputs.
        output: Λ.
        count: How often every datum counts.
    """

    x: Inputs
    output: OutputCurvature
    count: float = 1.0

    @classmethod
    def of(cls, x: Inputs, output: OutputCurvature) -> HeldBatch:
        """A batch as it is held: a copy, which the loader cannot write to."""
        return cls(batches.transform(detached(x), lambda tensor: tensor.clone()), output)

    @property
    def hessian(self) -> OutputHessian:
        """Λ."""
        return self.output.hessian

    @property
    def shape(self) -> tuple[int, int]:
        """Rows B and outputs C."""
        rows, outputs = self.hessian.diag.shape
        return rows, outputs

    @property
    def n_columns(self) -> int:
        """K, columns of a root of Λ."""
        return self.shape[1] if self.hessian.dense is not None else self.hessian.n_columns

    def scaled(self, factor: float) -> HeldBatch:
        """The batch whose data count so many times as often."""
        return replace(self, count=factor * self.count)

    def weighted(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """W Λ f of outputs `[..., B, C]`, W = diag(w) with w `[C]`, or `[1]` for all."""
        return self.count * weights.to(outputs) * self.hessian.times(outputs.to(self.hessian.diag)).to(outputs)

    def rooted(self, noise: Tensor, weights: Tensor) -> Tensor:
        """√W L ε of standard normal numbers `[S, K·B]` with L Lᵀ = Λ, `[S, B, C]`, by few columns of L at a time."""
        columns = noise.unflatten(1, (self.n_columns, -1))
        if self.hessian.dense is not None:
            total = torch.einsum("kbc,skb->sbc", self.hessian.root().to(noise), columns)
        else:
            total = noise.new_zeros(len(noise), *self.shape)
            step = max(1, _ROOT_NUMBERS // max(1, self.hessian.diag.numel()))
            for start in range(0, self.n_columns, step):
                part = slice(start, min(start + step, self.n_columns))
                total += torch.einsum("kbc,skb->sbc", self.hessian.root(part).to(noise), columns[:, part])
        return self.count**0.5 * weights.to(noise).sqrt() * total

    def state(self) -> dict[str, Any]:
        """Tensors and numbers."""
        parts = {"diag": self.hessian.diag, "dense": self.hessian.dense}
        softmax = self.hessian.sums_to_zero
        vec = None if softmax else self.hessian.vec
        return {
            "x": batches.plain(self.x), **parts, "vec": vec, "sums_to_zero": softmax,
            "n_positions": self.output.n_positions, "count": self.count, **those_known(weights=self.hessian.weights),
        }  # fmt: skip

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> HeldBatch:
        """The batch of a state."""
        diag, softmax = state["diag"], state["sums_to_zero"]
        weights = state.get("weights")  # where data have some
        hessian = OutputHessian(diag, diag if softmax else state["vec"], state["dense"], softmax, weights)
        return cls(batches.from_plain(state["x"]), OutputCurvature(hessian, state["n_positions"]), state["count"])


_UNIT_VECTORS = 128
"""Unit vectors that are multiplied at once."""

_ROOT_NUMBERS = 2**22
"""Numbers of a root of Λ that are made at once."""


class DataProducts:
    """Products with J of all data that are held, by maps of every batch.

    Of a last layer the features are kept, of small networks the Jacobian multiplied out, as far as the budget reaches;
    a map that is not kept takes a forward and a backward pass for every block of vectors.

    Args:
        engine: Gives linear maps of batches at θ*.
        data: Batches.
        kept_bytes: Bytes of the maps that are kept.

    Attributes:
        n_params: P.
        like: A tensor of the dtype and on the device of products.
    """

    def __init__(self, engine: CurvatureEngine, data: Sequence[HeldBatch], kept_bytes: int) -> None:
        self.engine = engine
        self.data = tuple(data)
        self.n_params = engine.problem.layout.n_params
        self.like = self.data[0].hessian.diag
        self._left = kept_bytes
        self._kept: dict[int, LinearMap] = {}

    def maps(self) -> Iterator[tuple[HeldBatch, LinearMap]]:
        """Every batch with its map."""
        for number, batch in enumerate(self.data):
            yield batch, self._kept[number] if number in self._kept else self._made(number, batch)

    def _made(self, number: int, batch: HeldBatch) -> LinearMap:
        rows, outputs = batch.shape
        itemsize = batch.hessian.diag.element_size()
        fits = batch.output.n_positions == 1 and rows * outputs * self.n_params * itemsize <= self._left
        linear = self.engine.linear_map(batch.x, multiplied_out=fits)
        if linear.is_lasting and linear.n_bytes <= self._left:
            self._left -= linear.n_bytes
            self._kept[number] = linear
        return linear

    def outputs(self, vectors: Tensor) -> list[Tensor]:
        """J v of vectors `[R, P]`, `[R, B, C]` of every batch."""
        with torch.no_grad():
            return [linear.push(vectors) for _, linear in self.maps()]

    def pulled(self, cotangents: Sequence[Tensor]) -> Tensor:
        """Σ Jᵀ u of u `[R, B, C]` for every batch, `[R, P]`."""
        return self._summed(cotangents[0], lambda number, batch, linear: cotangents[number])

    def curved(self, vectors: Tensor, weights: Tensor) -> Tensor:
        """Σ Jᵀ W Λ J v, `[R, P]`, of vectors `[R, P]` and w `[C]` or `[1]`."""
        return self._summed(vectors, lambda number, batch, linear: batch.weighted(linear.push(vectors), weights))

    def matrices(self, n_terms: int) -> Tensor:
        """H of every term, `[E, P, P]`, float64: the Jacobian of a batch by its products with unit vectors, squared."""
        with torch.no_grad():
            eye = torch.eye(self.n_params, dtype=self.like.dtype, device=self.like.device)
            total = widened(eye.new_zeros(n_terms, self.n_params, self.n_params))
            for batch, linear in self.maps():
                rows = widened(torch.cat([linear.push(part) for part in eye.split(_UNIT_VECTORS)]))  # [P, B, C]
                inner = batch.count * batch.hessian.to(rows.dtype).times(rows)
                total += (
                    torch.einsum("pbc,qbc->pq", inner, rows)
                    if n_terms == 1
                    else torch.einsum("pbc,qbc->cpq", inner, rows)
                )
            return 0.5 * (total + total.mT)

    def coloured(self, noise: Tensor, weights: Tensor) -> list[Tensor]:
        """√W L ε of standard normal numbers `[S, n_noise]`, `[S, B, C]` of every batch."""
        parts = noise.split([batch.shape[0] * batch.n_columns for batch in self.data], 1)
        return [batch.rooted(part, weights) for batch, part in zip(self.data, parts, strict=True)]

    @property
    def n_noise(self) -> int:
        """Numbers of a sample of the data's part."""
        return sum(batch.shape[0] * batch.n_columns for batch in self.data)

    def _summed(self, like: Tensor, cotangents: Callable[[int, HeldBatch, LinearMap], Tensor]) -> Tensor:
        """Σ Jᵀ u over batches, `[R, P]`; one map of a batch serves both directions."""
        with torch.no_grad():
            total = like.new_zeros(like.shape[0], self.n_params)
            for number, (batch, linear) in enumerate(self.maps()):
                linear.add_pull(cotangents(number, batch, linear), total)
            return total
