"""Networks that checkpoint activations: as exact as without, or refused with the remedy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from laplace import Laplace
from laplace.curvature import NativeEF, NativeHessian
from laplace.errors import CurvatureError, UnsupportedError
from tests.reference.compare import assert_close

X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return x + torch.exp(self.scale) * self.second(self.dropout(h) * torch.sigmoid(h))


class Attention(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.stack([x, x.flip(1)], 1)
        return super().forward(x) + self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1)


class Recurrent(Block):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(2, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.cells(x.unflatten(1, (2, 2)))[0][:, -1]


class Network(nn.Module):
    """Two blocks between two layers.

    Args:
        block: Class of the blocks.
        how: `"kept"`, `"again"` for checkpoints, or `"reentrant"`.
    """

    def __init__(self, block: type[nn.Module], how: str) -> None:
        super().__init__()
        self.how = how
        self.inp, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.blocks = nn.ModuleList([block(), block()])

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        for block in self.blocks:
            if self.how == "kept":
                h = block(h)
            else:
                h = checkpoint(block, h, use_reentrant=self.how == "reentrant")
        return self.head(h)


def network(block: type[nn.Module], how: str) -> Network:
    torch.manual_seed(0)
    return Network(block, how).double().train()


def subnetwork(model: nn.Module) -> Any:
    """Biases and a half of one weight are random, all other weights are fixed."""
    masks, at = [], 0
    for name, p in model.named_parameters():
        if name.endswith("bias") or name == "blocks.1.first.weight":
            masks.append(torch.arange(at, at + (p.numel() if name.endswith("bias") else p.numel() // 2)))
        at += p.numel()
    return torch.cat(masks)


def answers(block: type[nn.Module], how: str, weights: Any, structure: Any, **options: Any) -> list[Tensor]:
    model = network(block, how)
    if weights == "frozen":
        weights = "all"
        for name, p in model.named_parameters():
            p.requires_grad_(name.endswith("bias"))
    if weights == "subnetwork":
        options["subnetwork_indices"] = subnetwork(model)
    before = copy.deepcopy(model.state_dict())
    la: Any = Laplace(model, "classification", weights, structure, **options)
    torch.manual_seed(3)
    la.fit([(X, Y), (X.flip(0), Y)])
    found = [la.log_marginal_likelihood(), la(X), la(X[:1]), torch.rand(1)]
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    return [part.detach() for part in found]


@pytest.mark.parametrize("weights", ["all", "frozen", "subnetwork", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank", "matrix_free"])
@pytest.mark.parametrize("block", [Block, Attention, Recurrent])
@pytest.mark.turns
def test_checkpoints_change_nothing(block: type[nn.Module], structure: str, weights: str) -> None:
    if weights == "subnetwork" and structure not in ("full", "diag"):
        pytest.skip("no such posterior")
    if structure == "kron" and block is not Block and weights != "last_layer":
        pytest.skip("what hides in one function is not watched, and has exact blocks in place of factors")
    expected = answers(block, "kept", weights, structure)
    for actual, right in zip(answers(block, "again", weights, structure), expected, strict=True):
        assert_close(actual, right, "algebra" if structure in ("full", "kron", "diag") else "float32")


@pytest.mark.parametrize("backend", [NativeHessian, NativeEF])
def test_other_curvatures(backend: Any) -> None:
    options = {"prior_precision": 100.0, "backend": backend}
    expected = answers(Block, "kept", "all", "full", **options)
    for actual, right in zip(answers(Block, "again", "all", "full", **options), expected, strict=True):
        assert_close(actual, right, "algebra")


def test_a_refinement() -> None:
    means: list[Tensor] = []
    for how in ("kept", "again"):
        la: Any = Laplace(network(Block, how), "classification", "all", "diag")
        la.fit([(X, Y)])
        la.refine([(X, Y)])
        means.append(la.mean)
    assert_close(means[1], means[0], "float32")


def test_parts_that_do_not_explain_their_weights() -> None:
    """One datum after the other, with a pass of its own."""

    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            nn.utils.parametrizations.weight_norm(self.first)

    for structure in ("full", "diag"):
        expected = answers(Normed, "kept", "all", structure)
        for actual, right in zip(answers(Normed, "again", "all", structure), expected, strict=True):
            assert_close(actual, right, "algebra")


def test_the_caller_keeps_activations_elsewhere() -> None:
    expected = answers(Block, "kept", "all", "kron")
    with torch.autograd.graph.save_on_cpu():
        found = answers(Block, "kept", "all", "kron")
    for actual, right in zip(found, expected, strict=True):
        assert_close(actual, right, "algebra")


def test_gradients_through_predictions_are_refused() -> None:
    la: Any = Laplace(network(Block, "again"), "classification", "all", "diag", enable_backprop=True)
    la.fit([(X, Y)])
    with pytest.raises(UnsupportedError, match="switch activation checkpointing off"):
        la(X)


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank", "matrix_free"])
def test_reentrant_checkpoints_are_refused(structure: Any) -> None:
    model = network(Block, "reentrant")
    la: Any = Laplace(model, "classification", "all", structure)
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        la.fit([(X, Y)])
        la(X)


def test_reentrant_checkpoints_are_refused_by_the_exact_hessian() -> None:
    la: Any = Laplace(network(Block, "reentrant"), "classification", "all", "full", backend=NativeHessian)
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        la.fit([(X, Y)])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # PyTorch's own, of the trunk
@pytest.mark.parametrize("name", [None, "head"])
def test_reentrant_checkpoints_before_a_last_layer(name: str | None) -> None:
    found: list[Tensor] = []
    for how in ("kept", "reentrant"):
        la: Any = Laplace(network(Block, how), "classification", last_layer_name=name)
        la.fit([(X, Y)])
        found.append(la.H.to_matrix())
    assert_close(found[1], found[0], "algebra")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_a_last_layer_within_a_reentrant_checkpoint() -> None:
    class Whole(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            h = self[0](input)
            return checkpoint(self[1], h, use_reentrant=True)

    with pytest.raises(CurvatureError, match="use_reentrant=True"):
        Laplace(Whole(nn.Linear(4, 4), nn.Linear(4, 3)).double(), "classification").fit([(X, Y)])


def test_a_part_that_is_another_when_it_runs_again() -> None:
    class Changing(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.sin(x) if self.calls > 1 and torch.is_grad_enabled() else super().forward(x)

    la: Any = Laplace(network(Changing, "again"), "classification", "all", "diag")
    with pytest.raises(UnsupportedError, match="does not run a second time"):
        la.fit([(X, Y)])
