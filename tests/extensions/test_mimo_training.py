"""The batches and the loss with which networks of several inputs and heads are trained."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from laplace import MimoBatches, from_mimo, mimo_loss, mimo_outputs
from laplace.errors import InvalidArgument, InvalidData, InvalidType
from laplace.likelihoods import Categorical
from tests import grid
from tests.reference.compare import assert_close
from tests.reference.likelihoods import DENSITIES, nll

HEADS = 3


def numbered(n_data: int = 7, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Batches whose inputs are their own numbers, and whose targets are the same, less one half."""
    x = torch.arange(float(n_data)).unsqueeze(1)
    return list(zip(x.split(size), (x[:, 0] - 0.5).split(size), strict=True))


# Batches.


@pytest.mark.parametrize("rho", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("repetition", [1, 3])
def test_every_head_sees_every_datum_as_often(rho: float, repetition: int) -> None:
    """With its own target, in every batch."""
    generator = torch.Generator().manual_seed(0)
    made = list(MimoBatches(numbered(), HEADS, rho, repetition, generator))
    assert len(made) == 2
    for (x, y), (inputs, targets) in zip(numbered(), made, strict=True):
        assert len(inputs) == HEADS
        assert targets.shape == (repetition * len(x), HEADS)
        assert all(torch.equal(part[:, 0] - 0.5, targets[:, m]) for m, part in enumerate(inputs))
        expected = dict.fromkeys(y.tolist(), repetition)
        assert all(Counter(targets[:, m].tolist()) == expected for m in range(HEADS))


def test_rows_repeat_their_input_with_the_given_probability() -> None:
    """Among many data, where equal ones by chance are rare; other rows are independent and uniform."""
    generator = torch.Generator().manual_seed(1)
    n_data = 5000
    for rho in (0.0, 0.3, 1.0):
        ((inputs, _),) = MimoBatches(numbered(n_data, n_data), HEADS, rho, 2, generator)
        rows = torch.cat(inputs, 1)
        equal = (rows == rows[:, :1]).all(1)
        assert equal.double().mean().item() == pytest.approx(
            rho, abs=4 * (rho * (1 - rho) / (2 * n_data)) ** 0.5 + 1e-3
        )
        if rho < 1:
            correlation = torch.corrcoef(rows[~equal].T) - torch.eye(HEADS)
            assert correlation.abs().max() < 4 / (2 * n_data * (1 - rho)) ** 0.5


def test_orders_are_uniform() -> None:
    """Three data have six orders; those of two heads are drawn apart."""
    generator = torch.Generator().manual_seed(2)
    batches = MimoBatches(numbered(3, 3), 2, generator=generator)
    seen = Counter(tuple(y.T.flatten().tolist()) for _ in range(3600) for _, y in batches)
    assert len(seen) == 36
    statistic = sum((count - 100) ** 2 / 100 for count in seen.values())
    assert statistic < 35 + 4 * (2 * 35) ** 0.5  # χ² of 35 degrees of freedom


def test_equal_seeds_give_equal_batches_and_readings_differ() -> None:
    def first(batches: MimoBatches) -> Tensor:
        return next(iter(batches))[1]

    one = MimoBatches(numbered(), HEADS, 0.2, 2, torch.Generator().manual_seed(3))
    other = MimoBatches(numbered(), HEADS, 0.2, 2, torch.Generator().manual_seed(3))
    state = torch.get_rng_state()
    assert torch.equal(first(one), first(other))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first(one), first(MimoBatches(numbered(), HEADS, 0.2, 2)))
    assert len({tuple(first(one).flatten().tolist()) for _ in range(5)}) == 5


@pytest.mark.parametrize("n_heads", [0, 2.5])
def test_outputs_are_of_a_number_of_heads(n_heads: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"n_heads={n_heads}"):
        mimo_outputs(nn.Flatten(), torch.zeros(3, 2), n_heads)


def test_inputs_of_the_heads_have_one_shape() -> None:
    with pytest.raises(InvalidData, match=r"shapes \[\(8, 5\), \(4, 5\)\]"):
        mimo_outputs(nn.Flatten(), (torch.zeros(8, 5), torch.zeros(4, 5)), 2)


