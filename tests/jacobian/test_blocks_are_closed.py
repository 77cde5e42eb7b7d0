"""A block of a new kind needs its sizes, dense values and a choice of data, and nothing anywhere else."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laplace.jacobian
from laplace import Laplace
from laplace.curvature.rules import LayerRule, files
from laplace.engines.native.rules import evenly
from laplace.errors import TuningWarning
from laplace.jacobian.blocks import BLOCKS, Block
from laplace.structures import STRUCTURES
from tests.reference.compare import assert_close

PACKAGE = Path(laplace.__file__).parent
TYPES = [path for path in PACKAGE.rglob("*.py") if "jacobian" not in path.relative_to(PACKAGE).parts]


# A layer with connections of its own: z_o = Σ_e w_e x_s(e) over the connections e with t(e) = o.


@dataclass(frozen=True)
class SparseBlock(Block):
    """J_e = Σ_t g_t(e) a_s(e), from inputs a `[B, T, I]` and output gradients g `[K, B, T, O]`.

    Nothing but what every block must have.
    """

    a: Tensor
    g: Tensor
    source: Tensor
    target: Tensor

    @property
    def dims(self) -> tuple[int, int, int]:
        return len(self.g), len(self.a), len(self.source)

    def dense(self) -> Tensor:
        return (self.g[..., self.target] * self.a[..., self.source]).sum(2)

    def at(self, data: slice | Tensor) -> SparseBlock:
        return replace(self, a=self.a[data], g=self.g[:, data])


@dataclass(frozen=True)
class KeptSparseBlock(SparseBlock):
    """The same, with rows for data where outputs have positions, and factors that states hold."""

    def fold_positions(self, n_positions: int) -> KeptSparseBlock | None:
        if self.a.shape[1] != n_positions:
            return None
        return replace(self, a=self.a.flatten(0, 1).unsqueeze(1), g=self.g.flatten(1, 2).unsqueeze(2))

    def detached(self) -> KeptSparseBlock:
        return replace(self, a=self.a.detach(), g=self.g.detach())

    def select_outputs(self, outputs: Tensor) -> KeptSparseBlock:
        return replace(self, g=self.g[outputs.T, torch.arange(len(outputs))])

    def state(self) -> dict[str, Any]:
        return {"kind": "sparse", "a": self.a, "g": self.g, "source": self.source, "target": self.target}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> KeptSparseBlock:
        return cls(state["a"], state["g"], state["source"], state["target"])


BLOCKS["sparse"] = KeptSparseBlock


class Connections(nn.Module):
    """Its forward is that of all the classes below, of which two have a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 7))
        self.register_buffer("source", torch.tensor([0, 0, 1, 2, 2, 1, 0]))
        self.register_buffer("target", torch.tensor([0, 3, 1, 2, 3, 0, 2]))

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], 4).index_add(-1, self.target, self.weight * x[..., self.source])


class Sparse(Connections):
    pass


class KeptSparse(Connections):
    pass


class SparseRule(LayerRule):
    name = "sparse"
    parameters = ("weight",)

    def __init__(self, kind: type[SparseBlock]) -> None:
        self.kind = kind

    def positions(self, module: nn.Module, x: Tensor, n_data: int) -> int:
        return evenly(x.shape[:-1].numel(), n_data)

    def activation(self, module: nn.Module, attribute: str, x: Tensor, n_data: int, axis: Any) -> Tensor:
        return axis.positions(x, n_data, 1)

    def block(self, module: Any, attribute: str, a: Tensor | None, g: Tensor, n_data: int, axis: Any) -> Block:
        return self.kind(a, axis.positions(g, n_data, 1, batched=True), module.source, module.target)


files(SparseRule(SparseBlock), Sparse)
files(SparseRule(KeptSparseBlock), KeptSparse)

KINDS = (Sparse, KeptSparse)
PRIOR = 0.7
INDICES = torch.tensor([0, 2, 3, 7, 8, 12, 20])
"""Of a subnetwork: some connections and some entries of the layer behind them."""


