"""The full curvature without its matrix: answers by products against dense algebra, and what is said of them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, MatrixFreeLaplace, MixtureLaplace
from laplace.curvature import NativeEF, NativeHessian
from laplace.engines.engine import LinearMap
from laplace.engines.native import products
from laplace.errors import ApproximationWarning, InvalidArgument, ModelChangedError, TuningWarning, UnsupportedError
from laplace.extensions import matrix_free
from laplace.extensions.matrix_free import MatrixFreeOptions
from laplace.large_structures import krylov
from tests import grid
from tests.large_structures.test_krylov import Held
from tests.reference import curvature as reference
from tests.reference import evidence as truth
from tests.reference.compare import assert_close

N_DATA, WIDTH = 24, 3
LIKELIHOODS = {"classification": 3, "regression": 2, "bernoulli": 1, "poisson": 2}
TIGHT = {"dense_below": 0, "tolerance": 1e-10, "rank": 6}  # of a curvature of rank 48


def network(n_outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, n_outputs)).double()


def batches(likelihood: str = "classification") -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(N_DATA, WIDTH, dtype=torch.float64, generator=generator)
    n = LIKELIHOODS[likelihood]
    if likelihood == "classification":
        y = torch.randint(n, (N_DATA,), generator=generator)
    elif likelihood == "regression":
        y = torch.randn(N_DATA, n, dtype=torch.float64, generator=generator)
    else:
        y = torch.randint(2, (N_DATA, n), generator=generator).double()
    return list(zip(x.split(10), y.split(10), strict=True))


def fitted(
    structure: str = "matrix_free", likelihood: str = "classification", weights: str = "all",
    structure_kwargs: dict[str, Any] | None = None, **options: Any,
) -> Any:  # fmt: skip
    if weights == "subnetwork":
        options["subnetwork_indices"] = torch.tensor([0, 3, 17, 20, 33, 34, 40, 41, 42, 50])
    if structure == "matrix_free":
        options["structure_kwargs"] = TIGHT | (structure_kwargs or {})
    la = Laplace(network(LIKELIHOODS[likelihood]), likelihood, weights, structure, **options)
    la.fit(batches(likelihood))
    return la


def exact(likelihood: str = "classification", scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """J at two inputs, `[2, C, P]`, and the GGN of all weights, `[P, P]`, by plain loops."""
    model, (x, y) = (
        network(LIKELIHOODS[likelihood]),
        (torch.cat(part) for part in zip(*batches(likelihood), strict=True)),
    )
    names = [name for name, _ in model.named_parameters()]
    jacobian, f = reference.flat_jacobian(model, x, names)
    inner = reference.output_hessian(f, likelihood, y)
    inner = inner if scale is None else inner * scale
    return jacobian[:2], torch.einsum("bcp,bcd,bdq->pq", jacobian, inner, jacobian)


# Against dense algebra.


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_variances_are_those_of_the_dense_matrix(likelihood: str) -> None:
    jacobian, ggn = exact(likelihood)
    delta = torch.rand(len(ggn), generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.2
    la = fitted(likelihood=likelihood, prior_precision=delta)
    covariance = truth.posterior_covariance(ggn, delta)
    expected = jacobian @ covariance @ jacobian.mT
    assert_close(la.functional_variance(jacobian), expected, "backend", label="variances")
    rows = jacobian.flatten(0, 1)
    assert_close(la.functional_covariance(jacobian), rows @ covariance @ rows.T, "backend", label="covariance")
    assert_close(la.posterior().solve(rows), rows @ covariance, "backend", label="solutions")
    precision = truth.posterior_precision(ggn, delta)
    assert_close(la.square_norm(la.mean + rows), ((rows @ precision) * rows).sum(1), "backend", label="square norms")
    assert la.solve_reports["variances"].converged and la.solve_reports["variances"].residual <= 1e-10


def test_outputs_that_no_weight_moves_have_no_variance() -> None:
    la = fitted()
    nothing = torch.zeros(2, 3, la.n_params, dtype=torch.float64)
    assert not la.functional_variance(nothing).any() and not la.functional_covariance(nothing).any()
    assert la.solve_reports["variances"].converged


def test_one_noise_per_output() -> None:
    sigma = torch.tensor([0.5, 1.5], dtype=torch.float64)
    jacobian, ggn = exact("regression", sigma**-2)
    la = fitted(likelihood="regression", sigma_noise=sigma)
    covariance = truth.posterior_covariance(ggn, torch.ones(len(ggn), dtype=torch.float64))
    assert_close(la.functional_variance(jacobian), jacobian @ covariance @ jacobian.mT, "backend", label="variances")
    full = fitted("full", "regression", sigma_noise=sigma)
    x = batches("regression")[0][0]
    for mine, theirs in zip(la(x), full(x), strict=True):
        assert_close(mine, theirs, "backend", label="predictions")


@pytest.mark.parametrize("weights", ["all", "last_layer", "subnetwork"])
@pytest.mark.parametrize(("kept", "preconditioner"), [(0, "lowrank"), (2**30, "lowrank"), (2**30, "kron")])
def test_predictions_are_those_of_the_full_structure(weights: str, kept: int, preconditioner: str) -> None:
    """By features, by Jacobians that are kept, and by graphs."""
    options = {"kept_bytes": kept, "preconditioner": preconditioner}
    la, full = fitted(weights=weights, structure_kwargs=options), fitted("full", weights=weights)
    x = batches()[0][0]
    for link in ("probit", "bridge"):
        assert_close(la(x, link_approx=link), full(x, link_approx=link), "backend", label="predictions")
    joint = la(x, joint=True), full(x, joint=True)
    assert_close(*(one[1] if isinstance(one, tuple) else one for one in joint), "backend", label="joint")


def test_empirical_fisher() -> None:
    la, full = fitted(backend=NativeEF), fitted("full", backend=NativeEF)
    x = batches()[0][0]
    assert_close(la(x), full(x), "backend", label="predictions")


def test_gradients_of_predictions() -> None:
    """In the inputs, the prior precision and the noise."""
    gradients: list[list[Tensor]] = []
    for structure in ("matrix_free", "full"):
        la = fitted(structure, "regression", enable_backprop=True)
        x = batches("regression")[0][0].clone().requires_grad_()
        la.prior_precision = torch.full((4,), 0.7, dtype=torch.float64, requires_grad=True)
        la.sigma_noise = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
        variance = la(x)[1]
        gradients.append(list(torch.autograd.grad(variance.square().sum(), [x, la.prior_precision, la.sigma_noise])))
    for mine, theirs in zip(*gradients, strict=True):
        assert_close(mine, theirs, "backend", label="gradients")


@pytest.mark.parametrize("question", ["evidence", "variance", "sample"])
def test_second_derivatives_are_refused(question: str) -> None:
    """They would lack the derivatives of solutions."""
    la = fitted(enable_backprop=True)
    delta = torch.ones(1, dtype=torch.float64, requires_grad=True)
    la.prior_precision = delta
    jacobian, _ = exact()
    ask = {
        "evidence": la.log_marginal_likelihood,
        "variance": lambda: la.functional_variance(jacobian).sum(),
        "sample": lambda: la.sample(2).sum(),
    }[question]
    with pytest.raises(UnsupportedError, match="differentiated once"):
        torch.autograd.grad(ask(), delta, create_graph=True)
    assert torch.autograd.grad(ask(), delta)[0].isfinite().all()


# Samples.


def test_variances_of_samples() -> None:
    la = fitted(structure_kwargs={"tolerance": 1e-5})
    _, ggn = exact()
    covariance = truth.posterior_covariance(ggn, torch.ones(len(ggn), dtype=torch.float64))
    samples = la.sample(4000, generator=torch.Generator().manual_seed(0)) - la.mean
    errors = (samples.square().mean(0) - covariance.diagonal()) / (covariance.diagonal() * (2 / 4000) ** 0.5)
    assert float((errors.abs() < 3).double().mean()) >= 0.98  # of 59 entries one may be beyond
    assert float(errors.abs().max()) < 5
    # Directions that the data determine, which single entries show little of.
    values, vectors = torch.linalg.eigh(ggn)
    inside = (samples @ vectors[:, -8:]).square().mean(0) * (1 + values[-8:])
    assert float((inside - 1).abs().max()) < 5 * (2 / 4000) ** 0.5
    again = la.sample(5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(again, la.sample(5, generator=torch.Generator().manual_seed(0)))


def test_gradients_of_samples() -> None:
    """Against finite differences of the same random numbers."""
    la = fitted(likelihood="regression", sigma_noise=torch.tensor([0.7, 1.2], dtype=torch.float64))
    probe = torch.randn(3, la.n_params, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def value(delta: Tensor, sigma: Tensor) -> Tensor:
        la.prior_precision, la.sigma_noise = delta, sigma
        return (la.sample(3, generator=torch.Generator().manual_seed(0)) * probe).sum()

    delta = torch.full((4,), 0.9, dtype=torch.float64, requires_grad=True)
    sigma = torch.tensor([0.7, 1.2], dtype=torch.float64, requires_grad=True)
    gradients = torch.autograd.grad(value(delta, sigma), [delta, sigma])
    step = 1e-5
    for which, (leaf, gradient) in enumerate(zip((delta, sigma), gradients, strict=True)):
        for i in range(len(leaf)):
            pairs = []
            for sign in (1, -1):
                moved = [delta.detach().clone(), sigma.detach().clone()]
                moved[which][i] += sign * step
                pairs.append(value(*moved))
            assert_close(gradient[i], (pairs[0] - pairs[1]) / (2 * step), "finite_difference", label="gradient")


# Evidence.


@pytest.mark.parametrize("preconditioner", ["lowrank", "kron"])
def test_the_evidence_within_its_standard_error(preconditioner: str) -> None:
    la, full = fitted(structure_kwargs={"n_probes": 64, "preconditioner": preconditioner}), fitted("full")
    for delta in (0.1, 1.0, 10.0):
        mine = float(la.log_marginal_likelihood(torch.tensor([delta], dtype=torch.float64)))
        theirs = float(full.log_marginal_likelihood(torch.tensor([delta], dtype=torch.float64)))
        error = la.solve_reports["log determinant"].standard_error
        assert error is not None and 0 < error < 2
        assert abs(mine - theirs) < 5 * 0.5 * error


def test_the_evidence_is_smooth_in_the_prior() -> None:
    """The probes are those of the fit: small steps of δ make small steps of the evidence."""
    la = fitted()
    deltas = torch.linspace(0.99, 1.01, 9, dtype=torch.float64)
    values = torch.stack([la.log_marginal_likelihood(delta.view(1)) for delta in deltas])
    second = values[2:] - 2 * values[1:-1] + values[:-2]
    assert float(second.max() - second.min()) < 0.1 * float(second.abs().max())  # other probes would make jumps


@pytest.mark.parametrize(
    ("form", "preconditioner"), [(1, "lowrank"), (1, "kron"), (4, "kron"), (4, "lowrank"), (59, "lowrank")]
)
def test_gradients_of_the_evidence(form: int, preconditioner: str) -> None:
    """By many probes; those of tensors with few entries are exact."""
    gradients = []
    for la in (fitted(structure_kwargs={"n_probes": 2048, "preconditioner": preconditioner}), fitted("full")):
        delta = torch.full((form,), 0.6, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(la.log_marginal_likelihood(delta), delta)
        gradients.append(gradient)
    mine, theirs = gradients
    if form == 4:
        assert_close(mine, theirs, "backend", label="gradient")  # of no tensor there are more entries than probes
    assert float((mine - theirs).abs().max()) < 0.1 * float(theirs.abs().max())


def test_gradients_in_noise_and_temperature() -> None:
    found = []
    for la in (fitted(likelihood="regression", structure_kwargs={"n_probes": 2048}), fitted("full", "regression")):
        sigma = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(la.log_marginal_likelihood(sigma_noise=sigma), sigma)
        found.append(float(gradient))
    assert found[0] == pytest.approx(found[1], rel=0.02)


def test_one_precision_per_tensor_by_its_fixed_point() -> None:
    """Within 5 % of that of the exact evidence, whose gradient vanishes there."""
    data = batches()
    x = torch.cat([x for x, _ in data])
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 3e-2)
    for _ in range(60):
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x), y) + 1e-3 * sum(p.square().sum() for p in model.parameters())).backward()
        optimizer.step()
    options = {"dense_below": 0, "n_probes": 32, "tolerance": 1e-4}
    la = Laplace(model, "classification", "all", "matrix_free", structure_kwargs=options)
    full = Laplace(model, "classification", "all", "full")
    for posterior in (la, full):
        posterior.fit([(x, y)])
    full.optimize_hyperparameters(prior_structure="layerwise", tolerance=1e-6)
    la.optimize_prior_precision(method="em", prior_structure="layerwise", n_steps=60)
    ratios = la.prior_precision / full.prior_precision
    assert float((ratios - 1).abs().max()) < 0.05


@pytest.mark.parametrize("structure", ["matrix_free", "full", "kron", "diag"])
def test_the_fixed_point_of_tensors_that_are_zero(structure: str) -> None:
    """Those that nothing is known of keep their precision; those that stay at zero go to the bound, with a note."""
    model = network()
    with torch.no_grad():
        for tensor in (model[0].weight, model[0].bias, model[2].weight):  # of which the first two move no output
            tensor.zero_()
    options = {"structure_kwargs": TIGHT} if structure == "matrix_free" else {}
    la = Laplace(model, "classification", "all", structure, prior_precision=0.7, **options)
    la.fit(batches())
    la.optimize_prior_precision(method="em", prior_structure="layerwise", init_prior_prec=0.7, n_steps=30)
    assert la.prior_precision[:2] == pytest.approx([0.7, 0.7])
    with torch.no_grad():
        model[2].bias.zero_()
    la.fit(batches())
    with pytest.warns(TuningWarning, match="bound"):
        la.optimize_prior_precision(method="em", prior_structure="layerwise", n_steps=30)
    assert la.prior_precision[3] > 1e9


def test_a_sketch_of_larger_rank_takes_fewer_products_and_none_is_the_prior() -> None:
    x, products = batches()[0][0], []
    for rank in (0, 6, 20, 48):
        la = fitted(structure_kwargs={"rank": rank, "tolerance": 1e-6}, prior_precision=0.1)
        la(x)
        products.append(la.solve_reports["variances"].n_products)
    assert products == sorted(products, reverse=True) and products[-1] < products[0] / 4


# What is said of answers.


def test_a_solution_that_does_not_converge_is_a_warning_with_its_residual() -> None:
    la = fitted(structure_kwargs={"max_iterations": 2})
    with pytest.warns(ApproximationWarning, match=r"NOT converged.*tolerance is 1e-10"):
        la(batches()[0][0])
    report = la.solve_reports["variances"]
    assert not report.converged and report.residual > 1e-10
    assert report.n_right == 30 and report.n_products >= 60


@pytest.mark.parametrize(("delta", "sigma"), [(1e-4, 1e-2), (1e-8, 1e-3)])
def test_rounding_is_no_convergence(delta: float, sigma: float) -> None:
    """In float32 rounding can leave rᵀ M r, or bᵀ M b, below zero."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 5, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 1))
    options = {"dense_below": 0, "rank": 100, "max_iterations": 50}
    la = Laplace(
        model, "regression", "all", "matrix_free", prior_precision=delta, sigma_noise=sigma, structure_kwargs=options
    )
    la.fit([(x, x[:, :1].sin())])
    with pytest.warns(ApproximationWarning, match="NOT converged"):
        la(x[:20])


