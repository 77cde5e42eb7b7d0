"""`la.predict`: every quantity against `la(x)` and the dense truth, computed when it is read and not before."""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
import typing
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, Dirichlet, MultivariateNormal, Normal

from laplace import BaseLaplace, KronLaplace, Laplace, ParametricLaplace, Prediction
from laplace.enums import LinkApprox
from laplace.errors import GradientWarning, InvalidArgument, LaplaceError, ModelChangedError, UnsupportedError
from laplace.likelihoods import get_likelihood
from laplace.structures.base import Curvature
from tests import grid
from tests.conformance.cases import Case, few, truth
from tests.reference import predictive as reference
from tests.reference.compare import assert_close

pytestmark = [
    pytest.mark.portable,
    pytest.mark.filterwarnings("ignore::laplace.errors.ApproximationWarning"),
]


def fitted(likelihood: str, **options: Any) -> tuple[ParametricLaplace, Any]:
    la = Laplace(grid.network(likelihood), likelihood, "all", "kron", **options)
    la.fit(grid.batches(likelihood))
    return la, grid.data(likelihood)[0]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("likelihood", grid.LIKELIHOODS)
@pytest.mark.parametrize("pred_type", ["glm", "nn"])
@pytest.mark.parametrize("link", LinkApprox)
def test_agrees_with_calling(likelihood: str, pred_type: str, link: LinkApprox) -> None:
    """Bit by bit: `la(x)` reads the same object."""
    la, x = fitted(likelihood)
    accepted = get_likelihood(likelihood).links
    if accepted and link not in accepted and pred_type == "glm":
        with pytest.raises(UnsupportedError):
            _ = la.predict(x, link_approx=link).mean
        return
    options = {"pred_type": pred_type, "link_approx": link, "n_samples": 20}
    found = la.predict(x, generator=seeded(), **options)
    called = la(x, generator=seeded(), fitting=True, **options)
    expected = called[0] if isinstance(called, tuple) else called
    # Samples have a mean; that of the linearised network costs a forward pass of its own.
    assert_close(found.mean, expected, "float32" if isinstance(called, tuple) else "exact")
    if get_likelihood(likelihood).moment_prediction:
        assert_close(found.variance, called[1], "exact")
    elif isinstance(called, tuple) and pred_type == "glm":
        assert torch.equal(found.latent_covariance, called[1])


@pytest.mark.parametrize("case", few("all", "last_layer", names=["mlp_classification", "mlp_bernoulli_multi"]))
def test_delta_link(case: Case) -> None:
    from tests.reference.decomposition import delta

    la = case.fit(prior_precision=40.0)
    link = "softmax" if case.problem.likelihood == "classification" else "sigmoid"
    covariance = torch.linalg.inv(la.evidence().precision.to_dense())
    variance = reference.functional_variance(case.jacobian, covariance)
    expected = delta(truth(case.problem.name).f, variance, link)
    assert_close(la(case.problem.x, link_approx="delta"), expected, "backend")


