"""Base of curvature engines, which compute what structures ask for, batch by batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.checks import as_count, require, where_not_finite
from laplace.core.inference import kept_for_later
from laplace.core.pieces import share_of_memory
from laplace.core.positions import OutputChoice, OutputRows, target_rows
from laplace.engines.kron_parts import KronParts
from laplace.engines.profile import BatchProfile
from laplace.engines.sinks import Bases, BlockSink, DiagSink, FullSink, Groups, KronSink, ProductSink, Sink
from laplace.errors import InvalidArgument, InvalidData, UnsupportedError
from laplace.jacobian.full_sum import MatrixSum
from laplace.jacobian.jacobian import Jacobian
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.checks import Loss, recovered_targets, refuse_gaps, require_logits
from laplace.likelihoods.output_hessian import OutputHessian
from laplace.network.next_token import TargetRules, TargetsAsGiven
from laplace.weights.problem import Problem

_MAX_KEPT_BYTES = 2**26
"""Largest number of bytes of features and outputs that are kept: beyond it nothing is."""


class HeadBatch(NamedTuple):
    """A batch of a head without positions."""

    features: Tensor  # φ, `[B, D]`, without a 1 for the bias
    f: Tensor  # Outputs `[B, C]`
    y: Tensor  # Checked targets, one for every row
    versions: tuple[int, int]  # Numbers of writes to features and targets so far


class HeadMemory:
    """Batches as a fit saw them, by reference."""

    def __init__(self) -> None:
        self._batches: list[HeadBatch] = []
        self._storages: set[int] = set()  # of which features may be a part: a loader's own inputs, say
        self._n_bytes = 0

    def add(self, features: Tensor, f: Tensor, y: Tensor) -> None:
        """Keeps a batch; once they are too many, all are dropped and none is kept any more."""
        if self._n_bytes > _MAX_KEPT_BYTES:
            return
        storage = features.untyped_storage()
        self._n_bytes += f.nbytes + (0 if storage.data_ptr() in self._storages else storage.nbytes())
        self._storages.add(storage.data_ptr())
        if features.is_inference() or y.is_inference():  # of which no write is counted
            self._n_bytes = _MAX_KEPT_BYTES + 1
        if self._n_bytes > _MAX_KEPT_BYTES:
            self._batches.clear()
        else:
            self._batches.append(HeadBatch(features, f, y, (features._version, y._version)))

    def batches(self) -> Sequence[HeadBatch]:
        """The kept batches; none if a tensor was written to since then."""
        same = all(batch.versions == (batch.features._version, batch.y._version) for batch in self._batches)
        return self._batches if same else ()


MEMORY_BUDGET = 2**30
"""Bytes of output gradients held at once on a CPU: fixed, so that results do not depend on the machine."""

MAX_PASSES = 4096
"""Backward passes that one batch of outputs with positions may take, one per position and output."""


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine, which reads those that concern its kind of curvature.

    Attributes:
        stochastic: Replace the output Hessian Λ by gradients at targets drawn from the model: the Monte-Carlo Fisher.
        num_samples: Targets drawn per sample.
        generator: Source of those draws; None for a new one with the seed of `torch.manual_seed`, so that the global
            random state is left alone.
        kfac_approx: `"expand"` or `"reduce"`: how Kronecker factors treat positions that share a weight
            (Eschenhagen et al., 2023).
        memory_budget: Bytes of output gradients, or of activations of vectorised passes, that are held at once; None
            for 1 GiB, or on a larger card a sixth of its memory.
        max_passes: Backward passes that a batch of outputs with positions may take.
        split_outputs: Keep one curvature term per output, so that a vector noise can be changed after `fit`.
        loss: A loss around that of the likelihood, which is of other targets; None where targets are as they are given.

    Raises:
        InvalidArgument: Unknown `kfac_approx`, or a number that is not positive.
        UnsupportedError: Sampled curvature cannot be kept per output.
    """

    stochastic: bool = False
    num_samples: int = 1
    generator: torch.Generator | None = None
    kfac_approx: str = "expand"
    memory_budget: int | None = None
    max_passes: int = MAX_PASSES
    split_outputs: bool = False
    loss: Loss | None = None

    def __post_init__(self) -> None:
        if self.max_passes <= 0:
            raise InvalidArgument(f"max_passes={self.max_passes} backward passes; it must be positive.")
        if self.memory_budget is not None and self.memory_budget <= 0:
            raise InvalidArgument(f"memory_budget={self.memory_budget} bytes; it must be positive.")
        if self.kfac_approx not in ("expand", "reduce"):
            raise InvalidArgument(f"kfac_approx={self.kfac_approx!r}; accepted are 'expand' and 'reduce'.")
        if self.num_samples < 1:
            raise InvalidArgument(f"num_samples={self.num_samples}; it must be at least 1.")
        if self.stochastic and self.split_outputs:
            raise UnsupportedError(
                "stochastic=True with one noise per output: sampled curvature has no term per output. "
                "Use the exact GGN (stochastic=False) or a scalar sigma_noise."
            )

    def budget(self, device: torch.device) -> int:
        """The memory budget on a device."""
        return share_of_memory(MEMORY_BUDGET, device) if self.memory_budget is None else self.memory_budget


