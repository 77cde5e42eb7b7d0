"""Links against dense formulas and brute force, and at the edges: zero, singular and huge inputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from laplace.errors import InvalidArgument
from laplace.likelihoods.links import (
    LINKS,
    bridge,
    bridge_norm,
    log_concentrations,
    monte_carlo,
    probit,
    probit_centred,
    softmax,
)
from tests.reference import predictive as reference
from tests.reference.compare import assert_close

# The delta method says so where the variance is too large for it.
pytestmark = pytest.mark.filterwarnings("ignore::laplace.errors.ApproximationWarning")

BRIDGES = [(bridge, reference.bridge), (bridge_norm, reference.bridge_norm)]


def latents(c: int, b: int = 6) -> tuple[Tensor, Tensor]:
    factor = torch.randn(b, c, c + 2, dtype=torch.float64)
    return 2 * torch.randn(b, c, dtype=torch.float64), factor @ factor.mT


@pytest.mark.parametrize("c", [2, 3, 10])
def test_probit(c) -> None:
    mean, covariance = latents(c)
    expected = reference.probit(mean, covariance)
    assert_close(probit(mean, covariance), expected, "algebra")
    assert_close(probit(mean, covariance.diagonal(dim1=1, dim2=2)), expected, "algebra")
    assert_close(probit(mean, covariance, torch.sigmoid), reference.bernoulli_probit(mean, covariance), "algebra")


@pytest.mark.parametrize("c", [2, 3, 10])
def test_probit_centred(c) -> None:
    """Dense, diagonal, and blind to what all logits share, which `probit` counts as doubt."""
    mean, covariance = latents(c)
    expected = reference.probit_centred(mean, covariance)
    assert_close(probit_centred(mean, covariance), expected, "algebra")
    independent = covariance.diagonal(dim1=1, dim2=2)
    of_independent = reference.probit_centred(mean, torch.diag_embed(independent))
    assert_close(probit_centred(mean, independent), of_independent, "algebra")
    with_row = torch.randn(6, 1, c, dtype=torch.float64)  # Cov(f, shift): what is shared need not be independent
    moved = covariance + 9 + with_row + with_row.mT
    assert_close(probit_centred(mean + 7, moved), expected, "algebra")
    assert (probit(mean + 7, moved) - expected).abs().max() > 0.01


def test_probit_centred_of_two_classes() -> None:
    """σ of the difference d, whose halves have a quarter of its variance each."""
    mean, covariance = latents(2)
    difference = mean[:, 0] - mean[:, 1]
    variance = covariance[:, 0, 0] - 2 * covariance[:, 0, 1] + covariance[:, 1, 1]
    expected = torch.sigmoid(difference / (1 + math.pi / 8 * variance).sqrt())
    assert_close(probit_centred(mean, covariance)[:, 0], expected, "algebra")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probit_centred_where_nearly_everything_is_shared(dtype) -> None:
    mean, covariance = latents(4)
    moved = (1e6 + 1e-3 * covariance).to(dtype)
    expected = reference.probit_centred(mean, moved.double())
    assert_close(probit_centred(mean.to(dtype), moved), expected, "float32")


@pytest.mark.parametrize(("link", "oracle"), BRIDGES)
@pytest.mark.parametrize("c", [2, 3, 10])
def test_bridges(link, oracle, c) -> None:
    mean, covariance = latents(c)
    assert_close(link(mean, covariance), oracle(mean, covariance), "algebra")
    variance = covariance.diagonal(dim1=1, dim2=2)
    assert_close(link(mean, variance), oracle(mean, torch.diag_embed(variance)), "algebra")


def test_bridge_inverts_the_dirichlet_map() -> None:
    """The Gaussian of a Dirichlet (Hobbhahn et al.) has zero-sum mean; the bridge of it returns the concentrations.

    μ_k = log α_k − mean log α, Σ_kk = (1 − 2/C)/α_k + Σ_l 1/(C² α_l), off-diagonal
    −(1/α_k + 1/α_l)/C + Σ_l 1/(C² α_l): singular along 1, so the zero-sum correction must leave it alone.
    """
    alpha = torch.rand(4, 5, dtype=torch.float64) * 5 + 0.2
    inverse, n = 1 / alpha, 5
    mean = alpha.log() - alpha.log().mean(1, keepdim=True)
    covariance = torch.diag_embed(inverse) - (inverse[:, :, None] + inverse[:, None]) / n
    covariance = covariance + inverse.sum(1)[:, None, None] / n**2
    assert_close(log_concentrations(mean, covariance).exp(), alpha, "algebra")


@pytest.mark.parametrize("c", [2, 4])
def test_concentrations_of_rescaled_latents(c) -> None:
    """μ/√c and Σ/c make a Dirichlet of their own: it has the concentrations of both, not of the mean alone."""
    given = mean, covariance = latents(c)
    sums = covariance.sum(-1)
    total = sums.sum(-1, keepdim=True)
    mean = mean - sums * mean.sum(-1, keepdim=True) / total
    variance = covariance.diagonal(dim1=1, dim2=2) - sums.square() / total
    excess = variance.mean(1, keepdim=True) / math.sqrt(c / 2)
    mean, variance = mean / excess.sqrt(), variance / excess
    alpha = (1 - 2 / c + mean.exp() * (-mean).exp().sum(1, keepdim=True) / c**2) / variance
    assert_close(log_concentrations(*given, normalise=True).exp(), alpha, "algebra")


@pytest.mark.parametrize("c", [2, 4])
def test_monte_carlo(c) -> None:
    mean, covariance = latents(c)
    n = 40_000
    expected, error = reference.monte_carlo(mean, covariance, n, torch.Generator().manual_seed(1))
    drawn = monte_carlo(mean, covariance, n_samples=n, generator=torch.Generator().manual_seed(2))
    assert_close(drawn, expected, "mc", standard_error=error * 2**0.5)
    with pytest.raises(InvalidArgument, match="n=0"):
        monte_carlo(mean, covariance, n_samples=0)


def test_probit_is_a_good_approximation_of_the_integral() -> None:
    """Within a few per cent of brute force where the variance is moderate."""
    mean, covariance = latents(3, 20)
    mean, covariance = 0.5 * mean, 0.05 * covariance
    exact, _ = reference.monte_carlo(mean, covariance, 20_000, torch.Generator().manual_seed(0))
    assert (probit(mean, covariance) - exact).abs().max() < 0.05


def edge_cases(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Finite inputs that overflow a naive formula or exhaust a covariance."""
    largest = torch.finfo(dtype).max
    mean = torch.tensor([[1e4, -1e4, 0.0], [3.0, 1.0, -2.0]], dtype=dtype)
    eye = torch.eye(3, dtype=dtype).expand(2, 3, 3)
    ones = torch.ones(2, 3, 3, dtype=dtype)
    v = torch.tensor([1.0, -1.0, 0.0], dtype=dtype)
    return {
        "large logits": (mean, eye),
        "no variance": (mean, 0 * eye),
        "no variance, diagonal": (mean, torch.zeros_like(mean)),
        "tiny variance": (mean, torch.finfo(dtype).tiny * eye),
        "huge variance": (mean, largest / 100 * eye),
        "largest numbers": (torch.tensor([[largest, -largest, 0.0]] * 2, dtype=dtype), largest * eye),
        "largest diagonal": (torch.tensor([[largest, largest, 0.0]] * 2, dtype=dtype), largest * torch.ones_like(mean)),
        "noise along 1 only": (mean, ones),
        "zero-sum noise, rank one": (mean, torch.outer(v, v).expand(2, 3, 3)),
        "slightly indefinite": (mean, ones - 1e-7 * eye),
        "negative variances": (mean, -1e-3 * eye),
        "one certain class": (mean, torch.diag_embed(torch.tensor([[0.0, 1.0, 1.0]] * 2, dtype=dtype))),
    }


