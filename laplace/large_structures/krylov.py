"""Krylov methods: conjugate gradients, preconditioners, log determinants by Lanczos' matrices, what they took.

Preconditioned conjugate gradients solve for many right-hand sides at once (Hestenes and Stiefel, 1952).

Every right-hand side has steps of its own and leaves the product as soon as it is solved, so that its solution does not
depend on its neighbours. The steps of one that starts at zero are also those of Lanczos (Golub and Van Loan, 2013,
section 11.3): with A = M^½ P M^½ they give the matrix T that A is in the Krylov space of M^½ b,

    T_jj = 1/α_j + β_{j−1}/α_{j−1},    T_{j,j+1} = √β_j / α_j.

Five vectors are held per right-hand side (b, x, r, and the direction with its product or its image), beside what
product and preconditioner pass through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.core import eigen
from laplace.core.precision_policy import widened
from laplace.core.random_numbers import standard_normal
from laplace.large_structures import subspace
from laplace.large_structures.low_rank import Subspace

Linear = Callable[[Tensor], Tensor]
"""A linear function of vectors `[R, P]`, which gives new tensors of the same shape."""

_RESTARTS = 3
"""Times that a solution is corrected whose residual is not what the steps said."""


@dataclass(frozen=True, eq=False)
class Steps:
    """Step sizes of R right-hand sides, float64."""

    alphas: Tensor  # α, `[R, m]`; 1 where a right-hand side had been solved before
    betas: Tensor  # β, `[R, m]`; 0 there, and after the last step

    def tridiagonal(self) -> Tensor:
        """T, `[R, m, m]`, with the identity in the place of steps that were not made."""
        diagonal = 1 / self.alphas
        diagonal[:, 1:] += self.betas[:, :-1] / self.alphas[:, :-1]
        beside = (self.betas[:, :-1].sqrt() / self.alphas[:, :-1]).diag_embed(1)
        return diagonal.diag_embed() + beside + beside.mT


@dataclass(frozen=True, eq=False)
class Solution:
    """Solution of P x = b for R right-hand sides."""

    x: Tensor  # `[R, P]`
    residual: Tensor | None  # b − P x, `[R, P]`; None where it was not verified
    # √(rᵀ M r / bᵀ M b) of the residuals, `[R]`, float64; 0 where b is zero, and infinite where rounding left bᵀ
    # M b no size
    relative: Tensor
    sizes: Tensor  # bᵀ M b, `[R]`, float64
    n_iterations: int  # Products with blocks of vectors
    n_products: int  # Products with single vectors
    record: tuple[tuple[list[int], Tensor, Tensor], ...]  # Of every step its rows, α and β

    @property
    def steps(self) -> Steps:
        """The steps from zero on."""
        shape = (len(self.x), len(self.record))
        alphas, betas = torch.ones(shape, dtype=self.sizes.dtype), torch.zeros(shape, dtype=self.sizes.dtype)
        for j, (rows, alpha, beta) in enumerate(self.record):
            made = [(row, i) for i, (row, value) in enumerate(zip(rows, alpha.tolist(), strict=True)) if value > 0]
            at, chosen = [row for row, _ in made], [i for _, i in made]
            alphas[at, j], betas[at, j] = alpha[chosen].cpu(), beta[chosen].cpu()
            if j:  # no step led to the next one of those that are solved, or were stopped by rounding
                stopped = torch.ones(len(self.x), dtype=torch.bool)
                stopped[at] = False
                betas[stopped, j - 1] = 0
        if self.record:
            betas[:, -1] = 0
        return Steps(alphas, betas)


def solve(
    product: Linear, right: Tensor, precondition: Linear, *, relative: float, max_iterations: int, verified: bool = True
) -> Solution:
    """Solves P x = b for positive definite P and b `[R, P]`."""
    run = _Run(product, precondition, right)
    run.descend(relative, max_iterations)
    record = tuple(run.record)
    for attempt in range(_RESTARTS + 1 if verified else 0):
        former = run.relative
        if not run.verify() or attempt == _RESTARTS or run.n_iterations >= max_iterations:
            break
        if not bool((run.relative > relative).any()) or (attempt and not bool((run.relative < 0.5 * former).any())):
            break
        run.descend(relative, max_iterations)
    return Solution(
        run.x, run.r if verified else None, run.relative, run.sizes, run.n_iterations, run.n_products, record
    )


class _Run:
    """Solutions with their residuals, as they change."""

    def __init__(self, product: Linear, precondition: Linear, right: Tensor) -> None:
        self.product = product  # P v
        self.precondition = precondition  # M v
        self.right = right  # b, `[R, P]`
        self.x = torch.zeros_like(right)  # Solutions, `[R, P]`
        self.r = right.clone()  # Residuals of those that are not solved, or of all after they were verified, `[…, P]`
        self.directions = right[:0]
        self.sizes = self.squares = dots(self.r, precondition(self.r))  # bᵀ M b, `[R]`, float64
        self.n_iterations = self.n_products = 0
        self.record: list[tuple[list[int], Tensor, Tensor]] = []

    @property
    def relative(self) -> Tensor:
        """√(rᵀ M r / bᵀ M b), `[R]`; infinite where rounding left bᵀ M b no size."""
        ratios = torch.where(self.sizes > 0, self.squares.abs() / self.sizes, math.inf)  # rounding has either sign
        return torch.where(self.sizes == 0, 0.0, ratios).sqrt()

    def descend(self, relative: float, max_iterations: int) -> None:
        """Steps from where the solutions are, until every residual is small enough.

        Of those that are solved, residual and direction are let go.
        """
        goals = relative**2 * self.sizes
        self.squares = self.squares.clone()
        rows = list(range(len(self.x)))
        left = self._unsolved(rows, goals, goals.new_ones(len(rows)))
        self.directions = self.precondition(self.r).clone()  # what a preconditioner gives may be the residual itself
        self._keep(rows, left)
        while left and self.n_iterations < max_iterations:
            rows = left
            alphas = self._step(rows)
            self._turn(rows, alphas)
            left = self._unsolved(rows, goals, alphas)
            self._keep(rows, left)

    def _keep(self, rows: list[int], left: list[int]) -> None:
        """Residuals and directions of some of the rows that they are of, one after the other: two blocks at most."""
        if len(left) < len(rows):
            places = [rows.index(row) for row in left]
            self.r = self.r[places]
            self.directions = self.directions[places]

    def _step(self, rows: list[int]) -> Tensor:
        """Moves the solutions of some rows along their directions; returns α, `[len(rows)]`."""
        products = self.product(self.directions)
        self.n_iterations, self.n_products = self.n_iterations + 1, self.n_products + len(rows)
        curved = dots(self.directions, products)
        alphas = self._of(rows, self.squares) / curved
        # Where one is not positive, rounding is all that is left.
        alphas = torch.where(torch.minimum(curved, alphas) > 0, alphas, 0.0)
        factors = alphas.to(self.x).unsqueeze(1)
        self.r.sub_(products.mul_(factors))
        del products
        if len(rows) == len(self.x):
            self.x.addcmul_(self.directions, factors)
        else:
            self.x.index_add_(0, torch.tensor(rows, device=self.x.device), self.directions * factors)
        return alphas

    def _turn(self, rows: list[int], alphas: Tensor) -> None:
        """The next directions, conjugate to those before."""
        images = self.precondition(self.r)
        squares = dots(self.r, images)
        betas = squares / self._of(rows, self.squares)
        self.directions.mul_(betas.to(self.directions).unsqueeze(1)).add_(images)
        if len(rows) == len(self.x):
            self.squares = squares
        else:
            self.squares[rows] = squares
        self.record.append((rows, alphas, betas))

    def _of(self, rows: list[int], values: Tensor) -> Tensor:
        """The entries of some right-hand sides, which are a block, out of all `[R]`."""
        return values if len(rows) == len(self.x) else values[rows]

    def _unsolved(self, rows: list[int], goals: Tensor, alphas: Tensor) -> list[int]:
        """Those of some rows that moved, by α, and whose residual is larger than its goal; one transfer."""
        numbers = torch.stack([self._of(rows, self.squares), self._of(rows, goals), alphas], 1).tolist()
        found = zip(rows, numbers, strict=True)
        return [row for row, (square, goal, alpha) in found if goal < square < math.inf and alpha > 0]

    def verify(self) -> bool:
        """Computes the residuals anew; False if no step was made, as where all right-hand sides are zero."""
        if not self.n_iterations:
            self.r = self.right
            return False
        self.r = self.directions = self.x[:0]
        products = self.product(self.x)
        self.n_iterations, self.n_products = self.n_iterations + 1, self.n_products + len(self.x)
        self.r = torch.sub(self.right, products, out=products)
        del products
        self.squares = dots(self.r, self.precondition(self.r))
        return True


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of rows `[R, P]`, `[R]`, in float64 where the device has it, without a copy of the rows."""
    return widened(torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).flatten())


