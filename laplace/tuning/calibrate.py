"""Calibration on held-out data: among posteriors with scaled covariances, and the network itself, the one that is safe.

Candidates are prior precisions δ around the present one, scales c of the covariance Σ(δ), and in regression noises σ.
The network runs once over the held-out data, with its Jacobians; Σ is computed once per δ, and every c only scales it.
In regression Σ is that at the noise which suits the network best, which a forward pass finds before.

What decides is the mean difference of the negative log predictive density from the network's, plus `caution(n)` paired
standard errors: few data, or a small gain, choose the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.arguments import check_counts
from laplace.core.batch import Inputs
from laplace.core.checks import named
from laplace.core.hyperparameters import Hyperparameters
from laplace.core.overrides import POSTERIOR, PREDICTIONS
from laplace.core.precision_policy import wide_dtype, widened
from laplace.engines.layer_inputs import Noted, in_rows, layer_inputs
from laplace.enums import LinkApprox, PredType
from laplace.errors import CalibrationWarning, CurvatureError, InvalidArgument, InvalidData, UnsupportedError, warn
from laplace.likelihoods.base import Likelihood
from laplace.network.model_guard import autograd_mode
from laplace.posterior.calibration import Calibration
from laplace.posterior.noise import noise_like, unlike_squares
from laplace.posterior.posterior import Posterior
from laplace.posterior.tilt import Leverage, Tilt
from laplace.predictive.prediction import average, mixed
from laplace.refinement.leave_one_out import LeaveOneOut, computed
from laplace.tuning import tilting
from laplace.tuning.candidates import Candidates, MixedCandidates, Predictive
from laplace.tuning.group import PosteriorGroup
from laplace.tuning.held_out import held_out_part, refits_of_head
from laplace.tuning.losses import Prediction, Targets, Validation, find_score, warn_if_worse_than_chance
from laplace.weights.last_layer import LastLayer

Latents = tuple[Tensor, Callable[[slice], Tensor | None], tuple[int, ...]]
"""Means `[R, C]`, (co)variances of some candidates, None where these do not exist, and the positions of the rows."""

FEW = 20
"""Number of held-out data below which a calibration is announced as doubtful."""

_FACTORS = (0.1, 1.0, 10.0, 100.0, 1000.0)
"""Factors of the present prior precision that are tried."""

_SCALES = tuple(10 ** (k / 2) for k in range(-8, 1))
"""Scales of the covariance that are tried, besides 0."""

_NOISES = (*(2 ** (k / 4) for k in range(-24, -4)), *(2 ** (k / 8) for k in range(-8, 9)))
"""Noises that are tried, relative to the root mean square of the network's residuals: from 1/64 of it to twice it."""

LEAST_GAIN = 0.001
"""Nats that a candidate must gain: posteriors that hardly differ from the network are as often worse as better."""

WORTH = 0.005
"""Nats on held-out data that a width that follows the input may cost beside none, for what it does under shift."""

_AT_ONCE = 2**18
"""Variances that are scored by one operation."""

_SAME = 1e-6
"""Nats within which candidates are the same but for rounding: the first of them is taken, whatever the processor."""


def caution(n_data: int) -> float:
    """Number of paired standard errors that count against a candidate: ½ + 4/√n.

    Chosen on 640 runs with 16 sets (docs/quality.md): with a whole standard error no single input can decide, with
    many data half of one keeps most of the gain.
    """
    return 0.5 + 4 / math.sqrt(n_data)


@dataclass(frozen=True)
class Fold:
    """Posteriors, one or those of a mixture, that were fitted without some data, and these data."""

    group: PosteriorGroup
    data: Validation


@dataclass(frozen=True)
class LeaveOneOutFold:
    """A posterior, and what it would say of every input of its fit without that input."""

    group: PosteriorGroup
    found: LeaveOneOut
    data: list[Any]  # batches


