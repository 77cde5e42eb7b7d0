"""Curvature as users put it together themselves: how H looks, is summed over batches, and becomes a structure's."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from laplace.compat.kron import Kron, KronDecomposed, block_shape, zero_block
from laplace.core import nested
from laplace.core.batch import Inputs
from laplace.core.overrides import described
from laplace.core.precision_policy import widened
from laplace.engines.engine import BatchSummary, CurvatureEngine
from laplace.engines.kron_parts import ASSIGNED, KronParts, n_entries
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.structures.base import Curvature
from laplace.weights.problem import ParameterSlice, Problem

_ROWS = 1024
"""Rows of a matrix that are compared with columns at once."""


class ByHand(ABC):
    """The form that a structure's curvature has in the hands of users."""

    @abstractmethod
    def zeros(self, problem: Problem, like: Tensor) -> Any:
        """H of no data, to which that of batches can be added."""

    @abstractmethod
    def of_batch(self, engine: CurvatureEngine, x: Inputs, y: Tensor, n_data: int) -> tuple[BatchSummary, Any]:
        """H of a batch, which adds up over the batches of N data, with what the batch contributes besides."""

    @abstractmethod
    def checked(self, H: Any, problem: Problem, like: Tensor, options: Mapping[str, Any]) -> Any:
        """H as a user assigned it, on the device and in the dtype of `like`; the very same object where it has both."""

    @abstractmethod
    def state(self, H: Any, n_data: float) -> dict[str, Any]:
        """A copy of H in the form from which the structure is made by `from_state`."""


class TensorByHand(ByHand):
    """A symmetric matrix `[P, P]`, or a diagonal `[P]`."""

    def __init__(self, *, square: bool) -> None:
        self.square = square

    def shape(self, problem: Problem) -> tuple[int, ...]:
        """Shape of H."""
        return (problem.layout.n_params,) * (2 if self.square else 1)

    def zeros(self, problem: Problem, like: Tensor) -> Tensor:
        return like.new_zeros(self.shape(problem))

    def of_batch(self, engine: CurvatureEngine, x: Inputs, y: Tensor, n_data: int) -> tuple[BatchSummary, Tensor]:
        summary, values = engine.full(x, y) if self.square else engine.diag(x, y)
        return summary, values.sum(0)

    def checked(self, H: Any, problem: Problem, like: Tensor, options: Mapping[str, Any]) -> Tensor:
        values = _tensor(H, self.shape(problem), like)
        if self.square:
            _require_symmetric(values, "H")
        _require_squares(values.diagonal() if self.square else values, options)
        return values

    def state(self, H: Tensor, n_data: float) -> dict[str, Any]:
        return {"values": ((H + H.T).mul_(0.5) if self.square else H.clone()).unsqueeze(0)}