@pytest.mark.parametrize("name", list(LINKS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", edge_cases(torch.float32))
def test_rows_sum_to_one_for_every_finite_input(name, dtype, case) -> None:
    mean, covariance = edge_cases(dtype)[case]
    probs = LINKS[name].apply(mean, covariance, lambda f: f.softmax(-1), 7, torch.Generator().manual_seed(0))
    assert probs.dtype == dtype
    assert (probs >= 0).all()
    assert_close(probs.sum(1), torch.ones(2), "float32")


@pytest.mark.parametrize("name", ["bridge", "bridge_norm", "probit", "probit_centred"])
@pytest.mark.parametrize("case", ["large logits", "no variance", "noise along 1 only", "one certain class"])
def test_gradients_at_the_edges(name, case) -> None:
    """Those of float32 are the slopes in float64; a bridge jumps where variance ends, and is only finite there."""

    def first(mean: Tensor, covariance: Tensor) -> Tensor:
        return LINKS[name].apply(mean, covariance, lambda f: f.softmax(-1), 1, None)[:, 0].sum()

    mean, covariance = (value.clone().requires_grad_() for value in edge_cases(torch.float32)[case])
    first(mean, covariance).backward()
    m, s = mean.detach().double(), covariance.detach().double()
    along, step = torch.randn(2, 3, dtype=torch.float64), 1e-6
    slope = (first(m + step * along, s) - first(m - step * along, s)) / (2 * step)
    assert_close((mean.grad * along).sum(), slope, "float32")
    if name != "probit" and case != "large logits":
        assert covariance.grad.isfinite().all()
        return
    factor = torch.randn(2, 3, 3, dtype=torch.float64)
    along = factor @ factor.mT  # inwards: what is left of the edge is no covariance
    slope = (4 * first(m, s + step * along) - first(m, s + 2 * step * along) - 3 * first(m, s)) / (2 * step)
    assert_close((covariance.grad * along).sum(), slope, "float32")


@given(st.integers(0, 10_000), st.sampled_from([bridge, bridge_norm]), st.floats(-30, 30), st.integers(1, 6))
def test_bridges_in_float32_stay_distributions(seed, link, log_scale, rank) -> None:
    """Random rank-deficient covariances over sixty orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(3, 5, rank, generator=generator) * 10 ** (log_scale / 2)
    probs = link(50 * torch.randn(3, 5, generator=generator), (factor @ factor.mT).clamp(-3e38, 3e38))
    assert (probs >= 0).all()
    assert_close(probs.sum(1), torch.ones(3), "float32")


def test_zero_variance_is_the_limit_of_a_small_one() -> None:
    mean, _ = latents(4)
    small = 1e-8 * torch.eye(4, dtype=torch.float64).expand(6, 4, 4)
    assert_close(bridge(mean, 0 * small), bridge(mean, small), "algebra")
    assert_close(probit(mean, 0 * small), mean.softmax(1), "algebra")


def test_two_classes_with_bridge_are_finite_and_symmetric() -> None:
    mean = torch.tensor([[5.0, -5.0], [0.0, 0.0]], dtype=torch.float64)
    probs = bridge(mean, torch.eye(2, dtype=torch.float64).expand(2, 2, 2))
    assert_close(probs, mean.softmax(1), "algebra")


@pytest.mark.parametrize("link", [bridge, bridge_norm])
def test_refusals(link) -> None:
    with pytest.raises(InvalidArgument, match="at least 2 outputs"):
        link(torch.zeros(3, 1), torch.ones(3, 1))
    with pytest.raises(InvalidArgument, match="joint"):
        link(torch.zeros(3, 2), torch.eye(6))
    with pytest.raises(InvalidArgument, match="covariance has shape"):
        link(torch.zeros(3, 2), torch.ones(3))


def test_only_probit_is_content_with_variances() -> None:
    assert [name for name, link in LINKS.items() if link.diagonal] == ["probit"]


@pytest.mark.parametrize("shape", [(300, 3), (40, 10, 15), (40, 10, 16), (300, 1), (5, 3)])
def test_softmax_of_many_short_rows(shape: tuple[int, ...]) -> None:
    f = 30 * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    f.requires_grad_()
    p, expected = softmax(f), torch.softmax(f, -1)
    assert p.is_contiguous()
    torch.testing.assert_close(p, expected, rtol=1e-13, atol=0)
    weights = torch.linspace(-1, 1, f.numel(), dtype=torch.float64).view(shape)
    first, second = (torch.autograd.grad((weights * q).sum(), f)[0] for q in (p, expected))
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-15)