@dataclass(frozen=True)
class _HeldOutBatch:
    """A batch of held-out data as it was read."""

    y: Tensor
    f: Tensor  # the network's outputs, `[R, C]`
    positions: tuple[int, ...]
    leverages: Tensor  # `[R, L]`
    latents: Latents | None = None  # of a head, whose Jacobian is no more than its inputs
    r: Tensor = field(default_factory=lambda: torch.empty(0))  # `[R]`, once it is known

    def is_of(self, f: Tensor, y: Tensor) -> bool:
        """True if a batch with these outputs and targets is this one, and no other of a loader that shuffles."""
        return torch.equal(y, self.y) and f.shape == self.f.shape and torch.allclose(f, self.f, 1e-5, 1e-5)


def _left_out(posterior: Posterior, train_loader: Iterable[Any], progress_bar: bool) -> LeaveOneOutFold | None:
    """Leave-one-out predictions, where they are those of refits but for one Newton step; None elsewhere.

    That is a last layer on features that its labels did not train, with full curvature, at the mode of its prior.
    """
    problem, structure = posterior.problem, posterior.choices.structure
    own = {slot.name for slot in problem.slots}
    is_frozen = not any(t.requires_grad for name, t in problem.module.named_parameters() if name not in own)
    if problem.head is None or not is_frozen or not structure.is_exact or posterior.likelihood.has_noise:
        return None
    data = list(train_loader)  # which are read more than once: a loader may shuffle
    try:
        found = computed(posterior, data, LinkApprox.PROBIT, progress_bar=progress_bar)
    except (UnsupportedError, InvalidArgument):  # weighted data, other backends or likelihoods: refits serve them
        return None
    return LeaveOneOutFold(PosteriorGroup((posterior,)), found, data) if found.is_at_mode else None


def folds_of(
    posterior: Posterior, train_loader: Iterable[Any], folds: int, generator: torch.Generator | None, progress_bar: bool
) -> tuple[list[Fold] | list[LeaveOneOutFold], str, str]:
    """Folds of the training data, words for them, and why they are only a forecast.

    Of a last layer they are leave-one-out predictions, or refits of the head, as of a network that is one linear layer;
    of other weights a fifth of the data.
    """
    train_loader = list(train_loader) if isinstance(train_loader, Iterator) else train_loader  # it may be read twice
    left = _left_out(posterior, train_loader, progress_bar)
    if left is not None:
        return [left], "training data, each left out of the fit by one Newton step", ""
    try:
        refits = refits_of_head(posterior, train_loader, folds=folds, generator=generator, progress_bar=progress_bar)
    except UnsupportedError:
        if isinstance(posterior.weights, LastLayer):
            raise
        part = held_out_part(posterior, train_loader, generator=generator, progress_bar=progress_bar)
        held_out = "data held out of the fit"
        fold = Fold(PosteriorGroup((part.posterior,)), Validation(part.loader))
        return [fold], held_out, "the network was trained on these data, which it predicts better than others"
    held_out = f"training data, each by one of {folds} refits of the head without it"
    return (
        [Fold(PosteriorGroup((one.posterior,)), Validation(one.loader)) for one in refits],
        held_out,
        "where the features were trained on these labels (not if frozen)",
    )


@dataclass(frozen=True)
class CalibrationGrid:
    """Candidates of a calibration, and the predictions that are scored."""

    factors: tuple[float, ...] = _FACTORS  # of the present prior precision, `[n]`, ascending
    scales: tuple[float, ...] = _SCALES  # c of the covariance, `[m]`, ascending, without 0
    noise: bool = True  # whether the noise is chosen, too, of a likelihood that has one
    predictive: Predictive = field(default_factory=Predictive)

    def around(self, unit: float) -> CalibrationGrid:
        """The grid with prior precisions in other units, too: those of targets whose noise is not the present one."""
        return replace(self, factors=tuple(sorted({*self.factors, *(unit * factor for factor in self.factors)})))

    def predictions(self, fold: Fold | LeaveOneOutFold, sigma_noise: Tensor) -> MixedCandidates:
        """Predictions of a fold's posteriors at every factor, at c = 1 and a noise.

        The weights of a mixture are those at its own hyper-parameters, which a calibration leaves as they are.
        """
        hypers, first, weights = fold.group.hypers(()), fold.group.first, fold.group.weights()
        settings = [
            replace(hypers, prior_precision=factor * hypers.prior_precision, sigma_noise=sigma_noise)
            for factor in self.factors
        ]
        predictive = replace(self.predictive, pred_type=first.choices.pred_types.name(PredType.GLM))
        group = replace(fold.group, weigh=lambda _: weights)
        return group.candidates(settings, predictive, whole_covariance=False)


