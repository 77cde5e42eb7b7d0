"""Evidence and moments of the posterior against dense algebra on the structure's own curvature."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from laplace import ParametricLaplace
from laplace.compat.kron import KronDecomposed
from laplace.errors import LaplaceError
from laplace.structures.kron import KronCurvature, KronPrecision
from tests import problems as catalogue
from tests.conformance.cases import FEW, Case, by_turns, drawn, few, own_dense, priors, truth
from tests.conformance.dense_posterior import Dense, hyper_parameters
from tests.reference import curvature as reference
from tests.reference import evidence, kfac
from tests.reference.compare import assert_close

pytestmark = pytest.mark.portable

PRIORS = ("scalar", "layerwise", "diag")


def _set(la: ParametricLaplace, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        setattr(la, name, value)


@pytest.mark.parametrize("case", by_turns() + few("last_layer", "random", "rectangle", "mixed", names=FEW[:4]))
def test_terms_of_the_evidence(case: Case) -> None:
    la = case.fit(4)
    values = hyper_parameters(case)
    _set(la, values)
    dense = Dense.of(case, la, **values)
    assert_close(la.log_likelihood, dense.log_likelihood, "algebra", label="log likelihood")
    assert_close(la.scatter, dense.scatter, "algebra", label="scatter")
    assert_close(la.log_det_prior_precision, dense.prior.log().sum(), "algebra", label="log det P0")
    assert_close(la.log_det_posterior_precision, dense.precision.logdet(), "algebra", label="log det P")
    assert_close(la.log_det_ratio, dense.precision.logdet() - dense.prior.log().sum(), "algebra", label="ratio")
    assert_close(la.log_marginal_likelihood(), dense.evidence, "algebra", label="evidence")
    assert_close(la.marglik(), dense.evidence, "algebra", label="marglik")


@pytest.mark.parametrize("kind", ["ggn", "ef"])
@pytest.mark.parametrize("case", few(structures=["full"]))
def test_evidence_of_the_exact_curvature(case: Case, kind: str) -> None:
    """Without the structure in between: the full evidence from nothing but the Jacobian."""
    la = case.fit(kind=kind)
    values = hyper_parameters(case)
    _set(la, values)
    dense = Dense.of(case, la, exact=case.dense(kind), kind=kind, **values)
    assert_close(la.log_marginal_likelihood(), dense.evidence, "backend")


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed"))
def test_posterior_under_priors_of_every_form(case: Case) -> None:
    la = case.fit()
    for given, _ in priors(case).values():
        _check_posterior(case, la, hyper_parameters(case) | {"prior_precision": given})


def _check_posterior(case: Case, la: ParametricLaplace, values: dict[str, Tensor]) -> None:
    _set(la, values)
    dense = Dense.of(case, la, **values)
    covariance = torch.linalg.inv(dense.precision)
    assert_close(la.log_marginal_likelihood(), dense.evidence, "algebra", label="evidence")
    assert_close(la.evidence().precision.to_dense(), dense.precision, "algebra", label="precision")
    assert_close(la.posterior_covariance, covariance, "algebra", label="covariance")
    assert_close(la.posterior_variance, covariance.diagonal(), "algebra", label="variance")
    scale = la.posterior_scale if la.posterior_scale.ndim == 2 else torch.diag(la.posterior_scale)
    assert_close(scale @ scale.T, covariance, "algebra", label="scale")
    _same_public_precision(la, dense)
    _same_density(la, case, dense)


def _same_public_precision(la: ParametricLaplace, dense: Dense) -> None:
    public = la.posterior_precision
    if isinstance(public, tuple):
        (vectors, values), prior = public
        whole = vectors @ torch.diag(values) @ vectors.T + torch.diag(prior)
        assert_close(whole, dense.precision, "algebra", label="public")
        return
    if isinstance(public, Tensor):
        assert_close(public if public.ndim == 2 else torch.diag(public), dense.precision, "algebra", label="public")
        return
    if not isinstance(public, KronDecomposed | KronPrecision):
        assert_close(public.to_dense(), dense.precision, "algebra", label="public")
        return
    vectors = torch.randn(3, 2, len(dense.precision), dtype=torch.float64)
    inverse = torch.linalg.inv(dense.precision)
    assert_close(public.to_matrix(), dense.precision, "algebra", label="to_matrix")
    assert_close(public.diag(), dense.precision.diagonal(), "algebra", label="diag")
    assert_close(public.logdet(), dense.precision.logdet(), "algebra", label="logdet")
    assert_close(public.bmm(vectors), vectors @ inverse, "algebra", label="solve")
    assert_close(public.bmm(vectors, exponent=1), vectors @ dense.precision, "algebra", label="bmm")
    assert_close(public.inv_square_form(vectors), vectors @ inverse @ vectors.mT, "algebra", label="square form")


def _same_density(la: ParametricLaplace, case: Case, dense: Dense) -> None:
    theta = case.mean + drawn(case, "theta", 4, len(case.mean))
    normal = torch.distributions.MultivariateNormal(case.mean, precision_matrix=dense.precision)
    squares = torch.einsum("sp,pq,sq->s", theta - case.mean, dense.precision, theta - case.mean)
    assert_close(la.log_prob(theta), normal.log_prob(theta), "algebra", label="log_prob")
    assert_close(la.log_prob(theta[0]), normal.log_prob(theta[0]), "algebra", label="log_prob of one")
    assert_close(la.log_prob(theta, normalized=False), -0.5 * squares, "algebra", label="unnormalised")
    assert_close(la.square_norm(theta), squares, "algebra", label="square_norm")


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", names=["mlp_classification", "frozen_bias"]))
@pytest.mark.parametrize("form", PRIORS)
def test_log_prob_before_fit_is_that_of_the_prior(case: Case, form: str) -> None:
    given, diagonal = priors(case)[form]
    mean = drawn(case, "mean", len(case.columns))
    la = case.build(prior_precision=given, prior_mean=mean)
    theta = drawn(case, "theta", len(case.columns))
    assert_close(la.log_prob(theta), torch.distributions.Normal(mean, diagonal**-0.5).log_prob(theta).sum(), "algebra")
    assert_close(la.square_norm(theta), (diagonal * (theta - mean) ** 2).sum(), "algebra")


# Noise and temperature.


@pytest.mark.parametrize(
    "case", few("all", "last_layer", "mixed", names=["mlp_regression", "conv2d_regression", "embedding_positions"])
)
def test_several_noises(case: Case) -> None:
    """Set before the fit, and changed in ratio after it."""
    first, second = (drawn(case, name, case.n_outputs).exp() for name in ("sigma one", "sigma two"))
    la, refitted = case.fit(sigma_noise=first), case.fit(sigma_noise=second)
    la.temperature = refitted.temperature = 1.7
    for sigma, changed in ((first, la), (second, refitted)):
        dense = Dense.of(case, changed, sigma_noise=sigma, temperature=torch.tensor(1.7, dtype=torch.float64))
        assert_close(changed.log_marginal_likelihood(), dense.evidence, "algebra", label="evidence")
        assert_close(changed.log_likelihood, dense.log_likelihood, "algebra", label="log likelihood")
        assert_close(changed.posterior_covariance, torch.linalg.inv(dense.precision), "algebra", label="covariance")
        if case.structure == "full":
            exact = case.dense(output_scale=sigma**-2) / 1.7 + torch.eye(len(case.columns))
            assert_close(changed.posterior_precision, exact, "backend", label="exact precision")
    la.sigma_noise = second
    assert_close(la.log_marginal_likelihood(), refitted.log_marginal_likelihood(), "algebra", label="refit")
    assert_close(la.posterior_variance, refitted.posterior_variance, "algebra", label="variance of the refit")
    assert_close(la.log_marginal_likelihood(sigma_noise=first), case.fit(sigma_noise=first, temperature=1.7)
                 .log_marginal_likelihood(), "algebra", label="argument")  # fmt: skip


@pytest.mark.parametrize("damping", [False, True])
@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", names=["mlp_regression", "conv2d_regression"]))
def test_equal_noises_are_one_noise(case: Case, damping: bool) -> None:
    if damping and case.structure != "kron":
        return
    options = {"damping": True} if damping else {}
    one = case.fit(sigma_noise=0.6, temperature=1.3, **options)
    several = case.fit(sigma_noise=0.6 * torch.ones(case.n_outputs, dtype=torch.float64), temperature=1.3, **options)
    one.prior_precision = several.prior_precision = 0.4
    assert_close(several.log_marginal_likelihood(), one.log_marginal_likelihood(), "algebra", label="evidence")
    assert_close(several.posterior_variance, one.posterior_variance, "algebra", label="variance")
    one.sigma_noise = several.sigma_noise  # a fit with one noise takes equal ones
    assert_close(several.log_marginal_likelihood(), one.log_marginal_likelihood(), "algebra", label="set after")


@pytest.mark.parametrize("case", few("all", names=["mlp_regression"]))
def test_noises_that_are_not_one_per_output(case: Case) -> None:
    la = case.fit()
    la.sigma_noise = torch.ones(3)
    for use in (la.log_marginal_likelihood, lambda: la(case.problem.x), la.sample):
        with pytest.raises(LaplaceError, match="one per output"):
            use()


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("vector", [False, True])
def test_closed_form_bayesian_linear_regression(weights: str, vector: bool) -> None:
    """Where the network is linear and at its MAP, posterior and evidence are exact."""
    problem = catalogue.get("one_layer_regression")
    case = Case(problem, "full", weights)
    sigma = torch.tensor([0.4, 0.7, 1.1] if vector else [0.6] * 3, dtype=torch.float64)
    prior, prior_mean = drawn(case, "prior", len(case.mean)).exp(), drawn(case, "prior mean", len(case.mean))
    design, noise = case.jacobian.flatten(0, 1), sigma.repeat(len(problem.y))
    mean, covariance, expected = evidence.bayesian_linear_regression(
        design, problem.y.flatten(), noise, prior, prior_mean
    )
    la = case.build(sigma_noise=sigma if vector else 0.6, prior_precision=prior, prior_mean=prior_mean)
    torch.nn.utils.vector_to_parameters(mean, la.model.parameters())
    la.fit(problem.batches(4))
    assert_close(la.log_marginal_likelihood(), expected, "algebra", label="evidence")
    assert_close(la.posterior_covariance, covariance, "algebra", label="covariance")
    new = drawn(case, "new inputs", 4, 4)
    predicted, variance = la(new)
    inputs, _ = reference.flat_jacobian(la.weights.model, new, truth(problem.name).names)
    assert_close(predicted, (inputs @ mean), "algebra", label="mean")
    assert_close(variance, inputs @ covariance @ inputs.mT, "algebra", label="variance")


def test_temperature_and_noise_scale_the_curvature_of_each_kind() -> None:
    """1/(σ²T) for the GGN; an outer product of gradients carries σ⁻⁴."""
    case = Case(catalogue.get("mlp_regression"), "full", "all")
    for kind, power in (("ggn", 2), ("ef", 4)):
        la = case.fit(kind=kind, sigma_noise=0.5, temperature=2.0, prior_precision=3.0)
        expected = case.dense(kind) / (0.5**power * 2.0) + 3 * torch.eye(len(case.columns))
        assert_close(la.posterior_precision, expected, "backend", label=kind)


def test_log_likelihood_is_that_of_the_data() -> None:
    for name in ("mlp_classification", "mlp_regression", "mlp_bernoulli_multi", "pair", "mlp_ignored_labels"):
        problem = catalogue.get(name)
        case, y = Case(problem, "diag", "all"), problem.y
        f, sigma = truth(name).f, 0.7 if problem.likelihood == "regression" else 1.0
        density: dict[str, torch.distributions.Distribution] = {
            "regression": torch.distributions.Normal(f, sigma),
            "bernoulli": torch.distributions.Bernoulli(logits=f),
        }
        kept = y != -100 if y.ndim == 1 else torch.ones(len(y), dtype=torch.bool)
        categorical = torch.distributions.Categorical(logits=f[kept])
        expected = density.get(problem.likelihood, categorical).log_prob(y[kept]).sum()
        assert_close(case.fit(4, sigma_noise=sigma).log_likelihood, expected, "algebra", label=name)


# Kron: a prior that varies within a factored block, and damping.


@pytest.mark.parametrize(
    "case",
    few(
        structures=["kron"],
        names=["mlp_classification", "mlp_regression", "shared_positions", "bare_parameter", "frozen_bias"],
    ),
)
def test_diagonal_prior_in_the_eigenbasis(case: Case) -> None:
    """A Kronecker block keeps diag(Uᵀ Δ U), averaged where eigenvalues agree, dense blocks the whole Δ."""
    la = case.fit()
    la.prior_precision, diagonal = priors(case)["diag"]
    blocks: list[Tensor] = []
    held = la.fitted().curvature
    assert isinstance(held, KronCurvature)
    for factors, block, prior in zip(held.kfacs, held.parts.blocks, la.prior.per_block(), strict=True):
        if block.kind != "kron" or block.index is not None:
            continue
        bases = [torch.linalg.eigh(factor)[1] for factor in factors]
        basis = kfac.kron(*bases) if len(bases) == 2 else bases[0]
        matrix = kfac.kron(*factors) if len(factors) == 2 else factors[0]
        sides = [kfac.averages(factor, held.parts.like.dtype) for factor in factors]
        within = torch.diag((kfac.kron(*sides) if len(sides) == 2 else sides[0]).T @ prior)
        blocks.append((matrix + basis @ within @ basis.T).logdet())
    factored = [b.kind == "kron" and b.index is None for b in held.parts.blocks]
    sizes = la.problem.layout.sizes
    inside = torch.tensor(factored).repeat_interleave(torch.tensor(sizes))
    rest = own_dense(la)[~inside][:, ~inside] + torch.diag(diagonal[~inside])
    expected = torch.stack([*blocks, rest.logdet()]).sum() if len(rest) else torch.stack(blocks).sum()
    assert_close(la.log_det_posterior_precision, expected, "backend", label="log det P")


@pytest.mark.parametrize("form", ["scalar", "layerwise"])
@pytest.mark.parametrize(
    "case", few("all", "last_layer", "rectangle", structures=["kron"], names=["no_bias", "lora", "conv2d_regression"])
)
def test_damping_is_that_of_ritter(case: Case, form: str) -> None:
    """(√s A + √δ) ⊗ (√s B + √δ) for a product of two factors."""
    given, _ = priors(case)[form]
    la = case.fit(damping=True, temperature=0.3, prior_precision=given)
    expected = Dense.damped(la, scale=1 / 0.3)
    pairs = torch.tensor([len(factors) == 2 for factors in la.H.kfacs])
    inside = pairs.repeat_interleave(torch.tensor(la.problem.layout.sizes))
    covariance = torch.linalg.inv(expected[inside][:, inside])
    assert_close(la.evidence().precision.to_dense()[inside][:, inside], expected[inside][:, inside], "algebra")
    assert_close(la.posterior_variance[inside], covariance.diagonal(), "algebra", label="variance")
    if inside.all():
        assert_close(la.log_det_posterior_precision, expected.logdet(), "algebra", label="log det P")
    plain = case.fit(temperature=0.3, prior_precision=given)
    assert (la.posterior_variance < plain.posterior_variance * (1 + 1e-12)).all()


@pytest.mark.parametrize("name", ["mlp_regression", "bare_parameter", "conv2d_grouped"])
def test_damping_leaves_single_factors_and_dense_blocks_alone(name: str) -> None:
    """There is no product whose terms could be damped: δ itself is added, exactly."""
    la = Case(catalogue.get(name), "kron", "all").fit(damping=True, temperature=0.3, prior_precision=0.7)
    assert_close(la.evidence().precision.to_dense(), Dense.damped(la, scale=1 / 0.3), "algebra", label="precision")


def test_new_hyper_parameters_are_never_stale() -> None:
    for structure in ("full", "kron", "diag"):
        la = Case(catalogue.get("mlp_regression"), structure, "all").fit()
        x = catalogue.get("mlp_regression").x
        for name in ("prior_precision", "sigma_noise", "temperature"):
            before = la(x)[1].clone(), la.posterior_variance.clone(), la.log_marginal_likelihood().clone()
            setattr(la, name, 2.5)
            after = la(x)[1], la.posterior_variance, la.log_marginal_likelihood()
            assert all(not torch.allclose(a, b) for a, b in zip(before, after, strict=True)), (structure, name)


def test_constant_of_the_normal_density() -> None:
    la = Case(catalogue.get("one_by_one"), "full", "all").fit()
    at_the_mean = 0.5 * la.log_det_posterior_precision - 0.5 * math.log(2 * math.pi)
    assert_close(la.log_prob(la.mean), at_the_mean, "algebra")
