"""Checks of a fit: arguments that are refused, and warnings of what it leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any

import torch
from torch import Tensor, distributed

from laplace.core import batch as batches
from laplace.core.content import Content
from laplace.core.memory import ran_out
from laplace.core.precision_policy import wide_dtype
from laplace.engines.engine import CurvatureEngine
from laplace.errors import ApproximationWarning, CurvatureError, DataWarning, UnsupportedError, warn
from laplace.likelihoods.base import Likelihood
from laplace.network.model_guard import reading
from laplace.structures.fit import Fit
from laplace.weights.problem import Problem

NO_DATA = "the loader gave no data, or all are ignored; a Laplace approximation needs at least one datum."

# A user's own loss: one that has no curvature, or that couples data, would leave the prior.

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
    def from_engine(cls, engine: CurvatureEngine) -> LossCheck | None:
        """That of an engine; None of the library's own."""
        likelihood = engine.likelihood
        if type(likelihood).__module__.split(".")[0] == _LIBRARY:
            return None
        return cls(likelihood, "ef" if engine.options.stochastic else engine.kind)

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


# Warnings of what a fit leaves out.

_ACCEPTED = 0.01
"""Share of the weights that may be held by a diagonal without a word."""

_NAMED = 3


def warn_of_diagonals(fit: Fit, problem: Problem) -> None:
    """Warns where more than 1 % of the weights have neither factors nor an exact block.

    Vectors that a rule explains (scales, shifts) do not count: a diagonal is their usual form.
    """
    sizes: dict[str, int] = {}
    for slot in (problem.slots[i] for i in fit.curvature.without_factors()):
        if len(slot.shape) >= 2 or "fallback" in fit.coverage.get(slot.name, "fallback"):
            sizes[slot.name] = slot.size
    share = sum(sizes.values()) / problem.layout.n_params
    if share <= _ACCEPTED:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])
    more = f" and {len(sizes) - _NAMED} more" if len(sizes) > _NAMED else ""
    warn(
        f"hessian_structure={fit.curvature.name!r}: {share:.1%} of the random weights have no Kronecker factors and "
        f"are stored as their exact diagonal, without correlations: {', '.join(map(repr, largest[:_NAMED]))}{more}. "
        "la.coverage() lists how each tensor was handled; laplace.curvature.rules.like(known, own) gives factors to a "
        "layer of your own that computes the same as a known one; hessian_structure='lowrank' needs no factors.",
        ApproximationWarning,
    )


def warn_of_dropped(loader: Iterable[Any]) -> None:
    """Warns of a loader that leaves out the last data of a pass."""
    sampler = getattr(loader, "batch_sampler", None)
    if not getattr(sampler, "drop_last", False):
        return
    try:
        left_out = len(sampler.sampler) % sampler.batch_size  # pyright: ignore[reportOptionalMemberAccess]
    except (AttributeError, TypeError):  # a sampler of a user's, or of a stream
        return
    if left_out:
        warn(
            f"the loader has drop_last=True, which leaves {left_out} of the data out of the fit, and of the evidence. "
            "Fit with DataLoader(dataset, batch_size=...) without it.",
            DataWarning,
        )


def warn_of_repeated(former: Content, new: Content) -> None:
    """Warns of data that are added to a fit which holds them already."""
    if former.holds(new):
        warn(
            "the data that are added by override=False were fitted before, and count twice now: the posterior is too "
            "narrow. fit(train_loader) without it begins anew; after la.forget(loader) data can be added again.",
            DataWarning,
        )


def warn_of_shards() -> None:
    """Warns in a process group of several ranks, over which fits are not summed."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    ranks = distributed.get_world_size()
    if ranks > 1:
        warn(
            f"this process is one of {ranks} in a group, and every process fits the data that its own loader gives: "
            "nothing is summed over processes. If its loader has a shard of them (DistributedSampler), posterior and "
            "evidence are those of the shard alone. To sum over processes pass group=torch.distributed.group.WORLD; "
            "otherwise give the loader all the data, or fit in one process.",
            ApproximationWarning,
        )


def number_of_data(loader: Iterable[Any], dict_key_y: str) -> int:
    """N of a loader, by its data set, or by reading it once (`InvalidArgument` if that is not possible)."""
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, Sized):
        return len(dataset)
    batches.require_rereadable(loader, "a fit by _curv_closure, which takes the number of all data, counts them first")
    return sum(len(batches.split(batch, dict_key_y)[1]) for batch in reading(loader))
