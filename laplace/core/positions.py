"""Outputs with positions: tokens `[B, T, C]` and pixels `[B, C, H, W]`, as rows `[B·T, C]` of single observations.

A network that says something of every position of a datum has a likelihood that is a product over positions,
p(y | f) = Π_bt p(y_bt | f_bt), so that the output Hessian has one C × C block per position. Everything that reads
outputs sees them as rows, data major, and knows nothing of positions; this file is the way there and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from laplace.core import batch as batches
from laplace.core.batch import ForwardFn, Inputs
from laplace.errors import InvalidArgument, InvalidData, InvalidType, UnsupportedError


@dataclass(frozen=True, eq=False)
class OutputRows:
    """Values of the rows of a batch.

    Attributes:
        values: `[*lead, B·T, C]`, or `[*lead, B·T, K]` of some outputs.
        positions: The dimensions whose product is T; empty for outputs `[B, C]`.
        outputs: Which of the network's outputs they are of, `[B·T, K]`; None for all.
    """

    values: Tensor
    positions: tuple[int, ...] = ()
    outputs: Tensor | None = None

    @classmethod
    def of(cls, f: Tensor, lead: int = 0) -> OutputRows:
        """Those of outputs `[*lead, B, *positions, C]`."""
        return cls(f.flatten(lead, -2), tuple(f.shape[lead + 1 : -1]))


def require_none(positions: tuple[int, ...], what: str, instead: str) -> None:
    """Raises for outputs with positions.

    Args:
        positions: Those of the outputs.
        what: Words for what takes none, with its argument.
        instead: Words for what does.

    Raises:
        UnsupportedError: There are some.
    """
    if positions:
        raise UnsupportedError(
            f"{what} takes outputs [B, C], but those of the network have positions, {list(positions)} (tokens or "
            f"pixels). {instead}; or choose one position t by forward_fn=lambda model, x: model(x)[:, t], with its "
            "targets only."
        )


@dataclass(frozen=True)
class ChannelsLast:
    """A way of calling a model after which the channels, the C outputs of a position, are the last dimension.

    Attributes:
        forward_fn: How the model is called.
        channel_dim: The dimension of the channels in what it returns.
    """

    forward_fn: ForwardFn
    channel_dim: int

    def __call__(self, model: nn.Module, x: Inputs) -> Tensor:
        """The outputs as `[B, *positions, C]`.

        Raises:
            InvalidArgument: The outputs have no such dimension, or it is that of the data.
        """
        f = batches.latent(self.forward_fn(model, x))
        if not -f.ndim < self.channel_dim < f.ndim:
            raise InvalidArgument(
                f"channel_dim={self.channel_dim}, but the network's outputs have shape {list(f.shape)}; give the "
                f"dimension of the classes or outputs of a position, from 1 to {f.ndim - 1}."
            )
        return f.movedim(self.channel_dim, -1)


def channels_last(forward_fn: ForwardFn | None, channel_dim: Any) -> ForwardFn | None:
    """The way of calling a model whose channels are in `channel_dim`; as it is where they are last, or not known.

    Raises:
        InvalidType: No function, or no integer.
        InvalidArgument: Dimension 0, that of the data.
    """
    if forward_fn is not None and not callable(forward_fn):
        raise InvalidType(f"forward_fn={forward_fn!r}; a function is accepted, forward_fn=lambda model, x: model(x).")
    if channel_dim is None:
        return forward_fn
    if isinstance(channel_dim, bool) or not isinstance(channel_dim, int):
        raise InvalidType(f"channel_dim={channel_dim!r}; an integer is accepted: 1 for [B, C, H, W], -1 for [B, T, C].")
    if channel_dim == 0:
        raise InvalidArgument("channel_dim=0 is the dimension of the data; give 1 for [B, C, H, W], -1 for [B, T, C].")
    return forward_fn if channel_dim == -1 else ChannelsLast(forward_fn or batches.call, channel_dim)


def as_returned(forward_fn: ForwardFn | None) -> ForwardFn | None:
    """The way of calling a model behind `channels_last`: outputs as the model returns them."""
    return forward_fn.forward_fn if isinstance(forward_fn, ChannelsLast) else forward_fn


def channel_of(f: Tensor, y: Tensor) -> int | None:
    """The dimension of a network's outputs that holds the classes, as the shape of labels says: 1 or −1.

    PyTorch's losses take labels `[B, H, W]` of outputs `[B, C, H, W]`; language models give `[B, T, C]`.

    Args:
        f: Outputs as the network gives them.
        y: Their targets; None is returned where they are no labels of positions.

    Raises:
        InvalidData: Labels that fit both readings.
    """
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
    """A network's outputs and their targets as rows: `[B·T, C]`, with labels `[B·T]` or values `[B·T, C]`.

    Args:
        f: Outputs as the network gives them.
        y: Targets.
        channel_dim: Where the outputs have their channels; None for what the labels say.

    Raises:
        InvalidData: Targets of another shape.
    """
    if f.ndim <= 2:
        return f, y
    channel_dim = (channel_of(f, y) or -1) if channel_dim is None else channel_dim
    last = f if channel_dim == -1 else f.movedim(channel_dim, -1)
    rows = last.flatten(0, -2)
    return rows, target_rows(y, rows, tuple(last.shape[1:-1]), channel_dim)


def rows_of(values: Tensor, channel_dim: int, lead: int = 0) -> OutputRows:
    """Values as users see them, `[*lead, B, *positions, C]` with the channels in `channel_dim`, as rows."""
    if channel_dim != -1 and values.ndim > 2 + lead:
        values = values.movedim(channel_dim + lead if channel_dim > 0 else channel_dim, -1)
    return OutputRows.of(values, lead)


def in_users_layout(values: Tensor, channel_dim: int, lead: int = 0) -> Tensor:
    """Values `[*lead, B, *positions, C]` with the channels where the network has them, after `lead` dimensions."""
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
        y: Targets, `[B, *positions]` (labels) or of the shape of the network's outputs (values).
        f: Outputs, `[B·T, C]`.
        positions: The dimensions whose product is T; empty for outputs `[B, C]`.
        channel_dim: Where the network's outputs have their channels.

    Raises:
        InvalidData: Another shape.
    """
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
