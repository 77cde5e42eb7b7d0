"""States that laplace-torch saved, and the smaller differences."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace

import pytest
import torch
from laplace.utils import FeatureExtractor
from torch import nn

from laplace import ELLA, FunctionalLaplace, Laplace, PredType
from laplace.curvature import AsdlEF, GGNInterface
from laplace.errors import DataWarning, ModelChangedError, StateError
from tests.downstream.problems import (
    HEAD,
    Truth,
    best_prior,
    classes,
    documented,
    held_out,
    loader,
    network,
    new_inputs,
    numbers,
)
from tests.reference import curvature, evidence
from tests.reference.compare import assert_close

NAMES = {
    ("all", "full"): "FullLaplace",
    ("all", "kron"): "KronLaplace",
    ("all", "diag"): "DiagLaplace",
    ("last_layer", "full"): "FullLLLaplace",
    ("last_layer", "kron"): "KronLLLaplace",
    ("last_layer", "diag"): "DiagLLLaplace",
}


# States of the other package.


def saved_there(truth: Truth, cls_name: str, structure: str, **others) -> dict:
    """The plain dict that laplace-torch 0.3 saves of a posterior."""
    if structure == "kron":
        H = [truth.factors[name][0] for name in truth.names]
    else:
        H = truth.H.diagonal() if structure == "diag" else truth.H
    state = {
        "mean": truth.mean,
        "H": H,
        "loss": truth.loss,
        "prior_mean": 0.0,
        "prior_precision": truth.prior[:1].clone(),
        "sigma_noise": torch.tensor(truth.sigma, dtype=torch.float64),
        "n_data": truth.n_data,
        "n_outputs": truth.n_outputs,
        "likelihood": truth.likelihood,
        "temperature": 1.0,
        "enable_backprop": False,
        "cls_name": cls_name,
    }
    last = {"data": None, "_last_layer_name": "2"} if "LL" in cls_name else {}
    return state | last | others


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize(("weights", "structure"), NAMES)
def test_states_of_laplace_torch_load(weights: str, structure: str, likelihood: str) -> None:
    model, new = network(), new_inputs()
    x, y = classes() if likelihood == "classification" else numbers(3)
    names = HEAD if weights == "last_layer" else None
    sigma = 1.0 if likelihood == "classification" else 0.5
    truth = Truth(model, x, y, likelihood, structure, names, prior=2.0, sigma=sigma)
    la = Laplace(model, likelihood, weights, structure)
    la.load_state_dict(saved_there(truth, NAMES[weights, structure], structure))
    assert (la.n_data, la.n_outputs, float(la.prior_precision)) == (len(x), 3, 2.0)
    assert_close(la.log_marginal_likelihood(), truth.log_evidence, "backend")
    if likelihood == "classification":
        assert_close(la(new), truth.probit(new), "backend")
    else:
        assert_close(la(new)[1], truth.latent(new)[1], "backend")
    again = Laplace(model, likelihood, weights, structure)
    again.load_state_dict(la.state_dict())
    assert_close(again.posterior_variance, la.posterior_variance, "algebra")


def test_what_cannot_be_loaded_is_refused_by_its_right_name() -> None:
    model, (x, y) = network(), classes()
    truth = Truth(model, x, y, "classification", "kron")
    fitting = saved_there(truth, "KronLaplace", "kron")
    with torch.no_grad():
        changed = network()
        changed[0].weight.add_(1.0)
    for la, state in (
        (Laplace(model, "classification", "all", "diag"), fitting),
        (Laplace(model, "bernoulli", "all", "kron"), fitting),
        (Laplace(network(width=5), "classification", "all", "kron"), fitting),
        (Laplace(changed, "classification", "all", "kron"), fitting),
        (Laplace(model, "classification", "last_layer", "kron", last_layer_name="0"), saved_there(
            Truth(model, x, y, "classification", "kron", HEAD), "KronLLLaplace", "kron"
        )),
    ):  # fmt: skip
        with pytest.raises(StateError, match="laplace-torch"):
            la.load_state_dict(state)
        assert not la.is_fitted
    gp = {
        "mean": truth.mean, "num_data": 8, "diagonal_kernel": False, "seed": 0, "K_MM": torch.eye(3), "mu": None,
        "L": None, "Sigma_inv": torch.eye(3), "train_loader": None, "cls_name": "FunctionalLaplace", "_fitted": True,
    }  # fmt: skip
    with pytest.raises(StateError, match="laplace-torch"):
        FunctionalLaplace(model, "classification", 8).load_state_dict(gp)
    with pytest.raises(StateError, match="laplace-torch"):
        ELLA(model, "classification", 8, 4).load_state_dict(
            {"cls_name": "ELLA", "model_fingerprint": {}, "dual_directions": torch.eye(3), "feature_gram": torch.eye(3)}
        )


# Smaller differences. What does not become the same is a row of docs/differences.md.


def test_names_print_as_there_or_the_difference_is_documented() -> None:
    assert str(PredType.GLM) == "PredType.GLM" or documented("PredType.GLM")
    assert PredType.GLM == "glm"


def test_the_temperature_is_a_number_or_the_difference_is_documented() -> None:
    la = Laplace(network(), "classification", temperature=2.0)
    assert isinstance(la.temperature, float) or documented("`la.temperature`")
    assert json.dumps({"T": float(la.temperature)}) == '{"T": 2.0}'


def soft_labels() -> torch.Tensor:
    """Mixed labels `[N, C]` whose rows sum to 1."""
    _, y = classes()
    hot = nn.functional.one_hot(y, 3).double()
    return 0.7 * hot + 0.3 * hot.roll(1, 0)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_one_hot_labels_are_labels(structure: str) -> None:
    model, (x, y), new = network(), classes(), new_inputs()
    hot = nn.functional.one_hot(y, 3)
    truth = Truth(model, x, y, "classification", structure)
    for labels in (hot.double(), hot.float(), hot):
        la = Laplace(model, "classification", "all", structure)
        la.fit(loader(x, labels))
        assert_close(la(new), truth.probit(new), "backend")
        assert_close(la.log_marginal_likelihood(), truth.log_evidence, "backend")


def test_soft_labels_in_loss_curvature_evidence_and_tuning() -> None:
    model, (x, y), q = network(), classes(), soft_labels()
    log_p = model(x).log_softmax(-1).detach()
    la = Laplace(model, "classification", "all", "full")
    la.fit(loader(x, q))
    truth = Truth(model, x, y, "classification")  # Λ does not depend on the labels
    assert_close(la.loss, -(q * log_p).sum(), "backend")
    assert_close(la.H, truth.H, "backend")
    truth.loss = -(q * log_p).sum()
    assert_close(la.log_marginal_likelihood(), truth.log_evidence, "backend")

    fisher = Laplace(model, "classification", "all", "diag", backend=laplace_ef())
    fisher.fit(loader(x, q))
    gradients = torch.einsum("bcp,bc->bp", truth.jacobian(x), log_p.exp() - q)
    assert_close(fisher.H, gradients.square().sum(0), "backend")

    x_val, y_val = held_out()
    hot = nn.functional.one_hot(y_val, 3).double()
    la.optimize_prior_precision(
        method="gridsearch", val_loader=loader(x_val, hot), log_prior_prec_min=-2, log_prior_prec_max=0, grid_size=3
    )
    best = best_prior((0.01, 0.1, 1.0), model, x, y, "classification", "full")
    assert float(la.prior_precision) == pytest.approx(best)
    with pytest.warns(DataWarning, match="sums of rows reach from 2 to 2"):
        la.fit(loader(x, 2 * q))
    with pytest.warns(DataWarning, match="the smallest is"):
        la.fit(loader(x, q - 0.5 * torch.tensor([1.0, -0.5, -0.5], dtype=q.dtype)))


def laplace_ef() -> type:
    """The library's empirical Fisher."""
    from laplace.curvature import NativeEF

    return NativeEF