@dataclass(frozen=True, eq=False)
class BatchSummary:
    """Contributions of a batch besides its curvature."""

    loss_terms: Tensor  # Summed unit negative log likelihood, `[1]`, or `[C]` with one noise per output
    # Number of samples that are not ignored, or the sum of their weights; 0-dim if it is on a device
    n_data: float | Tensor
    n_outputs: int  # C
    # Sum of the weights of observed targets per output, `[C]`; None where no normaliser needs them
    observations: Tensor | None = None

    @property
    def count(self) -> float:
        """Number of data on the host."""
        return as_count(float(self.n_data))

    @property
    def gaps(self) -> Tensor | None:
        """Observed targets per output, `[C]`; None if they are those of all data."""
        seen = self.observations
        return None if seen is None or bool((seen == self.count).all()) else seen

    def joined(self, other: BatchSummary) -> BatchSummary:
        """Contributions of two batches."""
        ours, theirs = self.observations, other.observations
        seen = None if ours is None or theirs is None else ours + theirs.to(ours)
        losses, n_data = self.loss_terms + other.loss_terms, self.n_data + other.n_data
        return BatchSummary(losses, n_data, self.n_outputs, seen)


@dataclass(frozen=True, eq=False)
class OutputCurvature:
    """Curvature of the loss with respect to the outputs of a batch."""

    hessian: OutputHessian  # Λ of every row
    n_positions: int  # Rows of a sample; 1 without positions


class LinearMap(ABC):
    """The outputs of a batch as a linear function of the random entries, J, and its transpose."""

    is_lasting: ClassVar[bool] = True
    """False for a graph, which holds activations several times and is not worth its memory."""

    @property
    @abstractmethod
    def n_bytes(self) -> int:
        """Approximate bytes."""

    @abstractmethod
    def push(self, vectors: Tensor) -> Tensor:
        """J v, `[R, B, C]`, of v `[R, P]`."""

    @abstractmethod
    def add_pull(self, cotangents: Tensor, total: Tensor) -> None:
        """Adds Jᵀ u of u `[R, B, C]` to `[R, P]`, in place."""


@dataclass(eq=False)
class Listening:
    """What a fit asks of the batches that it sums, besides their curvature; it changes it from batch to batch.

    Attributes:
        judge: Called, where targets are checked, with the outputs `[B, C]` and them.
        profile: Called once, by engines that can say, with what a batch shows, before it is summed.
        outputs: Called once, by engines that have them, with the network's outputs at a batch, `[B, …]`.
        weights: How often the data of the batch count, `[B]`, or their targets, in the shape of these; None for once.
        keeps: Whether features of a head are to be kept, in `CurvatureEngine.seen`.
    """

    judge: Callable[[Tensor, Tensor], None] | None = None
    profile: Callable[[BatchProfile], None] | None = None
    outputs: Callable[[Tensor], None] | None = None
    weights: Tensor | None = None
    keeps: bool = False


