"""Predictions of many candidate hyper-parameters from one pass of the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.cached import cached_property
from laplace.core.checks import named
from laplace.core.gaussian import against_others, centred
from laplace.core.hyperparameters import Hyperparameters
from laplace.core.overrides import POSTERIOR, PREDICTIONS
from laplace.core.pieces import bytes_at_once
from laplace.core.positions import rows_of
from laplace.core.precision_policy import wide_dtype, widened
from laplace.core.processes import Processes
from laplace.core.random_numbers import drawn_seed
from laplace.engines import at_weights
from laplace.engines.engine import CurvatureEngine, outputs
from laplace.enums import LinkApprox, PredType
from laplace.errors import CurvatureError, InvalidData
from laplace.jacobian.blocks import CHUNK_BYTES
from laplace.jacobian.jacobian import Jacobian
from laplace.likelihoods.base import Likelihood
from laplace.posterior.posterior import Posterior
from laplace.predictive import latent, sampled
from laplace.predictive.options import PredictOptions
from laplace.predictive.prediction import mixed
from laplace.structures.precision import Form, Precision, VariancesOverPriors, drawn
from laplace.tuning.losses import LossRule, Prediction, Running, Targets, Validation


@dataclass(frozen=True)
class Predictive:
    """The kind of prediction that a validation loss evaluates.

    Attributes:
        pred_type: `"glm"` or `"nn"`.
        link_approx: Link approximation of classification.
        n_samples: Number of Monte-Carlo samples.
        generator: Random generator; every setting sees the same random numbers. None for seed 0.
    """

    pred_type: str = "glm"
    link_approx: str = "probit"
    n_samples: int = 100
    generator: torch.Generator | None = None

    def kind(self, posterior: Posterior) -> PredType:
        """The predictive, linearised or sampled, after its names were checked for a posterior.

        Raises:
            InvalidArgument: Unknown predictive or link, or no samples.
        """
        options = PredictOptions(self.pred_type, self.n_samples, link_approx=self.link_approx)
        return options.kind(posterior.choices.pred_types)

    def summaries(self, likelihood: Likelihood, *, for_scores: bool) -> Summaries:
        """Summaries with a seed of their own, the next one of the generator; `for_scores` as of `Target.summary`."""
        seeded = self.generator is not None
        generator = self.generator if seeded else torch.Generator().manual_seed(0)
        return Summaries(likelihood, self, drawn_seed(generator), for_scores)


@dataclass(frozen=True)
class Summaries:
    """Summaries of outputs f as losses read them; whatever is drawn is drawn from the same seed for every setting."""

    likelihood: Likelihood
    predictive: Predictive
    seed: int
    for_scores: bool

    @property
    def diagonal(self) -> bool:
        """True if variances of f are read alone, no covariances between outputs."""
        target, link = self.likelihood.target, self.predictive.link_approx
        of_f = target.reads_variances(self.likelihood, link, for_scores=self.for_scores)
        return of_f or self.centred_link is not None

    @property
    def centred_link(self) -> str | None:
        """The link of f − mean f, whose variances are read; None where those of f are, as of `Target.centred_link`."""
        return self.likelihood.target.centred_link(self.likelihood, self.predictive.link_approx)

    def contraction(self, precision: Precision) -> Callable[[Jacobian], Tensor]:
        """Variances `[B, C]` or covariances `[B, C, C]` of f, or variances of f − mean f, by the Jacobian of f."""
        if self.centred_link is not None:
            return precision.centred_variance
        form: Form = "diagonal" if self.diagonal else "full"
        return lambda jacobian: precision.variance(jacobian, form)

    def varied(self, jacobian: Jacobian) -> Jacobian:
        """The Jacobian of that whose (co)variances `contraction` gives: f, or f − mean f."""
        return jacobian if self.centred_link is None else jacobian.centred()

    def read(self, jacobian: Jacobian) -> Jacobian:
        """A Jacobian whose covariances are summed in float64 where samples are drawn from them."""
        return replace(jacobian, wide=self.predictive.link_approx == LinkApprox.MC)

    def draws(self) -> torch.Generator:
        """The source of randomness, in the same state at every call."""
        return torch.Generator().manual_seed(self.seed)

    def of_gaussian(self, mean: Tensor, variance: Tensor) -> Prediction:
        """Summary of f with mean `[B, C]`, and variances `[B, C]` as of `contraction` or covariances `[B, C, C]`."""
        if self.centred_link is not None and variance.ndim == mean.ndim:
            return self.likelihood.predict(centred(mean), against_others(variance), self.centred_link)
        return self.likelihood.target.summary(
            self.likelihood, mean, variance, self.predictive.link_approx, self.predictive.n_samples,
            self.draws(), for_scores=self.for_scores,
        )  # fmt: skip

    def of_gaussians(self, mean: Tensor, variances: Tensor) -> Prediction:
        """Summaries, `[n, B, C]`, of f with one mean `[B, C]` and n (co)variances `[n, B, C]` or `[n, B, C, C]`."""
        means = mean.expand(len(variances), *mean.shape)
        summary = self.of_gaussian(means.flatten(0, 1), variances.flatten(0, 1))
        if isinstance(summary, tuple):
            return summary[0].unflatten(0, means.shape[:2]), summary[1].unflatten(0, means.shape[:2])
        return summary.unflatten(0, means.shape[:2])

    def of_samples(self, samples: Tensor) -> Prediction:
        """Summary of samples of f, `[S, B, C]`."""
        return self.likelihood.target.summary_of_samples(self.likelihood, samples, for_scores=self.for_scores)


VariancesOf = Callable[[slice], Tensor]
"""Functional variances of a part of a batch at n consecutive candidates, times their factors."""

Predict = Callable[[slice], Prediction]
"""Predictions of consecutive candidates: of one `[B, C]`, of n `[n, B, C]`."""


def rows_of_call(prediction: Any, channel_dim: int) -> Prediction:
    """A result of `la(x)`, probabilities or mean and (co)variance, as rows `[B·T, C]` or `[B·T, C, C]`."""
    if isinstance(prediction, Tensor):
        return rows_of(prediction, channel_dim).values
    mean, variance = prediction
    whole = variance.ndim > mean.ndim
    values = variance.flatten(0, -3) if whole else rows_of(variance, channel_dim).values
    return rows_of(mean, channel_dim).values, values


class Candidates:
    """Predictive distributions of one posterior at every candidate of a grid.

    The candidates share one direction of the curvature's weights w. With one prior precision for all parameters
    P = c·(w₀ H + δ/c) for a number c: one factorisation serves them all. Random numbers are drawn once and shared, so
    that candidates differ by their hyper-parameters alone.

    The settings have noises in equal ratios; with other priors than scalar ones, each is factored. With
    `whole_covariance` regressions have covariances `[B, C, C]`, else variances.
    """

    def __init__(
        self, posterior: Posterior, settings: list[Hyperparameters], predictive: Predictive, *, whole_covariance: bool
    ) -> None:
        self.kind = predictive.kind(posterior)
        posterior.check_unchanged()
        self.posterior = posterior
        self.settings = settings
        self.predictive = predictive
        self.priors = torch.cat([setting.prior_precision[:1] for setting in settings])  # δ, `[n]`
        # What users' own methods compute follows from nothing but calling them, at every candidate.
        self.called = posterior.overrides(*PREDICTIONS)
        self.factors = torch.ones_like(self.priors)  # c, `[n]`
        is_scalar = all(setting.prior_precision.numel() == 1 for setting in settings)
        self._share = is_scalar and not posterior.overrides(*POSTERIOR)
        if self._share and posterior.fit.curvature.scaled_by_noise:
            evidences = [posterior.at_hyperparameters(setting).evidence for setting in settings]
            weights = torch.stack([evidence.weights.mean() for evidence in evidences])
            self.factors = weights / weights[0]
        self.summaries = predictive.summaries(posterior.likelihood, for_scores=not whole_covariance)
        self._weights: dict[int, Tensor] = {}

    @cached_property
    def scan(self) -> VariancesOverPriors | None:
        """Variances of all candidates by one factorisation, made when first asked for; None where each has its own."""
        first, layout = self.posterior.at_hyperparameters(self.settings[0]).evidence, self.posterior.problem.layout
        return first.fit.curvature.scan(first.weights, layout, **first.options) if self._share else None

    def groups(self, n_data: int) -> list[slice]:
        """Consecutive candidates that are predicted together for batches of about this size."""
        n, size = len(self.settings), 1
        separate = self.called or not self._share
        likelihood = self.posterior.likelihood
        by_rows = likelihood.target.by_rows(likelihood, self.predictive.link_approx)
        if self.kind != PredType.NN and by_rows and not separate:
            n_outputs = self.posterior.fit.n_outputs
            per_datum = n_outputs if self.summaries.diagonal else n_outputs**2
            width = max(self.posterior.problem.layout.n_params, n_data * per_datum)
            size = max(1, bytes_at_once(CHUNK_BYTES, self.priors.device) // (8 * width))
        return [slice(start, min(start + size, n)) for start in range(0, n, size)]

    def prepare(self, x: Inputs) -> tuple[Predict, Tensor, tuple[int, ...]]:
        """Runs the network on a batch: predictions of consecutive candidates, outputs `[B, C]`, and their positions.

        With positions, B are rows, data × positions.
        """
        if self.called:
            return self._by_calling(x)
        if self.kind == PredType.NN:
            return self._sampled(x)
        mean, variances, positions = self.latents(x)
        return lambda group: self._linearised(mean, variances, group), mean, positions

    def latents(
        self, x: Inputs, engine: CurvatureEngine | None = None
    ) -> tuple[Tensor, Callable[[slice], Tensor | None], tuple[int, ...]]:
        """Gaussians over the outputs of a batch, by one pass of the network and of its Jacobians.

        They are their mean, `[B, C]`; their (co)variances at n consecutive candidates, `[n, B, C]` or `[n, B, C, C]`,
        NaN where a posterior does not exist, and None where none of them does; positions, as of `prepare`. Another
        engine may be given of the same network.
        """
        posterior = self.posterior
        x = batches.to_device(x, posterior.problem.device)
        with closing(latent.shifted((engine or posterior.engine).jacobian(x), posterior.refined_step)) as pieces:
            parts = [(self._variances_of(self.summaries.read(part)), f, part.positions) for part, f in pieces]
        mean = torch.cat([f for _, f, _ in parts]).to(self.priors.dtype)
        functions = [function for function, _, _ in parts]
        return mean, lambda group: self._variances(functions, group), parts[0][2]

    def of_network(self, f: Tensor) -> Prediction:
        """The network's own predictions, from its outputs `[B, C]`, as of samples that do not differ."""
        summary = self.summaries.of_samples(f.expand(2, *f.shape))
        of_latent = self.posterior.likelihood.latent_prediction and self.kind != PredType.NN
        if isinstance(summary, tuple) and of_latent and not self.summaries.diagonal:
            return summary[0], summary[1].diag_embed()
        return summary

    def _variances_of(self, jacobian: Jacobian) -> Callable[[slice], Tensor]:
        """Functional variances of consecutive candidates, `[n, b, C]` or `[n, b, C, C]`."""
        if self.scan is not None:
            centred_alone = self.summaries.centred_link is not None
            at = (
                self.scan.centred_variances(jacobian)
                if centred_alone
                else self.scan.variances(jacobian, diagonal=self.summaries.diagonal)
            )
            return lambda group: at(self.priors[group] / self.factors[group])

        def one_by_one(group: slice) -> Tensor:
            parts: list[Tensor] = []
            for setting in self.settings[group]:
                precision = self.posterior.at_hyperparameters(setting).predictive_precision()
                parts.append(latent.contracted(self.summaries.contraction(precision), jacobian))
            return torch.stack(parts)

        return one_by_one

    def _by_calling(self, x: Inputs) -> tuple[Predict, Tensor, tuple[int, ...]]:
        """Predictions by the posterior's own `__call__`, one candidate at a time."""
        posterior, options, channel_dim = self.posterior, self.predictive, self.posterior.channel_dim
        rows = outputs(posterior.engine, x)
        pred_type = posterior.choices.pred_types.name(self.kind)

        def predict(group: slice) -> Prediction:
            with posterior.at_hyperparameters(self.settings[group.start]).as_user_object() as la:
                try:
                    prediction = la(
                        x, pred_type=pred_type, link_approx=options.link_approx, n_samples=options.n_samples,
                        diagonal_output=self.summaries.diagonal, generator=self.summaries.draws(),
                    )  # fmt: skip
                except InvalidData as error:  # outputs are finite: this candidate's moments are beyond the dtype
                    raise CurvatureError(str(error)) from error
            return rows_of_call(prediction, channel_dim)

        return predict, rows.values, rows.positions

    def _linearised(self, mean: Tensor, variances_at: Callable[[slice], Tensor | None], group: slice) -> Prediction:
        variance = variances_at(group)
        if variance is None:
            raise CurvatureError("the posterior does not exist at any of these candidates.")
        one = group.stop - group.start == 1
        return self.summaries.of_gaussian(mean, variance[0]) if one else self.summaries.of_gaussians(mean, variance)

    def _variances(self, functions: list[VariancesOf], group: slice) -> Tensor | None:
        """(c (w₀ H + δ/c))⁻¹ between the rows of J, as of `latents`."""
        try:
            variance = torch.cat([variances(group) for variances in functions], 1)
        except (CurvatureError, torch.linalg.LinAlgError):  # of some candidate P has no inverse: it alone is NaN
            if group.stop - group.start == 1:
                return None
            each = [self._variances(functions, slice(i, i + 1)) for i in range(group.start, group.stop)]
            known = next((one for one in each if one is not None), None)
            if known is None:
                return None
            return torch.cat([torch.full_like(known, torch.nan) if one is None else one for one in each])
        return variance / self.factors[group].view(-1, *(1,) * (variance.ndim - 1))

    def _sampled(self, x: Inputs) -> tuple[Predict, Tensor, tuple[int, ...]]:
        posterior = self.posterior
        sampled.refuse_refined(posterior.refined_step, posterior.engine.problem)
        run = at_weights.outputs_of_weights(posterior.engine, posterior.expansion_point, x, {})

        def predict(group: slice) -> Prediction:
            samples = run(self._weights_at(group.start)).flatten(1, -2)
            return self.summaries.of_samples(samples)

        outputs = run(posterior.mean.unsqueeze(0))[0]
        return predict, outputs.flatten(0, -2), tuple(outputs.shape[1:-1])

    def _weights_at(self, i: int) -> Tensor:
        """Samples of the weights of one candidate `[S, P]`, kept for the next batch where all together are small."""
        if i in self._weights:
            return self._weights[i]
        mean, n_samples, posterior = (
            self.posterior.mean,
            self.predictive.n_samples,
            self.posterior.at_hyperparameters(self.settings[i]),
        )
        draws = self.summaries.draws()
        if posterior.overrides("sample", *POSTERIOR):
            weights = posterior.sampler()(n_samples, draws)
        else:
            weights = drawn(mean, posterior.evidence.precision, n_samples, draws)
        if len(self.settings) * weights.nbytes <= 8 * bytes_at_once(CHUNK_BYTES, weights.device):
            self._weights[i] = weights
        return weights


