"""Projects that use laplace-torch: tool boxes, Bayesian optimisation, comparisons of methods."""

from __future__ import annotations

import copy
import importlib
import pickle

import pytest
import torch
from laplace.utils import FeatureExtractor, KronDecomposed, LargestMagnitudeSubnetMask
from torch import nn
from torch.nn.utils import vector_to_parameters

from laplace import BaseLaplace, DiagSubnetLaplace, KronLLLaplace, Laplace, LinkApprox, PredType, marglik_training
from laplace.curvature import AsdlGGN, CurvlinopsGGN
from laplace.errors import TuningWarning
from tests.downstream.problems import (
    HEAD,
    Truth,
    best_prior,
    classes,
    copied,
    held_out,
    loader,
    network,
    new_inputs,
    numbers,
    untouched,
)
from tests.reference import predictive
from tests.reference.compare import assert_close


def test_probly_moves_a_fitted_posterior() -> None:
    model, (x, y), new = network(), classes(), new_inputs()
    la = Laplace(model, "classification")
    assert isinstance(la, BaseLaplace)
    assert la.n_data == 0
    la.fit(loader(x, y))
    inner = la.model.model if isinstance(la.model, FeatureExtractor) else la.model
    assert inner is model
    assert float(la.prior_precision) == 1
    truth = Truth(model, x, y, "classification", "kron", HEAD)
    draws = la.predictive_samples(new, pred_type="glm", n_samples=4000)
    expected, error = predictive.monte_carlo(*truth.latent(new), 4000, torch.Generator().manual_seed(0))
    assert_close(draws.mean(0), expected, "mc", standard_error=error * 2**0.5)

    assert isinstance(la.H, KronDecomposed)
    la.mean = la.mean.to("cpu")
    held = la.H
    la.H = KronDecomposed(
        eigenvectors=[[q.to("cpu") for q in block] for block in held.eigenvectors],
        eigenvalues=[[v.to("cpu") for v in block] for block in held.eigenvalues],
        deltas=held.deltas.to("cpu"),
        damping=held.damping,
    )
    assert_close(la.H.to_matrix(), truth.H, "backend")
    assert_close(la(new), truth.probit(new), "backend")


class PostProcessing(nn.Module):
    """A module that holds a posterior and predicts with it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.la = Laplace(
            model=model,
            likelihood="classification",
            subset_of_weights="last_layer",
            hessian_structure="kron",
        )

    def fit(self, dataloader) -> None:
        self.la.fit(train_loader=dataloader)
        self.la.optimize_prior_precision(method="marglik", pred_type="glm", link_approx="probit")

    def forward(self, x, link: str = "probit"):
        return self.la(x, pred_type="glm", link_approx=link, n_samples=100)


def test_torch_uncertainty_wraps_a_posterior_in_a_module() -> None:
    model, (x, y), new = network(), classes(), new_inputs()
    wrapped = PostProcessing(model)
    wrapped.fit(loader(x, y))
    truth = Truth(model, x, y, "classification", "kron", HEAD, prior=wrapped.la.prior_precision.detach())
    assert_close(wrapped(new), truth.probit(new), "backend")
    assert_close(wrapped(new, "bridge"), predictive.bridge(*truth.latent(new)), "backend")
    assert_close(wrapped(new, "bridge_norm"), predictive.bridge_norm(*truth.latent(new)), "backend")
    assert_close(copy.deepcopy(wrapped)(new), truth.probit(new), "backend")


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_lightning_uq_box_rebuilds_a_posterior_from_its_arguments(weights: str, structure: str) -> None:
    model, (x, y), new = network(n_out=1), numbers(), new_inputs()
    given = Laplace(model, "regression", weights, structure, sigma_noise=0.5, prior_precision=2.0)
    names = type(given).__init__.__code__.co_varnames
    keywords = {name: getattr(given, name) for name in names if name != "model" and hasattr(given, name)}
    la = type(given)(model=copy.deepcopy(given.model), **keywords)
    la.fit(loader(x, y))
    chosen = None if weights == "all" else HEAD
    truth = Truth(model, x, y, "regression", structure, chosen, prior=2.0, sigma=0.5)
    assert la.sigma_noise.detach().item() == 0.5
    assert_close(la.log_marginal_likelihood(la.prior_precision, la.sigma_noise), truth.log_evidence, "backend")
    f_mu, f_var = la(new)
    assert_close(f_mu, truth.latent(new)[0], "backend")
    assert_close(f_var, truth.latent(new)[1], "backend")


class Surrogate:
    """A model of a Bayesian optimiser: mean and covariance over all candidates, with gradients in them."""

    def __init__(self, x, y, **options) -> None:
        torch.manual_seed(0)
        self.la, self.net, self.margliks, self.losses = marglik_training(
            network(n_out=1), loader(x, y), "regression", "kron", backend=CurvlinopsGGN,
            n_epochs=4, n_hypersteps=2, optimizer_kwargs={"lr": 1e-2}, enable_backprop=True, **options,
        )  # fmt: skip
        self.x, self.y = x, y

    def posterior(self, X):
        mean, covariance = self.la(X, joint=True)
        return torch.distributions.MultivariateNormal(
            mean, covariance + 1e-8 * torch.eye(len(mean), dtype=mean.dtype), validate_args=False
        )

    def improvement(self, X):
        """Expected improvement over the best datum (minimised)."""
        normal = torch.distributions.Normal(torch.zeros((), dtype=X.dtype), torch.ones((), dtype=X.dtype))
        p = self.posterior(X)
        u = (self.y.min() - p.mean) / p.variance.sqrt()
        return p.variance.sqrt() * (u * normal.cdf(u) + normal.log_prob(u).exp())


def test_laplace_bayesopt_climbs_an_acquisition_function() -> None:
    pytest.importorskip("curvlinops")
    x, y = numbers()
    surrogate = Surrogate(x, y)
    assert len(surrogate.losses) == 4
    surrogate.la.sigma_noise = 0.3
    prior = surrogate.la.prior_precision_diag.detach()
    truth = Truth(surrogate.net.eval(), x, y, "regression", "kron", prior=prior, sigma=0.3)
    X = new_inputs(3).requires_grad_()
    assert_close(surrogate.posterior(X).mean, truth.latent(X.detach())[0].flatten(), "backend")
    assert_close(surrogate.la(X, joint=True)[1], truth.joint(X.detach()), "backend")
    (slope,) = torch.autograd.grad(surrogate.improvement(X).sum(), X)
    step = torch.zeros_like(X)
    step[1, 0] = 1e-5
    with torch.no_grad():
        up, down = surrogate.improvement(X + step).sum(), surrogate.improvement(X - step).sum()
    assert_close(slope[1, 0], (up - down) / 2e-5, "finite_difference")


class Adapted(nn.Module):
    """A frozen body with a low-rank update and a head, called by a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.up, self.down = nn.Linear(2, 4), nn.Linear(1, 4, bias=False), nn.Linear(2, 1, bias=False)
        self.head = nn.ModuleDict({"modules_to_save": nn.ModuleDict({"default": nn.Sequential(
            nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)
        )})})  # fmt: skip
        self.body.requires_grad_(False)

    def forward(self, data):
        hidden = torch.tanh(self.body(data["x"]) + self.up(self.down(data["x"])))
        return self.head["modules_to_save"]["default"](hidden)


