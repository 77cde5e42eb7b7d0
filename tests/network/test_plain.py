"""Copies of plain networks are used again: every call computes what a network that was never seen before does."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from operator import is_
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from laplace import Laplace
from laplace.errors import InvalidArgument, ModelChangedError
from laplace.network import plain
from laplace.network.model_guard import private_copy

X, Y = torch.linspace(-1, 1, 36).double().view(12, 3), torch.linspace(-2, 1, 24).double().view(12, 2).sin()
DATA = [(X[:6], Y[:6]), (X[6:], Y[6:])]


class Plain(nn.Module):
    """A network whose outputs tell values of its attributes apart that are equal, and their order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        self.head = nn.Linear(3, 2).double()
        self.again = self.first
        self.shift: Any
        self.register_buffer("shift", torch.zeros(3).double())
        self.scale: Any = 1
        self.factors: Any = [1, 2.0]
        self.steps: Any = OrderedDict(tanh=1, twice=2.0)
        self.act: Any = torch.tanh
        self.me: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for name, value in self.steps.items():
            x = told(value) * (x + 1 if name == "tanh" else 2 * x)
        z = self.again(self.act(self.second(self.first(x))))
        for buffer in self._buffers.values():
            z = z if buffer is None else z + buffer
        return self.head(z) * told(self.scale) + sum(map(told, self.factors))


def told(value: Any) -> Any:
    """A number, or numbers, by the value and its type."""
    if isinstance(value, float) and value == 0:
        return 3.0 if str(value) == "-0.0" else 4.0
    return value + (0.5 if isinstance(value, bool) else 0.25 if isinstance(value, float) else 0)


class Tripled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 3 * super().forward(input)


def out(model: nn.Module) -> Tensor:
    with private_copy(model) as own:
        return own(X)


def fitted(model: nn.Module, structure: Any = "kron", **options: Any) -> Any:
    la = Laplace(model, "regression", hessian_structure=structure, subset_of_weights="all", **options)
    la.fit(DATA)
    return la


def require_as_fresh(model: nn.Module, times: int = 2) -> None:
    """Checks that the copies of a network compute what the network does."""
    for _ in range(times):
        modes = [module.training for module in model.modules()]
        own = out(model)
        assert [module.training for module in model.modules()] == modes
        flags = [(module, module.training) for module in model.modules()]
        expected = model.eval()(X)
        for module, training in flags:
            module.training = training
        assert torch.equal(own.nan_to_num(7.0), expected.nan_to_num(7.0))


def sets(**values: Any) -> Callable[[Any], Any]:
    def change(model: Any) -> None:
        vars(model).update(values)

    return change


def reorder(model: Any) -> None:
    model.steps.move_to_end("tanh")


def reorder_modules(model: Any) -> None:
    model._modules["second"], model._modules["first"] = model._modules.pop("first"), model._modules.pop("second")


def rename(model: Any) -> None:
    model.steps["sine"] = model.steps.pop("tanh")


def move(model: Any) -> None:
    model.factors, model.others = [1], list[Any]([2.0])
    out(model)
    model.factors.append(model.others.pop())


def replace_table(name: str, key: str, value: Callable[[], Tensor]) -> Callable[[Any], Any]:
    """Gives a module an equal table, which is written to later."""

    def change(model: Any) -> None:
        owner = model if name == "_buffers" else model.first
        setattr(owner, name, dict(getattr(owner, name)))
        require_as_fresh(model)
        getattr(owner, name)[key] = value()

    return change


def replace_dict(model: Any) -> None:
    model.first.__dict__ = dict(model.first.__dict__)
    require_as_fresh(model)
    model.first.weight = nn.Parameter(torch.randn(3, 3).double())


def hook(model: Any) -> None:
    handle = model.first.register_forward_hook(lambda *args: 2 * args[2])
    require_as_fresh(model)
    handle.remove()


def hook_in_another_table(model: Any) -> None:
    model.first._forward_pre_hooks = OrderedDict()
    model.first.register_forward_pre_hook(lambda _, args: (2 * args[0],))