def test_images_and_rows_of_targets() -> None:
    x, y = torch.randn(4, 3, 5, 5), torch.randn(4, 2)
    ((inputs, targets),) = MimoBatches([(x, y)], HEADS, batch_repetition=2)
    assert [tuple(part.shape) for part in inputs] == [(8, 3, 5, 5)] * HEADS
    assert targets.shape == (8, HEADS, 2)
    assert mimo_outputs(nn.Flatten(), inputs, HEADS).shape == (8, HEADS, 75)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_heads": 0}, "n_heads=0"),
        ({"batch_repetition": 1.5}, r"batch_repetition=1\.5"),
        ({"input_repetition": 1.1}, r"input_repetition=1\.1"),
        ({"input_repetition": float("nan")}, "input_repetition=nan"),
        ({"input_repetition": "half"}, "input_repetition='half'"),
        ({"loader": iter(numbered())}, "only once"),
    ],
)
def test_refused_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        MimoBatches(**{"loader": numbered(), "n_heads": HEADS} | options)


def test_refused_types() -> None:
    with pytest.raises(InvalidType, match="generator"):
        MimoBatches(numbered(), HEADS, generator=0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidType, match="loader"):
        MimoBatches(torch.zeros(3, 2), HEADS)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(3), torch.zeros(3)), r"\[3\].*unsqueeze"),
        ((torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3)), "tuple"),
        ({"x": torch.zeros(3, 2), "labels": torch.zeros(3)}, "dict"),
        ((torch.zeros(3, 2), torch.zeros(4)), "3 inputs and 4 targets"),
    ],
)
def test_refused_batches(batch: Any, message: str) -> None:
    with pytest.raises(InvalidData, match=message):
        list(MimoBatches([batch], HEADS))


# The loss.


def mean_loss(likelihood: str, f: Tensor, y: Tensor) -> Tensor:
    """Mean unit loss of one head, by PyTorch and by densities alone."""
    if likelihood == "regression":
        return 0.5 * (f - y).square().sum(1).mean()
    if likelihood == "bernoulli":
        return functional.binary_cross_entropy_with_logits(f, y, reduction="none").sum(1).mean()
    if likelihood in DENSITIES:
        return nll(f, y, likelihood).mean()
    return functional.cross_entropy(f, y)


@pytest.mark.parametrize("likelihood", grid.LIKELIHOODS)
def test_the_loss_is_the_sum_of_the_mean_losses_of_all_heads(likelihood: Any) -> None:
    """And so is its gradient; a loss of a density may differ by what f does not move."""
    generator = torch.Generator().manual_seed(4)
    y = torch.stack([grid.data(likelihood, seed=m)[1] for m in range(HEADS)], 1)
    y = y.double() if y.is_floating_point() else y
    width = {"reward_modeling": 2, "heteroscedastic": 6, "mean_log_variance": 6}.get(likelihood, 3)
    f = torch.randn(len(y), HEADS, width, dtype=torch.float64, generator=generator, requires_grad=True)
    expected = sum((mean_loss(likelihood, f[:, m], y[:, m]) for m in range(HEADS)), torch.zeros(()))
    found = mimo_loss(f, y, likelihood)
    assert found.shape == ()
    (one,), (other,) = torch.autograd.grad(expected, f), torch.autograd.grad(found, f)
    assert_close(other, one, "algebra")
    if likelihood not in DENSITIES:
        assert_close(found.detach(), expected.detach(), "algebra")


def test_labels_that_are_ignored_or_weighed_are_those_of_each_head() -> None:
    generator = torch.Generator().manual_seed(5)
    f = torch.randn(8, HEADS, 3, dtype=torch.float64, generator=generator)
    y = torch.randint(3, (8, HEADS), generator=generator)
    y[:4, 1], y[:, 2] = -100, -100
    expected = [functional.cross_entropy(f[:, 0], y[:, 0]), functional.cross_entropy(f[4:, 1], y[4:, 1])]
    assert_close(mimo_loss(f, y), sum(expected), "algebra")  # of the last head none counts
    weights = [0.2, 1.0, 0.1]
    expected = [functional.cross_entropy(f[:, m], y[:, m], f.new_tensor(weights)) for m in range(2)]
    assert_close(mimo_loss(f[:, :2], y[:, :2], Categorical(class_weight=weights)), sum(expected), "algebra")