class CurvatureEngine(ABC):  # noqa: B024  (no primitive is required of an engine)
    """Base of all engines: every primitive refuses, by type, until an engine offers it.

    Args:
        problem: The network and its random parameters.
        likelihood: Loss and output Hessian.
        options: Sampling, Kronecker factors, and how much is computed at once.

    Attributes:
        dtype: Curvature dtype, at least float32.
        kind: `"ggn"`, `"ef"` or `"hessian"`: how the curvature scales with noise and temperature.
        name: The name that users know.
        generator: Source of the draws of sampled curvature, or None.
        takes_gaps: Whether its sums can be of targets of which entries are missing (NaN).
        weighs_data: Whether its sums can be of weighted data.
        seen: Features of a head, as fits saw them, by engines that have them.
        listening: What a fit that is going on asks of the batches that it sums, see `asked`.
    """

    kind: str = "ggn"
    name: str = "CurvatureInterface"
    generator: torch.Generator | None = None
    takes_gaps: bool = False
    weighs_data: bool = False

    def __init__(self, problem: Problem, likelihood: Likelihood, options: EngineOptions) -> None:
        if likelihood.weighs_targets:
            self.require_weighing("class_weight=")
        self.problem = problem
        self.likelihood = likelihood
        self.options = options
        self.dtype = torch.promote_types(problem.dtype, torch.float32)
        self.split_outputs = options.split_outputs
        self.seen = HeadMemory()
        self.listening = Listening()
        self._logits_checked = False

    @classmethod
    def make(cls, problem: Problem, likelihood: Likelihood, options: EngineOptions) -> CurvatureEngine:
        """An engine of this class, or of another one that computes the same."""
        return cls(problem, likelihood, options)

    @property
    def target_rules(self) -> TargetRules:
        """Rules for targets: the likelihood's, unless a loss was assigned."""
        return self.likelihood if self.options.loss is None else TargetsAsGiven(self.likelihood.ignore_index)

    def require_weighing(self, what: str) -> None:
        """Refuses what asks for weighted data."""
        if not self.weighs_data:
            raise UnsupportedError(
                f"{what} with backend={self.name}, which sums all data with the same weight; use backend=NativeGGN, "
                "the default, NativeEF or NativeHessian."
            )

    @contextmanager
    def asked(self, listening: Listening) -> Iterator[None]:
        """Context in which a fit asks this of the batches that it sums."""
        self.listening = listening
        try:
            yield
        finally:
            self.listening = Listening()

    def checked(self, f: Tensor, y: Tensor) -> Tensor:
        """Checked targets of outputs f `[B, C]`; the first outputs that an engine sees are checked to be logits."""
        loss = self.options.loss
        y = target_rows(y, f, (), self.problem.channel_dim)  # `[B]` of outputs `[B]`
        y = self.likelihood.check_targets(f, y) if loss is None else recovered_targets(self.likelihood, loss, f, y)
        if not self.takes_gaps:
            refuse_gaps(y, f"backend={self.name}")
        if not self._logits_checked:
            require_logits(self.likelihood, f, self.problem.dtype)
            self._logits_checked = True
        if self.listening.judge is not None:
            self.listening.judge(f.detach(), y)
        return y

    def accumulate(self, x: Inputs, y: Tensor, sink: Sink) -> BatchSummary:
        """Adds the unit curvature of a batch to a sum."""
        raise self._refusal(sink.quantity)

    # Quantities of one batch.

    def diag(self, x: Inputs, y: Tensor, bases: Bases | None = None) -> tuple[BatchSummary, Tensor]:
        """Diagonal of the unit curvature of a batch, `[E, P]`, or of Uᵀ H U with a basis U for every tensor."""
        sink = DiagSink(bases)
        return self.accumulate(x, y, sink), sink.values

    def kron(self, x: Inputs, y: Tensor) -> tuple[BatchSummary, KronParts]:
        """Kronecker factors of the unit curvature of a batch."""
        sink = KronSink()
        return self.accumulate(x, y, sink), sink.result()

    def full(self, x: Inputs, y: Tensor) -> tuple[BatchSummary, Tensor]:
        """Unit curvature of a batch, `[E, P, P]`."""
        sums = MatrixSum(self.problem.layout.n_params)
        return self.accumulate(x, y, FullSink(len(self.problem.slots), sums)), sums.complete().to(self.dtype)

    def blocks(self, x: Inputs, y: Tensor, groups: Groups) -> tuple[BatchSummary, tuple[Tensor, ...]]:
        """Blocks of the unit curvature of groups of tensors, `[E, p, p]` each."""
        sums = [MatrixSum(sum(self.problem.layout.sizes[i] for i in group)) for group in groups]
        summary = self.accumulate(x, y, BlockSink(groups, sums))
        return summary, tuple(running.complete().to(self.dtype) for running in sums)

    def matmul(self, x: Inputs, y: Tensor, vectors: Tensor) -> tuple[BatchSummary, Tensor]:
        """Products `[E, R, P]` of the unit curvature of a batch with vectors `[E, R, P]` (`[1, R, P]`: for all)."""
        sink = ProductSink(vectors)
        return self.accumulate(x, y, sink), sink.products

    # The outputs as a function of the parameters.

    def output_curvature(self, x: Inputs, y: Tensor) -> tuple[BatchSummary, OutputCurvature]:
        """Λ of a batch, with unit curvature Σ Jᵀ Λ J."""
        raise self._refusal("output_curvature")

    def linear_map(self, x: Inputs, *, multiplied_out: bool = False) -> LinearMap:
        """The outputs of a batch as a linear function of the random entries; it outlives the call."""
        raise self._refusal("linear_map")

    def jacobian(
        self, x: Inputs, *, create_graph: bool = False, choice: OutputChoice | None = None
    ) -> Generator[tuple[Jacobian, Tensor]]:
        """Jacobians and outputs `[b, C]` of consecutive parts of a batch, each within the memory budget.

        Of outputs with positions, b are rows, data × positions, and `Jacobian.positions` says their dimensions. Of a
        choice of K outputs both are of these alone, with K in place of C, and `Jacobian.outputs` names them.

        The network is as before only once the generator has ended: read it to its end, or close it.
        """
        raise self._refusal("jacobian")

    def jacobian_by_outputs(self, x: Inputs) -> Generator[tuple[Jacobian, Tensor]]:
        """`jacobian` for what needs no two outputs together: of all outputs, or of consecutive ones of the same data.

        Outputs `[b, C]` are all of them, also where the Jacobian is of fewer: where not even those of a single datum
        fit the memory budget.
        """
        return self.jacobian(x)

    def head_jacobian(self, x: Inputs, *, create_graph: bool = False) -> list[tuple[Jacobian, Tensor]] | None:
        """The parts of `jacobian` where all random parameters belong to a head, of which they are cheap; else None."""
        parts = list(self.jacobian(x, create_graph=create_graph))
        return parts if parts and all(jacobian.is_head for jacobian, _ in parts) else None

    def profile(self, x: Inputs, y: Tensor) -> BatchProfile:
        """Shapes and memory of a batch, without its curvature; no random numbers are drawn."""
        raise UnsupportedError(
            f"backend={self.name} does not say what a batch takes; only the library's own backends can be planned for."
        )

    def profile_by_shapes(self, x: Inputs | None = None) -> BatchProfile | None:
        """Profile by shapes alone, of a batch or, without one, of the smallest batch; None of engines that cannot.

        A lower bound of `profile`.
        """
        del x
        return None

    def coverage(self) -> dict[str, str]:
        """Names, by tensor, the rule or fallback that explains it; empty before the first batch."""
        return {}

    def _refusal(self, primitive: str) -> UnsupportedError:
        needed = _NEEDED_BY.get(primitive, "this")
        return UnsupportedError(
            f"backend={self.name} does not offer the primitive {primitive!r} that hessian_structure={needed!r} "
            "needs; use backend=NativeGGN, the default, or another structure."
        )


