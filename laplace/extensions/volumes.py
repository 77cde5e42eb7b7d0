"""Areas, volumes and counts with their uncertainty: sums over positions of a segmentation's probabilities.

A sum S = Σ_t w_t a·p(f_t) over positions t, of class probabilities p with numbers a for the classes and w for the
positions, is one function of the weights θ, so that to first order

    S ~ N(S(θ̂), G P⁻¹ Gᵀ),    G = ∂S/∂θ = Σ_t w_t aᵀ (∂p/∂f) J_t.

G is a gradient of one number: the positions are summed before the covariance is asked, and no matrix between positions
is formed. All positions share the weights, so that their errors add up, where independent ones would cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from laplace.core import batch as batches
from laplace.core.arguments import check_counts, checked
from laplace.core.batch import ForwardFn, Inputs, require_loader
from laplace.core.checks import require
from laplace.core.positions import in_users_layout, rows_of, unrolled
from laplace.core.precision_policy import widened
from laplace.curvature import NativeGGN
from laplace.engines.engine import CurvatureEngine
from laplace.errors import CalibrationWarning, InvalidArgument, InvalidData, UnsupportedError, warn
from laplace.extensions.asked import group_of
from laplace.extensions.drawn import DrawnFunction, draw
from laplace.likelihoods.base import Likelihood
from laplace.mixture.mixture import MixtureLaplace
from laplace.network.model_guard import autograd_mode
from laplace.parametric import ParametricLaplace
from laplace.posterior.posterior import Fitted, Posterior
from laplace.predictive.latent import gaussian_of, shifted
from laplace.predictive.prediction import mixed_moments

Of = int | Sequence[int] | Tensor | Callable[..., Tensor]
"""A class, several, numbers for the classes `[C]` or `[K, C]`, or a function of probabilities."""

_AT_ONCE = 8
"""Drawn functions whose outputs are held together."""

_ROUNDING = 1e-3
"""Share of a sum by which a function of probabilities that is linear may seem not to be, in float32."""


@dataclass(frozen=True, eq=False)
class Totals:
    """Sums over positions under a posterior.

    Attributes:
        mean: `[B]`, or `[B, K]` of several sums.
        covariance: Between the sums of a datum, `[B, K, K]`.
        of_network: Whether `la.calibrate` chose the network itself: standard deviations are then vanishing, and their
            ratios alone say something.
    """

    mean: Tensor
    covariance: Tensor
    of_network: bool = False

    @property
    def std(self) -> Tensor:
        """Standard deviations, in the shape of `mean`.

        Warns:
            CalibrationWarning: `la.calibrate` chose the network itself, of which they vanish.
        """
        if self.of_network:
            warn(
                "calibrate chose the network itself, whose sums have no width; give errors=standardised_errors(la, "
                "loader, of=...) of held-out data to interval, or undo it by la.calibration = None.",
                CalibrationWarning,
            )
        return self._roots()

    def _roots(self) -> Tensor:
        return self.covariance.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt().view_as(self.mean)

    def interval(self, level: float = 0.95, errors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Lower and upper ends for the true sums, in the shape of `mean`.

        Of a Gaussian, which is right where the network is wrong by its weights alone. With `errors` of N held-out data
        it is mean ± q std with q their ⌈(N + 1) level⌉-th smallest, split conformal prediction (Lei et al., 2018): it
        holds at least a share `level` of the sums of new data that are exchangeable with those. It is infinite where N
        is too small for the level.

        Args:
            level: Share of sums that the intervals are to hold, in (0, 1).
            errors: Those of `standardised_errors`, `[N]` or `[N, K]`.

        Raises:
            InvalidArgument: Another level, or errors of other sums.

        Warns:
            CalibrationWarning: `la.calibrate` chose the network itself, of which sums have no width without `errors`.
        """
        if isinstance(level, bool) or not 0 < level < 1:
            raise InvalidArgument(f"level={level!r}; the share of sums to hold, in (0, 1), is accepted.")
        if errors is None:
            half = self.std * math.sqrt(2) * torch.erfinv(self.mean.new_tensor(level))
        else:
            if errors.shape[1:] != self.mean.shape[1:] or not len(errors):
                raise InvalidArgument(
                    f"errors have shape {list(errors.shape)}, the means {list(self.mean.shape)}; give "
                    "standardised_errors(la, loader, of=...) of the same sums."
                )
            rank = math.ceil((len(errors) + 1) * level)
            factor = errors.sort(0).values[rank - 1] if rank <= len(errors) else torch.inf
            half = self._roots() * factor
        return self.mean - half, self.mean + half


