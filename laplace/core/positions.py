"""Outputs as rows: tokens `[B, T, C]` and pixels `[B, C, H, W]` as `[B·T, C]`, and the choice of some outputs.

A network that says something of every position of an input has a likelihood that is a product over positions,
p(y | f) = Π_bt p(y_bt | f_bt), so that the output Hessian has one C × C block per position. Everything that reads
outputs sees them as rows, inputs first, and knows nothing of positions; this file is the way there and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from laplace.core import batch as batches
from laplace.core.batch import ForwardFn, Inputs
from laplace.core.checks import require
from laplace.errors import InvalidArgument, InvalidData, InvalidType, UnsupportedError


@dataclass(frozen=True, eq=False)
class OutputRows:
    """Values of the rows of a batch."""

    values: Tensor  # `[*lead, B·T, C]`, or `[*lead, B·T, K]` of some outputs
    positions: tuple[int, ...] = ()  # the dimensions whose product is T; empty for outputs `[B, C]`
    outputs: Tensor | None = None  # which of the network's outputs they are of, `[B·T, K]`; None for all

    @classmethod
    def from_outputs(cls, f: Tensor, lead: int = 0) -> OutputRows:
        """Those of outputs `[*lead, B, *positions, C]`."""
        return cls(f.flatten(lead, -2), tuple(f.shape[lead + 1 : -1]))


def require_none(positions: tuple[int, ...], what: str, instead: str) -> None:
    """Raises for outputs with positions."""
    if positions:
        raise UnsupportedError(
            f"{what} takes outputs [B, C], but those of the network have positions, {list(positions)} (tokens or "
            f"pixels). {instead}; or choose one position t by forward_fn=lambda model, x: model(x)[:, t], with its "
            "targets only."
        )


NO_CHANNELS = 0
"""`channel_dim` of outputs `[B]`, one number per datum: they have no dimension of channels."""


@dataclass(frozen=True)
class ChannelsLast:
    """A way of calling a model after which the channels, the C outputs of a position, are the last dimension."""

    forward_fn: ForwardFn  # how the model is called
    channel_dim: int  # the dimension of the channels in what it returns

    def __call__(self, model: nn.Module, x: Inputs) -> Tensor:
        """The outputs as `[B, *positions, C]`."""
        f = batches.latent(self.forward_fn(model, x))
        if self.channel_dim == NO_CHANNELS:
            return _in_one_column(f)
        if not -f.ndim < self.channel_dim < f.ndim:
            raise InvalidArgument(
                f"channel_dim={self.channel_dim}, but the network's outputs have shape {list(f.shape)}; give the "
                f"dimension of the classes or outputs of a position, from 1 to {f.ndim - 1}."
            )
        return f.movedim(self.channel_dim, -1)


def _in_one_column(f: Tensor) -> Tensor:
    """Outputs `[B]`, or the single one that `squeeze()` left of a batch of one, as `[B, 1]`."""
    if f.ndim > 1:
        raise InvalidArgument(
            f"channel_dim=0 is of outputs [B], one number per datum, but the network's have shape {list(f.shape)}: "
            "leave channel_dim= away."
        )
    return f.reshape(-1, 1)


def channels_last(forward_fn: ForwardFn | None, channel_dim: Any) -> ForwardFn | None:
    """The way of calling a model whose channels are in `channel_dim`; as it is where they are last, or not known."""
    if forward_fn is not None and not callable(forward_fn):
        raise InvalidType(f"forward_fn={forward_fn!r}; a function is accepted, forward_fn=lambda model, x: model(x).")
    if channel_dim is None:
        return forward_fn
    if isinstance(channel_dim, bool) or not isinstance(channel_dim, int):
        raise InvalidType(
            f"channel_dim={channel_dim!r}; an integer is accepted: 1 for [B, C, H, W], -1 for [B, C] and [B, T, C], 0 "
            "for outputs [B] of one number per datum."
        )
    return forward_fn if channel_dim == -1 else ChannelsLast(forward_fn or batches.call, channel_dim)


def as_returned(forward_fn: ForwardFn | None) -> ForwardFn | None:
    """The way of calling a model behind `channels_last`: outputs as the model returns them."""
    return forward_fn.forward_fn if isinstance(forward_fn, ChannelsLast) else forward_fn


def channel_of(f: Tensor, y: Tensor) -> int | None:
    """The dimension of a network's outputs that holds the classes, as the shape of labels says: 1 or −1.

    PyTorch's losses take labels `[B, H, W]` of outputs `[B, C, H, W]`; language models give `[B, T, C]`. Outputs `[B]`
    of targets `[B]` have none, see `NO_CHANNELS`.
    """
    if f.ndim < 2 and y.ndim == 1:
        return NO_CHANNELS if f.numel() == len(y) else None
    if f.ndim < 3 or y.is_floating_point():
        return None
    last, second = y.shape == f.shape[:-1], y.shape == f.shape[:1] + f.shape[2:]
    if not (last and second):
        return -1 if last else 1 if second else None
    raise InvalidData(
        f"the network's outputs have shape {list(f.shape)}, the labels {list(y.shape)}: the classes may be dimension 1 "
        "or the last one. Say by channel_dim=1 or channel_dim=-1 which it is."
    )


def unrolled(rows: Tensor, positions: tuple[int, ...], dim: int = 0) -> Tensor:
    """Rows `[…, B·T, …]` in dimension `dim` as `[…, B, *positions, …]`."""
    return rows.unflatten(dim, (-1, *positions)) if positions else rows


def as_rows(f: Tensor, y: Tensor, channel_dim: int | None) -> tuple[Tensor, Tensor]:
    """A network's outputs and their targets as rows: `[B·T, C]`, with labels `[B·T]` or values `[B·T, C]`."""
    channel_dim = channel_of(f, y) if channel_dim is None else channel_dim
    if channel_dim == NO_CHANNELS:
        f = _in_one_column(f)
        return f, target_rows(y, f, (), channel_dim)
    if f.ndim <= 2:
        return f, y
    channel_dim = -1 if channel_dim is None else channel_dim
    last = f if channel_dim == -1 else f.movedim(channel_dim, -1)
    rows = last.flatten(0, -2)
    return rows, target_rows(y, rows, tuple(last.shape[1:-1]), channel_dim)


