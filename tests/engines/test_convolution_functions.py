"""Convolutions that are called as functions, of layers that pad by themselves above all, and those with groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace import FullLaplace, KronLaplace, Laplace
from tests.conformance.cases import STRUCTURE_NAMES
from tests.conformance.test_layers import posterior
from tests.conformance.test_predictions import latent_of
from tests.reference import curvature as reference
from tests.reference import kfac
from tests.reference.compare import assert_close


class _Padding(nn.Conv2d):
    """Pads its images by itself, unevenly, as TensorFlow does it; a list of strides, as found in the wild."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        stride = list(self.stride)
        return F.conv2d(
            F.pad(x, (0, 1, 1, 1)), self.weight, self.bias, stride, self.padding, self.dilation, self.groups
        )


def _padded_before(layer: nn.Conv2d) -> nn.Module:
    """The same by layers of PyTorch."""
    plain = nn.Conv2d(
        layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, 0, layer.dilation,  # pyright: ignore
        layer.groups, layer.bias is not None,
    )  # fmt: skip
    plain.load_state_dict(layer.state_dict())
    return nn.Sequential(nn.ZeroPad2d((0, 1, 1, 1)), plain)


class _Net(nn.Module):
    def __init__(self, layer: nn.Module, width: int, x: Tensor) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 2)
        self.n_space = x.ndim - 2

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x)).flatten(2).mean(2))


