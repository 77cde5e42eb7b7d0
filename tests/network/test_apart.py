"""A copy of a network computes what the network does, whatever the ways by which it reaches its layers."""

from __future__ import annotations

import collections
import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from laplace import Laplace
from laplace.errors import UnsupportedError
from laplace.network.apart import needs_itself

X, Y = torch.linspace(-1, 1, 36).double().view(12, 3), torch.linspace(-2, 1, 24).double().view(12, 2).sin()


class Plain(nn.Module):
    """Two layers that are attributes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
        self.held: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)))


@dataclass(slots=True)
class Slotted:
    layer: nn.Module


class Named(NamedTuple):
    layer: nn.Module


class Kept(list[nn.Module]):
    pass


class Around(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


def nested(layer: nn.Module, depth: int) -> Any:
    return layer if not depth else [nested(layer, depth - 1)]


def innermost(value: Any) -> nn.Module:
    return innermost(value[0]) if isinstance(value, list) else value


def with_property(layer: nn.Module) -> object:
    class Holder:
        @property
        def layer(self) -> nn.Module:
            return layer

    return Holder()


def list_twice(layer: nn.Module) -> Any:
    values = [layer]
    return values, Slotted(values)  # type: ignore[arg-type]


HELD: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any], nn.Module]]] = {
    "slots": (Slotted, lambda held: held.layer),
    "named tuple": (Named, lambda held: held.layer),
    "deque": (lambda layer: collections.deque([layer]), lambda held: held[0]),
    "defaultdict": (lambda layer: collections.defaultdict(list, head=layer), lambda held: held["head"]),
    "list of a class": (lambda layer: Kept([layer]), lambda held: held[0]),
    "frozen set": (lambda layer: frozenset([layer]), lambda held: next(iter(held))),
    "mapping proxy": (lambda layer: types.MappingProxyType({"head": layer}), lambda held: held["head"]),
    "hidden module": (lambda layer: [Around(layer)], lambda held: held[0].layer),
    "weak proxy": (lambda layer: [weakref.proxy(layer)], lambda held: held[0]),
    "weak method": (lambda layer: weakref.WeakMethod(layer.forward), lambda held: held()),
    "weak values": (lambda layer: weakref.WeakValueDictionary(head=layer), lambda held: held["head"]),
    "property": (with_property, lambda held: held.layer),
    "list that an object has, too": (list_twice, lambda held: held[1].layer[0]),
}


def numbers(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Curvature, variances and sampled outputs."""
    la = Laplace(model, "regression", "all", "full")
    la.fit([(X, Y)])
    samples = la.predictive_samples(X, pred_type="nn", n_samples=3, generator=torch.Generator().manual_seed(1))
    return la.H, la(X)[1], samples


@functools.cache
def expected() -> tuple[Tensor, Tensor, Tensor]:
    return numbers(Plain())


def assert_right(model: nn.Module) -> None:
    for found, right in zip(numbers(model), expected(), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", HELD)
def test_layers_that_others_hold_are_run_at_the_weights_asked_for(form: str) -> None:
    hold, layer_of = HELD[form]

    class Holding(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return layer_of(self.held)(torch.tanh(self.first(x)))

    model = Holding()
    model.held = hold(model.head)
    assert needs_itself(model)
    assert_right(model)


OF_THE_MODULE: dict[str, nn.Module] = {}


class OfClass(Plain):
    known: dict[str, nn.Module] = {}  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        return self.known["head"](torch.tanh(self.first(x)))


class OfGlobal(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([OF_THE_MODULE["head"](each) for each in (torch.tanh(self.first(x)),)])


@pytest.mark.parametrize("kind", [OfClass, OfGlobal])
def test_layers_of_a_class_or_a_global_variable(kind: type[Plain]) -> None:
    model = kind()
    (OfClass.known if kind is OfClass else OF_THE_MODULE)["head"] = model.head
    try:
        assert needs_itself(model)
        assert_right(model)
    finally:
        OfClass.known.clear()
        OF_THE_MODULE.clear()


def test_an_object_that_takes_the_place_of_another_is_seen() -> None:
    class Holding(Plain):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(x))
            return self.head(hidden) if self.held is None else self.held.layer(hidden)

    model = Holding()
    assert not needs_itself(model)
    model.held = Slotted(nn.Identity())
    assert not needs_itself(model)
    model.held = Slotted(model.head)
    assert needs_itself(model)


def test_wrapped_functions_are_moved() -> None:
    model = Plain()
    forward = model.forward

    @functools.wraps(forward)
    def wrapped(x: Tensor) -> Tensor:
        return forward(x)

    model.forward = wrapped
    assert not needs_itself(model)
    assert_right(model)


def test_an_attribute_of_the_name_of_a_global_variable_is_none() -> None:
    class Wrapper(nn.Module):
        def __init__(self, first: nn.Module) -> None:
            super().__init__()
            self.OF_THE_MODULE = first

        def forward(self, x: Tensor) -> Tensor:
            return self.OF_THE_MODULE(x)

    model = Wrapper(nn.Linear(3, 2))
    OF_THE_MODULE["head"] = model
    try:
        assert not needs_itself(model)
    finally:
        OF_THE_MODULE.clear()


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_parameters_past_their_modules_are_refused(structure: Any, subset: Any) -> None:
    class Listed(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(torch.tanh(self.first(x)), self.held[0], self.head.bias)

    model = Listed()
    model.held = [model.head.weight]
    options: Any = {} if subset == "all" else {"last_layer_name": "head"}
    with pytest.raises(UnsupportedError, match=r"'head\.weight' past its modules"):
        Laplace(model, "regression", subset, structure, **options).fit([(X, Y)])


def test_layers_that_no_search_finds_are_refused() -> None:
    class Deep(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return innermost(self.held)(torch.tanh(self.first(x)))

    model = Deep()
    model.held = nested(model.head, 9)
    with pytest.raises(UnsupportedError, match="past its modules"):
        Laplace(model, "regression", "all", "full").fit([(X, Y)])


def test_shapes_of_other_parameters_may_be_asked() -> None:
    class Asking(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.held[0].dtype).view(-1, self.held[0].shape[1]))

    model = Asking()
    model.held = [model.first.weight]
    assert_right(model)


def test_frozen_parameters_may_be_held_by_anything() -> None:
    class Listed(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(functional.linear(x, self.held[0], self.first.bias)))

    plain, model = Plain(), Listed()
    model.held = [model.first.weight]
    for each in (plain, model):
        each.first.weight.requires_grad_(False)
    for found, right in zip(numbers(model), numbers(plain), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


def test_a_finaliser_runs_once() -> None:
    ended: list[int] = []

    class Ending(Plain):
        def __del__(self) -> None:
            ended.append(1)

    model = Ending()
    assert_right(model)
    assert not ended
