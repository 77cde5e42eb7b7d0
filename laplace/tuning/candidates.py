"""Predictions of many prior precisions from one pass of the network."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laplace import batch as batches
from laplace.batch import Inputs
from laplace.enums import PredType
from laplace.noise import standard_normal
from laplace.predictive import latent
from laplace.tuning.objectives import Prediction

if TYPE_CHECKING:
    from laplace.parametric import ParametricLaplace
    from laplace.tuning.choose import TuningOptions


class Candidates:
    """Predictive distributions at every candidate of a grid of scalar prior precisions.

    Random numbers are drawn once and shared, so that candidates differ by the prior alone.

    Args:
        la: A fitted posterior; not changed.
        grid: Candidates, `[n]`.
        options: Predictive, link, samples and generator.
    """

    def __init__(self, la: ParametricLaplace, grid: Tensor, options: TuningOptions) -> None:
        latent.check_options(options.pred_type, options.link_approx, options.n_samples, None)
        la.check_unchanged()
        self.la = la
        self.grid = grid
        self.options = options
        evidence = la.evidence()
        self.scan = evidence.fit.curvature.scan(evidence.weights, la.problem.layout, **evidence.options)
        generator = options.generator
        if generator is None:
            generator = torch.Generator(device=grid.device).manual_seed(0)
        self.seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))

    def prepare(self, x: Inputs) -> tuple[Callable[[int], Prediction], Tensor]:
        """Runs the network on a batch.

        Returns:
            The prediction at candidate i, and the outputs `[B, C]`.
        """
        if self.options.pred_type == PredType.NN:
            return self._sampled(x)
        x = batches.to_device(x, self.la.problem.device)
        likelihood = self.la.likelihood_object
        as_latent = likelihood.latent_prediction and likelihood.has_noise
        # A user's loss sees the variances that predictions have, [B, C, C].
        diagonal = self.options.loss is None if as_latent else latent.needs_variances_only(self.options.link_approx)
        with closing(self.la.engine.jacobian(x)) as pieces:
            parts = [(self.scan.variances(jacobian, diagonal=diagonal), f) for jacobian, f in pieces]
        mean = torch.cat([f for _, f in parts]).to(self.grid.dtype)

        def predict(i: int) -> Prediction:
            delta = self.grid[i : i + 1]
            variance = torch.cat([variances(delta) for variances, _ in parts])
            if as_latent:
                return mean, variance
            return likelihood.predict(mean, variance, self.options.link_approx, self.options.n_samples, self._draws())

        return predict, mean

    def _draws(self) -> torch.Generator:
        return torch.Generator(device=self.grid.device).manual_seed(self.seed)

    def _sampled(self, x: Inputs) -> tuple[Callable[[int], Prediction], Tensor]:
        la, options = self.la, self.options
        noise = standard_normal((options.n_samples, len(la.mean)), la.mean, self._draws())
        run = latent.sampler(la.engine, la.mean, x, {})

        def predict(i: int) -> Prediction:
            precision = la.evidence(prior_precision=self.grid[i : i + 1]).precision
            samples = run(la.mean + precision.sample(noise))
            if la.likelihood_object.latent_prediction and la.likelihood_object.has_noise:
                return latent.moments(samples)
            return la.likelihood_object.inverse_link(samples).mean(0)

        return predict, run(la.mean.unsqueeze(0))[0]