class _Function(nn.Module):
    """A function of a weight and a bias that no layer holds."""

    def __init__(
        self, function: Callable[..., Tensor], shape: Sequence[int], bias: bool, options: dict[str, Any]
    ) -> None:
        super().__init__()
        self.function, self.options = function, options
        self.weight = nn.Parameter(0.5 * torch.randn(*shape))
        self.bias = nn.Parameter(torch.randn(shape[0])) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias, **self.options)


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], bool, dict[str, Any], tuple[int, ...]]] = {
    "sequence": (F.conv1d, (4, 4, 3), True, {"padding": 1}, (4, 5)),
    "depthwise sequence": (F.conv1d, (4, 1, 3), True, {"padding": "same", "groups": 4}, (4, 5)),
    "image": (F.conv2d, (4, 2, 2, 3), True, {"stride": (2, 1), "padding": (1, 0), "dilation": [1, 2]}, (2, 5, 6)),
    "uneven same": (F.conv2d, (4, 2, 2, 4), True, {"padding": "same", "groups": 2}, (4, 4, 5)),
    "two per channel": (F.conv2d, (6, 1, 2, 2), True, {"padding": "valid", "groups": 3}, (3, 4, 4)),
    "depthwise without bias": (F.conv2d, (3, 1, 3, 3), False, {"groups": 3}, (3, 4, 4)),
    "one position": (F.conv2d, (4, 2, 3, 3), True, {"groups": 2}, (4, 3, 3)),
    "point": (torch.conv2d, (4, 4, 1, 1), True, {}, (4, 2, 3)),
    "volume": (F.conv3d, (4, 1, 2, 2, 2), True, {"groups": 2}, (2, 3, 3, 2)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("n_data", [1, 4])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_the_factors_of_layers(name: str, n_data: int) -> None:
    torch.manual_seed(0)
    function, shape, bias, options, size = FUNCTIONS[name]
    x, y = torch.randn(n_data, *size, dtype=torch.float64), torch.randint(2, (n_data,))
    layer = _Function(function, shape, bias, options)
    model = _Net(layer, shape[0], x).double()
    names = reference.trainable_names(model)
    full = FullLaplace(model, "classification")
    full.fit([(x, y)])
    assert_close(full.H, reference.ggn(model, x, y, names, "classification"), "backend")
    la = KronLaplace(model, "classification")
    la.fit([(x, y)])
    assert not any("fallback" in words for words in la.coverage().values()), la.coverage()
    assert all("Kronecker factors" in words for words in la.coverage().values()), la.coverage()
    # The same as a layer, whose factors a loop over the data knows.
    kinds = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
    groups = options.get("groups", 1)
    plain = kinds[x.ndim](shape[1] * groups, shape[0], shape[2:], bias=bias, **options)  # pyright: ignore
    twin = _Net(plain, shape[0], x).double()
    twin.load_state_dict(model.state_dict())
    factors = kfac.kfac(twin, x, y, names, "classification")
    exact = kfac.dense_kfac(factors, names)
    assert_close(la.posterior().to_dense() - torch.eye(len(exact)), exact, "backend")


LAYERS: dict[str, Callable[[], nn.Conv2d]] = {
    "depthwise": lambda: _Padding(4, 4, 3, groups=4, bias=False),
    "groups": lambda: _Padding(4, 6, 2, stride=2, groups=2),
    "one group": lambda: _Padding(4, 3, 3),
}
X = torch.randn(5, 4, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.tensor([0, 1, 1, 0, 1])


def _twins(name: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    model = _Net(layer, layer.out_channels, X).double()
    other = _Net(_padded_before(layer).double(), layer.out_channels, X).double()
    other.head.load_state_dict(model.head.state_dict())
    return model, other


@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_pad_by_themselves(name: str, structure: str) -> None:
    """Evidence, predictions, samples and states of a layer that pads are those of padding before a plain layer."""
    fits = [posterior(model, structure) for model in _twins(name)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for la in fits:
            la.fit([(X[:2], Y[:2]), (X[2:], Y[2:])])
    la, other = fits
    assert not any("fallback" in words for words in la.coverage().values())
    assert_close(la.log_marginal_likelihood(), other.log_marginal_likelihood(), "backend")
    for form in ("full", "joint"):
        assert_close(latent_of(la, X, form).variance, latent_of(other, X, form).variance, "backend")
    draws = [each.sample(3, generator=torch.Generator().manual_seed(0)) for each in fits]
    if structure not in ("lowrank", "lowrank_kron"):  # their bases are known up to signs
        assert_close(draws[0], draws[1], "backend")
    loaded = posterior(_twins(name)[0], structure)
    loaded.load_state_dict(la.state_dict())
    assert torch.equal(loaded(X), la(X))


@pytest.mark.parametrize("structure", ["kron", "diag", "block"])
def test_data_that_come_and_go(structure: str) -> None:
    la, once = (posterior(_twins("depthwise")[0], structure) for _ in range(2))
    once.fit([(X[:3], Y[:3]), (X[3:], Y[3:])])
    la.fit([(X[:3], Y[:3])])
    la.fit([(X[3:], Y[3:])], override=False)
    assert_close(la.posterior().to_dense(), once.posterior().to_dense(), "algebra")
    la.forget([(X[3:], Y[3:])])
    few = posterior(_twins("depthwise")[0], structure)
    few.fit([(X[:3], Y[:3])])
    assert_close(la.posterior().to_dense(), few.posterior().to_dense(), "algebra")


def test_entries_of_a_depthwise_weight() -> None:
    models = _twins("depthwise")
    indices = torch.tensor([0, 3, 9, 10, 20, 35, 36, 40])
    fits = [Laplace(m, "classification", "subnetwork", "kron", subnetwork_indices=indices) for m in models]
    for la in fits:
        la.fit([(X, Y)])
    assert_close(fits[0].posterior().to_dense(), fits[1].posterior().to_dense(), "backend")


class _Separate(nn.Module):
    """Every group a convolution of its own."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        g = layer.groups
        parts = [nn.Conv2d(layer.in_channels // g, layer.out_channels // g, layer.kernel_size) for _ in range(g)]  # pyright: ignore
        with torch.no_grad():
            for part, weight, bias in zip(parts, layer.weight.chunk(g), layer.bias.chunk(g), strict=True):  # pyright: ignore
                part.weight.copy_(weight)
                part.bias.copy_(bias)  # pyright: ignore
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(some) for part, some in zip(self.parts, x.chunk(len(self.parts), 1), strict=True)], 1)


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diag"])
def test_groups_are_convolutions_of_their_own(structure: str) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, 2, groups=2).double()
    model = _Net(layer, 6, X).double()
    other = _Net(_Separate(layer).double(), 6, X).double()
    other.head.load_state_dict(model.head.state_dict())
    fits = [posterior(each, structure) for each in (model, other)]
    for la in fits:
        la.fit([(X, Y)])
    sizes = [p.numel() for p in other.layer.parameters()]  # weight, bias, weight, bias
    starts = [0, sizes[0], sizes[0] + sizes[1], 2 * sizes[0] + sizes[1]]
    order = [torch.arange(starts[i], starts[i] + sizes[i]) for i in (0, 2, 1, 3)]
    n = fits[0].n_params
    index = torch.cat([*order, torch.arange(sum(sizes), n)])
    of_parts = fits[1].posterior().to_dense()[index][:, index]
    assert_close(fits[0].posterior().to_dense(), of_parts, "algebra")
    assert_close(fits[0].log_marginal_likelihood(), fits[1].log_marginal_likelihood(), "algebra")
    assert_close(latent_of(fits[0], X, "full").variance, latent_of(fits[1], X, "full").variance, "algebra")