# Precisions close to one that is known by its products, whose inverses and roots are cheap: its preconditioners.
#
# A sketch of the dominant eigenpairs takes their directions out of the spectrum and leaves the rest at the prior's
# (Frangella, Tropp and Udell, 2023), at two products with a few vectors for all hyper-parameters. Kronecker factors
# have the scale of every layer; where data are few beside the weights, they spread curvature over directions that have
# none.


_OVERSAMPLING = 10
"""Vectors of the sketch besides those that are kept."""

_SKETCH_BYTES = 2**29
"""Bytes of the directions at most: of the largest networks fewer are kept."""


def sketch(product: Linear, n_params: int, like: Tensor, rank: int, seed: int) -> Subspace:
    """Dominant eigenpairs of a matrix of P rows, by one step of subspace iteration from random vectors.

    Args:
        product: Multiplies vectors by it.
        n_params: P.
        like: A tensor of the dtype and on the device of the vectors.
        rank: How many.
        seed: Of the random vectors.
    """
    rank = min(rank, n_params, _SKETCH_BYTES // (like.element_size() * n_params))
    width = min(rank + _OVERSAMPLING, n_params) if rank else 0
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        basis = subspace.orthonormalise_(standard_normal((width, n_params), like, generator))
        if width:
            basis = subspace.orthonormalise_(product(basis))
        pairs = subspace.rayleigh_ritz_(basis, product(basis) if width else basis)
        count = int((pairs.values > 0).long().cumprod(0)[:rank].sum())
        return Subspace(pairs.vectors[:count].clone(), torch.diag(pairs.values[:count]).unsqueeze(0))


# Log determinants by stochastic Lanczos quadrature (Ubaru, Chen and Saad, 2017), preconditioned.
#
# With A = M^½ P M^½ close to the identity, log det P = −log det M + tr log A, and the trace is the mean of zᵀ log(A) z
# over probes z with independent signs. The steps of conjugate gradients for P u = M^−½ z are those of Lanczos from z,
# so that every quadratic form is ‖z‖² Σ_i τ_i² log θ_i, θ the eigenvalues of its tridiagonal matrix T and τ the first
# entries of their eigenvectors. The same u gives the gradient (Hutchinson, 1990; Gardner et al., 2018): with y = M^½ z
#
#     d log det P = E[uᵀ (dP) y],
#
# of which the preconditioner's own share E[yᵀ (dM⁻¹) y] is known exactly.


@dataclass(frozen=True, eq=False)
class TraceLog:
    """An estimate of tr log A."""

    value: Tensor  # 0-dim, float64
    standard_error: Tensor  # Of the mean over probes, float64; NaN of one probe

    @classmethod
    def from_solutions(cls, solutions: Sequence[Solution]) -> TraceLog:
        """From solutions of P u = M^−½ z for probes z, in blocks."""
        forms = torch.cat([_forms(solution) for solution in solutions])
        return cls(forms.mean(), forms.std() / len(forms) ** 0.5)


def _forms(solution: Solution) -> Tensor:
    """Quadratic forms zᵀ log(A) z of the probes of a block, `[R]`."""
    values, vectors = eigen.eigh(solution.steps.tridiagonal())
    logs = values.clamp(min=torch.finfo(values.dtype).tiny).log()
    return solution.sizes.cpu() * (vectors[:, 0].square() * logs).sum(1)


def signs(n_probes: int, n_params: int, like: Tensor, seed: int) -> Tensor:
    """Probes z of independent signs, `[n, P]`, the same for every call with a seed."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(2, (n_probes, n_params), generator=generator, dtype=torch.int8)
    return draws.to(like.device, like.dtype).mul_(2).sub_(1)


# Reports of iterative answers: residuals, products, standard errors.


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
    """Sums over the blocks of right-hand sides of one answer."""

    def __init__(self, question: str) -> None:
        self.question = question  # As of `SolveReport`
        self.n_right = self.n_products = 0
        self.residual = 0.0

    def add(self, n_right: int, n_products: int, relative: Tensor) -> None:
        """Counts a block, of residuals `[R]`; one that is NaN counts as infinite."""
        self.n_right, self.n_products = self.n_right + n_right, self.n_products + n_products
        self.residual = max(self.residual, float(relative.nan_to_num(math.inf, math.inf).max()))

    def report(self, tolerance: float, standard_error: float | None = None) -> SolveReport:
        """The report of the whole answer."""
        return SolveReport(self.question, self.n_right, self.n_products, self.residual, tolerance, standard_error)
