"""Training by the evidence of some weights: a last layer or a subnetwork, the others by MAP with a prior of their own.

The oracle is `tests/reference/online.py`: the same loop by dense algebra, gradient descent, and Adam written out.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from laplace import Laplace, OnlineLaplace, marglik_training
from laplace.errors import InvalidArgument, InvalidData
from laplace.weights.masks import LargestMagnitudeSubnetMask
from tests import grid
from tests.reference import curvature, kfac
from tests.reference import online as truth
from tests.reference.compare import assert_close

# Of grid.network: Linear(3, 5), Tanh, Dropout, Linear(5, 3).
SUBNETWORK = torch.tensor([0, 3, 15, 16, 17, 18, 19, 21, 25, 36])  # entries of 0.weight, 0.bias whole, of both others
RANDOM = {"all": torch.arange(38), "last_layer": torch.arange(20, 38), "subnetwork": SUBNETWORK}
TENSOR = torch.tensor([0] * 15 + [1] * 5 + [2] * 15 + [3] * 3)  # two of a layer
LIKELIHOODS = ("classification", "regression", "bernoulli")
STRUCTURES = ("full", "block", "diag", "kron")


def network(likelihood: str = "classification") -> nn.Module:
    """Three inputs, five hidden units, three outputs in float64; no dropout, which the oracle would have to draw."""
    model = grid.network(likelihood).double()
    model[2] = nn.Identity()
    return model


def batches(likelihood: str = "classification") -> list[tuple[Tensor, Tensor]]:
    return [(x.double(), y.double() if y.is_floating_point() else y) for x, y in grid.batches(likelihood)]


def options_of(weights: str) -> dict[str, Any]:
    return {"laplace_kwargs": {"subnetwork_indices": SUBNETWORK}} if weights == "subnetwork" else {}


def groups(random: Tensor, structure: str) -> Tensor:
    """Which precision every random entry has."""
    if structure == "scalar":
        return torch.zeros_like(random)
    return torch.arange(len(random)) if structure == "diag" else TENSOR[random].unique(return_inverse=True)[1]


def unit_curvature(structure: str, likelihood: str) -> truth.UnitCurvature:
    """Dense curvature of all parameters in a structure; the parts of some of them are those of their own."""

    def curvature_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        names = curvature.trainable_names(model)
        if structure == "kron":
            return kfac.dense_kfac(kfac.kfac(model, x, y, names, likelihood), names)
        full = curvature.ggn(model, x, y, names, likelihood)
        if structure == "block":
            return full * (TENSOR.unsqueeze(0) // 2 == TENSOR.unsqueeze(1) // 2)
        return torch.diag(full.diagonal()) if structure == "diag" else full

    return curvature_of


# The sequence of hyper-parameters, against the oracle.


def by_turns() -> list[Any]:
    """Every structure, prior and choice of weights, with the likelihoods in turn.

    Factors of some entries, and their eigenbasis under a prior that varies, are no dense matrix of the oracle's.
    """
    cells = itertools.product(STRUCTURES, ("scalar", "layerwise", "diag"), RANDOM)
    kept = [cell for cell in cells if cell[0] != "kron" or (cell[1] != "diag" and cell[2] != "subnetwork")]
    return [(LIKELIHOODS[(i + i // 3) % 3], *cell) for i, cell in enumerate(kept)]


@pytest.mark.portable
@pytest.mark.parametrize(("likelihood", "structure", "prior", "weights"), by_turns())
def test_training_is_that_of_the_oracle(likelihood: str, structure: str, prior: str, weights: str) -> None:
    noisy, random = likelihood == "regression", RANDOM[weights]
    group = groups(random, prior)
    start = torch.linspace(0.5, 2.0, int(group.max()) + 1, dtype=torch.float64)
    setting = truth.Setting(
        likelihood, random, group, start, rest=0.7, prior_mean=0.1, sigma=0.8 if noisy else None, temperature=1.3,
        n_epochs=5, due=(2, 4),
    )  # fmt: skip
    theirs, ours = network(likelihood), network(likelihood)
    history = truth.train(theirs, batches(likelihood), unit_curvature(structure, likelihood), setting)
    options = options_of(weights)
    options.setdefault("laplace_kwargs", {})["prior_mean"] = 0.1
    la, model, margliks, losses = marglik_training(
        ours, batches(likelihood), likelihood, structure, optimizer_cls=torch.optim.SGD, optimizer_kwargs={"lr": 0.05},
        n_epochs=5, marglik_frequency=2, n_hypersteps=3, prior_structure=prior, prior_prec_init=start, temperature=1.3,
        sigma_noise_init=0.8 if noisy else 1.0, subset_of_weights=weights, prior_prec_rest=0.7, **options,
    )  # fmt: skip
    assert_close(losses, history.losses, "backend", label="losses")
    assert_close(margliks, [-value for value in history.evidences], "backend", label="evidences")
    assert_close(la.prior_precision, history.best_prior, "backend", label="prior precision")
    assert_close(la.sigma_noise, history.best_sigma, "backend", label="noise")
    assert_close(nn.utils.parameters_to_vector(model.parameters()), history.best_weights, "backend", label="weights")
    assert_close(la.mean, history.best_weights[random], "backend", label="mean")
    assert la._key == (weights, structure)


def test_every_estimate_is_that_of_the_oracle() -> None:
    """Hyper-parameters after every epoch, in a loop of one's own, and the best state."""
    setting = truth.Setting(
        "regression", RANDOM["last_layer"], groups(RANDOM["last_layer"], "layerwise"), torch.ones(2).double(), rest=2.0,
        sigma=0.6, n_epochs=4,
    )  # fmt: skip
    theirs, ours, loader = network("regression"), network("regression"), batches("regression")
    history = truth.train(theirs, loader, unit_curvature("full", "regression"), setting)
    online = OnlineLaplace(
        ours, loader, "regression", "full", subset_of_weights="last_layer", prior_prec_rest=2.0, sigma_noise_init=0.6,
        n_hypersteps=3,
    )  # fmt: skip
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    for epoch in range(1, 5):
        for x, y in loader:
            optimizer.zero_grad()
            online.loss(ours(x), y).backward()
            optimizer.step()
        value = online.step(epoch)
        assert_close(value, history.evidences[3 * epoch - 1], "backend")
        assert_close(online.prior_precision, history.priors[epoch - 1], "backend")
        assert_close(online.sigma_noise, history.sigmas[epoch - 1], "backend")
        assert_close(nn.utils.parameters_to_vector(ours.parameters()), history.weights[epoch - 1], "backend")
    assert online.best is not None
    assert online.best.epoch == history.best + 1


