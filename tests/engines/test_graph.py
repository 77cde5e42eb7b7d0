"""Uses of a weight that contribute nothing to the first batch, and are counted in the next one all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.utils import parametrizations, parametrize

from laplace import Laplace
from laplace.engines.native.proof_cache import Plans
from laplace.errors import InvalidData
from tests.reference import curvature
from tests.reference.compare import assert_close
from tests.versions import newer_torch

N = 6
_INPUTS = torch.rand(N, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
SHOWN, HIDDEN = _INPUTS, -_INPUTS
"""Inputs that are all positive, and all negative: every ReLU of the networks below is dead for the latter."""
Y = torch.arange(N) % 4


class Network(nn.Module):
    """A layer whose weight is used once more where inputs are positive; subclasses say how."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.a(x) + self.again(torch.relu(x), x)))

    def again(self, h: Tensor, x: Tensor) -> Tensor:
        """The other use, of h, which is zero for all hidden inputs; a parameter of one shape with x."""
        return torch.relu(h)


class Function(Network):
    def again(self, h: Tensor, x: Tensor) -> Tensor:
        return F.linear(h, self.a.weight)


class Transposed(Network):
    """A transpose that is made once and used three times."""

    def forward(self, x: Tensor) -> Tensor:
        turned, h = self.a.weight.t(), torch.relu(x)
        return self.head(torch.tanh(self.a(x) + torch.tanh(h @ turned) + h.square() @ turned + h.sin() @ turned))


class Stored(nn.Module):
    """A weight `[in, out]` without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ self.weight + torch.relu(x) @ self.weight.t()))


class Gated(Network):
    """A gate that is a number of the datum's own."""

    def again(self, h: Tensor, x: Tensor) -> Tensor:
        return h[:, :1] * torch.tanh(F.linear(x * x, self.a.weight))


