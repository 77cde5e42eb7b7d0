"""Second derivatives of likelihoods: their forms, roots and contractions against the dense matrix."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from laplace.errors import CurvatureError
from laplace.likelihoods import LIKELIHOODS, Categorical, OutputHessian, get_likelihood
from tests.likelihoods.test_base import B, batch
from tests.reference.compare import assert_close


@pytest.mark.parametrize("name", list(LIKELIHOODS))
def test_forms_of_the_hessian_agree(name: str) -> None:
    f, y = batch(name)
    form = get_likelihood(name).hessian(f, y)
    check_forms(form)


def check_forms(form: OutputHessian) -> None:
    full = form.matrix()
    root = form.root()
    assert_close(form.diagonal(), full.diagonal(dim1=1, dim2=2), "algebra")
    assert_close(form.total(), full.sum(0), "algebra")
    rows, columns = torch.triu_indices(full.shape[1], full.shape[1])
    assert_close(form.entries(rows, columns), full[:, rows, columns], "algebra")
    if form.is_diagonal:
        assert_close(torch.diag_embed(form.diag), full, "exact")
    if form.sums_to_zero:
        assert_close(full.sum(2), torch.zeros_like(form.diag), "algebra")
    matrix = torch.randn(full.shape[1], 2, dtype=full.dtype, generator=torch.Generator().manual_seed(0))
    assert_close(form.total_times(matrix), full.sum(0) @ matrix, "algebra")
    assert_close(torch.einsum("kbc,kbd->bcd", root, root), full, "algebra")


@pytest.mark.parametrize("name", list(LIKELIHOODS))
def test_a_root_has_the_announced_number_of_columns(name: str) -> None:
    likelihood, (f, y) = get_likelihood(name), batch(name)
    form = likelihood.hessian(f, y)
    assert len(form.root()) == form.n_columns == f.shape[1] - likelihood.sums_to_zero


@pytest.mark.parametrize("n_classes", [1, 2, 5])
@pytest.mark.parametrize("scale", [1.0, 20.0, 300.0])
def test_root_of_softmax_keeps_its_digits(scale: float, n_classes: int) -> None:
    """In float32, against Σ_{d≠c} p_c p_d, which does not cancel where p_c is 1 up to rounding as p_c − p_c² does."""
    f = scale * torch.randn(20, n_classes, generator=torch.Generator().manual_seed(0))
    form = Categorical().hessian(f)
    root = form.root().double()
    assert root.shape == (max(1, n_classes - 1), 20, n_classes)
    p = form.diag.double()
    off = -p.unsqueeze(2) * p.unsqueeze(1)
    off.diagonal(dim1=1, dim2=2).zero_()
    exact = off - torch.diag_embed(off.sum(2))
    floor = 1e-30 + 1e-5 * torch.sqrt(
        exact.diagonal(dim1=1, dim2=2).unsqueeze(2) * exact.diagonal(dim1=1, dim2=2).unsqueeze(1)
    )
    assert bool(((torch.einsum("kbc,kbd->bcd", root, root) - exact).abs() <= floor).all())


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999, 1.0])
def test_root_of_any_rank_one_part(share: float) -> None:
    """Not only softmax: with q = |vec / √diag|² ≤ 1 the root is exact."""
    diag = torch.rand(B, 5, dtype=torch.float64) + 0.1
    direction = functional.normalize(torch.randn(B, 5, dtype=torch.float64), dim=1)
    check_forms(OutputHessian(diag, vec=math.sqrt(share) * direction * diag.sqrt()))


@pytest.mark.parametrize("changed", ["diag", "vec", "both", "dense"])
def test_parts_that_replace_those_of_softmax(changed: str) -> None:
    """As in `hessian` of a likelihood that is derived from a classification: rows need not sum to zero any more."""
    softmax = Categorical().hessian(torch.randn(B, 5, dtype=torch.float64))
    assert softmax.sums_to_zero and softmax.to(torch.float32).sums_to_zero
    parts = {"diag": 2 * softmax.diag, "vec": 0.5 * softmax.diag, "dense": softmax.matrix() + torch.eye(5)}
    chosen = ("diag", "vec") if changed == "both" else (changed,)
    form = replace(softmax, **{name: parts[name] for name in chosen})
    assert not form.sums_to_zero
    check_forms(form)


def test_root_of_a_dense_hessian() -> None:
    factor = torch.randn(B, 5, 3, dtype=torch.float64)
    dense = factor @ factor.mT
    check_forms(OutputHessian(dense.diagonal(dim1=1, dim2=2), dense=dense))


def test_an_indefinite_dense_hessian_has_no_root() -> None:
    dense = torch.diag_embed(torch.tensor([[1.0, -0.5]]))
    with pytest.raises(CurvatureError, match="not convex"):
        OutputHessian(dense.diagonal(dim1=1, dim2=2), dense=dense).root()


@pytest.mark.parametrize("n_classes", [2, 40])
@pytest.mark.parametrize("scale", [5.0, 10.0, 14.0])
def test_contractions_of_saturated_rows_keep_their_digits_in_float32(scale: float, n_classes: int) -> None:
    """1 − p of the largest p is 1e-2 to 1e-6 here: of p − p² in float32 one digit would be left."""
    f = torch.randn(20, n_classes)
    f[torch.arange(20), torch.randint(n_classes, (20,))] += scale
    y = torch.randint(n_classes, (20,)).index_fill(0, torch.tensor([3]), -100)
    found, exact = (Categorical().hessian(outputs, y) for outputs in (f, f.double()))
    basis, matrix = torch.linalg.qr(torch.randn(n_classes, n_classes))[0], torch.randn(n_classes, 3)
    wide = exact.matrix()
    pairs = {
        "diagonal": (found.diagonal(), wide.diagonal(dim1=1, dim2=2)),
        "diagonal in a basis": (found.diagonal_in(basis), ((wide @ basis.double()) * basis.double()).sum(1)),
        "total": (found.total(), wide.sum(0)),
        "total times": (found.total_times(matrix), wide.sum(0) @ matrix.double()),
        "times": (found.times(matrix.T.unsqueeze(1).expand(-1, 20, -1)), (wide @ matrix.double()).permute(2, 0, 1)),
        "matrix": (found.matrix(), wide),
    }
    for name, (values, expected) in pairs.items():
        assert values.dtype == torch.float32
        largest = expected.abs().amax(-1, keepdim=True)
        assert ((values - expected).abs() <= 2e-6 * largest + 1e-12).all(), name
    relative = (found.diagonal().double() / pairs["diagonal"][1] - 1).nan_to_num().abs()
    assert relative.max() < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contractions_of_even_rows_of_many_classes(dtype: torch.dtype) -> None:
    """Rounded probabilities do not add up to 1, by more than a single one of them."""
    p = Categorical().hessian(torch.zeros(1, 2003, dtype=dtype)).diagonal().double()
    assert (p * 2003 - 1).abs().max() < 2 * torch.finfo(dtype).eps + 1e-3
