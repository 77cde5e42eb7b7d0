"""The mode of a Gaussian process under any log-concave likelihood: refinement in function space.

The maximum of Ψ(f) = log p(y | f) − ½ (f − m)ᵀ K⁻¹ (f − m) (Rasmussen and Williams, 2006, chapter 3), with several
outputs, a prior mean m, and no inverse of K, which may be singular.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.core.precision_policy import widened
from laplace.errors import InvalidArgument
from laplace.likelihoods.base import Likelihood
from laplace.refinement.linear_model import LinearModel
from laplace.refinement.newton import minimise
from laplace.refinement.process import Features, KernelBatch, KernelCovariance, KernelData, columns


@dataclass(frozen=True, eq=False)
class FunctionMode:
    """The mode at M data and the Gaussian around it; predictions need nothing else.

    Attributes:
        f: The mode f̂, `[M, C]`.
        dual: a with f̂ = m + K a, `[M, C]`: the mean elsewhere is m(x) + k(x, X) a.
        basis: U λ^(−½) of K = U λ Uᵀ, `[MC, r]`: k(x, X) times it are coordinates.
        factor: Cholesky factor of their posterior precision, `[r, r]`.
        value: Ψ(f̂), without the normaliser of the likelihood.
        steps: Newton steps.
        distance: Newton decrement at the end: about how far Ψ is from its maximum is half its square.
        converged: Whether that is within the tolerance.
    """

    f: Tensor
    dual: Tensor
    basis: Tensor
    factor: Tensor
    value: float
    steps: int
    distance: float
    converged: bool

    @property
    def half_logdet(self) -> Tensor:
        """½ log det(I + Λ^½ K Λ^½), 0-dim: log p(y) ≈ Ψ(f̂) − this + the likelihood's normaliser."""
        return self.factor.diagonal().log().sum()

    def mean(self, prior_mean: Tensor, cross: Tensor) -> Tensor:
        """Mean at B other data, `[B, C]`.

        Args:
            prior_mean: m there, `[B, C]`.
            cross: k(x, X), `[BC, MC]`, data major.
        """
        return prior_mean + (cross @ self.dual.flatten()).view_as(prior_mean)

    def covariance(self, prior: Tensor, cross: Tensor) -> Tensor:
        """K_** − K_*X (K + Λ⁻¹)⁻¹ K_X*, `[..., BC, BC]` of the prior's shape.

        Args:
            prior: K_**, `[BC, BC]`.
            cross: k(x, X), `[BC, MC]`.
        """
        inside = cross @ self.basis
        gain = torch.linalg.solve_triangular(self.factor, inside.mT, upper=False)
        return prior - inside @ inside.mT + gain.mT @ gain


def dense_kernel(blocks: Tensor) -> Tensor:
    """Kernels of C independent outputs `[C, M, M']` as one, `[MC, M'C]`, data major and outputs minor."""
    c, rows, columns = blocks.shape
    dense = blocks.new_zeros(rows, c, columns, c)
    outputs = torch.arange(c, device=blocks.device)
    dense[:, outputs, :, outputs] = blocks
    return dense.reshape(rows * c, columns * c)


def mode(
    kernel: Tensor,
    prior_mean: Tensor,
    likelihood: Likelihood,
    y: Tensor,
    scale: Tensor,
    *,
    start: Tensor | None = None,
    tolerance: float = 1e-9,
    max_steps: int = 100,
) -> FunctionMode:
    """The mode of p(f | y) ∝ p(y | f) N(f; m, K).

    Args:
        kernel: K, `[MC, MC]`, data major and outputs minor, positive semi-definite; see `dense_kernel` for independent
            outputs.
        prior_mean: m, `[M, C]`.
        likelihood: p(y | f), log-concave.
        y: Targets of the M data.
        scale: 1/(σ²T), 0-dim or `[C]`.
        start: The dual a to begin at, `[M, C]`; zero, which is f = m, if None.
        tolerance: Newton decrement that counts as converged.
        max_steps: Newton steps.

    Raises:
        InvalidArgument: Shapes that do not belong together.
        InvalidData: Targets that the likelihood does not accept.
    """
    n = prior_mean.numel()
    if kernel.shape != (n, n):
        raise InvalidArgument(f"kernel has shape {list(kernel.shape)}; for a mean {list(prior_mean.shape)}: {[n, n]}.")
    m, scale = widened(prior_mean), widened(scale.detach())
    y = likelihood.check_targets(m, y)
    features = Features.of(kernel.view(*m.shape, *m.shape))
    data = KernelData(KernelBatch(m, y), (features,), float(likelihood.count(m, y)))
    model = LinearModel.standard(data, likelihood, scale, features.rank)
    begin = data.pull([torch.zeros_like(m) if start is None else widened(start)])

    def around(at: Tensor) -> KernelCovariance:
        return KernelCovariance.of(data, columns(model.hessians(at)[0]), scale)

    end = minimise(model, begin, around(begin).solve, tolerance=tolerance, max_steps=max_steps)
    f, (dual,), (factor,) = m + data.push(end.at)[0], data.duals(end.at), around(end.at).factors
    basis = features.inverse.flatten(0, 1)
    return FunctionMode(f, dual, basis, factor, -end.values[-1], len(end.values) - 1, end.distance, end.converged)
