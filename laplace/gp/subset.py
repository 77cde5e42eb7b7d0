"""Gaussian processes on a subset of the data: the data that are kept, the curvature and the precision of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from laplace.core import batch as batches
from laplace.core import nested
from laplace.core.arguments import check_counts
from laplace.core.batch import Inputs
from laplace.core.cached import cached_property
from laplace.core.checks import named
from laplace.core.gaussian import centred_variance_of_independent
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.layout import Layout
from laplace.core.positions import require_none
from laplace.core.precision_policy import wide_dtype, widened
from laplace.core.random_numbers import uniform
from laplace.engines.engine import BatchSummary, CurvatureEngine, outputs
from laplace.errors import CurvatureError, InvalidArgument, InvalidData, StateError, UnsupportedError
from laplace.gp.reading import HOLDS_INPUTS, POSITIONS, ObservingPass, observed, uncounted
from laplace.jacobian.jacobian import Jacobian, each_output, kernel_at, require_rows
from laplace.large_structures.dual import Dual, DualPrecision, JointPrecision, ProjectedScan, SplitPrior
from laplace.structures.base import Curvature, DataPass, require_finite
from laplace.structures.precision import Form, Precision

SELECTIONS = ("random", "top", "leverage")
"""Names of the scores."""

Score = Callable[[Inputs, Tensor], Tensor]
"""Scores of the data of a batch, `[B]`: large is kept."""


@dataclass(frozen=True, eq=False)
class SubsetRows:
    """Some data of one batch."""

    x: Inputs  # Inputs of n data
    y: Tensor  # Targets
    scores: Tensor  # `[n]`, float64
    batches: tuple[int, ...]  # Numbers of the batches that they are from, for messages

    def __len__(self) -> int:
        return len(self.y)

    def where(self, keep: Tensor) -> SubsetRows:
        """The rows of a mask `[n]`."""
        return SubsetRows(batches.select(self.x, keep, len(self)), self.y[keep], self.scores[keep], self.batches)


class Pool:
    """The M data with the largest scores of all that were read, in the order in which they came.

    With random scores this is a sample without replacement, however many data there are, read once.
    """

    def __init__(self, size: int, score: Score, *, balanced: bool = False) -> None:
        self.size = size  # M
        self.score = score  # The scores of a batch
        # Whether class labels take turns: first the best datum of every class, then the second
        self.balanced = balanced
        self.seen = 0
        self._read = 0
        self._rows: list[SubsetRows] = []
        self._longest = 1

    def add(self, x: Inputs, y: Tensor) -> None:
        """Takes in a batch."""
        scores = widened(self.score(x, y))
        if not bool(scores.isfinite().all()):
            raise InvalidData("the scores of the data are not finite; the inputs or weights hold NaN or infinity.")
        self._rows.append(SubsetRows(x, y, scores, (self._read,)))
        self.seen += len(y)
        self._read += 1
        self._longest = max(self._longest, len(y))
        counts = [len(rows) for rows in self._rows]
        if sum(counts) <= self.size:
            # Whole batches are copied: a loader may fill the same tensors anew.
            x = batches.copied(x)
            self._rows[-1] = SubsetRows(x, y.clone(), scores, self._rows[-1].batches)
            return
        # A stable order: of equal scores the earlier datum stays.
        order = torch.cat([rows.scores for rows in self._rows]).sort(descending=True, stable=True).indices
        if self.balanced:
            order = order[_turns(torch.cat([rows.y for rows in self._rows])[order]).sort(stable=True).indices]
        keep = torch.zeros(len(order), dtype=torch.bool, device=order.device)
        keep[order[: self.size]] = True
        best = [rows.where(mask) for rows, mask in zip(self._rows, keep.split(counts), strict=True)]
        self._rows = [rows for rows in best if len(rows)]

    def chunks(self) -> Iterator[SubsetRows]:
        """The data, in pieces no longer than the longest batch."""
        if self.seen < self.size:
            raise InvalidData(
                f"{self.size} data are to be kept, but the loader gave only {self.seen}; give a smaller "
                "n_subset (subsample_size, num_inducing)."
            )
        pending: SubsetRows | None = None
        for rows in self._rows:
            both = None if pending is None else joined(pending, rows, self._longest)
            if both is None and pending is not None:
                yield pending
            pending = both or rows
        if pending is not None:
            yield pending


def _turns(labels: Tensor) -> Tensor:
    """Number of data of the same class before each label, `[n]`.

    A datum that is left out once stays so: whatever comes later never leaves fewer in front of it.
    """
    turns = torch.zeros_like(labels)
    for label in labels.unique():
        same = labels == label
        turns[same] = torch.arange(int(same.sum()), device=labels.device)
    return turns


def joined(first: SubsetRows, second: SubsetRows, longest: int) -> SubsetRows | None:
    """Both, or None where their inputs have other shapes or parts that are no rows, or they are too many."""
    if len(first) + len(second) > longest or type(first.x) is not type(second.x):
        return None
    ours, theirs = batches.tensors(first.x), batches.tensors(second.x)
    if len(ours) != len(theirs) or not (batches.is_dense(first.x) and batches.is_dense(second.x)):
        return None
    if first.y.shape[1:] != second.y.shape[1:]:
        return None
    for a, b in zip(ours, theirs, strict=True):
        rows = a.ndim and b.ndim and len(a) == len(first) and len(b) == len(second)
        if not rows or a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
            return None
    following = iter(theirs)
    x = batches.transform(first.x, lambda tensor: torch.cat([tensor, next(following)]))
    scores = torch.cat([first.scores, second.scores])
    return SubsetRows(x, torch.cat([first.y, second.y]), scores, (*first.batches, *second.batches))


def make_score(selection: str, engine: CurvatureEngine, generator: torch.Generator) -> Score:
    """A score by its name."""
    if selection == "random":
        return lambda x, y: uniform((len(y),), y, generator)
    if selection == "top":
        if engine.likelihood.has_noise:
            raise InvalidArgument(
                "selection='top' ranks data by their output Hessian, which is constant for a regression; use "
                "'leverage' or 'random'."
            )
        return lambda x, y: _trace(engine, x, y)
    if selection == "leverage":
        return lambda x, y: _leverage(engine, x, y)
    raise InvalidArgument(f"selection={selection!r}; accepted are {list(SELECTIONS)}.")


def _trace(engine: CurvatureEngine, x: Inputs, y: Tensor) -> Tensor:
    rows = outputs(engine, x)
    require_none(rows.positions, *POSITIONS)
    f = rows.values
    y = engine.checked(f, y)
    return engine.likelihood.hessian(f, y).diagonal().sum(1)


def _leverage(engine: CurvatureEngine, x: Inputs, y: Tensor) -> Tensor:
    scores: list[Tensor] = []
    for jacobian, f, targets in observed(engine, x, y):
        hessian = widened(engine.likelihood.hessian(f, targets).matrix())
        scores.append((kernel_at(jacobian) * hessian).sum((1, 2)))
    return torch.cat(scores)


# Posterior precisions of M data whose outputs have weights of their own.


def _side_by_side(blocks: list[Tensor]) -> Tensor:
    """Covariances `[..., n, n]` of C independent outputs as one, `[..., n·C, n·C]`, rows major."""
    return torch.diag_embed(torch.stack(blocks, -1)).transpose(-3, -2).flatten(-2).flatten(-3, -2)


@dataclass(frozen=True)
class IndependentPrecision(DualPrecision):
    """Every output by itself, a Gaussian process of its own [Linearization, eq. 15] that has no weights."""

    def weights_of(self, i: int) -> Tensor:
        return self.weights[i].unsqueeze(0) if self.weights.numel() > 1 else self.weights

    def variance(self, jacobian: Jacobian, form: Form) -> Tensor:
        if form == "full" and jacobian.group_size == 1:  # an output of one row: variances say everything
            return torch.diag_embed(self.variance(jacobian, "diagonal"))
        blocks = [self.covariance_of(i, part, form) for i, part in enumerate(each_output(jacobian))]
        if form == "diagonal":
            return torch.cat(blocks, 1).to(self.dtype)
        return _side_by_side(blocks).to(jacobian.summed_in(self.dtype))

    def centred_variance(self, jacobian: Jacobian) -> Tensor:
        return centred_variance_of_independent(self.variance(jacobian, "diagonal"))

    def power(self, vectors: Tensor, exponent: float) -> Tensor:
        raise UnsupportedError(
            "independent_outputs=True makes a Gaussian process of every output, to which no Gaussian over weights "
            "belongs: there are no weights to sample, and no gradients of validation losses (use method='grid' or "
            "'gridsearch'). Use independent_outputs=False for these."
        )


# Curvature of a subset of the data, kept as factored Jacobians (Immer et al., 2021, appendix A.2).


@dataclass(frozen=True)
class SubsetOptions:
    """Options of the choice and the use of a subset.

    Attributes:
        n_subset: M.
        seed: Of random subsets.
        selection: `"random"`, `"top"` or `"leverage"`, see `laplace.gp.subset.make_score`.
        independent_outputs: A Gaussian process per output, with the diagonal of Λ.
        prior_factor: What the prior precision is multiplied with; None for N/M (appendix A.2.2).

    Raises:
        InvalidArgument: A value that is not accepted.
    """

    n_subset: int
    seed: int = 0
    selection: str = "random"
    independent_outputs: bool = False
    prior_factor: float | None = None

    def __post_init__(self) -> None:
        check_counts(n_subset=self.n_subset)
        if self.selection not in SELECTIONS:
            raise InvalidArgument(f"selection={self.selection!r}; accepted are {list(SELECTIONS)}.")
        if self.prior_factor is not None and not 0 < self.prior_factor < math.inf:
            raise InvalidArgument(f"prior_factor={self.prior_factor}; it must be positive and finite, or None for N/M.")

    def at_most(self, n_data: int) -> SubsetOptions:
        """The same for so many data: a subset of more is all of them."""
        return replace(self, n_subset=min(self.n_subset, n_data))


@dataclass(frozen=True)
class SubsetCurvature(Curvature):
    """The unit curvature Σ_m J_mᵀ Λ_m J_m of M out of N data, never multiplied out."""

    dual: Dual  # Jacobians and roots of Λ
    n_seen: float  # N
    independent: bool  # Whether every output is by itself
    factor: float | None  # What the prior precision is multiplied with, or None for N/M
    terms: int  # 1, or C with one noise per output
    name = "gp"
    exact_ggn = True
    weighs_data = False
    holds_inputs = True
    options = SubsetOptions

    @property
    def n_terms(self) -> int:
        return self.terms

    @property
    def n_subset(self) -> int:
        """M."""
        return len(self.dual.roots)

    @property
    def share(self) -> float:
        """M/N: the evidence is that of the subset."""
        return self.n_subset / self.n_seen

    @property
    def prior_factor(self) -> float:
        return self.n_seen / self.n_subset if self.factor is None else self.factor

    @property
    def note(self) -> str:
        outputs = "every output by itself" if self.independent else "all outputs together"
        return (
            f"subset of {self.n_subset} of {self.n_seen:g} data, {outputs}, "
            f"prior precision times {self.prior_factor:.4g}; {HOLDS_INPUTS}"
        )

    def with_roots(self, roots: Tensor) -> SubsetCurvature:
        """The curvature of the same data at other outputs, by roots of their Λ, `[M, C, K]`."""
        return replace(self, dual=Dual(self.dual.parts, roots.to(self.dual.roots)))

    def cast(self, dtype: torch.dtype) -> SubsetCurvature:
        """The same with Jacobians in another dtype."""
        return replace(self, dual=Dual(tuple(part.cast(dtype) for part in self.dual.parts), self.dual.roots))

    @cached_property
    def duals(self) -> tuple[Dual, ...]:
        """Dual forms of all outputs together, or of every output."""
        if not self.independent:
            return (self.dual,)
        return tuple(self.dual.output(c) for c in range(self.dual.roots.shape[1]))

    @classmethod
    def first_pass(cls, engine: CurvatureEngine, options: Any) -> DataPass:
        return SubsetPass(engine, options)

    @classmethod
    def before_data(cls, prior: GaussianPrior) -> Precision:
        raise UnsupportedError("a Gaussian process has no density over weights before fit; call fit(train_loader).")

    def __add__(self, other: Curvature) -> SubsetCurvature:
        if not isinstance(other, SubsetCurvature):
            return NotImplemented
        both = self.dual.roots, other.dual.roots
        if both[0].shape[1] != both[1].shape[1] or self.independent != other.independent:
            raise CurvatureError("the subsets have other outputs, or are used otherwise; fit with override=True.")
        width = max(roots.shape[2] for roots in both)  # older states hold as many columns as outputs
        roots = torch.cat([functional.pad(roots, (0, width - roots.shape[2])) for roots in both])
        dual = Dual((*self.dual.parts, *other.dual.parts), roots)
        return SubsetCurvature(dual, self.n_seen + other.n_seen, self.independent, self.factor, self.terms)

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> DualPrecision:
        """The posterior under the prior precision times `prior_factor` [Linearization, eq. A.7].

        With it the process predicts by the M data [Linearization, eq. 16].

        Raises:
            UnsupportedError: A prior that varies within a tensor.
        """
        if not prior.is_constant_per_tensor:
            raise UnsupportedError(
                "hessian_structure='gp' takes one prior precision, or one per parameter tensor: a kernel of factors "
                "knows no single weights. Use hessian_structure='full', 'diag' or 'block' for one per parameter."
            )
        scaled = GaussianPrior(self.prior_factor * prior.precision, prior.mean, prior.layout)
        kind = IndependentPrecision if self.independent else JointPrecision
        return kind(self.duals, weights, scaled, self.dual.roots.dtype)

    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> ProjectedScan:
        dtype = self.dual.roots.dtype
        if weights.numel() == 1:
            weight, bases = weights[0], tuple(dual.unit for dual in self.duals)
        else:
            weight = torch.ones((), dtype=wide_dtype(weights.device), device=weights.device)
            parts = weights.split(1) if self.independent else (weights,)
            bases = tuple(dual.basis(part, None) for dual, part in zip(self.duals, parts, strict=True))

        def split(jacobian: Jacobian, form: Form) -> tuple[SplitPrior, ...]:
            each = each_output(jacobian) if self.independent else (jacobian,)
            return tuple(basis.split(part, form) for basis, part in zip(bases, each, strict=True))

        return ProjectedScan(split, weight, self.prior_factor, dtype, not self.independent)

    def state(self) -> dict[str, Any]:
        return {
            "parts": [part.state() for part in self.dual.parts],
            "roots": self.dual.roots,
            "n_seen": self.n_seen,
            "independent": self.independent,
            "factor": self.factor,
            "n_terms": self.terms,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> SubsetCurvature:
        parts = [Jacobian.from_state(part) for part in state["parts"]]
        factor = None if state["factor"] is None else float(state["factor"])
        dual = nested.from_state(Dual, {"parts": parts, "roots": state["roots"]})
        return nested.from_state(cls, {**state, "dual": dual, "factor": factor, "terms": state["n_terms"]})

    def require_of(self, layout: Layout, dtype: torch.dtype) -> None:
        require_rows([part.blocks for part in self.dual.parts], layout)
        n_data, n_outputs = (
            sum(part.blocks[0].n_data for part in self.dual.parts),
            self.dual.parts[0].blocks[0].n_cotangents,
        )
        nested.require_sizes("the roots of H", self.dual.roots, n_data, n_outputs, None)
        if not (
            n_data <= self.n_seen < math.inf
            and self.terms in (1, n_outputs)
            and (self.factor is None or 0 < self.factor < math.inf)
        ):
            raise StateError(f"H has {n_data} of {self.n_seen} data in {self.terms} terms, and a factor {self.factor}.")

    def public(self) -> Tensor:
        """The kernel J Jᵀ of the subset, `[M·C, M·C]`."""
        size = self.n_subset * self.dual.roots.shape[1]
        return self.dual.kernel.reshape(size, size).to(self.dual.roots.dtype)


@dataclass(frozen=True, eq=False)
class Subset:
    """The data that a reading has picked."""

    curvature: SubsetCurvature  # Their curvature
    f: Tensor  # Outputs of the network, `[M, C]`
    y: Tensor  # Checked targets


class SubsetPass(ObservingPass):
    """One reading: the inputs of the subset are picked as the data pass by, and differentiated at the end."""

    def __init__(self, engine: CurvatureEngine, options: SubsetOptions) -> None:
        super().__init__(engine)
        self.options = options  # How the subset is chosen
        self.found: Subset | None = None  # The data, with what the network says of them; None before the end
        # The numbers that decide do not depend on the device.
        generator = torch.Generator().manual_seed(options.seed)
        self.pool = Pool(options.n_subset, make_score(options.selection, engine, generator))

    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        self.pool.add(x, y)
        return uncounted(y)

    def finish(self) -> SubsetCurvature:
        rows = [row for chunk in self.pool.chunks() for row in self._differentiated(chunk)]
        parts, roots, f, y = zip(*rows, strict=True)
        root = torch.cat(roots)
        terms = root.shape[1] if self.engine.split_outputs else 1
        curvature = SubsetCurvature(
            Dual(parts, root), self.pool.seen, self.options.independent_outputs, self.options.prior_factor, terms
        )
        self.found = Subset(curvature, torch.cat(f), torch.cat(y))
        return curvature

    def _differentiated(self, rows: SubsetRows) -> Iterator[tuple[Jacobian, Tensor, Tensor, Tensor]]:
        """Jacobians, roots of Λ, outputs and targets of consecutive data.

        The loss is that of the subset, the number that of all data.
        """
        with named(f"the subset, of batches {sorted(set(rows.batches))}"):
            for jacobian, f, targets in self.observed(rows.x, rows.y):
                root = self.engine.likelihood.hessian(f, targets).root().permute(1, 2, 0)
                require_finite(root.isfinite())
                yield jacobian.detached(), root.contiguous(), f, targets
