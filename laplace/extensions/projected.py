"""Sampled weights that keep the fit: samples of the prior, projected onto what the training data do not see.

Weights θ* + v with J v = 0 for the Jacobian J of the training outputs leave these, to first order, as they are (Miani
et al., 2025). With w = δ^½ v a sample w ~ N(0, I) is projected onto the kernel of R = J δ^(−½) by alternating
projections over batches b (Kaczmarz), w ← w − R_bᵀ (R_b R_bᵀ)⁺ R_b w, which need J for one batch at a time. After every
sweep Q the line t Q w + (1 − t) w is searched for the projection, t = w·(w − Q w) / ‖w − Q w‖² (Gearhart and Koshy,
1989).
With N·C ≥ P outputs that kernel may be {0}; that of the loss, one row gᵀJ per input, has more room.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from laplace.core import eigen
from laplace.core.arguments import check_counts, checked
from laplace.core.batch import Inputs, require_loader
from laplace.core.positions import require_none
from laplace.core.precision_policy import widened
from laplace.core.progress import DataBar
from laplace.core.random_numbers import check_generator, standard_normal
from laplace.engines.at_weights import outputs_of_weights
from laplace.errors import ApproximationWarning, InvalidArgument, InvalidData, UnsupportedError, warn
from laplace.extensions.asked import Asked, posterior_of
from laplace.jacobian.jacobian import Jacobian
from laplace.network import next_token
from laplace.network.model_guard import autograd_mode, same_random_state
from laplace.posterior.posterior import Posterior
from laplace.predictive.sampled import finite

KernelOf = Literal["outputs", "loss"]

_KEPT_BYTES = 2**29
"""Bytes of rows that are kept from one sweep to the next; beyond it they are computed anew in each."""

_NOTHING = 1e-4
"""Share of the squared norm below which nothing of a sample is left."""


@dataclass(frozen=True, eq=False)
class Projected:
    """Networks sampled around the trained one that fit the training data as it does: see `laplace.projected`.

    Calling it gives the mean prediction of the networks.

    Attributes:
        weights: Sampled weights θ* + v, `[S, P]`.
        kept: Share of the squared norm of δ^½ v that was left of every sample, `[S]`: (P − rank)/P on average.
        residual: ‖R w‖ after the last sweep over that before the first, `[S]`: 0 is the kernel itself.
        n_sweeps: Passes over the data.
    """

    weights: Tensor
    kept: Tensor
    residual: Tensor
    n_sweeps: int
    _posterior: Posterior

    def outputs(self, x: Inputs) -> Tensor:
        """Outputs of the sampled networks, `[S, B, C]`.

        Raises:
            ModelChangedError: The network changed since the fit.
        """
        posterior = self._posterior
        posterior.check_unchanged()
        with autograd_mode(), torch.no_grad():
            return finite(outputs_of_weights(posterior.engine, posterior.expansion_point, x, {})(self.weights))

    def __call__(self, x: Inputs) -> Tensor | tuple[Tensor, Tensor]:
        """Mean of the networks' predictions, `[B, C]`; of a regression mean and variance of f, `[B, C]` each."""
        f, likelihood = self.outputs(x), self._posterior.likelihood
        if likelihood.latent_prediction:
            return f.mean(0), f.var(0, correction=0)
        return torch.stack([likelihood.inverse_link(sample) for sample in f]).mean(0)

    def __repr__(self) -> str:
        """Number of samples, and how well they keep the fit."""
        return (
            f"Projected({len(self.weights)} samples, kept={float(self.kept.mean()):.3g} of the norm, "
            f"residual={float(self.residual.max()):.2g} after {self.n_sweeps} sweeps)"
        )


