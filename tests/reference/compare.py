"""Comparison by the tolerance table, with a message that shows where two arrays differ most."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.tolerances import TOLERANCES

_SHOWN = 5


def assert_close(
    actual: Any, expected: Any, kind: str, *, standard_error: Any | None = None, label: str = "values"
) -> None:
    """Fails unless two arrays agree within a row of the tolerance table.

    Args:
        actual: What the library says; anything `torch.as_tensor` takes.
        expected: The truth, of the same shape.
        kind: Row of `TOLERANCES`.
        standard_error: Standard error of `actual` (scalar or same shape), required by the Monte-Carlo row.
        label: Name of the quantity, for the message.

    Raises:
        AssertionError: Shapes differ, values are not finite where they should be, or are too far apart.
    """
    got, want = _float64(actual), _float64(expected)
    if got.shape != want.shape:
        raise AssertionError(f"{label}: shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    if got.numel() == 0:
        return
    allowed = _allowed(want, kind, standard_error)
    # infinities and NaN must agree exactly; `inf - inf` would hide them
    same = (got == want) | (got.isnan() & want.isnan())
    error = (got - want).abs()
    bad = ~same & ~(error <= allowed)
    if bad.any():
        raise AssertionError(_report(label, kind, got, want, error / allowed.clamp(min=1e-300), bad))


def _float64(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()


def _allowed(want: Tensor, kind: str, standard_error: Any | None) -> Tensor:
    row = TOLERANCES[kind]
    finite = want[want.isfinite()].abs()
    largest = finite.max() if finite.numel() else want.new_zeros(())
    allowed = row.relative * want.abs() + row.scaled * largest + row.absolute
    if row.standard_errors:
        if standard_error is None:
            raise ValueError(f"kind={kind!r} compares by standard errors: pass standard_error=")
        allowed = allowed + row.standard_errors * _float64(standard_error)
    return allowed.expand_as(want)


def _report(label: str, kind: str, got: Tensor, want: Tensor, ratio: Tensor, bad: Tensor) -> str:
    ratio = torch.where(bad, ratio.nan_to_num(nan=float("inf")), torch.zeros_like(ratio)).flatten()
    worst = ratio.argsort(descending=True)[: min(_SHOWN, int(bad.sum()))]
    lines = [f"{label}: {int(bad.sum())} of {bad.numel()} entries differ (kind={kind!r}); the worst:"]
    for flat in worst.tolist():
        where = _index(flat, got.shape)
        lines.append(
            f"  [{where}] got {got.flatten()[flat]:.12g}, expected {want.flatten()[flat]:.12g}, "
            f"{ratio[flat]:.3g} x the tolerance"
        )
    return "\n".join(lines)


def _index(flat: int, shape: torch.Size) -> str:
    parts: list[str] = []
    for size in reversed(shape):
        parts.append(str(flat % size))
        flat //= size
    return ", ".join(reversed(parts))
