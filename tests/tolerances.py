"""The one table of tolerances: every numeric comparison in the tests names a row of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """How far two arrays may be apart: |a − e| ≤ relative·|e| + scaled·max|e| + absolute.

    The scaled term is what makes the comparison independent of units: an entry that is zero by cancellation
    carries the rounding error of the entries it was summed from.

    Attributes:
        relative: Factor of the entry itself.
        scaled: Factor of the largest expected entry.
        absolute: Floor, for expectations that are zero throughout.
        standard_errors: Number of standard errors allowed (Monte-Carlo rows only).
    """

    relative: float
    scaled: float
    absolute: float
    standard_errors: float = 0.0


TOLERANCES: dict[str, Tolerance] = {
    # the same float64 numbers, reordered
    "exact": Tolerance(relative=1e-14, scaled=1e-14, absolute=0.0),
    # linear algebra in float64: products, solves and factorisations of well-conditioned matrices
    "algebra": Tolerance(relative=1e-10, scaled=1e-10, absolute=1e-12),
    # float64 numbers of the same posterior by another version or on another processor. The floors are for what is left
    # where larger numbers cancel: gradients of the evidence, covariances between data, a ratio of determinants near 1
    "fixture": Tolerance(relative=1e-9, scaled=1e-12, absolute=1e-12),
    # a curvature backend against the dense oracle, float64
    "backend": Tolerance(relative=1e-8, scaled=1e-8, absolute=1e-12),
    # float32 computations against a float64 truth
    "float32": Tolerance(relative=1e-4, scaled=1e-5, absolute=1e-7),
    # float32 where a factorisation amplifies rounding (evidence, solves)
    "float32_solve": Tolerance(relative=1e-3, scaled=1e-4, absolute=1e-6),
    # float32 where the condition of the matrix exceeds the precision: what is smaller than the rounding is lost
    "float32_ill": Tolerance(relative=5e-3, scaled=0.0, absolute=1e-6),
    # the same for several matrices, each of which loses what is smaller than its own rounding
    "float32_ill_blocks": Tolerance(relative=2e-2, scaled=0.0, absolute=1e-6),
    # bfloat16 activations, float32 curvature
    "bfloat16": Tolerance(relative=5e-2, scaled=5e-2, absolute=1e-3),
    # autograd against central finite differences in float64 (step 1e-5 or so)
    "finite_difference": Tolerance(relative=1e-5, scaled=1e-6, absolute=1e-8),
    # sample means against expectations; 5 standard errors fail by chance once in 1.7 million entries
    "mc": Tolerance(relative=0.0, scaled=0.0, absolute=1e-12, standard_errors=5.0),
}
