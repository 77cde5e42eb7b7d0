"""Choice of the outputs that a prediction computes: given ones, for all rows or of each its own, or the largest.

A language model has tens of thousands of outputs at every position, of which few are asked for: the answers to a
question, or the most probable tokens. Means of all of them come from one forward pass; variances are what costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from laplace.core.checks import require
from laplace.core.positions import OutputRows, rows_of
from laplace.errors import InvalidArgument, InvalidType

Given = Tensor | Sequence[int] | int | None
"""Indices `[K]` of every row, or `[B, *positions, K]` of each its own; a number K of the largest; None for all."""


@dataclass(frozen=True, eq=False)
class OutputChoice:
    """K of the C outputs of every row.

    Attributes:
        count: K.
        indices: The same for every row, `[K]`, or of each its own, `[B·T, K]`; None for the K largest.
        positions: Of indices of each row, the dimensions whose product is T; empty for outputs `[B, C]`.
    """

    count: int
    indices: Tensor | None = None
    positions: tuple[int, ...] = ()

    @classmethod
    def of(cls, given: Given, channel_dim: int = -1) -> OutputChoice | None:
        """The choice that was asked for; None for all outputs.

        Args:
            given: As users give it.
            channel_dim: Where the network's outputs, and indices of each row, have their channels.

        Raises:
            InvalidType: No integers.
            InvalidArgument: No outputs, or a number below 1.
        """
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

    def at(self, f: Tensor, positions: tuple[int, ...], start: int = 0) -> Tensor:
        """Indices `[n, K]` of the outputs of consecutive rows.

        Args:
            f: Means of all outputs of these rows, `[n, C]`.
            positions: Of outputs with positions, their dimensions.
            start: The first row.

        Raises:
            InvalidArgument: Indices of other rows, that are no outputs or not distinct, or more than there are.
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
        # An index out of range is told when conditions are read, and must not stop the device before.
        return indices.clamp(0, n_outputs - 1).expand(len(f), -1)

    def picked(self, rows: OutputRows) -> OutputRows:
        """The chosen outputs of rows `[*lead, B·T, C]`: of several, as of samples, the largest are those of their mean.

        Raises:
            InvalidArgument: As of `at`.
        """
        values = rows.values
        indices = self.at(values.flatten(0, -3).mean(0) if values.ndim > 2 else values, rows.positions)
        self.require_all(len(indices))
        return OutputRows(values.gather(-1, indices.expand(*values.shape[:-1], -1)), rows.positions, indices)

    def require_all(self, n_rows: int) -> None:
        """Raises unless the indices are of so many rows.

        Raises:
            InvalidArgument: They are of more.
        """
        if self.indices is not None and not self.is_shared and len(self.indices) != n_rows:
            raise self._of_other_rows(f"{n_rows} rows")

    def noise(self, sigma: Tensor) -> Tensor:
        """Σ of the chosen outputs, 0-dim or `[K]`, of a noise 0-dim or `[C]`.

        Raises:
            InvalidArgument: Rows have outputs of their own, and these have noises of their own.
        """
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
