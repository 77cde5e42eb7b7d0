"""Members below the public names that other people's code reaches into: models, moments, fits by hand, factors."""

from __future__ import annotations

import copy

import pytest
import torch
from laplace.utils import FeatureExtractor, Kron, KronDecomposed
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from laplace import KronLaplace, Laplace
from laplace.errors import InvalidArgument, ModelChangedError
from tests.downstream.problems import (
    HEAD,
    Truth,
    classes,
    copied,
    loader,
    network,
    new_inputs,
    numbers,
    untouched,
)
from tests.reference.compare import assert_close
from tests.reference.kfac import kron

STRUCTURES = ("full", "kron", "diag")
CELLS = [(weights, structure) for weights in ("all", "last_layer") for structure in STRUCTURES]


def fitted(weights: str, structure: str, likelihood: str = "classification", **options):
    """A posterior and its dense truth."""
    model = network() if likelihood == "classification" else network(n_out=2)
    x, y = classes() if likelihood == "classification" else numbers(2)
    la = Laplace(model, likelihood, weights, structure, **options)
    la.fit(loader(x, y))
    prior, sigma = options.get("prior_precision", 1.0), options.get("sigma_noise", 1.0)
    names = HEAD if weights == "last_layer" else None
    return la, Truth(model, x, y, likelihood, structure, names, prior=prior, sigma=sigma)


# The model of a last layer.


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_model_of_a_last_layer_has_features_and_a_head(structure: str) -> None:
    la, truth = fitted("last_layer", structure)
    new = new_inputs()
    assert isinstance(la.model, FeatureExtractor)
    assert la.model.model is truth.model
    f, features = la.model.forward_with_features(new)
    assert_close(features, torch.tanh(truth.model[0](new)), "algebra")
    assert_close(f, truth.model(new), "algebra")
    assert_close(la.model(new), truth.model(new), "algebra")
    assert_close(parameters_to_vector(la.model.last_layer.parameters()), la.mean, "exact")
    with pytest.raises(ValueError, match="known already"):
        la.model.find_last_layer(new)


def test_what_is_written_into_the_head_reaches_a_copy() -> None:
    la, truth = fitted("last_layer", "full")
    new, before = new_inputs(), copied(truth.model)
    p = la(new)
    theta = torch.linspace(-1, 1, la.n_params, dtype=new.dtype)
    head = la.model.last_layer
    assert head is la.model.last_layer
    vector_to_parameters(theta, head.parameters())
    f, features = la.model.forward_with_features(new)
    expected = features @ theta[:12].view(3, 4).T + theta[12:]
    assert_close(f, expected, "algebra")
    assert_close(la.model(new), expected, "algebra")
    assert untouched(truth.model, before)
    assert_close(la(new), p, "exact")
    assert_close(la.mean, truth.mean, "exact")
    again = copy.deepcopy(la)
    assert_close(again(new), p, "exact")
    assert_close(again.model.forward_with_features(new)[0], expected, "algebra")


def test_a_network_that_was_trained_further_is_still_noticed() -> None:
    la, _ = fitted("last_layer", "full")
    vector_to_parameters(la.sample(1)[0], la.model.last_layer.parameters())
    with torch.no_grad():
        la.model.model[0].weight.add_(1.0)
    with pytest.raises(ModelChangedError):
        la(new_inputs())


def test_the_last_layer_is_found_by_a_batch() -> None:
    model, (x, y) = network(), classes()
    la = Laplace(model, "classification", "last_layer", "full")
    assert la.model.last_layer is None
    assert_close(la.model.find_last_layer(x[:1]), model(x[:1]), "algebra")
    truth = Truth(model, x, y, "classification", names=HEAD)
    assert_close(parameters_to_vector(la.model.last_layer.parameters()), truth.mean, "exact")
    la.fit(loader(x, y))
    assert_close(la.posterior_covariance, truth.covariance, "backend")


def test_a_copy_of_the_model_makes_another_posterior() -> None:
    la, truth = fitted("last_layer", "full")
    given, new = copy.deepcopy(la.model), new_inputs()
    assert isinstance(given, FeatureExtractor)
    again = Laplace(given, "classification", "last_layer", "full")
    again.fit(loader(*classes()))
    assert_close(again(new), truth.probit(new), "backend")
    assert again.model.model is given.model


def test_the_model_of_all_weights_is_the_user_s() -> None:
    la, truth = fitted("all", "full")
    assert la.model is truth.model


# Readers.


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize(("weights", "structure"), CELLS)
def test_the_latent_gaussian_in_three_forms(weights: str, structure: str, likelihood: str) -> None:
    la, truth = fitted(weights, structure, likelihood, prior_precision=0.5)
    new = new_inputs()
    f, variance = truth.latent(new)
    for got, expected in (
        (la._glm_predictive_distribution(new), (f, variance)),
        (la._glm_predictive_distribution(new, joint=True), (f.flatten(), truth.joint(new))),
        (la._glm_predictive_distribution(new, diagonal_output=True), (f, variance.diagonal(dim1=1, dim2=2))),
    ):
        assert_close(got[0], expected[0], "backend")
        assert_close(got[1], expected[1], "backend")