def rows_of(values: Tensor, channel_dim: int, lead: int = 0) -> OutputRows:
    """Values as users see them, `[*lead, B, *positions, C]` with the channels in `channel_dim`, as rows."""
    if channel_dim == NO_CHANNELS:
        values = values.unsqueeze(-1)
    elif channel_dim != -1 and values.ndim > 2 + lead:
        values = values.movedim(channel_dim + lead if channel_dim > 0 else channel_dim, -1)
    return OutputRows.from_outputs(values, lead)


def in_users_layout(values: Tensor, channel_dim: int, lead: int = 0) -> Tensor:
    """Values `[*lead, B, *positions, C]` with the channels where the network has them, after `lead` dimensions."""
    if channel_dim == NO_CHANNELS:
        return values.squeeze(-1)
    if channel_dim == -1 or values.ndim == 2 + lead:
        return values
    return values.movedim(-1, channel_dim + lead if channel_dim > 0 else channel_dim)


def rows_that_count(y: Tensor, positions: tuple[int, ...], ignore_index: int | None) -> Tensor | None:
    """Rows of outputs with positions whose labels are not the ignored one, `[n]`; None for all."""
    if not positions or ignore_index is None or y.ndim != 1:
        return None
    rows = (y != ignore_index).nonzero().flatten()
    return None if len(rows) == len(y) else rows


