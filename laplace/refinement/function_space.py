"""The mode of a Gaussian process under any log-concave likelihood: refinement in function space.

Newton's method for Ψ(f) = log p(y | f) − ½ (f − m)ᵀ K⁻¹ (f − m) (Rasmussen and Williams, 2006, chapter 3), with several
outputs, a prior mean m, and no inverse of K, which may be singular.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from laplace.core.precision_policy import widened
from laplace.errors import InvalidArgument
from laplace.likelihoods.base import Likelihood
from laplace.refinement.newton import backtracked


@dataclass(frozen=True, eq=False)
class FunctionMode:
    """The mode at M data and the Gaussian around it; predictions need nothing else.

    Attributes:
        f: The mode f̂, `[M, C]`.
        dual: a with f̂ = m + K a, `[M, C]`: the mean elsewhere is m(x) + k(x, X) a.
        root: S with S Sᵀ = Λ(f̂) / (σ²T), `[MC, R]`.
        factor: Cholesky factor of I + Sᵀ K S, `[R, R]`.
        value: Ψ(f̂), without the normaliser of the likelihood.
        steps: Newton steps.
        distance: Newton decrement at the end: about how far Ψ is from its maximum is half its square.
        converged: Whether that is within the tolerance.
    """

    f: Tensor
    dual: Tensor
    root: Tensor
    factor: Tensor
    value: float
    steps: int
    distance: float
    converged: bool

    @property
    def half_logdet(self) -> Tensor:
        """½ log det(I + Sᵀ K S), 0-dim: log p(y) ≈ Ψ(f̂) − this + the likelihood's normaliser."""
        return self.factor.diagonal().log().sum()

    def mean(self, prior_mean: Tensor, cross: Tensor) -> Tensor:
        """Mean at B other data, `[B, C]`.

        Args:
            prior_mean: m there, `[B, C]`.
            cross: k(x, X), `[BC, MC]`, data major.
        """
        return prior_mean + (cross @ self.dual.flatten()).view_as(prior_mean)

    def covariance(self, prior: Tensor, cross: Tensor) -> Tensor:
        """K_** − K_*X S (I + Sᵀ K S)⁻¹ Sᵀ K_X*, `[..., BC, BC]` of the prior's shape.

        Args:
            prior: K_**, `[BC, BC]`.
            cross: k(x, X), `[BC, MC]`.
        """
        gain = torch.linalg.solve_triangular(self.factor, (cross @ self.root).mT, upper=False)
        return prior - gain.mT @ gain


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
    K, m, scale = widened(kernel), widened(prior_mean), widened(scale.detach())
    y = likelihood.check_targets(m, y)
    dual = torch.zeros_like(m) if start is None else widened(start)

    def evaluated(a: Tensor) -> tuple[Tensor, float]:
        shift = (K @ a.flatten()).view_as(m)
        loss = float((scale * likelihood.loss_terms(m + shift, y)).sum())
        return m + shift, -loss - 0.5 * float((a * shift).sum())

    def lowered(a: Tensor, along: Tensor, step: float) -> tuple[tuple[Tensor, Tensor], float]:
        reached, objective = evaluated(a + step * along)
        return (a + step * along, reached), -objective

    f, value = evaluated(dual)
    steps, distance = 0, float("inf")
    root, factor = _curved(K, likelihood, f, y, scale)
    for steps in range(max_steps + 1):
        # With g the gradient of −log p(y | f), the gradient of −Ψ in a is K (g + a).
        slack = scale * likelihood.gradient(f, y) + dual
        direction = -_woodbury(K, root, factor, slack.flatten()).view_as(dual)
        decrease = float(slack.flatten() @ (K @ direction.flatten()))
        distance = max(0.0, -decrease) ** 0.5
        if distance <= tolerance or steps == max_steps:
            break
        attempt = backtracked(partial(lowered, dual, direction), -value, decrease)
        if attempt is None:
            break
        (dual, f), value = attempt[0], -attempt[1]
        root, factor = _curved(K, likelihood, f, y, scale)
    return FunctionMode(f, dual, root, factor, value, steps, distance, distance <= tolerance)


def _curved(kernel: Tensor, likelihood: Likelihood, f: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """S `[MC, MC]` and the Cholesky factor of I + Sᵀ K S."""
    columns = likelihood.hessian(f, y).root() * scale.sqrt()  # [R, M, C]
    r, n, c = columns.shape
    data = torch.arange(n, device=f.device)
    root = f.new_zeros(n, c, n, r)
    root[data, :, data] = columns.permute(1, 2, 0)
    root = root.reshape(n * c, n * r)
    identity = torch.eye(n * r, dtype=f.dtype, device=f.device)
    return root, torch.linalg.cholesky(identity + root.mT @ kernel @ root)


def _woodbury(kernel: Tensor, root: Tensor, factor: Tensor, vector: Tensor) -> Tensor:
    """(I + Λ K)⁻¹ v = v − S (I + Sᵀ K S)⁻¹ Sᵀ K v."""
    inner = torch.cholesky_solve((root.mT @ (kernel @ vector)).unsqueeze(1), factor).squeeze(1)
    return vector - root @ inner
