"""Predictions of many candidates from one pass of the network."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.hyperparameters import Hyperparameters
from laplace.core.overrides import POSTERIOR, PREDICTIONS
from laplace.core.positions import rows_of
from laplace.core.random_numbers import drawn_seed, standard_normal
from laplace.engines.outputs import outputs
from laplace.enums import LinkApprox, PredType
from laplace.errors import CurvatureError
from laplace.jacobian.contractions import CHUNK_BYTES
from laplace.jacobian.jacobian import Jacobian
from laplace.posterior.posterior import Posterior
from laplace.posterior.predictor import sampler
from laplace.predictive import latent
from laplace.predictive.options import check_options
from laplace.tuning.scores import Prediction


@dataclass(frozen=True)
class Predictive:
    """Kind of prediction that candidates are compared by.

    Attributes:
        pred_type: `"glm"` or `"nn"`.
        link_approx: Link of classification.
        n_samples: Monte-Carlo samples.
        generator: Source of randomness, the same for every candidate; None for seed 0.
    """

    pred_type: str = "glm"
    link_approx: str = "probit"
    n_samples: int = 100
    generator: torch.Generator | None = None


VariancesOf = Callable[[slice], Tensor]
"""Functional variances of a part of a batch at n consecutive candidates, times their factors."""

Predict = Callable[[slice], Prediction]
"""Predictions of consecutive candidates: of one `[B, C]`, of n `[n, B, C]`."""


class Candidates:
    """Predictive distributions at every candidate of a grid.

    The candidates share one direction of the curvature's weights w and one prior precision for all parameters, so that
    P = c·(w₀ H + δ/c) for a number c: one factorisation serves them all. Random numbers are drawn once and shared, so
    that candidates differ by their hyper-parameters alone.

    Args:
        posterior: A fitted posterior.
        settings: The candidates; scalar priors, and noises in equal ratios.
        predictive: Predictive, link, samples and generator.
        whole_covariance: Whether regressions have covariances `[B, C, C]`; else variances.

    Attributes:
        priors: δ of every candidate, `[n]`.
        factors: c of every candidate, `[n]`.
    """

    def __init__(
        self, posterior: Posterior, settings: list[Hyperparameters], predictive: Predictive, *, whole_covariance: bool
    ) -> None:
        asked = (predictive.pred_type, predictive.link_approx, predictive.n_samples, None)
        self.kind = check_options(*asked, posterior.choices.pred_types)
        posterior.check_unchanged()
        self.posterior = posterior
        self.settings = settings
        self.predictive = predictive
        self.for_scores = not whole_covariance
        likelihood = posterior.likelihood
        self.diagonal = likelihood.target.reads_variances(
            likelihood, predictive.link_approx, for_scores=self.for_scores
        )
        self.priors = torch.cat([setting.prior_precision[:1] for setting in settings])
        # What users' own methods compute follows from nothing but calling them, at every candidate.
        self.called = posterior.overrides(*PREDICTIONS)
        self.scan, self.factors = None, torch.ones_like(self.priors)
        if not posterior.overrides(*POSTERIOR):
            first = posterior.at(settings[0]).evidence
            weights = torch.stack([posterior.at(setting).evidence.weights.mean() for setting in settings])
            self.factors = weights / weights[0] if first.fit.curvature.weighed else torch.ones_like(weights)
            self.scan = first.fit.curvature.scan(first.weights, posterior.problem.layout, **first.options)
        self.seed = shared_seed(predictive.generator, self.priors.device)
        self._steps: dict[int, Tensor] = {}

    def groups(self, n_data: int) -> list[slice]:
        """Consecutive candidates that are predicted together for batches of about this size."""
        n, size = len(self.settings), 1
        apart = self.called or self.scan is None
        likelihood = self.posterior.likelihood
        by_rows = likelihood.target.by_rows(likelihood, self.predictive.link_approx)
        if self.kind != PredType.NN and by_rows and not apart:
            n_outputs = self.posterior.fit.n_outputs
            per_datum = n_outputs if self.diagonal else n_outputs**2
            width = max(self.posterior.problem.layout.n_params, n_data * per_datum)
            size = max(1, CHUNK_BYTES // (8 * width))
        return [slice(start, min(start + size, n)) for start in range(0, n, size)]

    def prepare(self, x: Inputs) -> tuple[Predict, Tensor, tuple[int, ...]]:
        """Runs the network on a batch.

        Returns:
            The predictions of consecutive candidates, the outputs `[B, C]`, and the dimensions of their positions: with
            some, B are rows, data × positions.
        """
        if self.called:
            return self._by_calling(x)
        if self.kind == PredType.NN:
            return self._sampled(x)
        posterior = self.posterior
        x = batches.to_device(x, posterior.problem.device)
        wide = self.predictive.link_approx == LinkApprox.MC
        with closing(latent.shifted(posterior.engine.jacobian(x), posterior.refined_step)) as pieces:
            parts = [(self._variances_of(replace(part, wide=wide)), f, part.positions) for part, f in pieces]
        mean = torch.cat([f for _, f, _ in parts]).to(self.priors.dtype)
        variances = [function for function, _, _ in parts]
        return lambda group: self._linearised(mean, variances, group), mean, parts[0][2]

    def _variances_of(self, jacobian: Jacobian) -> Callable[[slice], Tensor]:
        """Functional variances of consecutive candidates, `[n, b, C]` or `[n, b, C, C]`."""
        if self.scan is not None:
            at = self.scan.variances(jacobian, diagonal=self.diagonal)
            return lambda group: at(self.priors[group] / self.factors[group])

        def one_by_one(group: slice) -> Tensor:
            parts: list[Tensor] = []
            for setting in self.settings[group]:
                precision = self.posterior.at(setting).predictive_precision()
                contract = precision.functional_diagonal if self.diagonal else precision.functional_variance
                parts.append(latent.contracted(contract, jacobian))
            return torch.stack(parts)

        return one_by_one

    def _by_calling(self, x: Inputs) -> tuple[Predict, Tensor, tuple[int, ...]]:
        """Predictions by the posterior's own `__call__`, one candidate at a time."""
        posterior, options, channel_dim = self.posterior, self.predictive, self.posterior.channel_dim
        rows = outputs(posterior.engine, x)
        pred_type = posterior.choices.pred_types.name(self.kind)

        def predict(group: slice) -> Prediction:
            with posterior.at(self.settings[group.start]).owned() as la:
                prediction = la(
                    x, pred_type=pred_type, link_approx=options.link_approx, n_samples=options.n_samples,
                    diagonal_output=self.diagonal, generator=self._draws(),
                )  # fmt: skip
            if isinstance(prediction, Tensor):
                return rows_of(prediction, channel_dim).values
            mean, variance = prediction
            whole = variance.ndim > mean.ndim
            values = variance.flatten(0, -3) if whole else rows_of(variance, channel_dim).values
            return rows_of(mean, channel_dim).values, values

        return predict, rows.values, rows.positions

    def _linearised(self, mean: Tensor, functions: list[VariancesOf], group: slice) -> Prediction:
        variance = self._variances(functions, group)
        if variance is None:  # of some candidate the posterior does not exist: it alone is NaN
            places = range(*group.indices(len(self.settings)))
            variances = [self._variances(functions, slice(i, i + 1)) for i in places]
            known = next((v for v in variances if v is not None), None)
            if known is None:
                raise CurvatureError("the posterior does not exist at any of these candidates.")
            variance = torch.cat([torch.full_like(known, torch.nan) if v is None else v for v in variances])
        if group.stop - group.start == 1:
            return self._target(mean, variance[0])
        means = mean.expand(len(variance), -1, -1)
        summary = self._target(means.flatten(0, 1), variance.flatten(0, 1))
        if isinstance(summary, tuple):
            return summary[0].unflatten(0, means.shape[:2]), summary[1].unflatten(0, means.shape[:2])
        return summary.unflatten(0, means.shape[:2])

    def _variances(self, functions: list[VariancesOf], group: slice) -> Tensor | None:
        """(c (w₀ H + δ/c))⁻¹ between the rows of J, `[n, B, C]` or `[n, B, C, C]`; None where P has no inverse."""
        factors = self.factors[group]
        try:
            parts = [variances(group) for variances in functions]
        except (CurvatureError, torch.linalg.LinAlgError):
            return None
        variance = torch.cat(parts, 1)
        return variance / factors.view(-1, *(1,) * (variance.ndim - 1))

    def _target(self, mean: Tensor, variance: Tensor) -> Prediction:
        options, likelihood = self.predictive, self.posterior.likelihood
        return likelihood.target.summary(
            likelihood,
            mean,
            variance,
            options.link_approx,
            options.n_samples,
            self._draws(),
            for_scores=self.for_scores,
        )

    def _draws(self) -> torch.Generator:
        return torch.Generator(device=self.priors.device).manual_seed(self.seed)

    def _sampled(self, x: Inputs) -> tuple[Predict, Tensor, tuple[int, ...]]:
        posterior = self.posterior
        latent.refuse_refined(posterior.refined_step, posterior.engine.problem)
        run = latent.sampler(posterior.engine, posterior.expansion_point, x, {})

        def predict(group: slice) -> Prediction:
            samples = run(posterior.mean + self._step(group.start)).flatten(1, -2)
            return posterior.likelihood.target.summary_of_samples(
                posterior.likelihood, samples, for_scores=self.for_scores
            )

        outputs = run(posterior.mean.unsqueeze(0))[0]
        return predict, outputs.flatten(0, -2), tuple(outputs.shape[1:-1])

    def _step(self, i: int) -> Tensor:
        """Samples of θ − θ* of one candidate `[S, P]`, kept for the next batch where all of them together are small."""
        if i in self._steps:
            return self._steps[i]
        mean, n_samples, posterior = self.posterior.mean, self.predictive.n_samples, self.posterior.at(self.settings[i])
        if posterior.overrides("sample", *POSTERIOR):
            step = sampler(posterior)(n_samples, self._draws()) - mean
        else:
            noise = standard_normal((n_samples, len(mean)), mean, self._draws())
            step = posterior.evidence.precision.sample(noise)
        if len(self.settings) * step.numel() * step.element_size() <= 8 * CHUNK_BYTES:
            self._steps[i] = step
        return step


def shared_seed(generator: torch.Generator | None, device: torch.device) -> int:
    """A seed for the numbers that all candidates share: drawn from the generator, or always the same."""
    if generator is None:
        generator = torch.Generator(device=device).manual_seed(0)
    return drawn_seed(generator)
