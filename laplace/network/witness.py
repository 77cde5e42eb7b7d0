"""Witnesses of changes that no weight shows: outputs at a few data of a fit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from laplace.core import batch as batches
from laplace.core.batch import ForwardFn, Inputs
from laplace.core.inference import kept_for_later
from laplace.core.memory import ran_out
from laplace.errors import ApproximationWarning, warn
from laplace.network.attributes import Seen, changed_names, digests
from laplace.network.model_guard import (
    autograd_mode,
    generators_of,
    hooks_fire,
    model_lock,
    modules_of,
    preserve_model,
    same_random_state,
)

ROWS, _WHOLE = 2, 64
"""Data that are kept at most: of a network that takes parts of a batch, and of one that takes whole ones alone."""

_INPUT_BYTES = 64 * 2**20
_KEPT_OUTPUTS = 2**20
_ROUNDING, _LARGEST_SHARE = 1000, 0.1
_OTHER_KERNELS = 0.01

_PASSES = 32
"""Passes at most until one differs of a network that draws random numbers: those of two data are often the same."""


@dataclass(frozen=True, eq=False)
class Witness:
    """Inputs of at most two data, and the network's outputs; held in memory alone, never saved.

    Attributes:
        x: Inputs.
        outputs: Outputs at them, flat; evenly spaced entries where there are more than a million.
        call: How to call the network.
        written: Names of plain attributes that a forward pass writes.
        is_alone: True if the outputs at these data were the same beside others in the fit's batch.
    """

    x: Inputs
    outputs: Tensor
    call: ForwardFn
    written: frozenset[str] = frozenset()
    is_alone: bool = False

    @classmethod
    def of(
        cls, x: Inputs, outputs: Tensor, call: ForwardFn, written: Iterable[str] = (), *, is_alone: bool = False
    ) -> Witness:
        """A witness of inputs that are its own, and of outputs `[B, …]`."""
        return cls(x, _spaced(outputs), call, frozenset(written), is_alone)

    def couples(self, model: nn.Module, x: Inputs, n_data: int) -> bool:
        """True if the outputs at data depend on those beside them: those of two are others with two more.

        Args:
            model: The network.
            x: Inputs of B data.
            n_data: B, at least three.
        """
        try:
            device = next(iter(model.parameters())).device
            rows = batches.to_device(batches.select(x, slice(0, 2 * ROWS), n_data), device)
            few, more = batches.select(rows, slice(0, ROWS), min(2 * ROWS, n_data)), rows
            alone, beside = (outputs_at(model, some, self.call) for some in (few, more))
        except Exception as error:  # a network that takes whole batches only
            if ran_out(error):
                raise
            return False
        return len(alone) == ROWS < len(beside) and differ(alone, beside[:ROWS], model)

    def agrees(self, model: nn.Module, *, changed: bool) -> bool:
        """True if the network has its outputs of then; one that does not run on these data any more has not.

        Args:
            model: The network.
            changed: Whether attributes of it have changed. Else single precision is compared to a percent alone, since
                users may choose faster products between two calls (TF32, bfloat16).
        """
        try:
            for with_gradients in (False, True):  # a network may ask which, and the fit's own pass has them
                outputs = _spaced(outputs_at(model, self.x, self.call, with_gradients=with_gradients))
                if not differ(self.outputs, outputs, model, other_kernels=not changed):
                    return True
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
            if ran_out(error):
                raise
        return False

    def moved(self, model: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> Witness:
        """The witness of a network that was moved."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

        x = batches.transform(self.x, move)
        return replace(self, x=x, outputs=_spaced(outputs_at(model, x, self.call)))