class OneNumber(nn.Module):
    """A regression as Hugging Face's heads make it: `num_labels=1`, logits `[B, 1]`, labels `[B]`."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.config = SimpleNamespace(num_labels=1, problem_type="regression")

    def forward(self, inputs_embeds, labels=None):
        logits = self.net(inputs_embeds)
        loss = None if labels is None else nn.functional.mse_loss(logits.squeeze(), labels.squeeze())
        return SimpleNamespace(loss=loss, logits=logits)


def test_regression_of_one_number_with_labels_of_one_dimension() -> None:
    net, (x, y), new = network(n_out=1), numbers(), new_inputs()
    batches = [{"inputs_embeds": x[i : i + 6], "labels": y[i : i + 6, 0]} for i in (0, 6)]
    la = Laplace(OneNumber(net), "regression", "all", "kron", dict_key_x="inputs_embeds", sigma_noise=0.5)
    la.fit(batches)
    truth = Truth(net, x, y, "regression", "kron", sigma=0.5)
    assert_close(la.log_marginal_likelihood(), truth.log_evidence, "backend")
    f_mu, f_var = la({"inputs_embeds": new})
    assert_close(f_mu, truth.latent(new)[0], "backend")
    assert_close(f_var, truth.latent(new)[1], "backend")


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_an_assigned_root_is_the_posterior_s(structure: str) -> None:
    model, (x, y), new = network(), classes(), new_inputs()
    la = Laplace(model, "classification", "all", structure)
    la.fit(loader(x, y))
    truth = Truth(model, x, y, "classification", structure)
    n = la.n_params
    root = torch.linspace(0.1, 0.3, n, dtype=x.dtype)
    if structure == "full":
        root = torch.diag(root) + 0.05 * torch.ones(n, n, dtype=x.dtype).tril(-1)
    la._posterior_scale = root
    covariance = root @ root.T if structure == "full" else torch.diag(root.square())
    assert_close(la.posterior_scale, root, "exact")
    assert_close(la.posterior_covariance, covariance, "algebra")
    J = truth.jacobian(new)
    assert_close(la.functional_variance(J), J @ covariance @ J.mT, "backend")
    draws = la.sample(4000, generator=torch.Generator().manual_seed(0))
    variance = covariance.diagonal()
    assert_close(draws.mean(0), truth.mean, "mc", standard_error=(variance / 4000).sqrt())
    assert_close(draws.var(0), variance, "mc", standard_error=variance * (2 / 4000) ** 0.5)
    la.prior_precision = 1.0
    assert_close(la.functional_variance(J), truth.latent(new)[1], "backend")


class Halved:
    """A loss of targets that are halved first, around the backend's own."""

    def __init__(self, loss) -> None:
        self.loss = loss

    def __call__(self, outputs, targets):
        return self.loss(outputs, targets / 2)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_an_assigned_loss_transforms_targets(structure: str) -> None:
    model, (x, y) = network(n_out=2), numbers(2)
    la = Laplace(model, "regression", "all", structure, sigma_noise=0.5)
    la.backend.lossfunc = Halved(la.backend.lossfunc)
    la.fit(loader(x, y))
    truth = Truth(model, x, y / 2, "regression", structure, sigma=0.5)
    assert_close(la.loss, 0.5 * (curvature.outputs(model, x) - y / 2).square().sum(), "backend")
    log_likelihood = evidence.log_likelihood(truth.loss, truth.n_data, 2, 0.5)
    assert_close(la.log_likelihood, log_likelihood, "backend")
    assert_close(la.log_marginal_likelihood(), truth.log_evidence, "backend")


