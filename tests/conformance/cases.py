"""Cases of the conformance tests: every problem × structure × choice of weights, and the truth about each.

Structures come from the library's registry and problems from the catalogue, so that a new one of either is tested
by being there. The truth is dense, in float64, and computed once per problem for all of its parameters.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, ParametricLaplace
from laplace.core.hyperparameters import GaussianPrior
from laplace.curvature import NativeEF, NativeGGN
from laplace.structures import STRUCTURES
from tests import problems as catalogue
from tests.pairs import Once
from tests.problems import Problem
from tests.reference import curvature as reference

STRUCTURE_NAMES: tuple[str, ...] = tuple(STRUCTURES)
# Of which the curvature of all data is the sum of that of its parts; corrected eigenvalues of two sets of data belong
# to two bases, and their sum is an approximation with a test of its own.
SUMMING = tuple(name for name in STRUCTURE_NAMES if name != "ekfac")
# Of which the mean over sampled curvatures is that of the exact one: not where a basis or a scaling is sampled, too.
LINEAR = tuple(name for name in SUMMING if name != "lowrank_kron")
SUBNETWORKS = ("random", "rectangle", "mixed")
WEIGHTS = ("all", "last_layer", *SUBNETWORKS)
BACKENDS = {"ggn": NativeGGN, "ef": NativeEF}

# One problem of every kind, for products that are too large over the whole catalogue.
FEW = (
    "mlp_classification",
    "mlp_regression",
    "mlp_bernoulli_multi",
    "conv2d_grouped",
    "pair",
    "transformer",
    "bare_parameter",
    "frozen_bias",
)


@dataclass(frozen=True)
class Case:
    """A problem with a structure and a choice of weights.

    Attributes:
        problem: Network and data.
        structure: A name in `STRUCTURES`.
        weights: `"all"`, `"last_layer"`, or one of the subnetworks: random entries, rows × columns of one weight
            (`"rectangle"`), or a whole tensor with a rectangle and single entries of others (`"mixed"`).
    """

    problem: Problem
    structure: str
    weights: str

    def __str__(self) -> str:
        return f"{self.problem}-{self.structure}-{self.weights}"

    @property
    def axes(self) -> tuple[Hashable, ...]:
        """What a product of cases varies: of every pair one problem is enough, and every problem has its turn."""
        return self.structure, self.weights, self.problem.likelihood, Once(self.problem.name)

    @property
    def columns(self) -> Tensor:
        """Places of the treated entries among all parameters of the model, `[P]`."""
        return columns(self.problem, self.weights)

    @property
    def jacobian(self) -> Tensor:
        """J `[B, C, P]`."""
        return truth(self.problem.name).jacobian[:, :, self.columns]

    @property
    def mean(self) -> Tensor:
        """θ*, `[P]`."""
        return truth(self.problem.name).theta[self.columns]

    @property
    def tensor_of(self) -> Tensor:
        """Which parameter tensor of the model each treated entry belongs to, `[P]`."""
        return truth(self.problem.name).tensor_of[self.columns]

    @property
    def layer_of(self) -> Tensor:
        """Which module owns each treated entry, as a number, `[P]`."""
        owners = [name.rpartition(".")[0] for name in truth(self.problem.name).names]
        return torch.tensor([owners.index(owner) for owner in owners])[self.tensor_of]

    @property
    def n_outputs(self) -> int:
        """C."""
        return self.jacobian.shape[1]

    def dense(self, kind: str = "ggn", output_scale: Tensor | None = None) -> Tensor:
        """The exact unit curvature `[P, P]`; with `output_scale` `[C]` that of a regression with several noises."""
        return dense(self.problem, kind, output_scale)[self.columns][:, self.columns]

    @property
    def exactly(self) -> dict[str, Any]:
        """Options under which the structure keeps all that it can."""
        ranks = {"lowrank": len(self.columns), "lowrank_kron": 1000}
        return {"structure_kwargs": {"rank": ranks[self.structure]}} if self.structure in ranks else {}

    def build(self, model: nn.Module | None = None, **options: Any) -> ParametricLaplace:
        """The posterior, not fitted, of a fresh model, or of a given one around it."""
        subset = self.weights
        options = self.exactly | options
        if self.weights in SUBNETWORKS:
            subset, options["subnetwork_indices"] = "subnetwork", indices(self.problem, self.weights)
        elif self.weights == "last_layer":
            options.setdefault("last_layer_name", self.problem.head)
        model = self.problem.make_model() if model is None else model
        return Laplace(model, self.problem.likelihood, subset, self.structure, **options)  # pyright: ignore

    def fit(self, batch_size: int | None = None, kind: str = "ggn", **options: Any) -> ParametricLaplace:
        """The posterior, fitted."""
        la = self.build(backend=BACKENDS[kind], **options)
        la.fit(self.problem.batches(batch_size))
        return la


# What a structure keeps of the exact curvature, where that is a function of it; those of Kronecker factors have files
# of their own.
KEPT: dict[str, Callable[[Case, Tensor], Tensor]] = {
    "full": lambda case, dense: dense,
    "lowrank": lambda case, dense: dense,
    "matrix_free": lambda case, dense: dense,
    "diag": lambda case, dense: torch.diag(dense.diagonal()),
    "block": lambda case, dense: dense * (case.layer_of[:, None] == case.layer_of),
}


@dataclass(frozen=True)
class Truth:
    """What is true of a problem, for all of its parameters, frozen ones included.

    Attributes:
        names: All parameters, tied ones once.
        jacobian: `[B, C, P]`.
        f: `[B, C]`.
        theta: `[P]`.
        tensor_of: Position in `names` of the tensor of each entry, `[P]`.
        trainable: Which entries require a gradient, `[P]`.
    """

    names: list[str]
    jacobian: Tensor
    f: Tensor
    theta: Tensor
    tensor_of: Tensor
    trainable: Tensor


@cache
def truth(name: str) -> Truth:
    """The truth about the problem of that name."""
    problem = catalogue.get(name)
    model = problem.make_model()
    tensors = dict(model.named_parameters())
    names = list(tensors)
    jacobian, f = reference.flat_jacobian(model, problem.x, names)
    sizes = torch.tensor([tensors[n].numel() for n in names])
    return Truth(
        names=names,
        jacobian=jacobian,
        f=f,
        theta=reference.flat_parameters(model, names),
        tensor_of=torch.arange(len(names)).repeat_interleave(sizes),
        trainable=torch.tensor([tensors[n].requires_grad for n in names]).repeat_interleave(sizes),
    )


def dense(problem: Problem, kind: str, output_scale: Tensor | None = None) -> Tensor:
    """Exact GGN or empirical Fisher of all parameters, from the Jacobian."""
    known = truth(problem.name)
    if kind == "ef":
        residual = reference.residual(known.f, problem.y, problem.likelihood)
        gradients = torch.einsum("bcp,bc->bp", known.jacobian, residual)
        return gradients.T @ gradients
    inner = reference.output_hessian(known.f, problem.likelihood, problem.y)
    if output_scale is not None:
        inner = inner * output_scale
    return torch.einsum("bcp,bcd,bdq->pq", known.jacobian, inner, known.jacobian)


def columns(problem: Problem, weights: str) -> Tensor:
    """Places of a choice of weights among all parameters, `[P]`."""
    known = truth(problem.name)
    if weights == "all":
        return known.trainable.nonzero().flatten()
    if weights == "last_layer":
        return _head(problem)
    return known.trainable.nonzero().flatten()[indices(problem, weights)]


def _head(problem: Problem) -> Tensor:
    """Entries of the head: its trainable ones, or all of them where the whole head is frozen."""
    known, model = truth(problem.name), problem.make_model()
    inside = {id(tensor) for tensor in model.get_submodule(str(problem.head)).parameters()}
    names = [known.names.index(name) for name, tensor in model.named_parameters() if id(tensor) in inside]
    entries = torch.isin(known.tensor_of, torch.tensor(names))
    kept = entries & known.trainable
    return (kept if kept.any() else entries).nonzero().flatten()


@cache
def _trainable_shapes(name: str) -> tuple[tuple[int, torch.Size], ...]:
    """First index among the trainable entries, and shape, of every trainable tensor."""
    found: list[tuple[int, torch.Size]] = []
    start = 0
    for tensor in catalogue.get(name).make_model().parameters():
        if tensor.requires_grad:
            found.append((start, tensor.shape))
            start += tensor.numel()
    return tuple(found)


def indices(problem: Problem, weights: str) -> Tensor:
    """Indices of a subnetwork within the flattened trainable parameters, ascending, `[p]`."""
    tensors = _trainable_shapes(problem.name)
    total = tensors[-1][0] + tensors[-1][1].numel()
    generator = torch.Generator().manual_seed(zlib.crc32(f"{problem} {weights}".encode()))
    some = torch.randperm(total, generator=generator)[: max(2, total // 3)]
    matrices = [(start, shape) for start, shape in tensors if len(shape) >= 2] or [tensors[0]]
    if weights == "random":
        return some.sort().values
    if weights == "rectangle":
        return _rectangle(*matrices[0])
    start, shape = tensors[0]
    whole = torch.arange(start, start + shape.numel())
    return torch.cat([whole, _rectangle(*matrices[-1]), some[: len(some) // 3]]).unique()


def _rectangle(start: int, shape: torch.Size) -> Tensor:
    """Every other row × all but the first column of a tensor seen as a matrix."""
    grid = torch.arange(start, start + shape.numel()).view(shape[0], -1)
    rows = grid[::2]
    return (rows if rows.shape[1] == 1 else rows[:, 1:]).flatten()


def has_own_head(problem: Problem) -> bool:
    """Whether the last layer's Jacobian is the network's: a tied one is random in the head alone."""
    return problem.head is not None and "tied" not in problem.tags


def cases(
    problems: Sequence[Problem] | None = None, weights: Sequence[str] = WEIGHTS, structures: Sequence[str] = ()
) -> list[Any]:
    """Parameters for pytest: the product, less last layers of problems without one."""
    chosen = list(catalogue.PROBLEMS.values()) if problems is None else problems
    product = [
        Case(problem, structure, choice)
        for problem in chosen
        for choice in weights
        if choice != "last_layer" or has_own_head(problem)
        for structure in structures or STRUCTURE_NAMES
    ]
    return [pytest.param(case, id=str(case)) for case in product]


def thinned(*structures: str) -> list[Any]:
    """Every problem × structure with all weights and with one other choice, by turns."""
    found: list[Any] = []
    for i, problem in enumerate(catalogue.PROBLEMS.values()):
        others = [choice for choice in WEIGHTS[1:] if choice != "last_layer" or has_own_head(problem)]
        for j, structure in enumerate(structures or STRUCTURE_NAMES):
            found += cases([problem], ["all", others[(i + j) % len(others)]], [structure])
    return found


def by_turns(
    structures: Sequence[str] = STRUCTURE_NAMES, weights: Sequence[str] = ("all",), names: Sequence[str] = ()
) -> list[Any]:
    """Every problem once, with structures and choices of weights by turns."""
    found: list[Any] = []
    for i, problem in enumerate(map(catalogue.get, names or catalogue.PROBLEMS)):
        choices = [choice for choice in weights if choice != "last_layer" or has_own_head(problem)]
        turn = i // len(structures)
        found += cases([problem], [choices[turn % len(choices)]], [structures[i % len(structures)]])
    return found


def few(*weights: str, structures: Sequence[str] = (), names: Sequence[str] = FEW) -> list[Any]:
    """The product over one problem of every kind."""
    return cases([catalogue.get(name) for name in names], weights or WEIGHTS, structures)


def own_dense(la: ParametricLaplace, scale: Tensor | None = None) -> Tensor:
    """The unit curvature that a posterior holds, dense `[P, P]`, by way of its precision under a unit prior.

    Args:
        la: Fitted.
        scale: Factors of the terms `[E]`; ones if None.
    """
    fitted = la.fitted().curvature
    one = torch.ones(1, dtype=torch.float64)
    prior = GaussianPrior(one, torch.zeros((), dtype=torch.float64), la.problem.layout)
    weights = one.expand(fitted.n_terms) if scale is None else scale
    engine = la.snapshot().engine  # of curvature that is known by products
    precision = fitted.precision(weights, prior, engine=engine)
    return precision.to_dense() - torch.eye(la.problem.layout.n_params, dtype=torch.float64)


def drawn(case: Case | Problem, what: str, *shape: int) -> Tensor:
    """Standard normal numbers that belong to a case, float64."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case} {what}".encode()))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def priors(case: Case) -> dict[str, tuple[Tensor, Tensor]]:
    """Priors of every form: as users give them, and as a diagonal `[P]`."""
    sizes = case.tensor_of.unique(return_counts=True)[1]
    scalar = torch.tensor([0.7], dtype=torch.float64)
    per_tensor = drawn(case, "layerwise", len(sizes)).exp()
    diagonal = drawn(case, "diagonal", len(case.columns)).exp()
    return {
        "scalar": (scalar, scalar.expand(len(case.columns))),
        "layerwise": (per_tensor, per_tensor.repeat_interleave(sizes)),
        "diag": (diagonal, diagonal),
    }
