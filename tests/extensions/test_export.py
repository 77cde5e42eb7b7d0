"""Exported predictions are those of the posterior, of batches of any size, and need PyTorch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import Laplace, curvature
from laplace.core import checks
from laplace.errors import InvalidData, NotFittedError, UnsupportedError
from laplace.jacobian.index import IndexBlock
from laplace.likelihoods import LIKELIHOODS
from laplace.mixture import MixtureLaplace
from tests import fresh, grid
from tests.pairs import nightly
from tests.versions import newer_torch

BATCH = torch.export.Dim("batch")
LARGE = (*grid.PAIRS, "reward_modeling")
"""Likelihoods whose graph of an exact moment takes seconds to trace, of two ten and more; so do other links."""
SLOW = [cell for cell in grid.TURNS if cell[1] == "lowrank_kron"] + [("all", "gp")]
STRUCTURES = [cell for cell in grid.TURNS if cell not in SLOW] + nightly(*SLOW)
LINKS = [
    pytest.param(name, link, marks=pytest.mark.nightly if name in LARGE or number else ())
    for name in grid.LIKELIHOODS for number, link in enumerate(LIKELIHOODS[name]().links or ("probit",))
    if name != "reward_modeling" or link == "probit"
]  # fmt: skip


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(as_tuple(actual), as_tuple(expected), strict=True):
        torch.testing.assert_close(torch.as_tensor(a), b, rtol=tolerance, atol=tolerance)


class Tokens(nn.Module):
    """A network of tokens with a mask, called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.layer(self.table(ids)) * mask.unsqueeze(2)
        return self.head(h.sum(1) / mask.sum(1, keepdim=True))


# The numbers.


@newer_torch("exports of all weights or of a subnetwork may raise")
@pytest.mark.parametrize(("weights", "structure"), STRUCTURES)
@pytest.mark.turns
def test_every_structure_and_choice_of_weights(weights: str, structure: str) -> None:
    la = grid.fitted(weights, structure, "regression", **({"n_subset": 6} if structure == "gp" else {}))
    x, _ = grid.data("regression")
    module = laplace.export(la, x[:4])
    assert type(module).__module__.startswith("torch.") and not list(module.parameters())
    for size in (1, 2, grid.N_DATA):
        assert_close(module(x[:size]), la(x[:size]))


@pytest.mark.nightly
@newer_torch("exports of all weights or of a subnetwork may raise")
@pytest.mark.parametrize(("package", "backend"), [("backpack", "BackPackGGN"), ("asdl", "AsdlGGN")])
def test_backends_whose_jacobians_are_a_package_s(package: str, backend: str) -> None:
    pytest.importorskip(package)
    la = grid.fitted("all", "full", "regression", backend=getattr(curvature, backend))
    x, _ = grid.data("regression")
    module = laplace.export(la, x[:4])
    for size in (1, 2, grid.N_DATA):
        assert_close(module(x[:size]), la(x[:size]))


@newer_torch("exports of all weights or of a subnetwork may raise")
@pytest.mark.parametrize(("likelihood", "link"), LINKS)
def test_every_likelihood_and_link(likelihood: str, link: str) -> None:
    la = grid.fitted("last_layer", "kron", likelihood)
    x, _ = grid.data(likelihood)
    generator = torch.Generator().manual_seed(3)
    module = laplace.export(la, x[:4], generator=generator, link_approx=link, n_samples=20)
    values = as_tuple(module(x))
    for i in (0, 7):
        alone = la(x[i : i + 1], generator=torch.Generator().manual_seed(3), link_approx=link, n_samples=20)
        assert_close(tuple(value[i : i + 1] for value in values), as_tuple(alone))


def test_sampled_weights_are_stored() -> None:
    la = grid.fitted("all", "diag")
    x, _ = grid.data()
    module = laplace.export(la, x[:2], generator=torch.Generator().manual_seed(1), pred_type="nn", n_samples=10)
    assert_close(module(x), la(x, "nn", n_samples=10, generator=torch.Generator().manual_seed(1)))


def test_options_of_the_prediction() -> None:
    la = grid.fitted("last_layer", "full", "regression")
    x, _ = grid.data("regression")
    for options in ({"diagonal_output": True, "observation_noise": True}, {"joint": True}, {"outputs": 2}):
        assert_close(laplace.export(la, x[:4], **options)(x), la(x, **options))


def test_mixture() -> None:
    la = MixtureLaplace([grid.network(), grid.network()], "classification")
    with pytest.raises(NotFittedError):
        laplace.export(la, grid.data()[0])
    la.fit(grid.batches())
    x, _ = grid.data()
    assert_close(laplace.export(la, x[:4])(x), la(x))


@newer_torch("exports of all weights or of a subnetwork may raise")
@pytest.mark.parametrize("weights", ["last_layer", *nightly("all")])
def test_tokens_by_name(weights: str) -> None:
    torch.manual_seed(0)
    ids, mask = torch.randint(7, (6, 5)), torch.ones(6, 5)
    batch = {"ids": ids, "mask": mask}
    la = Laplace(Tokens(), "classification", weights, "kron")
    la.fit([{**batch, "labels": torch.randint(3, (6,))}])
    module = laplace.export(la, {name: value[:2] for name, value in batch.items()})
    assert_close(module(**batch), la(batch))


def test_tuple_of_inputs() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return self.layer(first * second)

    x = (torch.randn(5, 3), torch.randn(5, 3))
    la = Laplace(Both(), "regression", "all", "kron")
    la.fit([(*x, torch.randn(5, 2))])
    assert_close(laplace.export(la, x)(*x), la(x))


