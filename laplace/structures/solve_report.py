"""Reports of iterative answers: residuals, products, standard errors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from laplace.errors import ApproximationWarning, warn


@dataclass(frozen=True)
class SolveReport:
    """The way to an answer, and how far it is from it.

    Attributes:
        question: `"variances"`, `"samples"`, `"log determinant"` or `"solutions"`.
        n_right: Right-hand sides that were solved.
        n_products: Products of the curvature with single vectors.
        residual: Largest residual √(rᵀ M r / bᵀ M b) at the end, M the preconditioner.
        tolerance: What it should be at most.
        standard_error: Of a log determinant, in nats, over its probes: that of the log evidence is half of it. None of
            other answers.
    """

    question: str
    n_right: int
    n_products: int
    residual: float
    tolerance: float
    standard_error: float | None = None

    @property
    def converged(self) -> bool:
        """True if every residual is within the tolerance."""
        return self.residual <= self.tolerance

    def __repr__(self) -> str:
        end = "" if self.converged else " (NOT converged)"
        error = "" if self.standard_error is None else f", standard error {self.standard_error:.2g}"
        return (
            f"SolveReport({self.question}: {self.n_right} right-hand sides, {self.n_products} products, largest "
            f"residual {self.residual:.2g}{end}{error})"
        )


class Tally:
    """Sums over the blocks of right-hand sides of one answer.

    Args:
        question: As of `SolveReport`.
    """

    def __init__(self, question: str) -> None:
        self.question = question
        self.n_right = self.n_products = 0
        self.residual = 0.0

    def add(self, n_right: int, n_products: int, relative: Tensor) -> None:
        """Counts a block, of residuals `[R]`; one that is NaN counts as infinite."""
        self.n_right, self.n_products = self.n_right + n_right, self.n_products + n_products
        self.residual = max(self.residual, float(relative.nan_to_num(math.inf, math.inf).max()))

    def report(self, tolerance: float, standard_error: float | None = None) -> SolveReport:
        """The report of the whole answer."""
        return SolveReport(self.question, self.n_right, self.n_products, self.residual, tolerance, standard_error)


class SolveReports:
    """The last report of every question: nothing of it decides an answer."""

    def __init__(self) -> None:
        self._last: dict[str, SolveReport] = {}

    def add(self, report: SolveReport) -> None:
        """Takes note of an answer.

        Warns:
            ApproximationWarning: It did not converge.
        """
        self._last[report.question] = report
        if not report.converged:
            warn(
                f"{report!r}: the tolerance is {report.tolerance:.2g}. Raise max_iterations, or the tolerance, in "
                "structure_kwargs, give a larger prior precision, or a float64 model where rounding is in the way.",
                ApproximationWarning,
            )

    def by_question(self) -> dict[str, SolveReport]:
        """The last report of every question that was asked."""
        return dict(self._last)
