"""Constructors that are read by tools, precision of numbers, frozen layers, gradients, mappings."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev, vmap

from laplace import ELLA, FunctionalLaplace, FunctionalLLLaplace, Laplace, VaLLA
from laplace.curvature import GGNInterface, NativeEF, NativeGGN
from laplace.errors import LaplaceError
from tests import grid
from tests.downstream.problems import HEAD, Truth, classes, loader, network, new_inputs, numbers, sine
from tests.reference.compare import assert_close

# Constructors.


def rebuilt(la, model: nn.Module):
    """An equal object from the names of the constructor's arguments, as tools make it."""
    names = [name for name in type(la).__init__.__code__.co_varnames if name not in ("self", "model")]
    return type(la)(model=model, **{name: getattr(la, name) for name in names if hasattr(la, name)})


@pytest.mark.parametrize(("weights", "structure"), grid.CELLS)
def test_every_class_is_rebuilt_from_its_arguments(weights: str, structure: str) -> None:
    given = {"backend": NativeGGN, "prior_precision": 3.0, "prior_mean": 0.1, "temperature": 2.0, "sigma_noise": 0.5}
    la = grid.fitted(weights, structure, "regression", **given)
    again = rebuilt(la, copy.deepcopy(la.model if weights != "last_layer" else grid.network("regression")))
    again.fit(grid.batches("regression"))
    for ours, theirs in zip(grid.predict(again, "regression"), grid.predict(la, "regression"), strict=True):
        assert_close(ours, theirs, "float32_solve")
    assert_close(again.log_marginal_likelihood(), la.log_marginal_likelihood(), "float32")


@pytest.mark.parametrize(
    ("cls", "own"),
    [
        pytest.param(FunctionalLaplace, {"n_subset": 8}, id="gp"),
        pytest.param(FunctionalLLLaplace, {"n_subset": 8}, id="last layer gp"),
        pytest.param(ELLA, {"subsample_size": 8, "n_eigenvalues": 4}, id="ella"),
        pytest.param(VaLLA, {"inducing_locations": grid.data("regression")[0][:4]}, id="valla"),
    ],
)
def test_posteriors_over_functions_are_rebuilt_too(cls: type, own: dict) -> None:
    model = grid.network("regression").eval()
    la = cls(model, "regression", prior_precision=3.0, sigma_noise=0.5, **own)
    again = rebuilt(la, copy.deepcopy(model))
    options = {"iterations": 2} if cls is VaLLA else {}
    x = grid.data("regression")[0]
    for each in (la, again):
        each.fit(grid.batches("regression"), **options)
    for ours, theirs in zip(again(x), la(x), strict=True):
        assert_close(ours, theirs, "float32_solve")


def test_a_backend_stands_for_its_class() -> None:
    model, (x, y) = network(), classes()
    first = Laplace(model, "classification", "all", "diag", backend=NativeEF)
    second = Laplace(model, "classification", "all", "diag", backend=first.backend)
    second.fit(loader(x, y))
    truth = Truth(model, x, y, "classification", "diag", kind="ef")
    assert_close(second.H, truth.H.diagonal(), "backend")
    last = Laplace(model, "classification", "last_layer", "diag", backend=first.backend, asdl_fisher_kwargs={})
    last.fit(loader(x, y))
    truth = Truth(model, x, y, "classification", "diag", HEAD, kind="ef")
    assert_close(last.H, truth.H.diagonal(), "backend")


# One covariance at one precision.


def test_variances_are_the_diagonal_of_the_joint_covariance() -> None:
    X = torch.linspace(-5, 13, 500).unsqueeze(-1)
    agree = []
    for seed in (711, 1):
        model, x, y = sine(seed)
        la = Laplace(model, "regression", subset_of_weights="all", hessian_structure="full")
        la.fit(loader(x, y, 150))
        la.sigma_noise, la.prior_precision = 0.3, 0.01
        (f_mu, f_var), (joint_mu, f_cov) = la(X), la(X, joint=True)
        diagonal = la(X, diagonal_output=True)[1]
        agree.append(torch.allclose(f_mu.flatten(), joint_mu))
        agree.append(torch.allclose(f_var.flatten(), f_cov.diag()))
        agree.append(torch.allclose(diagonal.flatten(), f_cov.diag()))
    assert all(agree)


# Frozen layers.