def test_residuals_that_are_not_numbers() -> None:
    tally = krylov.Tally("variances")
    tally.add(2, 2, torch.tensor([0.0, torch.nan]))
    assert not tally.report(1e-3).converged


def test_reports_by_question() -> None:
    la = fitted(structure_kwargs={"tolerance": 1e-3})
    assert isinstance(la, MatrixFreeLaplace) and la.solve_reports == {}
    la(batches()[0][0])
    la.sample(3)
    assert set(la.solve_reports) == {"variances", "samples"}
    la.log_marginal_likelihood()
    assert "standard error" in repr(la.solve_reports["log determinant"])
    assert "held with the inputs of 24 data" in repr(la)
    small = fitted(structure_kwargs=MatrixFreeOptions().__dict__)
    small(batches()[0][0])
    assert small.solve_reports == {}  # the matrix was formed


def test_a_looser_tolerance_takes_fewer_products_and_is_wrong_by_its_square() -> None:
    jacobian, ggn = exact()
    covariance = truth.posterior_covariance(ggn, torch.full((len(ggn),), 0.1, dtype=torch.float64))
    expected = (jacobian @ covariance @ jacobian.mT).diagonal(dim1=1, dim2=2)
    products = []
    for tolerance in (1e-1, 1e-2, 1e-4):
        la = fitted(structure_kwargs={"tolerance": tolerance}, prior_precision=0.1)
        variances = la.functional_variance(jacobian).diagonal(dim1=1, dim2=2)
        assert float((variances / expected - 1).abs().max()) < 30 * tolerance**2
        products.append(la.solve_reports["variances"].n_products)
    assert products == sorted(products)