class KronByHand(ByHand):
    """Kronecker factors per tensor, a `Kron`, or their eigendecompositions, a `KronDecomposed`."""

    def zeros(self, problem: Problem, like: Tensor) -> Kron:
        # Of some entries of a tensor zero is a diagonal, which gives way to another form when that is added to it.
        slots = problem.slots
        return Kron([zero_block(s.shape, like) if s.entries is None else [like.new_zeros(s.size)] for s in slots])

    def of_batch(self, engine: CurvatureEngine, x: Inputs, y: Tensor, n_data: int) -> tuple[BatchSummary, Kron]:
        if engine.likelihood.weighs_targets:
            raise UnsupportedError(
                "class_weight= with Kronecker factors by hand, of which a batch's share is its number of data: call "
                "fit, or choose hessian_structure='diag' or 'full'."
            )
        summary, parts = engine.kron(x, y)
        if any(block.index is not None for block in parts.blocks):
            raise UnsupportedError(
                "the subnetwork has single entries of a tensor, of which Kronecker factors do not add up by hand; "
                "choose whole rows × columns, hessian_structure='diag' or 'full', or call fit."
            )
        return summary, Kron(parts.shared(len(y) / n_data, engine.dtype))

    def checked(self, H: Any, problem: Problem, like: Tensor, options: Mapping[str, Any]) -> Kron | KronDecomposed:
        if isinstance(H, KronDecomposed):
            return self._checked_eigen(H, problem, like, options)
        if not isinstance(H, Kron):
            raise InvalidArgument(
                f"H is {described(H)}; it must be a Kron or a KronDecomposed of laplace.utils, with one block for "
                f"each of the {len(problem.slots)} parameter tensors."
            )
        blocks = [[_moved(factor, like) for factor in block] for block in H.kfacs]
        _require_blocks(blocks, problem.slots)
        for factor in _factors(blocks):
            for matrix in factor.reshape(-1, *factor.shape[-2:]) if factor.ndim > 1 else ():
                _require_symmetric(matrix, "a Kronecker factor of H")
            _require_squares(factor if factor.ndim == 1 else factor.diagonal(dim1=-2, dim2=-1), {})
        pairs = zip(_factors(blocks), _factors(H.kfacs), strict=True)
        return H if all(own is given for own, given in pairs) else Kron(blocks)

    def _checked_eigen(
        self, H: KronDecomposed, problem: Problem, like: Tensor, options: Mapping[str, Any]
    ) -> KronDecomposed:
        if bool((H.deltas != 0).any()):
            raise InvalidArgument(
                "H is a KronDecomposed with deltas that are not zero: these are a prior, which belongs into "
                "la.prior_precision; assign the curvature alone."
            )
        if H.damping and not options.get("damping"):
            raise InvalidArgument(
                "H is a KronDecomposed with damping=True, a choice of the posterior: make that with damping=True."
            )
        vectors = [[_moved(factor, like) for factor in block] for block in H.eigenvectors]
        values = [[_moved(factor, like) for factor in block] for block in H.eigenvalues]
        _require_blocks(vectors, problem.slots)
        shapes = [[_of_values(factor) for factor in block] for block in vectors]
        if shapes != [[tuple(factor.shape) for factor in block] for block in values]:
            raise InvalidArgument("H is a KronDecomposed whose eigenvalues are not those of its eigenvectors.")
        for factor in _factors(values):
            _require_finite(factor)
            _require_squares(factor, {})
        return KronDecomposed(vectors, values, H.deltas.to(like), H.damping)

    def state(self, H: Kron | KronDecomposed, n_data: float) -> dict[str, Any]:
        if isinstance(H, KronDecomposed):
            pairs = zip(H.eigenvectors, H.eigenvalues, strict=True)
            copies = [[_product(*pair).clone() for pair in zip(*block, strict=True)] for block in pairs]
        else:
            copies = [[factor.clone() for factor in block] for block in H.kfacs]
        return nested.state_of(KronParts.from_factors(copies, n_data or 1, ASSIGNED))


class AnyByHand(ByHand):
    """A tensor of any shape, of classes that say themselves what follows from it."""

    def zeros(self, problem: Problem, like: Tensor) -> float:
        return 0.0

    def of_batch(self, engine: CurvatureEngine, x: Inputs, y: Tensor, n_data: int) -> tuple[BatchSummary, Any]:
        raise UnsupportedError(
            "a class without a structure computes the curvature of a batch itself; define curvature_of(x, y, n_data), "
            "or _curv_closure(X, y, N), or bind a structure: `structure = ...` (docs/add_a_structure.md)."
        )

    def checked(self, H: Any, problem: Problem, like: Tensor, options: Mapping[str, Any]) -> Tensor:
        values = like.new_tensor(H) if isinstance(H, Real) else H
        return _tensor(values, tuple(values.shape) if isinstance(values, Tensor) else (), like)

    def state(self, H: Tensor | float, n_data: float) -> dict[str, Any]:
        return {"values": H.clone() if isinstance(H, Tensor) else torch.tensor(H)}


FORMS: dict[str, ByHand] = {
    "full": TensorByHand(square=True),
    "diag": TensorByHand(square=False),
    "kron": KronByHand(),
    "own": AnyByHand(),
}
"""Forms by the names of structures; a structure that is derived from one of these has the same."""


def known_form(structure: type[Curvature]) -> ByHand | None:
    """The form in which users assign and sum a structure's curvature; None if they cannot."""
    names = (vars(base).get("name") for base in structure.__mro__)
    return next((FORMS[name] for name in names if name in FORMS), None)


