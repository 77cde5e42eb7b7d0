"""The generalised Gauss–Newton matrix, exact or sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.engines.engine import EngineOptions
from laplace.engines.native.columns import Columns, RootColumns
from laplace.engines.native.outer import OuterEngine
from laplace.likelihoods.base import Likelihood, OutputHessian
from laplace.likelihoods.observed import Observed
from laplace.likelihoods.output_hessian import columns_of
from laplace.weights.problem import Problem


class GGNEngine(OuterEngine):
    """Generalised Gauss–Newton matrix Σ_b J_bᵀ Λ_b J_b (= Fisher for exponential families), exact or sampled.

    Args:
        problem: The network and its random parameters.
        likelihood: Loss and output Hessian.
        options: Sampling, Kronecker factors, and how much is computed at once.
    """

    kind = "ggn"
    name = "NativeGGN"

    def __init__(self, problem: Problem, likelihood: Likelihood, options: EngineOptions) -> None:
        super().__init__(problem, likelihood, options)
        self.generator = options.generator or torch.Generator(device=problem.device).manual_seed(torch.initial_seed())

    def cotangents(self, f: Tensor, targets: Observed, hessian: OutputHessian | None = None) -> Columns:
        if self.options.stochastic:
            draws = targets.sample_gradients(f.to(self.dtype), self.options.num_samples, self.generator)
            return draws / self.options.num_samples**0.5
        return RootColumns.of(targets.hessian(f.to(self.dtype)) if hessian is None else hessian)

    def n_columns(self, f: Tensor) -> int:
        if self.options.stochastic:
            return self.options.num_samples
        return columns_of(f.shape[1], sums_to_zero=self.likelihood.sums_to_zero)

    @property
    def apart(self) -> bool:
        return not self.options.stochastic

    def output_hessian(self, f: Tensor, targets: Observed) -> OutputHessian | None:
        return None if self.options.stochastic else targets.hessian(f.to(self.dtype))