# What is held.


def test_states_copies_and_pickles() -> None:
    la, x = fitted(prior_precision=0.3), batches()[0][0]
    expected = la(x)
    other = Laplace(network(), "classification", "all", "matrix_free", prior_precision=0.3)
    other.load_state_dict(la.state_dict())
    for copied in (other, copy.deepcopy(la), pickle.loads(pickle.dumps(la))):
        assert torch.equal(copied(x), expected)
    assert torch.equal(
        other.sample(3, torch.Generator().manual_seed(0)), la.sample(3, torch.Generator().manual_seed(0))
    )


def test_the_loader_cannot_change_the_data() -> None:
    data = batches()
    la = Laplace(network(), "classification", "all", "matrix_free", structure_kwargs=TIGHT)
    la.fit(data)
    for x, _ in data:
        x.zero_()
    x = batches()[0][0]
    assert torch.equal(la(x), fitted()(x))


@pytest.mark.filterwarnings("ignore::laplace.errors.DataWarning")  # data that count twice
def test_data_are_added_and_fade() -> None:
    """At the same weights: the curvature of both, at others an error."""
    data, x = batches(), batches()[0][0]
    la, full = (
        Laplace(network(), "classification", "all", structure, structure_kwargs=options)
        for structure, options in (("matrix_free", TIGHT), ("full", {}))
    )
    for posterior in (la, full):
        posterior.fit(data[:2])
        posterior.fit(data[2:], override=False, decay=0.5)
    assert_close(la(x), full(x), "backend", label="predictions")
    with torch.no_grad():
        la.model[0].weight.mul_(1.1)
    with pytest.raises(UnsupportedError, match="override=True"):
        la.fit(data[:1], override=False)
    with pytest.raises(ModelChangedError):
        la.log_marginal_likelihood()


