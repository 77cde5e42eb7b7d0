"""Targets of which entries are missing, or have weights of their own, against dense sums over the others."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import Laplace
from laplace.errors import InvalidData, UnsupportedError
from laplace.likelihoods import Bernoulli
from tests.conformance.cases import own_dense
from tests.reference.compare import assert_close
from tests.reference.gaps import Dense, dense

N, D, C, DELTA = 9, 4, 3, 0.75
STRUCTURES = ("full", "diag", "block", "kron", "ekfac", "lowrank", "lowrank_kron", "matrix_free")
LIKELIHOODS = ("regression", "bernoulli")
NOISES = {"one": torch.tensor(0.75, dtype=torch.float64), "each": torch.tensor([0.5, 0.75, 1.25], dtype=torch.float64)}


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, C)).double()


def data(likelihood: str, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, whole targets, and which of them were observed, one of every row at least."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(n, D, dtype=torch.float64, generator=generator)
    y = torch.randn(n, C, dtype=torch.float64, generator=generator)
    seen = torch.rand(n, C, generator=generator) > 0.4
    seen[torch.arange(n), torch.arange(n) % C] = True
    return x, y if likelihood == "regression" else (y > 0).double(), seen


def holed(likelihood: str, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets with gaps, and weights of 0 and 1."""
    x, y, seen = data(likelihood, n)
    return x, y.masked_fill(~seen, torch.nan), seen.double()


def posterior(likelihood: Any, weights: Any = "all", structure: Any = "full", noise: str = "one", **more: Any) -> Any:
    options: dict[str, Any] = {"prior_precision": DELTA} | more
    if likelihood == "regression":
        options["sigma_noise"] = NOISES[noise]
    if structure in ("lowrank", "lowrank_kron"):
        options["structure_kwargs"] = {"rank": 100}
    return Laplace(network(), likelihood, weights, structure, **options)


def split(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(tensor.split(4) for tensor in tensors), strict=True))


def truth(la: Any, x: Tensor, y: Tensor, weights: Tensor, likelihood: str, noise: str = "one", **more: Any) -> Dense:
    model = getattr(la.model, "model", la.model)
    return dense(model, x, y, weights, [s.name for s in la.problem.slots], likelihood, NOISES[noise], **more)


