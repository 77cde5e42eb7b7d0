"""Layers and ways of using them that the catalogue leaves out: whatever explains a parameter, the numbers are exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm

from laplace import Laplace, ParametricLaplace
from laplace.likelihoods import LikelihoodFromLoss
from tests import problems as catalogue
from tests.conformance.cases import STRUCTURE_NAMES, Case, few, own_dense
from tests.conformance.test_predictions import latent_of
from tests.reference import curvature as reference
from tests.reference import predictive
from tests.reference.compare import assert_close


class _Mean(nn.Module):
    """A layer on `[B, …]`, a weighted mean over everything but the data and the last dimension, and a head."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        h = torch.tanh(h[0] if isinstance(h, tuple) else h).flatten(1, -2) if x.ndim > 2 else torch.tanh(self.layer(x))
        if h.ndim > 2:
            weights = torch.arange(1, h.shape[1] + 1, dtype=h.dtype)
            h = (h * weights[:, None]).sum(1) / weights.sum()
        return self.head(h)


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.head = nn.Bilinear(3, 3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.pair(x, x.sin())))


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.head(state)


class _Bag(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.head = table, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        index = (x.abs() * 10).long() % 7
        h = self.table(index)
        return self.head(torch.tanh(h if h.ndim == 2 else h.mean(1)))


class _ListOfBags(nn.EmbeddingBag):
    """All bags in one list, the first of each twice, weighted."""

    def __init__(self) -> None:
        super().__init__(7, 4, mode="sum", include_last_offset=True, scale_grad_by_freq=True)

    def forward(self, index: Tensor) -> Tensor:  # pyright: ignore
        long = torch.cat([index, index[:, :1]], 1)
        weights = torch.arange(1.0, long.shape[1] + 1, dtype=self.weight.dtype).repeat(len(long))
        offsets = torch.arange(0, long.numel() + 1, long.shape[1])
        return super().forward(long.flatten(), offsets, weights)


class _DoubledLinear(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x) + self.weight.sum()


def _hooked(before: bool) -> nn.Module:
    """A layer whose user's hook changes its input or its output."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    if before:
        model[0].register_forward_pre_hook(lambda _, args: (args[0].sin() * 2,))
    else:
        model[0].register_forward_hook(lambda _, args, z: z * args[0].sum(1, keepdim=True))
    return model


def _two_layers(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3))


FLAT, TOKENS, IMAGE = (3,), (4, 3), (4, 3, 3)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer norm over two dimensions": (lambda: _Mean(nn.LayerNorm((4, 3)), 3), TOKENS),
    "layer norm without bias": (lambda: _Mean(nn.LayerNorm(3, bias=False), 3), TOKENS),
    "rms norm": (lambda: _Mean(nn.RMSNorm(3), 3), TOKENS),
    "instance norm": (lambda: _Mean(nn.InstanceNorm2d(4, affine=True), 3), IMAGE),
    "instance norm with statistics": (
        lambda: _Mean(nn.InstanceNorm2d(4, affine=True, track_running_stats=True), 3),
        IMAGE,
    ),
    "group norm of vectors": (lambda: nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.Linear(4, 3)), FLAT),
    "group norm of tokens": (lambda: _Mean(nn.GroupNorm(2, 4), 3), TOKENS),
    "batch norm of sequences": (lambda: _Mean(nn.BatchNorm1d(4), 3), TOKENS),
    "prelu per token": (lambda: _Mean(nn.PReLU(4), 3), TOKENS),
    "one prelu": (lambda: _Mean(nn.PReLU(), 3), TOKENS),
    "self-attention": (
        lambda: _Mean(nn.TransformerEncoderLayer(3, 1, 4, 0.0, batch_first=True, norm_first=True), 3),
        TOKENS,
    ),
    "bidirectional lstm": (lambda: _Mean(nn.LSTM(3, 2, bidirectional=True, batch_first=True), 4), TOKENS),
    "projected lstm": (lambda: _Mean(nn.LSTM(3, 3, proj_size=2, batch_first=True), 2), TOKENS),
    "cell": (_Cell, TOKENS),
    "bilinear": (_Bilinear, FLAT),
    "embedding bag": (lambda: _Bag(nn.EmbeddingBag(7, 4)), TOKENS[:1]),
    "bag of maxima": (lambda: _Bag(nn.EmbeddingBag(7, 4, mode="max", padding_idx=0)), TOKENS[:1]),
    "padded bag": (lambda: _Bag(nn.EmbeddingBag(7, 4, padding_idx=-3, sparse=True)), TOKENS[:1]),
    "list of bags": (lambda: _Bag(_ListOfBags()), TOKENS[:1]),
    "embedding scaled by frequency": (lambda: _Bag(nn.Embedding(7, 4, scale_grad_by_freq=True)), TOKENS[:1]),
    "sparse embedding": (lambda: _Bag(nn.Embedding(7, 4, sparse=True)), TOKENS[:1]),
    "subclass": (lambda: _two_layers(_DoubledLinear(3, 4)), FLAT),
    "input changed by a hook": (partial(_hooked, True), FLAT),
    "output changed by a hook": (partial(_hooked, False), FLAT),
    "spectral norm": (lambda: _two_layers(spectral_norm(nn.Linear(3, 4))), FLAT),
    "orthogonal": (lambda: _two_layers(orthogonal(nn.Linear(3, 4))), FLAT),
}


def posterior(model: nn.Module, structure: str, weights: str = "all", **options: object) -> ParametricLaplace:
    """Not fitted; structures of a rank keep all that they can."""
    if structure in ("lowrank", "lowrank_kron"):
        options = {"structure_kwargs": {"rank": 1000}} | options
    la = Laplace(model, options.pop("likelihood", "classification"), weights, structure, **options)  # pyright: ignore
    assert isinstance(la, ParametricLaplace)
    return la


def check_kept(la: ParametricLaplace, structure: str, exact: Tensor) -> None:
    """That a structure holds what it should: of Kronecker ones the blocks without factors, and one exact diagonal."""
    held, layout = own_dense(la), la.problem.layout
    if structure in ("full", "lowrank"):
        assert_close(held, exact, "backend", label="curvature")
    elif structure == "block":
        layer = torch.cat([torch.full((size,), i) for i, size in enumerate(layer_sizes(la))])
        assert_close(held, exact * (layer[:, None] == layer), "backend", label="blocks of the layers")
    elif structure == "diag":
        assert_close(held, torch.diag(exact.diagonal()), "backend", label="diagonal")
    else:
        forms = la.coverage()
        for name, place in zip(layout.names, layout.slices, strict=True):
            if "dense" in forms[name]:
                assert_close(held[place, place], exact[place, place], "backend", label=f"{name}, {forms[name]}")
        if structure == "lowrank_kron":
            assert_close(held.diagonal(), exact.diagonal(), "backend", label="diagonal")


def layer_sizes(la: ParametricLaplace) -> list[int]:
    """Entries of each module that owns a treated tensor, in their order."""
    sizes: dict[str, int] = {}
    for name, place in zip(la.problem.layout.names, la.problem.layout.slices, strict=True):
        owner = name.rpartition(".")[0]
        sizes[owner] = sizes.get(owner, 0) + place.stop - place.start
    return list(sizes.values())


@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
@pytest.mark.parametrize("name", LAYERS)
def test_exact_whatever_the_layer(name: str, structure: str) -> None:
    torch.manual_seed(1)
    build, shape = LAYERS[name]
    model = build().double().eval()
    x, y = torch.randn(6, *shape, dtype=torch.float64), torch.randint(3, (6,))
    la = posterior(model, structure)
    la.fit([(x[:4], y[:4]), (x[4:], y[4:])])
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = module.scale_grad_by_freq = False  # the reference wants dense and true derivatives
    names = reference.trainable_names(model)
    exact = reference.ggn(model, x, y, names, "classification")
    check_kept(la, structure, exact)
    jacobian, f = reference.flat_jacobian(model, x, names)
    gaussian = latent_of(la, x, "full")
    covariance = torch.linalg.inv(la.evidence().precision.to_dense())
    assert_close(gaussian.mean, f, "backend")
    assert_close(gaussian.covariance, predictive.functional_variance(jacobian, covariance), "backend")


# Networks whose form depends on the data.


class _Routed(nn.Module):
    """Two experts; the sign of a datum's first entry says which one it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 3)

    def hidden(self, x: Tensor) -> Tensor:
        positive = x[:, 0] > 0
        h = x.new_zeros(len(x), 4)
        for chosen, expert in ((positive, self.first), (~positive, self.second)):
            if chosen.any():
                h = h.index_put((chosen,), expert(x[chosen]))
        return torch.tanh(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_experts_that_the_first_batch_never_meets(structure: str) -> None:
    torch.manual_seed(0)
    model, x, y = _Routed().double(), torch.randn(12, 3, dtype=torch.float64), torch.randint(3, (12,))
    x[:4, 0], x[4:, 0] = x[:4, 0].abs(), torch.tensor([1.0, -1.0] * 4) * x[4:, 0].abs()
    la = posterior(model, structure)
    la.fit([(x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)])
    exact = reference.ggn(model, x, y, reference.trainable_names(model), "classification")
    check_kept(la, structure, exact)


class _RoutedTokens(_Routed):
    """The same with experts for single tokens, whose number per datum depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
        return self.head((self.hidden(x.flatten(0, 1)).view(*x.shape[:2], 4) * weights[:, None]).mean(1))


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_experts_that_meet_as_many_tokens_in_the_first_batch(structure: str) -> None:
    """Two tokens of each datum in the first batch; later all of one or two data and none of the others."""
    torch.manual_seed(0)
    model, x, y = _RoutedTokens().double(), torch.randn(12, 4, 3, dtype=torch.float64), torch.randint(3, (12,))
    signs = torch.ones(12, 4, dtype=torch.float64)
    signs[:4, 2:] = signs[5:10] = -1
    x[..., 0] = x[..., 0].abs() * signs
    la = posterior(model, structure)
    la.fit([(x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)])
    exact = reference.ggn(model, x, y, reference.trainable_names(model), "classification")
    check_kept(la, structure, exact)


class _Switched(nn.Module):
    """A bare parameter that only some data need."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.extra = nn.Linear(3, 3), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        f = self.head(x)
        return f + self.extra * x if bool((x > 0).any()) else f


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_parameters_that_the_first_batch_does_not_need(structure: str) -> None:
    torch.manual_seed(0)
    model, x, y = _Switched().double(), torch.randn(8, 3, dtype=torch.float64), torch.randint(3, (8,))
    x[:4] = -x[:4].abs()
    x[4:] = x[4:].abs()
    la = posterior(model, structure)
    la.fit([(x[:4], y[:4]), (x[4:], y[4:])])
    names = reference.trainable_names(model)
    exact = sum(reference.ggn(model, x[i : i + 4], y[i : i + 4], names, "classification") for i in (0, 4))
    assert isinstance(exact, Tensor)
    check_kept(la, structure, exact)


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("name", ["time_major_square", "attention_time_major", "pair_cat"])
def test_a_first_batch_that_proves_nothing(name: str, structure: str) -> None:
    """With inputs of zero every reading of a layer gives the right gradient, namely zero."""
    problem = catalogue.get(name)
    model, names = problem.make_model(), reference.trainable_names(problem.make_model())
    zeros = torch.zeros_like(problem.x)
    la = posterior(model, structure, likelihood=problem.likelihood)
    la.fit([(zeros, problem.y), (problem.x, problem.y)])
    parts = [reference.ggn(model, x, problem.y, names, problem.likelihood) for x in (zeros, problem.x)]
    check_kept(la, structure, parts[0] + parts[1])


@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
@pytest.mark.parametrize("name", ["transformer", "embedding_padding", "lstm", "shared_positions", "conv1d"])
def test_batches_of_another_length_add_up(name: str, structure: str) -> None:
    problem = catalogue.get(name)
    model = problem.make_model()
    if name == "conv1d":
        model[2] = nn.AdaptiveAvgPool1d(4)  # pyright: ignore
        model.insert(3, nn.Flatten())  # pyright: ignore
    shorter = problem.x[..., :-1] if name in ("embedding_padding", "conv1d") else problem.x[:, :-1]
    batches = [(problem.x, problem.y), (shorter, problem.y)]
    la = posterior(model, structure, likelihood=problem.likelihood)
    la.fit(batches)
    names = reference.trainable_names(model)
    parts = [reference.ggn(model, x, y, names, problem.likelihood) for x, y in batches]
    check_kept(la, structure, parts[0] + parts[1])
    assert la.n_data == 2 * len(problem.y)


# Heads on tokens, and likelihoods of users.


class _TokenHead(nn.Module):
    """A head at every position; which logits are taken is decided after it."""

    def __init__(self, take: str) -> None:
        super().__init__()
        self.take = take
        self.trunk, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        f = self.head(torch.tanh(self.trunk(x)))
        return {"pick_first": f[:, 0], "pick_last": f[:, -1], "average": f.mean(1)}[self.take]


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("n_data", [5, 1])
@pytest.mark.parametrize("take", ["pick_first", "pick_last", "average"])
@pytest.mark.parametrize("structure", STRUCTURE_NAMES)
def test_head_on_positions(structure: str, take: str, n_data: int, reduced: bool) -> None:
    torch.manual_seed(0)
    model, x = _TokenHead(take).double(), torch.randn(n_data, 4, 3, dtype=torch.float64)
    y = torch.randint(3, (n_data,))
    la = posterior(model, structure, "last_layer", feature_reduction=take if reduced else None)
    la.fit([(x, y)])
    names = ["head.weight", "head.bias"]
    exact = reference.ggn(model, x, y, names, "classification")
    if structure != "kron":
        check_kept(la, structure, exact)
    elif reduced:  # then there is one position only, and the head is a plain one
        plain = posterior(nn.Sequential(nn.Linear(4, 3)).double(), "kron")
        plain.model.load_state_dict({"0.weight": model.head.weight, "0.bias": model.head.bias})
        h = torch.tanh(model.trunk(x)).detach()
        plain.fit([({"pick_first": h[:, 0], "pick_last": h[:, -1], "average": h.mean(1)}[take], y)])
        assert_close(own_dense(la), own_dense(plain), "backend")
    jacobian, f = reference.flat_jacobian(model, x, names)
    covariance = torch.linalg.inv(la.evidence().precision.to_dense())
    gaussian = latent_of(la, x, "full")
    assert_close(gaussian.mean, f, "backend")
    assert_close(gaussian.covariance, predictive.functional_variance(jacobian, covariance), "backend")
    theta = la.sample(3, generator=torch.Generator().manual_seed(0))
    sampled = la.functional_samples(x, "nn", n_samples=3, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([reference.outputs_at(model, x, names, one) for one in theta])
    assert_close(sampled, expected, "algebra", label="sampled weights")


class SoftmaxByHand(LikelihoodFromLoss):
    """Cross-entropy as a user would write it: its output Hessian is dense, and known by differentiation only."""

    name = "softmax_by_hand"

    def negative_log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.logsumexp(f, 0) - f.gather(0, y.reshape(1)).sum()

    def sample(self, f: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        p = torch.softmax(f, 1)
        return torch.multinomial(p, n, replacement=True, generator=generator).T

    def inverse_link(self, f: Tensor) -> Tensor:
        return torch.softmax(f, -1)


@pytest.mark.parametrize("kind", ["ggn", "ef"])
@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", names=["mlp_classification", "conv2d_grouped"]))
@pytest.mark.turns
def test_likelihood_of_a_user(case: Case, kind: str) -> None:
    built_in = case.fit(4, kind=kind, temperature=0.7)
    model = case.problem.make_model()
    options = {name: value for name, value in (("subnetwork_indices", None),) if case.weights == "mixed"}
    if case.weights == "mixed":
        options["subnetwork_indices"] = built_in.weights.state()["subnetwork_indices"]
    subset = "subnetwork" if case.weights == "mixed" else case.weights
    la = posterior(model, case.structure, subset, likelihood=SoftmaxByHand(), temperature=0.7,
                   backend=built_in.backend_cls, **options)  # fmt: skip
    la.fit(case.problem.batches(4))
    assert_close(own_dense(la), own_dense(built_in), "backend", label="curvature")
    assert_close(la.log_marginal_likelihood(), built_in.log_marginal_likelihood(), "backend", label="evidence")
    x = case.problem.x
    draws = [p(x, link_approx="mc", generator=torch.Generator().manual_seed(0)) for p in (la, built_in)]
    assert_close(draws[0], draws[1], "backend", label="prediction")