_NEEDED_BY = {"blocks": "block", "matmul": "lowrank", "diag in a basis": "ekfac", "jacobian": "any"} | {
    **{name: name for name in ("diag", "kron", "full")},
    **dict.fromkeys(("output_curvature", "linear_map"), "matrix_free"),
}


def require_no_positions(positions: Sequence[int], name: str) -> None:
    """Refuses outputs with positions, which only the library's own engines support."""
    if positions:
        raise UnsupportedError(
            f"the network's outputs have positions (tokens or pixels), {list(positions)} besides data and channels, "
            f"which {name} does not support; use backend=NativeGGN, the default, or NativeEF."
        )


def detached(x: Inputs) -> Any:
    """Inputs without a graph, and usable by autograd even if they were made under inference mode."""
    with kept_for_later():
        return batches.transform(x, lambda part: part.detach().clone() if part.is_inference() else part.detach())


def outputs(engine: CurvatureEngine, x: Inputs, *, create_graph: bool = False) -> OutputRows:
    """f(x, θ*), `[B, C]`, by one forward pass."""
    problem = engine.problem
    x = batches.to_device(x, problem.device)
    with problem.on_private_copy() as own:
        f = own.run(own.detached(), x if create_graph else detached(x))
    rows = OutputRows.from_outputs(f.to(torch.promote_types(f.dtype, torch.float32)))
    require(
        rows.values.isfinite(),
        lambda: InvalidData(
            f"the network's outputs are NaN or infinite{where_not_finite(rows.values)}; look at the inputs and at the "
            "network's weights."
        ),
    )
    return rows
