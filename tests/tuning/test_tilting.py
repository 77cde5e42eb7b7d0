"""The width that follows the input: distances and predictions by dense oracles, its choice, and bad input."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import Laplace, MixtureLaplace
from laplace.errors import CalibrationWarning, InvalidData, InvalidInputs, InvalidType
from laplace.tuning import calibrate as search
from laplace.tuning import tilting
from tests.reference import tilt as reference
from tests.reference.compare import assert_close

N_TRAIN, N_VAL, N_NEW, WIDTH = 40, 60, 9, 4


def network(n_outputs: int = 3) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, n_outputs)).double()
        nn.init.normal_(model[2].weight, std=3.0)
        return model


def data(n: int, seed: int, likelihood: str = "classification", n_outputs: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, WIDTH, generator=generator, dtype=torch.float64)
    f = network(n_outputs)(x).detach()
    if likelihood == "regression":
        spread = x.norm(dim=1, keepdim=True) / 2
        return x, f + spread * torch.randn(f.shape, generator=generator, dtype=torch.float64)
    if likelihood == "bernoulli":
        return x, torch.bernoulli(f.sigmoid(), generator=generator)
    return x, torch.multinomial((f / x.norm(dim=1, keepdim=True)).softmax(1), 1, generator=generator).squeeze(1)


def fitted(weights: str, structure: str, likelihood: Any = "classification", **options: Any) -> Any:
    la = Laplace(network(), likelihood, weights, structure, prior_precision=3.0, **options)
    la.fit(list(zip(*(part.split(15) for part in data(N_TRAIN, 0, likelihood)), strict=True)))
    return la


def calibrated(la: Any, width: float, far: float, scale: float, train_loader: Any = None) -> Any:
    """A calibration on data of the test, with a width and a scale of the test's own."""
    likelihood = la.likelihood_object.name
    found = la.calibrate([data(N_VAL, 1, likelihood)], train_loader=train_loader)
    assert found.tilt is not None, found.untilted
    tilt = dataclasses.replace(found.tilt, width=width, far=far)
    la.calibration = dataclasses.replace(found, tilt=tilt, scale=scale, prior_precision=found.before.prior_precision)
    return la


def inputs_of(x: Tensor, weights: str) -> list[Tensor]:
    """Inputs of the layers with random weights, `[B, 1, d]`."""
    layers = [x, network()[:2](x).detach()]
    return [each.unsqueeze(1) for each in (layers[1:] if weights == "last_layer" else layers)]


def true_distances(la: Any, weights: str, x: Tensor) -> tuple[Tensor, Tensor]:
    likelihood = la.likelihood_object.name
    train, held_out, new = (
        inputs_of(part, weights) for part in (data(N_TRAIN, 0, likelihood)[0], data(N_VAL, 1)[0], x)
    )
    of_held_out = [reference.leverages(a, b) for a, b in zip(train, held_out, strict=True)]
    return reference.distances(of_held_out, [reference.leverages(a, b) for a, b in zip(train, new, strict=True)])


def new_inputs() -> Tensor:
    return torch.cat([data(N_NEW, 5)[0], 6 * data(3, 6)[0]])


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [(5, InvalidType, "train_loader"), ([], InvalidData, "train_loader gave no data"),
     ("nan", InvalidData, "train_loader: the inputs of layer '0' are NaN"),
     ("narrow", InvalidInputs, "train_loader: batch 0")],
)  # fmt: skip
def test_training_data_that_have_no_moments(given: Any, error: type[Exception], words: str) -> None:
    la, (x, y) = fitted("last_layer", "kron"), data(N_TRAIN, 0)
    made = {"nan": [(x.where(x < 1, torch.nan), y)], "narrow": [(x[:, :2], y)]}
    given = made[given] if isinstance(given, str) else given
    with pytest.raises(error, match=words):
        la.calibrate([data(N_VAL, 1)], train_loader=given)
    assert la.calibration is None


def test_constant_inputs_of_the_first_layer_leave_the_last_one() -> None:
    la, (x, y) = fitted("last_layer", "kron"), data(N_TRAIN, 0)
    assert la.calibrate([data(N_VAL, 1)], train_loader=[(0 * x, y)]).tilt.layers == ("2",)


