"""The helpers of the legacy interface."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from laplace.compat import helpers
from laplace.compat.kron import is_scalar
from laplace.errors import CurvatureError, InvalidArgument, InvalidData, InvalidType

F64 = torch.float64


def test_invsqrt_precision():
    root = torch.randn(2, 6, 7, dtype=F64)
    M = root @ root.mT
    L = helpers.invsqrt_precision(M)
    torch.testing.assert_close(L @ L.mT, torch.linalg.inv(M), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(L, L.tril())
    torch.testing.assert_close(L, torch.linalg.cholesky(torch.linalg.inv(M)), rtol=1e-8, atol=1e-8)
    with pytest.raises(CurvatureError, match="not positive definite"):
        helpers.invsqrt_precision(-torch.eye(3))


def test_small_algebra():
    a, b = torch.randn(2, 3), torch.randn(3, 2)
    torch.testing.assert_close(helpers.kron(a, b), torch.tensor(np.kron(a, b)))
    torch.testing.assert_close(helpers.diagonal_add_scalar(torch.ones(2, 2), 2.0), torch.tensor([[3.0, 1], [1, 3]]))
    torch.testing.assert_close(helpers.block_diag([torch.ones(1, 1), torch.ones(2, 2)]).sum(), torch.tensor(5.0))
    values, vectors = helpers.symeig(torch.ones(3, 3))
    assert values.min() >= 0
    torch.testing.assert_close((vectors * values) @ vectors.T, torch.ones(3, 3))
    with pytest.raises(CurvatureError):
        helpers.symeig(torch.full((2, 2), math.nan))


@pytest.mark.parametrize("diagonal", [False, True])
def test_normal_samples_are_independent_over_rows(diagonal):
    n = 40_000
    mean = torch.tensor([[1.0, -1.0], [0.0, 2.0]], dtype=F64)
    block = torch.tensor([[2.0, 0.8], [0.8, 1.0]], dtype=F64)
    var = block.diagonal().expand(2, 2) if diagonal else block.expand(2, 2, 2)
    samples = helpers.normal_samples(mean, var, n, torch.Generator().manual_seed(0))
    assert samples.shape == (n, 2, 2)
    expected = torch.block_diag(*(torch.diag(v) if diagonal else v for v in var))
    error = (torch.cov(samples.flatten(1).T) - expected).abs().max()
    assert error < 5 * 2 * math.sqrt(2 / n)
    assert (samples.mean(0) - mean).abs().max() < 5 * math.sqrt(2 / n)
    again = helpers.normal_samples(mean, var, n, torch.Generator().manual_seed(0))
    assert torch.equal(samples, again)


def test_get_nll_and_parameters_per_layer():
    probs = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    torch.testing.assert_close(
        helpers.get_nll(probs, torch.tensor([1, 0])), torch.tensor(-(math.log(0.75) + math.log(0.5)) / 2)
    )
    assert helpers.parameters_per_layer(nn.Linear(3, 2)) == [6, 2]


def test_expand_prior_precision():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)
    expand = helpers.expand_prior_precision
    assert expand(torch.tensor([2.0]), model).tolist() == [2.0] * 7
    assert expand(torch.tensor(2.0), model).tolist() == [2.0] * 7
    assert expand(torch.tensor([1.0, 2.0, 3.0]), model).tolist() == [1, 1, 1, 1, 2, 2, 3]
    assert expand(torch.arange(7.0), model).tolist() == list(range(7))
    layerwise = torch.ones(3, requires_grad=True)
    expand(layerwise, model).sum().backward()
    assert layerwise.grad.tolist() == [4, 2, 1]
    with pytest.raises(InvalidArgument, match=r"\[3\].*\[7\]"):
        expand(torch.ones(4), model)


def test_fix_prior_prec_structure():
    fix = helpers.fix_prior_prec_structure
    assert fix(2.0, "scalar", 3, 7, "cpu").tolist() == [2.0]
    assert fix(2.0, "layerwise", 3, 7, "cpu").shape == (3,)
    assert fix(2.0, "diag", 3, 7, "cpu", F64).dtype == F64
    with pytest.raises(InvalidArgument, match="accepted are"):
        fix(2.0, "block", 3, 7, "cpu")


def test_sod_sampler():
    sampler = helpers.SoDSampler(10, 4, seed=3)
    assert list(sampler) == list(sampler)
    assert len(sampler) == len(set(sampler)) == 4
    assert list(helpers.SoDSampler(10, 4, seed=3)) == list(sampler)
    assert len(list(DataLoader(TensorDataset(torch.arange(10)), sampler=sampler))) == 4
    with pytest.raises(InvalidArgument, match="N=3"):
        helpers.SoDSampler(3, 4)


def test_predicates():
    valid = is_scalar
    assert all(map(valid, (1, 2.0, np.float64(1), torch.tensor(1.0), torch.tensor([1.0]))))
    assert not any(map(valid, ("1", None, True, torch.ones(2), torch.ones(1, 1), 1j)))
    assert helpers._is_batchnorm(nn.BatchNorm3d(2))
    assert not helpers._is_batchnorm(nn.LayerNorm(2))
    assert {bool} <= helpers._all_subclasses(int)
    assert nn.BatchNorm1d in helpers._all_subclasses(nn.Module)


class Predictions:
    """Stands in for a fitted approximation: returns what its function makes of x."""

    def __init__(self, predict):
        self.model = nn.Linear(1, 1)
        self.predict = predict

    def __call__(self, x, **options):
        assert options["fitting"] is True
        assert options["link_approx"] == "probit"
        return self.predict(x)


class Running:
    def __init__(self):
        self.rows = []

    def update(self, preds, targets):
        self.rows.append((preds - targets).square())

    def compute(self):
        return torch.cat(self.rows).mean(0)


class RunningWithVariance(Running):
    def update(self, mean, variance, targets):
        self.rows.append((mean - targets).square() / variance)


def test_validate():
    x, y = torch.randn(6, 2), torch.randn(6, 2)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    plain = Predictions(lambda x: 2 * x)
    gaussian = Predictions(lambda x: (2 * x, torch.full_like(x, 4.0)))
    mse = (2 * x - y).square().mean().item()
    assert helpers.validate(plain, loader, lambda p, t: (p - t).square().mean()) == pytest.approx(mse)
    assert helpers.validate(gaussian, loader, lambda m, v, t: ((m - t).square() / v).mean()) == pytest.approx(mse / 4)
    assert helpers.validate(plain, loader, Running()) == pytest.approx(2 * mse)
    assert helpers.validate(gaussian, loader, Running()) == pytest.approx(2 * mse)
    assert helpers.validate(gaussian, loader, RunningWithVariance()) == pytest.approx(mse / 2)
    mapping = [{"input_ids": x, "target": y}]
    keyed = Predictions(lambda batch: 2 * batch["input_ids"])
    assert helpers.validate(keyed, mapping, Running(), dict_key_y="target") == pytest.approx(2 * mse)
    with pytest.raises(InvalidData, match="empty"):
        helpers.validate(plain, [], Running())


def test_validate_takes_torchmetrics():
    torchmetrics = pytest.importorskip("torchmetrics")
    x, y = torch.randn(6, 2), torch.randn(6, 2)
    gaussian = Predictions(lambda x: (x, torch.ones_like(x)))
    metric = torchmetrics.MeanSquaredError(num_outputs=2)
    expected = (x - y).square().mean(0).sum().item()
    assert helpers.validate(gaussian, [(x, y)], metric) == pytest.approx(expected)


def test_batches():
    x, y = torch.randn(4, 2), torch.arange(4)
    assert helpers.split_batch((x, y)) == (x, y)
    mapping = {"input_ids": x, "labels": y}
    assert helpers.split_batch(mapping) == (mapping, y)
    assert helpers.batch_size(x) == helpers.batch_size(mapping) == 4
    moved = helpers.to_device(mapping, "cpu", F64)
    assert (moved["input_ids"].dtype, moved["labels"].dtype) == (F64, torch.int64)
    picked = helpers.select_rows(mapping, [0, 2])
    assert picked["labels"].tolist() == [0, 2]
    assert torch.equal(helpers.select_rows(x, slice(1, 3)), x[1:3])
    assert torch.equal(helpers.concatenate_rows([x[:1], x[1:]]), x)
    both = helpers.concatenate_rows([picked, picked])
    assert both["labels"].tolist() == [0, 2, 0, 2]
    with pytest.raises(InvalidData, match="no rows"):
        helpers.concatenate_rows([])
    with pytest.raises(InvalidData, match="different kinds"):
        helpers.concatenate_rows([x, mapping])


def test_targets():
    classes = helpers.classification_targets
    assert classes(torch.tensor([0, 2]), 3).tolist() == [0, 2]
    assert classes(torch.tensor([[0], [2]]), 3).tolist() == [0, 2]
    assert classes(torch.eye(3)[[0, 2]], 3).tolist() == [0, 2]
    for bad in (torch.tensor([3]), torch.tensor([-1]), torch.tensor([0.5]), torch.ones(2, 3), torch.zeros(1, 1, 1)):
        with pytest.raises(InvalidData):
            classes(bad, 3)
    outputs = torch.zeros(2, 1, dtype=F64)
    assert helpers.regression_targets(torch.ones(2, 1), outputs).dtype == F64
    with pytest.raises(InvalidData, match="unsqueeze"):
        helpers.regression_targets(torch.ones(2), outputs)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_training_indices_and_subset_loader():
    data = TensorDataset(torch.arange(10), torch.arange(10))
    shuffled = DataLoader(data, batch_size=4, shuffle=True)
    before = torch.get_rng_state()
    assert helpers.training_indices(shuffled) == list(range(10))
    assert torch.equal(torch.get_rng_state(), before)
    assert helpers.training_indices(DataLoader(data, batch_size=4, drop_last=True)) == list(range(8))
    assert helpers.training_indices(DataLoader(data, batch_size=None)) == list(range(10))
    own = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(range(4)), 3, drop_last=False))
    assert helpers.training_indices(own) == [0, 1, 2, 3]
    with pytest.raises(InvalidType, match="iterable"):
        helpers.training_indices(DataLoader(Stream()))
    batches = list(helpers.subset_loader(shuffled, torch.tensor([7, 1, 3, 2, 9])))
    assert [batch[0].tolist() for batch in batches] == [[7, 1, 3, 2], [9]]


def test_draw_gaussian_singular():
    mean, ones = torch.zeros(3), torch.ones(3, 3)
    draws = helpers.draw_gaussian(mean, ones, 5, torch.Generator().manual_seed(0))
    assert draws.shape == (5, 3)
    torch.testing.assert_close(draws[:, 0], draws[:, 2], atol=1e-3, rtol=1e-3)
    assert helpers.draw_gaussian(torch.zeros(2, 3), ones.expand(2, 3, 3), 5).shape == (5, 2, 3)


def test_same_configuration():
    same = helpers.same_configuration
    config = {"a": [1, torch.ones(2)], "b": None}
    assert same(config, {"b": None, "a": [1, torch.ones(2)]})
    assert not same(config, {"b": None, "a": [1, torch.zeros(2)]})
    assert not same(config, {"b": None})
    assert not same(torch.ones(1), 1)
    assert not same(torch.ones(2), torch.ones(2, dtype=F64))
    assert not same([1], [1, 2])


def test_preserve_model_gradients():
    class Owner:
        def __init__(self):
            self.model = nn.Linear(2, 1)

        @helpers.preserve_model_gradients
        def work(self, factor, fail=False):
            """Documented."""
            (factor * self.model(torch.ones(2))).sum().backward()
            if fail:
                raise ValueError
            return self.model.weight.grad.clone()

    owner = Owner()
    gradient = torch.full_like(owner.model.weight, 7.0)
    owner.model.weight.grad = gradient
    assert owner.work(3.0).tolist() == [[3.0, 3.0]]
    with pytest.raises(ValueError):
        owner.work(3.0, fail=True)
    assert owner.model.weight.grad is gradient
    assert gradient.tolist() == [[7.0, 7.0]]
    assert owner.model.bias.grad is None
    assert Owner.work.__doc__ == "Documented."