def test_sums_of_rows_of_a_table_do_not_need_their_number() -> None:
    generator = torch.Generator().manual_seed(2)
    index = torch.randint(-1, 4, (3, 6), generator=generator)
    g = torch.randn(2, 3, 6, 5, generator=generator)
    block, weights = IndexBlock(index, g, 4, index >= 0), torch.rand(20, generator=generator)
    expected = block.weighted_gram(weights), block.weighted_norms(weights)
    with checks.unread():
        assert_close((block.weighted_gram(weights), block.weighted_norms(weights)), expected)


class Pieces(nn.Module):
    """A network that takes six data at a time, as much as its memory has room for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(part) for part in x.split(6)])


@newer_torch("exports of all weights or of a subnetwork may raise")
def test_splits_of_larger_batches_than_those_traced() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 3)
    la = Laplace(Pieces(), "regression", "all", "kron")
    la.fit([(x, torch.randn(20, 2))])
    assert_close(laplace.export(la, x[:4])(x), la(x))
    la = grid.fitted("all", "lowrank", "regression")  # its covariances are summed in parts that a budget counts
    x = torch.randn(100, 3)
    assert_close(laplace.export(la, x[:4], joint=True)(x), la(x, joint=True))


# What it is.


@newer_torch("exports of all weights or of a subnetwork may raise")
def test_it_is_frozen_and_has_gradients() -> None:
    network = grid.network("regression")
    la = grid.make("all", "kron", "regression", network, enable_backprop=True)
    la.fit(grid.batches("regression"))
    x = grid.data("regression")[0].requires_grad_()
    module = laplace.export(la, x.detach()[:4])
    gradients = [torch.autograd.grad(predict(x)[1].sum(), x)[0] for predict in (module, la)]
    assert_close(*gradients, tolerance=1e-4)
    before = module(x)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1)
    assert_close(module(x), before, tolerance=0)


def test_the_global_seed_names_the_numbers() -> None:
    la = grid.fitted("last_layer", "kron")
    x, _ = grid.data()
    modules: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(5)
        modules.append(laplace.export(la, x[:2], link_approx="mc", n_samples=5))
    assert_close(modules[0](x), modules[1](x), tolerance=0)


# Other runtimes.


def test_saved_by_torch_export_and_loaded_without_the_library(tmp_path: Path) -> None:
    la = grid.fitted("last_layer", "kron", "regression")
    x, _ = grid.data("regression")
    program = torch.export.export(laplace.export(la, x[:4]), (x[:4],), dynamic_shapes=({0: BATCH},))
    torch.export.save(program, tmp_path / "prediction.pt2")
    torch.save((x, la(x)), tmp_path / "expected.pt")
    script = f"""
import sys, torch
x, expected = torch.load({str(tmp_path / "expected.pt")!r})
program = torch.export.load({str(tmp_path / "prediction.pt2")!r})
for actual, value in zip(program.module()(x), expected, strict=True):
    torch.testing.assert_close(actual, value)
assert 'laplace' not in sys.modules
"""
    (done,) = fresh.run(script)
    assert not done.status, done.errors


@newer_torch("exports of all weights or of a subnetwork may raise")
@pytest.mark.parametrize("weights", ["last_layer", *nightly("all")])
def test_compiled_as_one_graph(weights: str) -> None:
    la = grid.fitted(weights, "diag")
    x, _ = grid.data()
    compiled = torch.compile(laplace.export(la, x[:4]), fullgraph=True, backend="eager", dynamic=True)
    for size in (3, grid.N_DATA):
        assert_close(compiled(x[:size]), la(x[:size]))


@pytest.mark.nightly  # examples/deployment.py exports to ONNX, too
@pytest.mark.filterwarnings("ignore")  # of the packages, about each other
def test_onnx(tmp_path: Path) -> None:
    """Convolutions, all weights and a link that inverts a sum."""
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    runtime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 3, 3, stride=2), nn.Flatten(),
        nn.Linear(12, 2),
    )  # fmt: skip
    x = torch.randn(6, 1, 6, 6)
    la = Laplace(network, "classification", "all", "kron")
    la.fit([(x, torch.arange(6) % 2)])
    module = laplace.export(la, x[:4], link_approx="bridge")
    program = torch.export.export(module, (x[:4],), dynamic_shapes=({0: BATCH},))
    torch.onnx.export(program, dynamo=True, verbose=False).save(str(tmp_path / "prediction.onnx"))
    served = runtime.InferenceSession(str(tmp_path / "prediction.onnx"))
    (values,) = served.run(None, {served.get_inputs()[0].name: x.numpy()})
    assert_close(torch.as_tensor(values), la(x, link_approx="bridge"))


# What is refused.


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.layer = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x[..., 0] != 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.layer(self.cell(packed)[1][0][0])


def test_packed_sequences_are_refused_for_their_lengths() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4, 3)
    x[0, 2:] = 0
    la = Laplace(Packing(), "regression", "last_layer", "diag", last_layer_name="layer")
    la.fit([(x, torch.randn(6, 2))])
    with pytest.raises(UnsupportedError, match="pack_padded_sequence"):
        laplace.export(la, x)


def test_inputs_that_are_no_example() -> None:
    la = grid.make("last_layer", "kron")
    x, _ = grid.data()
    with pytest.raises(NotFittedError):
        laplace.export(la, x)
    la.fit(grid.batches())
    with pytest.raises(InvalidData, match="no data"):
        laplace.export(la, x[:0])
    with pytest.raises(InvalidData, match="no name"):
        laplace.export(la, {"a b": x})
    with pytest.raises(UnsupportedError, match="joint"):
        laplace.export(la, x, link_approx="mc", joint=True)
    with pytest.raises(UnsupportedError, match="group_size"):
        laplace.export(la, x[:4], joint=True, group_size=2)
