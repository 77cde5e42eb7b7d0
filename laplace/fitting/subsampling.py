"""Curvature of a random subset of the data, scaled up: unbiased, at a share of the cost (Immer et al., 2021, A.3.1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.checks import named
from laplace.core.positions import target_rows
from laplace.core.progress import DataBar
from laplace.engines.engine import BatchSummary, CurvatureEngine, outputs
from laplace.errors import InvalidArgument, InvalidData
from laplace.fitting.checks import NO_DATA
from laplace.fitting.options import FitOptions
from laplace.network import next_token as targets_of
from laplace.posterior.posterior import Choices
from laplace.structures.fit import Fit


@dataclass(frozen=True, eq=False)
class Subsample:
    """M of N data, drawn without replacement, for N/M times the curvature of the M with loss and number of all N.

    The expectation over the choice is the curvature of all data, exactly for structures that are linear in it (full,
    block, diagonal). The loader is read once for the loss, by forward passes alone, and once for the curvature; the M
    data are held where a structure reads them several times.
    """

    loader: Iterable[Any]  # The M data
    summary: BatchSummary  # What all N data contribute besides curvature
    factor: float  # N/M

    @classmethod
    def drawn(cls, loader: Iterable[Any], engine: CurvatureEngine, choices: Choices, options: FitOptions) -> Subsample:
        """Those that `options.generator` draws, whatever the order of the loader's data."""
        bar = DataBar("fit, loss", loader, shown=options.progress_bar)
        summary, n_inputs = _losses(_counted(loader, engine, choices.dict_key_y), engine, bar)
        size, source = options.subset, options.generator
        if source is None or isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= n_inputs:
            raise InvalidArgument(f"subset={size}; it must be an integer from 1 to {n_inputs}, the number of data.")
        chosen = torch.randperm(n_inputs, generator=source, device=source.device)[:size].sort().values.cpu()
        part: Iterable[Any] = _Chosen(loader, engine, choices.dict_key_y, chosen)
        if choices.structure.n_passes > 1:  # a loader that shuffles would give other data in every reading
            part = list(part)
        return cls(part, summary, n_inputs / size)

    def scale_up(self, fit: Fit) -> Fit:
        """The fit of all data by that of the M."""
        if self.factor == 1:
            return fit
        curvature, summary = fit.curvature.scaled(self.factor), self.summary
        facts = {"loss_terms": summary.loss_terms, "n_data": summary.count, "n_outputs": summary.n_outputs}
        return replace(fit, curvature=curvature, **facts)


def _losses(
    data: Iterable[tuple[int, Inputs, Tensor]], engine: CurvatureEngine, bar: DataBar
) -> tuple[BatchSummary, int]:
    """Sums of what the data contribute besides curvature, and the number of inputs (each with all of its positions)."""
    likelihood = engine.likelihood
    total: Tensor | None = None
    n_data: float | Tensor = 0
    n_inputs = n_outputs = 0
    for number, x, y in data:
        with named(f"batch {number}"):
            rows = outputs(engine, x)
            f = rows.values
            targets = engine.checked(f, target_rows(y, f, rows.positions, engine.problem.channel_dim))
        terms = likelihood.loss_terms(f, targets)
        total = terms if total is None else total + terms
        n_data, n_inputs, n_outputs = n_data + likelihood.count(f, targets), n_inputs + len(y), f.shape[1]
        bar.add(len(y))
    bar.close()
    if total is None:
        raise InvalidData(NO_DATA)
    return BatchSummary(total.detach(), n_data, n_outputs), n_inputs


def _counted(loader: Iterable[Any], engine: CurvatureEngine, dict_key_y: str) -> Iterator[tuple[int, Inputs, Tensor]]:
    """The data that are not ignored, batch by batch, with the number of the batch."""
    device, rules = engine.problem.device, engine.target_rules
    for number, item in enumerate(loader):
        with named(f"batch {number}"):
            data = targets_of.counted(item, dict_key_y, device, rules, engine.problem.module)
        if data is not None:
            yield number, *data


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