def test_the_noise_of_a_regression_follows_the_last_layer_alone() -> None:
    la = fitted("last_layer", "kron", "regression", sigma_noise=0.7)
    found = la.calibrate([data(N_VAL, 1, "regression")], train_loader=[data(N_TRAIN, 0, "regression")])
    assert found.tilt.layers == ("2",)


def test_a_network_that_begins_with_a_convolution_has_its_last_layer_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    (x, y), (held_out, labels) = data(N_TRAIN, 0), data(N_VAL, 1)
    la: Any = Laplace(model, "classification", "last_layer", "kron")
    la.fit([(x.unsqueeze(1), y)])
    found = la.calibrate([(held_out.unsqueeze(1), labels)], train_loader=[(x.unsqueeze(1), y)])
    assert found.tilt.layers == ("4",)


@pytest.mark.filterwarnings("ignore::laplace.errors.ApproximationWarning")
def test_candidates_are_scored_by_delta_on_tempered_logits() -> None:
    """The chosen posterior's held-out score is that of its predictions."""
    la, (x, y) = fitted("all", "kron"), data(N_VAL, 1)
    found = la.calibrate([(x, y)], link_approx="delta")
    scores = -la(x, link_approx="delta")[torch.arange(N_VAL), y].log()
    assert found.tilt is not None
    assert found.tilt.width > 0
    assert_close(scores.mean(), torch.tensor(found.posterior_nll, dtype=torch.float64), "algebra")


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_empty_batches_are_refused(structure: str) -> None:
    """As everywhere, whether or not the inputs of layers are read."""
    la, (x, y) = fitted("all", structure), data(N_VAL, 1)
    with pytest.raises(InvalidData, match="validation batch 1: the batch holds no data"):
        la.calibrate([(x, y), (x[:0], y[:0])])


# Its choice.


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_widest_that_is_not_shown_to_be_worse(likelihood: str) -> None:
    la = fitted("all", "kron", likelihood)
    x, y = data(N_VAL, 1, likelihood)
    found = la.calibrate([(x, y)])
    r = true_distances(la, "all", x)[0]
    far = tilting.FAR * (1 + 4 / math.sqrt(N_VAL)) * float(r.max())
    f = network()(x).detach()

    def losses(width: float) -> Tensor:
        if likelihood == "regression":
            variance = reference.variance(found.network_noise, r, width, far).expand_as(y)
            return 0.5 * ((y - f).square() / variance + variance.log() + math.log(2 * math.pi)).sum(1)
        return nn.functional.nll_loss(reference.probabilities(f, r, width, far).log(), y, reduction="none")

    by_width = {width: losses(width) for width in tilting.WIDTHS}
    expected = reference.widest(by_width, losses(0.0), tilting.WIDTHS, search.caution(N_VAL))
    assert found.tilt.width == expected
    assert expected > 0
    assert found.tilt.far == pytest.approx(far)
    assert found.network_nll == pytest.approx(float(losses(0.0).mean()))
    assert found.tilt.nll == pytest.approx(float(by_width[expected].mean()))
    assert f"c = {expected:.3g}" in repr(found)
    assert "the width follows the inputs of 2 layers" in repr(la)
    assert "The posterior is calibrated on 60 validation data" in repr(la.compare([data(50, 8, likelihood)]))
    if found.is_network:
        assert found.posterior_nll == pytest.approx(found.tilt.nll)


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_candidates_are_scored_on_top_of_it(weights: str) -> None:
    la = fitted(weights, "kron")
    x, y = data(N_VAL, 1)
    found = la.calibrate([(x[:25], y[:25]), (x[25:], y[25:])])
    assert found.tilt.width > 0
    table = found.table

    def nll(scale: float, factor: float) -> Tensor:
        prior = factor * found.before.prior_precision
        la.calibration = dataclasses.replace(found, scale=scale, prior_precision=prior)
        return nn.functional.nll_loss(la(x).log(), y, reduction="none")

    for i, j in ((0, 8), (2, 6)):
        gap = nll(float(table["scales"][j]), float(table["factors"][i])) - nll(0.0, 1.0)
        assert_close(table["differences"][i, j, 0], gap.mean(), "algebra")
        assert_close(table["standard_errors"][i, j, 0], gap.std() / math.sqrt(N_VAL), "algebra")