class Masked(Network):
    def again(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.where(x > 0, F.linear(x * x, self.a.weight, self.a.bias), 0.0)


class MaskedFill(Network):
    def again(self, h: Tensor, x: Tensor) -> Tensor:
        return F.linear(x * x, self.a.weight).masked_fill(x < 0, 0.0)


class Saturated(Network):
    def again(self, h: Tensor, x: Tensor) -> Tensor:
        return F.hardtanh(F.linear(x * x, self.a.weight) + 100 * (x < 0))


class Squared(Network):
    def again(self, h: Tensor, x: Tensor) -> Tensor:
        return F.linear(h, self.a.weight @ self.a.weight)


class Einsum(Network):
    def again(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.einsum("bi,oi->bo", h, self.a.weight)


class Entries(Network):
    """A part of the weight, and its length, which scale what is zero."""

    def again(self, h: Tensor, x: Tensor) -> Tensor:
        return h * self.a.weight[0] + h * self.a.weight.norm() + h * (1 + self.a.bias)


class Looked(Network):
    """The weight as a table."""

    def again(self, h: Tensor, x: Tensor) -> Tensor:
        return F.embedding(torch.arange(len(x)) % 4, self.a.weight) * h


class Branch(Network):
    def again(self, h: Tensor, x: Tensor) -> Tensor:
        return F.linear(h, self.a.weight) if (h > 0).any() else h


class Experts(nn.Module):
    """Two experts, of which one sees no datum, and has the weight of a layer that sees all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.first, self.second, self.head = (nn.Linear(4, 4) for _ in range(4))
        self.second.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        h, taken = torch.tanh(self.a(x)), x[:, 0] > 0
        out = torch.zeros_like(h)
        for rows, expert in ((~taken, self.first), (taken, self.second)):
            if rows.any():
                out[rows] = expert(x[rows])
        return self.head(h + out)


class LowRank(nn.Module):
    """An adapter A whose B is zero; A is used once more."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.down, self.up = nn.Linear(4, 4), nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.head = nn.Linear(4, 4)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(torch.relu(x), self.down.weight)
        return self.head(torch.tanh(self.a(x) + self.up(self.down(x)) + torch.cat([h, h.sin()], 1)))


class Cached(Network):
    """A weight that is computed once for all uses."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.a)

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return super().forward(x)

    def again(self, h: Tensor, x: Tensor) -> Tensor:
        return F.linear(h, self.a.weight)


class OfItsOwn(Network):
    """A parametrisation that is the identity, and a use of what it is made from."""

    class Same(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight

    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.a, "weight", self.Same())

    def again(self, h: Tensor, x: Tensor) -> Tensor:
        return F.linear(h, self.a.parametrizations.weight.original)  # pyright: ignore


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        return torch.relu(h) @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        h, weight = ctx.saved_tensors
        return gradients[0] @ weight * (h > 0), gradients[0].T @ torch.relu(h)


class OwnFunction(Network):
    def again(self, h: Tensor, x: Tensor) -> Tensor:
        return _Product.apply(x, self.a.weight)  # pyright: ignore[reportReturnType]


class Within(nn.Linear):
    """A layer that uses its weight twice."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input) + F.linear(torch.relu(input), self.weight)


class OwnFunctionWithin(nn.Linear):
    """A layer whose one node in the graph holds two uses."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return (x + torch.relu(x) ** 2) @ weight.T

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return gradients[0] @ weight * (1 + 2 * torch.relu(x)), gradients[0].T @ (x + torch.relu(x) ** 2)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self.Twice.apply(input, self.weight) + self.bias  # pyright: ignore


class Prepared(nn.Linear):
    """A layer that sees other inputs than it is given, where these are positive."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input + torch.relu(input) ** 2)


class Behind(nn.Linear):
    """A layer with what follows it, which is the identity where outputs are positive."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return torch.where(input > 0, torch.sin(super().forward(input)), super().forward(input))


class Rectified(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        z = super().forward(input)
        return z + torch.relu(input) * torch.tanh(z)


class Layer(Network):
    """The use is inside of the layer, of a class of the user's."""

    kind: type[nn.Linear] = Within

    def __init__(self) -> None:
        super().__init__()
        self.a = self.kind(4, 4)

    def again(self, h: Tensor, x: Tensor) -> Tensor:
        return h


class LayerOwnFunction(Layer):
    kind = OwnFunctionWithin


class LayerPrepared(Layer):
    kind = Prepared


class LayerBehind(Layer):
    kind = Behind


class LayerRectified(Layer):
    kind = Rectified


class Replaced(Network):
    """The method of one layer is replaced, as tools do that move weights between devices."""

    def __init__(self) -> None:
        super().__init__()
        inner = self.a.forward

        def forward(x: Tensor) -> Tensor:
            return inner(x + torch.relu(x) ** 2)

        self.a.forward = forward  # pyright: ignore

    def __deepcopy__(self, memo: Any) -> Replaced:
        other = Replaced()
        other.double().load_state_dict(self.state_dict())
        return other


class Hooked(Network):
    """A hook adds the use."""

    def __init__(self) -> None:
        super().__init__()

        def again(layer: Any, x: Any, z: Tensor) -> Tensor:
            return z + F.linear(torch.relu(x[0]), layer.weight)

        self.a.register_forward_hook(again)

    def again(self, h: Tensor, x: Tensor) -> Tensor:
        return h


class Leaking(Network):
    """A hook keeps what the layer gave, and hides it."""

    def __init__(self) -> None:
        super().__init__()

        def keep(layer: Any, x: Any, z: Tensor) -> Tensor:
            layer.kept = z
            return z.clone()

        self.a.register_forward_hook(keep)

    def again(self, h: Tensor, x: Tensor) -> Tensor:
        return h * torch.tanh(self.a.kept)  # pyright: ignore


class Tied(nn.Module):
    """A table that is the weight of the layer behind it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4, 4), nn.Linear(4, 4)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.relu(x[:, :1])
        return self.head(x) + gate * self.head(self.table((x.abs() * 3.5).long()[:, 0]))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.cells(x.unflatten(1, (2, 2)))[0][:, -1]
        return self.head(h + F.linear(torch.relu(x), self.cells.weight_hh_l0[:4]))  # pyright: ignore


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.stack([x, x.flip(1)], 1)
        h = self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1)
        return self.head(h + F.linear(torch.relu(x), self.attention.in_proj_weight[4:8]))


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Conv1d(1, 2, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x[:, None]) + F.conv1d(torch.relu(x[:, None]), self.a.weight.flip(2), padding=1)
        return self.head(torch.tanh(h).flatten(1))


class Normed(nn.Module):
    """Scales and shifts: of a norm, and of a norm of the user's own class."""

    class Own(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return super().forward(input.double()) + torch.relu(input) * self.weight

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.own, self.head = nn.LayerNorm(4), self.Own(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(x)) + self.own(x) + torch.relu(x) * self.norm.bias)


NETWORKS: list[type[nn.Module]] = [
    Function, Transposed, Stored, Gated, Masked, MaskedFill, Saturated, Squared, Einsum, Entries, Looked, Branch,
    Experts, LowRank, Cached, OfItsOwn, OwnFunction, Layer, LayerOwnFunction, LayerPrepared, LayerBehind,
    LayerRectified, Replaced, Hooked, Leaking, Tied, Recurrent, Attending, Convolved, Normed,
]  # fmt: skip


def network(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind().double()


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """The Jacobian by one datum after the other, `[B, C, P]`."""
    return curvature.flat_jacobian(model, x, curvature.trainable_names(model))[0]


def ggn(model: nn.Module, *xs: Tensor) -> Tensor:
    names = curvature.trainable_names(model)
    return torch.stack([curvature.ggn(model, x, Y, names, "classification") for x in xs]).sum(0)


def fitted(model: nn.Module, structure: Any, *xs: Tensor, weights: Any = "all", **options: Any) -> Any:
    la: Any = Laplace(model, "classification", weights, structure, **options)
    la.fit([(x, Y) for x in xs])
    return la


def dense_precision(la: Any) -> Tensor:
    precision = la.posterior_precision
    if isinstance(precision, Tensor):
        return precision if precision.ndim == 2 else precision.diag()
    return precision.to_matrix()


def assert_variances(la: Any, model: nn.Module, x: Tensor) -> None:
    """The variances at x are those of the dense posterior and the network's own Jacobian."""
    mean, variance = la._glm_predictive_distribution(x)
    rows = jacobian(model, x)
    assert_close(mean, outputs(model, x), "algebra")
    assert_close(variance, rows @ dense_precision(la).inverse() @ rows.mT, "algebra")


def test_the_reference_is_that_of_torch_func() -> None:
    model = network(Function)
    names = curvature.trainable_names(model)
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    rows = vmap(
        jacrev(lambda tensors, x: functional_call(model, tensors, (x[None],))[0]), in_dims=(None, 0)
    )(tensors, SHOWN)  # fmt: skip
    assert_close(torch.cat([rows[name].flatten(2) for name in names], 2), jacobian(model, SHOWN), "algebra")


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.turns
def test_the_curvature_of_the_next_batch(kind: type[nn.Module], structure: str) -> None:
    model = network(kind)
    expected = ggn(model, HIDDEN, SHOWN, HIDDEN)
    for order in ((HIDDEN, SHOWN, HIDDEN), (SHOWN, HIDDEN, HIDDEN)):
        la = fitted(model, structure, *order)
        assert_close(la.H, expected if structure == "full" else expected.diagonal(), "algebra")


FORMS = (Branch, Experts, LayerOwnFunction)
"""Networks with which a tensor is used once in the one batch and twice, or in a hidden way, in the other."""


@pytest.mark.parametrize("kind", FORMS)
def test_kronecker_factors_of_different_forms_are_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(InvalidData, match="do not match: different rules"):
        fitted(network(kind), "kron", HIDDEN, SHOWN)


@pytest.mark.parametrize("kind", [kind for kind in NETWORKS if kind not in FORMS])
def test_kronecker_factors_do_not_depend_on_the_order_of_batches(kind: type[nn.Module]) -> None:
    orders = ((HIDDEN, SHOWN), (SHOWN, HIDDEN))
    assert_close(*(fitted(network(kind), "kron", *order).H.to_matrix() for order in orders), "algebra")


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("proven_anew", [False, True])
@pytest.mark.turns
def test_the_variance_of_the_next_prediction(kind: type[nn.Module], structure: str, proven_anew: bool) -> None:
    model = network(kind)
    la = fitted(model, structure, SHOWN)
    la._posterior.engine._plans._by_form.clear()
    if proven_anew:  # of what is hidden in the fit
        la._posterior.engine._plans = Plans()
    la(HIDDEN)
    for x in (SHOWN, HIDDEN, SHOWN[:2], SHOWN[:1], HIDDEN[:1]):
        assert_variances(la, model, x)


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_jacobian_of_the_next_batch(kind: type[nn.Module]) -> None:
    model = network(kind)
    la = fitted(model, "diag", HIDDEN)
    for x in (HIDDEN, SHOWN, HIDDEN):
        rows, f = la.backend.jacobians(x)
        assert_close(rows, jacobian(model, x), "algebra")
        assert_close(f, outputs(model, x), "algebra")


@pytest.mark.parametrize("kind", [Function, Gated, Branch, Layer, Entries, Squared])
def test_gradients_through_predictions(kind: type[nn.Module]) -> None:
    model = network(kind)
    la = fitted(model, "full", HIDDEN, enable_backprop=True)
    covariance = dense_precision(la).inverse().detach()
    x = SHOWN[:2].clone().requires_grad_()
    (actual,) = torch.autograd.grad(la._glm_predictive_distribution(x)[1].diagonal(dim1=1, dim2=2).sum(), x)

    def total(x: Tensor) -> float:
        rows = jacobian(model, x)
        return float(torch.einsum("bcp,pq,bcq->", rows, covariance, rows))

    numeric = torch.zeros_like(actual)
    for i in range(actual.numel()):
        step = torch.zeros(actual.numel(), dtype=x.dtype)
        step[i] = 1e-5
        away = step.view_as(x)
        numeric.view(-1)[i] = (total(x.detach() + away) - total(x.detach() - away)) / 2e-5
    torch.testing.assert_close(actual, numeric, rtol=1e-6, atol=1e-8)


class Cast(Network):
    """The layer and its other use share a weight that autocast casts once."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.a(x) + torch.relu(self.a(x * x) - 100) + F.linear(torch.relu(x), self.a.weight)
        return self.head(torch.tanh(h.to(x.dtype)))


def test_weights_that_autocast_casts() -> None:
    torch.manual_seed(1)
    model = Cast()
    x, hidden = SHOWN.float(), HIDDEN.float()
    found = [fitted(model, "full", *order).H for order in ((hidden, x), (x, hidden))]
    expected = ggn(model, hidden, x)
    for actual in found:
        assert (actual - expected).norm() < 0.02 * expected.norm()


@newer_torch("the compiler warns of hooks, or raises")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of the compiler, which looks at activations
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_a_node_of_compiled_code(structure: str) -> None:
    class Again(nn.Module):
        def forward(self, h: Tensor, weight: Tensor) -> Tensor:
            return F.linear(h, weight)

    class Compiled(Network):
        def __init__(self) -> None:
            super().__init__()
            self.other: Any = torch.compile(Again(), backend="aot_eager")

        def again(self, h: Tensor, x: Tensor) -> Tensor:
            return self.other(h, self.a.weight)

    torch._dynamo.reset()
    expected = ggn(network(Function), HIDDEN, SHOWN)
    la = fitted(network(Compiled), structure, HIDDEN, SHOWN)
    assert_close(la.H, expected if structure == "full" else expected.diagonal(), "algebra")


@pytest.mark.parametrize("kind", [Function, Gated, Squared, Layer, LayerPrepared, LayerOwnFunction, Hooked, Entries])
def test_subnetworks(kind: type[nn.Module]) -> None:
    model = network(kind)
    at = torch.arange(0, 40, 3)
    expected = ggn(model, HIDDEN, SHOWN)[at][:, at]
    la = fitted(model, "full", HIDDEN, SHOWN, weights="subnetwork", subnetwork_indices=at)
    assert_close(la.H, expected, "algebra")


class HeadAgain(nn.Module):
    """A last layer whose weight is used once more behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.head(h) + F.linear(torch.relu(x), self.head.weight)


def test_last_layers() -> None:
    model = network(HeadAgain)
    for structure in ("full", "diag"):
        la = fitted(model, structure, HIDDEN, SHOWN, weights="last_layer", last_layer_name="head")
        size = sum(p.numel() for p in model.a.parameters())  # pyright: ignore
        expected = ggn(model, HIDDEN, SHOWN)[size:, size:]
        assert_close(la.H, expected if structure == "full" else expected.diagonal(), "algebra")


class Mixing(nn.Module):
    """Tokens that see each other where a number of the datum is positive.

    Args:
        where: Before the head, behind it, or behind it and only if there is such a datum.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.a, self.b, self.head = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.b(torch.tanh(self.a(x.unflatten(1, (2, 2))))))
        gate = torch.relu(x[:, :1, None])
        if self.where == "before":
            h = h + gate * h.mean(1, keepdim=True)
        z = self.head(h)
        if self.where == "behind" or (self.where == "branch" and (gate > 0).any()):
            z = z + gate * z.flip(1)
        return z


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("where", ["before", "behind", "branch", "never"])
def test_positions_that_see_each_other(where: str, structure: str) -> None:
    model, y = network(lambda: Mixing(where)), torch.arange(2 * N).view(N, 2) % 4

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).flatten(1)

    expected = torch.zeros(())
    for x in (HIDDEN, SHOWN):
        rows, f = curvature.flat_jacobian(Flat(), x, curvature.trainable_names(Flat()))
        rows, f = rows.unflatten(1, (2, 4)).flatten(0, 1), f.unflatten(1, (2, 4)).flatten(0, 1)
        inner = curvature.output_hessian(f, "classification", y.flatten())
        expected = expected + torch.einsum("bcp,bcd,bdq->pq", rows, inner, rows)
    for order in ((HIDDEN, SHOWN), (SHOWN, HIDDEN)):
        la: Any = Laplace(model, "classification", "all", structure)
        la.fit([(x, y) for x in order])
        assert_close(la.H, expected if structure == "full" else expected.diagonal(), "algebra")


class Packed(nn.Module):
    """A recurrent layer on packed sequences, which PyTorch runs in one function, and a use of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x.unflatten(1, (2, 2)), torch.full((len(x),), 2), batch_first=True)
        h = self.cells(packed)[1][0]
        return self.head(h + F.linear(torch.relu(x), self.cells.weight_hh_l0[:4]))  # pyright: ignore


def test_recurrent_layers_in_one_function() -> None:
    model = network(Packed)
    la = fitted(model, "full", HIDDEN, SHOWN)
    assert_close(la.H, ggn(model, HIDDEN, SHOWN), "algebra")
    la(HIDDEN)
    assert_variances(la, model, SHOWN)


def test_weights_that_change_between_fits() -> None:
    """What B of an adapter hid is no longer hidden; a plan of the former fit is none of the next."""
    model: Any = network(LowRank)
    for _ in range(2):
        assert_close(fitted(model, "full", HIDDEN, SHOWN).H, ggn(model, HIDDEN, SHOWN), "algebra")
        with torch.no_grad():
            model.up.weight.fill_(0.3)