@checked
def projected(
    la: Asked,
    train_loader: Iterable[Any],
    n_samples: int = 30,
    *,
    kernel: KernelOf = "outputs",
    max_sweeps: int = 500,
    tolerance: float = 0.01,
    generator: torch.Generator | None = None,
    progress_bar: bool = False,
) -> Projected:
    """Networks sampled around the trained one that fit the training data as it does (Miani et al., 2025).

    Samples of the prior are projected onto the weights in whose direction no output of the training data changes,
    to first order, by alternating projections over its batches. Samples of a Laplace approximation of a network,
    as `pred_type="nn"` has them, underfit; these do not, and differ where there were no data.

    Args:
        la: A fitted posterior.
        train_loader: The training data, read several times. Larger batches take fewer sweeps and more memory.
        n_samples: Number S of networks.
        kernel: `"outputs"`, or `"loss"`: only the loss of every input stays, which leaves more room where there are
            more outputs than weights, and keeps less of the fit.
        max_sweeps: Largest number of passes.
        tolerance: Change of the outputs, relative to that without projection, at which to stop.
        generator: Random generator of the samples.
        progress_bar: Show a progress bar.

    Returns:
        The networks: call it for their mean prediction; `.weights` `[S, P]`, `.kept`, `.residual`.

    Raises:
        NotFittedError: Before `fit`.
        InvalidArgument: Numbers that are none, another kernel, or a loader that can be read only once.
        InvalidData: No data.
        UnsupportedError: Outputs with positions, or a backend that computes no Jacobians.

    Warns:
        ApproximationWarning: Nothing is left of the samples, or the tolerance was not reached.
    """
    posterior = posterior_of(la)
    return _projected(
        posterior, train_loader, n_samples, kernel, max_sweeps, tolerance, generator, progress_bar=progress_bar
    )


def _projected(
    posterior: Posterior, loader: Iterable[Any], n_samples: int, kernel: str, max_sweeps: int, tolerance: float,
    generator: torch.Generator | None, *, progress_bar: bool = False,
) -> Projected:  # fmt: skip
    """Samples of the prior projected onto the kernel of the data's Jacobian; arguments: see `laplace.projected`."""
    check_counts(n_samples=n_samples, max_sweeps=max_sweeps)
    check_generator(generator)
    if kernel not in ("outputs", "loss"):
        raise InvalidArgument(f"kernel={kernel!r}; accepted are 'outputs' and 'loss'.")
    if not (isinstance(tolerance, Real) and 0 < tolerance < 1):
        raise InvalidArgument(f"tolerance={tolerance!r}; it must lie in (0, 1).")
    posterior.require_fitted()
    if posterior.problem.processes is not None:
        raise UnsupportedError("projected with a network that is spread over processes; use one whole network.")
    with autograd_mode(), torch.no_grad(), same_random_state(posterior.model):
        posterior.check_unchanged()
        centre = posterior.expansion_point
        deviations = posterior.prior.diagonal().detach().rsqrt()
        rows = _ScaledRows(posterior, loader, kernel == "loss", deviations)
        start = widened(standard_normal((n_samples, len(centre)), centre, generator))
        w, n_sweeps = start, 0
        first = last = start.new_zeros(n_samples)
        bar = DataBar("project", range(max_sweeps), shown=progress_bar)
        for n_sweeps in range(1, max_sweeps + 1):
            swept, seen = rows.swept(w)
            first, last = seen if n_sweeps == 1 else first, seen
            if bool((seen <= tolerance * first).all()):
                break
            step = w - swept
            size = step.square().sum(1, keepdim=True)
            along = torch.where(size > 0, (w * step).sum(1, keepdim=True) / size, 1.0)
            w = w - along * step
            bar.add(1)
        bar.close()
        norm = start.square().sum(1)
        kept = w.square().sum(1) / norm
        residual = torch.where(first > 0, last / first, 0.0)
    _warn_of_rest(float(residual.max()), float(kept.mean()), tolerance, kernel, n_sweeps)
    return Projected(centre + (deviations * w).to(centre), kept, residual, n_sweeps, posterior)