def test_arguments_are_named_as_there_or_the_difference_is_documented() -> None:
    second = list(inspect.signature(FunctionalLaplace.fit).parameters)[2]
    assert second == "progress_bar" or documented("`fit(loader, progress_bar)`")
    grid = list(inspect.signature(ELLA.optimize_hyperparameters).parameters)[1:3]
    assert grid == ["val_loader", "grid"] or documented("`optimize_hyperparameters(val_loader, grid)`")
    assert "Js_star" in inspect.signature(FunctionalLaplace.functional_variance).parameters or documented("`Js_star`")
    fourth = list(inspect.signature(AsdlEF.__init__).parameters)[4]
    assert fourth == "dict_key_x" or documented("`AsdlEF`")


def test_private_names_exist_or_the_difference_is_documented() -> None:
    assert "_features" in dir(FeatureExtractor) or documented("`_features`")
    assert "_get_functional_hessian" in dir(GGNInterface) or documented("`_get_functional_hessian`")


def test_factors_can_be_let_go() -> None:
    model, (x, y) = network(), classes()
    la = Laplace(model, "classification", "all", "kron")
    la.fit(loader(x, y))
    p = la(x)
    la.H_facs = None  # frees memory there, where the eigendecomposition is what predicts
    assert_close(la(x), p, "exact")


def test_a_network_that_is_written_to_is_noticed() -> None:
    model, (x, y) = network(), classes()
    la = Laplace(model, "classification", "all", "diag")
    la.fit(loader(x, y))
    p = la(x)
    theta = la.mean.clone()
    nn.utils.vector_to_parameters(la.sample(1)[0], model.parameters())
    with pytest.raises(ModelChangedError):
        la(x)
    nn.utils.vector_to_parameters(theta, model.parameters())
    assert_close(la(x), p, "algebra")
    assert documented("`ModelChangedError`")
