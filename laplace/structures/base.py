"""Base of all structures: a frozen curvature that adds up over data, and the precision it gives with a prior."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from laplace.core import checks, nested
from laplace.core.batch import Inputs
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.layout import Layout
from laplace.core.nested import move
from laplace.core.precision_policy import wide_dtype
from laplace.engines.cost import Cost
from laplace.errors import CurvatureError, InvalidArgument, InvalidData, UnsupportedError
from laplace.structures.precision import OneByOne, Precision, VariancesOverPriors

if TYPE_CHECKING:
    from laplace.engines.engine import BatchSummary, CurvatureEngine
    from laplace.engines.kron_parts import Factor
    from laplace.engines.profile import BatchProfile

A = TypeVar("A", bound="AdditiveCurvature")
C = TypeVar("C", bound="Curvature")
T = TypeVar("T")


class DataPass(ABC):
    """One reading of the data, batch by batch."""

    @abstractmethod
    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        """Takes in one batch.

        Raises:
            InvalidData: Its curvature is not finite.
        """

    @abstractmethod
    def finish(self) -> Curvature | DataPass:
        """The curvature after the last reading, or the next reading."""

    def summary_of_fit(self, read: BatchSummary) -> BatchSummary:
        """Loss and number of data of the fit, from those of everything that was read: of a kept subset others."""
        return read

    def sums(self) -> dict[str, Tensor]:
        """Running sums over the batches by name: the tensors themselves, to which other shards' can be added in place.

        Between the last batch and `finish` they are all that two passes over different data, begun alike, differ in.

        Raises:
            UnsupportedError: The pass chooses among the data, or is trained on them, and does not add up.
        """
        raise self._no_sum()

    def is_symmetric(self, tensor: Tensor) -> bool:
        """True if a tensor of `sums()` holds symmetric matrices `[..., n, n]`, which travel by half."""
        del tensor  # products and diagonals, as a rule
        return False

    def form(self) -> Any:
        """The sums without their numbers, with what else says how they look: it can be pickled.

        Raises:
            InvalidData: There are none: no batch was read.
            UnsupportedError: The pass does not add up.
        """
        return nested.form_of(self.sums())

    def make_room(self, form: Any) -> None:
        """Adds zeros for what the data of another shard need, all of them to a pass that has read no batch.

        Args:
            form: That of another shard's pass.

        Raises:
            InvalidData: Sums of both forms cannot be added.
            UnsupportedError: The pass does not add up.
        """
        raise self._no_sum()

    def _no_sum(self) -> UnsupportedError:
        return UnsupportedError(
            f"{type(self).__name__} chooses among the data that it reads, or is trained on them: what it finds in two "
            "shards does not add up. Leave group= at None, in one process that has all the data."
        )


@dataclass(frozen=True)
class NoOptions:
    """Options of structures that leave nothing to choose."""


class Curvature(ABC):
    """Base of all structures: the curvature H of the data so far, at σ = T = 1; a frozen dataclass.

    Attributes:
        name: Name of the structure, as in `hessian_structure=`.
        options: Class of its options, whose fields are the keys of `structure_kwargs`.
        n_passes: Smallest number of passes over the data.
        exact_ggn: True if it is of Jacobians and exact output Hessians, which backends of other curvature lack.
        weighs_data: Whether data can have weights.
        scaled_by_noise: Whether noise and temperature scale it in the precision, and not in the bound of the evidence
            alone.
        is_exact: Whether it holds every entry of the curvature, so that a step of Newton's is exact.
        is_wide: Whether its sums are float64 whatever the dtype of the posterior, in which `la.H` shows them.
        holds_inputs: Whether it, and a saved state, hold what the network or its layers see of training data.
        by_layer: Whether its sums take inputs and output gradients of one layer at a time, which hooks see also of a
            network that is spread over processes.
    """

    name: str
    options: type[Any] = NoOptions
    n_passes: int = 1
    exact_ggn: bool = False
    weighs_data: bool = True
    scaled_by_noise: bool = True
    is_exact: bool = False
    is_wide: bool = False
    holds_inputs: bool = False
    by_layer: bool = False

    # Before data are read.

    @classmethod
    def options_from(cls, given: dict[str, Any]) -> Any:
        """Options of this structure from `structure_kwargs`, an object of `options`."""
        known = [field.name for field in fields_of(cls.options)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            accepted = ", ".join(known) or "none"
            raise InvalidArgument(
                f"structure_kwargs has {unknown}, which hessian_structure={cls.name!r} does not know; accepted: "
                f"{accepted}."
            )
        return cls.options(**given)

    @classmethod
    def check(cls, layout: Layout, options: Any) -> None:
        """Refuses a choice that needs too much memory, before any data are read.

        Args:
            layout: The random parameter tensors.
            options: An object of `options`.

        Raises:
            InvalidArgument: The structure would be too large for its options.
        """
        del layout, options  # most structures have no limit

    @classmethod
    def cost(cls, profile: BatchProfile, options: Any) -> Cost:
        """Memory and work of a fit and of predictions.

        Args:
            profile: What a batch showed.
            options: An object of `options`.
        """
        raise UnsupportedError(f"hessian_structure={cls.name!r} does not say what it takes; it cannot be planned for.")

    @classmethod
    def saves_inputs(cls, options: Any) -> bool:
        """Whether states with these options hold what the network or its layers see of training data."""
        del options  # most structures have no choice
        return cls.holds_inputs

    @classmethod
    def before_data(cls, prior: GaussianPrior) -> Precision:
        """The posterior precision without data: the prior's.

        Raises:
            UnsupportedError: There is no density over weights before a fit.
        """
        from laplace.structures.diag import DiagPrecision  # which derives from classes of this file

        return DiagPrecision(prior.precision.new_zeros(prior.layout.n_params), prior.precision.new_ones(1), prior)

    # Sums over data.

    @classmethod
    @abstractmethod
    def first_pass(cls, engine: CurvatureEngine, options: Any) -> DataPass:
        """The first reading of the data.

        Args:
            engine: Computes the numbers of a batch.
            options: An object of `options`.
        """

    @abstractmethod
    def __add__(self: C, other: C) -> C:
        """Curvature of both sets of data."""

    def scaled(self: C, factor: float) -> C:
        """The curvature multiplied by a factor, as by `decay`.

        Raises:
            UnsupportedError: The structure is no sum over data.
        """
        raise self._no_sum("weighted anew")

    def minus(self, removed: Curvature, *, signed: bool = False, terms: torch.dtype | None = None) -> Curvature:
        """The curvature of the data without some of them.

        Args:
            removed: The curvature of those.
            signed: Whether it may be indefinite, as an exact Hessian; else it is positive semi-definite again.
            terms: Dtype in which the curvature of every batch was computed, if it is narrower than that of the sums:
                what is negative by no more than its rounding is zero.

        Raises:
            CurvatureError: It would be indefinite: the removed data are not among those of this curvature.
            UnsupportedError: The structure is no sum over data.
        """
        raise self._no_sum("subtracted")

    def _no_sum(self, verb: str) -> UnsupportedError:
        return UnsupportedError(
            f"curvature of structure {self.name!r} is no sum over data and cannot be {verb}; use "
            "hessian_structure='diag', 'kron', 'block' or 'full', or fit the data that you want to keep with "
            "override=True."
        )

    @property
    def n_terms(self) -> int:
        """E: curvature terms kept apart, one per output under a vector noise, else 1.

        The length of the first tensor among the fields, unless a structure says otherwise.
        """
        return len(next(tensor for _, tensor in nested.named_tensors(self)))

    @property
    def residual(self) -> float:
        """‖H U − U Λ‖ / ‖Λ‖ of eigenpairs (U, Λ) that stand for H; 0 if they are exact."""
        return 0.0

    @property
    def tail(self) -> float:
        """Largest absolute eigenvalue that was computed and left out; 0 if none was."""
        return 0.0

    @property
    def share(self) -> float:
        """Share of the data that the likelihood in the evidence counts: less than 1 where a subset of them is kept."""
        return 1.0

    @property
    def prior_factor(self) -> float:
        """Factor of the prior precision in its precisions."""
        return 1.0

    def input_moments(self, place: int) -> Factor | None:
        """Σ a aᵀ over the inputs of the layer of a weight, times a number, `[G, I, I]`; None where it is not held."""
        return None

    # The posterior.

    @classmethod
    def require_stored(cls, what: str) -> None:
        """Refuses a structure that stores no curvature, but asks the network for it, where that is needed.

        Args:
            what: What needs it, as the subject of the message.

        Raises:
            UnsupportedError: It is such a structure.
        """
        del what

    @classmethod
    def options_of_network(cls, engine: Callable[[], CurvatureEngine]) -> dict[str, Any]:
        """Further options of its precisions, of a structure that asks the network for them.

        Args:
            engine: Gives the engine of the network, which must have the weights of the fit.
        """
        del engine
        return {}

    @abstractmethod
    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> Precision:
        """Posterior precision Σ_e w_e H_e + diag(δ).

        Args:
            weights: w, `[E]`: 1/(σ²T) of every term.
            prior: δ.
            **options: The structure's own (Kron: `damping`), and what is done about an `indefinite` curvature.
        """

    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> VariancesOverPriors:
        """Functional variances at many scalar priors, after one factorisation.

        By a precision of every prior, unless a structure has a basis in which priors only rescale.
        """
        return OneByOne(lambda prior: self.precision(weights.detach(), prior, **options), layout)

    # What is saved and shown.

    def state(self) -> dict[str, Any]:
        """Everything that `from_state` needs: tensors, numbers and strings."""
        return nested.state_of(self)

    @classmethod
    def from_state(cls: type[C], state: dict[str, Any]) -> C:
        """The curvature of a saved state."""
        return nested.from_state(cls, state)

    def require_of(self, layout: Layout, dtype: torch.dtype) -> None:
        """Refuses a curvature from a state whose parts do not fit each other, or the posterior.

        Args:
            layout: The random parameter tensors.
            dtype: Of the posterior's hyper-parameters and mean.

        Raises:
            StateError: They do not; nothing has been computed from them.
        """
        del layout, dtype  # what a user's structure is made of only its author knows

    def moved(self: C, device: torch.device | None, dtype: torch.dtype | None) -> C:
        """The same on another device, or in another dtype; sums that are wide stay so."""
        narrower = self.is_wide and dtype != wide_dtype()
        return self.from_state(move(self.state(), device, None if narrower else dtype))

    @property
    def note(self) -> str | None:
        """Words about the curvature in the `repr` of a posterior, or None."""
        return None

    def units(self, layout: Layout) -> tuple[tuple[int, ...], ...]:
        """Groups of tensors, by their indices, between which P has no entries; by default one of all."""
        return (tuple(range(layout.n_tensors)),)

    def forms(self) -> tuple[str, ...]:
        """Form in which each tensor's block is stored, in words; empty if there is only one form."""
        return ()

    def without_factors(self) -> tuple[int, ...]:
        """Indices of the tensors that have no Kronecker factors, of a structure of such: their diagonal is held."""
        return ()

    def public(self) -> Any:
        """H as it is shown in `la.H`."""
        return self

    def shown(self, dtype: torch.dtype) -> Any:
        """`public` in the dtype of the posterior, where the sums are wider than that."""
        H = self.public()
        if not self.is_wide:
            return H
        return tuple(block.to(dtype) for block in H) if isinstance(H, tuple) else H.to(dtype)


