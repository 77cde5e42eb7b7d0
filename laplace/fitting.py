"""Accumulates batches into one frozen `Fit`: all of the data's part of a posterior."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from laplace import batch as batches
from laplace.batch import Inputs
from laplace.curvature.interface import BatchSummary, CurvatureInterface
from laplace.errors import InvalidArgument, InvalidData
from laplace.likelihoods.base import Likelihood
from laplace.structures.base import Curvature


@dataclass(frozen=True)
class Fit:
    """What the data say: additive over batches, shards and later data.

    Attributes:
        curvature: Unit curvature.
        loss_terms: Summed unit negative log likelihood, `[1]`, or `[C]` with one noise per output.
        n_data: Data seen that count.
        n_outputs: C.
        coverage: Which layer rule or fallback explained every treated tensor.
    """

    curvature: Curvature
    loss_terms: Tensor
    n_data: int
    n_outputs: int
    coverage: dict[str, str] = field(default_factory=dict)

    def __add__(self, other: Fit) -> Fit:
        if self.n_outputs != other.n_outputs:
            raise InvalidData(
                f"the new data have {other.n_outputs} outputs, the former ones {self.n_outputs}; they cannot be added."
            )
        if self.curvature.n_terms != other.curvature.n_terms:
            raise InvalidArgument(
                f"the former fit kept {self.curvature.n_terms} curvature terms, the new one {other.curvature.n_terms}: "
                "sigma_noise changed between one noise and one per output. Set it back to what it was, or fit all data "
                "with override=True."
            )
        return replace(
            self,
            curvature=self.curvature + other.curvature,
            loss_terms=self.loss_terms + other.loss_terms,
            n_data=self.n_data + other.n_data,
        )


def accumulate(
    loader: Iterable[Any],
    interface: CurvatureInterface,
    structure: type[Curvature],
    *,
    dict_key_y: str,
    progress_bar: bool = False,
) -> Fit:
    """Sums the curvature and the loss of every batch.

    Raises:
        InvalidData: No data, or a batch that cannot be used; nothing has been changed then.
    """
    total: Fit | None = None
    device = interface.problem.device
    for number, batch in enumerate(tqdm(loader, desc="fit", disable=not progress_bar)):
        try:
            x, y = batches.split(batch, dict_key_y)
            kept = without_ignored(batches.to_device(x, device), y.to(device), interface.likelihood)
            if kept is None:
                continue
            summary, curvature = structure.from_batch(interface, *kept, None if total is None else total.curvature)
            _check_finite(summary, curvature)
        except InvalidData as error:
            raise InvalidData(f"batch {number}: {error}") from error
        total = _extended(total, curvature, summary)
    if total is None:
        raise InvalidData("the loader gave no data that count; a Laplace approximation needs at least one datum.")
    return replace(total, coverage=_report(interface, total.curvature))


def _extended(total: Fit | None, curvature: Curvature, summary: BatchSummary) -> Fit:
    """The running sum with one more batch, whose curvature includes the former ones."""
    losses = summary.loss_terms.detach()
    if total is None:
        return Fit(curvature, losses, summary.n_data, summary.n_outputs)
    if total.n_outputs != summary.n_outputs:
        raise InvalidData(f"the batch has {summary.n_outputs} outputs, the former ones {total.n_outputs}.")
    return replace(
        total, curvature=curvature, loss_terms=total.loss_terms + losses, n_data=total.n_data + summary.n_data
    )


def _report(interface: CurvatureInterface, curvature: Curvature) -> dict[str, str]:
    """What explains every tensor, and in which form its curvature is held."""
    rules, forms = interface.coverage(), curvature.forms()
    if not forms:
        return rules
    names = interface.problem.layout.names
    return {name: f"{rules.get(name, '?')} → {form}" for name, form in zip(names, forms, strict=True)}


def without_ignored(x: Inputs, y: Tensor, likelihood: Likelihood) -> tuple[Inputs, Tensor] | None:
    """The data whose labels are not the ignored one: those count nowhere. None if there are none."""
    if likelihood.ignore_index is None or y.ndim != 1:
        return x, y
    keep = y != likelihood.ignore_index
    if keep.all():
        return x, y
    return (batches.select(x, keep, len(y)), y[keep]) if keep.any() else None


def _check_finite(summary: BatchSummary, curvature: Curvature) -> None:
    if not bool(summary.loss_terms.isfinite().all()) or not curvature.is_finite():
        raise InvalidData(
            "the loss or the curvature is not finite; the inputs, targets or weights hold NaN or infinity."
        )


def first_inputs(loader: Iterable[Any], dict_key_y: str, device: torch.device) -> tuple[Inputs, Iterable[Any]]:
    """Inputs of the first batch, and an iterable that still gives every batch; the loader is read once."""
    iterator = iter(loader)
    try:
        head = next(iterator)
    except StopIteration:
        raise InvalidData("the loader gave no data; a Laplace approximation needs at least one datum.") from None
    inputs = batches.to_device(batches.split(head, dict_key_y)[0], device)
    # Not the loader again: it may be a stream behind a fresh iterator, and would begin at the second batch.
    return inputs, _chained(head, iterator)


def _chained(head: Any, rest: Iterable[Any]) -> Iterable[Any]:
    yield head
    yield from rest
