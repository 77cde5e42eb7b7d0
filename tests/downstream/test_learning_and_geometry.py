"""Projects that use laplace-torch: continual learning, geometry, conformal prediction, pruning."""

from __future__ import annotations

import copy

import pytest
import torch
from laplace.baselaplace import FullLaplace
from laplace.utils import expand_prior_precision, normal_samples
from torch import nn
from torch.nn.utils import parameters_to_vector

from laplace import BaseLaplace, DiagLaplace, FullLLLaplace, KronLaplace, Laplace
from laplace.curvature import AsdlEF, AsdlGGN, BackPackGGN
from laplace.curvature.asdl import AsdlInterface
from tests.downstream.problems import (
    HEAD,
    Truth,
    best_prior,
    classes,
    copied,
    fails,
    held_out,
    loader,
    network,
    new_inputs,
    numbers,
    untouched,
)
from tests.reference.compare import assert_close


def test_laplace_redux_learns_one_task_after_another() -> None:
    model, (x, y) = network(), classes()
    la = Laplace(model, "classification", "all", "kron", prior_precision=0.5)
    assert la.n_layers == 4
    theta = parameters_to_vector(model.parameters()).detach()
    n_params = la.n_params
    prior = torch.distributions.Normal(torch.zeros(n_params, dtype=x.dtype), 0.5**-0.5)
    assert_close(la.log_prob(theta), prior.log_prob(theta).sum(), "algebra")
    for start in (0, 6):
        previous = copy.deepcopy(la)
        la.fit(loader(x[start : start + 6], y[start : start + 6]), override=False)
        assert previous.n_data == start
    halves = [Truth(model, x[i : i + 6], y[i : i + 6], "classification", "kron", prior=0.5) for i in (0, 6)]
    whole = Truth(model, x, y, "classification", "kron", prior=0.5)
    step = torch.linspace(-0.1, 0.1, n_params, dtype=x.dtype)
    normal = torch.distributions.MultivariateNormal(whole.mean, precision_matrix=whole.precision)
    assert_close(la.log_prob(whole.mean + step), normal.log_prob(whole.mean + step), "backend")
    assert_close(la.loss, halves[0].loss + halves[1].loss, "backend")
    new = Laplace(model, "classification", "all", "kron", prior_mean=la.mean, prior_precision=0.5)
    assert_close(new.log_prob(theta + step), -0.25 * step.square().sum() + prior.log_prob(0 * theta).sum(), "algebra")


def test_laplace_redux_finds_the_last_layer_before_the_fit() -> None:
    model, (x, y), new = network(), classes(), new_inputs()
    la = FullLLLaplace(model, "classification")
    if la.model.last_layer is None:
        with torch.no_grad():
            la.model.find_last_layer(x[:1])
        params = parameters_to_vector(la.model.last_layer.parameters()).detach()
        assert_close(params, Truth(model, x, y, "classification", names=HEAD).mean, "exact")
        la.prior_precision = 2.0
    la.fit(loader(x, y))
    truth = Truth(model, x, y, "classification", names=HEAD, prior=2.0)
    assert_close(la(new), truth.probit(new), "backend")
    assert_close(la.log_marginal_likelihood(), truth.log_evidence, "backend")


def test_laplace_refinement_starts_from_moments_and_a_grid() -> None:
    model, (x, y) = network(), classes()
    full, diag = Laplace(model, "classification", "all", "full"), Laplace(model, "classification", "all", "diag")
    for la in (full, diag):
        la.fit(loader(x, y))
    truth = Truth(model, x, y, "classification")
    assert_close(full.mean, truth.mean, "exact")
    assert_close(full.posterior_covariance, truth.covariance, "backend")
    assert_close(diag.posterior_variance, 1 / truth.precision.diagonal(), "backend")
    full.optimize_prior_precision(
        method="CV", val_loader=loader(*held_out()), log_prior_prec_min=-2, log_prior_prec_max=0, grid_size=3
    )
    best = best_prior((0.01, 0.1, 1.0), model, x, y, "classification", "full")
    assert float(full.prior_precision) == pytest.approx(best)