def refuse_unscalable(posterior: Posterior) -> None:
    """Refuses posteriors whose covariance the temperature and the prior precision do not scale."""
    posterior.require_fitted()
    posterior.check_unchanged()
    if not posterior.choices.structure.scaled_by_noise:
        raise UnsupportedError(
            "calibrate of a variational posterior (VaLLA), whose covariance is trained and not scaled by its "
            "temperature; use hessian_structure='gp', or another structure of weights."
        )
    if posterior.root is not None:
        raise UnsupportedError(
            "calibrate with an assigned posterior_scale, which holds at one setting of the hyper-parameters; assign a "
            "hyper-parameter first, which drops it."
        )
    if posterior.overrides(*POSTERIOR, *PREDICTIONS):
        raise UnsupportedError(
            "calibrate of a class that overrides moments or predictions, which need not scale with the temperature; "
            "tune ['prior_precision', 'temperature'] by optimize_hyperparameters with objective='nll', val_loader=..."
        )


def check_link(likelihood: Likelihood, link_approx: str, n_samples: int) -> None:
    """Refuses links under which a covariance of zero is not the network's prediction."""
    check_counts(n_samples=n_samples)
    if str(link_approx) in (LinkApprox.BRIDGE, LinkApprox.BRIDGE_NORM):
        raise InvalidArgument(
            f"link_approx={str(link_approx)!r}, which is not the network's prediction where the covariance is 0, so "
            "that the two cannot be compared; calibrate with 'probit', 'mc' or 'delta'."
        )


def calibrate(
    now: PosteriorGroup,
    folds: Sequence[Fold | LeaveOneOutFold],
    grid: CalibrationGrid,
    held_out: str,
    approximate: str = "",
    train_loader: Iterable[Any] | None = None,
) -> Calibration:
    """Choice of the held-out data for posteriors at their present hyper-parameters; nothing is changed.

    The folds are posteriors like these, fitted without data that they are scored on: one with validation data.
    `held_out` says where the data come from, and `approximate` why their scores are only a forecast. The training data
    have the second moments of layers' inputs, where the fit does not.
    """
    hypers = now.hypers(())
    if any(isinstance(fold, LeaveOneOutFold) for fold in folds):  # an input is left out at the mode of one prior alone
        grid = replace(grid, factors=(1.0,))
    is_refined = any(posterior.refined_step is not None for posterior in now.posteriors)
    with autograd_mode(), torch.no_grad():
        noises, network_noise = hypers.sigma_noise.unsqueeze(0), hypers.sigma_noise
        if now.likelihood.has_noise and grid.noise:
            noises, network_noise = _noises(folds, grid, hypers)
            grid = grid.around(float((hypers.sigma_noise / network_noise).square().mean()))
        scored = grid.predictions(folds[0], network_noise)
        found, why_none, kept = _tilts(now, folds, scored, grid, network_noise, train_loader)
        # Beside the width that was found the network's own, which is that of all inputs but far ones.
        narrow = tuple(replace(each, width=0.0, standard_error=0.0) for each in found)
        tilts = (found, narrow) if found and found[0].width else (found,)
        scores = _ScoreDifferences(grid, noises, network_noise, tilts)
        for number, fold in enumerate(folds):
            scored = grid.predictions(fold, network_noise) if number else scored
            scores.read(fold, scored, kept)
    scores.check_labels()
    squares = network_noise.square() if now.likelihood.has_noise and grid.noise else None
    warn_if_worse_than_chance(now.first, scores.n_data, scores.network_nll if scores.n_data else math.nan, squares)
    if scores.n_data < 2:
        raise InvalidData(f"{scores.n_data} held-out datum; a calibration takes at least two, better a hundred.")
    if scores.n_data < FEW:
        warn(
            f"calibrate chose on {scores.n_data} data, on which luck decides as much as calibration; give 100 or more.",
            CalibrationWarning,
        )
    n_errors = caution(scores.n_data)
    choices = [
        _chosen(*found, n_errors)
        for found in zip(scores.tilted_nll, scores.differences().cpu(), scores.standard_errors().cpu(), strict=True)
    ]
    # A width is worth something under shift, which no held-out datum shows, but not more than this.
    at = int(len(choices) > 1 and choices[1].nll < choices[0].nll - WORTH)
    differences, errors, is_better = choices[at].differences, choices[at].errors, choices[at].is_better
    found = tuple(replace(each, nll=scores.network_nll) for each in tilts[at]) if at else tilts[at]
    i, j, k = choices[at].place
    with torch.inference_mode(False):  # a tensor made in inference mode could never be differentiated
        prior_precision = (grid.factors[i] if is_better else _least_change(grid, differences)) * hypers.prior_precision
        sigma_noise, network_noise = (noises[k] if is_better else network_noise).clone(), network_noise.clone()
    return Calibration(
        scale=grid.scales[j] if is_better else 0.0,
        prior_precision=prior_precision,
        sigma_noise=sigma_noise,
        network_noise=network_noise,
        before=hypers,
        held_out=f"{scores.n_data:,} {held_out}",
        n_data=scores.n_data,
        link_approx="" if now.likelihood.has_noise else str(grid.predictive.link_approx),
        network_nll=scores.network_nll,
        posterior_nll=choices[at].nll,
        standard_error=errors[i, j, k].item() if is_better else 0.0,
        caution=n_errors,
        table={
            "factors": torch.tensor(grid.factors, dtype=wide_dtype()),
            "scales": torch.tensor(grid.scales, dtype=wide_dtype()),
            "sigma_noise": widened(noises).cpu(),
            "differences": differences,
            "standard_errors": errors,
        },
        approximate=approximate,
        reference="refined mean" if is_refined else "network",
        tilt=found[0] if found else None,
        others=found[1:],
        untilted=why_none,
    )


