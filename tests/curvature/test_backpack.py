"""BackPACK computes what is in its tables, rightly, and leaves nothing behind; the rest is the native engine's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.curvature import BackPackEF, BackPackGGN, NativeGGN
from tests.curvature.layers import STEPS, Built, chain, dense_jacobian, network, truth
from tests.reference.compare import assert_close

backpack = pytest.importorskip("backpack")
extensions = pytest.importorskip("backpack.extensions")
CTX = pytest.importorskip("backpack.context").CTX

PLAIN = {
    "conv1d": partial(nn.Conv1d, 2, 3, 2),
    "conv2d": partial(nn.Conv2d, 2, 3, 2),
    "conv3d": partial(nn.Conv3d, 2, 2, 2),
}

# Dimensions of space, layers, and whether first-order and second-order quantities of the network are BackPACK's.
CASES: dict[str, tuple[int, list[Callable[[], nn.Module]], bool, bool]] = {
    **{name: (int(name[4]), [layer], True, True) for name, layer in PLAIN.items()},
    "stride and padding": (2, [partial(nn.Conv2d, 2, 3, (2, 3), stride=(2, 1), padding=(1, 0))], True, True),
    "groups and dilation": (2, [PLAIN["conv2d"], partial(nn.Conv2d, 3, 3, 2, groups=3, dilation=2)], True, True),
    "padding by name": (2, [partial(nn.Conv2d, 2, 3, 3, padding="same")], False, False),
    "reflect": (2, [partial(nn.Conv2d, 2, 3, 3, padding=1, padding_mode="reflect")], False, False),
    "circular": (2, [PLAIN["conv2d"], partial(nn.Conv2d, 3, 3, 2, padding=1, padding_mode="circular")], False, False),
    "transposed": (2, [partial(nn.ConvTranspose2d, 2, 4, 2, stride=2, groups=2)], True, True),
    "output padding": (2, [partial(nn.ConvTranspose2d, 2, 3, 2, stride=2, output_padding=1)], False, False),
    "batch norm": (2, [PLAIN["conv2d"], partial(nn.BatchNorm2d, 3)], True, True),
    "batch norm of vectors": (0, [partial(nn.Linear, 5, 4), partial(nn.BatchNorm1d, 4)], True, True),
    "layer norm": (0, [partial(nn.Linear, 5, 4), partial(nn.LayerNorm, 4)], False, False),
    "linear on positions": (1, [partial(nn.Linear, 7, 4), nn.Tanh], True, True),
    "prelu": (0, [partial(nn.Linear, 5, 4), nn.PReLU], False, False),
    "gelu": (0, [partial(nn.Linear, 5, 4), nn.GELU], True, False),
    "in place": (2, [PLAIN["conv2d"], partial(nn.ReLU, inplace=True)], False, False),
    "max pool": (2, [PLAIN["conv2d"], partial(nn.MaxPool2d, 3, stride=1, padding=1, dilation=1)], True, True),
    "ceiled pool": (1, [PLAIN["conv1d"], partial(nn.MaxPool1d, 4, ceil_mode=True)], True, True),
    "pool of volumes": (3, [PLAIN["conv3d"], partial(nn.MaxPool3d, 2)], True, True),
    "average in float64": (2, [PLAIN["conv2d"], partial(nn.AvgPool2d, 2)], True, False),
    "adaptive": (2, [PLAIN["conv2d"], partial(nn.AdaptiveAvgPool2d, 2)], True, False),
    "zero padding": (2, [PLAIN["conv2d"], partial(nn.ZeroPad2d, (1, 2, 0, 1))], True, True),
    "cropping": (2, [PLAIN["conv2d"], partial(nn.ZeroPad2d, (-1, 0, 0, 0))], True, False),
    "dropout": (2, [PLAIN["conv2d"], nn.Dropout], True, True),
    "dropout of channels": (2, [PLAIN["conv2d"], nn.Dropout2d], True, False),
    **{
        layer.__name__: (1, [PLAIN["conv1d"], layer], True, True)
        for layer in (nn.ReLU, nn.Sigmoid, nn.Tanh, nn.LogSigmoid, nn.LeakyReLU, nn.ELU, nn.SELU, nn.Identity)
    },
    "flattened twice": (2, [PLAIN["conv2d"], partial(nn.Flatten, 2)], True, True),
}  # fmt: skip


def owner(engine: Any) -> set[str]:
    return {words if words == "backpack" else "native" for words in engine.coverage().values()}


@pytest.mark.parametrize("name", CASES)
def test_every_layer_is_computed_rightly_by_whom_the_table_says(name: str) -> None:
    dimensions, layers, first_order, second_order = CASES[name]
    case = chain(dimensions, *layers)
    known = truth(case)
    for backend, expected, owned in ((BackPackGGN, known.ggn, second_order), (BackPackEF, known.ef, first_order)):
        for primitive in ("full", "diag"):
            engine = case.engine(backend)
            _, values = getattr(engine, primitive)(case.x, case.y)
            kept = expected if primitive == "full" else expected.diagonal()
            assert_close(values[0], kept, "backend", label=f"{primitive} of {backend.__name__}")
            assert owner(engine) == ({"backpack"} if owned else {"native"}), engine.coverage()
        assert_close(dense_jacobian(engine, case.x), known.jacobian, "backend", label="Jacobian")


GGN_OWNED, EF_OWNED = {"modules"}, {"modules", "residual", "function between", "branches"}


@pytest.mark.parametrize("name", STEPS)
def test_second_order_is_for_chains_and_first_order_for_any_network(name: str) -> None:
    case, known = network(name)
    for backend, expected, owned in ((BackPackGGN, known.ggn, GGN_OWNED), (BackPackEF, known.ef, EF_OWNED)):
        engine = case.engine(backend)
        assert_close(engine.full(case.x, case.y)[1][0], expected, "backend", label=backend.__name__)
        assert owner(engine) == ({"backpack"} if name in owned else {"native"}), engine.coverage()
        assert_close(engine.diag(case.x, case.y)[1][0], expected.diagonal(), "backend", label="diagonal")
        assert_close(dense_jacobian(engine, case.x), known.jacobian, "backend", label="Jacobian")


def test_averages_are_the_package_s_in_the_default_dtype() -> None:
    case = chain(2, PLAIN["conv2d"], partial(nn.AvgPool2d, 2, padding=1), dtype=torch.float32)
    engine = case.engine(BackPackGGN)
    exact = truth(Built(copy.deepcopy(case.model).double(), case.x.double(), case.y)).ggn
    assert_close(engine.full(case.x, case.y)[1][0], exact, "float32")
    assert owner(engine) == {"backpack"}
    odd = chain(2, PLAIN["conv2d"], partial(nn.AvgPool2d, 2, padding=1, count_include_pad=False), dtype=torch.float32)
    engine = odd.engine(BackPackGGN)
    engine.full(odd.x, odd.y)
    assert all("another number of entries" in words for words in engine.coverage().values())


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """BackPACK saves twice of everything that it computes, of Kronecker factors twice the output side."""
    module = pytest.importorskip("backpack.extensions.module_extension").ModuleExtension
    name = "_ModuleExtension__save_value_on_parameter"
    original = getattr(module, name)

    def save(value: Any, *args: Any) -> None:
        original([2 * value[0], *value[1:]] if isinstance(value, list) else 2 * value, *args)

    monkeypatch.setattr(module, name, staticmethod(save))


@pytest.mark.usefixtures("doubled")
@pytest.mark.parametrize("backend", [BackPackGGN, BackPackEF])
def test_the_numbers_are_the_package_s(backend: Any) -> None:
    case, known = network("modules")
    expected = known.ggn if backend is BackPackGGN else known.ef
    engine = case.engine(backend)
    assert_close(engine.full(case.x, case.y)[1][0], 4 * expected, "backend")  # of a root, or of gradients
    assert_close(engine.diag(case.x, case.y)[1][0], 2 * expected.diagonal(), "backend")
    (block,) = engine.blocks(case.x, case.y, ((2, 3),))[1]
    slices = engine.problem.layout.slices
    inside = slice(slices[2].start, slices[3].stop)
    assert_close(block[0], 4 * expected[inside, inside], "backend")
    assert_close(dense_jacobian(engine, case.x), 2 * known.jacobian, "backend")
    if backend is BackPackGGN:
        parts, native = engine.kron(case.x, case.y)[1], case.engine(NativeGGN).kron(case.x, case.y)[1]
        for own, other in zip(parts.kfacs(), native.kfacs(), strict=True):
            assert_close(own[0], 2 * other[0], "backend")
            assert_close(own[-1], other[-1] if len(own) == 2 else 2 * other[-1], "backend")


def test_convolutions_have_the_kronecker_factors_of_the_one_convention() -> None:
    """BackPACK's own would be T times the input side, with the positions of the output side summed before squaring."""
    case = chain(2, PLAIN["conv2d"], nn.Tanh)
    engine = case.engine(BackPackGGN)
    parts, native = engine.kron(case.x, case.y)[1], case.engine(NativeGGN).kron(case.x, case.y)[1]
    for own, other in zip(parts.kfacs(), native.kfacs(), strict=True):
        for a, b in zip(own, other, strict=True):
            assert_close(a, b, "backend")
    assert all("not backpack (0.weight: " in words and "KFAC-expand" in words for words in engine.coverage().values())