def target_rows(y: Tensor, f: Tensor, positions: tuple[int, ...], channel_dim: int) -> Tensor:
    """Targets of outputs with positions as rows: labels `[B·T]` or values `[B·T, C]`; others as they are.

    Args:
        y: Targets, `[B, *positions]` (labels) or of the shape of the network's outputs (values), `[B]` of outputs
            `[B]`.
        f: Outputs, `[B·T, C]`.
        positions: The dimensions whose product is T; empty for outputs `[B, C]`.
        channel_dim: Where the network's outputs have their channels.
    """
    if channel_dim == NO_CHANNELS and isinstance(y, Tensor) and y.shape == f.shape[:1]:
        return y.unsqueeze(-1)
    if not positions or not isinstance(y, Tensor):
        return y
    last = unrolled(f, positions)
    whole, lead = in_users_layout(last, channel_dim).shape, last.shape[:-1]
    if y.shape == whole:
        return y.movedim(channel_dim, -1).reshape(f.shape)
    if y.shape[: len(lead)] == lead:
        return y.flatten(0, len(positions))
    others = [d for d in range(1, len(whole)) if y.shape == whole[:d] + whole[d + 1 :]]
    remedy = (
        f"or pass channel_dim={others[0]}, which these targets fit" if others else "or say by channel_dim= which is"
    )
    extra = positions[0] - y.shape[1] if len(positions) == 1 and y.ndim == 2 else 0
    if extra > 0:
        cut = f"[:, {extra}:], or [:, {extra - 1}:-1] of next tokens, of which a learned prompt predicts the first"
        remedy += (
            "; or say by forward_fn=lambda model, x: model(...).logits[:, a:b] which positions the labels are of: "
            + ("[:, :-1] of next tokens" if extra == 1 else cut)
        )
    if whole[-1] == 1:
        remedy += f"; where {list(whole[:-1])} are the outputs of the data, return them without the last dimension"
    raise InvalidData(
        f"Targets have shape {list(y.shape)}, outputs {list(whole)}, of which dimension "
        f"{channel_dim % len(whole)} is that of the classes or outputs of a position; labels {list(lead)} or values "
        f"{list(whole)} are accepted: reshape the targets, {remedy}."
    )


# The outputs that a prediction computes: given ones, for all rows or for each row, or the largest.
#
# A language model has tens of thousands of outputs at every position, of which few are asked for: the answers to a
# question, or the most probable tokens. Means of all of them come from one forward pass; variances are what costs.


WhichOutputs = Tensor | Sequence[int] | int | None
"""Indices `[K]` of every row, or `[B, *positions, K]` of each its own; a number K of the largest; None for all."""