def test_memory_perturbation_reads_variances_of_logits() -> None:
    model, (x, y) = network(), classes()
    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="kron", prior_precision=3.0)
    la.fit(loader(x, y))
    truth = Truth(model, x, y, "classification", "kron", prior=3.0)
    sensitivities = []
    for x_batch, y_batch in loader(x, y):
        f, f_var = la._glm_predictive_distribution(x_batch)
        hot = nn.functional.one_hot(y_batch, 3)
        sensitivities.append(((f.softmax(-1) - hot).unsqueeze(1) @ f_var).squeeze(1))
    f, f_var = truth.latent(x)
    expected = torch.einsum("bc,bcd->bd", f.softmax(-1) - nn.functional.one_hot(y, 3), f_var)
    assert_close(torch.cat(sensitivities), expected, "backend")


def classes_by_key(base: type = BaseLaplace) -> dict[tuple[str, str], type]:
    """A map of one's own over all subclasses."""
    found = {}
    for cls in base.__subclasses__():
        key = getattr(cls, "_key", None)
        found.update({} if key is None else {key: cls})
        found.update(classes_by_key(cls))
    return found


def test_variational_lla_hangs_its_own_attributes_on_a_posterior() -> None:
    model, (x, y), new = network(n_out=1), numbers(), new_inputs()
    found = classes_by_key()
    assert issubclass(found[("last_layer", "full")], FullLLLaplace)
    la = Laplace(model, "regression", "last_layer", "full", sigma_noise=0.4)
    la.fit(loader(x, y))

    def predict(X):
        mean, var = la._glm_predictive_distribution(X)
        return mean, var + la.sigma_noise**2

    la.device, la.dtype, la.predict = torch.device("cpu"), torch.float64, predict
    la.test_step = lambda X: la.predict(X.to(la.device, la.dtype))
    mean, var = la.test_step(new)
    truth = Truth(model, x, y, "regression", names=HEAD, sigma=0.4)
    assert_close(mean, truth.latent(new)[0], "backend")
    assert_close(var, truth.latent(new)[1] + 0.16, "backend")
    assert_close(la(new)[1], truth.latent(new)[1], "backend")


def test_riemannian_laplace_builds_distributions_from_the_scale() -> None:
    model, (x, y) = network(n_out=1), numbers()
    full = Laplace(model, "regression", "all", "full", sigma_noise=0.5, temperature=2.0)
    diag = Laplace(model, "regression", "all", "diag", sigma_noise=0.5, temperature=2.0)
    for la in (full, diag):
        la.fit(loader(x, y))
    truth = Truth(model, x, y, "regression", sigma=0.5 * 2**0.5)
    normal = torch.distributions.MultivariateNormal(loc=full.mean, scale_tril=full.posterior_scale)
    assert_close(normal.covariance_matrix, truth.covariance, "backend")
    assert_close(
        diag.posterior_scale.reshape(1, diag.n_params), truth.precision.diagonal().rsqrt().unsqueeze(0), "backend"
    )
    rebuilt = full._H_factor * full.H + torch.diag(full.prior_precision_diag)
    assert_close(full._H_factor, 2.0, "exact")
    assert_close(rebuilt, truth.precision, "backend")


def test_la_nam_masks_jacobians_of_asdl() -> None:
    pytest.importorskip("asdl")
    model, (x, y), new = network(n_out=1), numbers(), new_inputs()
    la = KronLaplace(model, "regression", sigma_noise=0.5, backend=AsdlGGN)
    la.fit(loader(x, y))
    assert isinstance(la.backend, AsdlInterface)
    assert not isinstance(Laplace(model, "regression", backend=BackPackGGN, last_layer_name="2").backend, AsdlInterface)
    sizes = [p.numel() for p in model.parameters()]
    wanted = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=x.dtype)
    la.prior_precision = wanted
    spread = expand_prior_precision(la.prior_precision, model)
    assert_close(spread, wanted.repeat_interleave(torch.tensor(sizes)), "exact")
    Js, f = la.backend.jacobians(new)
    mask = torch.zeros(la.n_params, dtype=x.dtype)
    mask[: sizes[0]] = 1
    truth = Truth(model, x, y, "regression", "kron", prior=spread, sigma=0.5)
    J = truth.jacobian(new) * mask
    f_var = la.functional_variance(Js * mask)
    assert_close(f, truth.latent(new)[0], "backend")
    assert_close(f_var, J @ truth.covariance @ J.mT, "backend")
    draws = normal_samples(f, f_var, 20_000, torch.Generator().manual_seed(1))
    variance = f_var.flatten()
    assert_close(draws.var(0).flatten(), variance, "mc", standard_error=variance * (2 / 20_000) ** 0.5)