@pytest.mark.parametrize(("weights", "structure"), CELLS)
def test_a_public_call_gives_the_same(weights: str, structure: str) -> None:
    la, truth = fitted(weights, structure, prior_precision=0.5)
    new = new_inputs()
    mean, covariance = la.predictive_moments(new)
    assert_close(mean, truth.latent(new)[0], "backend")
    assert_close(covariance, truth.latent(new)[1], "backend")
    mean, covariance = la.predictive_moments(new, joint=True)
    assert_close(mean, truth.latent(new)[0].flatten(), "backend")
    assert_close(covariance, truth.joint(new), "backend")


@pytest.mark.parametrize(("weights", "structure"), CELLS)
def test_samples_of_weights_through_the_network(weights: str, structure: str) -> None:
    la, truth = fitted(weights, structure, prior_precision=5.0)
    new, before = new_inputs(), copied(truth.model)
    draws = []
    for function in (la._nn_functional_samples, la._nn_predictive_samples):
        torch.manual_seed(6)
        draws.append(function(new, n_samples=8))
    torch.manual_seed(6)
    thetas, expected = la.sample(8), []
    network_of_one, names = copy.deepcopy(truth.model), truth.names
    for theta in thetas:
        vector_to_parameters(theta, [dict(network_of_one.named_parameters())[name] for name in names])
        expected.append(network_of_one(new).detach())
    assert_close(draws[0], torch.stack(expected), "backend")
    assert_close(draws[1], torch.stack(expected).softmax(-1), "backend")
    assert untouched(truth.model, before)


def test_scale_device_and_dtype() -> None:
    la, truth = fitted("all", "full", "regression", sigma_noise=0.5)
    la.temperature = 2.0
    assert_close(la._H_factor, 1 / (0.25 * 2), "exact")
    rebuilt = la._H_factor * la.H + torch.diag(la.prior_precision_diag)
    assert_close(rebuilt, truth.H / 0.5 + torch.eye(la.n_params), "backend")
    assert torch.device(la._device) == torch.device("cpu")
    assert la._dtype == torch.float64
    assert Laplace(network(dtype=torch.float32), "classification")._dtype == torch.float32


# Fits by hand.


def fit_by_hand(la, x, y) -> None:
    """Sums batches by the hooks, as every project with a loop of its own writes it."""
    la._init_H()
    la.loss, la.n_data = 0, 0
    la.mean = parameters_to_vector(la.params).detach()
    la.n_outputs = 3
    for X, t in loader(x, y):
        loss_batch, H_batch = la._curv_closure(X, t, len(x))
        la.loss += loss_batch
        la.H += H_batch
    la.n_data += len(x)
    if isinstance(la.H, Kron):
        la.H_facs = la.H
        la.H = la.H_facs.decompose(damping=la.damping)


@pytest.mark.parametrize(("weights", "structure"), CELLS)
def test_a_fit_by_hand_is_a_fit(weights: str, structure: str) -> None:
    model, (x, y), new = network(), classes(), new_inputs()
    options = {"last_layer_name": "2"} if weights == "last_layer" else {}
    la = Laplace(model, "classification", weights, structure, prior_precision=0.5, **options)
    before = copied(model)
    fit_by_hand(la, x, y)
    truth = Truth(model, x, y, "classification", structure, HEAD if options else None, prior=0.5)
    H = la.H.to_matrix() if structure == "kron" else la.H
    assert_close(H, truth.H.diagonal() if structure == "diag" else truth.H, "backend")
    assert_close(la.loss, truth.loss, "backend")
    assert (la.n_data, la.n_outputs) == (len(x), 3)
    assert_close(la(new), truth.probit(new), "backend")
    assert_close(la.log_marginal_likelihood(), truth.log_evidence, "backend")
    again = Laplace(model, "classification", weights, structure, prior_precision=0.5, **options)
    again.load_state_dict(la.state_dict())
    assert_close(again(new), la(new), "algebra")
    assert untouched(model, before)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_mean_and_a_curvature_of_one_s_own(structure: str) -> None:
    la, truth = fitted("all", structure, prior_precision=2.0)
    factors = [[f.clone() for f in block] for block in la.H_facs.kfacs] if structure == "kron" else None
    if factors is None:
        la.H = 3 * la.H
    else:
        la.H_facs = Kron(factors) * 3.0
        la.H = la.H_facs.decompose()
    precision = 3 * truth.H + 2 * torch.eye(la.n_params, dtype=torch.float64)
    variance = torch.linalg.inv(precision).diagonal()
    assert_close(la.posterior_variance, variance, "backend")
    step = torch.linspace(-0.1, 0.1, la.n_params, dtype=torch.float64)
    la.mean = la.mean + step
    assert_close(la.mean, truth.mean + step, "exact")
    normal = torch.distributions.MultivariateNormal(truth.mean + step, precision_matrix=precision)
    assert_close(la.log_prob(truth.mean), normal.log_prob(truth.mean), "backend")
    draws = la.sample(4000, generator=torch.Generator().manual_seed(0))
    assert_close(draws.mean(0), truth.mean + step, "mc", standard_error=(variance / 4000).sqrt())