def test_it_is_saved_exported_and_undone(tmp_path: Any) -> None:
    la, x = calibrated(fitted("all", "kron"), 2.0, 3.0, 0.1), new_inputs()
    expected = la(x)
    other = Laplace(la.model, "classification", "all", "kron")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other.load_state_dict(la.state_dict())
    assert torch.equal(other(x), expected)
    exported = laplace.export(la, x)
    assert_close(exported(x[:4]), expected[:4], "algebra")
    plain = fitted("all", "kron")(x)
    la.calibration = None
    assert torch.equal(la(x), plain)


def test_why_there_is_none() -> None:
    val = [data(N_VAL, 1)]
    assert "train_loader=" in fitted("all", "full").calibrate(val).untilted
    assert "train_loader=" in repr(fitted("all", "full").calibrate(val))
    mixture = MixtureLaplace([Laplace(network(), "classification", "all", "full") for _ in range(2)])
    mixture.fit([data(N_TRAIN, 0)])
    assert "train_loader=" in mixture.calibrate(val).untilted
    la = fitted("last_layer", "kron", "regression")
    assert "val_loader" in la.calibrate(train_loader=[data(N_TRAIN, 0, "regression")]).untilted


# Bad input.


@pytest.mark.parametrize("structure", ["kron", "full"])
def test_constant_features_and_few_data(structure: str) -> None:
    """Features that are all zero have no leverage; those that are constant one that is the same everywhere."""
    model = network()
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    la: Any = Laplace(model, "classification", "last_layer", structure)
    la.fit([data(N_TRAIN, 0)])
    assert "constant" in la.calibrate([data(N_VAL, 1)]).untilted or not la.calibration.tilt
    with torch.no_grad():
        model[0].bias.fill_(0.3)
    la.fit([data(N_TRAIN, 0)]) if la.calibration is None else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        la.calibration = None
        la.fit([data(N_TRAIN, 0)])
        la.calibrate([data(3, 1)])
    x = new_inputs()
    assert bool(la(x).isfinite().all())


@pytest.mark.parametrize("n_outputs", [2, 1000])
def test_few_and_many_classes(n_outputs: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, n_outputs)
    la: Any = Laplace(model, "classification", "last_layer", "kron")
    x = torch.randn(50, WIDTH)
    la.fit([(x[:20], torch.arange(20) % n_outputs)])
    found = la.calibrate([(x[20:], torch.arange(30) % n_outputs)])
    assert found.tilt is not None
    assert torch.equal(la(10 * x).argmax(1), model(10 * x).argmax(1)) or not found.is_network


def test_a_width_that_costs_more_than_it_is_worth_is_for_far_inputs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen is the better of two calibrations: that with the width, and that without it."""
    la, loader = fitted("last_layer", "kron"), [data(N_VAL, 1)]
    monkeypatch.setattr(search, "WORTH", math.inf)
    with_it = la.calibrate(loader)
    monkeypatch.setattr(search, "WORTH", -math.inf)
    without = la.calibrate(loader)
    assert with_it.tilt.width > 0
    assert without.tilt.width == 0
    assert without.tilt.far == with_it.tilt.far
    assert without.tilt.nll == without.network_nll
    mean = [float(nn.functional.nll_loss(la(x).log(), y)) for x, y in loader]
    assert mean[0] == pytest.approx(without.posterior_nll, abs=1e-9)
    for worth in (
        with_it.posterior_nll - without.posterior_nll + 1e-6,
        with_it.posterior_nll - without.posterior_nll - 1e-6,
    ):
        monkeypatch.setattr(search, "WORTH", worth)
        assert bool(la.calibrate(loader).tilt.width) == (worth > with_it.posterior_nll - without.posterior_nll)