def network(kind: type[Connections], *, positions: bool = False) -> nn.Module:
    """Outputs `[B, 3]`, or `[B, T, 3]` of which the last layer mixes nothing."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        mixing = [nn.Linear(3, 3), nn.Tanh()] if positions else []
        return nn.Sequential(*mixing, kind(), nn.Tanh(), nn.Linear(4, 3)).double()


def fitted(kind: type[Connections], weights: str, structure: str, *, positions: bool = False, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    shape = (6, 2) if positions else (6,)
    x = torch.randn(*shape, 3, dtype=torch.float64, generator=generator)
    y = torch.randint(3, shape, generator=generator)
    if weights == "subnetwork":
        options["subnetwork_indices"] = INDICES
    la = Laplace(
        network(kind, positions=positions), "classification", weights, structure, prior_precision=PRIOR, **options
    )
    la.fit([(x[:4], y[:4]), (x[4:], y[4:])])
    return la


def numbers(la: Any, x: Tensor) -> dict[str, Tensor]:
    """Evidence, variances, a joint covariance, and variances of several priors."""
    results = {
        "evidence": la.log_marginal_likelihood().detach(),
        "joint": la.predictive_moments(x, joint=True)[1],
        "variance": la.predictive_moments(x)[1],
        "diagonal": la.functional_variance_fast(x)[1],
    }
    loader = [(x, torch.arange(len(x.flatten(0, -2))).view(x.shape[:-1]) % 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)
        priors = {"prior_precision": [0.1, 1.0, 10.0]}
        results["many priors"] = la.optimize_hyperparameters(objective="nll", val_loader=loader, grid=priors).values
    la.prior_precision = PRIOR
    return results


def same(la: Any, plain: Any, x: Tensor) -> None:
    actual, expected = numbers(la, x), numbers(plain, x)
    for name, value in expected.items():
        assert_close(actual[name], value, "backend", label=name)


def inputs(*, positions: bool = False) -> Tensor:
    shape = (4, 2, 3) if positions else (4, 3)
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("weights", "structure"), [*product(("all", "subnetwork"), STRUCTURES), ("all", "gp")], ids=str
)
def test_a_new_block_gives_every_structure_what_autograd_gives_it(weights: str, structure: str) -> None:
    options = {"n_subset": 6} if structure == "gp" else {}
    plain = fitted(Connections, weights, structure, **options)
    assert not plain.coverage().get("0.weight", "").startswith("sparse")
    for kind in KINDS:
        la = fitted(kind, weights, structure, **options)
        if structure not in ("lowrank", "lowrank_kron"):
            assert la.coverage()["0.weight"].startswith("sparse"), la.coverage()
        same(la, plain, inputs())


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_a_new_block_behind_outputs_with_positions(structure: str) -> None:
    """Its rows are data where it folds positions, and have cotangents of their own where it does not."""
    plain = fitted(Connections, "all", structure, positions=True)
    for kind in KINDS:
        same(fitted(kind, "all", structure, positions=True), plain, inputs(positions=True))


@pytest.mark.parametrize(("kind", "stored"), [(Sparse, "dense"), (KeptSparse, "sparse")])
def test_a_new_block_in_a_state(kind: type[Connections], stored: str) -> None:
    la = fitted(kind, "all", "gp", n_subset=4)
    state = la.state_dict()
    assert {part[0]["kind"] for part in state["H"]["parts"]} == {stored}
    again = Laplace(network(kind), "classification", "all", "gp", n_subset=4)
    again.load_state_dict(state)
    x = inputs()
    assert torch.equal(again.predictive_moments(x, joint=True)[1], la.predictive_moments(x, joint=True)[1])


# No other code asks which kind of block it has.


def test_no_code_outside_the_jacobian_s_asks_for_the_type_of_a_block() -> None:
    kinds = {kind.__name__ for kind in subclasses(Block)} | {"Block"}
    assert len(kinds) > 8
    found = [f"{path.relative_to(PACKAGE)}:{node.lineno}" for path in TYPES for node in type_checks(path, kinds)]
    assert not found


def subclasses(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield kind
        yield from subclasses(kind)


def type_checks(path: Path, kinds: set[str]) -> Iterator[ast.AST]:
    """Calls of isinstance and issubclass, patterns, and comparisons with a type, that name one of the kinds."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        call = isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass")
        if (call or isinstance(node, ast.MatchClass | ast.Compare)) and kinds & names(node):
            yield node


def names(node: ast.AST) -> set[str]:
    parts = list(ast.walk(node))
    return {part.id for part in parts if isinstance(part, ast.Name)} | {
        part.attr for part in parts if isinstance(part, ast.Attribute)
    }


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(block, OuterBlock)", "isinstance(block, (int, blocks.DenseBlock))", "issubclass(kind, Block)",
        "type(block) is OuterBlock", "match block:\n    case OuterBlock():\n        pass",
    ],
)  # fmt: skip
def test_the_rule_can_fail(code: str, tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text(code)
    assert list(type_checks(path, {"Block", "OuterBlock", "DenseBlock"}))