def form_of(structure: type[Curvature]) -> ByHand:
    """The same, or `UnsupportedError`."""
    form = known_form(structure)
    if form is None:
        raise UnsupportedError(
            f"hessian_structure={structure.name!r} has no curvature that could be assigned or summed by hand; use "
            "'full', 'kron' or 'diag', call fit, or load a state."
        )
    return form


def _factors(blocks: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [factor for block in blocks for factor in block]


def _product(vectors: Tensor, values: Tensor) -> Tensor:
    """A factor Q diag(λ) Qᵀ."""
    if vectors.ndim == 1:
        return values
    wide = widened(vectors)
    return ((wide * widened(values).unsqueeze(-2)) @ wide.mT).to(vectors)


def _of_values(vectors: Tensor) -> tuple[int, ...]:
    """Shape of the eigenvalues that eigenvectors have."""
    return tuple(vectors.shape if vectors.ndim == 1 else vectors.shape[:-1])


# Checks.


def _moved(factor: Tensor, like: Tensor) -> Tensor:
    return factor.detach().to(like) if factor.requires_grad else factor.to(like)


def _tensor(H: Any, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """H as a tensor of this shape, finite, without a graph."""
    if not isinstance(H, Tensor) or tuple(H.shape) != shape or H.is_complex():
        raise InvalidArgument(f"H is {described(H)}; it must be a real tensor of shape {list(shape)}.")
    values = _moved(H, like)
    _require_finite(values)
    return values


def _require_finite(values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise InvalidArgument("H holds NaN or infinite entries; it must be finite.")


def _require_symmetric(matrix: Tensor, name: str) -> None:
    """Refuses matrices that differ from their transposes by more than the rounding of sums over data."""
    allowed = torch.finfo(matrix.dtype).eps ** 0.5 * matrix.abs().amax()
    parts = range(0, len(matrix), _ROWS)
    differences = [(matrix[i : i + _ROWS] - matrix[:, i : i + _ROWS].T).abs().amax() for i in parts]
    largest = torch.stack(differences).amax()
    if not bool(largest.isfinite()):
        _require_finite(matrix)
    if not bool(largest <= allowed):
        raise InvalidArgument(
            f"{name} is not symmetric: entries differ from those of the transpose by up to {largest.item():.3g}; a "
            "curvature is symmetric, so give (H + H.T) / 2 if that is what is meant."
        )


def _require_squares(values: Tensor, options: Mapping[str, Any]) -> None:
    """Refuses a negative diagonal, or negative eigenvalues, unless the curvature may be indefinite."""
    if options.get("indefinite") is not None or values.numel() == 0:
        return
    allowed = torch.finfo(values.dtype).eps ** 0.5 * values.abs().amax()
    if not bool(values.amin() >= -allowed):
        raise InvalidArgument(
            f"H has a negative entry on its diagonal, or a negative eigenvalue, {values.amin().item():.3g}; a "
            "curvature is positive semi-definite."
        )


def _require_blocks(blocks: Sequence[Sequence[Tensor]], slots: Sequence[ParameterSlice]) -> None:
    """Refuses blocks that are not those of the random parameters."""
    if len(blocks) != len(slots):
        raise InvalidArgument(f"H has {len(blocks)} blocks; the random parameters are {len(slots)} tensors.")
    for block, slot in zip(blocks, slots, strict=True):
        for factor in block:
            _require_finite(factor)
        block_shape(block)
        shapes = [list(factor.shape) for factor in block]
        if n_entries(block) != slot.size:
            raise InvalidArgument(
                f"H has factors of shapes {shapes} for {slot.name!r}, of which {slot.size} entries are random; the "
                "sizes of the factors must multiply to that."
            )
        if len(block) == 2 and slot.entries is None and math.prod(_of_values(block[0])) != slot.shape[0]:
            raise InvalidArgument(
                f"H has factors of shapes {shapes} for {slot.name!r} of shape {list(slot.shape)}; the first one is "
                f"that of its first dimension, {slot.shape[0]}, the second one that of the rest: exchange them."
            )
