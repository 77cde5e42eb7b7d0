"""Scores of distance from the data against dense oracles, and the posterior that inputs are ranked by."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import Laplace, MixtureLaplace
from laplace.errors import (
    InvalidArgument,
    InvalidData,
    InvalidType,
    ModelChangedError,
    NotFittedError,
    UnsupportedError,
)
from laplace.extensions import ood
from laplace.extensions.ood import METHODS
from tests import grid
from tests.reference import ood as reference
from tests.reference import predictive
from tests.reference.compare import assert_close

pytestmark = [
    pytest.mark.filterwarnings("ignore::laplace.errors.CalibrationWarning"),
    pytest.mark.filterwarnings("ignore::laplace.errors.TuningWarning"),
    pytest.mark.filterwarnings("ignore::laplace.errors.ApproximationWarning"),
]

ALL: list[Any] = list(METHODS)
OF_FEATURES: list[Any] = [name for name, method in METHODS.items() if method.features]
OF_OUTPUTS: list[Any] = [name for name in ALL if name not in OF_FEATURES]


def net(n_outputs: int = 3, width: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, n_outputs)).double()


def data(n: int = 40, n_classes: int = 3) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=source, dtype=torch.float64)
    return x, torch.arange(n) % n_classes


def others(n: int = 6) -> Tensor:
    return 3 * torch.randn(n, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def fitted(weights: Any = "all", structure: Any = "kron", n_outputs: int = 3, **options: Any) -> Any:
    la = Laplace(net(n_outputs), "classification", weights, structure, **options)
    x, y = data(n_classes=n_outputs)
    la.fit([(x[:25], y[:25]), (x[25:], y[25:])])
    return la


def features(la: Any, x: Tensor) -> Tensor:
    network = la.model.model if hasattr(la.model, "model") else la.model
    return network[:2](x).detach()


def at_evidence(la: Any) -> Any:
    """The same posterior at the prior precision of the evidence."""
    other = copy.deepcopy(la)
    other.optimize_hyperparameters()
    return other


# Every score against its oracle.


@pytest.mark.parametrize(
    ("weights", "structure"), [("all", "full"), ("all", "kron"), ("last_layer", "diag"), ("last_layer", "full")]
)
def test_scores_of_two_classes(weights: str, structure: str) -> None:
    la, x, (train, y) = fitted(weights, structure, 2), others(), data(n_classes=2)
    found = laplace.ood_score(la, x, ALL, train_loader=[(train, y)], n_samples=40000)
    wide = at_evidence(la)
    mean, covariance = wide.predictive_moments(x)
    f = net(2)(x).detach()
    probabilities = predictive.probit(mean, covariance)
    assert_close(found["network"], reference.doubt(f.softmax(1)), "algebra")
    assert_close(found["energy"], reference.energy(f), "algebra")
    assert_close(found["confidence"], reference.doubt(probabilities), "algebra")
    assert_close(found["entropy"], reference.entropy(probabilities), "algebra")
    assert_close(found["latent_variance"], covariance.diagonal(dim1=1, dim2=2).sum(1), "algebra")
    information = reference.mutual_information(mean, covariance)
    assert float((found["mutual_information"] - information).abs().max()) < 0.01
    assert float(information.max()) > 0.1
    inside, at, ridge = features(la, train), features(la, x), float(wide.prior_precision)
    for name, classwise in (("mahalanobis", False), ("classwise_mahalanobis", True)):
        assert_close(found[name], reference.mahalanobis(inside, y, at, classwise=classwise), "backend", label=name)
    assert_close(found["classwise_leverage"], reference.leverage(inside, y, at, ridge), "backend")


def test_a_regression_has_variances_and_distances() -> None:
    model, x, train = net(2), others(), data()[0]
    y = train[:, :2] + 0.1
    la = Laplace(model, "regression", "all", "full", sigma_noise=0.3)
    la.fit([(train, y)])
    wide = at_evidence(la)
    covariance = wide.predictive_moments(x)[1]
    found = laplace.ood_score(
        la, x, ["latent_variance", "mutual_information", "entropy", *OF_FEATURES], train_loader=[(train, y)]
    )
    assert_close(found["latent_variance"], covariance.diagonal(dim1=1, dim2=2).sum(1), "algebra")
    ratio = covariance / 0.09 + torch.eye(2).double()
    assert_close(found["mutual_information"], 0.5 * torch.logdet(ratio), "backend")
    assert_close(found["entropy"], wide.predict(x).entropy, "algebra")
    one = torch.zeros(len(train), dtype=torch.long)
    inside, at = features(la, train), features(la, x)
    ridge = 0.09 * float(wide.prior_precision)
    assert_close(found["classwise_leverage"], reference.leverage(inside, one, at, ridge), "backend")
    for name in ("mahalanobis", "classwise_mahalanobis"):  # one class
        assert_close(found[name], reference.mahalanobis(inside, one, at, classwise=False), "backend")
    assert_close(laplace.ood_score(la, x), found["latent_variance"], "algebra")
    for name in ("network", "confidence", "energy"):
        with pytest.raises(UnsupportedError, match=name):
            laplace.ood_score(la, x, name)


@pytest.mark.parametrize("likelihood", grid.LIKELIHOODS)
def test_every_likelihood_has_scores_or_says_why_not(likelihood: str) -> None:
    la = grid.fitted("all", "kron", likelihood, prior_precision=20.0)
    x = grid.data(likelihood)[0]
    scores = laplace.ood_score(la, x)
    assert scores.shape == (len(x),) and bool(scores.isfinite().all()) and scores.unique().numel() > 1
    if likelihood != "reward_modeling":
        assert laplace.ood_score(la, x, "mutual_information").shape == (len(x),)
        assert laplace.ood_score(la, x, "classwise_leverage", train_loader=grid.batches(likelihood)).shape == (len(x),)
    if likelihood == "bernoulli":
        wide = at_evidence(la).predict(x)
        assert_close(scores, 1 - torch.maximum(wide.mean, 1 - wide.mean).mean(1), "float32")
        with pytest.raises(UnsupportedError, match="softmax"):
            laplace.ood_score(la, x, "energy")


@pytest.mark.parametrize(("weights", "structure"), grid.CELLS)
def test_every_structure_ranks_by_its_own_variances(weights: str, structure: str) -> None:
    la = grid.fitted(weights, structure)
    x = grid.data()[0]
    found = laplace.ood_score(la, x, ["latent_variance", "confidence"])
    other = grid.fitted(weights, structure)
    ranked = laplace.ood_scorer(la).group.first
    other.prior_precision = ranked.hypers.prior_precision
    mean, variance = other.predictive_moments(x, diagonal_output=True)
    assert_close(found["latent_variance"], variance.sum(1), "float32_solve")
    assert_close(found["confidence"], reference.doubt(predictive.probit(mean, torch.diag_embed(variance))), "float32")


def test_a_gaussian_process_and_a_trained_one() -> None:
    x, y = data()
    la = Laplace(net(), "classification", "all", "gp", n_subset=40)
    la.fit([(x, y)])
    exact = fitted("all", "full")
    assert laplace.ood_score(la, others(), "network").shape == (6,)
    assert float((laplace.ood_score(la, others()) - laplace.ood_score(exact, others())).abs().max()) < 1e-4


# Hyper-parameters of the evidence.


def test_calibration_leaves_the_scores_and_scores_the_predictions() -> None:
    la, (x, y) = fitted("all", "kron"), data(60)
    x = x + 0.1
    before = la(x)
    scores = laplace.ood_score(la, others(), ["confidence", "latent_variance"])
    assert torch.equal(la(x), before) and float(la.prior_precision) == 1
    la.calibrate([(x, y)])
    calibrated, again = la(x), laplace.ood_score(la, others(), ["confidence", "latent_variance"])
    assert torch.equal(la(x), calibrated) and la.calibration is not None
    for name, values in scores.items():
        assert_close(again[name], values, "exact")


def test_a_calibrated_posterior_ranks_as_before_and_after_undo() -> None:
    la, (x, y) = fitted("all", "kron"), data(60)
    x = x + 0.1
    la.calibrate([(x, y)])
    calibrated = la(x)
    scores = laplace.ood_score(la, others())
    assert torch.equal(la(x), calibrated)
    assert_close(scores, laplace.ood_score(at_evidence(fitted()), others()), "algebra")
    la.calibration.undo()
    assert float(la.prior_precision) == 1
    assert_close(laplace.ood_score(la, others()), scores, "exact")


def _nothing(la: Any) -> None:
    """As it was fitted."""


def _noise_too(la: Any) -> None:
    la.optimize_hyperparameters(("prior_precision", "sigma_noise"))


TUNED: dict[str, Any] = {
    "adam": lambda la: la.optimize_prior_precision(),
    "em": lambda la: la.optimize_prior_precision(method="em"),
    "layerwise": lambda la: la.optimize_prior_precision(prior_structure="layerwise"),
    "lbfgs": lambda la: la.optimize_hyperparameters(prior_structure="diag"),
}


@pytest.mark.parametrize("how", TUNED)
def test_what_the_evidence_chose_is_taken_as_it_is(how: str) -> None:
    """In its structure, also of a posterior that was calibrated since."""
    la, (x, y) = fitted("all", "kron"), data(60)
    TUNED[how](la)
    mean, covariance = la.predictive_moments(others())
    expected = reference.doubt(predictive.probit(mean, covariance))
    assert_close(laplace.ood_score(la, others()), expected, "algebra")
    la.calibrate([(x + 0.1, y)])
    assert_close(laplace.ood_score(la, others()), expected, "algebra")


@pytest.mark.parametrize(
    "change",
    [
        lambda la: setattr(la, "prior_precision", 77.0),
        lambda la: la.optimize_prior_precision(method="gridsearch", val_loader=[data(60)]),
        lambda la: la.optimize_prior_precision(n_steps=1),
    ],
)
def test_another_prior_precision_than_that_of_the_evidence_is_searched_on_a_copy(change: Any) -> None:
    la = fitted("all", "kron")
    la.optimize_prior_precision(prior_structure="layerwise")
    change(la)
    before = la.prior_precision.clone()
    mean, covariance = at_evidence(fitted("all", "kron")).predictive_moments(others())
    expected = reference.doubt(predictive.probit(mean, covariance))
    assert_close(laplace.ood_score(la, others()), expected, "algebra")
    assert torch.equal(la.prior_precision, before)


# First three scores, as they have been since scores were introduced.
NUMBERS: dict[str, tuple[Any, list[float]]] = {
    "fitted": (_nothing, [0.649174119476, 0.635216277046, 0.629691310576]),
    "adam": (TUNED["adam"], [0.649175206716, 0.635217544444, 0.629692420887]),
    "em": (TUNED["em"], [0.649172885171, 0.635214838209, 0.629690050141]),
    "layerwise": (TUNED["layerwise"], [0.649249888567, 0.635174291841, 0.629457025138]),
    "lbfgs": (TUNED["lbfgs"], [0.648547928371, 0.634563915875, 0.628821842803]),
}


@pytest.mark.parametrize("how", NUMBERS)
@pytest.mark.parametrize("calibrated", [False, True])
def test_scores_of_the_usual_orders_of_calls(how: str, calibrated: bool) -> None:
    la, (x, y) = fitted("all", "kron"), data()
    change, expected = NUMBERS[how]
    change(la)
    if calibrated:
        la.calibrate([(x + 0.1, y)])
    found = laplace.ood_score(la, others())[:3]
    assert_close(found, torch.tensor(expected, dtype=torch.float64), "backend")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_nothing, [0.4783382763834676, 0.49176883878692745, 0.26292044747083326]),
        (_noise_too, [2.055586164750386, 1.8591631150583905, 1.1061755806270481]),
    ],
)
def test_scores_of_a_regression_have_the_noise_that_was_tuned(change: Any, expected: list[float]) -> None:
    torch.manual_seed(3)
    x = torch.randn(50, 4).double()
    y = torch.stack([x.sum(1), x[:, 0]], 1) + 0.1 * torch.randn(50, 2).double()
    la = Laplace(net(2), "regression", "all", "kron", sigma_noise=0.5)
    la.fit([(x, y)])
    change(la)
    found = laplace.ood_score(la, others())[:3]
    assert_close(found, torch.tensor(expected, dtype=torch.float64), "backend")


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_a_score_leaves_the_posterior_as_it_is(weights: str) -> None:
    la, (x, y) = fitted(weights, "kron"), data()
    before, data_before, state = la.snapshot(), la.snapshot().data, la.state_dict()
    laplace.ood_score(la, others(), ALL, train_loader=[(x, y)])
    assert la.snapshot().data is data_before and la.snapshot().hypers is before.hypers
    assert la.state_dict().keys() == state.keys()


def test_a_scorer_searches_once_and_is_of_the_posterior_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    la, (x, y) = fitted("all", "kron"), data()
    expected = laplace.ood_score(la, others(), ALL, train_loader=[(x, y)])
    batches = iter([(x[:20], y[:20]), (x[20:], y[20:])])
    scorer = laplace.ood_scorer(la, ALL, train_loader=batches)
    monkeypatch.setattr(ood, "Search", None)
    la.prior_precision = 9.0
    la.fit([(x + 1, y)])
    for name, values in scorer(others()).items():
        assert_close(values, expected[name], "backend", label=name)
    assert "prior_precision=" in repr(scorer) and "'confidence'" in repr(scorer)
    parts = scorer([others()[:4], others()[4:]])["energy"]
    assert_close(laplace.ood_scorer(la, "energy")(others()), parts, "backend")
    la.model[0].weight.data += 1
    with pytest.raises(ModelChangedError):
        scorer(others())


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_a_scorer_can_be_copied(weights: str) -> None:
    la, (x, y) = fitted(weights, "kron"), data()
    scorer = laplace.ood_scorer(la, ALL, train_loader=[(x, y)])
    expected = scorer(others())
    for other in (copy.deepcopy(scorer), pickle.loads(pickle.dumps(scorer))):
        for name, values in other(others()).items():
            assert_close(values, expected[name], "algebra", label=name)


def test_a_value_and_the_object_have_the_same_scores() -> None:
    la = fitted("all", "kron")
    assert torch.equal(laplace.ood_score(la, others()), laplace.ood_score(la.snapshot(), others()))
    mixture = MixtureLaplace([la, fitted("last_layer", "full")])
    assert torch.equal(laplace.ood_score(mixture, others()), laplace.ood_score(mixture.snapshot(), others()))


def test_a_refined_posterior_ranks_by_its_own_mean() -> None:
    la, (x, y) = fitted("all", "full"), data()
    la.refine([(x, y)])
    found = laplace.ood_score(la, others(), ["network", "confidence"])
    wide = copy.deepcopy(la)
    wide.optimize_hyperparameters()
    mean, covariance = wide.predictive_moments(others())
    assert_close(found["confidence"], reference.doubt(predictive.probit(mean, covariance)), "backend")
    assert_close(found["network"], reference.doubt(net()(others()).detach().softmax(1)), "algebra")


def test_an_assigned_covariance_is_taken_as_it_is() -> None:
    la = fitted("all", "diag")
    la.posterior_scale = 0.3 * torch.ones(la.n_params, dtype=torch.float64)
    mean, covariance = la.predictive_moments(others())
    assert_close(laplace.ood_score(la, others()), reference.doubt(predictive.probit(mean, covariance)), "algebra")


# States.


@pytest.mark.filterwarnings("ignore:temperature changes")
def test_a_posterior_that_was_saved_or_copied_has_the_same_scores(tmp_path: Path) -> None:
    la, (x, y) = fitted("last_layer", "kron"), data()
    la.optimize_prior_precision(prior_structure="layerwise")
    la.calibrate([(x + 0.1, y)])
    scores = laplace.ood_score(la, others(), ALL, train_loader=[(x, y)])
    la.save(tmp_path / "la.safetensors")
    loaded = laplace.load(tmp_path / "la.safetensors", net())
    fresh = Laplace(net(), "classification", "last_layer", "kron")
    fresh.load_state_dict(la.state_dict())
    moved = copy.deepcopy(la).to(dtype=torch.float64)
    for other in (loaded, fresh, copy.deepcopy(la), pickle.loads(pickle.dumps(la)), moved):
        for name, values in laplace.ood_score(other, others(), ALL, train_loader=[(x, y)]).items():
            assert_close(values, scores[name], "algebra", label=name)


def test_entries_of_former_states_for_scores_are_not_read() -> None:
    """States once held what the evidence chose last, and statistics of the features: whatever they are, they load."""
    la, (x, y) = fitted("all", "kron"), data()
    la.optimize_prior_precision()
    la.calibrate([(x + 0.1, y)])
    state = la.state_dict()
    assert not {"by_evidence", "features"} & state.keys()
    state["by_evidence"] = {name: torch.full((1,), 5.0).double() for name in ("prior_precision", "sigma_noise")}
    state["features"] = {"layer": "2", "counts": torch.ones(3).double(), "by_class": []}
    other = fitted("all", "kron")
    other.load_state_dict(state)
    assert torch.equal(other(others()), la(others()))
    assert_close(laplace.ood_score(other, others()), laplace.ood_score(la, others()), "algebra")


# Batches, layouts, and the network.


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_scores_do_not_depend_on_batches(weights: str) -> None:
    la, (train, y), x = fitted(weights, "kron"), data(), others(9)
    scorer = laplace.ood_scorer(la, ALL, train_loader=[(train, y)])
    whole = scorer(x)
    for size in (1, 4):
        parts = scorer([(part, None) for part in x.split(size)])
        for name, values in whole.items():
            assert_close(parts[name], values, "backend", label=name)
    assert torch.equal(laplace.ood_score(la, x, "energy"), whole["energy"])
    assert torch.equal(laplace.ood_score(la, x), whole["confidence"])
    other = laplace.ood_score(la, x, "mutual_information", generator=torch.Generator().manual_seed(5))
    assert not torch.equal(other, whole["mutual_information"])


def test_few_inputs_at_once_where_covariances_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    la, x = fitted("all", "full"), others(9)
    whole = laplace.ood_score(la, x, ["mutual_information", "latent_variance"], n_samples=7)
    monkeypatch.setattr(ood, "_ENTRIES", 2 * 3 * 7)
    sizes: list[int] = []
    handle = la.model.register_forward_hook(lambda _, args, __: sizes.append(len(args[0])))
    parts = laplace.ood_score(la, [x[:5], x[5:]], ["mutual_information", "latent_variance"], n_samples=7)
    handle.remove()
    assert max(sizes) == 2
    for name, values in whole.items():
        assert_close(parts[name], values, "backend", label=name)


@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_all_scores_take_one_pass_and_leave_the_network(weights: str) -> None:
    la, (train, y) = fitted(weights, "kron"), data()
    network = la.model.model if weights == "last_layer" else la.model
    network.train()
    before = copy.deepcopy(network.state_dict())
    scorer = laplace.ood_scorer(la, ALL, train_loader=[(train, y)])
    passes: list[int] = []
    handle = network[0].register_forward_hook(lambda *_: passes.append(1))
    scorer(others())
    handle.remove()
    assert len(passes) == 1
    assert network.training and all(torch.equal(before[key], value) for key, value in network.state_dict().items())


def test_outputs_with_positions_have_a_score_for_each() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(8, 5, 3).double(), torch.randint(3, (8, 5))
    la = Laplace(model, "classification", "all", "kron")
    la.fit([(x, y)])
    found = laplace.ood_score(la, x, OF_OUTPUTS)
    rows = Laplace(model, "classification", "all", "kron")
    rows.fit([(x, y)])
    assert {name: list(values.shape) for name, values in found.items()} == {name: [8, 5] for name in OF_OUTPUTS}
    assert_close(found["energy"], -model(x).logsumexp(2).detach(), "algebra")
    with pytest.raises(UnsupportedError, match="last layer"):
        laplace.ood_score(la, x, "mahalanobis", train_loader=[(x, y)])


def test_mappings_and_other_forward_functions() -> None:
    model, (x, y) = net(), data()
    la = Laplace(
        model,
        "classification",
        "all",
        "kron",
        forward_fn=lambda m, batch: m(batch["x"]),
        dict_key_y="y",
        dict_key_x="x",
    )
    la.fit([{"x": x, "y": y}])
    found = laplace.ood_score(la, {"x": others()}, ALL, train_loader=[{"x": x, "y": y}])
    plain = laplace.ood_score(fitted("all", "kron"), others(), ALL, train_loader=[(x, y)])
    for name, values in plain.items():
        assert_close(found[name], values, "backend", label=name)


def test_a_frozen_last_layer_shows_its_features_by_a_pass_of_its_own() -> None:
    model, (x, y) = net(), data()
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    la = Laplace(model, "classification", "all", "full")
    la.fit([(x, y)])
    found = laplace.ood_score(la, others(), ["confidence", "mahalanobis"], train_loader=[(x, y)])
    inside, at = features(la, x), features(la, others())
    assert_close(found["mahalanobis"], reference.mahalanobis(inside, y, at, classwise=False), "backend")


# Mixtures.


def test_a_mixture_is_scored_as_one_prediction() -> None:
    (x, y), star = data(), others()
    parts = [fitted("all", "kron"), fitted("last_layer", "full")]
    parts[1].model.model[0].weight.data += 0.3
    parts[1].fit([(x, y)])
    mixture = MixtureLaplace(parts, weights=torch.tensor([0.25, 0.75]))
    found = laplace.ood_score(mixture, star, ALL, train_loader=[(x, y)])
    mixture.optimize_hyperparameters()
    prediction = mixture.predict(star)
    assert_close(found["confidence"], reference.doubt(prediction.mean), "backend")
    assert_close(found["entropy"], prediction.entropy, "backend")
    assert_close(found["latent_variance"], prediction.latent_variance.sum(1), "backend")
    networks = [net(), parts[1].model.model]
    mixed = 0.25 * networks[0](star).softmax(1) + 0.75 * networks[1](star).softmax(1)
    assert_close(found["network"], reference.doubt(mixed.detach()), "algebra")
    distances = [laplace.ood_score(part, star, "mahalanobis", train_loader=[(x, y)]) for part in parts]
    assert_close(found["mahalanobis"], 0.25 * distances[0] + 0.75 * distances[1], "algebra")


def test_a_mixture_takes_what_its_parts_were_tuned_to() -> None:
    parts = [fitted("all", "diag"), fitted("all", "kron")]
    for part in parts:
        part.optimize_prior_precision()
    ranked = laplace.ood_scorer(MixtureLaplace(parts)).group.posteriors
    for part, posterior in zip(parts, ranked, strict=True):
        assert torch.equal(posterior.hypers.prior_precision, part.prior_precision)
    parts[1].prior_precision = 50.0  # which has less evidence than one for both
    one, other = laplace.ood_scorer(MixtureLaplace(parts)).group.posteriors
    assert torch.equal(one.hypers.prior_precision, other.hypers.prior_precision)
    assert float(parts[1].prior_precision) == 50


# Errors.


def test_bad_input_is_refused() -> None:
    la, (x, y), star = fitted(), data(), others()
    wrong: list[tuple[type[Exception], str, Any]] = [
        (InvalidArgument, "accepted are 'network'", lambda: laplace.ood_score(la, star, "softmax")),
        (InvalidArgument, "accepted are", lambda: laplace.ood_score(la, star, [])),
        (InvalidArgument, "accepted are", lambda: laplace.ood_score(la, star, 3)),
        (InvalidArgument, "give train_loader=", lambda: laplace.ood_score(la, star, "mahalanobis")),
        (InvalidArgument, "leave it out", lambda: laplace.ood_score(la, star, "confidence", train_loader=[(x, y)])),
        (InvalidArgument, "n_samples", lambda: laplace.ood_score(la, star, n_samples=0)),
        (InvalidData, "no data", lambda: laplace.ood_score(la, star, "mahalanobis", train_loader=[])),
        (InvalidData, "no inputs", lambda: laplace.ood_score(la, [])),
        (InvalidType, "x=None; give a tensor", lambda: laplace.ood_score(la, None)),
        (InvalidType, "x=3; give a tensor", lambda: laplace.ood_score(la, 3)),
        (InvalidData, "NaN", lambda: laplace.ood_score(la, star / 0, "energy")),
        (InvalidData, "NaN", lambda: laplace.ood_score(la, star / 0)),
        (InvalidData, "same", lambda: laplace.ood_score(la, star, "mahalanobis", train_loader=[(0 * x, y)])),
        (InvalidType, "fitted posterior", lambda: laplace.ood_score(3, star)),  # type: ignore[call-overload]
        (NotFittedError, "fit", lambda: laplace.ood_score(Laplace(net(), "classification", "all", "kron"), star)),
    ]
    for kind, words, call in wrong:
        before = la.snapshot().require_fitted()
        with pytest.raises(kind, match=words):
            call()
        assert la.snapshot().require_fitted() is before
    la.model[0].weight.data += 1
    with pytest.raises(ModelChangedError):
        laplace.ood_score(la, star)


def test_a_class_with_predictions_of_its_own_is_refused() -> None:
    class Mine(laplace.KronLaplace):
        def __call__(self, x: Any, *args: Any, **options: Any) -> Any:
            return torch.full((len(x), 3), 1 / 3)

    la = Mine(net(), "classification")
    la.fit([data()])
    with pytest.raises(UnsupportedError, match="__call__"):
        laplace.ood_score(la, others())
