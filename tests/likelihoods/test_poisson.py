"""Counts: densities and moments against quadrature, at any rate."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from laplace import Laplace
from laplace.errors import ApproximationWarning
from laplace.likelihoods import Poisson
from laplace.likelihoods.poisson import log_normal_moments
from tests.reference import likelihoods as reference
from tests.reference.compare import assert_close

ONE = torch.ones((), dtype=torch.float64)


@pytest.mark.parametrize("variance", [1e-6, 0.1, 2.0, 50.0])
def test_density_of_counts(variance: float) -> None:
    """The mixture over a log-normal rate, which the moments name again; of counts far from the mean too."""
    mean = torch.linspace(-2, 3, 6, dtype=torch.float64).unsqueeze(1)
    spread = torch.full_like(mean, variance)
    known = log_normal_moments(mean, spread)
    for count in (0.0, 1.0, 7.0, 120.0):
        y = torch.full_like(mean, count)
        actual = Poisson().predictive_nll(known.mean, known.variance, y, ONE)
        tolerance = "backend" if variance > 1e-3 else "float32"
        assert_close(actual, -reference.count_density(mean, spread, y)[:, 0], tolerance, label=str(count))


def test_density_of_counts_with_a_known_rate() -> None:
    f, y = torch.randn(6, 2, dtype=torch.float64), torch.poisson(torch.full((6, 2), 3.0, dtype=torch.float64))
    expected = reference.nll(f, y, "poisson")
    assert_close(Poisson().predictive_nll(f.exp(), None, y, ONE), expected, "algebra")
    assert_close(Poisson().predictive_nll(f.exp(), f.exp(), y, ONE), expected, "float32")
    rates = f.exp().requires_grad_()
    variances = (f.exp() + 0.4).requires_grad_()
    torch.autograd.gradcheck(lambda m, v: Poisson().predictive_nll(m, v, y, ONE), (rates, variances))


@pytest.mark.parametrize(
    ("mean", "variance"), [(0.3, 0.0), (-2.0, 12.0), (-40.0, 60.0), (-500.0, 250.0), (-900.0, 800.0)]
)
def test_moments_of_counts_of_any_rate(mean: float, variance: float) -> None:
    """By quadrature of logarithms: a rate whose square has no float has a variance that has one."""
    z = torch.linspace(-70, 70, 200_001, dtype=torch.float64)
    f, log_weights = mean + variance**0.5 * z, torch.log_softmax(-0.5 * z.square(), 0)
    first, second = (log_weights + f).logsumexp(0), (log_weights + 2 * f).logsumexp(0)
    known = log_normal_moments(*torch.tensor([[[mean]], [[variance]]], dtype=torch.float64))
    assert_close(known.mean[0, 0], first.exp(), "algebra")
    assert_close(known.epistemic[0, 0], second.exp() - (2 * first).exp(), "algebra")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rates_that_no_float_holds_are_shown_by_their_middle(dtype: torch.dtype) -> None:
    """Rows beside them keep their moments to the bit; all have gradients; what has no middle is bounded."""
    mean = torch.tensor([[0.5, -0.5], [0.5, 2.0], [-400.0, 900.0]], dtype=dtype, requires_grad=True)
    variance = torch.tensor([[0.0, 0.2], [0.1, 2000.0], [0.3, 1.0]], dtype=dtype, requires_grad=True)
    likelihood = Poisson()
    with pytest.warns(ApproximationWarning, match="of 2 of 3 data are beyond the range"):
        shown = likelihood.target.summary(likelihood, mean, variance, "probit")
    alone = likelihood.target.summary(likelihood, mean[:1], variance[:1], "probit")
    assert all(map(torch.equal, (part[:1] for part in shown), alone))
    assert_close(shown[0][1, 1].double(), torch.tensor(2.0).double().exp(), "float32")
    ends = (2.0 + 2000**0.5 * torch.tensor([-1.0, 1.0]).double()).exp()
    known = (0.5 * (ends[1] - ends[0])).square() + torch.tensor(2.0).double().exp()
    bound = torch.tensor(torch.finfo(dtype).max / 16).double()  # half the upper end, as far as its square is held
    assert_close(shown[1][1, 1].double(), torch.minimum(known, bound), "float32_solve")
    slopes = torch.autograd.grad(sum(part.log1p().sum() for part in shown), (mean, variance))
    assert all(bool(part.isfinite().all()) for part in (*shown, *slopes))


def test_known_rates_that_no_float_holds_have_gradients() -> None:
    """Also where a log rate has no variance at all, beside one that has."""
    mean = torch.tensor([[709.0, 900.0]], dtype=torch.float64, requires_grad=True)
    variance = torch.tensor([[0.0, 0.1]], dtype=torch.float64, requires_grad=True)
    with pytest.warns(ApproximationWarning, match="of 1 of 1 data are beyond the range"):
        known = log_normal_moments(mean, variance)
    slopes = torch.autograd.grad((known.mean + known.epistemic).sum(), (mean, variance))
    assert all(bool(part.isfinite().all()) for part in (known.mean, known.epistemic, *slopes))


def test_counts_of_any_rate() -> None:
    """Samples are no negative numbers; probabilities those of SciPy, and of a Gaussian where counts are many."""
    for rate, y in [(3e4, 29_500.0), (3e4, 20_001.0), (2e5, 2e5), (1e4, 3e4), (1e-3, 2e4), (2e4, 0.0)]:
        counts = Poisson().conditional(torch.tensor([[rate]]).double().log())
        expected = stats.poisson.logpmf(y, rate)
        assert_close(counts.log_prob(torch.tensor([[y]]).double()), torch.tensor([expected]).double(), "backend")
    f = torch.tensor([[11.0, 36.0, 60.0, 88.0, 1000.0, -1000.0]])
    for dtype in (torch.float32, torch.float64):
        counts = Poisson().conditional(f.to(dtype))
        y = counts.sample((50,))
        assert bool(((y >= 0) & y.isfinite()).all() and counts.log_prob(y).isfinite().all())
    many = Poisson().conditional(torch.tensor([[40.0]]).double())
    y = torch.tensor([[40.0]]).double().exp().round()
    assert_close(many.log_prob(y)[0], -0.5 * (math.log(2 * math.pi) + torch.tensor(40.0).double()), "backend")


def test_a_row_of_unknown_rate_leaves_the_others(device: torch.device) -> None:
    """One row far from the data: the batch has its answers, one warning says how many are of another kind."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 20, device=device).unsqueeze(1)
    y = torch.poisson(x.exp())
    la = Laplace(torch.nn.Linear(1, 1).to(device), "poisson", "all", "full")
    la.fit([(x, y)])
    far = torch.tensor([[0.5], [200.0], [-0.2], [1e4]], device=device)
    known = la(far[[0, 2]])
    with pytest.warns(ApproximationWarning, match="of 2 of 4 data") as said:
        shown = la(far)
    assert len(said) == 1
    for part, alone in zip(shown, known, strict=True):
        assert bool(part.isfinite().all())
        assert_close(part[[0, 2]], alone, "float32")
    prediction = la.predict(far)
    for noise in (True, False):
        lower, upper = prediction.interval(0.9, observation_noise=noise)
        assert bool((lower >= 0).all() and (upper >= lower).all() and upper.isfinite().all())
    with pytest.warns(ApproximationWarning):
        assert bool(prediction.entropy.isfinite().all())
    assert bool(prediction.decomposition.total.isfinite().all())
    with pytest.warns(ApproximationWarning):
        comparison = la.compare([(far, torch.ones(4, 1, device=device))])
    assert "nan" not in str(comparison)


def test_counts_may_be_integers() -> None:
    y = Poisson().check_targets(torch.zeros(2, 2), torch.tensor([[1, 2], [0, 5]]))
    assert y.dtype == torch.float32
