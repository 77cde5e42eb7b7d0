"""Where the classes are in outputs with positions: what labels say, what the user says, and an error for both."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, MixtureLaplace, OnlineLaplace, continual_training, marglik_training
from laplace.errors import InvalidData, StateError
from tests.reference.compare import assert_close


def network(n_classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, n_classes, 1)).double()


class Tokens(nn.Module):
    """Outputs `[B, T, C]`, or `[B, C, T]`."""

    def __init__(self, n_classes: int, *, second: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, n_classes)).double()
        self.second = second

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).mT if self.second else self.net(x)


def images(height: int = 5, width: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 2, height, width, generator=source).double()
    return x, torch.randint(0, 3, (4, height, width), generator=source)


def fitted(model: nn.Module, data: tuple[Tensor, Tensor], weights: str, structure: str, **options: Any) -> Any:
    la = Laplace(model, "classification", weights, structure, **options)
    la.fit([data])
    return la


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank"])
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_labels_of_pixels_say_where_the_classes_are(weights: str, structure: str) -> None:
    """As many classes as columns: the loss is PyTorch's, and everything that of `channel_dim=1`."""
    data = images()
    la, expected = (fitted(network(), data, weights, structure, **given) for given in ({}, {"channel_dim": 1}))
    assert la.channel_dim == 1
    assert_close(la.loss, nn.functional.cross_entropy(network()(data[0]), data[1], reduction="sum").detach(), "algebra")
    assert_close(la.log_marginal_likelihood(), expected.log_marginal_likelihood(), "algebra")
    assert la(data[0]).shape == (4, 3, 5, 3)
    assert_close(la(data[0]), expected(data[0]), "algebra")
    la.fit([images(3, 3, seed=1)])  # which both readings fit; it is known by now
    assert la.channel_dim == 1


@pytest.mark.parametrize("second", [False, True])
def test_labels_of_tokens(second: bool) -> None:
    x = torch.randn(4, 5, 2, generator=torch.Generator().manual_seed(0)).double()
    y = torch.randint(0, 3, (4, 5), generator=torch.Generator().manual_seed(1))
    expected = fitted(Tokens(3), (x, y), "all", "full", channel_dim=-1)
    la = fitted(Tokens(3, second=second), (x, y), "all", "full")
    assert la.channel_dim == (1 if second else -1)
    assert_close(la.H, expected.H, "algebra")
    assert_close(la(x), expected(x).mT if second else expected(x), "algebra")


def test_two_readings_are_an_error_that_asks() -> None:
    cube, square = images(3, 3), (torch.randn(4, 3, 2).double(), torch.randint(0, 3, (4, 3)))
    for model, data in ((network(), cube), (Tokens(3), square), (Tokens(3, second=True), square)):
        for weights in ("all", "last_layer"):
            la = Laplace(model, "classification", weights, "diag")
            with pytest.raises(InvalidData, match=r"may be dimension 1 or the last one.*channel_dim=1 or channel_dim"):
                la.fit([data])
            with pytest.raises(InvalidData, match="dimension 1 or the last one"):
                la.plan([data])
        with pytest.raises(InvalidData, match="dimension 1 or the last one"):
            marglik_training(copy.deepcopy(model), [data], n_epochs=1, n_epochs_burnin=5)


@pytest.mark.parametrize("channel_dim", [1, -1])
def test_what_the_user_says_is_what_counts(channel_dim: int) -> None:
    x, y = images(3, 3)
    la = fitted(network(), (x, y), "all", "diag", channel_dim=channel_dim)
    f = network()(x).detach()
    rows = f.movedim(channel_dim, 1)
    assert_close(la.loss, nn.functional.cross_entropy(rows, y, reduction="sum"), "algebra")


def test_targets_that_are_no_labels_leave_the_last_dimension() -> None:
    x = torch.randn(4, 5, 2).double()
    for likelihood in ("regression", "bernoulli"):
        la = Laplace(Tokens(3), likelihood, "all", "diag")
        la.fit([(x, torch.rand(4, 5, 3).double())])
        assert la.channel_dim == -1
    la = fitted(nn.Linear(2, 3).double(), (x[:, 0], torch.randint(0, 3, (4,))), "all", "diag")
    assert la.channel_dim == -1


def test_training_with_labels_of_pixels() -> None:
    data = images()
    results = []
    for options in ({}, {"laplace_kwargs": {"channel_dim": 1}}):
        model = network()
        la, _, margliks, losses = marglik_training(model, [data], hessian_structure="diag", n_epochs=2, **options)
        online = OnlineLaplace(model, [data], "classification", "diag", **options)
        loss = online.loss(online.forward(data[0]), data[1])
        results.append(torch.tensor([*margliks, *losses, float(la.loss), float(loss.detach())]))
    assert_close(results[0], results[1], "algebra")
    tasks = [Laplace(network(), "classification", "all", "diag", **given) for given in ({}, {"channel_dim": 1})]
    for la in tasks:
        continual_training(la, [[data], [images(seed=1)]], n_epochs=1)
    assert_close(tasks[0].H, tasks[1].H, "algebra")


@pytest.mark.filterwarnings("ignore::laplace.errors.TuningWarning")  # labels at random: the flattest prior is best
def test_tuning_and_mixtures_with_labels_of_pixels() -> None:
    data = images()
    values, predictions = [], []
    for options in ({}, {"channel_dim": 1}):
        la = fitted(network(), data, "all", "diag", **options)
        for search in ({}, {"method": "adam", "n_steps": 2}):
            found = la.optimize_hyperparameters(val_loader=[images(seed=2)], objective="nll", **search)
            values.append(found.value)
        mixture = MixtureLaplace([network(), network()], "classification", "last_layer", "diag", **options)
        mixture.fit([data])
        predictions.append(mixture(data[0]))
    assert_close(torch.tensor(values[:2]), torch.tensor(values[2:]), "algebra")
    assert_close(predictions[0], predictions[1], "algebra")


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_a_state_says_where_the_classes_are(weights: str) -> None:
    model, data = network(), images()
    la = fitted(model, data, weights, "diag")
    other = Laplace(model, "classification", weights, "diag")
    other.load_state_dict(la.state_dict())
    assert other.channel_dim == 1
    assert_close(other(data[0]), la(data[0]), "algebra")
    with pytest.raises(StateError, match="channel_dim"):
        Laplace(model, "classification", weights, "diag", channel_dim=-1).load_state_dict(la.state_dict())


def test_an_iterator_loses_no_batch() -> None:
    data = [images(), images(seed=1)]
    la = Laplace(network(), "classification", "all", "diag")
    la.fit(iter(data))
    assert la.n_data == 2 * 60