class _Choice(NamedTuple):
    """The best of the candidates with one width."""

    place: tuple[int, int, int]  # of factor, scale and noise
    is_better: bool  # than the network with this width
    nll: float  # of the candidate, or of that network
    differences: Tensor  # `[n, m, s]`
    errors: Tensor  # `[n, m, s]`


def _chosen(nll: float, differences: Tensor, errors: Tensor, n_errors: float) -> _Choice:
    """The candidate of the smallest cautious difference from a network whose score is `nll`.

    Of several that rounding alone tells apart it is the first in the order of the grid.
    """
    cautious = differences + n_errors * errors
    cautious = cautious.where(cautious.isfinite(), torch.inf)
    as_good = cautious <= cautious.min() + _SAME
    i, j, k = as_good.nonzero()[0].tolist()
    is_better = cautious[i, j, k].item() < -LEAST_GAIN
    gain = differences[i, j, k].item() if is_better else 0.0
    return _Choice((i, j, k), is_better, nll + gain, differences, errors)


def _tilts(
    now: PosteriorGroup,
    folds: Sequence[Fold | LeaveOneOutFold],
    scored: MixedCandidates,
    grid: CalibrationGrid,
    sigma: Tensor,
    train_loader: Iterable[Any] | None,
) -> tuple[tuple[Tilt, ...], str, list[tuple[_HeldOutBatch, ...]]]:
    """The widths that follow the input, of every network, or why there are none; and every batch as it was read."""
    fold = folds[0]
    if len(folds) > 1 or fold.group.first is not now.first:
        return (), "it takes validation data, val_loader=", []
    if isinstance(fold, LeaveOneOutFold):
        return _left_out_tilt(scored, fold, sigma)
    if isinstance(train_loader, Iterator) and len(scored.parts) > 1:  # every network reads it
        train_loader = list(train_loader)
    members: list[tilting.HeldOutRows] = []
    for part in scored.parts:
        layers, why_none = tilting.leverages_of(part.posterior, train_loader)
        if not layers:
            return (), why_none, []
        members.append(tilting.HeldOutRows(part.summaries, layers))
    read, in_order = list[tuple[_HeldOutBatch, ...]](), list[Tensor]()
    for name, x, y in fold.data.batches(scored.posterior, label="calibrate"):
        with named(name):
            batch = tuple(_read(part, rows.layers, x, y) for part, rows in zip(scored.parts, members, strict=True))
            counted = _CountedRows.from_outputs(scored.posterior, batch[0].f, y, batch[0].positions)
            if not in_order and counted.n_data > 1 and batches.can_split(x, counted.n_data):
                first = batches.select(x, slice(0, 1), counted.n_data)
                in_order = [
                    tilting.are_in_order(part.posterior, rows.layers, one.leverages, first)
                    for part, rows, one in zip(scored.parts, members, batch, strict=True)
                ]
        for rows, one in zip(members, batch, strict=True):
            rows.add(one.f, one.leverages, counted.index, counted.y, counted.inputs, counted.n_data)
        if sum(rows.n_bytes for rows in members) > tilting.MOST_BYTES:
            return (), f"the held-out outputs are more than {tilting.MOST_BYTES >> 20} MiB", []
        read.append(batch)
    n_data = sum(len(part.unique()) for part in members[0].inputs)
    if n_data < 2:
        return (), "there are too few data", []
    for rows, known in zip(members, in_order, strict=False):
        rows.keep(known)
        if not rows.layers:
            return (), "the inputs of layers are not in the order of the data", []
    found = tilting.choose(members, scored.weights[:, 0], sigma, caution(n_data))
    if isinstance(found, str):
        return (), found, []
    distances = zip(*found[1], strict=True)
    with_r = [
        tuple(replace(one, r=r) for one, r in zip(batch, each, strict=True))
        for batch, each in zip(read, distances, strict=True)
    ]
    return found[0], "", with_r