def test_soft_labels_and_half_precision() -> None:
    f = torch.randn(6, HEADS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    y = f.softmax(-1).flip(0)
    expected = sum(functional.cross_entropy(f[:, m], y[:, m]) for m in range(HEADS))
    assert_close(mimo_loss(f, y), expected, "algebra")
    assert mimo_loss(f.half(), y).dtype == torch.float32


@pytest.mark.parametrize(
    ("f", "y", "message"),
    [
        (torch.zeros(4, 9), torch.zeros(4, 3).long(), "mimo_outputs"),
        (torch.zeros(4, 3, 3), torch.zeros(4).long(), r"\[4\]"),
        (torch.zeros(4, 3, 3), torch.zeros(4, 2).long(), r"\[4, 2\]"),
        (torch.zeros(4, 3, 3), torch.full((4, 3), 3), "label"),
        (torch.full((4, 3, 3), torch.nan), torch.zeros(4, 3).long(), "NaN"),
    ],
)
def test_refused_outputs_and_targets(f: Tensor, y: Tensor, message: str) -> None:
    with pytest.raises(InvalidData, match=message):
        mimo_loss(f, y)


def test_outputs_are_those_of_the_heads_of_a_mixture() -> None:
    model, x = nn.Linear(HEADS * 2, HEADS * 4), [torch.randn(5, 2) for _ in range(HEADS)]
    mimo = from_mimo(model, HEADS, last_layer_name="")
    outputs = mimo_outputs(model, tuple(x), HEADS)
    for head, la in enumerate(mimo.components):
        la.fit([((*x,), torch.zeros(5, dtype=torch.long))])
        assert la.forward_fn is not None and torch.equal(la.forward_fn(model, tuple(x)), outputs[:, head])
    assert torch.equal(mimo_outputs(model, x[0], HEADS), mimo_outputs(model, (x[0],) * HEADS, HEADS))


# All of it.


def test_trained_heads_predict_apart_and_together() -> None:
    """Four noisy classes that no linear network tells apart; every head learns them, from its own input alone."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(600, 2, generator=generator)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 0] * x[:, 1] > 0).long()
    train, test = (x[:400], y[:400]), (x[400:], y[400:])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        model = nn.Sequential(nn.Linear(HEADS * 2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 12))
    loader = list(zip(train[0].split(100), train[1].split(100), strict=True))
    batches = MimoBatches(loader, HEADS, batch_repetition=4, generator=generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-4)
    for _ in range(40):
        for inputs, targets in batches:
            optimizer.zero_grad()
            mimo_loss(mimo_outputs(model, inputs, HEADS), targets).backward()
            optimizer.step()
    outputs = mimo_outputs(model, test[0], HEADS).detach()
    accuracy = (outputs.argmax(-1) == test[1].unsqueeze(1)).double().mean(0)
    assert accuracy.min() > 0.85
    # Head m follows input m, whatever the others are.
    mixed = (test[0], test[0].roll(1, 0), test[0].roll(2, 0))
    own = mimo_outputs(model, mixed, HEADS).detach().argmax(-1)
    labels = torch.stack([test[1].roll(m) for m in range(HEADS)], 1)
    assert (own == labels).double().mean(0).min() > 0.8
    mixture = from_mimo(model, HEADS, last_layer_name="4")
    mixture.fit(loader)
    mixture.optimize_prior_precision(n_steps=20)
    assert (mixture(test[0]).argmax(1) == test[1]).double().mean() >= accuracy.mean() - 0.02


def test_a_component_is_fitted_at_the_inputs_of_its_training() -> None:
    """Each datum once per batch, so that the number of data is that of the loader."""
    model, loader = nn.Linear(HEADS * grid.WIDTH, HEADS * 3).double(), [(x.double(), y) for x, y in grid.batches()]
    rows = list(MimoBatches(loader, HEADS, generator=torch.Generator().manual_seed(9)))
    mimo = from_mimo(model, HEADS, last_layer_name="")
    for m, la in enumerate(mimo.components):
        la.fit([(x, y[:, m]) for x, y in rows])
        assert la.n_data == grid.N_DATA
        expected = sum(
            functional.cross_entropy(model(torch.cat(x, 1))[:, 3 * m : 3 * m + 3], y[:, m], reduction="sum")
            for x, y in rows
        )
        assert_close(la.loss, expected, "algebra")
