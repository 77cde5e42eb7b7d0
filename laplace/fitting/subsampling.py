"""Curvature of a random subset of the data, scaled up: unbiased, at a share of the cost (Immer et al., 2021, A.3.1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace import fitting
from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.checks import named
from laplace.core.positions import target_rows
from laplace.core.progress import DataBar
from laplace.core.random_numbers import check_generator, drawn_seed
from laplace.engines.engine import BatchSummary, CurvatureEngine, outputs
from laplace.errors import InvalidArgument, InvalidData
from laplace.fitting import Fit, ReadOptions
from laplace.network import next_token as targets_of
from laplace.structures.base import Curvature


@dataclass(frozen=True)
class Subset:
    """Number of data that the curvature is of, and their choice.

    Attributes:
        size: M.
        generator: Source of the choice.
    """

    size: int
    generator: torch.Generator

    @classmethod
    def drawn(cls, size: int, generator: torch.Generator | None) -> Subset:
        """Without a generator another choice each time, as the global seed leads.

        The seed is drawn here, since a fit puts the global source back where it was.

        Raises:
            InvalidType: The generator is no `torch.Generator`.
        """
        check_generator(generator)
        return cls(size, torch.Generator().manual_seed(drawn_seed()) if generator is None else generator)


def accumulate(
    loader: Iterable[Any],
    engine: CurvatureEngine,
    structure: type[Curvature],
    options: Any,
    subset: Subset,
    reading: ReadOptions,
) -> Fit:
    """N/M times the curvature of M data that are drawn without replacement, with loss and number of all N.

    The expectation over the choice is the curvature of all data, exactly for structures that are linear in it (full,
    block, diagonal). The loader is read once for the loss, by forward passes alone, and once for the curvature; the M
    data are held where a structure reads them several times.

    Args:
        loader: Batches; in whatever order, also in another one each time.
        engine: Computes the numbers of a batch.
        structure: The shape of the curvature.
        options: Its options.
        subset: How many data.
        reading: How they are read.

    Raises:
        OutOfMemory: Memory does not hold the fit.
        InvalidArgument: A subset that is not in 1 … N.
        InvalidData: A batch that cannot be used.
    """
    bar = DataBar("fit, loss", loader, shown=reading.progress_bar)
    summary, n_inputs = _losses(_counted(loader, engine, reading.dict_key_y), engine, bar)
    if isinstance(subset.size, bool) or not isinstance(subset.size, int) or not 1 <= subset.size <= n_inputs:
        raise InvalidArgument(f"subset={subset.size}; it must be an integer from 1 to {n_inputs}, the number of data.")
    source = subset.generator
    chosen = torch.randperm(n_inputs, generator=source, device=source.device)[: subset.size].sort().values.cpu()
    part: Iterable[Any] = _Chosen(loader, engine, reading.dict_key_y, chosen)
    if structure.n_passes > 1:  # a loader that shuffles would give other data in every reading
        part = list(part)
    fit = fitting.accumulate(part, engine, structure, options, reading)
    if subset.size == n_inputs:
        return fit
    curvature = fit.curvature.scaled(n_inputs / subset.size)
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
        raise InvalidData(
            "the loader gave no data, or all are ignored; a Laplace approximation needs at least one datum."
        )
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
    """The batches of a loader, less what was not chosen.

    Attributes:
        loader: All data.
        engine: Knows which data count.
        dict_key_y: Key of the targets.
        chosen: Sorted places among the data that are not ignored, `[M]`.
    """

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
