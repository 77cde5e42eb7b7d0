"""A few data of a fit with the network's outputs there: they notice changes that no weight shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from laplace.core import batch as batches
from laplace.core.batch import ForwardFn, Inputs
from laplace.core.memory import ran_out
from laplace.network.model_guard import autograd_mode, preserve_model

ROWS = 8
"""Data that are kept at most."""

_INPUT_BYTES = 64 * 2**20
_KEPT_OUTPUTS = 2**20
_ROUNDING, _LARGEST_SHARE = 1000, 0.1
_OTHER_KERNELS = 0.01


@dataclass(frozen=True)
class Witness:
    """Inputs of at most eight data, and the network's outputs; held in memory alone, never saved.

    Attributes:
        x: Inputs.
        outputs: Outputs at them, flat; evenly spaced entries where there are more than a million.
        call: How to call the network.
        written: Names of plain attributes that a forward pass writes.
    """

    x: Inputs
    outputs: Tensor
    call: ForwardFn
    written: frozenset[str] = frozenset()

    @classmethod
    def of(cls, x: Inputs, outputs: Tensor, call: ForwardFn, written: Iterable[str] = ()) -> Witness:
        """A witness of inputs that are its own, and of outputs `[B, …]`."""
        return cls(x, _spaced(outputs), call, frozenset(written))

    def agrees(self, model: nn.Module, *, changed: bool) -> bool:
        """True if the network has its outputs of then; one that does not run on these data any more has not.

        Args:
            model: The network.
            changed: Whether attributes of it have changed. Else single precision is compared to a percent alone, since
                users may choose faster products between two calls (TF32, bfloat16).
        """
        try:
            outputs = _spaced(outputs_at(model, self.x, self.call))
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            if ran_out(error):
                raise
            return False
        return not differ(self.outputs, outputs, model, other_kernels=not changed)

    def moved(self, model: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> Witness:
        """The witness of a network that was moved."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

        x = batches.transform(self.x, move)
        return replace(self, x=x, outputs=_spaced(outputs_at(model, x, self.call)))


def first_rows(x: Inputs, n_data: int) -> tuple[Inputs, int]:
    """Copies of the first data of a batch, and how many: at most eight of them and 64 MiB, but one at least."""
    bytes_of_one = sum(tensor.nbytes for tensor in batches.tensors(x)) // max(1, n_data)
    n_rows = min(n_data, ROWS, max(1, _INPUT_BYTES // max(1, bytes_of_one)))
    return _copied(batches.select(x, slice(0, n_rows), n_data)), n_rows


def outputs_at(model: nn.Module, x: Inputs, call: ForwardFn) -> Tensor:
    """Outputs in evaluation mode, `[B, …]`; the network may write to its inputs."""
    with autograd_mode(), torch.no_grad(), preserve_model(model):
        return batches.latent(call(model, _copied(x)))


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
    finite = a.isfinite()
    if a.shape != b.shape or not torch.equal(finite, b.isfinite()):
        return True
    a, b = a[finite], b[finite]
    if not a.numel():
        return False
    dtypes = {tensor.dtype for tensor in (a, b, *model.parameters()) if tensor.is_floating_point()}
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    share = min(_ROUNDING * eps, _LARGEST_SHARE)
    if other_kernels and eps >= torch.finfo(torch.float32).eps:
        share = max(share, _OTHER_KERNELS)
    return (a - b).abs().max().item() > share * torch.maximum(a.abs().max(), b.abs().max()).item()


def _copied(x: Inputs) -> Inputs:
    with torch.inference_mode(False):
        return batches.transform(x, lambda tensor: tensor.detach().clone())


def _spaced(outputs: Tensor) -> Tensor:
    flat = outputs.detach().flatten()
    return flat[:: max(1, -(-len(flat) // _KEPT_OUTPUTS))].clone()