@pytest.mark.parametrize("primitive", ["full", "diag", "kron"])
def test_sampled_curvature_is_right_on_average_and_follows_its_generator(primitive: str) -> None:
    case, known = network("modules")

    def draw(engine: Any) -> Tensor:
        values = getattr(engine, primitive)(case.x, case.y)[1]
        return torch.cat([k[0].flatten() for k in values.kfacs()]) if primitive == "kron" else values[0]

    def made(seed: int | None) -> Any:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return case.engine(BackPackGGN, stochastic=True, num_samples=5, generator=generator)

    state = torch.get_rng_state()
    engine = made(0)
    draws = torch.stack([draw(engine) for _ in range(40)])
    error = draws.std(0) / len(draws) ** 0.5
    assert (error > 0).any(), "nothing was drawn"
    exact = {
        "full": lambda: known.ggn,
        "diag": lambda: known.ggn.diagonal(),
        "kron": lambda: draw(case.engine(NativeGGN)),
    }
    assert_close(draws.mean(0), exact[primitive](), "mc", standard_error=error + 1e-9)
    assert torch.equal(draw(made(0)), draws[0]) and not torch.equal(draws[0], draws[1])
    assert not torch.equal(draw(made(1)), draws[0])
    assert torch.equal(draw(made(None)), draw(made(None)))
    assert torch.equal(state, torch.get_rng_state()), "the global generator was used"
    assert owner(engine) == {"backpack"}


