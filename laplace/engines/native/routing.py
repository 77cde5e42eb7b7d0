"""Rows of a layer by their datum, where rows are no dimension of data: routed to experts, or packed.

A row belongs to the datum whose outputs it reaches. Of ⌈log₂ B⌉ cotangents the j-th is zero for all data whose number
has no j-th bit: the gradient of a row is zero, exactly, for those that its datum has not. A row that reaches the
outputs of several data gets a wrong number; like every other reading of a layer, this one must pass the probe of
`plan.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from laplace.engines.native.calls import LayerCall, UseOfParameter
from laplace.engines.native.capture import Capture
from laplace.engines.native.function_calls import SpreadCall
from laplace.engines.native.layers import RoutedRows, rule_for

_AT_ONCE = 2**22
"""Numbers of gradients up to which all cotangents go through one pass."""


@dataclass(frozen=True, eq=False)
class Routing:
    """The rows of all calls of a captured batch, found when they are asked for.

    Attributes:
        capture: The batch.
    """

    capture: Capture

    def by_datum(self, calls: Sequence[int]) -> list[RoutedRows]:
        """Rows of some calls by the datum whose outputs they reach."""
        return [RoutedRows.of(self._data[call], len(self.capture.f)) for call in calls]

    def by_output_row(self, calls: Sequence[int]) -> list[RoutedRows] | None:
        """Rows that reach one row of the outputs each, in its place, so that rows are data like any other.

        Returns:
            None where two reach one, where the outputs have no positions, or if this is no other reading than by axis.
        """
        if not self.capture.positions or not any(self._is_partial(call) for call in calls):
            return None
        places = [self._rows[call] for call in calls]
        if any(len(place) != len(place.unique()) for place in places):
            return None
        return [RoutedRows.at(place, len(self.capture.f), self.capture.n_positions) for place in places]

    def rerouted(self, uses: Sequence[UseOfParameter]) -> tuple[UseOfParameter, ...]:
        """Uses that were proven on a stand-in for this batch, with the rows of this one."""
        if not any(isinstance(use.axis, RoutedRows) for use in uses):
            return tuple(uses)
        calls = [use.call for use in uses]
        axes = self.by_output_row(calls) or self.by_datum(calls)
        return tuple(replace(use, axis=axis) for use, axis in zip(uses, axes, strict=True))

    def _is_partial(self, call: int) -> bool:
        """True if a call may have rows for some rows of the outputs: it has fewer, and not an image for every datum."""
        own = self.capture.calls[call]
        n_rows = _n_rows(own)
        return n_rows < len(self.capture.rows) and (n_rows != len(self.capture.f) or own.x.ndim <= 2)

    @cached_property
    def _data(self) -> list[Tensor]:
        return self._numbers(len(self.capture.f))

    @cached_property
    def _rows(self) -> list[Tensor]:
        return self._numbers(len(self.capture.rows))

    def _numbers(self, count: int) -> list[Tensor]:
        """Number of the datum, or of the row of the outputs, that every row of every call belongs to, `[R]`.

        A row without a gradient adds nothing but its input; it gets a number between those of the rows around it.
        """
        f, rows, calls = self.capture.f, self.capture.rows, range(len(self.capture.calls))
        bits = torch.arange(max(1, (count - 1).bit_length()), device=f.device)
        codes = torch.arange(count, device=f.device) >> bits.unsqueeze(1) & 1
        codes = torch.cat([torch.ones_like(codes[:1]), codes]).to(f)  # the first: of all
        u = 1 + torch.rand(rows.shape[1], generator=torch.Generator().manual_seed(0)).to(f)
        cotangents = (codes.repeat_interleave(len(rows) // count, 1).unsqueeze(2) * u).view(len(codes), *f.shape)
        step = len(codes) if len(codes) * sum(c.shape.numel() for c in self.capture.calls) <= _AT_ONCE else 1
        reached: list[list[Tensor]] = [[] for _ in calls]
        for part in cotangents.split(step):
            gradients = self.capture.gradients(part, calls)
            for n in calls:
                n_rows = _n_rows(self.capture.calls[n])
                g = gradients[n].detach().reshape(len(part), n_rows, -1 if n_rows else 1)
                reached[n].append(g.ne(0).any(2))
        each = (torch.cat(parts) for parts in reached)
        return [_between(r[0], (r[1:].long() << bits.unsqueeze(1)).sum(0), count) for r in each]


def _n_rows(call: LayerCall) -> int:
    """Number of rows of a call: the positions of one datum, if there were one."""
    if isinstance(call.by, SpreadCall):
        return call.shape[0] if call.shape else 0
    if not isinstance(call.by, nn.Module):
        return call.by.positions(1)
    rule = rule_for(call.by)
    return 0 if rule is None else rule.positions(call.by, call.x, 1)


def _between(known: Tensor, numbers: Tensor, count: int) -> Tensor:
    """Numbers `[R]` of the rows that are known, and of the others what lies between."""
    at, row = torch.nonzero(known).flatten(), torch.arange(len(known), device=known.device)
    ends = torch.cat([at.new_full((1,), -1), at, at.new_full((1,), len(known))])
    values = torch.cat([at.new_zeros(1), numbers[at], at.new_full((1,), count)]).clamp(max=count - 1)
    right = torch.searchsorted(ends, row).clamp(min=1)
    left = right - 1
    step = (values[right] - values[left]) * (row - ends[left]) // (ends[right] - ends[left])
    return torch.where(known, values[right], values[left] + step)