def require_read(total: T | None) -> T:
    """A running sum, which is None until a batch is added to it."""
    if total is None:
        raise InvalidData("no batch was read.")
    return total


def require_finite(finite: Tensor | bool) -> None:
    """Requires that a batch's numbers are finite."""
    checks.require(
        torch.as_tensor(finite),
        lambda: InvalidData(
            "the loss or the curvature is not finite; the inputs, targets or weights hold NaN or infinity."
        ),
    )


# Curvature that is a sum over batches, in one reading of the data.


class AdditiveCurvature(Curvature):
    """Curvature whose batches simply add up, in one reading of the data; the tensors of its fields are sums.

    Attributes:
        matrix_dims: Number of dimensions from which on tensors of its state are symmetric matrices `[..., n, n]`; None
            where none of them is.
    """

    matrix_dims: int | None = None

    @classmethod
    @abstractmethod
    def from_batch(cls: type[A], engine: CurvatureEngine, x: Inputs, y: Tensor) -> tuple[BatchSummary, A]:
        """Curvature of one batch, by the engine's primitive of this structure."""

    def with_batch(self: A, engine: CurvatureEngine, x: Inputs, y: Tensor) -> tuple[BatchSummary, A]:
        """Curvature of the batches so far and one more; the memory of this one may be reused."""
        summary, new = self.from_batch(engine, x, y)
        return summary, self + new

    def kept(self: A, *, additive: bool = False) -> A:
        """The sum as it is kept after the last batch, without what only further batches need.

        Args:
            additive: Its tensors shall add up over shards, entry by entry.
        """
        del additive  # the tensors of most sums are what batches are added to
        return self

    def is_finite(self) -> Tensor | bool:
        """True, or 0-dim, if every number is finite (of a matrix: its diagonal, which holds every square)."""
        return nested.is_finite(self)

    @classmethod
    def first_pass(cls, engine: CurvatureEngine, options: Any) -> DataPass:
        return SumPass(cls, engine)


