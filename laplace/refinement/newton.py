"""Minimisation of smooth convex functions by Newton steps, each found by preconditioned conjugate gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from torch import Tensor
from tqdm.auto import tqdm

from laplace.structures.krylov import solve

_T = TypeVar("_T")

_MAX_PRODUCTS = 500
_ARMIJO = 1e-4
_MAX_HALVINGS = 40


class Convex(Protocol):
    """A function of vectors `[P]` with a positive definite Hessian."""

    def value(self, at: Tensor) -> float:
        """Its value."""
        ...

    def gradient(self, at: Tensor) -> Tensor:
        """Its gradient, `[P]`."""
        ...

    def hessian_at(self, at: Tensor) -> Callable[[Tensor], Tensor]:
        """Products of its Hessian with vectors."""
        ...


@dataclass(frozen=True, eq=False)
class Minimum:
    """End of a minimisation.

    Attributes:
        at: `[P]`.
        values: The function at the start and after every step.
        distance: √(gᵀ M g), g the gradient there and M the preconditioner: about how far the minimum is, in units of
            its own scale.
        converged: Whether that is within the tolerance.
    """

    at: Tensor
    values: tuple[float, ...]
    distance: float
    converged: bool


def minimise(
    function: Convex,
    start: Tensor,
    precondition: Callable[[Tensor], Tensor],
    *,
    tolerance: float,
    max_steps: int,
    residual: float = 1e-2,
    progress_bar: bool = False,
) -> Minimum:
    """Newton's method with a line search; every step is solved to a residual that shrinks with the distance.

    Args:
        function: What is made small.
        start: `[P]`.
        precondition: An approximate inverse of the Hessian, symmetric and positive definite.
        tolerance: Largest `Minimum.distance` that counts as converged.
        max_steps: Newton steps.
        residual: Largest one, relative to the gradient, to which a step is solved.
        progress_bar: Show a progress bar.
    """
    at, values = start, [function.value(start)]
    gradient = function.gradient(at)
    distance = _norm(gradient, precondition(gradient))
    with tqdm(total=max_steps, desc="refine", disable=not progress_bar) as bar:
        for _ in range(max_steps):
            if distance <= tolerance:
                break
            relative = min(residual, max(0.1 * tolerance, distance))
            direction = solved(function.hessian_at(at), -gradient, precondition, relative)
            slope = float(gradient @ direction)
            step = backtracked(partial(_stepped, function, at, direction), values[-1], slope)
            bar.update()
            if step is None:  # nothing is gained any more but rounding
                break
            at, value = step
            values.append(value)
            gradient = function.gradient(at)
            distance = _norm(gradient, precondition(gradient))
    return Minimum(at, tuple(values), distance, distance <= tolerance)


def solved(
    product: Callable[[Tensor], Tensor], right: Tensor, precondition: Callable[[Tensor], Tensor], relative: float
) -> Tensor:
    """H⁻¹ r of r `[P]`, to a residual relative to r in the norm of the preconditioner."""
    most = min(_MAX_PRODUCTS, 2 * len(right) + 10)
    return solve(
        lambda rows: product(rows[0]).unsqueeze(0), right.unsqueeze(0), lambda rows: precondition(rows[0]).unsqueeze(0),
        relative=relative, max_iterations=most, verified=False,
    ).x[0]  # fmt: skip


def _stepped(function: Convex, at: Tensor, direction: Tensor, step: float) -> tuple[Tensor, float]:
    new = at + step * direction
    return new, function.value(new)


def _norm(vector: Tensor, image: Tensor) -> float:
    return math.sqrt(max(0.0, float(vector @ image)))


def backtracked(attempt: Callable[[float], tuple[_T, float]], value: float, slope: float) -> tuple[_T, float] | None:
    """The first of the steps 1, ½, ¼, … that makes a function smaller, up to its rounding (Armijo, 1966).

    Args:
        attempt: What a step leads to, and the function there.
        value: The function where the steps begin.
        slope: Its derivative along them, negative.
    """
    rounding = 1e-14 * abs(value)
    step = 1.0
    for _ in range(_MAX_HALVINGS):
        reached = attempt(step)
        if reached[1] <= value + _ARMIJO * step * slope + rounding:
            return reached
        step /= 2
    return None