class MixedCandidates:
    """Predictive distributions of a mixture, with weights `[K, n]`, at every candidate; a posterior is one of one."""

    def __init__(self, parts: list[Candidates], weights: Tensor) -> None:
        self.parts = parts
        self.posterior = parts[0].posterior
        self.settings = parts[0].settings
        self.weights = weights

    def groups(self, n_data: int) -> list[slice]:
        """Consecutive candidates that are predicted together: as many as the largest component allows."""
        return min((part.groups(n_data) for part in self.parts), key=lambda groups: groups[0].stop)

    def prepare(self, x: Inputs) -> tuple[Predict, tuple[Tensor, ...], tuple[int, ...]]:
        """Runs every network on a batch: mixed predictions of consecutive candidates, all outputs, their positions."""
        prepared = [part.prepare(x) for part in self.parts]

        def predict(group: slice) -> Prediction:
            weights = self.weights[:, group]
            one = group.stop - group.start == 1
            return mixed([predict_one(group) for predict_one, *_ in prepared], weights[:, 0] if one else weights)

        return predict, tuple(f for _, f, _ in prepared), prepared[0][2]

    def at_networks(self, data: Validation, i: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of every batch mean and variance of the networks' mixture, without noise, and targets, `[R, C]` each.

        By forward passes of a regression, mixed as at candidate i; a refined mean takes its network's place.
        """
        for name, x, y in data.batches(self.posterior, label="residuals"):
            with named(name):
                means, positions = list[Tensor](), ()
                for part in self.parts:
                    if part.posterior.refined_step is None:
                        rows = outputs(part.posterior.engine, x)
                        mean, positions = rows.values.to(part.priors.dtype), rows.positions
                    else:
                        mean, _, positions = part.latents(x)
                    means.append(mean)
                mixture = mixed([(mean, torch.zeros_like(mean)) for mean in means], self.weights[:, i])
                (mean, variance), known = Targets.from_outputs(self.posterior, means[0], y, positions).counted(mixture)
            yield mean, variance, known

    def of_networks(self, outputs: tuple[Tensor, ...], i: int) -> Prediction:
        """The networks' own predictions, from the outputs `[B, C]` of every one, mixed as at candidate i."""
        predictions = [part.of_network(f) for part, f in zip(self.parts, outputs, strict=True)]
        return mixed(predictions, self.weights[:, i])


# ----------------------------------------------------------------------------------------------------------------------
# Their losses
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ShardScores:
    """Sums of one process: of every candidate the sum and number of data of every score, None where it has none."""

    scores: list[list[tuple[Tensor, int]] | None]
    n_data: int


class Losses:
    """The running losses of all candidates.

    `processes` are those that see the other shards of the data; `of_network` are candidates at whose noise and mixture
    weights the networks' own predictions are scored, too.
    """

    def __init__(
        self,
        candidates: MixedCandidates,
        rule: LossRule,
        processes: Processes | None = None,
        of_network: Sequence[int] = (),
    ) -> None:
        self.candidates = candidates
        self.rule = rule
        self.processes = processes
        self.of_network = of_network
        self.n_data = 0
        noises = [setting.sigma_noise for setting in candidates.settings]
        self._together = rule.many and all(noise is noises[0] for noise in noises)
        self._groups: list[slice] = []
        self._running: list[tuple[slice, Running]] = []
        self._failed: set[int] = set()

    def read(self, data: Iterable[tuple[str, Inputs, Tensor | None]]) -> None:
        """Takes in batches with their names, and what other processes find in theirs."""

        def attempt() -> _ShardScores | None:
            for name, x, y in data:
                with named(name):
                    self.update(x, y)
            return None if self.processes is None or not self._running else self._shard_scores()

        if self.processes is None:
            attempt()
        else:
            self._take([seen for seen in self.processes.gather_results(attempt) if seen is not None])

    def _shard_scores(self) -> _ShardScores:
        """Sums of scores of every candidate, whichever are predicted together here."""
        rows: list[list[tuple[Tensor, int]] | None] = []
        for part, running in self._running:
            size, scores = part.stop - part.start, running.scores()
            if part.start in self._failed:  # in one batch or more: its sums are of some data, or of none
                rows += [None] * size
                continue
            totals = [torch.as_tensor(score.total).cpu() for score in scores]
            for i in range(size):
                rows.append(
                    [(total if size == 1 else total[i], one.count) for total, one in zip(totals, scores, strict=True)]
                )
        return _ShardScores(rows, self.n_data)

    def _take(self, seen: list[_ShardScores]) -> None:
        """Puts the sums of all processes in the place of this one's."""
        if not seen:
            raise InvalidData(
                "the validation loaders gave no data, or all are ignored; the hyper-parameters are as they were."
            )
        self.n_data, self._failed, self._running = sum(one.n_data for one in seen), set(), []
        for i, rows in enumerate(zip(*(one.scores for one in seen), strict=True)):
            running = self.rule.fresh()
            self._running.append((slice(i, i + 1), running))
            known = [row for row in rows if row is not None]
            if len(known) < len(rows):
                self._failed.add(i)
                continue
            for score, parts in zip(running.scores(), zip(*known, strict=True), strict=True):
                score.total = torch.stack([total for total, _ in parts]).sum(0)
                score.count = sum(count for _, count in parts)

    def update(self, x: Inputs, y: Tensor | None) -> None:
        """Takes in one batch; without targets, one of out-of-distribution inputs."""
        predict, outputs, positions = self.candidates.prepare(x)
        targets = Targets.from_outputs(self.candidates.posterior, outputs[0], y, positions)
        self.n_data += targets.n_data
        settings = self.candidates.settings
        if not self._groups:
            n = len(settings)
            self._groups = self.candidates.groups(len(outputs[0]))
            parts = self._groups if self._together else [slice(i, i + 1) for i in range(n)]
            parts = [*parts, *(slice(i, i + 1) for i in range(n, n + len(self.of_network)))]
            self._running = [(part, self.rule.fresh()) for part in parts]
        noises = [*(setting.sigma_noise for setting in settings), *(settings[i].sigma_noise for i in self.of_network)]
        predictions = chain(
            (part for group in self._groups for part in self._predicted(predict, group)),
            (self.candidates.of_networks(outputs, i) for i in self.of_network),
        )
        for (part, running), prediction in zip(self._running, predictions, strict=True):
            if prediction is None:
                self._failed.add(part.start)
            else:
                targets.update(running, prediction, noises[part.start])

    def _predicted(self, predict: Predict, group: slice) -> list[Prediction | None]:
        """The predictions of a group, as one or candidate by candidate; None where a posterior does not exist."""
        size = group.stop - group.start
        separate = size > 1 and not self._together
        try:
            prediction = predict(group)
        except (CurvatureError, torch.linalg.LinAlgError):
            return [None] * (size if separate else 1)
        if not separate:
            return [prediction]
        rows = list(zip(*prediction, strict=True)) if isinstance(prediction, tuple) else list(prediction)
        return [None if any(bool(part.isnan().any()) for part in _parts(row)) else row for row in rows]

    def results(self) -> Tensor:
        """The losses, float64, `[n]`; infinite where a posterior does not exist."""
        return self._results(0, len(self.candidates.settings))

    def results_of_network(self) -> Tensor:
        """The losses of the networks' own predictions, float64, `[len(of_network)]`."""
        n = len(self.candidates.settings)
        return self._results(n, n + len(self.of_network))

    def _results(self, start: int, stop: int) -> Tensor:
        parts = [
            torch.full((part.stop - part.start,), math.inf, dtype=wide_dtype())
            if part.start in self._failed
            else widened(running.result().detach()).cpu().reshape(-1)
            for part, running in self._running
            if start <= part.start < stop
        ]
        return torch.cat(parts)


def _parts(prediction: Prediction) -> tuple[Tensor, ...]:
    return prediction if isinstance(prediction, tuple) else (prediction,)
