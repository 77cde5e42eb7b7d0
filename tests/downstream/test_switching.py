"""Names and calls of laplace-torch that scripts use in passing, as they behave there."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from laplace import DiagLaplace, FullLaplace, KronLaplace, Laplace
from laplace.curvature import AsdlGGN
from laplace.errors import InvalidData, ModelChangedError, ReadOnlyError, StateError

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


# Keyword arguments of ASDL, which every curvature closure of a subclass passes on.


class Diag(DiagLaplace):
    def _curv_closure(self, X: Tensor, y: Tensor, N: int) -> tuple[Tensor, Tensor]:
        return self.backend.diag(X, y, N=N, **self._asdl_fisher_kwargs)


class Full(FullLaplace):
    def _curv_closure(self, X: Tensor, y: Tensor, N: int) -> tuple[Tensor, Tensor]:
        return self.backend.full(X, y, N=N, **self._asdl_fisher_kwargs)


class Kron(KronLaplace):
    def _curv_closure(self, X: Tensor, y: Tensor, N: int) -> tuple[Tensor, Any]:
        return self.backend.kron(X, y, N=N, **self._asdl_fisher_kwargs)


@pytest.mark.parametrize(("own", "plain"), [(Diag, DiagLaplace), (Full, FullLaplace), (Kron, KronLaplace)])
def test_subclasses_that_pass_them_on(own: type, plain: type) -> None:
    model = network()
    la, expected = own(model, "classification"), plain(model, "classification")
    assert la._asdl_fisher_kwargs == {}
    for each in (la, expected):
        each.fit([(X[:7], Y[:7]), (X[7:], Y[7:])])
    torch.testing.assert_close(la(X), expected(X), rtol=1e-5, atol=1e-6)


def test_they_are_those_that_were_given() -> None:
    pytest.importorskip("asdl")
    options = {"fisher_type": "fisher_exact"}
    la = Laplace(network(), "classification", "all", "kron", backend=AsdlGGN, asdl_fisher_kwargs=options)
    assert la._asdl_fisher_kwargs == options
    la._asdl_fisher_kwargs["other"] = 1
    assert la._asdl_fisher_kwargs == options
    with pytest.raises(ReadOnlyError, match="pass asdl_fisher_kwargs="):
        la._asdl_fisher_kwargs = {}


# Private helpers.


def test_items_of_pairs() -> None:
    from laplace.utils.functional_utils import _individual_reward_inputs

    pairs = torch.randn(4, 2, 3)
    assert torch.equal(_individual_reward_inputs(pairs, "input_ids"), pairs.flatten(0, 1))
    batch = {
        "input_ids": pairs, "mask": torch.arange(8).view(4, 2), "labels": torch.arange(4), "scale": torch.ones(()),
        "table": torch.ones(5, 2), "name": "a",
    }  # fmt: skip
    items = _individual_reward_inputs(batch, "input_ids")
    assert isinstance(items, Mapping)
    assert torch.equal(items["input_ids"], pairs.flatten(0, 1))
    assert items["mask"].tolist() == list(range(8))
    assert items["labels"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert items["scale"].shape == () and items["table"].shape == (5, 2) and items["name"] == "a"
    for other in (torch.ones(4), torch.ones(4, 3), torch.ones(4, 3, 2)):
        with pytest.raises(InvalidData, match="are no pairs"):
            _individual_reward_inputs(other, "input_ids")


def double(model: nn.Module) -> nn.Module:
    return model.double()


def frozen(model: nn.Module) -> nn.Module:
    model[0].weight.requires_grad_(False)
    return model


def trained(model: nn.Module) -> nn.Module:
    model[0].bias.data.add_(1)
    return model


def counted(model: nn.Module) -> nn.Module:
    model[1].running_mean.add_(1)
    return model


def longer(model: nn.Module) -> nn.Module:
    return nn.Sequential(*model, nn.Identity())


@pytest.mark.parametrize("change", [double, frozen, trained, counted, longer])
def test_fingerprints_of_networks(change: Any) -> None:
    from laplace.utils.functional_utils import _check_model_fingerprint, _model_fingerprint

    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    fingerprint = _model_fingerprint(model)
    assert list(fingerprint) == ["state_dict", "active_parameters", "module_structure"]
    _check_model_fingerprint(copy.deepcopy(model).eval(), fingerprint)
    with pytest.raises(StateError, match="not that of the fingerprint"):
        _check_model_fingerprint(change(model), fingerprint)
    with pytest.raises(StateError):
        _check_model_fingerprint(model, {})


# Samples in the network's own layer.


def test_samples_in_the_network_s_own_layer_are_refused_with_the_place_where_they_belong() -> None:
    model = network()
    la = Laplace(model, "classification", "last_layer", "full")
    la.fit([(X, Y)])
    own = parameters_to_vector(model[-1].parameters()).detach()
    theta = la.sample(1, generator=torch.Generator().manual_seed(0))[0]
    vector_to_parameters(theta, model[-1].parameters())
    with pytest.raises(ModelChangedError, match=r"belong into la\.model\.last_layer"):
        la(X)
    expected = model(X)
    vector_to_parameters(own, model[-1].parameters())
    la(X)
    vector_to_parameters(theta, la.model.last_layer.parameters())  # as the message says
    torch.testing.assert_close(la.model(X), expected)
    la(X)