def test_acp_gn_conformalises_by_jacobians() -> None:
    model, (x, y), new = network(n_out=1), numbers(), new_inputs()
    la = Laplace(model, "regression", "all", "full", sigma_noise=0.5)
    la.fit(loader(x, y))
    truth, head = (Truth(model, x, y, "regression", names=names, sigma=0.5) for names in (None, HEAD))
    Js, f = la.backend.jacobians(x)
    assert_close(la.posterior_covariance, truth.covariance, "backend")
    leverage = torch.einsum("bcp,pq,bcq->bc", Js, la.posterior_covariance, Js) / 0.25
    assert_close(leverage, truth.latent(x)[1].flatten(1) / 0.25, "backend")
    assert_close(
        (y - f) / (1 - leverage), (y - truth.latent(x)[0]) / (1 - truth.latent(x)[1][..., 0] / 0.25), "backend"
    )

    last = Laplace(model, "regression", "last_layer", "full", sigma_noise=0.5)
    last.fit(loader(x, y))
    Js, f = last.backend.last_layer_jacobians(new)
    assert_close(Js, head.jacobian(new), "backend")
    theta = parameters_to_vector(last.model.last_layer.parameters()).detach()
    assert_close(theta, head.mean, "exact")
    residuals = torch.einsum("bcp,p->bc", Js, theta)
    assert_close(residuals, f, "backend")
    assert_close(Js @ last.posterior_covariance @ Js.mT, head.latent(new)[1], "backend")


def test_spam_pruning_scores_weights_by_the_precision() -> None:
    model, (x, y) = network(), classes()
    before = copied(model)
    truth = {name: Truth(model, x, y, "classification", name) for name in ("kron", "diag", "full")}
    for structure, expected in truth.items():
        la = Laplace(model, "classification", "all", structure)
        la.fit(loader(x, y))
        kron = isinstance(la, KronLaplace)
        assert (kron, isinstance(la, DiagLaplace)) == (structure == "kron", structure == "diag")
        assert isinstance(la, FullLaplace) == (structure == "full")
        precision = la.posterior_precision
        marginal = precision if structure == "diag" else precision.diag()
        scores = 0.5 * la.mean.square() * marginal
        assert_close(scores, 0.5 * expected.mean.square() * expected.precision.diagonal(), "backend")
    assert untouched(model, before)


@fails("names of forks that no release of laplace-torch has; the evidence is differentiable instead")
def test_forks_differentiate_curvature_by_names_of_their_own() -> None:
    pytest.importorskip("asdl")
    model, (x, y) = network(), classes()
    la = KronLaplace(model, "classification", backend=AsdlEF)
    la.backend.differentiable = True
    la.fit(loader(x, y), keep_factors=True)
    assert_close(la.posterior_precision.jvp_logdet(), la.log_det_posterior_precision, "backend")


def test_has_the_gradient_of_the_evidence_in_its_place() -> None:
    model, (x, y) = network(), classes()
    la = KronLaplace(model, "classification")
    la.fit(loader(x, y))
    log_prior = torch.zeros(4, dtype=x.dtype, requires_grad=True)
    (slope,) = torch.autograd.grad(la.log_marginal_likelihood(log_prior.exp()), log_prior)
    sizes = torch.tensor([p.numel() for p in model.parameters()])
    ups = [
        Truth(model, x, y, "classification", "kron", prior=(log_prior.detach() + h).exp().repeat_interleave(sizes))
        for h in 1e-5 * torch.eye(4, dtype=x.dtype)
    ]
    middle = Truth(model, x, y, "classification", "kron").log_evidence
    assert_close(slope, torch.stack([(up.log_evidence - middle) / 1e-5 for up in ups]), "float32_solve")
