"""Options of curvature engines: sampling, Kronecker factors, and how much is computed at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from laplace.errors import InvalidArgument, UnsupportedError
from laplace.likelihoods.recovered import Loss

MEMORY_BUDGET = 2**30
"""Bytes of output gradients held at once: fixed, so that results do not depend on the machine."""

MAX_PASSES = 4096
"""Backward passes that one batch of outputs with positions may take, one per position and output."""


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine, which reads those that concern its kind of curvature.

    Attributes:
        stochastic: Replace the output Hessian Λ by gradients at targets drawn from the model: the Monte-Carlo Fisher.
        num_samples: Targets drawn per datum.
        generator: Source of those draws; None for a new one with the seed of `torch.manual_seed`, so that the global
            random state is left alone.
        kfac_approx: `"expand"` or `"reduce"`: how Kronecker factors treat positions that share a weight
            (Eschenhagen et al., 2023).
        memory_budget: Bytes of output gradients, or of activations of vectorised passes, that are held at once.
        max_passes: Backward passes that a batch of outputs with positions may take.
        split_outputs: Keep one curvature term per output, so that a vector noise can be changed after `fit`.
        loss: A loss around that of the likelihood, which is of other targets; None where targets are as they are given.

    Raises:
        InvalidArgument: Unknown `kfac_approx`, or a number that is not positive.
        UnsupportedError: Sampled curvature cannot be kept per output.
    """

    stochastic: bool = False
    num_samples: int = 1
    generator: torch.Generator | None = None
    kfac_approx: str = "expand"
    memory_budget: int = MEMORY_BUDGET
    max_passes: int = MAX_PASSES
    split_outputs: bool = False
    loss: Loss | None = None

    def __post_init__(self) -> None:
        if self.max_passes <= 0:
            raise InvalidArgument(f"max_passes={self.max_passes} backward passes; it must be positive.")
        if self.memory_budget <= 0:
            raise InvalidArgument(f"memory_budget={self.memory_budget} bytes; it must be positive.")
        if self.kfac_approx not in ("expand", "reduce"):
            raise InvalidArgument(f"kfac_approx={self.kfac_approx!r}; accepted are 'expand' and 'reduce'.")
        if self.num_samples < 1:
            raise InvalidArgument(f"num_samples={self.num_samples}; it must be at least 1.")
        if self.stochastic and self.split_outputs:
            raise UnsupportedError(
                "stochastic=True with one noise per output: sampled curvature has no term per output. "
                "Use the exact GGN (stochastic=False) or a scalar sigma_noise."
            )