def _warn_of_rest(residual: float, kept: float, tolerance: float, kernel: str, n_sweeps: int) -> None:
    if kept < _NOTHING:
        other = "kernel='loss', which has one row per input" if kernel == "outputs" else "fewer data"
        warn(
            f"nothing is left of the samples (a share of {kept:.1g} of their squared norm): the data determine all "
            f"weights to first order. Give {other}.",
            ApproximationWarning,
        )
    elif residual > tolerance:
        warn(
            f"the projection reached a residual of {residual:.2g}, not {tolerance:.2g}, in {n_sweeps} sweeps; give a "
            "larger max_sweeps, or larger batches.",
            ApproximationWarning,
        )


class _ScaledRows:
    """Rows R_b of all batches, in units of prior standard deviations, with inverses of their Gram matrices; float64."""

    def __init__(self, posterior: Posterior, loader: Iterable[Any], of_loss: bool, deviations: Tensor) -> None:
        require_loader(loader, "train_loader")
        self.posterior, self.loader, self.of_loss, self.deviations = posterior, loader, of_loss, deviations
        self._kept: list[Tensor] | None = None
        self._inverses: list[Tensor] = []
        kept: list[Tensor] = []
        n_bytes = 0
        for rows in self._computed():
            self._inverses.append(self._inverse(rows))
            n_bytes += rows.numel() * rows.element_size()
            if n_bytes <= _KEPT_BYTES:
                kept.append(rows)
        if not self._inverses:
            raise InvalidData("the loader gave no data, or all are ignored.")
        if n_bytes <= _KEPT_BYTES:
            self._kept = kept
        elif iter(loader) is loader:
            raise InvalidArgument("the loader can be read only once, and its Jacobians do not fit into memory at once.")

    def swept(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors `[S, P]` after the projection of every batch in turn, and the norms of R w met on the way, `[S]`."""
        squares = w.new_zeros(len(w))
        for number, rows in enumerate(self._kept or self._computed()):
            # A loader may give other batches every time: what is not kept is inverted anew.
            inverse = self._inverses[number] if self._kept else self._inverse(rows)
            along = w @ rows.T
            squares += along.square().sum(1)
            w = w - (along @ inverse) @ rows
        return w, squares.sqrt()

    def _inverse(self, rows: Tensor) -> Tensor:
        """(R Rᵀ)⁺, without directions that are rounding."""
        values, vectors = eigen.eigh(rows @ rows.T)
        rounding = max(torch.finfo(self.deviations.dtype).eps ** 2, torch.finfo(rows.dtype).eps)
        floor = values[-1].clamp(min=0) * len(values) * rounding
        return (vectors * torch.where(values > floor, 1 / values, 0.0)) @ vectors.T

    def _computed(self) -> Iterator[Tensor]:
        posterior, key = self.posterior, self.posterior.choices.dict_key_y
        engine, problem, likelihood = posterior.engine, posterior.problem, posterior.likelihood
        for _, x, y in next_token.read(self.loader, key, problem.device, engine.target_rules, problem.module):
            done = 0
            with closing(engine.jacobian(x)) as parts:
                for jacobian, f in parts:
                    require_none(jacobian.positions, "laplace.projected", "Use la.sample, or la(x, pred_type='nn')")
                    targets = engine.checked(f, y[done : done + len(f)])
                    done += len(f)
                    gradient = widened(likelihood.gradient(f, targets)) if self.of_loss else None
                    yield from self._of_part(jacobian, gradient)

    def _of_part(self, jacobian: Jacobian, gradient: Tensor | None) -> Iterator[Tensor]:
        """Rows of a few inputs: of all outputs, or of the loss."""
        start = 0
        for piece in jacobian.pieces():
            part = slice(start, start + len(piece))
            start += len(piece)
            own = widened(piece) * widened(self.deviations)
            yield own.flatten(0, 1) if gradient is None else (gradient[part].unsqueeze(1) @ own).squeeze(1)