@dataclass(frozen=True, eq=False)
class OutputChoice:
    """K of the C outputs of every row."""

    count: int  # K
    # the same for every row, `[K]`, or of each its own, `[B·T, K]`; None for the K largest
    indices: Tensor | None = None
    # of indices of each row, the dimensions whose product is T; empty for outputs `[B, C]`
    positions: tuple[int, ...] = ()

    @classmethod
    def from_argument(cls, given: WhichOutputs, channel_dim: int = -1) -> OutputChoice | None:
        """The choice that was asked for; None for all outputs."""
        if given is None:
            return None
        if isinstance(given, int | Integral):  # NumPy's, too
            return cls(_count(given))
        indices = _integers(given)
        if indices.ndim == 1:
            return cls(len(indices), indices)
        rows = rows_of(indices, channel_dim)
        return cls(rows.values.shape[1], rows.values, rows.positions)

    @property
    def is_shared(self) -> bool:
        """True if the outputs are the same for every row."""
        return self.indices is not None and self.indices.ndim == 1

    def chosen(self, f: Tensor, positions: tuple[int, ...], start: int = 0) -> Tensor:
        """Indices `[n, K]` of the outputs of consecutive rows.

        Args:
            f: Means of all outputs of these rows, `[n, C]`.
            positions: Of outputs with positions, their dimensions.
            start: The first row.
        """
        n_outputs = f.shape[1]
        if self.indices is None:
            if self.count > n_outputs:
                raise InvalidArgument(f"outputs={self.count}, but the network has {n_outputs} outputs.")
            return f.detach().topk(self.count).indices
        indices = self.indices.to(f.device)
        if not self.is_shared:
            self._check_rows(start + len(f), positions)
            indices = indices[start : start + len(f)]
        self._check(indices, n_outputs)
        # An index out of range is refused when conditions are read, and must not stop the device before.
        return indices.clamp(0, n_outputs - 1).expand(len(f), -1)

    def picked(self, rows: OutputRows) -> OutputRows:
        """The chosen outputs of rows `[*lead, B·T, C]`; of several, as of samples, the largest of their mean."""
        values = rows.values
        indices = self.chosen(values.flatten(0, -3).mean(0) if values.ndim > 2 else values, rows.positions)
        self.require_all(len(indices))
        return OutputRows(values.gather(-1, indices.expand(*values.shape[:-1], -1)), rows.positions, indices)

    def require_all(self, n_rows: int) -> None:
        """Raises unless the indices are of so many rows."""
        if self.indices is not None and not self.is_shared and len(self.indices) != n_rows:
            raise self._of_other_rows(f"{n_rows} rows")

    def noise(self, sigma: Tensor) -> Tensor:
        """σ of the chosen outputs, 0-dim or `[K]`, of a noise 0-dim or `[C]`."""
        if sigma.ndim == 0:
            return sigma
        if self.indices is None or not self.is_shared:
            raise InvalidArgument(
                "outputs= differs between rows, but every output has a noise of its own: give the same indices [K] for "
                "all rows."
            )
        self._check(self.indices, len(sigma))
        return sigma[self.indices.to(sigma.device).clamp(0, len(sigma) - 1)]

    def _check_rows(self, stop: int, positions: tuple[int, ...]) -> None:
        if self.positions != positions:
            raise self._of_other_rows(f"rows with positions {list(positions)}" if positions else "rows of no positions")
        if self.indices is not None and stop > len(self.indices):
            raise self._of_other_rows(f"more rows, at least {stop}")

    def _of_other_rows(self, what: str) -> InvalidArgument:
        n_rows = 0 if self.indices is None else len(self.indices)
        positions = f", positions {list(self.positions)}" if self.positions else ""
        return InvalidArgument(
            f"outputs= has {self.count} indices for each of {n_rows} rows{positions}; the inputs give {what}. Give "
            "indices [K] for all rows, or the network's own shape with K in place of C: [B, K], [B, T, K]."
        )

    def _check(self, indices: Tensor, n_outputs: int) -> None:
        require(
            (indices >= 0) & (indices < n_outputs),
            lambda: InvalidArgument(
                f"outputs= has indices from {int(indices.min())} to {int(indices.max())}; the network has {n_outputs} "
                f"outputs, 0 to {n_outputs - 1}. Ignored labels, such as -100, are no outputs."
            ),
        )
        ordered = indices.sort(-1).values
        require(
            ordered[..., 1:] != ordered[..., :-1],
            lambda: InvalidArgument("outputs= names an output twice; give every index of a row once."),
        )


def _count(given: int | Integral) -> int:
    if isinstance(given, bool):
        raise _no_integers(f"type bool ({given})")
    if int(given) < 1:
        raise InvalidArgument(f"outputs={given} of the largest outputs; give at least 1, or indices.")
    return int(given)


def _integers(given: Tensor | Sequence[int]) -> Tensor:
    try:
        indices = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_integers(f"type {type(given).__name__}") from error
    is_integer = not (indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool)
    if indices.numel() and not is_integer:
        raise _no_integers(f"dtype {indices.dtype}")
    if indices.ndim == 0 or indices.numel() == 0:
        raise InvalidArgument(
            f"outputs= has shape {list(indices.shape)}; give indices [K], or [B, K] of each row, or an integer K for "
            "the K largest."
        )
    return indices.long()


def _no_integers(what: str) -> InvalidType:
    return InvalidType(
        f"outputs= is of {what}; accepted are indices of outputs, integers [K] or [B, K], and an integer K for the K "
        "largest."
    )