def check(la: Any, known: Dense, structure: str, x: Tensor) -> None:
    """Compares the log likelihood, and of structures that keep the whole truth variances and evidence."""
    if structure in ("full", "diag", "lowrank", "matrix_free"):
        if structure == "diag":
            known.curvature = known.curvature.diagonal().diag()
        precision = known.precision(DELTA)
        assert_close(la.predict(x).latent_covariance, known.variances(precision), "backend")
        if structure != "matrix_free":
            assert_close(la.log_marginal_likelihood(), known.evidence(precision, DELTA), "algebra")
    assert_close(la.log_likelihood, known.log_likelihood, "algebra")


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_missing_entries_count_nowhere(likelihood: str, structure: Any, weights: Any, noise: str) -> None:
    if likelihood == "bernoulli" and noise == "each":
        pytest.skip("no noise")
    x, y, seen = holed(likelihood)
    la, whole = (posterior(likelihood, weights, structure, noise) for _ in range(2))
    la.fit(split(x, y))
    whole.fit([(x, y)])
    check(la, truth(la, x, y, seen, likelihood, noise), structure, x)
    assert_close(whole.predict(x).latent_covariance, la.predict(x).latent_covariance, "backend")


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_weights_of_entries(likelihood: str, structure: Any, noise: str) -> None:
    if likelihood == "bernoulli" and noise == "each":
        pytest.skip("no noise")
    x, y, _ = data(likelihood)
    weights = 2 * torch.rand(N, C, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    la = posterior(likelihood, structure=structure, noise=noise)
    parts = itertools.cycle(weights.split(4))
    la.fit(split(x, y), weight_fn=lambda x, y: next(parts))
    check(la, truth(la, x, y, weights, likelihood, noise), structure, x)


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "diag"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_a_gap_is_a_weight_of_zero_or_the_ignored_label(likelihood: str, structure: Any) -> None:
    x, y, seen = holed(likelihood)
    gaps, weighed = posterior(likelihood, structure=structure), posterior(likelihood, structure=structure)
    gaps.fit([(x, y)])
    weighed.fit([(x, y.nan_to_num(0.0))], weight_fn=lambda x, y: seen)
    others = [weighed]
    if likelihood == "bernoulli":
        ignored = posterior(Bernoulli(ignore_index=-1), structure=structure)
        ignored.fit([(x, y.nan_to_num(-1.0).long())])
        others.append(ignored)
    for other in others:
        assert_close(other.log_marginal_likelihood(), gaps.log_marginal_likelihood(), "algebra")
        assert_close(other.predict(x).latent_covariance, gaps.predict(x).latent_covariance, "algebra")


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac"])
def test_the_weight_of_a_gap_is_not_read(structure: Any) -> None:
    x, y, seen = holed("regression")
    weights = 1 + torch.rand(N, C, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    gaps, weighed = posterior("regression", structure=structure), posterior("regression", structure=structure)
    gaps.fit([(x, y)], weight_fn=lambda x, y: weights + 5 * (1 - seen))
    weighed.fit([(x, y.nan_to_num(0.0))], weight_fn=lambda x, y: weights * seen)
    assert gaps.n_data == weighed.n_data
    assert_close(gaps.log_marginal_likelihood(), weighed.log_marginal_likelihood(), "algebra")
    assert_close(gaps.predict(x).latent_covariance, weighed.predict(x).latent_covariance, "algebra")


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_empirical_fisher_and_the_exact_hessian(likelihood: str) -> None:
    from laplace.curvature import NativeEF, NativeHessian

    x, y, seen = holed(likelihood)
    la = posterior(likelihood, "last_layer", backend=NativeEF)
    la.fit(split(x, y))
    scale = NOISES["one"] ** -4 if likelihood == "regression" else torch.ones(())
    known = truth(la, x, y, seen, likelihood, fisher=True)
    assert_close(scale * own_dense(la), known.curvature, "algebra")
    la = posterior(likelihood, "last_layer", backend=NativeHessian, structure_kwargs={"indefinite": "clamp"})
    la.fit(split(x, y))  # of a head it is the GGN
    check(la, truth(la, x, y, seen, likelihood), "full", x)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_drawn_targets_miss_the_same_entries(likelihood: str) -> None:
    x, y, seen = holed(likelihood)
    la = posterior(likelihood, "last_layer", backend_kwargs={"stochastic": True, "num_samples": 20_000})
    la.fit([(x, y)])
    exact = truth(la, x, y, seen, likelihood).curvature
    own = own_dense(la) / (NOISES["one"] ** 2 if likelihood == "regression" else 1)
    assert float((own - exact).norm() / exact.norm()) < 0.05
    never = torch.zeros(N, C, dtype=torch.bool)
    never[:, 1:] = True
    la.fit([(x, y.nan_to_num(0.0).masked_fill(never, torch.nan))])
    assert not own_dense(la)[5:15].any()


def test_fits_add_up_and_are_taken_back(tmp_path: Path) -> None:
    x, y, seen = holed("regression")
    whole, parts = posterior("regression"), posterior("regression")
    whole.fit([(x, y)])
    parts.fit([(x[:4], y[:4])])
    first = parts.log_marginal_likelihood()
    parts.fit([(x[4:], y[4:])], override=False)
    assert_close(parts.log_marginal_likelihood(), whole.log_marginal_likelihood(), "algebra")
    parts.save(tmp_path / "la")
    loaded = laplace.load(tmp_path / "la", network())
    assert_close(loaded.log_marginal_likelihood(), whole.log_marginal_likelihood(), "exact")
    parts.forget([(x[4:], y[4:])])
    assert_close(parts.log_marginal_likelihood(), first, "algebra")
    full = posterior("regression")  # data without gaps beside data with them
    full.fit([(x[:4], y[:4].nan_to_num(0.0))])
    full.fit([(x[4:], y[4:])], override=False)
    weights = torch.cat([torch.ones_like(seen[:4]), seen[4:]])
    assert_close(
        full.log_likelihood, truth(full, x, y.nan_to_num(0.0), weights, "regression").log_likelihood, "algebra"
    )


def test_noises_are_tuned_by_what_was_observed() -> None:
    """Where the evidence is stationary, σ_c² = (residuals + variances) / N_c, of which N_c entries were observed."""
    x, y, seen = holed("regression", 60)
    la = posterior("regression", "last_layer", noise="each")
    la.fit([(x, y)])
    found = la.optimize_hyperparameters(("sigma_noise",), n_steps=200)
    sigma = found.sigma_noise.detach()
    f, variance = la.predict(x).latent_mean, la.predict(x).latent_variance
    expected = (seen * ((y.nan_to_num(0.0) - f).square() + variance)).sum(0) / seen.sum(0)
    assert_close(sigma.square(), expected, "float32_ill")


def test_scores_are_of_what_was_observed() -> None:
    x, y, seen = holed("regression", 40)
    la = posterior("regression")
    la.fit([(x, y)])
    prediction = la.predict(x)
    mean, variance = prediction.latent_mean, prediction.latent_variance + NOISES["one"].square()
    density = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y.nan_to_num(0.0))
    compared = la.compare([(x[:20], y[:20]), (x[20:], y[20:])])
    assert compared.rows["nll"].posterior == pytest.approx(float(-(seen * density).sum(1).mean()))
    squares = (seen * (y.nan_to_num(0.0) - mean).square()).sum(1) / seen.sum(1)
    assert compared.rows["rmse"].posterior == pytest.approx(float(squares.mean().sqrt()))
    assert all(math.isfinite(row.posterior) for row in compared.rows.values())


def test_labels_that_were_not_observed_are_no_misses() -> None:
    x, y, seen = holed("bernoulli", 40)
    la = posterior("bernoulli")
    la.fit([(x, y)])
    compared, p = la.compare([(x, y)]), la(x)
    right = seen * ((p > 0.5).double() == y.nan_to_num(0.0)).double()
    assert compared.rows["accuracy"].posterior == pytest.approx(float((right.sum(1) / seen.sum(1)).mean()))
    brier = (seen * (p - y.nan_to_num(0.0)).square()).sum(1).mean()
    assert compared.rows["brier"].posterior == pytest.approx(float(brier))
    assert all(math.isfinite(row.posterior) for row in compared.rows.values())


@pytest.mark.filterwarnings("ignore:grid search.* on the edge of the grid")
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_validation_data_with_gaps(likelihood: str) -> None:
    x, y, _ = holed(likelihood, 40)
    la = posterior(likelihood, "last_layer", "kron")
    la.fit([(x, y)])
    other = [(x + 0.1, y)]
    before = la.compare(other).rows["nll"].posterior
    found = la.calibrate(other)
    assert found.posterior_nll <= before + 1e-9
    assert found.n_data == 40
    la = posterior(likelihood, "last_layer", "kron")
    la.fit([(x, y)])
    for loss in ("nll", "crps" if likelihood == "regression" else "brier"):
        la.optimize_prior_precision(method="gridsearch", val_loader=other, loss=loss, grid_size=5)
    la.optimize_hyperparameters(("prior_precision",), objective="nll", val_loader=other, n_steps=3)
    assert la.compare(other).rows["nll"].posterior <= before + 1e-9


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_leaving_out_a_datum_leaves_out_what_it_has(likelihood: str) -> None:
    """Of a linear model with squared errors: the fit of the others."""
    x, y, _ = holed(likelihood)
    la = posterior(likelihood, "last_layer")
    la.fit([(x, y)])
    la.refine([(x, y)])
    found = la.leave_one_out([(x, y)])
    if likelihood == "bernoulli":
        assert bool(found.mean.isfinite().all())
        return
    for i in (0, 4):
        rest = torch.arange(N) != i
        known = truth(la, x[rest], y[rest], (~y[rest].isnan()).double(), "regression")
        every = truth(la, x, y, (~y.isnan()).double(), "regression")
        precision = known.precision(DELTA)
        residual = torch.where(y[rest].isnan(), 0.0, y[rest] - known.outputs) / NOISES["one"].square()
        gradient = torch.einsum("ncp,nc->p", known.jacobian, residual) - DELTA * known.theta
        step = torch.linalg.solve(precision, gradient)
        assert_close(found.mean[i], every.outputs[i] + every.jacobian[i] @ step, "float32")
        assert_close(found.covariance[i], every.variances(precision)[i], "float32")


def test_influence_is_of_what_was_observed() -> None:
    x, y, _ = holed("regression")
    la = posterior("regression", "last_layer")
    la.fit([(x, y)])
    whole = laplace.influence(la, [(x, y)], x[:2], y[:2])
    assert bool(whole.scores.isfinite().all())


def test_what_does_not_know_gaps_says_so() -> None:
    x, y, _ = holed("regression", 20)
    with pytest.raises(UnsupportedError, match=r"entries of the targets are missing .* hessian_structure='gp'"):
        posterior("regression", structure="gp", n_subset=10).fit([(x, y)])
    la = posterior("regression")
    la.fit([(x, y)])
    with pytest.raises(UnsupportedError, match=r"entries of the targets are missing .* conformal does not know"):
        laplace.conformal(la, [(x, y)])
    pytest.importorskip("asdl")
    from laplace.curvature import AsdlGGN

    with pytest.raises(UnsupportedError, match=r"entries of the targets are missing .* backend=AsdlGGN does not know"):
        posterior("regression", structure="kron", backend=AsdlGGN).fit([(x, y)])


def test_rows_without_a_target_and_infinite_ones_are_faults() -> None:
    x, y, _ = holed("regression")
    for wrong in (y[:2] * torch.nan, y[:2].nan_to_num(torch.inf)):
        with pytest.raises(InvalidData, match=r"Targets have NaN or infinite entries.*remove those data"):
            posterior("regression").fit([(x[:2], wrong)])
    with pytest.raises(InvalidData, match=r"or for every target, \[9, 3\], is accepted"):
        posterior("regression").fit([(x, y)], weight_fn=lambda x, y: torch.ones(N, 2))
    y[4] = torch.nan
    with pytest.raises(InvalidData, match="entries at row 4, of 9 rows"):  # and not the gaps
        posterior("regression").fit([(x, y)])
    labels = torch.eye(C, dtype=torch.float64)[torch.arange(N) % C]
    with pytest.raises(InvalidData, match="has no loss of every entry of its targets"):
        posterior("classification").fit([(x, labels)], weight_fn=lambda x, y: torch.ones(N, C))


def test_an_online_loss_of_rows_without_a_label() -> None:
    from laplace.training import OnlineLaplace

    x, y, _ = holed("bernoulli")
    labels = y.nan_to_num(-1.0).long()
    labels[3] = -1
    rest = torch.arange(N) != 3
    online = OnlineLaplace(network(), [(x, labels)], Bernoulli(ignore_index=-1), hessian_structure="diag")
    f = online.forward(x)
    assert online.n_data == N - 1
    assert_close(online.loss(f, labels), online.loss(f[rest], labels[rest]), "exact")


class Pixels(nn.Module):
    def __init__(self, n_outputs: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(D, n_outputs).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_weights_of_positions() -> None:
    """A weight for every token is one for every row."""
    x = torch.randn(3, 5, D, dtype=torch.float64)
    y, weights = torch.randint(C, (3, 5)), torch.rand(3, 5, dtype=torch.float64)
    tokens, rows = (Laplace(Pixels(C), "classification", "all", "full") for _ in range(2))
    tokens.fit([(x, y)], weight_fn=lambda x, y: weights)
    rows.fit([(x.flatten(0, 1), y.flatten())], weight_fn=lambda x, y: weights.flatten())
    assert_close(own_dense(tokens), own_dense(rows), "algebra")
    assert_close(tokens.log_likelihood, rows.log_likelihood, "algebra")


def test_gaps_of_positions() -> None:
    x = torch.randn(3, 5, D, dtype=torch.float64)
    y = torch.randn(3, 5, 2, dtype=torch.float64)
    y[0, 1, 0] = y[2, 4, 1] = torch.nan
    tokens, rows = (Laplace(Pixels(2), "regression", "all", "full") for _ in range(2))
    tokens.fit([(x, y)])
    rows.fit([(x.flatten(0, 1), y.flatten(0, 1))])
    assert_close(own_dense(tokens), own_dense(rows), "algebra")
    assert_close(tokens.log_likelihood, rows.log_likelihood, "algebra")
