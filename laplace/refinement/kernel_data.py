"""Gaussian processes at M data as a linear model in as many coordinates as the data span.

With K = U λ Uᵀ = L Lᵀ, L = U √λ, the process at the data is f = m + L z, z ~ N(0, I): a linear model with the features
L, in which no step touches a weight of the network (Immer et al., 2021, appendix A.3.2). The mean elsewhere is
m(x) + k(x, X) a with the dual a = U λ^(−½) z.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.core.precision_policy import widened
from laplace.likelihoods.output_hessian import OutputHessian
from laplace.refinement.refiner import Covariance
from laplace.structures import algebra


@dataclass(frozen=True, eq=False)
class Features:
    """Features of one Gaussian process over some of the outputs of M data.

    Attributes:
        root: L, `[M, C′, r]`, float64.
        inverse: U λ^(−½), `[M, C′, r]`: duals from coordinates.
    """

    root: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, kernel: Tensor) -> Features:
        """Those of K `[M, C′, M, C′]`, without directions that are zero but for rounding."""
        m, c = kernel.shape[:2]
        matrix = widened(kernel).reshape(m * c, m * c)
        values, vectors = algebra.eigh(0.5 * (matrix + matrix.T))
        nonzero = values > len(values) * torch.finfo(values.dtype).eps * values.amax().clamp(min=0)
        roots, vectors = values[nonzero].sqrt(), vectors[:, nonzero]
        return cls((vectors * roots).view(m, c, -1), (vectors / roots).view(m, c, -1))

    @property
    def width(self) -> int:
        """C′."""
        return self.root.shape[1]

    @property
    def rank(self) -> int:
        """Number of coordinates."""
        return self.root.shape[2]


@dataclass(frozen=True, eq=False)
class KernelBatch:
    """The M data.

    Attributes:
        f: Prior mean of the outputs, `[M, C]`, float64.
        y: Checked targets.
    """

    f: Tensor
    y: Tensor


@dataclass(frozen=True, eq=False)
class KernelData:
    """M data as Gaussian processes see them: one of all outputs together, or one of every output.

    Attributes:
        batch: Prior mean and targets.
        features: Of every process; their widths add up to C.
        n_data: M, as the likelihood counts them.
    """

    batch: KernelBatch
    features: tuple[Features, ...]
    n_data: float

    @property
    def batches(self) -> Sequence[KernelBatch]:
        """All data are one batch."""
        return (self.batch,)

    def split(self, vector: Tensor) -> tuple[Tensor, ...]:
        """Coordinates `[n]` of every process."""
        return vector.split([part.rank for part in self.features])

    def of_outputs(self, outputs: Tensor) -> tuple[Tensor, ...]:
        """Outputs `[M, C, …]` of every process, `[M, C′, …]`."""
        return outputs.split([part.width for part in self.features], 1)

    def push(self, vector: Tensor) -> list[Tensor]:
        """L z, `[M, C]`, of coordinates `[n]`."""
        return [torch.cat([part.root @ z for part, z in zip(self.features, self.split(vector), strict=True)], 1)]

    def pull(self, cotangents: Sequence[Tensor]) -> Tensor:
        """Lᵀ u, `[n]`, of u `[M, C]`."""
        pairs = zip(self.features, self.of_outputs(cotangents[0]), strict=True)
        return torch.cat([torch.einsum("mcr,mc->r", part.root, u) for part, u in pairs])

    def curvature_product(self, inner: Sequence[OutputHessian], scale: Tensor, vector: Tensor) -> Tensor:
        """Lᵀ (scale · Λ) L z, `[n]`."""
        return self.pull([scale * inner[0].times(self.push(vector)[0])])

    def duals(self, vector: Tensor) -> tuple[Tensor, ...]:
        """Duals a of every process, `[M, C′]`, of coordinates `[n]`."""
        pairs = zip(self.features, self.split(vector), strict=True)
        return tuple(part.inverse @ z for part, z in pairs)


@dataclass(frozen=True, eq=False)
class KernelCovariance(Covariance):
    """Covariance of the coordinates, (I + Lᵀ W L)⁻¹ of every process; for one by itself W is the diagonal of Λ.

    Attributes:
        data: The processes.
        roots: S with S Sᵀ = Λ of every datum, `[M, C, K]`, float64.
        scale: 1/(σ²T), 0-dim or `[C]`: W = scale Λ.
        factors: Cholesky factor of I + Lᵀ W L of every process.
    """

    data: KernelData
    roots: Tensor
    scale: Tensor
    factors: tuple[Tensor, ...]

    @classmethod
    def of(cls, data: KernelData, roots: Tensor, scale: Tensor) -> KernelCovariance:
        """The covariance of a curvature."""
        weighted = scale.sqrt().expand(roots.shape[1]).view(-1, 1) * roots
        factors: list[Tensor] = []
        for part, root in zip(data.features, data.of_outputs(weighted), strict=True):
            if part.width == 1:  # one column says all of one output
                root = root.square().sum(2, keepdim=True).sqrt()
            rows = torch.einsum("mck,mcr->mkr", root, part.root).flatten(0, 1)
            identity = torch.eye(part.rank, dtype=rows.dtype, device=rows.device)
            factors.append(torch.linalg.cholesky(identity + rows.T @ rows))
        return cls(data, roots, scale, tuple(factors))

    def solve(self, vector: Tensor) -> Tensor:
        pairs = zip(self.factors, self.data.split(vector), strict=True)
        return torch.cat([torch.cholesky_solve(z.unsqueeze(1), factor).squeeze(1) for factor, z in pairs])

    def of_outputs(self, *, diagonal: bool) -> list[Tensor]:
        blocks: list[Tensor] = []
        for part, factor in zip(self.data.features, self.factors, strict=True):
            rows = torch.linalg.solve_triangular(factor, part.root.flatten(0, 1).T, upper=False)
            each = rows.T.unflatten(0, (-1, part.width))
            blocks.append(each.square().sum(2) if diagonal or part.width == 1 else each @ each.mT)
        if len(blocks) == 1 and not diagonal and self.data.features[0].width > 1:
            return blocks
        variances = torch.cat(blocks, 1)
        return [variances if diagonal else torch.diag_embed(variances)]

    def divergence(self) -> float:
        total = 0.0
        for factor in self.factors:
            inverse = torch.cholesky_inverse(factor).diagonal()
            total += float(inverse.sum() - len(factor) + 2 * factor.diagonal().log().sum())
        return total


def columns(hessian: OutputHessian) -> Tensor:
    """A root S of every Λ = S Sᵀ, `[M, C, K]`."""
    return hessian.root().permute(1, 2, 0)
