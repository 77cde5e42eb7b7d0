"""Subnetwork masks and SWAG variances."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace.errors import CurvatureError, InvalidArgument, InvalidData, InvalidType, NotFittedError
from laplace.weights.masks import (
    LargestMagnitudeSubnetMask,
    LargestVarianceDiagLaplaceSubnetMask,
    LargestVarianceSWAGSubnetMask,
    LastLayerSubnetMask,
    ModuleNameSubnetMask,
    ParamNameSubnetMask,
    RandomSubnetMask,
    SubnetMask,
    fit_diagonal_swag_var,
)


@pytest.fixture
def model() -> nn.Sequential:
    """First weight frozen: the trainable vector is bias (3), then 2.weight (6), 2.bias (2)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    model[0].weight.requires_grad_(False)
    return model


@pytest.fixture
def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 4, generator=generator)
    y = torch.randint(2, (12,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=6, shuffle=True)


class Diagonal:
    """Stands in for a diagonal Laplace approximation."""

    def __init__(self, variance):
        self.posterior_variance = variance
        self.fitted_on = None

    def fit(self, train_loader):
        self.fitted_on = train_loader


def trainable(model):
    return parameters_to_vector([p for p in model.parameters() if p.requires_grad]).detach()


def test_parameter_names(model):
    mask = ParamNameSubnetMask(model, ["2.bias", "0.bias"])
    assert mask.n_params_subnet is None
    with pytest.raises(NotFittedError, match="select"):
        mask.indices  # noqa: B018
    with pytest.raises(AttributeError):
        mask.indices  # noqa: B018
    indices = mask.select()
    assert indices.dtype == torch.int64
    assert indices.tolist() == [0, 1, 2, 9, 10]
    assert mask.indices is indices
    assert mask.n_params_subnet == 5
    assert torch.equal(mask.parameter_vector, trainable(model))
    assert torch.equal(mask.parameter_vector[indices[3:]], model[2].bias.detach())
    with pytest.raises(InvalidArgument, match="already"):
        mask.select()


def test_tied_parameters_go_by_either_name():
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False))
    model[1].weight = model[0].weight
    assert ParamNameSubnetMask(model, ["1.weight"]).select().tolist() == list(range(6))


def test_module_names(model):
    assert ModuleNameSubnetMask(model, ["2"]).select().tolist() == list(range(3, 11))
    assert ModuleNameSubnetMask(model, ["0"]).select().tolist() == [0, 1, 2]


def test_last_layer(model, loader):
    assert LastLayerSubnetMask(model).select(loader).tolist() == list(range(3, 11))
    assert LastLayerSubnetMask(model, "0").select().tolist() == [0, 1, 2]
    batch = {"x": torch.randn(2, 4), "target": torch.zeros(2)}
    wrapped = nn.ModuleDict({"net": model})
    wrapped.forward = lambda data: model(data["x"])
    assert LastLayerSubnetMask(wrapped, dict_key_y="target").select([batch]).tolist() == list(range(3, 11))
    with pytest.raises(InvalidArgument, match="loader"):
        LastLayerSubnetMask(model).select()
    model[2].requires_grad_(False)
    with pytest.raises(InvalidArgument, match="frozen"):
        LastLayerSubnetMask(model).select(loader)


def test_magnitude(model):
    mask = LargestMagnitudeSubnetMask(model, 4)
    assert mask.n_params_subnet == 4
    kept = set(mask.select().tolist())
    magnitudes = trainable(model).abs().tolist()
    assert kept == set(sorted(range(11), key=lambda i: -magnitudes[i])[:4])
    assert mask.indices.tolist() == sorted(kept)


def test_ties_prefer_the_first():
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    assert LargestMagnitudeSubnetMask(model, 2).select().tolist() == [0, 1]


def test_random_is_seeded(model):
    def pick(seed):
        return RandomSubnetMask(model, 5, generator=torch.Generator().manual_seed(seed)).select().tolist()

    before = torch.get_rng_state()
    assert pick(0) == pick(0)
    assert torch.equal(torch.get_rng_state(), before)
    assert len({tuple(pick(seed)) for seed in range(5)}) > 1
    assert len(RandomSubnetMask(model, 5).select()) == 5


def test_largest_variance_of_a_diagonal_laplace(model, loader):
    variance = torch.linspace(1, 2, 11)
    laplace = Diagonal(variance)
    assert LargestVarianceDiagLaplaceSubnetMask(model, 3, laplace).select(loader).tolist() == [8, 9, 10]
    assert laplace.fitted_on is loader
    with pytest.raises(InvalidArgument, match="loader"):
        LargestVarianceDiagLaplaceSubnetMask(model, 3, laplace).select()
    with pytest.raises(InvalidArgument, match=r"\[11\]"):
        LargestVarianceDiagLaplaceSubnetMask(model, 3, Diagonal(torch.ones(23))).select(loader)
    with pytest.raises(InvalidArgument, match="NaN"):
        LargestVarianceDiagLaplaceSubnetMask(model, 3, Diagonal(torch.full((11,), torch.nan))).select(loader)


