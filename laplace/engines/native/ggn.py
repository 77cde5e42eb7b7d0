"""The generalised Gauss–Newton matrix, exact or sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.engines.native.columns import Columns, RootColumns
from laplace.engines.native.engine import MAX_PASSES, MEMORY_BUDGET
from laplace.engines.native.outer import OuterEngine
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.likelihoods.base import Likelihood, OutputHessian
from laplace.weights.problem import Problem


class GGNEngine(OuterEngine):
    """Generalised Gauss–Newton matrix Σ_b J_bᵀ Λ_b J_b (= Fisher for exponential families), exact or sampled.

    Args:
        problem: The network and its treated tensors.
        likelihood: Loss and output Hessian.
        stochastic: Replace Λ by gradients at targets drawn from the model: the Monte-Carlo Fisher.
        num_samples: Targets drawn per datum.
        generator: Source of those draws; the default is a new one with the seed of `torch.manual_seed`, so that the
            global random state is left alone.
        kfac_approx: `"expand"` or `"reduce"`.
        memory_budget: Bytes of output gradients held at once.
        split_outputs: Keep one curvature term per output.
        max_passes: Backward passes that a batch of outputs with positions may take.

    Raises:
        InvalidArgument: `num_samples` is not positive.
        UnsupportedError: Sampled curvature cannot be kept per output.
    """

    kind = "ggn"
    name = "NativeGGN"

    def __init__(
        self,
        problem: Problem,
        likelihood: Likelihood,
        *,
        stochastic: bool = False,
        num_samples: int = 1,
        generator: torch.Generator | None = None,
        kfac_approx: str = "expand",
        memory_budget: int = MEMORY_BUDGET,
        split_outputs: bool = False,
        max_passes: int = MAX_PASSES,
    ) -> None:
        super().__init__(
            problem, likelihood, kfac_approx=kfac_approx, memory_budget=memory_budget, split_outputs=split_outputs,
            max_passes=max_passes,
        )  # fmt: skip
        if num_samples < 1:
            raise InvalidArgument(f"num_samples={num_samples}; it must be at least 1.")
        if stochastic and split_outputs:
            raise UnsupportedError(
                "stochastic=True with one noise per output: sampled curvature has no term per output. "
                "Use the exact GGN (stochastic=False) or a scalar sigma_noise."
            )
        self.stochastic = stochastic
        self.num_samples = num_samples
        self.generator = generator or torch.Generator(device=problem.device).manual_seed(torch.initial_seed())

    def cotangents(self, f: Tensor, y: Tensor) -> Columns:
        if self.stochastic:
            draws = self.likelihood.sample_gradients(f.to(self.dtype), y, self.num_samples, self.generator)
            return draws / self.num_samples**0.5
        return RootColumns.of(self.likelihood.hessian(f.to(self.dtype), y))

    def n_columns(self, f: Tensor) -> int:
        return self.num_samples if self.stochastic else f.shape[1]

    @property
    def apart(self) -> bool:
        return not self.stochastic

    def output_hessian(self, f: Tensor, y: Tensor) -> OutputHessian | None:
        return None if self.stochastic else self.likelihood.hessian(f.to(self.dtype), y)
