"""Tables with a raw column: the largest eigenvalue of the curvature is a billion times the prior precision.

Variances in directions that the data leave open are the prior's, also where float32 sums of the same data would round
by more than that.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import ApproximationWarning
from laplace.grid import from_names
from tests.reference import raw_tables
from tests.reference.raw_tables import COLUMNS, full_variance, kron_variance, table, trained

N_WEIGHTS = 41  # of a network 3-8-1
EXACT = {"rank": N_WEIGHTS}
TRUTHS: dict[tuple[str, str], Any] = {
    ("last_layer", "kron"): lambda *given: kron_variance(*given, last=True),
    ("last_layer", "ekfac"): lambda *given: kron_variance(*given, last=True, corrected=True),
    ("last_layer", "lowrank_kron"): lambda *given: kron_variance(*given, last=True),  # of all columns
    ("all", "kron"): kron_variance,
    ("all", "ekfac"): lambda *given: kron_variance(*given, corrected=True),
    ("all", "lowrank"): full_variance,
    ("all", "full"): full_variance,
}
DATA = {"few": (50, 1.0, 50), "batches": (300, 0.1, 100), "little noise": (300, 0.01, 300)}


def fitted(
    net: nn.Module, x: Tensor, y: Tensor, cell: tuple[str, str], sigma: float, batch: int, **options: Any
) -> Any:
    """A posterior at prior precision 1, of targets that the network misses by its noise."""
    options |= {"structure_kwargs": EXACT} if cell[1].startswith("lowrank") else {}
    weights, structure = cell
    options |= {"sigma_noise": sigma, "prior_precision": 1.0}
    la = from_names(net, "regression", subset_of_weights=weights, hessian_structure=structure, **options)
    y = net(x).detach() + sigma * (y - y.mean()) / y.std()
    la.fit(list(zip(x.split(batch), y.split(batch), strict=True)))
    return la


def assert_within_a_percent(found: Tensor, expected: Tensor) -> None:
    ratio = found.flatten().double() / expected
    assert ratio.min() > 0.99 and ratio.max() < 1.01, f"{ratio.min():.4g} to {ratio.max():.4g} of the variance"


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("cell", TRUTHS, ids="-".join)
@pytest.mark.parametrize("data", DATA)
def test_variances(kind: str, cell: tuple[str, str], data: str) -> None:
    n, sigma, batch = DATA[data]
    (x, y), (new, _) = table(kind, n, 0), table(kind, 40, 1)
    for steps in (0, 60):
        net = trained(x, y, steps)
        la = fitted(net, x, y, cell, sigma, batch)
        expected = TRUTHS[cell](net, x, new, sigma)
        assert_within_a_percent(la(new)[1], expected)
        assert_within_a_percent(la(new, joint=True)[1].diagonal(), expected)


@pytest.mark.parametrize("cell", [("last_layer", "kron"), ("all", "kron")], ids="-".join)
def test_many_data(cell: tuple[str, str]) -> None:
    (x, y), (new, _) = table("metres", 50_000, 0), table("metres", 40, 1)
    net = trained(x[:256], y[:256])
    la = fitted(net, x, y, cell, 0.01, 10_000)
    assert_within_a_percent(la(new)[1], TRUTHS[cell](net, x, new, 0.01))


REMOVING = [(w, s) for w in ("all", "last_layer") for s in ("kron", "full", "block", "diag")]


@pytest.mark.parametrize("cell", REMOVING, ids="-".join)
@pytest.mark.parametrize("kind", COLUMNS)
def test_removed_data_leave_the_variances_of_the_others(kind: str, cell: tuple[str, str]) -> None:
    """Also when they are read in other batches than those of the fit."""
    for n, sigma, batch in ((300, 0.1, 100), (50, 0.1, 7)):
        (x, y), (new, _) = table(kind, n + 300, 0), table(kind, 40, 1)
        net = trained(x, y)
        y = net(x).detach() + sigma * (y - y.mean()) / y.std()
        fits = [from_names(net, "regression", *cell, sigma_noise=sigma, prior_precision=1.0) for _ in range(2)]
        (la, rest), removed = fits, slice(n, None)
        la.fit(list(zip(x.split(100), y.split(100), strict=True)))
        la.forget(list(zip(x[removed].split(batch), y[removed].split(batch), strict=True)))
        rest.fit([(x[:n], y[:n])])
        assert_within_a_percent(la(new)[1], rest(new)[1].flatten().double())
        assert_within_a_percent(la(new, joint=True)[1].diagonal(), rest(new)[1].flatten().double())


@pytest.mark.parametrize("cell", [("all", "kron"), ("all", "lowrank"), ("all", "full")], ids="-".join)
def test_variances_at_many_priors_are_those_at_each(cell: tuple[str, str]) -> None:
    """What a search on validation data computes."""
    (x, y), (new, _) = table("metres", 200, 0), table("metres", 40, 1)
    net = trained(x, y)
    la = fitted(net, x, y, cell, 0.1, 100)
    posterior = la.snapshot()
    deltas = torch.tensor([1e-2, 1.0])
    scan = la.fitted().curvature.scan(torch.tensor([100.0]), posterior.problem.layout, indefinite=None)
    jacobian = raw_tables.jacobian(net, new).float().unsqueeze(1)
    found = scan.variances(_jacobian(jacobian, posterior), diagonal=True)(deltas)
    for delta, variances in zip(deltas, found, strict=True):
        la.prior_precision = delta
        assert_within_a_percent(variances, la(new)[1].flatten().double())


def _jacobian(values: Tensor, posterior: Any) -> Any:
    from laplace.jacobian.jacobian import Jacobian

    return Jacobian.from_dense(values, posterior.problem.layout.sizes)


@pytest.mark.parametrize("structure", ["kron", "ekfac", "lowrank", "lowrank_kron"])
@pytest.mark.parametrize("scale", [1e3, 1e5])
def test_inputs_in_the_thousands(structure: str, scale: float) -> None:
    """A small difference of large numbers: a variance is what the data leave of the prior's."""
    x = scale * torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(50) % 3
    torch.manual_seed(0)
    head = nn.Linear(3, 3)
    with torch.no_grad():  # probabilities that do not saturate
        head.weight.div_(scale)

    def variances(net: nn.Module, x: Tensor) -> Tensor:
        la = from_names(net, "classification", subset_of_weights="all", hessian_structure=structure)
        la.fit([(x, y)])
        return la.predict(x[:20]).latent_covariance.diagonal(dim1=1, dim2=2)

    found = variances(head, x)
    assert_within_a_percent(found, variances(head.double(), x.double()).flatten())


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_what_users_read_is_of_the_models_dtype(structure: str) -> None:
    """Sums are kept in float64; `la.H` and the posterior precision are shown in the dtype of the posterior."""
    x, y = table("years", 60, 0)
    la = fitted(trained(x, y, 0), x, y, ("all", structure), 1.0, 20)
    kron = la.fitted().curvature if structure == "kron" else la.fitted().curvature.kron
    assert {factor.dtype for factor in kron.parts.factors.values() if factor.ndim > 1} == {torch.float64}
    if structure == "kron":
        shown = [la.H.kfacs, la.H.eigenvalues, la.H.eigenvectors, la.H_facs.kfacs, la.posterior_precision.eigenvalues]
        assert {factor.dtype for blocks in shown for block in blocks for factor in block} == {torch.float32}
    for value in (la.posterior_variance, la.posterior_covariance, la.sample(2), la(x)[1], la.log_marginal_likelihood()):
        assert value.dtype == torch.float32


def test_factors_that_stay_in_float32_are_told_of() -> None:
    """Those of users: what they summed is not known better, and the warning names the remedy."""
    (x, y), (new, _) = table("metres", 100, 0), table("metres", 5, 1)
    net = trained(x, y, 0)
    la = fitted(net, x, y, ("all", "kron"), 0.1, 100)
    la.H = la.H_facs
    with pytest.warns(ApproximationWarning, match="Standardise the columns of the inputs, or call model.double()"):
        la(new)
    own = Laplace(net, "regression", "all", "kron", sigma_noise=0.1)
    own.fit([(0.001 * x, net(0.001 * x).detach() + 0.1 * y)])
    own.H = own.H_facs
    own.prior_precision = 1e3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own(new)
