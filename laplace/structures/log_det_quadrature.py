"""Log determinants by stochastic Lanczos quadrature (Ubaru, Chen and Saad, 2017), preconditioned.

With A = M^½ P M^½ close to the identity, log det P = −log det M + tr log A, and the trace is the mean of zᵀ log(A) z
over probes z with independent signs. The steps of conjugate gradients for P u = M^−½ z are those of Lanczos from z, so
that every quadratic form is ‖z‖² Σ_i τ_i² log θ_i, θ the eigenvalues of its tridiagonal matrix T and τ the first
entries of their eigenvectors. The same u gives the gradient (Hutchinson, 1990; Gardner et al., 2018): with y = M^½ z

    d log det P = E[uᵀ (dP) y],

of which the preconditioner's own share E[yᵀ (dM⁻¹) y] is known exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.core.conjugate_gradients import Solution


@dataclass(frozen=True, eq=False)
class TraceLog:
    """An estimate of tr log A.

    Attributes:
        value: 0-dim, float64.
        standard_error: Of the mean over probes, float64; NaN of one probe.
    """

    value: Tensor
    standard_error: Tensor

    @classmethod
    def of(cls, solutions: Sequence[Solution]) -> TraceLog:
        """From solutions of P u = M^−½ z for probes z, in blocks."""
        forms = torch.cat([_forms(solution) for solution in solutions])
        return cls(forms.mean(), forms.std() / len(forms) ** 0.5)


def _forms(solution: Solution) -> Tensor:
    """Quadratic forms zᵀ log(A) z of the probes of a block, `[R]`."""
    values, vectors = torch.linalg.eigh(solution.steps.tridiagonal())
    logs = values.clamp(min=torch.finfo(values.dtype).tiny).log()
    return solution.sizes.cpu() * (vectors[:, 0].square() * logs).sum(1)


def signs(n_probes: int, n_params: int, like: Tensor, seed: int) -> Tensor:
    """Probes z of independent signs, `[n, P]`, the same for every call with a seed."""
    generator = torch.Generator(device=like.device).manual_seed(seed)
    draws = torch.randint(2, (n_probes, n_params), generator=generator, device=like.device, dtype=torch.int8)
    return draws.to(like.dtype).mul_(2).sub_(1)
