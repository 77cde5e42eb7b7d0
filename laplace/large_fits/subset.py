"""Curvature of a random subset of the data, scaled up: unbiased, at a share of the cost (Immer et al., 2021, A.3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.checks import named
from laplace.core.positions import target_rows
from laplace.engines.engine import BatchSummary, CurvatureEngine, outputs
from laplace.errors import InvalidArgument, InvalidData
from laplace.fitting.checks import NO_DATA
from laplace.fitting.fit import FitOptions, Reading
from laplace.network import next_token
from laplace.posterior.posterior import Choices
from laplace.structures.fit import Fit


@dataclass(frozen=True, eq=False)
class SubsetReading(Reading):
    """M of N data, drawn without replacement, for N/M times the curvature of the M with loss and number of all N.

    The expectation over the choice is the curvature of all data, exactly for structures that are linear in it (full,
    block, diagonal) [Linearization, appendix A.3.1, subsample]. The loader is read once for the loss, by forward passes
    alone, and once for the curvature; the M data are held where a structure reads them several times.
    """

    options: FitOptions

    def fit(
        self, loader: Iterable[Any], engine: CurvatureEngine, choices: Choices, sums: Callable[[Iterable[Any]], Fit]
    ) -> Fit:
        summary, n_inputs = self._losses(loader, engine, choices.dict_key_y)
        chosen = self._drawn(n_inputs)
        part: Iterable[Any] = _Chosen(loader, engine, choices.dict_key_y, chosen)
        if choices.structure.n_passes > 1:  # a loader that shuffles would give other data in every reading
            part = list(part)
        fit, factor = sums(part), n_inputs / len(chosen)
        if factor == 1:
            return fit
        facts = {"loss_terms": summary.loss_terms, "n_data": summary.count, "n_outputs": summary.n_outputs}
        return replace(fit, curvature=fit.curvature.scaled(factor), gaps=summary.gaps, **facts)

    def _drawn(self, n_inputs: int) -> Tensor:
        """Sorted places of those that `options.generator` draws, `[M]`, whatever the order of the loader's data."""
        size, source = self.options.subset, self.options.generator
        if source is None or isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= n_inputs:
            raise InvalidArgument(f"subset={size}; it must be an integer from 1 to {n_inputs}, the number of data.")
        return torch.randperm(n_inputs, generator=source, device=source.device)[:size].sort().values.cpu()

    def _losses(self, loader: Iterable[Any], engine: CurvatureEngine, key: str) -> tuple[BatchSummary, int]:
        """Sums of what the data contribute besides curvature, and the number of inputs (with all their positions)."""
        likelihood = engine.likelihood
        total: BatchSummary | None = None
        n_inputs = 0
        for name, x, y in _counted(loader, engine, key, label="fit, loss", progress_bar=self.options.progress_bar):
            with named(name):
                rows = outputs(engine, x)
                f = rows.values
                targets = engine.checked(f, target_rows(y, f, rows.positions, engine.problem.channel_dim))
            terms, count = likelihood.loss_terms(f, targets).detach(), likelihood.count(f, targets)
            new = BatchSummary(terms, count, f.shape[1], likelihood.observations(f, targets))
            total, n_inputs = new if total is None else total.joined(new), n_inputs + len(y)
        if total is None:
            raise InvalidData(NO_DATA)
        return total, n_inputs


def _counted(
    loader: Iterable[Any], engine: CurvatureEngine, dict_key_y: str, *, label: str = "", progress_bar: bool = False
) -> Iterator[tuple[str, Inputs, Tensor]]:
    """Name, inputs and targets of every batch, without ignored ones."""
    device, rules, model = engine.problem.device, engine.target_rules, engine.problem.module
    return next_token.read(loader, dict_key_y, device, rules, model, label=label, progress_bar=progress_bar)


@dataclass(frozen=True, eq=False)
class _Chosen:
    """The batches of a loader, of which data are `chosen`: sorted places among those that are not ignored, `[M]`."""

    loader: Iterable[Any]
    engine: CurvatureEngine
    dict_key_y: str
    chosen: Tensor

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        start = 0
        for _, x, y in _counted(self.loader, self.engine, self.dict_key_y):
            n_data = len(y)
            first, last = torch.searchsorted(self.chosen, torch.tensor([start, start + n_data])).tolist()
            if last > first:
                places = (self.chosen[first:last] - start).to(y.device)
                yield batches.select(x, places, n_data), y[places]
            start += n_data
