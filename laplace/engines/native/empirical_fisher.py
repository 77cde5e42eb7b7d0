"""The empirical Fisher, a sum of outer products of gradients."""

from __future__ import annotations

from torch import Tensor

from laplace.engines.native.outer import OuterEngine
from laplace.likelihoods.observed import Observed
from laplace.likelihoods.output_hessian import OutputHessian


class EFEngine(OuterEngine):
    """Empirical Fisher Σ_b w_b g_b g_bᵀ, g_b the gradient of the unit negative log likelihood of datum b.

    Of outputs with positions every one that counts is an observation: Σ_bt g_bt g_btᵀ. Weights w are those of data that
    are repeated, so that they enter once, not by the square as the gradients of the weighted loss have them.
    """

    kind = "ef"
    name = "NativeEF"

    def cotangents(self, f: Tensor, targets: Observed, hessian: OutputHessian | None = None) -> Tensor:
        del hessian  # gradients of the loss alone
        return targets.gradients(f.to(self.dtype)).unsqueeze(0)

    def n_columns(self, f: Tensor) -> int:
        return 1
