"""Estimators of scikit-learn, in its own checks and tools."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("sklearn")

import joblib
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_diabetes, load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from laplace import Laplace
from laplace.errors import InvalidArgument, TuningWarning
from laplace.integrations.decision import decision
from laplace.integrations.sklearn import DecisionHead, LaplaceClassifier, LaplaceRegressor

pytestmark = pytest.mark.filterwarnings("ignore::laplace.errors.CalibrationWarning")  # clean data, tuned by evidence

ESTIMATORS = [LaplaceClassifier, LaplaceRegressor]
FLOWERS, SPECIES = load_iris(return_X_y=True)
PATIENTS, PROGRESS = load_diabetes(return_X_y=True)


@pytest.mark.nightly  # those of a decision head, below, take a third of the time
@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.filterwarnings("ignore")  # of what the checks do on purpose
def test_all_checks_of_scikit_learn_pass(kind: type) -> None:
    results = check_estimator(kind(max_epochs=20), on_fail=None, on_skip=None)
    assert [result["check_name"] for result in results if result["status"] == "failed"] == []
    assert sum(result["status"] == "passed" for result in results) >= 50


@pytest.fixture(scope="module")
def classifier() -> LaplaceClassifier:
    return LaplaceClassifier(max_epochs=30, random_state=0).fit(FLOWERS, SPECIES)


@pytest.fixture(scope="module")
def regressor() -> LaplaceRegressor:
    return LaplaceRegressor(max_epochs=50, prior_precision=10.0, random_state=0).fit(PATIENTS, PROGRESS)


def test_probabilities_are_those_of_the_posterior(classifier: LaplaceClassifier) -> None:
    expected = classifier.la_(torch.tensor(FLOWERS[:9])).numpy()
    np.testing.assert_allclose(classifier.predict_proba(FLOWERS[:9]), expected, rtol=1e-10)
    assert classifier.score(FLOWERS, SPECIES) > 0.9
    assert classifier.log_marginal_likelihood() == classifier.la_.log_marginal_likelihood().item()


def test_labels_may_be_anything(classifier: LaplaceClassifier) -> None:
    names = np.array(["setosa", "versicolor", "virginica"])
    named = clone(classifier).fit(FLOWERS, names[SPECIES])
    assert named.classes_.tolist() == names.tolist()
    assert np.array_equal(named.predict(FLOWERS), names[classifier.predict(FLOWERS)])


def test_sampled_links_repeat_themselves(classifier: LaplaceClassifier) -> None:
    sampled = clone(classifier).set_params(link_approx="mc", n_samples=7).fit(FLOWERS, SPECIES)
    assert np.array_equal(sampled.predict_proba(FLOWERS), sampled.predict_proba(FLOWERS))


def test_equal_seeds_give_equal_fits_and_leave_the_global_state(classifier: LaplaceClassifier) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    again = clone(classifier).fit(FLOWERS, SPECIES)
    assert torch.equal(torch.rand(2), expected)
    assert np.array_equal(again.predict_proba(FLOWERS), classifier.predict_proba(FLOWERS))


def test_deviations_covariances_and_draws_agree(regressor: LaplaceRegressor) -> None:
    x = PATIENTS[:5]
    mean, std = regressor.predict(x, return_std=True)
    again, covariance = regressor.predict(x, return_cov=True)
    np.testing.assert_allclose(again, mean)
    np.testing.assert_allclose(np.sqrt(covariance.diagonal()), std)
    draws = regressor.sample_y(x, 20_000)
    assert draws.shape == (5, 20_000)
    assert np.abs(draws.mean(1) - mean).max() < 5 * std.max() / np.sqrt(20_000)
    error = np.abs(np.cov(draws) - covariance) / np.sqrt(np.outer(std**2, std**2) * 2 / 20_000)
    assert error.max() < 5
    assert np.array_equal(regressor.sample_y(x, 3, random_state=1), regressor.sample_y(x, 3, random_state=1))


def test_predictions_have_the_units_of_the_targets(regressor: LaplaceRegressor) -> None:
    other = clone(regressor).fit(PATIENTS, 1000 * PROGRESS - 7)
    mean, std = regressor.predict(PATIENTS, return_std=True)
    there, wide = other.predict(PATIENTS, return_std=True)
    np.testing.assert_allclose(there, 1000 * mean - 7, rtol=1e-6)
    np.testing.assert_allclose(wide, 1000 * std, rtol=1e-6)


@pytest.mark.parametrize("structure", ["kron", "lowrank"])  # one reading of the data, and several
@pytest.mark.parametrize("batch_size", [40, 128])
def test_weights_of_data_are_those_of_repeated_data(structure: str, batch_size: int) -> None:
    counts = np.arange(150) % 4
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    estimator = LaplaceClassifier(
        module, trained=True, batch_size=batch_size, subset_of_weights="all", hessian_structure=structure
    )
    weighted = clone(estimator).set_params(module=module).fit(FLOWERS, SPECIES, counts)
    repeated = clone(estimator).set_params(module=module).fit(FLOWERS.repeat(counts, 0), SPECIES.repeat(counts))
    assert weighted.la_.n_data == repeated.la_.n_data == counts.sum()
    np.testing.assert_allclose(weighted.log_marginal_likelihood(), repeated.log_marginal_likelihood(), rtol=1e-6)
    np.testing.assert_allclose(weighted.predict_proba(FLOWERS), repeated.predict_proba(FLOWERS), rtol=1e-4)


def test_weights_of_data_train_the_network(regressor: LaplaceRegressor) -> None:
    """In one batch the steps of training are those of repeated data; weights are of y in its own units."""
    counts = np.arange(60) % 3
    x, y = PATIENTS[:60], PROGRESS[:60]
    weighted = clone(regressor).fit(x, y, counts)
    repeated = clone(regressor).fit(x.repeat(counts, 0), y.repeat(counts))
    for ours, theirs in zip(weighted.predict(x, True), repeated.predict(x, True), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    np.testing.assert_allclose(weighted.log_marginal_likelihood(), repeated.log_marginal_likelihood(), rtol=1e-8)
    assert np.array_equal(weighted.y_mean_, np.average(y, axis=0, weights=counts, keepdims=True))


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf, np.ones(3), np.zeros(150)])
def test_wrong_weights_of_data_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="150 finite ones of at least 0"):
        LaplaceClassifier(max_epochs=1).fit(FLOWERS, SPECIES, wrong)


def test_several_outputs(regressor: LaplaceRegressor) -> None:
    """One noise serves outputs that are fitted unlike well, unless there is one of each."""
    values = np.stack([PROGRESS, -PROGRESS, 0 * PROGRESS], 1)
    with pytest.warns(TuningWarning, match=r"one noise serves 3 outputs .*=torch.ones\(3\)"):
        clone(regressor).fit(PATIENTS, values)
    noises = {"sigma_noise": torch.ones(3, dtype=torch.float64)}
    both = clone(regressor).set_params(laplace_options=noises).fit(PATIENTS, values)
    mean, std = both.predict(PATIENTS[:4], return_std=True)
    _, covariance = both.predict(PATIENTS[:4], return_cov=True)
    assert mean.shape == std.shape == (4, 3) and covariance.shape == (4, 4, 3)
    np.testing.assert_allclose(np.sqrt(np.einsum("iic->ic", covariance)), std)
    assert both.sample_y(PATIENTS[:4], 6).shape == (4, 3, 6)


def test_tools_of_scikit_learn(classifier: LaplaceClassifier, regressor: LaplaceRegressor) -> None:
    small = LaplaceClassifier(max_epochs=5)
    pipeline = make_pipeline(StandardScaler(), small)
    assert len(cross_val_score(pipeline, FLOWERS, SPECIES, cv=2)) == 2
    fixed = clone(small).set_params(tune=None)
    choices = {"prior_precision": [1e-2, 1.0, 1e4], "hessian_structure": ["kron", "diag"]}
    search = GridSearchCV(fixed, choices, cv=2, scoring="neg_log_loss").fit(FLOWERS, SPECIES)
    assert search.best_params_["prior_precision"] < 1e4  # with which nothing is learnt
    assert search.best_estimator_.la_.structure.name == search.best_params_["hessian_structure"]
    calibrated = CalibratedClassifierCV(small, cv=2).fit(FLOWERS, SPECIES)
    assert calibrated.predict_proba(FLOWERS).shape == (150, 3)
    for fitted, x in ((classifier, FLOWERS), (regressor, PATIENTS)):
        assert np.array_equal(pickle.loads(pickle.dumps(fitted)).predict(x), fitted.predict(x))


@pytest.mark.nightly
def test_files_and_processes_of_joblib(classifier: LaplaceClassifier, tmp_path: Path) -> None:
    joblib.dump(classifier, tmp_path / "classifier.joblib")
    loaded = joblib.load(tmp_path / "classifier.joblib")
    expected = classifier.predict_proba(FLOWERS)
    assert np.array_equal(loaded.predict_proba(FLOWERS), expected)
    with joblib.parallel_config(n_jobs=2):
        there = joblib.Parallel()(joblib.delayed(loaded.predict_proba)(part) for part in (FLOWERS[:75], FLOWERS[75:]))
        scores = cross_val_score(LaplaceClassifier(max_epochs=1, random_state=0), FLOWERS, SPECIES, cv=2)
    joblib.externals.loky.get_reusable_executor().shutdown()
    np.testing.assert_allclose(np.concatenate(there), expected, rtol=1e-10)
    assert np.array_equal(
        scores, cross_val_score(LaplaceClassifier(max_epochs=1, random_state=0), FLOWERS, SPECIES, cv=2)
    )


def test_frames_have_names(classifier: LaplaceClassifier, regressor: LaplaceRegressor) -> None:
    pandas = pytest.importorskip("pandas")
    flowers, species = load_iris(return_X_y=True, as_frame=True)
    named = clone(classifier).fit(flowers, species)
    assert named.feature_names_in_.tolist() == list(flowers.columns)
    assert np.array_equal(named.predict_proba(flowers), classifier.predict_proba(FLOWERS))
    with pytest.raises(ValueError, match="same order"):
        named.predict(flowers[flowers.columns[::-1]])
    words = pandas.Series(["a", "b", "c"], dtype="category")[SPECIES]
    assert clone(classifier).set_params(max_epochs=1).fit(flowers, words).classes_.tolist() == ["a", "b", "c"]
    both = pandas.DataFrame({"up": PROGRESS, "down": -PROGRESS})
    assert clone(regressor).set_params(max_epochs=1).fit(PATIENTS, both).predict(PATIENTS[:4]).shape == (4, 2)


@pytest.mark.parametrize("prefit", [False, True])
def test_conformal_sets_and_intervals_of_mapie(prefit: bool) -> None:
    mapie = pytest.importorskip("mapie.classification"), pytest.importorskip("mapie.regression")
    order = np.random.default_rng(0).permutation(150)
    train, held, test = order[:50], order[50:100], order[100:]
    classify = LaplaceClassifier(max_epochs=10, random_state=0)
    sets = mapie[0].SplitConformalClassifier(
        classify.fit(FLOWERS[train], SPECIES[train]) if prefit else classify, confidence_level=0.9, prefit=prefit
    )
    sets = sets if prefit else sets.fit(FLOWERS[train], SPECIES[train])
    _, members = sets.conformalize(FLOWERS[held], SPECIES[held]).predict_set(FLOWERS[test])
    assert members[np.arange(50), SPECIES[test], 0].mean() > 0.7

    regress = LaplaceRegressor(max_epochs=20, prior_precision=10.0, random_state=0)
    train, held, test = np.split(np.random.default_rng(0).permutation(441), 3)
    bands = mapie[1].SplitConformalRegressor(
        regress.fit(PATIENTS[train], PROGRESS[train]) if prefit else regress, confidence_level=0.9, prefit=prefit
    )
    bands = bands if prefit else bands.fit(PATIENTS[train], PROGRESS[train])
    _, ends = bands.conformalize(PATIENTS[held], PROGRESS[held]).predict_interval(PATIENTS[test])
    assert 0.7 < ((ends[:, 0, 0] <= PROGRESS[test]) & (PROGRESS[test] <= ends[:, 1, 0])).mean() < 1


def network(n_features: int, n_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(n_features, 8), nn.ReLU(), nn.Linear(8, n_outputs))


def test_a_function_that_makes_the_network() -> None:
    fitted = LaplaceClassifier(network, max_epochs=3, random_state=0).fit(FLOWERS, SPECIES)
    assert isinstance(fitted.module_[0], nn.Linear)
    assert fitted.predict_proba(FLOWERS).sum(1) == pytest.approx(1)


def test_a_network_that_is_trained_is_used_as_it_is() -> None:
    model = network(4, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fitted = LaplaceClassifier(model, trained=True, tune=None, prior_precision=2.0).fit(FLOWERS, SPECIES)
    assert fitted.module_ is model and model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    la = Laplace(model, "classification", prior_precision=2.0)
    x = torch.tensor(FLOWERS, dtype=torch.float32)
    la.fit([(x, torch.tensor(SPECIES))])
    np.testing.assert_allclose(fitted.predict_proba(FLOWERS), la(x).numpy(), rtol=1e-4)
    trained = LaplaceClassifier(model, max_epochs=2).fit(FLOWERS, SPECIES)
    assert trained.module_ is not model
    assert torch.equal(model[0].weight, before["0.weight"])


def test_one_width_is_one_layer() -> None:
    fitted = LaplaceRegressor(hidden_layer_sizes=7, max_epochs=1).fit(PATIENTS, PROGRESS)
    assert [layer.out_features for layer in fitted.module_ if isinstance(layer, nn.Linear)] == [7, 1]


def test_wrong_arguments_stop_before_training() -> None:
    with pytest.raises(InvalidArgument, match="kronn"):
        LaplaceClassifier(hessian_structure="kronn", max_epochs=10**9).fit(FLOWERS, SPECIES)


def test_images_reach_a_network_as_they_are() -> None:
    images = np.random.default_rng(0).normal(size=(20, 1, 4, 4))
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    fitted = LaplaceClassifier(model, max_epochs=2).fit(images, np.arange(20) % 2)
    assert fitted.predict_proba(images).shape == (20, 2)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: LaplaceClassifier().fit(FLOWERS, 0 * SPECIES), "one class alone"),
    (lambda: LaplaceClassifier(tune="evidence").fit(FLOWERS, SPECIES), "tune='evidence'"),
    (lambda: LaplaceClassifier(max_epochs=-1).fit(FLOWERS, SPECIES), "max_epochs=-1"),
    (lambda: LaplaceClassifier(trained=True).fit(FLOWERS, SPECIES), "needs module="),
    (lambda: LaplaceClassifier("mlp").fit(FLOWERS, SPECIES), "module='mlp'; give a network"),
    (lambda: LaplaceClassifier(network(4, 5)).fit(FLOWERS, SPECIES), "y asks for 3 outputs"),
    (lambda: LaplaceClassifier(network(4, 5), trained=True).fit(FLOWERS, SPECIES), "y asks for 3 outputs"),
    (lambda: LaplaceRegressor(network(10, 2)).fit(PATIENTS, PROGRESS), r"shape \[2, 2\]; y asks for 1"),
])  # fmt: skip
def test_mistakes_are_named(make: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_one_of_deviation_and_covariance(regressor: LaplaceRegressor) -> None:
    with pytest.raises(InvalidArgument, match="ask for one"):
        regressor.predict(PATIENTS, return_std=True, return_cov=True)


def test_a_constant_feature_stays_small_where_it_is_new_by_a_digit() -> None:
    constant = np.column_stack([PATIENTS[:60], np.full(60, 0.1)])
    assert 0 < constant.std(0)[-1] < 1e-15  # not zero, by rounding
    fitted = LaplaceRegressor(hidden_layer_sizes=(8,), max_epochs=3, random_state=0).fit(constant, PROGRESS[:60])
    moved = constant + 1e-7 * np.eye(11)[10]
    np.testing.assert_allclose(fitted.predict(moved), fitted.predict(constant), atol=1e-3)
    same = LaplaceRegressor(hidden_layer_sizes=(8,), max_epochs=3, tune=None).fit(PATIENTS[:60], np.full(60, 0.1))
    assert same.y_scale_ == 1


def test_the_evidence_is_of_targets_in_their_own_units() -> None:
    make = LaplaceRegressor(hidden_layer_sizes=(8,), max_epochs=3, random_state=0)
    once, tenfold = (
        clone(make).fit(PATIENTS[:60], scale * PROGRESS[:60]).log_marginal_likelihood() for scale in (1, 10)
    )
    np.testing.assert_allclose(tenfold, once - 60 * np.log(10), rtol=1e-6)


# Decision heads.


@pytest.mark.filterwarnings("ignore")  # of what the checks do on purpose
def test_a_decision_head_passes_all_checks_of_scikit_learn() -> None:
    results = check_estimator(DecisionHead(), on_fail=None, on_skip=None)
    assert [result["check_name"] for result in results if result["status"] == "failed"] == []
    assert sum(result["status"] == "passed" for result in results) >= 50


def test_a_decision_head_is_the_decision_on_features() -> None:
    few = np.random.default_rng(0).permutation(len(SPECIES))[:60]
    names = np.array(["setosa", "versicolor", "virginica"])[SPECIES]
    head = DecisionHead().fit(FLOWERS[few], names[few])
    expected = decision(None, None, sorted(set(names))).fit(FLOWERS[few], names[few])(FLOWERS)
    np.testing.assert_allclose(head.predict_proba(FLOWERS), expected.numpy(), rtol=1e-10)
    assert head.score(FLOWERS, names) > 0.9 and head.la_.n_params == 15
    even = clone(head).set_params(class_weight="balanced").fit(FLOWERS[:80], names[:80])
    assert even.head_.class_weight == pytest.approx((0.8, 80 / 60))
    assert len(pickle.loads(pickle.dumps(head)).predict(FLOWERS)) == len(FLOWERS)


@pytest.mark.parametrize("weights", [{0: -1.0}, {0: math.nan}, {0: 0.0, 1: 0.0}])
def test_decision_heads_refuse_weights_that_are_none(weights: dict[int, float]) -> None:
    with pytest.raises(InvalidArgument, match="class_weight gives"):
        DecisionHead(class_weight=weights).fit([[0.0], [1.0], [2.0]], [0, 1, 1])