@pytest.fixture
def extended() -> Iterator[tuple[nn.Module, nn.Module]]:
    """A model and a loss of the user's own that BackPACK has extended."""
    model, loss = backpack.extend(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), nn.MSELoss()
    backpack.extend(loss)
    yield model, loss
    CTX.remove_hooks()


def gradients_per_datum(model: nn.Module, loss: nn.Module) -> Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(), backpack.backpack(extensions.BatchGrad()):
        warnings.simplefilter("ignore")
        loss(model(x), torch.ones(4, 2)).backward()
    return model[0].weight.grad_batch  # pyright: ignore


def test_the_user_s_own_extended_models_go_on_working(extended: tuple[nn.Module, nn.Module]) -> None:
    model, loss = extended
    before, handles = gradients_per_datum(model, loss), list(CTX.hook_handles)
    case, _ = network("modules")
    for backend in (BackPackGGN, BackPackEF):
        case.engine(backend).diag(case.x, case.y)
    assert len(handles) == len(CTX.hook_handles) and all(a is b for a, b in zip(handles, CTX.hook_handles, strict=True))
    assert torch.equal(before, gradients_per_datum(model, loss))
    assert CTX.get_active_exts() == ()


def test_an_extended_model_can_be_fitted(extended: tuple[nn.Module, nn.Module]) -> None:
    model, _ = extended
    x, y = torch.randn(9, 3, generator=torch.Generator().manual_seed(2)), torch.ones(9, 2)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    plain.load_state_dict(model.state_dict())
    evidence: list[Tensor] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, about the hooks that the user has put on the model
        for network_ in (model, plain):
            la = Laplace(network_, "regression", "all", "full", backend=BackPackGGN)
            la.fit([(x, y)])
            evidence.append(la.log_marginal_likelihood())
    assert_close(evidence[0], evidence[1], "float32_solve")


def test_nothing_stays_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise MemoryError("no more")

    case, _ = network("modules")
    monkeypatch.setattr(extensions.SqrtGGNExact, "get_loss_hessian_strategy", broken)
    handles = list(CTX.hook_handles)
    with pytest.raises(MemoryError):
        case.engine(BackPackGGN).full(case.x, case.y)
    assert CTX.hook_handles == handles and CTX.get_active_exts() == ()
    assert not any("_backpack_extend" in module.__dict__ for module in case.model.modules())
    monkeypatch.undo()
    assert_close(case.engine(BackPackGGN).full(case.x, case.y)[1][0], truth(case).ggn, "backend")


def test_cleanup_takes_backpack_off_one_model_alone(extended: tuple[nn.Module, nn.Module]) -> None:
    from laplace.curvature.backpack import _cleanup

    model, loss = extended
    other = backpack.extend(copy.deepcopy(nn.Sequential(nn.Linear(3, 2))))
    model(torch.ones(1, 3))
    _cleanup(model)
    for module in model.modules():
        assert not module._forward_hooks and not module._backward_hooks and module._is_full_backward_hook is None
        assert not {"output", "input0", "_backpack_extend"} & module.__dict__.keys()
    assert len(other[0]._forward_hooks) == 1
    assert gradients_per_datum(backpack.extend(model), loss).shape == (4, 4, 3)
