"""Patches of images: their sums of products are those of the patches one by one, in whatever way they are computed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from laplace.jacobian import patches
from laplace.jacobian.outer import OuterBlock
from laplace.jacobian.patches import Patches, gram_of
from tests.jacobian.test_blocks import check
from tests.reference.compare import assert_close

DATA, IMAGES, CHANNELS = 3, 2, 4

FORMS = {
    "one dimension": Patches(torch.empty(DATA, 1, CHANNELS, 9), (3,), (1,), (1,), 1),
    "a wide kernel": Patches(torch.empty(DATA, IMAGES, CHANNELS, 12, 6), (5, 3), (1, 1), (1, 1), 1),
    "steps along the rest": Patches(torch.empty(DATA, 1, CHANNELS, 8, 9), (3, 2), (1, 2), (1, 3), 1),
    "three dimensions": Patches(torch.empty(DATA, IMAGES, CHANNELS, 7, 5, 4), (3, 2, 3), (1, 1, 1), (1, 1, 1), 1),
    "few positions": Patches(torch.empty(DATA, 1, CHANNELS, 4, 4), (3, 3), (1, 1), (1, 1), 1),
    "stride": Patches(torch.empty(DATA, 1, CHANNELS, 8, 8), (3, 3), (2, 2), (1, 1), 1),
    "dilation": Patches(torch.empty(DATA, 1, CHANNELS, 9, 9), (3, 3), (1, 1), (2, 2), 1),
    "groups": Patches(torch.empty(DATA, 1, CHANNELS, 9, 9), (3, 3), (1, 1), (1, 1), 2),
    "a flat kernel": Patches(torch.empty(DATA, 1, CHANNELS, 5, 5), (1, 3), (1, 1), (1, 1), 1),
}
BY_SHIFTS = {"one dimension", "a wide kernel", "steps along the rest", "three dimensions"}


def drawn(form: Patches) -> Patches:
    return form.map(partial(torch.randn_like, dtype=torch.float64))


def one_by_one(form: Patches) -> Tensor:
    """Patches `[B, T, G, I]` by indexing the images."""
    kernel = torch.cartesian_prod(*[torch.arange(k) * d for k, d in zip(form.kernel, form.dilation, strict=True)])
    kernel = kernel.view(-1, len(form.kernel))
    rows: list[Tensor] = []
    for datum in form.images:
        for image in datum:
            reach = [(k - 1) * d for k, d in zip(form.kernel, form.dilation, strict=True)]
            steps = [range(0, size - r, s) for size, r, s in zip(image.shape[1:], reach, form.stride, strict=True)]
            corners = torch.cartesian_prod(*[torch.tensor(list(step)) for step in steps]).view(-1, len(form.kernel))
            rows += [image[(slice(None), *(corner + kernel).T)].reshape(form.groups, -1) for corner in corners]
    return torch.stack(rows).unflatten(0, (len(form.images), -1))


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_patches_and_their_products(name: str, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if few:
        monkeypatch.setattr(patches, "_PART_BYTES", 1)  # one datum at a time
    form = drawn(FORMS[name])
    expected = one_by_one(form)
    assert form.shape == expected.shape
    assert form.n_bytes == expected.numel() * expected.element_size()
    assert_close(form.rows, expected, "algebra")
    assert form._repeats == (name in BY_SHIFTS)
    assert_close(gram_of(form), torch.einsum("btgi,btgj->gij", expected, expected), "algebra")


def test_edges_that_outweigh_the_rest_keep_their_digits() -> None:
    """Sums by shifts add what lies at the edges and subtract nothing."""
    form = drawn(FORMS["a wide kernel"])
    form.images[..., 0, :] *= 1e6
    form.images[..., -1, :] *= 1e6
    exact, found = gram_of(form), gram_of(form.map(Tensor.float))
    scale = exact.diagonal(dim1=1, dim2=2).sqrt()
    assert ((found - exact) / (scale.unsqueeze(1) * scale.unsqueeze(2))).abs().max() < 1e-5


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("outputs", [2, 60])
@pytest.mark.parametrize("name", ["a wide kernel", "groups"])
def test_a_block_of_patches(name: str, outputs: int, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation, with few and many output gradients, of which the former keep the unfolded patches."""
    if few:
        monkeypatch.setattr(patches, "_PART_BYTES", 1)
    form = FORMS[name].map(lambda images: torch.randn(4, *images.shape[1:], dtype=torch.float64)[..., :6, :5])
    if name == "a wide kernel":
        form = Patches(form.images[:, :, :2], (3, 2), (1, 1), (1, 1), 1)
    shape = form.shape
    g = torch.randn(3, 4, shape[1], shape[2], outputs, dtype=torch.float64)
    check(OuterBlock(form, g), OuterBlock(form.rows, g).dense())


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_sums_by_a_convolution(name: str, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution with a group for every datum sums what unfolded patches sum, whatever its stride and groups."""
    if few:  # data at once
        monkeypatch.setattr(patches, "_COPIED_BYTES", 1)
    form = drawn(FORMS[name])
    g = torch.randn(2, DATA, form.shape[1], form.groups, 5, dtype=torch.float64)
    assert_close(form.outer_sums(g), torch.einsum("kbtgo,btgi->kbgoi", g, one_by_one(form)), "algebra")


@pytest.mark.parametrize("input_first", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_wide_blocks_of_float32_are_summed_so(groups: int, input_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense pieces and squares are the same either way; of float64, few channels or few positions none are."""
    monkeypatch.setattr(patches, "_MULTIPLIED", 1)
    form = Patches(torch.randn(DATA, IMAGES, 32, 10, 9), (3, 2), (1, 1), (1, 1), groups)
    g = torch.randn(2, DATA, form.shape[1], groups, 16)
    block = OuterBlock(form, g, input_first=input_first)
    unfolded = replace(block, a=form.rows)
    x86 = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    assert form.convolves(g) is x86
    assert not form.map(Tensor.double).convolves(g.double())
    assert not form.convolves(g[..., :8])
    assert not form.map(lambda images: images[..., :5, :5]).convolves(g[:, :, :24])
    assert_close(block.dense(), unfolded.dense(), "float32")
    assert_close(block.squares_per_cotangent(), unfolded.squares_per_cotangent(), "float32")