@dataclass(eq=False)
class _Sums:
    """What is summed: a function of outputs, `[B, *positions, C]`, and of numbers for the positions."""

    of: Of
    likelihood: Likelihood
    channel_dim: int
    checks: bool  # Whether a function must be linear
    single: bool = False  # Whether sums are `[B]`; known after the first

    def of_outputs(self, f: Tensor, weights: Tensor | None) -> Tensor:
        """Sums `[B, K]` of outputs."""
        return self.of_means(self.likelihood.inverse_link(f), weights)

    def of_means(self, p: Tensor, weights: Tensor | None) -> Tensor:
        """Sums `[B, K]` of means of targets, probabilities of classes, `[B, *positions, C]`.

        Raises:
            InvalidData: Numbers for other positions than those of the outputs.
            InvalidArgument: `of` has other classes, or is a function that is not linear.
        """
        if weights is not None and weights.shape != p.shape[:-1]:
            raise InvalidData(
                f"weights have shape {list(weights.shape)}; a number for every position is accepted, "
                f"{list(p.shape[:-1])}, or one for all."
            )
        if not callable(self.of) or isinstance(self.of, Tensor):
            numbers = self._numbers(p)
            if weights is not None:
                p = p * weights.unsqueeze(-1).to(p)
            return p.reshape(len(p), -1, p.shape[-1]).sum(1) @ numbers.T
        if self.checks:
            self._require_linear(p, weights)
        return self._called(p, weights)

    def _numbers(self, p: Tensor) -> Tensor:
        """Numbers for the classes, `[K, C]`."""
        n_classes, of = p.shape[-1], cast("Any", self.of)
        if isinstance(of, Tensor) and of.is_floating_point():
            self.single = of.ndim == 1
            if of.ndim not in (1, 2) or of.shape[-1] != n_classes:
                raise InvalidArgument(
                    f"of= has shape {list(of.shape)}; numbers for the {n_classes} classes, [{n_classes}], or of "
                    f"several sums [K, {n_classes}], are accepted."
                )
            return of.reshape(-1, n_classes).to(p)
        index = torch.as_tensor(of, device=p.device)
        self.single = index.ndim == 0
        whole = not (index.is_floating_point() or index.dtype == torch.bool) and index.ndim < 2 and index.numel() > 0
        if not whole or not bool(((index >= 0) & (index < n_classes)).all()):
            raise InvalidArgument(f"of={of!r}; a class from 0 to {n_classes - 1}, or several, is accepted.")
        return torch.eye(n_classes, dtype=p.dtype, device=p.device)[index.reshape(-1)]

    def _called(self, p: Tensor, weights: Tensor | None) -> Tensor:
        """Sums of a function that the user gave, `[B, K]`."""
        shown = in_users_layout(p, self.channel_dim)
        found: Any = self.of(shown) if weights is None else self.of(shown, weights)  # pyright: ignore
        if not isinstance(found, Tensor) or found.ndim not in (1, 2) or len(found) != len(p):
            what = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise InvalidArgument(f"of={_name(self.of)} returns {what}; one sum for every datum, [B], or [B, K].")
        self.single = found.ndim == 1
        return found.reshape(len(p), -1)

    def _require_linear(self, p: Tensor, weights: Tensor | None) -> None:
        """Refuses a function that is not affine between these means and others."""
        self.checks = False
        with torch.no_grad():
            p = p.detach()
            other = 0.1 * torch.rand(p.shape, generator=torch.Generator().manual_seed(0)).to(p)  # a ratio bends there
            ends = torch.stack([self._called(p, weights), self._called(other, weights)])
            middle = self._called((p + other) / 2, weights)
            off = (middle - ends.mean(0)).abs().amax() / ends.abs().amax().clamp(min=torch.finfo(p.dtype).tiny)
        if not off <= _ROUNDING:
            raise InvalidArgument(
                f"of={_name(self.of)} is not linear in the probabilities: between two maps it is off by "
                f"{float(off):.1%}. Give a class, numbers for the classes or a linear function; or n_samples=200, by "
                "which the mean and the spread of any function are those of drawn functions."
            )


def _name(of: Any) -> str:
    return getattr(of, "__name__", type(of).__name__)


