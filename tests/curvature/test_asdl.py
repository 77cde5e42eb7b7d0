"""ASDL computes what it computes rightly, and leaves nothing behind; the rest is the native engine's."""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.curvature import (
    AsdlEF,
    AsdlGGN,
    AsdlHessian,
    AsdlInterface,
    BackPackGGN,
    NativeEF,
    NativeGGN,
    NativeHessian,
)
from laplace.curvature.asdl import batch_gradient
from laplace.engines.native.kinds import GGNEngine, HessianEngine
from laplace.errors import InstallationWarning, MissingDependency
from tests.curvature.layers import STEPS, Built, chain, dense_jacobian, network, truth
from tests.reference.compare import assert_close

pytest.importorskip("asdl.fisher")

PLAIN = partial(nn.Conv2d, 2, 3, 2)

# Dimensions of space, layers, and the quantities of which ASDL is right.
CASES: dict[str, tuple[int, list[Callable[[], nn.Module]], set[str]]] = {
    "conv2d": (2, [PLAIN, nn.ReLU], {"full", "diag", "kron"}),
    "stride and padding": (2, [partial(nn.Conv2d, 2, 3, (2, 3), stride=2, padding=(1, 0))], {"full", "diag", "kron"}),
    "valid": (2, [partial(nn.Conv2d, 2, 3, 2, padding="valid")], {"full", "diag", "kron"}),
    "without bias": (2, [partial(nn.Conv2d, 2, 3, 2, bias=False)], {"full", "diag", "kron"}),
    "in place": (2, [PLAIN, partial(nn.ReLU, inplace=True)], {"full", "diag", "kron"}),
    "wide with a small map": (2, [partial(nn.Conv2d, 2, 16, 3), partial(nn.Conv2d, 16, 16, 2)], {"full", "kron"}),
    "wide with one position": (2, [partial(nn.Conv2d, 2, 16, 5)], {"full", "diag", "kron"}),
    "same": (2, [partial(nn.Conv2d, 2, 3, 3, padding="same")], set()),
    "reflect": (2, [partial(nn.Conv2d, 2, 3, 3, padding=1, padding_mode="reflect")], set()),
    "groups": (2, [partial(nn.Conv2d, 2, 4, 2, groups=2)], set()),
    "dilation": (2, [partial(nn.Conv2d, 2, 4, 2, dilation=2)], set()),
    "conv1d": (1, [partial(nn.Conv1d, 2, 3, 2)], set()),
    "transposed": (2, [partial(nn.ConvTranspose2d, 2, 3, 2)], set()),
    "batch norm": (2, [partial(nn.BatchNorm2d, 2)], set()),
    "linear on positions": (1, [partial(nn.Linear, 7, 4), nn.Tanh], {"kron"}),
    "prelu": (0, [nn.PReLU], set()),
}


def values_of(engine: Any, primitive: str, x: Tensor, y: Tensor) -> list[Tensor]:
    found = getattr(engine, primitive)(x, y)[1]
    return [side for sides in found.kfacs() for side in sides] if primitive == "kron" else [found[0]]


@pytest.mark.parametrize("name", CASES)
def test_every_layer_is_computed_rightly_by_whom_the_table_says(name: str) -> None:
    dimensions, layers, owned = CASES[name]
    case = chain(dimensions, *layers)
    known = truth(case)
    for backend, native, dense in ((AsdlGGN, NativeGGN, known.ggn), (AsdlEF, NativeEF, known.ef)):
        for primitive, expected in (("full", [dense]), ("diag", [dense.diagonal()]), ("kron", None)):
            engine = case.engine(backend)
            expected = expected or values_of(case.engine(native), "kron", case.x, case.y)
            for own, other in zip(values_of(engine, primitive, case.x, case.y), expected, strict=True):
                assert_close(own, other, "backend", label=f"{primitive} of {backend.__name__}")
            own = {words == "asdl" for words in engine.coverage().values()}
            assert own == {primitive in owned}, engine.coverage()
        assert_close(dense_jacobian(engine, case.x), known.jacobian, "backend", label="Jacobian")


OWNED = {"modules", "residual", "function between", "activation in place", "branches", "written in place between"}


