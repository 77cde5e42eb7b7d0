"""Sampling from Gaussians over outputs: moments by their standard errors, singular covariances, seeds, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from laplace.core.gaussian import GaussianOutputs, covariance_root
from laplace.errors import CurvatureError, InvalidArgument, InvalidData
from tests.reference.compare import assert_close

pytestmark = pytest.mark.portable

B, C, N = 3, 2, 20_000


def spd(*batch: int, c: int, dtype: torch.dtype = torch.float64) -> Tensor:
    factor = torch.randn(*batch, c, c + 1, dtype=dtype)
    return factor @ factor.mT


def covariances() -> dict[str, tuple[Tensor, Tensor]]:
    """Each kind of covariance with the joint matrix, `[B·C, B·C]`, that it stands for."""
    torch.manual_seed(0)
    variance, full, joint = torch.rand(B, C, dtype=torch.float64), spd(B, c=C), spd(c=B * C)
    return {
        "diagonal": (variance, torch.diag(variance.flatten())),
        "full": (full, torch.block_diag(*full)),
        "joint": (joint, joint),
        "singular": (torch.ones(B, C, C, dtype=torch.float64), torch.block_diag(*torch.ones(B, C, C))),
        "zero": (torch.zeros(B, C, C, dtype=torch.float64), torch.zeros(B * C, B * C)),
    }


@pytest.mark.parametrize("kind", covariances())
def test_moments(kind) -> None:
    """All B·C×B·C covariances: rows are independent unless the covariance is joint."""
    covariance, exact = covariances()[kind]
    mean = torch.randn(B, C, dtype=torch.float64)
    gaussian = GaussianOutputs(mean, covariance)
    samples = gaussian.sample(N, torch.Generator().manual_seed(1)).flatten(1)
    variance = exact.diagonal().double()
    assert_close(samples.mean(0), mean.flatten(), "mc", standard_error=(variance / N).sqrt())
    centred = samples - mean.flatten()
    products = variance[:, None] * variance + exact.double().square()  # Isserlis
    assert_close(centred.T @ centred / N, exact, "mc", standard_error=(products / N).sqrt())
    assert_close(gaussian.variance, variance.view(B, C), "exact")


def test_kinds_by_shape() -> None:
    mean = torch.zeros(B, C)
    flags = [
        (GaussianOutputs(mean, s).is_diagonal, GaussianOutputs(mean, s).is_joint)
        for s in (torch.ones(B, C), torch.ones(B, C, C), torch.eye(B * C))
    ]
    assert flags == [(True, False), (False, False), (False, True)]
    one = GaussianOutputs(torch.zeros(1, 1), torch.full((1, 1), 4.0))
    assert one.is_diagonal
    assert one.variance.item() == 4
    assert GaussianOutputs(torch.zeros(4, 1), torch.eye(4)).is_joint
    assert GaussianOutputs(torch.zeros(1, 4), torch.eye(4)).is_joint


@pytest.mark.parametrize("shape", [(B,), (B, C + 1), (C, C), (B, C, C, 1), (B + 1, C, C), ()])
def test_wrong_shapes(shape) -> None:
    with pytest.raises(InvalidArgument, match=r"accepted are \[3, 2, 2\]"):
        GaussianOutputs(torch.zeros(B, C), torch.ones(shape))
    with pytest.raises(InvalidArgument, match=r"\[B, C\] is accepted"):
        GaussianOutputs(torch.zeros(B), torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_factor_always_exists(dtype) -> None:
    """Singular and slightly indefinite rows among good ones: every row has a root, and none touches another."""
    good = spd(4, c=5, dtype=dtype)
    v = torch.randn(5, 1, dtype=dtype)
    still = torch.diag(torch.tensor([1.0, 0, 4, 0, 1e-30], dtype=dtype))
    bad = [v @ v.T, v @ v.T - 1e-6 * torch.eye(5, dtype=dtype), torch.zeros(5, 5, dtype=dtype), still]
    covariance = torch.cat([good[:2], torch.stack(bad), good[2:]])
    root = covariance_root(covariance)
    assert root.dtype == dtype
    assert_close(root @ root.mT, covariance, "float32" if dtype == torch.float32 else "finite_difference")
    assert_close(root[:2], covariance_root(good[:2]), "float32" if dtype == torch.float32 else "algebra")
    assert_close(root[5].diagonal(), still.diagonal().sqrt(), "float32" if dtype == torch.float32 else "algebra")
    mean, seeds = torch.zeros(8, 5, dtype=dtype), [torch.Generator().manual_seed(1) for _ in range(2)]
    noise = GaussianOutputs(mean, torch.ones_like(mean)).sample(3, seeds[0])
    drawn = GaussianOutputs(mean, covariance).sample(3, seeds[1])
    assert_close(drawn, torch.einsum("bcd,sbd->sbc", root, noise), "float32" if dtype == torch.float32 else "algebra")


def rank_deficient(rows: int = 24, rank: int = 6) -> Tensor:
    """M `[n, r]`, with two rows alike, and rows of very different lengths."""
    m = torch.randn(rows, rank, dtype=torch.float64) * torch.logspace(0, -4, rows, dtype=torch.float64).unsqueeze(1)
    m[1] = m[0]
    return m


@pytest.mark.parametrize("rounding", [1e-16, 6e-8])
def test_the_root_moves_as_little_as_what_it_is_of(rounding) -> None:
    """A root of M Mᵀ moves by the rounding of M, in units of every output's own deviation, whatever its rank."""
    m = rank_deficient()
    moved = m * (1 + rounding * torch.randn_like(m))
    before, after = covariance_root(m @ m.mT), covariance_root(moved @ moved.mT)
    assert ((after - before).norm(dim=1) / m.norm(dim=1)).max() < 1e-7 + 10 * rounding


