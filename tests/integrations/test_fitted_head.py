"""Heads on fixed features against dense references: mode, moments, leave-one-out, the stack, and `la`."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace.gp.heads import FLAT, INTERCEPT, POWER, FeatureBasis, softmax_heads
from laplace.integrations import fitted_head
from laplace.integrations.fitted_head import FittedHead
from laplace.tuning.stacked import OF_NUMBERS, SCALES, TEMPERATURES
from tests.reference import decision as reference

WIDE = torch.float64


def data(n: int = 24, n_features: int = 40, n_classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(n, n_features, dtype=WIDE, generator=source) * (1 + torch.arange(n_features)) + 3
    f = x[:, :n_classes] / (1 + torch.arange(n_classes)) + torch.randn(n, n_classes, dtype=WIDE, generator=source)
    return x, f.argmax(1)


def new_inputs(n_features: int = 40) -> Tensor:
    return 5 * torch.randn(6, n_features, dtype=WIDE, generator=torch.Generator().manual_seed(9)) + 3


@pytest.mark.parametrize("n_features", [40, 5])  # more features than data, and fewer
@pytest.mark.parametrize("class_weight", [None, (1.0, 3.0, 0.5)])
def test_moments_are_those_of_the_dense_posterior(n_features: int, class_weight: tuple[float, ...] | None) -> None:
    x, y = data(n_features=n_features)
    counts = torch.ones(len(y), dtype=WIDE) if class_weight is None else torch.tensor(class_weight, dtype=WIDE)[y]
    found = FittedHead.of_classes(x, y, 3, class_weight)
    dense = reference.softmax_head(x, y, 3, found.head.decay, INTERCEPT, counts)
    assert_close(found.moments(new_inputs(n_features)), dense.moments(new_inputs(n_features)), rtol=1e-9, atol=1e-10)
    mean, covariance = reference.without_each(dense, x, y, counts, found.head.decay)
    assert_close(found.left_out_mean, mean, rtol=1e-9, atol=1e-10)
    assert_close(found.left_out_variance, covariance.diagonal(dim1=1, dim2=2), rtol=1e-9, atol=1e-10)


def test_weight_decay_and_stack_are_those_of_the_recipe() -> None:
    x, y = data()
    found, one = FittedHead.of_classes(x, y, 3), torch.ones(len(y), dtype=WIDE)
    scores = {}
    for k in range(8):
        decay = 0.03 * (100 / 0.03) ** (k / 7)
        dense = reference.softmax_head(x, y, 3, decay, INTERCEPT, one)
        mean, _ = reference.without_each(dense, x, y, one, decay)
        scores[decay] = -torch.nn.functional.cross_entropy(mean, y).item()
    assert found.head.decay == pytest.approx(max(scores, key=lambda decay: scores[decay]))
    dense = reference.softmax_head(x, y, 3, found.head.decay, INTERCEPT, one)
    mean, covariance = reference.without_each(dense, x, y, one, found.head.decay)
    variance = covariance.diagonal(dim1=1, dim2=2)
    weights, _ = reference.stacked(mean, variance, y, list(TEMPERATURES), list(SCALES))
    assert_close(found.stacked.weights, weights, rtol=1e-7, atol=1e-9)
    at = dense.moments(new_inputs())
    _, each = reference.stacked(
        at[0], at[1].diagonal(dim1=1, dim2=2), torch.zeros(6).long(), [*TEMPERATURES], [*SCALES]
    )
    assert_close(found.call(new_inputs()), torch.einsum("s,sbk->bk", weights, each), rtol=1e-7, atol=1e-9)


def test_the_head_is_at_the_mode_of_every_weight_decay() -> None:
    x, y = data(n=30, n_features=100)
    found = FittedHead.of_classes(x, y, 3)
    z, _ = found.basis.coordinates(x)
    labelled = fitted_head.Labelled(z, torch.nn.functional.one_hot(y, 3).to(WIDE), torch.ones(30, dtype=WIDE))
    heads = list(softmax_heads(labelled, found.basis))
    assert len(heads) == 8
    for head in heads:
        gradient = labelled.gradient(found.basis.prior(head.decay), head.at, labelled.probabilities(head.at))
        assert gradient.abs().max() < 1e-9


def test_la_is_the_same_posterior() -> None:
    x, y = data()
    found = FittedHead.of_classes(x, y, 3)
    left = found.la.leave_one_out([(x, y)])
    assert left.is_at_mode and left.distance < 1e-6
    at = found.basis.coordinates(x)
    data_of_la = fitted_head.Labelled(at[0], torch.nn.functional.one_hot(y, 3).to(WIDE), torch.ones(len(y), dtype=WIDE))
    own = found.head.left_out(data_of_la, at).mean  # with the prior as it is
    assert_close(left.mean - left.mean.mean(1, keepdim=True), own, rtol=1e-8, atol=1e-9)
    mean = found.la.predict(new_inputs()).latent_mean
    assert_close(mean - mean.mean(1, keepdim=True), found.moments(new_inputs())[0], rtol=1e-8, atol=1e-9)
    weighted = FittedHead.of_classes(x, y, 3, (1.0, 2.0, 1.0)).la
    assert weighted.fitted().n_data == float((y != 1).sum() + 2 * (y == 1).sum())


def test_la_of_many_classes_has_kronecker_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitted_head, "_MOST_ROWS", 10)
    x, y = data()
    assert type(FittedHead.of_classes(x, y, 3).la).__name__ == "KronLaplace"


def test_prediction_is_the_mixture() -> None:
    x, y = data()
    found = FittedHead.of_classes(x, y, 3)
    prediction = found.predict(new_inputs(), generator=torch.Generator().manual_seed(0))
    assert_close(prediction.probabilities, found.call(new_inputs()))
    parts = prediction.decomposition
    assert bool((parts.mutual_information > 0).all()) and prediction.entropy.shape == (6,)
    assert prediction.probability_samples.shape == (100, 6, 3)
    assert torch.equal(prediction.probability_samples, found.predict(
        new_inputs(), generator=torch.Generator().manual_seed(0)).probability_samples)  # fmt: skip


def test_an_input_that_is_given_twice_is_left_out_as_one() -> None:
    """With two labels it counts for both; left-out predictions do not know it at all."""
    x, y = data()
    twice, labels = torch.cat([x, x[:1]]), torch.cat([y, (y[:1] + 1) % 3])
    found = FittedHead.of_classes(twice, labels, 3)
    assert torch.equal(found.left_out_mean[0], found.left_out_mean[-1])
    z, _ = found.basis.coordinates(x)
    soft = torch.nn.functional.one_hot(y, 3).to(WIDE)
    soft[0] = 0.5 * (soft[0] + torch.nn.functional.one_hot(labels[-1], 3))
    counts = torch.ones(len(x), dtype=WIDE)
    counts[0] = 2
    prior = found.basis.prior(found.head.decay)
    shared = fitted_head.Labelled(z, soft, counts)
    assert shared.gradient(prior, found.head.at, shared.probabilities(found.head.at)).abs().max() < 1e-9


def test_numbers_are_left_out_exactly() -> None:
    """Left-out means are those of refits without the datum; intervals have the noise."""
    x, _ = data(n=20, n_features=30)
    y = x[:, 0] + torch.randn(20, dtype=WIDE, generator=torch.Generator().manual_seed(1))
    found = FittedHead.of_numbers(x, y)
    z = (x - x.mean(0)) / x.std(0, correction=0)
    z = torch.cat(
        [z @ reference.weighing(z, torch.full((20,), 1 / 20, dtype=WIDE), POWER), torch.ones(20, 1, dtype=WIDE)], 1
    )
    prior = torch.tensor([*[found.head.decay] * 30, FLAT], dtype=WIDE).diag()
    target = (y - y.mean()) / y.std(correction=0)
    for i in (0, 7):
        others = torch.arange(20) != i
        w = torch.linalg.solve(z[others].T @ z[others] + prior, z[others].T @ target[others])
        assert_close(found.left_out_mean[i, 0], z[i] @ w, rtol=1e-9, atol=1e-10)
    mean, variance = found.call(new_inputs(30))
    prediction = found.predict(new_inputs(30))
    assert_close(prediction.mean, mean)
    assert_close(prediction.variance, variance)
    lower, upper = prediction.interval(0.9)
    assert bool((lower < mean).all()) and bool((mean < upper).all())
    assert_close(found.la(new_inputs(30))[0], mean, rtol=1e-8, atol=1e-8)


def test_left_out_numbers_do_not_know_themselves_by_the_means_that_were_subtracted() -> None:
    """Of noise, and more features than data, no weight decay predicts left-out targets better than their mean does."""
    source = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 60, dtype=WIDE, generator=source), torch.randn(30, dtype=WIDE, generator=source)
    found = FittedHead.of_numbers(x, y)
    left = found.left_out_mean * found.unit + found.shift
    assert float((left.squeeze(1) - y).square().mean()) > 0.9 * float(y.var())


def test_a_state_predicts_the_same_bits() -> None:
    x, y = data()
    for found in (FittedHead.of_classes(x, y, 3, (1.0, 2.0, 3.0)), FittedHead.of_numbers(x, y.to(WIDE))):
        again = FittedHead.from_state(found.state())
        assert_close(again.call(new_inputs()), found.call(new_inputs()), rtol=0, atol=0)
        assert again.class_weight == found.class_weight


@pytest.mark.parametrize("is_regression", [False, True])
def test_a_state_of_before_has_the_same_prior_in_all_directions(is_regression: bool) -> None:
    x, labels = data()
    head = FittedHead.of_numbers(x, x[:, 0]) if is_regression else FittedHead.of_classes(x, labels, 3)
    plain = FeatureBasis.from_features(x, torch.ones(len(x), dtype=WIDE), power=0.0)
    head = dataclasses.replace(head, basis=plain)
    state = head.state()
    state["basis"] = {name: state["basis"][name] for name in ("mean", "scale", "vectors")}
    loaded, new = FittedHead.from_state(state), new_inputs()
    assert_close(loaded.call(new), head.call(new), rtol=1e-12, atol=1e-12)
    assert_close(loaded.la(new), head.la(new), rtol=1e-9, atol=1e-9)


def test_inputs_that_differ_from_constant_features_have_the_prior() -> None:
    x, y = torch.full((12, 3), 2.0, dtype=WIDE), torch.arange(12.0, dtype=WIDE)
    for head in (FittedHead.of_numbers(x, y), FittedHead.of_classes(x, y.long() % 2, 2)):
        (_, near), (_, far) = head.moments(x[:1]), head.moments(x[:1] + 3)
        assert (far.diagonal(dim1=1, dim2=2) > 1.01 * near.diagonal(dim1=1, dim2=2)).all()


def test_every_scale_of_a_rating_is_as_wide_as_its_left_out_residuals() -> None:
    x, _ = data(n=20, n_features=30)
    y = x[:, 0] + torch.randn(20, dtype=WIDE, generator=torch.Generator().manual_seed(1))
    found = FittedHead.of_numbers(x, y)
    noise = found.head.noise
    total = found.stacked.variances(found.left_out_variance, noise)
    targets = ((y - found.shift) / found.unit).unsqueeze(1)
    ratios = ((targets - found.left_out_mean).square() / total).mean((1, 2)).view(len(OF_NUMBERS), -1)
    assert_close(ratios * torch.tensor(OF_NUMBERS, dtype=WIDE).square().unsqueeze(1), torch.ones_like(ratios))


def test_directions_in_which_features_vary_are_allowed_more() -> None:
    """The prior variances of weights are those of the covariance, to the power, and of 1 off the span."""
    x, _ = data(n=24, n_features=40)
    basis = FeatureBasis.from_features(x, torch.ones(24, dtype=WIDE))
    z = (x - x.mean(0)) / x.std(0, correction=0)
    dense = reference.weighing(z, torch.full((24,), 1 / 24, dtype=WIDE), POWER)
    assert_close(basis.weighed(x), z @ dense, rtol=1e-9, atol=1e-9)
    plain = FeatureBasis.from_features(x, torch.ones(24, dtype=WIDE), power=0.0)
    assert_close(plain.weighed(x), z, rtol=1e-9, atol=1e-9)


def test_a_datum_left_out_is_seen_as_a_new_one() -> None:
    """Of more features than data: as far from the others as new ones, of which the prior knows nothing."""
    source = torch.Generator().manual_seed(0)
    x, new = torch.randn(2, 30, 200, dtype=WIDE, generator=source)
    basis = FeatureBasis.from_features(x, torch.ones(30, dtype=WIDE))
    (inside, outside), (unseen, beyond) = basis.without_each(x, torch.ones(30, dtype=WIDE)), basis.coordinates(new)
    lengths = inside.square().sum(1) + outside, unseen.square().sum(1) + beyond
    assert_close(lengths[0].mean(), lengths[1].mean(), rtol=0.15, atol=0.0)
    assert float(basis.coordinates(x)[0].square().sum(1).mean()) > 1.5 * float(lengths[1].mean())
