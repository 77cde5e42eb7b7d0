"""One way from a backend's name and its options to an engine."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import laplace.curvature
from laplace import Laplace
from laplace.curvature import CurvatureInterface, NativeGGN
from laplace.engines.engine import EngineOptions
from laplace.errors import InvalidArgument, UnsupportedError

NAMES = tuple(laplace.curvature.__all__)
COMMON = ("model", "likelihood", "last_layer", "subnetwork_indices", "dict_key_x", "dict_key_y")
PACKAGES = {"Curvlinops": "curvlinops", "BackPack": "backpack", "Asdl": "asdl"}
X, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2


def backend(name: str) -> Any:
    """A class by its name; skips the test if its package is missing."""
    for prefix, package in PACKAGES.items():
        if name.startswith(prefix):
            pytest.importorskip(package)
    return getattr(importlib.import_module("laplace.curvature"), name)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("name", NAMES)
def test_constructors_take_the_options_that_are_declared_and_hold_them(name: str) -> None:
    cls = getattr(laplace.curvature, name)
    taken = [key for key in inspect.signature(cls).parameters if key not in (*COMMON, *cls.synonyms)]
    assert taken == list(cls.engine_options)
    defaults = EngineOptions()
    made = cls(network(), "classification")
    assert {key: getattr(made, key) for key in taken} == {key: getattr(defaults, key) for key in taken}


@pytest.mark.parametrize("name", NAMES)
def test_a_fit_makes_the_engine_of_an_object_without_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = backend(name)
    other: dict[str, Any] = {"memory_budget": 2**20, "num_samples": 3, "stochastic": True, "kfac_approx": "reduce"}
    options = {key: value for key, value in other.items() if key in cls.engine_options}
    la = Laplace(network(), "classification", "all", "full", backend=cls, backend_kwargs=options)
    problem, likelihood = la.weights.discover(X), la.likelihood_object
    known = cls(la.model, "classification", **options).engine(problem, likelihood)

    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an object was made")

    monkeypatch.setattr(CurvatureInterface, "__init__", refused)
    engine = la.engine
    assert type(engine) is type(known) is cls.engine_type
    assert engine.options == known.options and engine.kind == cls.kind


@pytest.mark.parametrize("name", NAMES)
def test_what_a_constructor_does_not_take_a_fit_refuses_too(name: str) -> None:
    cls = backend(name)
    la = Laplace(network(), "classification", "all", "full", backend=cls, backend_kwargs={"memory_bugdet": 1})
    with pytest.raises(InvalidArgument, match=rf"{name}.*backend_kwargs=\['memory_bugdet'\]"):
        la.fit([(X, Y)])
    with pytest.raises(TypeError, match="memory_bugdet"):
        cls(la.model, "classification", memory_bugdet=1)


def test_another_name_of_an_option() -> None:
    cls = backend("CurvlinopsGGN")
    options = {"stochastic": True, "mc_samples": 4, "num_samples": 2}
    la = Laplace(network(), "classification", "all", "full", backend=cls, backend_kwargs=options)
    la.fit([(X, Y)])
    assert la.engine.options.num_samples == la.backend.num_samples == 4


def test_the_choice_of_weights_may_be_given_as_an_option() -> None:
    """As dictionaries hold it that older scripts have passed on."""
    la = Laplace(network(), "classification", "last_layer", "full", backend_kwargs={"last_layer": True})
    la.fit([(X, Y)])
    assert la.n_params == 10


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"memory_budget": 0}, InvalidArgument),
        ({"max_passes": -1}, InvalidArgument),
        ({"num_samples": 0}, InvalidArgument),
        ({"kfac_approx": "mean"}, InvalidArgument),
        ({"stochastic": True, "split_outputs": True}, UnsupportedError),
    ],
)
def test_options_that_are_not_accepted(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="|".join(options)):
        EngineOptions(**options)


def test_an_object_s_options_can_be_changed_before_it_computes() -> None:
    interface = NativeGGN(network(), "classification")
    interface.stochastic = True
    assert not torch.equal(interface.full(X, Y)[1], interface.full(X, Y)[1])