def test_largest_variance_along_swag(model, loader):
    def pick():
        generator = torch.Generator().manual_seed(0)
        return LargestVarianceSWAGSubnetMask(model, 4, swag_n_snapshots=3, generator=generator).select(loader)

    before, state = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    first = pick()
    torch.rand(3)
    assert first.tolist() == pick().tolist()
    assert len(first) == 4
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.set_rng_state(before)
    with pytest.raises(InvalidArgument, match="loader"):
        LargestVarianceSWAGSubnetMask(model, 4).select()


def test_swag_variance_is_that_of_the_snapshots():
    """Against the trajectory of plain SGD, written out by hand for a linear model."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double().eval()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    before = torch.get_rng_state()
    variance = fit_diagonal_swag_var(model, [(x, y)], nn.MSELoss(), n_snapshots_total=4, snapshot_freq=2, lr=0.05)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    theta, velocity, snapshots = trainable(model), torch.zeros(4, dtype=torch.float64), []
    features = torch.cat([x, torch.ones(5, 1, dtype=torch.float64)], 1)
    for epoch in range(1, 9):
        gradient = 2 * features.T @ (features @ theta - y.squeeze(1)) / 5 + 3e-4 * theta
        velocity = 0.9 * velocity + gradient
        theta = theta - 0.05 * velocity
        if epoch % 2 == 0:
            snapshots.append(theta)
    expected = torch.stack(snapshots).var(0, unbiased=False)
    torch.testing.assert_close(variance, expected, rtol=1e-10, atol=1e-12)


def test_swag_floor_and_errors(model, loader):
    criterion = nn.CrossEntropyLoss()
    floor = fit_diagonal_swag_var(model, loader, criterion, n_snapshots_total=1, min_var=1e-5)
    assert floor.tolist() == pytest.approx([1e-5] * 11)
    with pytest.raises(InvalidArgument, match="snapshot_freq=0"):
        fit_diagonal_swag_var(model, loader, criterion, snapshot_freq=0)
    with pytest.raises(CurvatureError, match="lr"):
        fit_diagonal_swag_var(model, [(torch.full((2, 4), torch.inf), torch.tensor([0, 1]))], criterion, 2)
    with pytest.raises(InvalidArgument, match="trainable"):
        fit_diagonal_swag_var(model.requires_grad_(False), loader, criterion, 2)


@pytest.mark.parametrize("n", [None, 0, 12, 2.0])
def test_bad_sizes(model, n):
    with pytest.raises(InvalidArgument, match="1 to 11"):
        RandomSubnetMask(model, n)


def test_bad_names(model):
    for names, match in (([], "is empty"), (["3.weight"], "unknown"), (["0.weight"], "frozen")):
        with pytest.raises(InvalidArgument, match=match):
            ParamNameSubnetMask(model, names)
    for names, match in (([], "is empty"), (["3"], "unknown"), (["1"], "no trainable"), ([""], "not a leaf")):
        with pytest.raises(InvalidArgument, match=match):
            ModuleNameSubnetMask(model, names)
    for name in ("3", "1"):
        with pytest.raises(InvalidArgument, match=r"nn\.Linear"):
            LastLayerSubnetMask(model, name)
    with pytest.raises(InvalidArgument, match="no trainable"):
        LargestMagnitudeSubnetMask(model.requires_grad_(False), 1)


def test_masks_in_place_of_their_indices(model):
    """What a user may hand over instead of indices; the message says how to come by them."""
    mask = RandomSubnetMask(model, 3)
    for given in (mask, torch.ones(11, dtype=torch.bool), [1, 2]):
        with pytest.raises(InvalidType, match=r"mask\.select\(train_loader\).*nonzero"):
            Laplace(model, "classification", "subnetwork", "full", subnetwork_indices=given)


def test_a_loader_without_data(model):
    """Without snapshots all variances are equal, and the first parameters would be selected."""
    for mask in (LastLayerSubnetMask(model), LargestVarianceSWAGSubnetMask(model, 4, swag_n_snapshots=2)):
        with pytest.raises(InvalidData, match="no data"):
            mask.select([])


def test_own_mask_and_conversion(model):
    class Every(SubnetMask):
        def __init__(self, model, mask):
            super().__init__(model)
            self.mask = mask

        def get_subnet_mask(self, train_loader):
            return self.mask

    mask = torch.zeros(11, dtype=torch.int32)
    mask[[1, 4]] = 1
    assert Every(model, mask).select().tolist() == [1, 4]
    for bad in (torch.zeros(23), mask.float(), mask * 2, mask[None], [0, 1], torch.zeros(10, dtype=torch.bool)):
        with pytest.raises(InvalidArgument, match=r"\[11\]"):
            Every(model, bad).select()
    with pytest.raises(TypeError):
        SubnetMask(model)