class SumPass(DataPass, Generic[A]):
    """Adds up batches."""

    def __init__(self, structure: type[A], engine: CurvatureEngine) -> None:
        self.structure = structure
        self.engine = engine
        self.total: A | None = None

    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        add = self.structure.from_batch if self.total is None else self.total.with_batch
        summary, total = add(self.engine, x, y)
        require_finite(torch.as_tensor(total.is_finite()))  # structures of users give a bool
        self.total = total
        return summary

    def sums(self) -> dict[str, Tensor]:
        # As states hold them: sums may have other forms on the way, which depend on the batches that were added.
        self.total = self._read().kept(additive=True)
        return dict(nested.named_tensors(self.total.state()))

    def is_symmetric(self, tensor: Tensor) -> bool:
        least = self.structure.matrix_dims
        return least is not None and tensor.ndim >= least

    def form(self) -> Any:
        return nested.form_of(self._read().kept(additive=True).state())

    def make_room(self, form: Any) -> None:
        zeros = self.structure.from_state(nested.zeros_of(form, self.engine.problem.device))
        self.total = zeros if self.total is None else self.total.kept(additive=True) + zeros

    def finish(self) -> Curvature | DataPass:
        return self._read().kept()

    def _read(self) -> A:
        return require_read(self.total)


# Curvature that may be indefinite: what becomes of directions in which the loss curves downwards.
#
# P = s·H + δ must be positive definite, H need not be. At weights that are no minimum the exact Hessian has negative
# eigenvalues; a prior that exceeds them gives a proper posterior all the same.