def test_the_root_of_a_singular_covariance_is_no_root_of_rounding() -> None:
    """What a device rounds otherwise moves samples by that, and not by its root."""
    m = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    covariance = m @ m.mT
    other = covariance * (1 + 2e-16 * torch.randint(-1, 2, covariance.shape))
    assert (covariance_root(other) - covariance_root(covariance)).abs().max() < 1e-13


def test_the_root_of_independent_outputs_needs_no_decomposition(monkeypatch) -> None:
    """It is the same one, also where some rows do not vary; a graph leads to all entries."""
    variances = torch.tensor([[1e-9, 4.0, 0.0], [9.0, 1e4, 1.0]], dtype=torch.float64)
    covariance = torch.diag_embed(variances)
    followed = covariance_root(covariance.clone().requires_grad_())
    monkeypatch.setattr(torch.linalg, "eigh", None)
    root = covariance_root(covariance)
    assert_close(root, torch.diag_embed(variances.sqrt()), "exact")
    assert_close(followed, root, "algebra")
    assert followed.requires_grad


def test_the_root_knows_no_basis_and_no_order() -> None:
    """Equal eigenvalues have no eigenvectors of their own; outputs in another order have the same root, reordered."""
    m = torch.linalg.qr(torch.randn(7, 3, dtype=torch.float64)).Q
    covariance = m @ m.mT  # eigenvalues 1, 1, 1, 0, 0, 0, 0
    order = torch.randperm(7)
    assert_close(
        covariance_root(covariance[order][:, order]), covariance_root(covariance)[order][:, order], "finite_difference"
    )


def test_gradients_of_a_singular_covariance() -> None:
    """With respect to what it is the square of, along which its rank stays what it is."""
    torch.manual_seed(0)
    m, noise = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, dtype=torch.float64)

    def drawn(m: Tensor) -> Tensor:
        return covariance_root(m @ m.mT) @ noise

    # A zero eigenvalue is known to 1e-16, its root to 1e-8: quotients of small differences would show that.
    assert torch.autograd.gradcheck(drawn, m.requires_grad_(), eps=1e-3, atol=1e-4, rtol=1e-4)
    twice = torch.stack([spd(c=3), torch.diag(torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64))]).requires_grad_()
    assert torch.autograd.gradgradcheck(covariance_root, twice)


def test_near_singular_float32_covariances() -> None:
    """Covariances of confident networks: condition numbers far beyond float32."""
    q = torch.linalg.qr(torch.randn(200, 10, 10, dtype=torch.float64)).Q
    covariance = ((q * torch.logspace(2, -12, 10, dtype=torch.float64)) @ q.mT).float()
    root = covariance_root(covariance)
    assert torch.isfinite(root).all()
    assert_close(root @ root.mT, covariance, "float32")


def test_large_and_tiny_covariances() -> None:
    for scale in (1e-35, 1e35):
        covariance = scale * spd(3, c=4, dtype=torch.float32)
        assert torch.isfinite(GaussianOutputs(torch.zeros(3, 4), covariance).sample(10)).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["diagonal", "full", "joint"])
def test_not_finite(kind, value) -> None:
    covariance = covariances()[kind][0]
    covariance.flatten()[1 if kind != "diagonal" else 0] = value
    with pytest.raises(CurvatureError, match="NaN or infinite"):
        GaussianOutputs(torch.zeros(B, C, dtype=torch.float64), covariance).sample(2)
    with pytest.raises(InvalidData, match="mean of the Gaussian"):
        GaussianOutputs(torch.full((B, C), value), torch.ones(B, C)).sample(2)


def test_n_must_be_positive() -> None:
    with pytest.raises(InvalidArgument, match="n=0"):
        GaussianOutputs(torch.zeros(B, C), torch.ones(B, C)).sample(0)


@pytest.mark.parametrize("kind", ["diagonal", "full", "joint"])
def test_samples_are_differentiable(kind) -> None:
    mean, covariance = torch.randn(B, C, dtype=torch.float64), covariances()[kind][0]

    def draw(mean: Tensor, covariance: Tensor) -> Tensor:
        return GaussianOutputs(mean, covariance).sample(2, torch.Generator().manual_seed(0))

    torch.autograd.gradcheck(draw, (mean.requires_grad_(), covariance.requires_grad_()))


def test_a_failed_row_does_not_spoil_the_gradients_of_others() -> None:
    covariance = torch.stack([spd(c=C), torch.zeros(C, C, dtype=torch.float64)]).requires_grad_()
    alone = covariance[:1].detach().clone().requires_grad_()
    for given in (covariance, alone):
        covariance_root(given).square().sum().backward()
    assert_close(covariance.grad[0], alone.grad[0], "algebra")
    assert (covariance.grad[1] == 0).all()
    variance = torch.tensor([[1.0, 0.0]], requires_grad=True)
    GaussianOutputs(torch.zeros(1, 2), variance).sample(3).sum().backward()
    assert torch.isfinite(variance.grad).all()


def test_standard_deviation_of_many_rows_is_right_in_float32() -> None:
    mean, covariance = torch.zeros(500, 1), torch.full((500, 1, 1), 4.0)
    samples = GaussianOutputs(mean, covariance).sample(200, torch.Generator().manual_seed(0))
    assert_close(samples.std(), 2.0, "mc", standard_error=2 / math.sqrt(2 * 100_000))
    # independent rows: the mean over rows of one draw has variance 4/500
    assert_close(samples.mean(1).std(), math.sqrt(4 / 500), "mc", standard_error=math.sqrt(4 / 500 / 400))
