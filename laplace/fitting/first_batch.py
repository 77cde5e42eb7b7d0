"""Check of the first batch of a fit: are two forward passes equal, and what are the outputs?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laplace.core import batch as batches
from laplace.core.batch import ForwardFn, Inputs
from laplace.errors import ApproximationWarning, warn
from laplace.network.attributes import attributes_of, changed, digests
from laplace.network.model_guard import model_lock, same_random_state
from laplace.network.witness import Witness, differ, first_rows, outputs_at
from laplace.weights.discovery import hooks_fire


class FirstBatch:
    """Runs the network twice on at most eight data of the first batch, with other random numbers.

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

    def look(self, x: Inputs, y: Tensor) -> None:
        """Looks at a batch that the fit has accepted.

        Warns:
            ApproximationWarning: The outputs are random.
        """
        rows, n_rows = first_rows(x, len(y))
        try:
            with model_lock(self.model):
                once, again = self._twice(rows)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError):
            if n_rows == len(y):
                raise
            return  # the network takes whole batches only
        if differ(once, again, self.model):
            warn(_RANDOM, ApproximationWarning)
        else:
            self.witness = Witness.of(rows, once, self.call, self._written)

    def _twice(self, rows: Inputs) -> tuple[Tensor, Tensor]:
        with same_random_state(self.model):
            once = outputs_at(self.model, rows, self.call)  # leaves the random state as it was
            devices = {parameter.device for parameter in self.model.parameters() if parameter.is_cuda}
            for device in (torch.device("cpu"), *devices):
                torch.rand(1, device=device)  # so that the next pass draws others
            return once, outputs_at(self.model, rows, self._noting)

    def _noting(self, model: nn.Module, x: Inputs) -> object:
        """Calls the network, and notes which plain attributes that writes; they are put back afterwards."""
        before = digests(attributes_of(model))
        output = self.call(model, x)
        self._written = changed(before, digests(attributes_of(model)))
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
