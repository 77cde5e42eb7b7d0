"""Fits by hooks of users' classes: batches whose loss and curvature a method of theirs computes."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.curvature.user_backend import summarised, users_call
from laplace.engines.engine import BatchSummary, CurvatureEngine
from laplace.errors import UnsupportedError
from laplace.posterior.assembled import checked_H, with_parts, without_data
from laplace.posterior.overridden import member
from laplace.posterior.posterior import Posterior
from laplace.structures.base import Curvature, DataPass


class HookedPass(DataPass):
    """A reading of the data as a loop by hand, in which the object has the sums so far for its posterior.

    Args:
        posterior: Of an object whose class has the hooks.
        engine: Counts data, and computes what the hooks leave to the library.
        n_data: N, as the hooks are told it.

    Raises:
        UnsupportedError: One noise per output, for which hooks keep no terms.
    """

    def __init__(self, posterior: Posterior, engine: CurvatureEngine, n_data: int) -> None:
        if engine.split_outputs:
            raise UnsupportedError(
                "sigma_noise holds one noise per output, for which the curvature of a user's _curv_closure has no "
                "terms; give one noise."
            )
        self.engine, self.n_data, self.owner = engine, n_data, posterior.owner
        with replace(without_data(posterior), owner=posterior.owner).owned() as la:
            member(la, "_init_H")()
            self.summed: Posterior = la._posterior

    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        problem = self.engine.problem
        with replace(self.summed, owner=self.owner).owned() as la:
            with users_call(problem.module):
                loss, H = member(la, "_curv_closure")(x, y, self.n_data)
            now: Posterior = la._posterior
        summary = summarised(self.engine, x, y, torch.as_tensor(loss), "a _curv_closure")
        total, n_data = now.H, now.require_fitted().source.n_data + summary.count
        total += checked_H(now, H)
        self.summed = with_parts(now, H=total, n_data=n_data)
        return summary

    def finish(self) -> Curvature:
        return self.summed.fit.curvature


def number_of_data(loader: Iterable[Any], dict_key_y: str) -> int:
    """N of a loader, by its data set, or by reading it once.

    Raises:
        InvalidArgument: It can be read only once.
    """
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, Sized):
        return len(dataset)
    batches.require_rereadable(
        loader, "a fit by _curv_closure, which is told the number of all data, counts them first"
    )
    return sum(len(batches.split(batch, dict_key_y)[1]) for batch in loader)