def new_buffer(model: Any) -> None:
    model.register_buffer("more", torch.ones(3).double())
    require_as_fresh(model)
    model.more = torch.full((3,), 2.0).double()
    require_as_fresh(model)
    model.shift = None
    require_as_fresh(model)
    del model.more


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.shift += 1
        model.first.weight.data[0] += 1


def fill_a_tensor(model: Any) -> None:
    model.scale = torch.tensor(2.0).double()
    require_as_fresh(model)
    model.scale.fill_(3.0)


def other_than_a_container(value: Any) -> Callable[[Any], Any]:
    """Puts a value in the place of an empty and of a full container."""

    def change(model: Any) -> None:
        model.more, model.factors = {}, [1, 2.0]
        require_as_fresh(model)
        model.more = value
        require_as_fresh(model)
        model.more = [1]
        require_as_fresh(model)
        model.more = value

    return change


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a float for an integer": sets(scale=1.0),
    "a truth value for an integer": sets(scale=True),
    "a zero of the other sign": lambda model: [sets(scale=0.0)(model), out(model), sets(scale=-0.0)(model)],
    "NaN": sets(scale=float("nan")),
    "NaN for NaN": lambda model: [sets(scale=float(name))(model) or out(model) for name in ("nan", "nan")],
    "a number that becomes an equal tensor": fill_a_tensor,
    "a number that becomes several": sets(scale=torch.tensor([1.0, 2.0]).double()),
    "a number that becomes a NumPy array": sets(scale=np.float64(3.0)),
    "an entry of a list": lambda model: model.factors.__setitem__(0, 2),
    "an equal entry of a list": lambda model: model.factors.__setitem__(0, True),
    "a tensor in a list": lambda model: model.factors.__setitem__(0, torch.tensor([0.5, 1.0]).double()),
    "a tuple for a list": sets(factors=(1, 3.0)),
    "an entry that changes its list": move,
    "None for a container": other_than_a_container(None),
    "a number for a container": other_than_a_container(5),
    "a tensor for a container": other_than_a_container(torch.ones(3)),
    "the order of a mapping": reorder,
    "the name of an entry": rename,
    "an equal mapping of another kind": sets(steps={"twice": 2.0, "tanh": 1}),
    "the order of submodules": reorder_modules,
    "a function": sets(act=torch.sin),
    "a partial function": sets(act=functools.partial(torch.clamp, max=0.1)),
    "the class of a module": lambda model: setattr(model.second, "__class__", Tripled),
    "attributes of a module": replace_dict,
    "a table of parameters": replace_table("_parameters", "weight", lambda: nn.Parameter(torch.randn(3, 3).double())),
    "a table of buffers": replace_table("_buffers", "shift", lambda: torch.ones(3).double()),
    "a parameter": lambda model: setattr(model.first, "weight", nn.Parameter(torch.randn(3, 3).double())),
    "a frozen parameter": lambda model: model.first.weight.requires_grad_(False),
    "no parameter": lambda model: setattr(model.first, "bias", None),
    "an equal submodule": lambda model: setattr(model, "second", copy.deepcopy(model.second)),
    "a submodule of several names": lambda model: setattr(model, "again", model.second),
    "a submodule fewer": lambda model: setattr(model, "again", nn.Identity()),
    "buffers": new_buffer,
    "numbers in place": in_place,
    "a forward of the instance": lambda model: setattr(model, "forward", lambda x: model.head(model.first(x))),
    "a forward of a layer": lambda model: setattr(model.first, "forward", model.second.forward),
    "a hook for a while": hook,
    "a hook in a new table": hook_in_another_table,
    "the training mode": lambda model: model.train(),
    "the training mode of a layer": lambda model: model.first.train(),
    "itself in a list": lambda model: setattr(model, "me", [model]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_change_between_calls(change: Callable[[Any], Any]) -> None:
    """Whatever a user changes, the next call computes with it."""
    model = Plain().eval()
    require_as_fresh(model, 3)
    assert plain.plain([*model.modules()]) is not None
    change(model)
    require_as_fresh(model, 3)
    if out(model).isfinite().all():
        known = fitted(model)(X)
        plain._KNOWN.pop(model, None)
        assert all(map(torch.equal, known, fitted(model)(X)))


class Writes(Plain):
    """Writes an attribute, a list and a buffer in every pass, and computes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.log = 0, list[int]()
        self.register_buffer("runs", torch.zeros(()).double(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(len(x))
        self.runs += 1
        return super().forward(x) * (1 + self.calls + len(self.log) + self.runs)


def test_what_a_pass_writes_is_not_there_in_the_next_block() -> None:
    """Counters and running statistics start from those of the network, which stays as it is."""
    model = Writes().eval()
    first = out(model)
    assert all(torch.equal(out(model), first) for _ in range(3))
    assert model.calls == len(model.log) == int(model.runs) == 0


class Keeps(Plain):
    """Keeps what a layer gives, or nothing, in the place of a container."""

    def __init__(self, start: Any, kept: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.features, self.kept = start, kept

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.kept(self.first(x))
        return super().forward(x)


KEPT: list[Callable[[Tensor], Any]] = [lambda z: z, lambda z: z.sum(), lambda z: None, len]


@pytest.mark.parametrize("kept", KEPT, ids=["a tensor", "a scalar", "None", "a number"])
@pytest.mark.parametrize("start", [[], {}, [1]], ids=str)
def test_a_pass_keeps_what_is_no_container(start: Any, kept: Callable[[Tensor], Any]) -> None:
    """A container in whose place a pass leaves something else is the network's own in the next block."""
    model = Keeps(start, kept)
    la = fitted(model)
    assert torch.equal(la(X)[1], fitted(Plain())(X)[1])
    require_as_fresh(copy.deepcopy(model))
    assert model.features is start


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_training_mode_between_calls(structure: str) -> None:
    """Neither the mode counts nor a prediction changes it; statistics that a pass wrote are noticed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)).double().eval()
    la = fitted(model, structure)
    expected = la(X)[1]
    model.train()
    assert torch.equal(la(X)[1], expected)
    assert all(module.training for module in model.modules())
    model(X)
    with pytest.raises(ModelChangedError, match="weights or buffers changed"):
        la(X)
    assert torch.equal(fitted(model, structure)(X)[1], fitted(copy.deepcopy(model), structure)(X)[1])


def test_requires_grad_between_fits() -> None:
    """A fit counts the parameters that are trained at the moment."""
    model = Plain()
    whole = fitted(model)
    model.first.requires_grad_(False)
    part = fitted(model)
    assert len(whole.mean) - len(part.mean) == 12
    assert torch.equal(part(X)[1], fitted(copy.deepcopy(model))(X)[1])
    model.first.requires_grad_(True)
    assert torch.equal(fitted(model)(X)[1], whole(X)[1])


class Gained(nn.Linear):
    """A layer with state of its own."""

    gain = 2

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input) * self.gain


def test_subclass_of_a_layer() -> None:
    """What a layer's class adds to it is seen at the next call."""
    model: Any = nn.Sequential(Gained(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    la = fitted(model)
    la(X)
    model[0].gain = 3
    with pytest.raises(ModelChangedError):
        la(X)
    assert torch.equal(fitted(model)(X)[1], fitted(copy.deepcopy(model))(X)[1])


def test_lazy_layers() -> None:
    """Lazy layers change their class and attributes at the first pass."""
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2)).double()
    with pytest.raises(InvalidArgument, match="lazy"):
        fitted(model)
    model(X)
    assert torch.equal(fitted(model)(X)[1], fitted(copy.deepcopy(model))(X)[1])


class Checkpointed(Plain):
    """Reads its modules again in the backward pass."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("kind", [Plain, Checkpointed])
def test_recorded_graph_is_read_after_other_calls(kind: type[Plain]) -> None:
    """What was recorded is of the buffers and weights of its own block."""
    model, x = kind(), X.clone().requires_grad_()
    with private_copy(model) as own:
        later = own(x)
    model.shift += 1
    for _ in range(3):
        out(model)
    model.shift -= 1
    (gradient,) = torch.autograd.grad(later.square().sum(), x)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    assert torch.equal(gradient, expected)


def test_lazy_predictions_and_gradients() -> None:
    """Predictions that are read after other calls are those of their own inputs."""
    la = fitted(Plain(), enable_backprop=True)
    x = X.clone().requires_grad_()
    later, (_, variance) = la.predict(X[:3]), la(x)
    expected = la(X[6:])
    assert torch.equal(later.latent_variance, la.predict(X[:3]).latent_variance)
    assert torch.equal(expected[1], la(X[6:])[1])
    (gradient,) = torch.autograd.grad(variance.sum(), x)
    (again,) = torch.autograd.grad(la(x)[1].sum(), x)
    assert torch.equal(gradient, again)


def test_blocks_inside_each_other_and_threads() -> None:
    """Blocks have different copies, within a thread and in several."""
    model = Plain()
    with private_copy(model) as one, private_copy(model) as other:
        assert not {*one.modules()} & {*other.modules()}
        assert all(map(is_, one.parameters(), model.parameters()))
    la = fitted(model)
    expected, wrong = [la(x[None]) for x in X], list[int]()

    def ask(first: int) -> None:
        for i in range(first, first + 24):
            answer = la(X[None, i % 12])
            if not all(map(torch.equal, answer, expected[i % 12])):
                wrong.append(i)

    threads = [threading.Thread(target=ask, args=(3 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_error_within_a_block() -> None:
    """A copy in which a pass failed, with whatever is left in it, is not used again."""
    model = Plain().eval()
    expected = out(model)
    with pytest.raises(ZeroDivisionError), private_copy(model) as own:
        own._modules.clear()
        raise ZeroDivisionError
    with private_copy(model) as own:
        vars(own)["scale"] = True
        own.register_forward_hook(lambda *_: torch.zeros(12, 2).double())
    assert all(torch.equal(out(model), expected) for _ in range(3))


def test_model_carries_no_notes() -> None:
    """Networks that were used, their copies and their pickles hold what they did before."""
    model = Plain()
    before = [set(vars(module)) for module in model.modules()]
    la = fitted(model)
    la(X)
    others = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(la).model]
    assert all([set(vars(module)) for module in other.modules()] == before for other in others)
    assert b"laplace" not in pickle.dumps(nn.Sequential(*model.children()))
    for other in others[1:]:
        other.first.weight.data.zero_()
        assert torch.equal(out(other), other.eval()(X))
        assert torch.equal(fitted(other)(X)[1], fitted(copy.deepcopy(other))(X)[1])


LATER: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: None,
    "an attribute": lambda model: setattr(model, "me", [model]),
    "an attribute of a layer": lambda model: setattr(model.first, "parent", (model,)),
    "an entry": lambda model: model.factors.append(model),
    "a hook": lambda model: model.second.register_forward_hook(lambda *_, owner=model: owner.me),
    "a method": lambda model: setattr(model, "forward", model.first.forward),
}


@pytest.mark.parametrize("change", LATER.values(), ids=LATER)
def test_networks_are_let_go(change: Callable[[Any], Any]) -> None:
    """What is known of a network does not keep it, nor its layers, whatever was put on it after the last call."""
    model = Plain()
    la = fitted(model)
    la(X)
    change(model)
    gone = [weakref.ref(part) for part in (*model.modules(), *model.parameters())]
    del model, la
    gc.collect()
    assert not [ref for ref in gone if ref() is not None]


BEFORE: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda model: setattr(model.first.weight, "owner", model),
    "a hook": lambda model: model.first.weight.register_hook(lambda _, owner=model: None),
}


@pytest.mark.parametrize("change", BEFORE.values(), ids=BEFORE)
def test_networks_whose_parameters_lead_to_them_are_let_go(change: Callable[[Any], Any]) -> None:
    """Nor do parameters that hold their network."""
    model = Plain()
    change(model)
    la = fitted(model)
    la(X)
    gone = weakref.ref(model)
    del model, la
    gc.collect()
    assert gone() is None
