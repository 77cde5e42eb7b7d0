"""Gradients that have no graph of their own, because what they are of was solved for without one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laplace.errors import UnsupportedError


def first_order(value: Tensor) -> Tensor:
    """A value as it is, which is differentiated once.

    Raises:
        UnsupportedError: Its gradient is asked for with a graph of its own.
    """
    return _FirstOrder.apply(value)


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        del ctx
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        del ctx
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "create_graph=True: answers of hessian_structure='matrix_free' are differentiated once, as the "
                "solutions they are made of have no graph; use hessian_structure='full' for second derivatives."
            )
        return gradients[0]