@pytest.mark.parametrize("structure", STRUCTURES)
def test_before_a_fit_and_with_values_that_do_not_fit(structure: str) -> None:
    model = network()
    la = Laplace(model, "classification", "all", structure)
    zero = la.H.to_matrix() if structure == "kron" else la.H
    n_params = sum(p.numel() for p in model.parameters())
    assert_close(zero, torch.zeros((n_params,) if structure == "diag" else (n_params, n_params)), "exact")
    assert_close(la.mean, 0.0, "exact")
    assert Laplace(model, "classification", "last_layer", structure).mean is None
    for name, value in (("H", torch.zeros(3)), ("mean", torch.zeros(3)), ("n_data", -1), ("H", "zero")):
        with pytest.raises(InvalidArgument, match=name):
            setattr(la, name, value)


# Kronecker factors and their eigendecomposition.


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_curvature_and_precision_are_kronecker_matrices(weights: str) -> None:
    la, truth = fitted(weights, "kron", prior_precision=0.7)
    P, H, factors = la.posterior_precision, la.H, la.H_facs
    assert isinstance(P, KronDecomposed)
    assert isinstance(H, KronDecomposed)
    assert isinstance(factors, Kron)
    assert len(P) == len(H) == len(factors) == la.n_layers
    for got, expected in ((P.to_matrix(), truth.precision), (H.to_matrix(), truth.H), (factors.to_matrix(), truth.H)):
        assert_close(got, expected, "backend")
    assert_close(factors.decompose().to_matrix(), truth.H, "backend")
    assert_close(P.deltas, torch.full((la.n_layers,), 0.7, dtype=torch.float64), "algebra")
    assert_close(H.deltas, torch.zeros(la.n_layers), "exact")
    for decomposed, dense in ((P, truth.precision), (H, truth.H)):
        rows = zip(decomposed.eigenvectors, decomposed.eigenvalues, decomposed.deltas, strict=True)
        blocks = [
            (Q := torch.kron(*Qs) if len(Qs) == 2 else Qs[0])
            @ torch.diag((torch.outer(*ls).flatten() if len(ls) == 2 else ls[0]) + delta)
            @ Q.T
            for Qs, ls, delta in rows
        ]
        assert_close(torch.block_diag(*blocks), dense, "backend")


def test_arithmetic_copies_and_counts() -> None:
    la, truth = fitted("all", "kron", prior_precision=0.7)
    P, H, factors = la.posterior_precision, la.H, la.H_facs
    eye = torch.eye(la.n_params, dtype=torch.float64)
    assert_close((2.0 * H + torch.tensor([0.5])).to_matrix(), 2 * truth.H + 0.5 * eye, "backend")
    assert_close((H * la._H_factor + la.prior_precision).to_matrix(), truth.precision, "backend")
    assert_close((factors + factors * 3.0).decompose().logdet().exp(), 0.0, "backend")
    assert_close((P.detach() * 2.0).logdet(), (2 * truth.precision).logdet(), "backend")
    assert_close(P.diag(), truth.precision.diagonal(), "backend")
    assert_close(P.diag(exponent=-1), truth.covariance.diagonal(), "backend")
    assert_close(P.bmm(eye, exponent=-1), truth.covariance, "backend")
    assert_close(P.bmm(eye), truth.covariance, "backend")  # a precision solves, unless it is told otherwise
    assert_close(factors.bmm(eye), truth.H, "backend")
    J = truth.jacobian(new_inputs())
    assert_close(P.inv_square_form(J), J @ truth.covariance @ J.mT, "backend")
    again = copy.deepcopy(P).clone()
    again.deltas += 1
    assert_close(P.to_matrix(), truth.precision, "backend")
    assert_close(again.to_matrix(), truth.precision + eye, "backend")
    assert isinstance(la, KronLaplace)


def test_damping_is_that_of_the_eigendecomposition() -> None:
    model, (x, y) = network(), classes()
    la = KronLaplace(model, "classification", damping=True, prior_precision=0.7)
    la.fit(loader(x, y))
    P = la.posterior_precision
    assert P.damping is True
    truth = Truth(model, x, y, "classification", "kron")
    root, blocks = 0.7**0.5, []
    for name in truth.names:
        (sides,) = truth.factors[name]
        damped = [side + root * torch.eye(len(side), dtype=x.dtype) for side in sides]
        single = sides[0] + 0.7 * torch.eye(len(sides[0]), dtype=x.dtype)
        blocks.append(kron(*damped) if len(sides) == 2 else single)
    assert_close(P.to_matrix(), torch.block_diag(*blocks), "backend")
