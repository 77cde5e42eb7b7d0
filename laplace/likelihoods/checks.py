"""Checks of outputs and targets that several likelihoods share; every message says what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from laplace.core import batch as batches
from laplace.core.checks import all_finite, require, where_not_finite
from laplace.core.memory import ran_out
from laplace.core.precision_policy import wide_dtype, widened
from laplace.errors import ApproximationWarning, DataWarning, InvalidData, UnsupportedError, warn

if TYPE_CHECKING:
    from laplace.likelihoods.base import Likelihood


_VOID = 255
"""Label that data sets of segmentation give to pixels without a class."""


def check_outputs(f: Tensor) -> None:
    """Requires finite outputs `[B, C]`."""
    if f.ndim != 2:
        raise InvalidData(f"The network's outputs have shape {list(f.shape)}; [B, C] is accepted: reshape them.")
    require(
        all_finite([f.detach()]),
        lambda: InvalidData(
            f"The network's outputs have NaN or infinite entries{where_not_finite(f)}: look at the inputs there, or at "
            "the network's weights."
        ),
    )


def check_tensor(y: Tensor) -> Tensor:
    """Requires a real tensor."""
    if not isinstance(y, Tensor):
        raise InvalidData(f"Targets are of type {type(y).__name__}; a torch.Tensor is accepted: see torch.as_tensor.")
    if y.is_complex():
        raise InvalidData("Targets are complex; real ones are accepted: give y.real or two outputs.")
    return y


_OF_CLASSES = (
    "integers [B] are labels of classes, of likelihood='classification'; for numbers give [B, C], one per output."
)


def check_values(f: Tensor, y: Tensor, *, gaps: bool = False) -> Tensor:
    """Real-valued targets of the shape of the outputs, cast to their dtype and device.

    With `gaps` entries may be NaN, which say that they were not observed, but not all of a row.
    """
    values = check_tensor(y)
    if values.shape != f.shape:
        of_classes = f.ndim == 2 and f.shape[-1] > 1 and values.ndim == 1 and not values.is_floating_point()
        remedy = "for one output give targets [B, 1], e.g. y.unsqueeze(-1)."
        raise InvalidData(
            f"Targets have shape {list(values.shape)}, outputs {list(f.shape)}; they must be equal, nothing is "
            f"broadcast: {_OF_CLASSES if of_classes else remedy}"
        )
    require_finite_targets(values, gaps=gaps)
    return values.to(f)


def observed(y: Tensor) -> Tensor:
    """True for the entries of checked targets that were observed, `[B, C]`: those that are not NaN."""
    return ~y.isnan()


def refuse_gaps(y: Tensor, what: str) -> None:
    """Refuses targets of which entries are missing.

    Raises:
        UnsupportedError: Some entry is NaN.
    """
    if not y.is_floating_point():
        return
    require(
        observed(y),
        lambda: UnsupportedError(
            f"entries of the targets are missing (NaN{where_not_finite(y)}), which {what} does not know: a posterior "
            "over weights by the library's own backends does. Leave those data out, or fit the outputs one by one."
        ),
    )


def require_finite_targets(y: Tensor, *, gaps: bool = False) -> None:
    """Requires finite targets; with `gaps` NaN is accepted in rows that have other entries."""
    is_right = torch.isfinite(y)
    if gaps and y.ndim == 2:
        is_right = is_right | (y.isnan() & observed(y).any(1, keepdim=True))
    require(
        is_right,
        lambda: InvalidData(
            f"Targets have NaN or infinite entries{where_not_finite(y.masked_fill(is_right, 0))}: remove those data "
            "before fitting."
        ),
    )


def check_labels(f: Tensor, y: Tensor, ignore_index: int | None = None, *, any_rows: bool = False) -> Tensor:
    """Integer labels `[B]`, in [0, C) or `ignore_index`, as int64, or soft labels `[B, C]` in the dtype of f.

    With `any_rows`, floating rows that are no probabilities pass, with a warning.
    """
    given = check_tensor(y)
    if given.shape == f.shape:
        return check_soft_labels(f, given, any_rows=any_rows and given.is_floating_point())
    if given.shape != f.shape[:1]:
        raise InvalidData(
            f"Targets have shape {list(given.shape)}, outputs {list(f.shape)}; integer labels of shape "
            f"{list(f.shape[:1])}, or probabilities of the classes of shape {list(f.shape)}, are accepted: "
            f"{_remedy_of_shape(f, given)}."
        )
    if given.is_floating_point():
        raise InvalidData(f"Labels have dtype {given.dtype}; integers are accepted: give y.long().")
    return _check_indices(f, given, ignore_index)


def _remedy_of_shape(f: Tensor, y: Tensor) -> str:
    """Says what to do with labels of another shape."""
    if y.shape == f.shape[::-1]:
        return "give y.T"
    if y.shape == (len(f), 1):
        return "for [B, 1] give y.squeeze(-1)"
    return "give a label for every datum" + (", or a row of probabilities" if y.ndim > 1 else "")


def _check_indices(f: Tensor, y: Tensor, ignore_index: int | None) -> Tensor:
    """Integer labels `[B]` in range, as int64 on the device of f."""
    n_classes = f.shape[1]
    labels = y.to(device=f.device, dtype=torch.long)
    right = labels == labels.clamp(0, n_classes - 1)
    if ignore_index is not None:
        right = right | (labels == ignore_index)

    def out_of_range() -> InvalidData:
        also = "" if ignore_index is None else f" (or {ignore_index}, which is ignored)"
        wrong = int(labels[~right][0])
        remedy = "Correct the labels or the width of the last layer."
        if wrong == _VOID and bool((labels[~right] == _VOID).all()):
            remedy = (
                f"Where {_VOID} marks pixels without a class, as in many data sets of segmentation, give "
                f"likelihood=Categorical(ignore_index={_VOID}), of laplace.likelihoods."
            )
        return InvalidData(
            f"Label {wrong} is out of range: {n_classes} outputs accept 0 to {n_classes - 1}{also}. {remedy}"
        )

    require(right, out_of_range)
    return labels * right  # until the condition is read no label may index what is not there


def check_soft_labels(f: Tensor, y: Tensor, *, any_rows: bool = False) -> Tensor:
    """Rows of probabilities `[B, C]`, one-hot integers among them, in the dtype of f; sums are made exact.

    With `any_rows`, other rows are as they are, and warned of: a cross-entropy has a value at these, too.
    """
    given = y.to(f.device)
    rows = widened(given)
    sums = rows.sum(1, keepdim=True)
    # Labels were rounded to float32 or less before whatever cast; sqrt(ε) leaves room for any sum of rounded entries.
    rounding = torch.finfo(given.dtype).eps if given.is_floating_point() else 0.0
    tolerance = max(rounding, torch.finfo(torch.float32).eps) ** 0.5
    if any_rows:
        right = (rows >= 0).all(1, keepdim=True) & ((sums - 1).abs() <= tolerance)
        require_finite_targets(rows)
        require(right, lambda: _warn_of_rows(rows, sums))
        return torch.where(right, rows / sums, rows).to(f.dtype)
    require(
        rows >= 0,
        lambda: InvalidData(
            f"Targets {list(y.shape)} are probabilities of the classes, which must be at least 0 and no NaN; the "
            f"smallest is {rows.min().item():.3g}: give probabilities, or integer labels {list(y.shape[:1])}."
        ),
    )
    require(
        (sums - 1).abs() <= tolerance,
        lambda: InvalidData(
            f"Targets {list(y.shape)} are probabilities of the classes, whose sum must be 1 in every row; sums reach "
            f"from {sums.min().item():.6g} to {sums.max().item():.6g}: give y / y.sum(-1, keepdim=True), or say by "
            "channel_dim= which dimension of the outputs holds the classes."
        ),
    )
    return (rows / sums).to(f.dtype)


def _warn_of_rows(rows: Tensor, sums: Tensor) -> None:
    warn(
        f"Targets {list(rows.shape)} are no probabilities of the classes: the smallest is {rows.min().item():.3g}, and "
        f"sums of rows reach from {sums.min().item():.6g} to {sums.max().item():.6g}. The loss is that of "
        "torch.nn.CrossEntropyLoss; a GGN does not depend on labels. Give y / y.sum(-1, keepdim=True), or integer "
        f"labels {list(rows.shape[:1])}; for numbers say likelihood='regression', and by channel_dim= which dimension "
        "of the outputs holds the classes.",
        DataWarning,
    )


def snapped(values: Tensor) -> Tensor:
    """Values of which those within rounding of 0 or 1 are these numbers."""
    whole = values.round()
    near = (values - whole).abs() <= torch.finfo(values.dtype).eps ** 0.5
    return torch.where(near & (whole >= 0) & (whole <= 1), whole, values)


def for_each(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """`function` of the rows of each datum, `[B, ...]`: at once by `torch.func.vmap`, or else one by one.

    What reads a number (`f[y]`, `int(y)`, a branch on values) runs one by one only.
    """
    try:
        return vmap(function)(*rows)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if ran_out(error) or not len(rows[0]):
            raise
    return torch.stack([function(*row) for row in zip(*rows, strict=True)])


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
    """
    if likelihood.activation == "softmax" and _are_distributions(f.detach(), dtype):
        raise InvalidData(_refusal(likelihood, "softmax", "every row of them is at least 0 and adds up to 1"))
    if likelihood.activation == "sigmoid" and _ends_in_sigmoid(f.grad_fn):
        raise InvalidData(_refusal(likelihood, "sigmoid", "the operation that gave them is a sigmoid"))


