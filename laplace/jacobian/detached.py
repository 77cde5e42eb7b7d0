"""Factored Jacobians that are kept: plain tensors without graphs or references to a network, as states hold them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from laplace.errors import StateError
from laplace.jacobian.blocks import Block, DenseBlock, SumBlock
from laplace.jacobian.factors import IndexBlock, OuterBlock
from laplace.jacobian.heads import HeadBlock
from laplace.jacobian.jacobian import Jacobian

HOLDS_INPUTS = "held with the inputs of the layers there, which in a first layer are data"
"""What `repr` says of a posterior whose states and pickles hold data: those that its kernels are between."""


def held(jacobian: Jacobian) -> Jacobian:
    """The Jacobian with blocks that can be kept; parameters without factors are multiplied out."""
    return Jacobian(tuple(_held(block) for block in jacobian.blocks))


def _held(block: Block) -> Block:
    if isinstance(block, HeadBlock):
        return replace(block, features=block.features.detach().contiguous())
    if isinstance(block, OuterBlock):
        a = None if block.a is None else block.a.detach().contiguous()
        return replace(block, a=a, g=block.g.detach().contiguous())
    if isinstance(block, IndexBlock):
        return replace(block, g=block.g.detach().contiguous())
    if isinstance(block, SumBlock):
        return SumBlock(tuple(_held(part) for part in block.parts))
    return DenseBlock(block.dense().detach().contiguous())


def picked(jacobian: Jacobian, outputs: Tensor) -> Jacobian:
    """One output of every datum, `outputs` `[B]`: a Jacobian with one cotangent."""
    return Jacobian(tuple(_picked(block, outputs) for block in jacobian.blocks))


def _picked(block: Block, outputs: Tensor) -> Block:
    if isinstance(block, HeadBlock):
        return block.at(outputs)
    data = torch.arange(len(outputs), device=outputs.device)
    if isinstance(block, OuterBlock):
        g = block.g[outputs, 0 if block.identity else data].unsqueeze(0)
        return replace(block, g=g, identity=False)
    if isinstance(block, IndexBlock):
        return replace(block, g=block.g[outputs, data].unsqueeze(0))
    if isinstance(block, SumBlock):
        return SumBlock(tuple(_picked(part, outputs) for part in block.parts))
    return DenseBlock(block.dense()[outputs, data].unsqueeze(0))


# States.

_KINDS: dict[str, type[Block]] = {"outer": OuterBlock, "head": HeadBlock, "index": IndexBlock, "dense": DenseBlock}


def state_of(jacobian: Jacobian) -> list[dict[str, Any]]:
    """A kept Jacobian as tensors, numbers and strings."""
    return [_block_state(block) for block in jacobian.blocks]


def _block_state(block: Block) -> dict[str, Any]:
    if isinstance(block, SumBlock):
        return {"kind": "sum", "parts": [_block_state(part) for part in block.parts]}
    kind = next(name for name, cls in _KINDS.items() if isinstance(block, cls))
    return {"kind": kind, **vars(block)}


def from_state(state: list[dict[str, Any]]) -> Jacobian:
    """The Jacobian of a state.

    Raises:
        StateError: It is malformed.
    """
    return Jacobian(tuple(_block(entry) for entry in state))


def _block(state: dict[str, Any]) -> Block:
    fields = {name: value for name, value in state.items() if name != "kind"}
    if state["kind"] == "sum":
        return SumBlock(tuple(_block(part) for part in fields["parts"]))
    if state["kind"] not in _KINDS:
        raise StateError(f"the state holds a block of kind {state['kind']!r}, known are {[*_KINDS, 'sum']}.")
    return _KINDS[state["kind"]](**fields)
