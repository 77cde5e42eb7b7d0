"""Symmetric products: equal to xᵀx, also in float32 for matrices of millions of rows."""

from __future__ import annotations

import pytest
import torch

from laplace.core.gram import add_gram, gram, group_gram, group_product, mirror
from tests.reference.compare import assert_close


@pytest.mark.parametrize("width", [1, 70, 256, 600])
def test_products_equal_the_plain_ones(width: int) -> None:
    x = torch.randn(40, width, dtype=torch.float64)
    assert_close(gram(x), x.T @ x, "algebra")
    running = x.T @ x
    add_gram(running, x)
    assert_close(mirror(running), 2 * x.T @ x, "algebra")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [256, 300, 512, 768])
def test_lower_triangles_are_copies_whatever_the_width(width: int, dtype: torch.dtype) -> None:
    upper = torch.randn(2, width, width, dtype=dtype)
    whole = upper.triu() + upper.triu(1).mT
    blocks = [mirror(part.triu() + part.tril(-1)) for part in upper]
    total = mirror(torch.stack(blocks))
    assert torch.equal(total.triu(64), whole.triu(64))
    assert torch.equal(total[:, 256:, :32], whole[:, 256:, :32])


@pytest.mark.parametrize("shape", [(7, 3, 5), (4, 3, 2, 5), (2, 4, 3, 1, 5), (9000, 2, 1, 3), (9000, 1, 70)])
def test_products_of_groups(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    whole = torch.einsum("...gi,...gj->gij", x, x)
    assert_close(group_gram(x), whole, "algebra")
    matrix = torch.randn(x.shape[-2], x.shape[-1], 3, dtype=torch.float64)
    assert_close(group_product(x, matrix), whole @ matrix, "algebra", label="times a matrix")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lead", [(3,), (2, 90)])
@pytest.mark.parametrize(("groups", "width"), [(1, 80), (1, 20), (3, 20), (2, 80), (2, 120)])
def test_columns_of_images_are_not_turned_first(
    groups: int, width: int, lead: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Of wide ones in float32 on x86 a convolution sums them, some of the data at a time."""
    rows = torch.randn(*lead, groups, width, 100, dtype=dtype).movedim(-1, -3)
    wide = rows.double()
    exact = torch.einsum("...tgi,...tgj->...gij", wide, wide).flatten(0, -4).sum(0)
    assert float((group_gram(rows) - exact).norm() / exact.norm()) < 32 * torch.finfo(dtype).eps


@pytest.mark.parametrize("width", [6, 80])
def test_rows_of_a_tall_float32_matrix_are_not_added_up_one_by_one(width: int) -> None:
    x = torch.randn(2_000_000 if width == 6 else 100_000, 1, width) + 0.5
    exact = torch.einsum("...gi,...gj->gij", x.double(), x.double())
    assert float((group_gram(x) - exact).norm() / exact.norm()) < 2e-6


@pytest.mark.parametrize("shape", [(5, 7, 1, 70), (5, 7, 2, 6), (0, 3, 1, 70)])
@pytest.mark.parametrize("columns", [False, True])
def test_rows_are_widened_a_few_at_a_time(
    shape: tuple[int, ...], columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products are those of float64; images, whose columns are in a row, are read as they lie."""
    monkeypatch.setattr("laplace.core.gram._CACHED_BYTES", 8 * 2 * 70 * 7)
    rows = 100 + torch.randn(shape[0], *shape[2:], 10 * shape[1]).movedim(-1, 1) if columns else torch.randn(shape)
    total = group_gram(rows, torch.float64)
    assert total.dtype == torch.float64
    assert_close(total, torch.einsum("...gi,...gj->gij", rows.double(), rows.double()), "algebra")