# Every structure and choice of weights, against posteriors that know of no training.


@pytest.mark.parametrize("structure", grid.STRUCTURES)
@pytest.mark.parametrize("weights", ["last_layer", "subnetwork"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_every_structure(structure: str, weights: str, likelihood: str) -> None:
    """The evidence of an estimate, and the first step, are those of `Laplace` at the weights of that moment."""
    model, loader = network(likelihood), batches(likelihood)
    options = options_of(weights)
    online = OnlineLaplace(
        model, loader, likelihood, structure, subset_of_weights=weights, prior_structure="scalar", n_hypersteps=1,
        lr_hyp=0.05, **options,
    )  # fmt: skip
    optimizer, adam = torch.optim.Adam(model.parameters(), lr=0.05), truth.Adam(0.05)
    for epoch in range(1, 3):
        for x, y in loader:
            optimizer.zero_grad()
            online.loss(model(x), y).backward()
            optimizer.step()
        prior = online.prior_precision.clone().requires_grad_()
        sigma = online.sigma_noise.clone().requires_grad_(likelihood == "regression")
        la = Laplace(copy.deepcopy(model), likelihood, weights, structure, **options.get("laplace_kwargs", {}))
        la.fit(loader)
        evidence = la.log_marginal_likelihood(prior, sigma if likelihood == "regression" else None)
        leaves = [prior, sigma] if likelihood == "regression" else [prior]
        slopes = torch.cat([g.reshape(1) for g in torch.autograd.grad(evidence, leaves)])
        values = torch.cat([leaf.detach().reshape(1) for leaf in leaves])
        expected = values * adam.step(slopes * values).exp()
        assert_close(online.step(epoch), evidence, "fixture")
        found = torch.stack([online.prior_precision[0], online.sigma_noise])[: len(leaves)]
        assert_close(found, expected, "backend")
    posterior = online.finish()
    assert posterior.n_params == len(RANDOM[weights])
    assert posterior.n_data == grid.N_DATA


@pytest.mark.parametrize("likelihood", grid.LIKELIHOODS)
@pytest.mark.parametrize(("weights", "structure"), [("last_layer", "kron"), ("subnetwork", "diag")])
def test_every_likelihood(likelihood: str, weights: str, structure: str) -> None:
    """Gradients of the objective are those of the joint density of all weights."""
    model, loader = grid.network(likelihood).double().eval(), batches(likelihood)
    indices = torch.tensor([0, 3, 17, 20, 21])
    online = OnlineLaplace(
        model, loader, likelihood, structure, subset_of_weights=weights, prior_prec_init=3.0, prior_prec_rest=0.4,
        laplace_kwargs={"subnetwork_indices": indices} if weights == "subnetwork" else {},
    )  # fmt: skip
    n_params = sum(p.numel() for p in model.parameters())
    head = list(model.children())[-1]
    random = indices if weights == "subnetwork" else torch.arange(n_params - sum(p.numel() for p in head.parameters()),
                                                                  n_params)  # fmt: skip
    precision = torch.full((n_params,), 0.4, dtype=torch.float64)
    precision[random] = 3.0
    f = [model(x) for x, _ in loader]
    joint = sum((online.la.likelihood_object.loss(a, b[1]) for a, b in zip(f, loader, strict=True)), torch.zeros(()))
    joint = joint + 0.5 * (precision * nn.utils.parameters_to_vector(model.parameters()).square()).sum()
    parts = [online.loss(a, b[1]) * len(b[1]) for a, b in zip(f, loader, strict=True)]
    parameters = list(model.parameters())
    expected = torch.autograd.grad(joint, parameters, retain_graph=True)
    for one, other in zip(torch.autograd.grad(sum(parts, torch.zeros(())), parameters), expected, strict=True):
        assert_close(one, other, "algebra")
    online.step(1)
    assert math.isfinite(online.margliks[-1])


# What is trained, and what is not.


def test_a_subnetwork_of_all_entries_is_all_weights() -> None:
    found = []
    for weights, given in (("all", {}), ("subnetwork", {"subnetwork_indices": torch.arange(38)})):
        model = network()
        _, _, margliks, losses = marglik_training(
            model, batches(), "classification", "full", n_epochs=3, n_hypersteps=2,
            subset_of_weights=weights, laplace_kwargs=given,
        )  # fmt: skip
        found.append([*margliks, *losses])
    assert_close(found[1], found[0], "algebra")


def test_the_rest_has_a_prior_of_its_own() -> None:
    """That of the trunk shrinks it, and leaves the precision of the head to the evidence; 0 is no prior."""
    norms = []
    for rest in (0.0, 1.0, 100.0):
        model = network()
        online = OnlineLaplace(
            model, batches(), subset_of_weights="last_layer", prior_prec_rest=rest, marglik_frequency=20
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for epoch in range(1, 61):
            for x, y in batches():
                optimizer.zero_grad()
                online.loss(model(x), y).backward()
                optimizer.step()
            online.step(epoch)
        norms.append(model[0].weight.norm().item())
    assert norms[0] > norms[1] > 5 * norms[2]


def test_a_frozen_trunk_stays() -> None:
    model = network()
    model[0].requires_grad_(False)
    before = copy.deepcopy(model[0].state_dict())
    online = OnlineLaplace(model, batches(), subset_of_weights="last_layer", prior_prec_rest=50.0)
    assert online.rest.quad().item() == 0
    _, trained, margliks, _ = marglik_training(model, batches(), n_epochs=2, subset_of_weights="last_layer")
    assert len(margliks) == 20
    assert all(torch.equal(before[name], value) for name, value in trained[0].state_dict().items())


class Tied(nn.Module):
    """A head whose weight is that of the first layer: it is random, and not counted among the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)))


def test_a_tied_weight_counts_once() -> None:
    model = Tied().double()
    online = OnlineLaplace(
        model, batches(), subset_of_weights="last_layer", prior_prec_init=3.0, prior_prec_rest=0.5,
        laplace_kwargs={"last_layer_name": "head"},
    )  # fmt: skip
    assert [slot.name for slot in online.rest.slots] == ["first.bias"]
    assert_close(online.rest.quad().detach(), 0.5 * model.first.bias.square().sum(), "algebra")
    assert_close(online.la.prior.quad(online.la.problem.mean()),
                 3 * (model.first.weight.square().sum() + model.head.bias.square().sum()), "algebra")  # fmt: skip


def test_the_last_layer_is_found_without_a_trace() -> None:
    """By one datum; with shuffling and dropout training is that with a name."""
    x, y = (part for part in grid.data())
    results = []
    for name in (None, "3"):
        torch.manual_seed(5)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5, shuffle=True)
        kwargs = {} if name is None else {"last_layer_name": name}
        la, *_, losses = marglik_training(
            grid.network(), loader, n_epochs=3, n_hypersteps=2, subset_of_weights="last_layer", laplace_kwargs=kwargs
        )
        assert la.problem.head == "3"
        results.append((la.mean, la.prior_precision, losses))
    (mean, prior, losses), (other, same, others) = results
    assert torch.equal(mean, other)
    assert torch.equal(prior, same)
    assert losses == others


def test_a_mask_of_a_trained_network() -> None:
    """Training goes on from the network by which the subnetwork was chosen."""
    model = network()
    mask = LargestMagnitudeSubnetMask(model, n_params_subnet=12)
    la, *_ = marglik_training(
        model, batches(), "classification", "full", n_epochs=3, subset_of_weights="subnetwork",
        laplace_kwargs={"subnetwork_indices": mask.select()},
    )  # fmt: skip
    assert la.n_params == 12
    assert la(batches()[0][0]).shape == (5, 3)


@pytest.mark.nightly
def test_it_learns_the_noise_of_a_last_layer() -> None:
    """As well as all weights do, on data whose noise is 0.2."""
    generator = torch.Generator().manual_seed(2)
    x = 4 * torch.rand(200, 1, generator=generator) - 2
    y = torch.sin(2 * x) + 0.2 * torch.randn(200, 1, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))
    la, *_ = marglik_training(
        model, list(zip(x.split(50), y.split(50), strict=True)), "regression", "full", n_epochs=200,
        optimizer_kwargs={"lr": 0.02}, n_epochs_burnin=20, marglik_frequency=5, subset_of_weights="last_layer",
        prior_prec_rest=0.1,
    )  # fmt: skip
    assert 0.17 < la.sigma_noise.item() < 0.23
    assert functional.mse_loss(la(x)[0], torch.sin(2 * x)) < 0.01


# Refusals.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subset_of_weights": "head"}, "subset_of_weights='head'"),
        ({"subset_of_weights": "subnetwork"}, "subnetwork_indices"),
        ({"prior_prec_rest": -1.0}, r"prior_prec_rest=-1\.0"),
        ({"prior_prec_rest": math.inf}, "prior_prec_rest=inf"),
        ({"prior_prec_rest": "1"}, "prior_prec_rest='1'"),
        ({"subset_of_weights": "last_layer", "prior_prec_init": torch.ones(4)}, "prior_prec_init has length 4"),
        ({"subset_of_weights": "last_layer", "laplace_kwargs": {"last_layer_name": "1"}}, "'1'"),
        ({"subset_of_weights": "last_layer", "laplace_kwargs": {"prior_mean": torch.zeros(7)}}, "prior_mean"),
    ],
)
def test_errors_name_the_argument(options: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidArgument, TypeError), match=message):
        OnlineLaplace(network(), batches(), **options)


def test_frozen_random_weights_are_refused() -> None:
    model = network()
    model[3].requires_grad_(False)
    with pytest.raises(InvalidArgument, match="frozen"):
        OnlineLaplace(model, batches(), subset_of_weights="last_layer")


def test_an_empty_loader_is_an_error() -> None:
    with pytest.raises(InvalidData, match="gave no data"):
        OnlineLaplace(network(), [], subset_of_weights="last_layer")