class Counting:
    """Counts the Jacobians that an engine computes."""

    def __init__(self, la: ParametricLaplace, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("jacobian", "jacobian_by_outputs"):
            monkeypatch.setattr(la.engine, name, self._counted(getattr(la.engine, name)))

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def jacobian(*args: Any, **options: Any) -> Any:
            self.count += 1
            return original(*args, **options)

        return jacobian


def test_a_mean_pays_for_no_covariance(monkeypatch: pytest.MonkeyPatch) -> None:
    la, x = fitted("regression")
    counted = Counting(la, monkeypatch)
    prediction = la.predict(x)
    assert prediction.mean.shape == (12, 3)
    assert counted.count == 0
    assert prediction.latent_variance.shape == (12, 3)
    assert "latent" not in vars(prediction)  # variances alone, no [B, C, C]
    assert counted.count == 1
    _ = prediction.variance, prediction.interval(), prediction.latent_mean
    assert counted.count == 1
    assert prediction.latent_covariance.shape == (12, 3, 3)
    _ = prediction.decomposition, prediction.distribution()
    assert counted.count == 2
    _ = prediction.latent_samples, prediction.latent_samples  # of a covariance that was summed in float64
    assert counted.count == 3
    drawn = la.predict(x, link_approx="mc")
    _ = drawn.latent_covariance, drawn.latent_samples
    assert counted.count == 4


def test_repr_is_short_and_computes_nothing() -> None:
    la, x = fitted("classification")
    assert repr(la.predict(x, link_approx="mc", n_samples=7)) == "Prediction(link='mc', n_samples=7, form='full')"
    la, x = fitted("regression")
    assert repr(la.predict(x, joint=True)) == "Prediction(n_samples=100, form='joint')"  # it has no link


def test_regression() -> None:
    sigma = torch.tensor([0.5, 1.0, 2.0])
    la, x = fitted("regression", sigma_noise=sigma)
    for options, kind in (({}, MultivariateNormal), ({"diagonal_output": True}, Normal), ({"joint": True}, None)):
        found = la.predict(x, **options)
        mean, noisy = la(x, observation_noise=True, **options)
        distribution = found.distribution()
        assert isinstance(distribution, kind or MultivariateNormal)
        assert_close(distribution.mean, mean, "float32")
        spread = distribution.variance if kind is Normal else distribution.covariance_matrix
        assert_close(spread, noisy, "float32")
        assert_close(found.variance, la(x, diagonal_output=True, observation_noise=True)[1], "float32")
        assert_close(found.decomposition.total, found.variance, "float32")
        assert_close(found.decomposition.aleatoric, sigma.square().expand(12, 3), "float32")
    lower, upper = found.interval(0.9)
    assert_close(upper - found.mean, 1.6448536 * found.std, "float32")
    assert_close(found.std.square(), found.variance, "float32")
    assert_close(found.mean - lower, upper - found.mean, "float32")
    assert (found.interval(0.9, observation_noise=False)[1] < upper).all()
    assert_close(la.predict(x).distribution("latent").covariance_matrix, la(x)[1], "float32")
    with pytest.raises(UnsupportedError, match="probabilities"):
        _ = found.probabilities
    with pytest.raises(UnsupportedError, match="meaning"):
        found.distribution("probabilities")


def test_classification() -> None:
    la, x = fitted("classification")
    found = la.predict(x, n_samples=3000, generator=seeded())
    assert isinstance(found.distribution(), Categorical)
    assert_close(found.distribution().probs, found.probabilities, "float32")
    assert_close(found.entropy, found.distribution().entropy(), "float32")
    assert_close(found.variance, found.probabilities * (1 - found.probabilities), "exact")
    assert found.latent_samples.shape == found.probability_samples.shape == (3000, 12, 3)
    sampled = la.predict(x, link_approx="mc", n_samples=3000, generator=seeded())
    assert_close(sampled.decomposition.total, sampled.variance, "float32")
    assert_close(sampled.decomposition.predictive_entropy, sampled.entropy, "float32")
    lower, upper = found.interval(0.8)
    inside = (found.probability_samples >= lower) & (found.probability_samples <= upper)
    assert_close(inside.double().mean(0), torch.full((12, 3), 0.8), "mc", standard_error=1e-3)
    with pytest.raises(UnsupportedError, match="bridge"):
        found.distribution("probabilities")


@pytest.mark.parametrize("link", ["bridge", "bridge_norm"])
def test_the_dirichlet_of_the_bridge(link: str) -> None:
    la, x = fitted("classification")
    found = la.predict(x, link_approx=link)
    dirichlet = found.distribution("probabilities")
    assert isinstance(dirichlet, Dirichlet)
    assert_close(dirichlet.mean, found.probabilities, "float32")
    assert_close(found.decomposition.epistemic, dirichlet.variance, "float32")
    assert_close(found.decomposition.total, found.variance, "float32")


def test_bernoulli() -> None:
    la, x = fitted("bernoulli")
    found = la.predict(x)
    assert isinstance(found.distribution(), Bernoulli)
    assert_close(found.distribution().probs, found.probabilities, "exact")
    sampled = la.predict(x, "glm", link_approx="mc", n_samples=40_000, generator=seeded(), diagonal_output=True)
    samples = sampled.probability_samples
    error = 2 * samples.std(0) / 200
    assert_close(found.decomposition.epistemic, samples.var(0), "mc", standard_error=error)
    lower, upper = found.interval(0.9)
    assert_close((samples < lower).double().mean(0), torch.full((12, 3), 0.05), "mc", standard_error=1.1e-3)
    assert_close((samples > upper).double().mean(0), torch.full((12, 3), 0.05), "mc", standard_error=1.1e-3)


def test_sampled_weights() -> None:
    la, x = fitted("regression", sigma_noise=0.5)
    found = la.predict(x, "nn", n_samples=200, generator=seeded())
    samples = la.functional_samples(x, "nn", 200, generator=seeded())
    assert torch.equal(found.latent_samples, samples)
    centred = samples - samples.mean(0)
    assert_close(found.latent_covariance, torch.einsum("sbc,sbd->bcd", centred, centred) / 199, "float32")
    lower, upper = found.interval(observation_noise=False)
    assert_close(upper, samples.quantile(0.975, 0), "float32")
    assert (found.interval()[1] - found.interval()[0] > 0.9 * (upper - lower)).all()
    with pytest.raises(InvalidArgument, match="at least 2"):
        _ = la.predict(x, "nn", n_samples=1).latent_variance


def test_rewards_are_pairs_or_single() -> None:
    la, x = fitted("reward_modeling")
    assert_close(la.predict(x).probabilities, la(x, fitting=True), "exact")
    single = la.predict(x[:, 0])
    assert_close(single.latent_covariance, la(x[:, 0])[1], "exact")
    with pytest.raises(UnsupportedError, match="single rewards"):
        _ = single.probabilities


def test_the_order_of_reading_changes_nothing() -> None:
    la, x = fitted("classification")
    names = ("mean", "latent_samples", "probability_samples")
    readings = []
    for order in (names, names[::-1]):
        prediction = la.predict(x, link_approx="mc", n_samples=5, generator=seeded())
        found = {name: getattr(prediction, name) for name in order}
        readings.append([found[name] for name in names])
    for first, second in zip(*readings, strict=True):
        assert torch.equal(first, second)
    generator = seeded()
    pair = [la.predict(x, link_approx="mc", n_samples=5, generator=generator).mean for _ in range(2)]
    assert not torch.equal(*pair)
    torch.manual_seed(3)
    first = la.predict(x, link_approx="mc").mean
    torch.manual_seed(3)
    assert torch.equal(first, la.predict(x, link_approx="mc").mean)


def test_a_prediction_is_of_the_posterior_of_its_call() -> None:
    la, x = fitted("classification")
    prediction, expected = la.predict(x), la(x)
    la.prior_precision = 100.0
    assert torch.equal(prediction.mean, expected)
    assert not torch.equal(la(x), expected)
    later = la.predict(x)
    with torch.no_grad():
        next(iter(la.model.parameters())).add_(1.0)
    with pytest.raises(ModelChangedError):
        _ = later.mean


def test_gradients_reach_the_inputs() -> None:
    la, x = fitted("classification")
    la.enable_backprop = True
    x = x.clone().requires_grad_()
    with torch.no_grad():  # the reader's mode is not the prediction's
        entropy = la.predict(x).entropy
    entropy.sum().backward()
    assert x.grad is not None and x.grad.abs().max() > 0
    la.enable_backprop = False
    with pytest.warns(GradientWarning, match="enable_backprop"):
        assert not la.predict(x).mean.requires_grad
    la.prior_precision = 2.0
    la(x), la.predict(x).mean, la.predictive_samples(x, n_samples=2)  # told once: wrappers do so in every prediction


@pytest.mark.parametrize("likelihood", ["classification", "regression", "bernoulli"])
def test_a_prediction_converts_to_probabilities_or_means(likelihood: str) -> None:
    """Code that asks for a `predict` hands what it returns to NumPy or PyTorch."""
    la, x = fitted(likelihood)
    prediction = la.predict(x)
    expected = la(x)[0] if likelihood == "regression" else la(x)
    for array in (np.asarray(prediction), np.array(prediction, dtype=np.float64), np.array(prediction, copy=True)):
        assert_close(torch.from_numpy(array), expected, "float32")
    assert np.asarray(prediction, dtype=np.float16).dtype == np.float16
    assert np.asarray(prediction).argmax(-1).tolist() == expected.argmax(-1).tolist()
    assert torch.equal(torch.from_dlpack(prediction), prediction.mean)
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6):  # before, `as_tensor` knows no DLPack
        assert torch.equal(torch.as_tensor(prediction), prediction.mean)
        assert torch.equal(torch.tensor(prediction), prediction.mean)
    la.enable_backprop = True
    with pytest.raises(RuntimeError, match="requires grad"):  # as of any tensor with a graph
        np.asarray(la.predict(x.clone().requires_grad_()))