@checked
def totals(
    la: ParametricLaplace | MixtureLaplace,
    x: Inputs,
    *,
    of: Of,
    weights: Tensor | float = 1.0,
    n_samples: int | None = None,
    generator: torch.Generator | None = None,
) -> Totals:
    """Mean and covariance of sums over positions of a network's class probabilities: areas, volumes, counts.

    All positions share the weights of the network, so that their errors are correlated: the sums are functions of the
    weights, linearised as a whole. That costs a forward pass and the gradients of the sums, of a last layer by its
    inputs alone. The mean is that of the network (or of the refined mean). With `n_samples` both are those of functions
    drawn from the posterior, which is right also where probabilities bend within its width, and for any function.
    A width that follows the input, of `calibrate`, is none of weights, and is left out.

    Of other likelihoods the means of targets are summed, such as counts of a `"poisson"` regression.

    Args:
        la: A fitted posterior or mixture.
        x: Inputs of B data.
        of: A class; several; numbers for the classes, `[C]`, or `[K, C]` of several sums; or a function of the
            probabilities in the network's layout, e.g. `[B, C, H, W]`, and of `weights` where these are given, that
            returns `[B]` or `[B, K]`. It may be asked for some of the data at a time.
        weights: A number for every position, `[B, *positions]`: 0 where padding or an ignored label is, 1 elsewhere, or
            the volume of a voxel; or one number for all.
        n_samples: Number of drawn functions, at least 2; None for the linearised sums.
        generator: Random generator of these functions.

    Raises:
        NotFittedError: Before `fit`.
        InvalidArgument: `of` is no class, or a function that is not linear, without `n_samples`.
        InvalidData: `weights` of other positions, or that are not finite.
        ModelChangedError: The network was trained further after `fit`.
        UnsupportedError: With `n_samples`, a network that cannot be copied, or a posterior without weights.
    """
    if n_samples is not None:
        check_counts(2, n_samples=n_samples)
    return _totals(la, x, of, _checked_weights(weights), n_samples, generator)


def _totals(
    la: ParametricLaplace | MixtureLaplace, x: Inputs, of: Of, weights: Tensor | float, n_samples: int | None,
    generator: torch.Generator | None,
) -> Totals:  # fmt: skip
    posteriors = group_of(la).posteriors
    sums = [_Sums(of, one.likelihood, one.channel_dim, checks=n_samples is None) for one in posteriors]
    with autograd_mode(), torch.no_grad():
        if n_samples is not None:
            mean, covariance = _drawn(la, x, sums[0], weights, n_samples, generator)
        else:
            moments = [
                _linearised(one.predictive(), x, each, weights) for one, each in zip(posteriors, sums, strict=True)
            ]
            mixed = isinstance(la, MixtureLaplace)
            mean, covariance = mixed_moments(moments, la.weights) if mixed else moments[0]
    of_network = all(one.calibration is not None and one.calibration.is_network for one in posteriors)
    return Totals(mean[:, 0] if sums[0].single else mean, covariance, of_network)


def _linearised(posterior: Posterior, x: Inputs, sums: _Sums, weights: Tensor | float) -> tuple[Tensor, Tensor]:
    """Sums `[B, K]` and their covariance `[B, K, K]`, of the linearised network whose outputs they are."""
    posterior.check_unchanged()
    summed, engine = _engine(posterior, sums, weights if isinstance(weights, float) else None)
    inputs = batches.to_device(_beside(x, weights) if isinstance(weights, Tensor) else x, posterior.problem.device)
    pieces = shifted(engine.jacobian(inputs), posterior.refined_step)
    found = gaussian_of(pieces, posterior.precision(), "full")
    sums.single = summed.sums.single
    return found.mean, found.covariance


_LAST: WeakKeyDictionary[Fitted, tuple[_Summed, CurvatureEngine]] = WeakKeyDictionary()
"""The last engine of every fit: it proves its rules once, which takes passes of its own."""


def _engine(posterior: Posterior, sums: _Sums, weight: float | None) -> tuple[_Summed, CurvatureEngine]:
    """The engine of a network's sums, and what it sums; the last one where they are the same."""
    data, problem = posterior.require_fitted(), posterior.problem
    summed = _Summed(problem.forward_fn or batches.call, sums, weight)
    last = _LAST.get(data)
    if last is None or not last[0].is_like(summed):
        engine = NativeGGN.engine_for(replace(problem, forward_fn=summed), posterior.likelihood, {})
        _LAST[data] = last = summed, engine
    return last


@dataclass(frozen=True, eq=False)
class _Summed:
    """The way of calling a network for its sums, `[B, K]`."""

    call: ForwardFn
    sums: _Sums
    weight: float | None  # of all positions; None where the inputs have numbers for each

    def __call__(self, model: nn.Module, inputs: Inputs) -> Tensor:
        x, weights = (inputs, None) if self.weight is not None else _apart(inputs)
        found = self.sums.of_outputs(batches.latent(self.call(model, x)), weights)
        return found if self.weight is None else found * self.weight

    def is_like(self, other: _Summed) -> bool:
        """Whether these are the sums of another; functions are asked anew, as they may have changed."""
        a, b = self.sums.of, other.sums.of
        same = a is b if isinstance(a, Tensor) else not callable(a) and repr(a) == repr(b)
        return same and self.weight == other.weight and self.sums.channel_dim == other.sums.channel_dim


_WEIGHTS = "weights of positions"
"""Key of the numbers for positions beside the inputs, so that they are split with them."""


