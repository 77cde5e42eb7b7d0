"""What a curvature backend offers: primitives, from which each structure takes the one it needs."""

from __future__ import annotations

from abc import ABC
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace.batch import Inputs
from laplace.curvature.jacobian import Jacobian
from laplace.errors import UnsupportedError
from laplace.likelihoods.base import Likelihood
from laplace.weights.problem import Problem


@dataclass(frozen=True)
class BatchSummary:
    """What a batch contributes besides its curvature.

    Attributes:
        loss_terms: Summed unit negative log likelihood, `[1]`, or `[C]` with one noise per output.
        n_data: Data that count.
        n_outputs: C.
    """

    loss_terms: Tensor
    n_data: int
    n_outputs: int


@dataclass(frozen=True)
class KronParts:
    """Sums from which Kronecker-factored curvature is put together, additive over batches and shards.

    The block of a tensor, seen as a matrix (first dimension × the rest), is left ⊗ right / positions.

    Attributes:
        factors: Summed matrices by key: output sides `[E, G, O, O]` (E terms, one per output under a vector
            noise, else 1; G groups), input sides `[G, I, I]` or counts `[V]`, dense blocks `[E, p, p]`,
            diagonals `[E, p]`, numbers of positions `[]`.
        blocks: One per treated tensor, in order.
    """

    factors: Mapping[str, Tensor]
    blocks: tuple[KronBlock, ...]


@dataclass(frozen=True)
class KronBlock:
    """How the curvature of one tensor is held: by keys into `KronParts.factors`.

    Attributes:
        kind: `"kron"`, `"dense"`, `"diag"`, or `"unused"`: zero, and added to any other kind.
        size: Number of treated entries.
        output: Key of the output side, or of the dense or diagonal block.
        input: Key of the input side, or None (a bias: 1).
        positions: Key of the number of positions.
        input_first: The first dimension of the tensor is the input side (embeddings, transposed convolutions).
        index: Treated entries within the Kronecker product where they are not rows × columns.
    """

    kind: str
    size: int
    output: str
    input: str | None = None
    positions: str | None = None
    input_first: bool = False
    index: Tensor | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """Keys of the factors that the block reads."""
        return tuple(key for key in (self.output, self.input, self.positions) if key is not None)


UNUSED = "unused"


class CurvatureInterface(ABC):  # noqa: B024  (no primitive is required of a backend)
    """Base of all backends: every primitive refuses, by type, until a backend offers it.

    Args:
        problem: The network and its treated tensors.
        likelihood: Loss and output Hessian.
        split_outputs: Keep one curvature term per output, so that a vector noise can be changed after `fit`.

    Attributes:
        kind: `"ggn"`, `"ef"` or `"hessian"`: how the curvature scales with noise and temperature.
    """

    kind: str = "ggn"

    def __init__(self, problem: Problem, likelihood: Likelihood, *, split_outputs: bool = False) -> None:
        self.problem = problem
        self.likelihood = likelihood
        self.split_outputs = split_outputs

    def diag(self, x: Inputs, y: Tensor) -> tuple[BatchSummary, Tensor]:
        """Diagonal of the unit curvature of a batch, `[E, P]`."""
        raise self._refusal("diag", "diag")

    def kron(self, x: Inputs, y: Tensor) -> tuple[BatchSummary, KronParts]:
        """Kronecker factors of the unit curvature of a batch."""
        raise self._refusal("kron", "kron")

    def full(self, x: Inputs, y: Tensor, running: Tensor | None = None) -> tuple[BatchSummary, Tensor]:
        """Unit curvature of a batch, `[E, P, P]`.

        With a running sum it is added in place, and only the upper block triangle need be right: whoever holds the sum
        completes it once, at the end.
        """
        raise self._refusal("full", "full")

    def jacobian(self, x: Inputs, *, create_graph: bool = False) -> Generator[tuple[Jacobian, Tensor]]:
        """Jacobians and outputs `[b, C]` of consecutive parts of a batch, each within the memory budget.

        The network is lent as long as the generator is open: read it to its end, or close it.
        """
        raise self._refusal("jacobian", "any")

    def coverage(self) -> dict[str, str]:
        """Which rule or fallback explains each treated tensor; empty before the first batch."""
        return {}

    def _refusal(self, primitive: str, structure: str) -> UnsupportedError:
        return UnsupportedError(
            f"{type(self).__name__} does not offer the primitive {primitive!r} that hessian_structure={structure!r} "
            "needs; use backend=NativeGGN, the default, or another structure."
        )


def detached(x: Inputs) -> Any:
    """Inputs without a graph, and usable by autograd also when they were made under inference mode."""
    from laplace import batch as batches

    def clean(tensor: Tensor) -> Tensor:
        return tensor.detach().clone() if tensor.is_inference() else tensor.detach()

    with torch.inference_mode(False):
        return batches.transform(x, clean)
