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

_NOTHING = 1e-9
"""Share of the data below which a count, a sum of weights that faded, is zero."""


@dataclass(frozen=True)
class Fit:
    """What the data say: additive over batches, shards and later data.

    Attributes:
        curvature: Unit curvature.
        loss_terms: Summed unit negative log likelihood, `[1]`, or `[C]` with one noise per output.
        n_data: Data seen that count; data that faded by a decay count less than one each.
        n_outputs: C.
        coverage: Which layer rule or fallback explained every treated tensor.
    """

    curvature: Curvature
    loss_terms: Tensor
    n_data: float
    n_outputs: int
    coverage: dict[str, str] = field(default_factory=dict)

    def __add__(self, other: Fit) -> Fit:
        self._check_matches(other)
        return replace(
            self,
            curvature=self.curvature + other.curvature,
            loss_terms=self.loss_terms + other.loss_terms,
            n_data=self.n_data + other.n_data,
        )

    def scaled(self, factor: float) -> Fit:
        """The fit of data that count `factor` times each.

        Raises:
            UnsupportedError: The structure is no sum over data.
        """
        if factor == 1:
            return self
        return replace(
            self,
            curvature=self.curvature.scaled(factor),
            loss_terms=factor * self.loss_terms,
            n_data=factor * self.n_data,
        )

    def minus(self, removed: Fit) -> Fit:
        """The fit of the data without some of them.

        Raises:
            InvalidData: More data than were seen, or of other outputs.
            CurvatureError: The curvature would be indefinite.
            UnsupportedError: The structure is no sum over data.
        """
        self._check_matches(removed)
        left = self.n_data - removed.n_data
        if left < -_NOTHING * self.n_data:
            raise InvalidData(
                f"{removed.n_data:g} data are to be removed, but the fit has seen {self.n_data:g}; remove only data "
                "that were fitted, once, and with the weight that they have by now."
            )
        curvature = self.curvature.minus(removed.curvature)
        if left <= _NOTHING * self.n_data:  # the prior, and no rounding errors of two equal sums
            return replace(self, curvature=curvature.scaled(0), loss_terms=0 * self.loss_terms, n_data=0)
        return replace(self, curvature=curvature, loss_terms=self.loss_terms - removed.loss_terms, n_data=left)

    def _check_matches(self, other: Fit) -> None:
        if self.n_outputs != other.n_outputs:
            raise InvalidData(f"the data have {other.n_outputs} outputs, those of the former fit {self.n_outputs}.")
        if self.curvature.n_terms != other.curvature.n_terms:
            raise InvalidArgument(
                f"the former fit kept {self.curvature.n_terms} curvature terms, the new one {other.curvature.n_terms}: "
                "sigma_noise changed between one noise and one per output. Set it back to what it was, or fit all data "
                "with override=True."
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


def check_decay(decay: float, *, override: bool) -> None:
    """Checks the weight of former data.

    Raises:
        InvalidArgument: It is not in (0, 1], or there are no former data that could fade.
    """
    if not 0 < decay <= 1:
        raise InvalidArgument(f"decay={decay}; it must be in (0, 1], where 1 keeps the former data as they are.")
    if override and decay != 1:
        raise InvalidArgument(
            f"decay={decay} with override=True, which forgets the former data at once; pass override=False."
        )


def check_weight(weight: float) -> None:
    """Checks the weight of data that are to be removed.

    Raises:
        InvalidArgument: It is not in (0, 1].
    """
    if not 0 < weight <= 1:
        raise InvalidArgument(f"weight={weight}; data count once, or decay**k times after k fits with a decay: (0, 1].")