class Outer(nn.Module):
    """What wraps an adapted model twice, so that names begin as they do there."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = Adapted()

    def forward(self, data):
        return self.base_model.model(data)


class Plain(nn.Module):
    """The same network of a tensor, for the truth."""

    def __init__(self, outer: Outer) -> None:
        super().__init__()
        self.outer = outer

    def forward(self, x):
        return self.outer({"x": x})


def test_lapeft_bayesopt_treats_adapters_of_mappings() -> None:
    pytest.importorskip("asdl")
    torch.manual_seed(2)
    model, (x, y), new = Outer().double().eval(), numbers(), new_inputs()
    batches = [{"x": x[:5], "labels": y[:5]}, {"x": x[5:], "labels": y[5:]}]
    la = Laplace(model, "regression", "all", "kron", dict_key_x="x", backend=AsdlGGN)
    assert (la.n_layers, la.n_params) == (6, 4 + 2 + 20 + 5)
    la.prior_precision = torch.linspace(0.5, 2, la.n_layers, dtype=torch.float64)
    la.fit(batches)
    names = [f"outer.{name}" for name, p in model.named_parameters() if p.requires_grad]
    sizes = torch.tensor([p.numel() for p in model.parameters() if p.requires_grad])
    prior = la.prior_precision.repeat_interleave(sizes)
    truth = Truth(Plain(model), x, y, "regression", "kron", tuple(names), prior=prior)
    assert_close(la.log_marginal_likelihood(), truth.log_evidence, "backend")
    mean, covariance = la({"x": new}, joint=True)
    assert_close(mean, truth.latent(new)[0].flatten(), "backend")
    assert_close(covariance, truth.joint(new), "backend")

    name = "base_model.model.head.modules_to_save.default.2"
    last = Laplace(model, "regression", "last_layer", "full", dict_key_x="x", last_layer_name=name)
    last.fit(batches)
    truth = Truth(Plain(model), x, y, "regression", names=(f"outer.{name}.weight", f"outer.{name}.bias"))
    assert_close(last({"x": new})[1], truth.latent(new)[1], "backend")


def test_untangle_writes_samples_into_its_own_head() -> None:
    model, (x, y), new = network(), classes(), new_inputs()
    la = Laplace(model, "classification", "last_layer", "full")
    la.fit(loader(x, y))
    features = torch.tanh(model[0](new)).detach()
    head = copy.deepcopy(model[2])
    for theta in la.sample(2, generator=torch.Generator().manual_seed(3)):
        vector_to_parameters(theta, head.parameters())
        assert_close(head(features), features @ theta[:12].view(3, 4).T + theta[12:], "algebra")
    eye = torch.eye(3, dtype=x.dtype)
    Js = torch.cat([torch.einsum("ck,bd->bckd", eye, features).flatten(2), eye.expand(len(new), 3, 3)], 2)
    truth = Truth(model, x, y, "classification", names=HEAD)
    assert_close(la.mean, truth.mean, "exact")
    for delta in torch.logspace(-2, 2, 20, dtype=torch.float64):
        la.prior_precision = delta
        again = Truth(model, x, y, "classification", names=HEAD, prior=delta)
        assert_close(la.functional_variance(Js), again.latent(new)[1], "backend")


def test_epig_takes_a_diagonal_subnetwork_by_its_dotted_path() -> None:
    model, (x, y) = network(), classes()
    target = importlib.import_module("laplace").Laplace
    indices = LargestMagnitudeSubnetMask(model, n_params_subnet=6).select()
    n_params = sum(p.numel() for p in model.parameters())
    la = target(
        model=model, likelihood="classification", subset_of_weights="subnetwork", hessian_structure="diag",
        subnetwork_indices=indices, temperature=1 / n_params,
    )  # fmt: skip
    assert isinstance(la, DiagSubnetLaplace)
    la.fit(loader(x, y))
    truth = Truth(model, x, y, "classification", "diag")
    precision = n_params * truth.H.diagonal()[indices] + 1
    assert la.n_params_subnet == 6
    assert_close(la.posterior_scale, precision.rsqrt(), "backend")
    assert_close(la.mean_subnet, truth.mean[indices], "exact")
    draws = torch.randn(3, 6, dtype=torch.float64) * la.posterior_scale + la.mean_subnet
    whole = la.assemble_full_samples(draws)
    assert_close(whole[:, indices], draws, "exact")
    fixed = torch.ones(n_params, dtype=torch.bool).index_fill(0, indices, False)
    assert_close(whole[:, fixed], truth.mean[fixed].expand(3, -1), "exact")


def test_suq_fits_one_hot_labels_and_saves_the_object(tmp_path) -> None:
    model, (x, y), new = network(), classes(), new_inputs()
    la = Laplace(model, "classification", "last_layer", "diag")
    la.fit(loader(x, nn.functional.one_hot(y, 3).double()))
    truth = Truth(model, x, y, "classification", "diag", HEAD)
    assert_close(la.posterior_variance, 1 / truth.precision.diagonal(), "backend")
    with pytest.warns(TuningWarning, match="on the edge of the grid"):
        la.optimize_prior_precision(
            method="gridsearch", val_loader=loader(*held_out()), pred_type="glm", link_approx="probit",
            log_prior_prec_min=-1, log_prior_prec_max=1, grid_size=3,
        )  # fmt: skip
    best = best_prior((0.1, 1.0, 10.0), model, x, y, "classification", "diag", HEAD)
    assert float(la.prior_precision) == pytest.approx(best)
    torch.save(la, tmp_path / "la.pt")
    loaded = torch.load(tmp_path / "la.pt", weights_only=False)
    assert_close(loaded(new), la(new), "exact")


def test_scoring_rules_draw_predictions_of_sampled_weights() -> None:
    model, (x, y), new = network(), classes(), new_inputs()
    la = KronLLLaplace(model, "classification")
    la.fit(loader(x, y))
    p = la(new, pred_type=PredType.GLM, link_approx=LinkApprox.PROBIT)
    truth = Truth(model, x, y, "classification", "kron", HEAD)
    assert_close(p, truth.probit(new), "backend")
    torch.manual_seed(1)
    draws = la._nn_predictive_samples(X=new, n_samples=4000)
    assert draws.shape == (4000, len(new), 3)
    # Of a last layer the outputs are linear in the weights: both predictives are the same Gaussian.
    expected, error = predictive.monte_carlo(*truth.latent(new), 4000, torch.Generator().manual_seed(0))
    assert_close(draws.mean(0), expected, "mc", standard_error=error * 2**0.5)


class Ensemble(nn.Module):
    """A module whose state holds a posterior."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.la = model, None

    def get_extra_state(self):
        return {"la": self.la}

    def set_extra_state(self, state) -> None:
        self.la = state["la"]


def test_beyond_deep_ensembles_pickles_a_posterior_within_a_state(tmp_path) -> None:
    model, (x, y), new = network(), classes(), new_inputs()
    first = Ensemble(model)
    first.la = Laplace(model, "classification", "all", "diag", prior_precision=20.0)
    first.la.fit(loader(x, y))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = Ensemble(network())
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
    assert_close(second.la(new), Truth(model, x, y, "classification", "diag", prior=20.0).probit(new), "backend")
    before = copied(second.la.model)
    torch.manual_seed(1)
    draws = second.la._nn_predictive_samples(new, n_samples=50)
    torch.manual_seed(1)
    thetas = second.la.sample(50)
    other, expected = network(), []
    for theta in thetas:
        vector_to_parameters(theta, other.parameters())
        expected.append(other(new).softmax(-1).detach())
    assert_close(draws, torch.stack(expected), "algebra")
    assert untouched(second.la.model, before)
    assert pickle.loads(pickle.dumps(second.la)).n_data == len(x)
