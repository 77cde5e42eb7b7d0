"""Preconditioned conjugate gradients: solutions, residuals, the steps of Lanczos, and what is held."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from laplace.large_structures import krylov as cg
from laplace.large_structures.krylov import TraceLog, signs
from tests.reference.compare import assert_close

N = 40


def system(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """A positive definite matrix `[N, N]` with eigenvalues over four decades, and right-hand sides `[5, N]`."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(N, N, generator=generator, dtype=torch.float64)).Q
    matrix = basis @ torch.diag(torch.logspace(-2, 2, N, dtype=torch.float64)) @ basis.T
    return matrix.to(dtype), torch.randn(5, N, generator=generator, dtype=torch.float64).to(dtype)


def jacobi(matrix: Tensor) -> cg.Linear:
    return lambda vectors: vectors / matrix.diagonal()


def solved(matrix: Tensor, right: Tensor, relative: float = 1e-9, **options: Any) -> cg.Solution:
    options = {"max_iterations": 400} | options
    return cg.solve(lambda v: v @ matrix, right, jacobi(matrix), relative=relative, **options)


def test_solutions_and_their_residuals() -> None:
    matrix, right = system()
    found = solved(matrix, right)
    assert_close(found.x, torch.linalg.solve(matrix, right.T).T, "backend", label="solutions")
    assert_close(found.residual, right - found.x @ matrix, "algebra", label="residuals")
    images = jacobi(matrix)(found.residual)
    expected = ((found.residual * images).sum(1) / (right * jacobi(matrix)(right)).sum(1)).sqrt()
    assert_close(found.relative, expected, "algebra", label="relative residuals")
    assert bool((found.relative <= 1e-9).all())


def test_a_right_hand_side_does_not_see_its_neighbours() -> None:
    """The last one is an eigenvector, solved in one step; all others go on."""
    matrix, right = system()
    right = torch.cat([right, torch.linalg.eigh(matrix)[1][:, :1].T])
    together = cg.solve(lambda v: v @ matrix, right, lambda v: v, relative=1e-6, max_iterations=400, verified=False)
    apart = [
        cg.solve(lambda v: v @ matrix, row[None], lambda v: v, relative=1e-6, max_iterations=400, verified=False)
        for row in right
    ]
    assert_close(
        together.x, torch.cat([one.x for one in apart]), "float32", label="solutions"
    )  # steps amplify rounding
    apart_products = sum(one.n_products for one in apart)
    assert abs(together.n_products - apart_products) <= 0.05 * apart_products  # where rounding ends one step later
    assert together.n_products < 0.95 * together.n_iterations * len(right)


def test_zeros_are_solved_by_zeros() -> None:
    matrix, right = system()
    found = solved(matrix, right * torch.tensor([0.0, 1, 0, 1, 0], dtype=torch.float64)[:, None])
    assert bool((found.x[::2] == 0).all()) and bool((found.relative[::2] == 0).all())
    nothing = solved(matrix, torch.zeros_like(right))
    assert nothing.n_products == 0 and bool((nothing.x == 0).all())


def test_a_solution_that_is_not_reached_says_so() -> None:
    matrix, right = system()
    found = solved(matrix, right, max_iterations=4)
    assert bool((found.relative > 1e-3).all())
    assert_close(found.residual, right - found.x @ matrix, "algebra", label="residuals")


def test_rounding_is_corrected() -> None:
    """Residuals that the steps lead to drift in float32; those that are given are computed anew."""
    matrix, right = system(dtype=torch.float32)
    found = solved(matrix, right, relative=1e-3)
    true = right.double() - found.x.double() @ matrix.double()
    weights = 1 / matrix.diagonal().double()
    relative = ((true.square() @ weights) / (right.double().square() @ weights)).sqrt()
    assert bool((relative < 1.2e-3).all())
    assert bool(((found.relative - relative).abs() < 1e-4).all())


def test_the_steps_are_those_of_lanczos() -> None:
    """With unit vectors for probes the quadrature of the logarithm is the log determinant itself."""
    matrix, _ = system()
    matrix = matrix[:12, :12]
    scale = matrix.diagonal().sqrt()
    # zᵀ log(A) z over unit vectors z adds up to log det A, A = D^−½ P D^−½.
    found = cg.solve(lambda v: v @ matrix, torch.diag(scale), lambda v: v / scale**2, relative=1e-11, max_iterations=60)
    mean = TraceLog.from_solutions([found]).value
    expected = matrix.logdet() - 2 * scale.log().sum()
    assert_close(12 * mean, expected, "backend", label="log det")


def test_probes_of_a_seed() -> None:
    probes = signs(3, 50, torch.zeros((), dtype=torch.float32), seed=4)
    assert probes.dtype == torch.float32 and bool((probes.abs() == 1).all())
    assert torch.equal(probes, signs(3, 50, torch.zeros(()), seed=4))
    assert not torch.equal(probes, signs(3, 50, torch.zeros(()), seed=5))


class Held(TorchDispatchMode):
    """Counts the numbers of tensors that are alive: every new storage, until its last tensor is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor):
                key = tensor.untyped_storage()._cdata
                self.alive[key] = self.alive.get(key, 0) + 1
                self.sizes[key] = tensor.untyped_storage().nbytes() // tensor.element_size()
                weakref.finalize(tensor, self.gone, key)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return result

    def gone(self, key: int) -> None:
        self.alive[key] -= 1
        if not self.alive[key]:
            del self.alive[key], self.sizes[key]


@pytest.mark.parametrize("verified", [True, False])
def test_six_vectors_are_held_per_right_hand_side(verified: bool) -> None:
    """The right-hand side itself is one of them, and product and preconditioner have one each to work with."""
    n = 5000
    diagonal = torch.linspace(1, 30, n, dtype=torch.float64)
    with Held() as held:
        right = torch.ones(3, n, dtype=torch.float64) * torch.arange(1, 4)[:, None]
        cg.solve(
            lambda v: v * diagonal, right, lambda v: v / (diagonal + 1), relative=1e-8, max_iterations=60,
            verified=verified,
        )  # fmt: skip
    assert held.peak <= 6 * 3 * n


def test_a_right_hand_side_without_length_is_not_solved() -> None:
    """A preconditioner that rounding made indefinite."""
    right = torch.ones(1, 2, dtype=torch.float64)
    solution = cg.solve(lambda v: 2 * v, right, lambda v: -v, relative=1e-3, max_iterations=5)
    assert solution.relative.isinf().all()