@pytest.mark.parametrize("name", STEPS)
def test_networks_of_any_form(name: str) -> None:
    case, known = network(name)
    for backend, expected in ((AsdlGGN, known.ggn), (AsdlEF, known.ef)):
        engine = case.engine(backend)
        assert_close(engine.full(case.x, case.y)[1][0], expected, "backend", label=backend.__name__)
        own = all(words == "asdl" for words in engine.coverage().values())
        assert own == (name in OWNED | {"outputs changed in place"}), engine.coverage()
        assert_close(engine.diag(case.x, case.y)[1][0], expected.diagonal(), "backend", label="diagonal")
        assert_close(dense_jacobian(engine, case.x), known.jacobian, "backend", label="Jacobian")
    hessian, native = (case.engine(b).full(case.x, case.y)[1][0] for b in (AsdlHessian, NativeHessian))
    assert_close(hessian, native, "backend", label="Hessian")


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """ASDL leaves twice of what it computes, of Kronecker factors twice the output side."""

    def twice(owner: Any, method: str, change: Callable[[Any, Any], Any]) -> None:
        original = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda *args, **options: change(args[0], original(*args, **options)))

    def change(maker: Any, result: Any) -> Any:
        for module in maker.model.modules():
            for attribute in ("fisher", "hessian"):
                found = module.__dict__.get(attribute)
                kinds = [] if found is None else [found.data, found.kron and found.kron.B]
                kinds += [] if found is None or found.diag is None else [found.diag.weight, found.diag.bias]
                for tensor in kinds:
                    if tensor is not None:
                        tensor.mul_(2)
        return result

    twice(importlib.import_module("asdl.fisher").FisherMaker, "forward_and_backward", change)
    twice(importlib.import_module("asdl.hessian").HessianMaker, "forward_and_backward", change)
    twice(importlib.import_module("asdl.gradient"), "batch_gradient", lambda _, result: 2 * result)


@pytest.mark.usefixtures("doubled")
@pytest.mark.parametrize(
    ("backend", "native"), [(AsdlGGN, NativeGGN), (AsdlEF, NativeEF), (AsdlHessian, NativeHessian)]
)
def test_the_numbers_are_the_package_s(backend: Any, native: Any) -> None:
    case, known = network("modules")
    pair = case.engine(backend), case.engine(native)
    full, expected = (engine.full(case.x, case.y)[1][0] for engine in pair)
    assert_close(full, 2 * expected, "backend")
    if backend is AsdlHessian:
        assert_close(pair[0].diag(case.x, case.y)[1], pair[1].diag(case.x, case.y)[1], "backend")
        assert all("it has no diag" in words for words in pair[0].coverage().values())
        return
    assert_close(pair[0].diag(case.x, case.y)[1][0], 2 * expected.diagonal(), "backend")
    own, other = (values_of(engine, "kron", case.x, case.y) for engine in pair)
    for i, (a, b) in enumerate(zip(own, other, strict=True)):
        assert_close(a, (1 if i % 3 == 1 else 2) * b, "backend")  # weight: output, input; bias: output
    assert_close(dense_jacobian(pair[0], case.x), 2 * known.jacobian, "backend")


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("primitive", ["full", "diag", "kron"])
@pytest.mark.turns
def test_sampled_curvature_is_right_on_average_and_follows_its_generator(primitive: str, likelihood: str) -> None:
    """Also of several draws, of which ASDL itself makes one k-th."""
    case, _ = network("modules")
    y = case.y if likelihood == "classification" else torch.zeros(len(case.y), 3, dtype=torch.float64)

    def draw(engine: Any) -> Tensor:
        return torch.cat([v.flatten() for v in values_of(engine, primitive, case.x, y)])

    def made(seed: int) -> Any:
        options = {"num_samples": 4, "generator": torch.Generator().manual_seed(seed)}
        return case.engine(AsdlGGN, likelihood, stochastic=True, **options)

    state = torch.get_rng_state()
    engine = made(0)
    draws = torch.stack([draw(engine) for _ in range(40)])
    error = draws.std(0) / len(draws) ** 0.5
    assert (error > 0).any(), "nothing was drawn"
    assert_close(draws.mean(0), draw(case.engine(NativeGGN, likelihood)), "mc", standard_error=error + 1e-9)
    assert torch.equal(draw(made(0)), draws[0]) and not torch.equal(draws[0], draws[1])
    assert not torch.equal(draw(made(1)), draws[0])
    assert torch.equal(state, torch.get_rng_state()), "the global generator was used"
    assert set(engine.coverage().values()) == {"asdl"}