class Mine(GGNInterface):
    """A backend of one's own, by the parameters that the base class lists."""

    def jacobians(self, x, enable_backprop=False):
        def output(parameters, datum):
            return functional_call(self.model, (parameters, self.buffers_dict), (datum.unsqueeze(0),)).squeeze(0)

        found = vmap(jacrev(output), (None, 0))(self.params_dict, x)
        return torch.cat([J.flatten(2) for J in found.values()], 2).detach(), self.model(x).detach()


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_a_backend_lists_what_is_trained(structure: str) -> None:
    model, (x, y), new = network(), classes(), new_inputs()
    model[0].requires_grad_(False)
    la = Laplace(model, "classification", "all", structure, backend=Mine)
    assert list(la.backend.params_dict) == list(HEAD)
    la.fit(loader(x, y))
    truth = Truth(model, x, y, "classification", structure, HEAD)
    assert_close(la.H, truth.H if structure == "full" else truth.H.diagonal(), "backend")
    assert_close(la(new), truth.probit(new), "backend")


# Gradients of variances in the prior.


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_variances_have_gradients_in_the_prior(structure: str) -> None:
    model, (x, y), new = network(n_out=1), numbers(), new_inputs()
    la = Laplace(model, "regression", "all", structure, enable_backprop=True)
    la.fit(loader(x, y))
    Js, _ = la.backend.jacobians(new)
    expected = []
    for log_prior in (0.3 + 1e-5, 0.3 - 1e-5):
        prior = torch.tensor(log_prior, dtype=x.dtype).exp()
        expected.append(Truth(model, x, y, "regression", structure, prior=prior).latent(new)[1].sum())
    slope = (expected[0] - expected[1]) / 2e-5
    for variance in (lambda: la.functional_variance(Js), lambda: la(new)[1]):
        log_prior = torch.tensor([0.3], dtype=x.dtype, requires_grad=True)
        la.prior_precision = log_prior.exp()
        variance().sum().backward()
        assert_close(log_prior.grad.sum(), slope, "finite_difference")


# Mappings.


class Named(nn.Module):
    """A network that takes one key of a mapping."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, data):
        return self.net(data["x"])


class WithLabels(Named):
    """A network that takes the mapping whole, one of whose other arguments is a key of it."""

    def forward(self, data, labels=None):
        return self.net(data["x"])


class NamedLikeItsKey(Named):
    """A network whose argument is named like a key of the mapping that it takes."""

    def forward(self, x):
        return self.net(x["x"])


def check_mappings(model: nn.Module, batches: list, new) -> None:
    la = Laplace(model, "classification", "all", "kron", dict_key_x="x")
    la.fit(batches)
    net, (x, y) = network(), classes()
    truth = Truth(net, x, y, "classification", "kron")
    assert_close(la.log_marginal_likelihood(), truth.log_evidence, "backend")
    assert_close(la(new), truth.probit(new["x"]), "backend")
    draws = la(new, pred_type="nn", link_approx="mc", n_samples=3, generator=torch.Generator().manual_seed(0))
    assert_close(draws.sum(-1), torch.ones(6), "algebra")


@pytest.mark.parametrize("batch_size", [[], None], ids=["0-d", "1-d"])
def test_a_tensordict(batch_size) -> None:
    tensordict = pytest.importorskip("tensordict")
    x, y = classes()

    def made(rows: slice) -> object:
        size = [len(x[rows])] if batch_size is None else []
        return tensordict.TensorDict({"x": x[rows], "labels": y[rows]}, batch_size=size)

    new = tensordict.TensorDict({"x": new_inputs()}, batch_size=[6] if batch_size is None else [])
    check_mappings(Named(network()), [made(slice(0, 5)), made(slice(5, None))], new)


def test_a_wrapper_with_labels_takes_the_mapping_whole() -> None:
    x, y = classes()
    batches = [{"x": x[:5], "labels": y[:5]}, {"x": x[5:], "labels": y[5:]}]
    check_mappings(WithLabels(network()), batches, {"x": new_inputs()})


def test_an_argument_named_like_a_key() -> None:
    x, y = classes()
    batches = [{"x": x[:5], "labels": y[:5]}, {"x": x[5:], "labels": y[5:]}]
    try:
        check_mappings(NamedLikeItsKey(network()), batches, {"x": new_inputs()})
    except LaplaceError as error:
        assert "forward_fn" in str(error)
        la = Laplace(
            NamedLikeItsKey(network()), "classification", "all", "kron", dict_key_x="x",
            forward_fn=lambda model, data: model(data),
        )  # fmt: skip
        la.fit(batches)
        assert_close(la.H_facs.kfacs[3][0], Truth(network(), x, y, "classification").H[-3:, -3:], "backend")
