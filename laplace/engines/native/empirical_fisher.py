"""The empirical Fisher, a sum of outer products of gradients."""

from __future__ import annotations

from torch import Tensor

from laplace.engines.native.outer import OuterEngine


class EFEngine(OuterEngine):
    """Empirical Fisher Σ_b g_b g_bᵀ, g_b the gradient of the unit negative log likelihood of datum b.

    Of outputs with positions every one that counts is an observation: Σ_bt g_bt g_btᵀ.
    """

    kind = "ef"
    name = "NativeEF"

    def cotangents(self, f: Tensor, y: Tensor) -> Tensor:
        return self.likelihood.gradient(f.to(self.dtype), y).unsqueeze(0)

    def n_columns(self, f: Tensor) -> int:
        return 1
