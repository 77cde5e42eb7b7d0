"""Inputs that are read after a call returns, and must be then what they were."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core import checks
from laplace.core.batch import Inputs
from laplace.core.cached import version
from laplace.errors import InvalidData

_COMPARED = 2**18
"""Entries of a tensor of inputs whose values are compared, at most."""


def same_as_now(x: Inputs) -> Callable[[], None]:
    """Refuses, when it is called, inputs that were written to since: a prediction reads them when it is asked.

    PyTorch counts its own writes. Of others, through NumPy or `.data`, values tell: all of them, or evenly spaced ones.
    """
    if not checks.numbers_are_known() or not isinstance(x, Collection):  # what is none is refused where it is read
        return lambda: None
    before = [(tensor, version(tensor), _some_values(tensor).clone()) for tensor in batches.tensors(x)]

    def require_same() -> None:
        now = batches.tensors(x)
        if len(now) != len(before) or not all(map(_is_same, now, before)):
            raise InvalidData(
                "the inputs of this prediction were overwritten after the call of la.predict(x), and it would be of "
                "what they are now. Read what you need of a prediction before you use the memory again, or give a "
                "copy: la.predict(x.clone())."
            )

    return require_same


def _is_same(tensor: Tensor, before: tuple[Tensor, int, Tensor]) -> bool:
    former, count, values = before
    if tensor is not former or version(tensor) != count:
        return False
    now = _some_values(tensor)
    return torch.equal(values, now) or torch.equal(values.nan_to_num(), now.nan_to_num())  # NaN does not equal itself


def _some_values(tensor: Tensor) -> Tensor:
    """Values, evenly spaced; none of a device, which would be waited for, or where no part is at hand."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return torch.empty(0)
    if tensor.numel() > _COMPARED:
        if not tensor.is_contiguous():
            return torch.empty(0)
        return tensor.view(-1)[:: -(-tensor.numel() // _COMPARED) | 1]  # an odd step meets all columns of most images
    return tensor