@pytest.mark.parametrize(("preconditioner", "most"), [("lowrank", 6.2), ("kron", 6.7)])
def test_six_numbers_are_held_per_weight_and_right_hand_side(preconditioner: str, most: float) -> None:
    """Besides the features and the preconditioner, which all right-hand sides share."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 600, generator=generator)
    options = {"dense_below": 0, "tolerance": 1e-4, "preconditioner": preconditioner}
    la = Laplace(
        nn.Sequential(nn.Linear(600, 10)), "classification", "last_layer", "matrix_free", structure_kwargs=options
    )
    la.fit([(x, torch.arange(30) % 10)])
    precision = la.posterior()
    precision.solve(torch.ones(1, 6010))
    with Held() as numbers:
        right = torch.randn(8, 6010, generator=generator)
        precision.solve(right)
    shared = 50 * 6010 if preconditioner == "lowrank" else 0  # directions, of which views are made
    assert numbers.peak - shared <= most * 8 * 6010  # with small matrices


# What cannot be.


def test_the_exact_hessian_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"output_curvature.*matrix_free.*NativeGGN"):
        fitted(backend=NativeHessian)


def test_data_are_not_forgotten() -> None:
    la = fitted()
    with pytest.raises(UnsupportedError, match="cannot be subtracted"):
        la.forget(batches()[:1])


def test_matrices_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    la = fitted()
    _, ggn = exact()
    covariance = truth.posterior_covariance(ggn, torch.ones(len(ggn), dtype=torch.float64))
    assert_close(la.posterior_covariance, covariance, "backend", label="covariance")
    assert_close(la.posterior_variance, covariance.diagonal(), "backend", label="variances")
    monkeypatch.setattr(matrix_free, "MEMORY_BUDGET", 100)
    la = fitted()
    for name in ("posterior_covariance", "posterior_variance", "posterior_precision"):
        with pytest.raises(UnsupportedError, match=r"la\.functional_variance"):
            getattr(la, name)
    assert la(batches()[0][0]).shape == (10, 3)  # one right-hand side at a time


@pytest.mark.parametrize(
    "options",
    [
        {"tolerance": 0.0},
        {"tolerance": 1.0},
        {"n_probes": 1},
        {"max_iterations": 0},
        {"kept_bytes": -1},
        {"rank": -1},
        {"preconditioner": "full"},
    ],
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        fitted(structure_kwargs=options)


def test_a_mixture_has_no_fixed_point() -> None:
    la = MixtureLaplace([grid.network(), grid.network()], "classification", "all", "kron")
    la.fit(grid.batches())
    with pytest.raises(UnsupportedError, match="marglik"):
        la.optimize_prior_precision(method="em")


# Linear maps.


def test_maps_agree() -> None:
    """Features, a Jacobian that is multiplied out, and a graph say the same of a last layer."""
    la = fitted("full", weights="last_layer")
    engine, x = la.snapshot().engine, batches()[0][0]
    linear = engine.linear(x)
    maps: list[LinearMap] = [
        engine.linear_map(x),
        engine._multiplied_out(x),
        products.GraphMap(linear, 3, at_once=2),
    ]
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(5, la.n_params, dtype=torch.float64, generator=generator)
    u = torch.randn(5, 10, 3, dtype=torch.float64, generator=generator)
    pushed = [one.push(v) for one in maps]
    pulled = [torch.ones_like(v) for _ in maps]
    for one, total in zip(maps, pulled, strict=True):
        one.add_pull(u, total)
    for other in (1, 2):
        assert_close(pushed[other], pushed[0], "algebra", label="J v")
        assert_close(pulled[other], pulled[0], "algebra", label="Jᵀ u")
    assert [one.is_lasting for one in maps] == [True, True, False]