def test_a_jacobian_in_parts_is_the_jacobian() -> None:
    case, known = network("residual")
    for backend in (AsdlGGN, BackPackGGN):
        parts = list(case.engine(backend, memory_budget=1).jacobian(case.x))
        assert len(parts) == len(case.x)
        assert_close(torch.cat([J.dense() for J, _ in parts]), known.jacobian, "backend")
        assert_close(torch.cat([f for _, f in parts]), case.model(case.x), "exact")


def test_gradients_of_predictions_with_respect_to_inputs_are_kept() -> None:
    case, _ = network("modules")
    la = Laplace(case.model, "classification", "all", "diag", backend=AsdlGGN, enable_backprop=True)
    la.fit([(case.x, case.y)])
    x = case.x.clone().requires_grad_()
    la(x).square().sum().backward()
    assert x.grad is not None and bool((x.grad != 0).any())


def test_nothing_stays_on_the_model_also_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise MemoryError("no more")

    case, known = network("modules")
    before = {name: set(module.__dict__) for name, module in case.model.named_modules()}
    maker = importlib.import_module("asdl.fisher").FisherMaker
    monkeypatch.setattr(maker, "_extract_fisher", broken)
    with pytest.raises(MemoryError):
        case.engine(AsdlGGN).full(case.x, case.y)
    monkeypatch.undo()
    assert_close(case.engine(AsdlGGN).full(case.x, case.y)[1][0], known.ggn, "backend")
    for name, module in case.model.named_modules():
        assert set(module.__dict__) == before[name]
        assert not module._forward_hooks and not module._backward_hooks and module._is_full_backward_hook is None
    for parameter in case.model.parameters():
        assert parameter.grad is None and parameter.requires_grad and not vars(parameter)


def test_both_packages_on_one_model_in_turns() -> None:
    """Left to themselves they quarrel: "Cannot use both regular backward hooks and full backward hooks"."""
    case, known = network("modules")
    for _ in range(2):
        for backend in (AsdlGGN, BackPackGGN):
            assert_close(case.engine(backend).diag(case.x, case.y)[1][0], known.ggn.diagonal(), "backend")


def test_batch_gradient_is_the_package_s_own_and_its_traces_stop_no_other_package() -> None:
    shared, known = network("modules")
    case = Built(copy.deepcopy(shared.model), shared.x, shared.y)

    def closure() -> Tensor:
        f = case.model(case.x)
        f[:, 1].sum().backward()
        return f

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gradients, f = batch_gradient(case.model, closure, return_outputs=True)
    assert_close(gradients, known.jacobian[:, 1], "backend")
    assert f.shape == (len(case.x), 3)
    engine = case.engine(BackPackGGN)  # of the kind of hooks that ASDL has used a mark is left on the modules
    assert_close(engine.full(case.x, case.y)[1][0], known.ggn, "backend")
    assert set(engine.coverage().values()) == {"backpack"}


def test_another_package_of_the_same_name_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package index's `asdl` is a parser."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "asdl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "asdl", ModuleType("asdl"))
    case, _ = network("modules")
    for backend, native in ((AsdlGGN, GGNEngine), (AsdlHessian, HessianEngine)):
        monkeypatch.setattr("laplace.curvature.packages._MISSED", set())
        with pytest.warns(InstallationWarning, match="pip install --no-deps asdfghjkl"):
            assert type(case.engine(backend)) is native
    with pytest.raises(MissingDependency, match="pip install --no-deps asdfghjkl"):
        batch_gradient(case.model, lambda: None)


def test_the_names_of_the_former_module_mean_these_backends() -> None:
    former = importlib.import_module("laplace.curvature.asdfghjkl")
    for kind, meant in {"Interface": AsdlInterface, "GGN": AsdlGGN, "EF": AsdlEF, "Hessian": AsdlHessian}.items():
        assert getattr(former, f"Asdfghjkl{kind}") is meant