def _left_out_tilt(
    scored: MixedCandidates, fold: LeaveOneOutFold, sigma: Tensor
) -> tuple[tuple[Tilt, ...], str, list[tuple[_HeldOutBatch, ...]]]:
    """The same of one network by its training data, each against all others."""
    layers, why_none = tilting.leverages_of(scored.posterior, fold.data, anew=True)
    if not layers:
        return (), why_none, []
    f, y = fold.found.mean.to(sigma), fold.found.targets
    values = tilting.left_out(scored.posterior, layers, fold.data)
    if len(values) != len(f) or bool(values.isnan().all()):
        return (), "it takes validation data, or twice as many training data as a layer has inputs", []
    rows, index = tilting.HeldOutRows(scored.parts[0].summaries, layers), torch.arange(len(f), device=f.device)
    rows.add(f, values, index, y, index, len(f))
    chosen = tilting.choose([rows], scored.weights[:, 0], sigma, caution(len(f)))
    if isinstance(chosen, str):
        return (), chosen, []
    return chosen[0], "", [(_HeldOutBatch(y, f, (), values, r=chosen[1][0][0]),)]


def _read(part: Candidates, leverages: tuple[Leverage, ...], x: Inputs, y: Tensor) -> _HeldOutBatch:
    """A batch by one pass: of a head with its Jacobian, which is no more than its inputs; else the forward pass."""
    posterior, names = part.posterior, tuple(each.layer for each in leverages)
    if posterior.problem.head is not None:
        noted = Noted(posterior.engine, names)
        latents = part.latents(x, noted.engine)
        n_rows = len(latents[0])
        inputs = noted.inputs(n_rows // math.prod(latents[2]))
        if inputs is not None:
            return _HeldOutBatch(y, latents[0], latents[2], tilting.in_layers(leverages, inputs, n_rows), latents)
    outputs, inputs = layer_inputs(posterior.problem, x, names)
    f = outputs.values.to(part.priors.dtype) if posterior.refined_step is None else part.latents(x)[0]
    return _HeldOutBatch(y, f, outputs.positions, tilting.in_layers(leverages, inputs, len(f)))


def _least_change(grid: CalibrationGrid, differences: Tensor) -> float:
    """Factor of the prior precision where the network is chosen: 1, or the least at which there is a posterior."""
    exist = differences.isfinite().flatten(1).any(1).tolist()
    known = [factor for factor, exists in zip(grid.factors, exist, strict=True) if exists]
    return 1.0 if 1.0 in known or not known else min(known)


def _noises(
    folds: Sequence[Fold | LeaveOneOutFold], grid: CalibrationGrid, hypers: Hyperparameters
) -> tuple[Tensor, Tensor]:
    """Noises to try, `[s]` or `[s, C]`, and the one of them that suits the network best; by a forward pass.

    Multiples of the root mean square of the residuals, of every output where every one has its noise.
    """
    present, read = hypers.sigma_noise, [fold for fold in folds if isinstance(fold, Fold)]
    parts = [part for fold in read for part in grid.predictions(fold, present).at_networks(fold.data, 0)]
    mean, variance, y = (torch.cat(columns) for columns in zip(*parts, strict=True))
    squares = widened(y - mean).square().nanmean(0)
    if present.ndim:
        present = noise_like(squares, present)
    elif unlike := unlike_squares(squares, len(y), present):
        warn(f"{unlike}.", CalibrationWarning)
    size = widened((y - mean) / present).square().nanmean().sqrt().item()
    if not 0 < size < math.inf:
        return present.unsqueeze(0), present
    steps = torch.tensor([size * step for step in _NOISES], dtype=present.dtype, device=present.device)
    noises = steps.view(-1, *(1,) * present.ndim) * present
    likelihood = folds[0].group.likelihood
    totals = [float(widened(likelihood.predictive_nll(mean, variance, y, sigma)).sum()) for sigma in noises]
    return noises, noises[min(range(len(totals)), key=totals.__getitem__)]


@dataclass(frozen=True, eq=False)
class _CountedRows:
    """Rows of a batch's outputs whose targets count."""

    index: Tensor  # which rows of the outputs, `[R]`
    y: Tensor  # their targets
    inputs: Tensor  # index of the input of each, `[R]`
    n_data: int

    @classmethod
    def from_outputs(cls, posterior: Posterior, f: Tensor, y: Tensor, positions: tuple[int, ...]) -> _CountedRows:
        """The rows of outputs `[R, C]`, data × positions."""
        targets = Targets.from_outputs(posterior, f, y, positions)
        index = torch.arange(len(f), device=f.device) if targets.rows is None else targets.rows
        ignored = posterior.likelihood.ignore_index
        if ignored is not None and targets.y.ndim == 1:
            index = index[targets.y[index] != ignored]
        per_datum = math.prod(positions)
        return cls(index, targets.y[index], index // per_datum, len(f) // per_datum)


class _Width:
    """Scores of a batch's rows with a width that follows the input, or none.

    Args:
        scored: The candidates.
        tilts: The width of every component; empty without one.
        means: Means of the outputs of every component, `[R, C]`.
        y: Targets.
        distances: r of the inputs of every component, `[R]`; empty without a width.
    """

    def __init__(
        self,
        scored: MixedCandidates,
        tilts: tuple[Tilt, ...],
        means: list[Tensor],
        y: Tensor,
        distances: Sequence[Tensor],
    ) -> None:
        self.scored, self.y = scored, y
        self.likelihood = scored.posterior.likelihood
        self.tilts = list(zip(tilts, distances, strict=True))
        self.means = (
            [tilt.mean(self.likelihood, mean, r) for (tilt, r), mean in zip(self.tilts, means, strict=True)]
            if tilts
            else means
        )

    def predicted(self, variances: list[Tensor], weights: Tensor) -> Prediction:
        """Of n candidates with covariances `[n, R, …]`, without what a width makes of a noise."""
        return _predicted(self.scored, self.means, variances, weights)

    def losses(self, prediction: Prediction, weights: Tensor, sigma: Tensor) -> Tensor:
        """Of n candidates of components with weights `[K, n]` at a noise, `[n, R]`."""
        if self.tilts and isinstance(prediction, tuple):
            own = [tilt.variance(self.likelihood, sigma, r) for tilt, r in self.tilts]
            each = [variance.unsqueeze(0) for variance in own if variance is not None]
            if each:
                prediction = prediction[0], prediction[1] + average(each, weights)
                sigma = self.tilts[0][0].noise(self.likelihood, sigma)
        return widened(find_score("nll", self.likelihood)(self.likelihood, prediction, self.y, sigma))


class _ScoreDifferences:
    """Differences of candidates' scores from the network's, summed over data in float64.

    Rows of one input, its tokens or pixels, depend on each other: standard errors are of a ratio of sums over data.
    The grid has n prior precisions and m scales; noises `[s]` or `[s, C]` are tried. The covariances that are scaled
    are at the network's noise.
    """

    def __init__(
        self, grid: CalibrationGrid, noises: Tensor, network_noise: Tensor, tilts: Sequence[tuple[Tilt, ...]] = ((),)
    ) -> None:
        self.grid = grid
        self.tilts = tilts
        self.noises = noises
        self.network_noise = network_noise
        self._lowest, self._highest, self._n_labels = math.inf, -math.inf, 0
        self.n_data = 0
        self._network, self._counts, self._squared_counts = 0.0, 0.0, 0.0
        self._tilted = [0.0] * len(tilts)
        shape = (3, len(tilts), len(grid.factors), len(grid.scales), len(noises))
        # Of gaps, of their squares, and of their products with the numbers of rows.
        self._sums = torch.zeros(shape, dtype=wide_dtype(), device=noises.device)

    def read(
        self, fold: Fold | LeaveOneOutFold, scored: MixedCandidates, kept: Sequence[tuple[_HeldOutBatch, ...]] = ()
    ) -> None:
        """Takes in the data of a fold, of which batches may have been read before."""
        if isinstance(fold, LeaveOneOutFold):
            found, like = fold.found, self.noises
            mean, covariance = found.mean.to(like), found.covariance.to(like).unsqueeze(0)
            r = [one.r for one in kept[0]] if kept else []
            self._add(scored, [(mean, lambda part: covariance[part], ())], found.targets, r)
        elif kept and all(one.latents is not None for batch in kept for one in batch):
            for number, batch in enumerate(kept):
                with named(f"validation batch {number}"):
                    latents = [one.latents for one in batch if one.latents is not None]
                    self._add(scored, latents, batch[0].y, [one.r for one in batch])
        else:
            known = chain(kept, repeat(()))
            for name, x, y in fold.data.batches(fold.group.first, label="calibrate"):
                with named(name):
                    latents = [part.latents(x) for part in scored.parts]
                    self._add(scored, latents, y, self._distances(scored, x, y, latents[0][0], next(known)))

    def _distances(
        self, scored: MixedCandidates, x: Inputs, y: Tensor, f: Tensor, known: tuple[_HeldOutBatch, ...]
    ) -> list[Tensor]:
        """r of the rows of a batch, `[R]`: as it was read before, or of a loader that shuffles once more."""
        if known and known[0].is_of(f, y):
            return [one.r for one in known]
        found: list[Tensor] = []
        for tilt, part in zip(self.tilts[0], scored.parts, strict=False):
            rows, inputs = layer_inputs(part.posterior.problem, x, tilt.layers)
            found.append(tilt.distance(in_rows(inputs, len(rows.values)), len(rows.values)))
        return found

    def _add(self, scored: MixedCandidates, latents: Sequence[Latents], y: Tensor, r: Sequence[Tensor] = ()) -> None:
        rows = _CountedRows.from_outputs(scored.posterior, latents[0][0], y, latents[0][2])
        if not len(rows.index):
            return
        means, counts = [mean[rows.index] for mean, _, _ in latents], self._count_rows(rows)
        if scored.posterior.likelihood.target.labels_vary:
            labels = rows.y[~rows.y.isnan()]
            low, high = labels.aminmax()
            self._lowest, self._highest = min(self._lowest, low.item()), max(self._highest, high.item())
            self._n_labels += len(rows.y)
        likelihood, noise = scored.posterior.likelihood, self.network_noise
        score, weights, network = find_score("nll", likelihood), scored.weights[:, :1], None
        distances = [each[rows.index].to(mean) for each, mean in zip(r, means, strict=False)]
        widths = [_Width(scored, each, means, rows.y, distances) for each in self.tilts]
        tilted: list[Tensor] = []
        for part in scored.groups(len(latents[0][0])):
            existing = [variance for _, at, _ in latents if (variance := at(part)) is not None]
            if len(existing) < len(latents):
                self._sums[:, :, part] = torch.nan
                continue
            variances = [variance[:, rows.index] for variance in existing]
            if network is None:
                nothing = [torch.zeros_like(variance[:1]) for variance in variances]
                network = widened(score(likelihood, _predicted(scored, means, nothing, weights), rows.y, noise)[0])
                self._network += float(network.sum())
                tilted = [width.losses(width.predicted(nothing, weights), weights, noise)[0] for width in widths]
                self._tilted = [sum_ + float(new.sum()) for sum_, new in zip(self._tilted, tilted, strict=True)]
            for at in self._scales_at_once(variances):
                scales = variances[0].new_tensor(self.grid.scales[at])
                scaled = [torch.einsum("s,n...->sn...", scales, variance).flatten(0, 1) for variance in variances]
                of_all = scored.weights[:, part].repeat(1, len(scales))
                for t, width in enumerate(widths):
                    prediction = width.predicted(scaled, of_all)
                    for k, sigma in enumerate(self.noises):
                        values = width.losses(prediction, of_all, sigma)
                        gaps = torch.zeros(len(values), rows.n_data, dtype=values.dtype, device=values.device)
                        gaps.index_add_(1, rows.inputs, values - tilted[t])
                        sums = torch.stack([gaps.sum(-1), gaps.square().sum(-1), gaps @ counts])
                        self._sums[:, t, part, at, k] += sums.unflatten(1, (len(scales), -1)).mT
        if network is None:
            raise CurvatureError("the posterior exists at none of the prior precisions that calibrate tries.")

    def _scales_at_once(self, variances: list[Tensor]) -> Iterator[slice]:
        """Parts of the scales: of few numbers all are one operation; of samples each has the same random numbers."""
        each = max(variance.numel() for variance in variances)
        step = 1 if self.grid.predictive.link_approx == LinkApprox.MC else max(1, _AT_ONCE // each)
        return (slice(start, start + step) for start in range(0, len(self.grid.scales), step))

    def _count_rows(self, rows: _CountedRows) -> Tensor:
        """Number of rows of every input, `[B]`, added to the totals."""
        counts = torch.bincount(rows.inputs, minlength=rows.n_data).to(self._sums)
        self.n_data += int((counts > 0).sum())
        self._counts += float(counts.sum())
        self._squared_counts += float(counts.square().sum())
        return counts

    def check_labels(self) -> None:
        """Raises where all labels are equal: data of one class alone calibrate nothing."""
        if self._n_labels > 1 and self._lowest == self._highest:
            raise InvalidData(
                f"all {self._n_labels} held-out labels are {self._lowest:g}; give data of all classes (shuffle before "
                "you split)."
            )

    @property
    def network_nll(self) -> float:
        """Mean score of the network."""
        return self._network / self._counts

    @property
    def tilted_nll(self) -> list[float]:
        """Mean scores of the network with every width that follows the input."""
        return [tilted / self._counts for tilted in self._tilted]

    def differences(self) -> Tensor:
        """Mean differences from the network with every width, `[T, n, m, s]`."""
        return self._sums[0] / self._counts

    def standard_errors(self) -> Tensor:
        """Their paired standard errors, `[T, n, m, s]`."""
        mean = self.differences()
        _, squares, products = self._sums
        residual = squares - 2 * mean * products + mean.square() * self._squared_counts
        return (residual.clamp(min=0) * self.n_data / (self.n_data - 1)).sqrt() / self._counts


def _predicted(scored: MixedCandidates, means: list[Tensor], variances: list[Tensor], weights: Tensor) -> Prediction:
    """Predictions of n candidates at R rows, as scores read them, of components with weights `[K, n]`.

    Their outputs have means `[R, C]` and (co)variances `[n, R, C]` or `[n, R, C, C]`.
    """
    parts = zip(scored.parts, means, variances, strict=True)
    return mixed([part.summaries.of_gaussians(mean, variance) for part, mean, variance in parts], weights)