MODES = ("error", "clamp", "abs")


@dataclass(frozen=True)
class SignedOptions:
    """Options of structures that can hold an indefinite curvature.

    Attributes:
        indefinite: What is done about negative eigenvalues of the exact Hessian: `"error"` refuses a posterior whose
            precision is not positive definite, `"clamp"` replaces them by zero, `"abs"` by their absolute value
            (Dauphin et al., 2014). With terms of several noises each term's eigenvalues are meant. Not read with
            positive semi-definite curvature (GGN, empirical Fisher).

    Raises:
        InvalidArgument: Another word.
    """

    indefinite: str = "error"

    def __post_init__(self) -> None:
        if self.indefinite not in MODES:
            raise InvalidArgument(f"indefinite={self.indefinite!r}; accepted are {', '.join(map(repr, MODES))}.")


def nonnegative(values: Tensor, mode: str) -> Tensor:
    """Eigenvalues `[..., n]` without negative ones, by `"clamp"` or `"abs"`."""
    return values.clamp(min=0) if mode == "clamp" else values.abs()


def other_structure(mine: str, theirs: str) -> CurvatureError:
    """The error of curvatures that cannot meet."""
    return CurvatureError(f"curvature of structure {theirs!r} cannot be subtracted from one of structure {mine!r}.")