def test_probly_makes_a_distribution_of_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of the one function of probly that is told of predictions; `make clients` tests probly's own."""

    @functools.singledispatch
    def create_categorical_distribution(data: Any) -> tuple[str, Any]:
        return "categorical", data

    la, x = fitted("classification")
    monkeypatch.delitem(sys.modules, "laplace.integrations.probly", raising=False)
    for name in ("probly", "probly.predictor", "probly.representation", "probly.representation.distribution"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    distribution = sys.modules["probly.representation.distribution"]
    monkeypatch.setattr(distribution, "create_categorical_distribution", create_categorical_distribution, raising=False)
    kind, probabilities = create_categorical_distribution(la.predict(x))
    assert kind == "categorical" and torch.equal(probabilities, la(x))
    # Its own rules for posteriors are of this path, which nothing needs to import.
    assert "laplace.baselaplace.BaseLaplace" in [f"{c.__module__}.{c.__qualname__}" for c in type(la).__mro__]


def test_the_base_class_has_its_source_and_its_annotations_at_the_path_of_other_packages() -> None:
    assert inspect.getsource(BaseLaplace).startswith("class BaseLaplace")
    assert typing.get_type_hints(KronLaplace)["structure"] == type[Curvature]
    assert pickle.loads(pickle.dumps(BaseLaplace)) is BaseLaplace


def test_options_without_meaning_are_refused() -> None:
    la, x = fitted("classification")
    for options in ({"pred_type": "gp"}, {"link_approx": "logit"}, {"n_samples": 0}, {"not_an_option": 1}):
        with pytest.raises(LaplaceError):
            la.predict(x, **options)
    prediction = la.predict(x)
    with pytest.raises(InvalidArgument, match="level"):
        prediction.interval(95)
    with pytest.raises(InvalidArgument, match="latent"):
        prediction.distribution("weights")
    with pytest.raises(AttributeError):
        prediction.options = None
    assert isinstance(prediction, Prediction)


def test_a_joint_prediction_of_one_output_has_the_shape_of_a_joint_one() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2)
    la = Laplace(nn.Linear(2, 1), "regression", "all", "full")
    la.fit([(x, torch.randn(5, 1))])
    for n in (1, 2):
        mean, covariance = la(x[:n], joint=True)
        assert mean.shape == (n,)
        assert covariance.shape == (n, n)
        assert torch.equal(la.predict(x[:n], joint=True).latent_covariance, covariance)