def warn_of_sigmoid(likelihood: Likelihood, f: Tensor) -> None:
    """Warns where a softmax is taken of the numbers in (0, 1) that a sigmoid gives.

    They are no distributions, and may be logits of a network that was trained like this: so it is no error.
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


# Targets that a loss around a likelihood's own stands for, as scripts write it to reshape or to scale targets.

Loss = Callable[[Tensor, Tensor], Tensor]
"""A loss of outputs `[B, C]` and targets, summed over the data, in the scale of PyTorch's module."""


def recovered_targets(likelihood: Likelihood, loss: Loss, f: Tensor, y: Tensor) -> Tensor:
    """Checked targets t at which the likelihood's own loss is that of a user, ℓ(f, y).

    With E[t | f] the mean of a likelihood whose loss has the gradient E[t | f] − t, targets are E[t | f] − ∂ℓ/∂f.
    """
    factor = likelihood.torch_loss()[1]
    with torch.inference_mode(False), torch.enable_grad():
        outputs = f.detach().clone().requires_grad_()
        try:
            value = loss(outputs, y)
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            if ran_out(error):
                raise
            raise _no_transform(likelihood) from error
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise _no_transform(likelihood)
        (gradient,) = torch.autograd.grad(factor * value.sum(), outputs)
    targets = likelihood.check_targets(f, _targets(likelihood, likelihood.inverse_link(f) - gradient, y))
    own, given = likelihood.loss(f, targets), factor * value.detach().reshape(())
    allowed = torch.finfo(f.dtype).eps ** 0.5 * (1 + own.abs())
    require((own - given).abs() <= allowed, lambda: _no_transform(likelihood))
    return targets


def _targets(likelihood: Likelihood, values: Tensor, y: Tensor) -> Tensor:
    """Targets from computed values `[B, C]`; ignored labels, whose loss has no gradient, stay ignored."""
    if likelihood.ignore_index is None or y.shape != values.shape[:1] or y.is_floating_point():
        return likelihood.as_targets(values)
    ignored = batches.is_ignored(y, likelihood.ignore_index)
    any_label = functional.one_hot(torch.zeros_like(y), values.shape[1]).to(values)
    targets = likelihood.as_targets(torch.where(ignored.unsqueeze(1), any_label, values))
    return targets.masked_fill(ignored, likelihood.ignore_index) if targets.ndim == 1 else targets


def _no_transform(likelihood: Likelihood) -> UnsupportedError:
    return UnsupportedError(
        f"the lossfunc that was assigned to the backend is not the loss of likelihood={likelihood.name!r}, summed over "
        "the data, at other targets: curvature and evidence would not belong to it. Pass a likelihood object with this "
        "loss (docs/extending.md, A likelihood)."
    )