def first_rows(x: Inputs, n_data: int, most: int = ROWS) -> tuple[Inputs, int]:
    """Copies of the first data of a batch, and how many: at most two of them and 64 MiB, but one at least."""
    bytes_of_one = sum(tensor.nbytes for tensor in batches.tensors(x)) // max(1, n_data)
    n_rows = min(n_data, most, max(1, _INPUT_BYTES // max(1, bytes_of_one)))
    return _copied(batches.select(x, slice(0, n_rows), n_data)), n_rows


def outputs_at(model: nn.Module, x: Inputs, call: ForwardFn, *, with_gradients: bool = False) -> Tensor:
    """Outputs in evaluation mode, `[B, …]`; the network may write to its inputs.

    Args:
        model: The network.
        x: Inputs.
        call: How to call it.
        with_gradients: Whether autograd records the pass, as it does those of a fit.
    """
    with autograd_mode(), torch.set_grad_enabled(with_gradients), preserve_model(model):
        return batches.latent(call(model, _copied(x))).detach()


def differ(a: Tensor, b: Tensor, model: nn.Module, *, other_kernels: bool = False) -> bool:
    """True if two outputs of a network differ by more than rounding.

    That is 1,000 times the precision of its numbers, and at most a tenth, relative to the largest output: kernels of
    accelerators may add up in another order every time, and half precision has three digits at most.

    Args:
        a: Outputs.
        b: Outputs at the same data.
        model: The network.
        other_kernels: Whether products may be of other precision than the numbers: in single precision a percent.
    """
    if a.shape != b.shape:
        return True
    distance, largest = _distance(a, b)
    if largest == math.inf:
        finite = a.isfinite()
        if not torch.equal(finite, b.isfinite()):
            return True
        distance, largest = _distance(a[finite], b[finite])
    parameters = (tensor for module in modules_of(model) for tensor in module._parameters.values())
    dtypes = {tensor.dtype for tensor in (a, b, *parameters) if tensor is not None and tensor.is_floating_point()}
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    share = min(_ROUNDING * eps, _LARGEST_SHARE)
    if other_kernels and eps >= torch.finfo(torch.float32).eps:
        share = max(share, _OTHER_KERNELS)
    return distance > share * largest


def _distance(a: Tensor, b: Tensor) -> tuple[float, float]:
    """The largest distance of two entries, and the largest entry of either, infinite unless all are finite."""
    if not a.numel():
        return 0.0, 0.0
    sizes = [(a - b).abs().amax(), a.abs().amax(), b.abs().amax()]
    distance, *largest = torch.stack(sizes).tolist()
    return distance, max(largest) if all(map(math.isfinite, largest)) else math.inf


def _copied(x: Inputs) -> Inputs:
    with kept_for_later():
        return batches.transform(x, lambda tensor: tensor.detach().clone())


def _equal(a: Inputs, b: Inputs) -> bool:
    """True if inputs are tensors alone, and those of both are equal."""
    tensors = batches.tensors(a)
    if type(a) is not type(b) or batches.signature(a) != batches.signature(b):
        return False
    alone = isinstance(a, Tensor) or len(a) == len(b) == len(tensors)
    return alone and all(map(torch.equal, tensors, batches.tensors(b)))


def _spaced(outputs: Tensor) -> Tensor:
    flat = outputs.detach().flatten()
    return flat[:: max(1, -(-len(flat) // _KEPT_OUTPUTS))].clone()


class FirstBatch:
    """Runs the network twice on two data of the first batch, with other random numbers.

    The fit's own pass is one of them, where its engine shows the outputs and two data alone have the same; the other is
    the pass that finds the last layer, where there was one.

    Args:
        model: The network.
        forward_fn: How to call it; None for the default.

    Attributes:
        witness: These data with the outputs, or None: before the first batch, and where the outputs are random, or the
            network does not take a part of a batch.
    """

    def __init__(self, model: nn.Module, forward_fn: ForwardFn | None) -> None:
        self.model = model
        self.call = _Eagerly(forward_fn or batches.call)
        self.witness: Witness | None = None
        self._written: list[str] = []
        self._draws = False
        self._fitted: Tensor | None = None
        self._early: tuple[Inputs, Tensor] | None = None

    def early(self, x: Inputs, n_data: int) -> tuple[Inputs, ForwardFn]:
        """The first data of the first batch, and a call for a pass over them before the fit, which is remembered."""
        rows, _ = first_rows(x, n_data)

        def call(model: nn.Module, x: Inputs) -> object:
            output = self._noting(model, _copied(x))
            self._early = rows, batches.latent(output).detach().clone()
            return output

        return rows, call

    def see(self, outputs: Tensor) -> None:
        """Keeps outputs `[B, …]` of the fit's own pass over the batch, of two data."""
        self._fitted = outputs.detach()[:ROWS].clone()

    def look(self, x: Inputs, y: Tensor) -> None:
        """Looks at a batch that the fit has accepted.

        Warns:
            ApproximationWarning: The outputs are random.
        """
        seen = self._at(x, y, ROWS)
        if seen is None and ROWS < len(y) <= _WHOLE:  # the network takes whole batches only
            seen = self._at(x, y, _WHOLE)
        if seen is None:
            return
        rows, outputs = seen
        if outputs is None:
            warn(_RANDOM, ApproximationWarning)
        else:
            beside = self._fitted is not None and len(y) > len(self._fitted)
            is_alone = beside and self._fitted is not None and self._same(self._fitted, outputs)
            self.witness = Witness.of(rows, outputs, self.call, self._written, is_alone=is_alone)

    def _at(self, x: Inputs, y: Tensor, most: int) -> tuple[Inputs, Tensor | None] | None:
        """The first data and the outputs there, or None if they are random.

        None of a network that does not take a part of the batch.
        """
        rows, n_rows = first_rows(x, len(y), most)
        try:
            with model_lock(self.model):
                return rows, self._twice(rows)
        except Exception:  # a network's own assertion, say
            if n_rows == len(y):
                raise
            return None

    def _twice(self, rows: Inputs) -> Tensor | None:
        """Outputs that two passes with other random numbers have in common; None if they have not."""
        early = self._early_at(rows)
        again = outputs_at(self.model, rows, self._noting) if early is None else early
        if not self._draws and self._fitted is not None and self._same(self._fitted, again):
            return again
        once = outputs_at(self.model, rows, self.call)
        if early is not None and differ(once, early, self.model):  # perhaps since autograd recorded that pass
            again = outputs_at(self.model, rows, self._noting)
        devices = {parameter.device for parameter in self.model.parameters() if parameter.is_cuda}
        with same_random_state(self.model):
            for _ in range(_PASSES if self._draws else 0):
                for device in (torch.device("cpu"), *devices):
                    torch.rand(1, device=device)  # so that the next pass draws others
                again = outputs_at(self.model, rows, self._noting)
                if differ(once, again, self.model):
                    break
        return None if differ(once, again, self.model) else once

    def _early_at(self, rows: Inputs) -> Tensor | None:
        """Outputs of the pass before the fit, if that was of these data; the fit may read others of the batch."""
        if self._early is None or not _equal(self._early[0], rows):
            return None
        return self._early[1]

    def _same(self, fitted: Tensor, again: Tensor) -> bool:
        """True if the outputs of data alone are those of the fit, of as many data."""
        return len(fitted) == len(again) and not differ(fitted.flatten(), again.flatten(), self.model)

    def _noting(self, model: nn.Module, x: Inputs) -> object:
        """Calls the network, and notes whether that draws random numbers, and which plain attributes it writes.

        These are put back afterwards.
        """
        generators, before = generators_of(model), Seen(model)
        states = [generator.get_state() for generator in generators]
        output = self.call(model, x)
        self._draws = not all(map(torch.equal, states, [generator.get_state() for generator in generators]))
        self._written = []
        if not before.holds(modules_of(model)):
            after = Seen(model)
            if after.attributes != before.attributes:
                self._written = changed_names(digests(before.attributes), digests(after.attributes))
        return output


@dataclass(frozen=True)
class _Eagerly:
    """Calls a network as fits and predictions do, compiled parts of it eagerly.

    Attributes:
        forward_fn: How to call it.
    """

    forward_fn: ForwardFn

    def __call__(self, model: nn.Module, x: Inputs) -> object:
        with hooks_fire(model):
            return self.forward_fn(model, x)


_RANDOM = (
    "two forward passes of the same data differ, in evaluation mode: the network draws random numbers, of which a fit "
    "and every prediction see one draw, as if it were part of the network. Often it is F.dropout(x, p), which drops "
    "also in evaluation mode: use nn.Dropout, or F.dropout(x, p, training=self.training)."
)
