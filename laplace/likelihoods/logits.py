"""Networks that return probabilities where logits are asked for: softmax of a softmax, sigmoid of a sigmoid."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from laplace.core.precision_policy import wide_dtype
from laplace.errors import ApproximationWarning, InvalidData, warn
from laplace.likelihoods.base import Likelihood

_SUM = 1e-5
"""How far the sum of a row of probabilities may be from 1, besides rounding."""

_PASSED = frozenset(
    f"{name}Backward0"
    for name in (
        "Alias", "Cat", "Clamp", "Clone", "Expand", "Permute", "Reshape", "Select", "Slice", "Split", "Squeeze",
        "Stack", "T", "ToCopy", "Transpose", "Unsqueeze", "UnsafeView", "View", "_ReshapeAlias", "_UnsafeView",
    )
) | {"ClampBackward1", "ReshapeAliasBackward0", "SqueezeBackward1", "SqueezeBackward2"}  # fmt: skip
"""Operations that move entries, or bound them, and leave a probability one."""


def require_logits(likelihood: Likelihood, f: Tensor, dtype: torch.dtype) -> None:
    """Refuses outputs that are probabilities already; logarithms of probabilities are logits.

    A softmax is seen by its values, a sigmoid by the operation that gave the outputs: numbers in (0, 1) may be logits.

    Args:
        likelihood: What the outputs are taken for.
        f: Outputs of the first data, `[B, C]`, with their graph if there is one.
        dtype: The network's, which rounds the sum of a row.

    Raises:
        InvalidData: They are.
    """
    if likelihood.activation == "softmax" and _are_distributions(f.detach(), dtype):
        raise InvalidData(_refusal(likelihood, "softmax", "every row of them is at least 0 and adds up to 1"))
    if likelihood.activation == "sigmoid" and _ends_in_sigmoid(f.grad_fn):
        raise InvalidData(_refusal(likelihood, "sigmoid", "the operation that gave them is a sigmoid"))


def warn_of_sigmoid(likelihood: Likelihood, f: Tensor) -> None:
    """Warns where a softmax is taken of the numbers in (0, 1) that a sigmoid gives.

    They are no distributions, and may be logits of a network that was trained like this: so it is no error.

    Args:
        likelihood: What the outputs are taken for.
        f: Outputs `[..., C]`, with their graph.
    """
    if likelihood.activation != "softmax" or not _ends_in_sigmoid(f.grad_fn):
        return
    n_classes = f.shape[-1]
    largest = math.e / (math.e + n_classes - 1)
    warn(
        f"the network ends in a sigmoid, and likelihood={likelihood.name!r} takes the softmax of its outputs: of "
        f"numbers between 0 and 1 no probability of {n_classes} exceeds {largest:.2g}. Return logits, without the "
        "sigmoid (of a network that must keep it, by forward_fn=lambda model, x: model(x).logit()), and take "
        "likelihood='bernoulli' if every output has a target of its own. It is right only if the network was trained "
        "by the cross-entropy of these outputs.",
        ApproximationWarning,
    )


def _refusal(likelihood: Likelihood, name: str, reason: str) -> str:
    return (
        f"the network's outputs are probabilities: {reason}. likelihood={likelihood.name!r} takes the {name} of the "
        f"outputs itself: return logits, without the {name} at the network's end (of a network that must keep it, by "
        "forward_fn=, or their logarithms by forward_fn=lambda model, x: model(x).log()"
        + (")." if name == "softmax" else " - (1 - model(x)).log()).")
    )


def _are_distributions(f: Tensor, dtype: torch.dtype) -> bool:
    """True if every row has C >= 2 entries of at least 0 and sum 1 within max(1e-5, 2 eps sqrt(C))."""
    if f.ndim != 2 or f.shape[1] < 2 or len(f) == 0 or not bool(f.min() >= 0):
        return False
    eps = max(torch.finfo(f.dtype).eps, torch.finfo(dtype).eps)
    allowed = max(_SUM, 2 * eps * math.sqrt(f.shape[1]))
    return bool(((f.sum(1, dtype=wide_dtype(f.device)) - 1).abs() <= allowed).all())


def _ends_in_sigmoid(node: Any) -> bool:
    """True if all that a node of autograd's graph gives comes out of a sigmoid."""
    if node is None:
        return False
    if node.name().startswith("Sigmoid"):
        return True
    return node.name() in _PASSED and all(_ends_in_sigmoid(before) for before, _ in node.next_functions)