def _beside(x: Inputs, weights: Tensor) -> Inputs:
    if isinstance(x, Mapping):
        return {**x, _WEIGHTS: weights}
    if isinstance(x, Tensor | tuple):
        return (*(x if isinstance(x, tuple) else (x,)), weights)
    raise UnsupportedError(
        f"weights of positions with inputs of type {type(x).__name__}; a tensor, a tuple or a mapping is accepted."
    )


def _apart(inputs: Inputs) -> tuple[Inputs, Tensor]:
    if isinstance(inputs, Mapping):
        return {key: part for key, part in inputs.items() if key != _WEIGHTS}, inputs[_WEIGHTS]
    return (inputs[0] if len(inputs) == 2 else inputs[:-1]), inputs[-1]


def _drawn(
    la: ParametricLaplace | MixtureLaplace, x: Inputs, sums: _Sums, weights: Tensor | float, n: int,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mean and covariance of the sums over functions drawn from the posterior."""
    functions = draw(la, n, generator=generator)
    numbers, factor = (weights, 1.0) if isinstance(weights, Tensor) else (None, weights)
    found: list[Tensor] = []
    for start in range(0, n, _AT_ONCE):
        f = DrawnFunction.stacked(functions[start : start + _AT_ONCE], x)
        rows = rows_of(f, sums.channel_dim, 1)
        found += [sums.of_outputs(unrolled(one, rows.positions), numbers) for one in rows.values]
    samples = widened(torch.stack(found)) * factor
    steps = samples - samples.mean(0)
    return samples.mean(0).to(found[0]), (torch.einsum("sbk,sbl->bkl", steps, steps) / (n - 1)).to(found[0])


def _checked_weights(weights: Any) -> Tensor | float:
    """Numbers for positions, or one for all, as they are summed."""
    is_tensor = isinstance(weights, Tensor) and weights.ndim > 0
    if not isinstance(weights, Tensor | int | float) or (isinstance(weights, Tensor) and weights.is_complex()):
        raise InvalidArgument(
            f"weights is a {type(weights).__name__}; a tensor [B, *positions] or a number is accepted."
        )
    given = weights if isinstance(weights, Tensor) else torch.tensor(float(weights))
    require(
        given.isfinite(), lambda: InvalidData("weights of positions are NaN or infinite; 0 is a position left out.")
    )
    return weights if is_tensor else float(weights)


@checked
def standardised_errors(
    la: ParametricLaplace | MixtureLaplace,
    loader: Iterable[tuple[Inputs, Tensor]],
    *,
    of: Of,
    weights: float = 1.0,
    n_samples: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """|S − mean| / std of the sums of held-out data, `[N]` or `[N, K]`, by which `Totals.interval` is scaled.

    `la.calibrate` chooses a width for single positions; whether errors of positions add up within an input it does not
    see, so sums need a scale of their own.

    Args:
        la: A fitted posterior or mixture.
        loader: Batches of inputs and labels, or values, of every position, which had no part in the training. Their
            sizes may differ. Labels that are ignored, and NaN, are in no sum.
        of: As of `totals`.
        weights: One number for all positions, the volume of a voxel.
        n_samples: As of `totals`.
        generator: As of `totals`.

    Raises:
        NotFittedError: Before `fit`.
        InvalidArgument: As of `totals`.
        InvalidData: No data, or a sum whose standard deviation is zero.
    """
    require_loader(loader, "loader")
    first = group_of(la).first
    likelihood, channel_dim, n_outputs = first.likelihood, first.channel_dim, first.fit.n_outputs
    found: list[Tensor] = []
    for x, y in loader:
        values, counts = _as_means(y, likelihood, channel_dim, n_outputs)
        numbers = counts.to(torch.get_default_dtype()) * weights
        got = _totals(la, x, of, numbers, n_samples, generator)
        sums = _Sums(of, likelihood, channel_dim, checks=False)
        truth = sums.of_means(values.to(got.mean), numbers.to(got.mean))
        found.append(((truth.view_as(got.mean) - got.mean) / got._roots()).abs())
    if not found:
        raise InvalidData("loader holds no data; give batches of inputs and labels.")
    errors = torch.cat(found)
    require(errors.isfinite(), lambda: InvalidData("a sum of held-out data has a standard deviation of zero."))
    return errors


def _as_means(y: Tensor, likelihood: Likelihood, channel_dim: int, n_outputs: int) -> tuple[Tensor, Tensor]:
    """Targets as certain means, `[B, *positions, C]`, and 1 where they count, `[B, *positions]`."""
    if likelihood.class_targets and not y.is_floating_point():
        counts = torch.ones_like(y, dtype=torch.bool)
        if likelihood.ignore_index is not None:
            counts = ~batches.is_ignored(y, likelihood.ignore_index)
        return one_hot(y.long() * counts, n_outputs), counts
    rows = rows_of(y, channel_dim)
    values = unrolled(rows.values, rows.positions)
    return values.nan_to_num(), ~values.isnan().any(-1)
