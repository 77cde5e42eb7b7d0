"""Users' own losses in a fit: one that has no curvature, or that couples data, would leave the prior."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.core.memory import ran_out
from laplace.core.precision_policy import wide_dtype
from laplace.errors import CurvatureError, UnsupportedError
from laplace.likelihoods.base import Likelihood

_LIBRARY = __name__.split(".")[0]

_ALONE = 8
"""Data whose losses are also computed one by one."""

_SCALES = (0.1, 1.0, 10.0)
"""Distances, in units of the outputs, at which a loss is tried that had no curvature at the data."""

_TOGETHER = (
    "Data that are to depend on each other, as those of a risk set, are one datum with as many outputs: inputs "
    "[1, N, ...], outputs [1, N]."
)


class LossCheck:
    """A loss as the batches of a fit show it.

    Args:
        likelihood: The loss.
        curvature: What the curvature is made of: second derivatives (`"ggn"`), gradients (`"ef"`) or either.
    """

    def __init__(self, likelihood: Likelihood, curvature: str) -> None:
        self.likelihood = likelihood
        self.curvature = curvature
        self._last: tuple[Tensor, Tensor] | None = None
        self._curved = False

    @classmethod
    def for_likelihood(cls, likelihood: Likelihood, curvature: str) -> LossCheck | None:
        """That of a user's likelihood; None of the library's own."""
        return None if type(likelihood).__module__.split(".")[0] == _LIBRARY else cls(likelihood, curvature)

    def see(self, f: Tensor, y: Tensor) -> None:
        """Looks at outputs `[B, C]` with their checked targets, until there was some curvature."""
        if self._last is None:
            self._require_sum(f[:_ALONE], y[:_ALONE])
        if not self._curved:
            self._last, self._curved = (f, y), self._is_curved(f, y)

    def require_curved(self) -> None:
        """Refuses a loss without curvature, at the data and wherever else it was tried."""
        if self._curved or self._last is None:
            return
        f, y = self._last
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(f.shape, generator=generator, dtype=wide_dtype()).to(f)
        centres = [f, y.to(f)] if y.is_floating_point() and y.shape == f.shape else [f]
        for centre in centres:
            for scale in _SCALES:
                if self._is_curved(centre + scale * (1 + centre.abs()) * noise, y):
                    return
        derivative = "gradient" if self.curvature == "ef" else "second derivative"
        raise CurvatureError(
            f"the loss of likelihood={self.likelihood.name!r} has a {derivative} of exactly zero, at all data of the "
            "fit and at other outputs: the posterior would be the prior. A quantile or absolute loss has no curvature: "
            "take a smooth one, ((f - y)**2 + 0.01).sqrt() for |f - y|, or backend=NativeEF, a sum of outer products "
            f"of gradients. A loss that couples data, as Cox's, says nothing of one datum alone. {_TOGETHER}"
        )

    def _is_curved(self, f: Tensor, y: Tensor) -> bool:
        if self.curvature != "ef":
            hessian = self.likelihood.hessian(f, y)
            if bool((hessian.diag if hessian.dense is None else hessian.dense).ne(0).any()):
                return True
        return self.curvature != "ggn" and bool(self.likelihood.gradient(f, y).ne(0).any())

    def _require_sum(self, f: Tensor, y: Tensor) -> None:
        """Refuses a loss that is no sum over data, as far as few data tell."""
        try:
            alone = torch.stack([self.likelihood.loss_terms(f[b : b + 1], y[b : b + 1]) for b in range(len(f))])
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # a loss that wants several data
            if ran_out(error):
                raise
            return
        together = self.likelihood.loss_terms(f, y)
        allowed = torch.finfo(f.dtype).eps ** 0.5 * (1 + alone.abs().sum(0))
        if bool(((together - alone.sum(0)).abs() > allowed).any()):
            raise UnsupportedError(
                f"the loss of likelihood={self.likelihood.name!r} is no sum over data: {len(f)} data have a loss of "
                f"{together.sum().item():.6g} together, and of {alone.sum().item():.6g} one by one. loss_terms is a "
                f"sum, not a mean, over the batch. {_TOGETHER}"
            )
