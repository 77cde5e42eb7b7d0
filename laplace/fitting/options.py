"""How data are fitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any

import torch

from laplace.core.arguments import check_flag
from laplace.core.batch import DataWeights
from laplace.core.processes import Processes
from laplace.core.random_numbers import check_generator, drawn_seed
from laplace.engines.engine import CurvatureEngine
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.fitting.resuming import Resumable
from laplace.posterior.posterior import Posterior
from laplace.structures.base import DataPass

FirstPass = Callable[[CurvatureEngine], DataPass]
"""Makes the first pass over the data of a fit, for the engine that computes their curvature."""


@dataclass(frozen=True, eq=False)
class FitOptions:
    """How data are fitted: the arguments of `la.fit` besides the loader, checked when they are put together."""

    override: bool = True
    progress_bar: bool = False
    decay: float = 1.0
    subset: int | None = None
    generator: torch.Generator | None = None
    check_memory: bool = True
    group: Any = None
    sharded: bool = False
    resume: Any = None
    save_every: Any = None
    weight_fn: Any = None
    dict_key_weight: Any = None
    first_pass: FirstPass | None = None  # Makes the first pass over the data; None for that of the structure
    # The weight of data that are to be removed from the fit; None where data are added to it
    removed_weight: float | None = None

    def __post_init__(self) -> None:
        check_override(self.override)
        if not isinstance(self.decay, Real) or not 0 < self.decay <= 1:
            raise InvalidArgument(
                f"decay={self.decay}; it must be in (0, 1], where 1 keeps the former data as they are."
            )
        if self.override and self.decay != 1:
            raise InvalidArgument(
                f"decay={self.decay} with override=True, which forgets the former data at once; pass override=False."
            )
        if self.removed_weight is not None and not 0 < self.removed_weight <= 1:
            raise InvalidArgument(
                f"weight={self.removed_weight}; it must be in (0, 1]: 1, or decay**k after k fits with that decay."
            )
        if self.resumable is not None and self.subset is not None:
            raise UnsupportedError(f"resume= with subset={self.subset}, a choice that another process would draw anew.")
        if self.subset is not None:
            check_generator(self.generator)
            if self.generator is None:  # drawn here, since a fit puts the global source back where it was
                object.__setattr__(self, "generator", torch.Generator().manual_seed(drawn_seed()))

    @cached_property
    def processes(self) -> Processes | None:
        """Those that read the other shards of the data; None where all data are read here."""
        return Processes.of(self.group)

    @cached_property
    def weights(self) -> DataWeights | None:
        """How often every datum counts; None for once."""
        return DataWeights.of(self.weight_fn, self.dict_key_weight)

    @cached_property
    def resumable(self) -> Resumable | None:
        """The file from which the fit goes on, and to which it is written; None without one."""
        return Resumable.of(self.resume, self.save_every, self.processes)

    def within(self, network: Processes | None) -> FitOptions:
        """The same with the group of a network that is sharded by FSDP2, which must be of the ranks that were given."""
        if network is None or (self.processes is not None and self.processes.group is network.group):
            return self
        return replace(self, group=network.joined(self.processes).group)

    def settings(self, posterior: Posterior) -> dict[str, Any]:
        """What else all processes of a fit, or two that resume each other, must have in common, by name."""
        n_former = 0 if self.override or posterior.data is None else posterior.data.fit.n_data
        weights = {"weights of the data": self.weights and self.weights.name}
        if self.removed_weight is not None:
            return {"weight": self.removed_weight, "data of the former fit": n_former, **weights}
        how = {"override": self.override, "decay": self.decay}
        return {**how, "data of the former fit": n_former, "sharded": self.sharded, **weights}


def check_override(override: Any) -> None:
    """Checks the second argument of `fit`, in whose place targets are often given."""
    check_flag(
        "override",
        override,
        "fit takes one loader of batches (x, y): la.fit([(X, Y)]) for tensors X and Y, or a DataLoader of "
        "TensorDataset(X, Y); validation data are given to optimize_prior_precision(val_loader=...).",
    )
