"""Targets of batches as the model's own loss reads them: a causal language model is asked for the next token.

Hugging Face's collator gives such a model `labels = input_ids`, −100 on pads, and the model moves them by one position
inside its loss. Here the labels of a mapping are moved alike, so that all else sees targets of the position they are
at: y_t is the token at t + 1, and the last position has none. Pairs (x, y) are never moved.

A head of Hugging Face with one number takes labels `[B]`: numbers `[B]` of a mapping become a column, `[B, 1]`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from laplace.core import batch as batches
from laplace.core.batch import CallByName, Inputs
from laplace.core.checks import is_true, named
from laplace.core.memory import ran_out
from laplace.core.pieces import operations_are_dear
from laplace.core.progress import DataBar
from laplace.errors import ApproximationWarning, warn
from laplace.network.model_guard import autograd_mode, private_copy, reading

IGNORED = -100
"""Label that Hugging Face's losses leave out, as PyTorch's do."""

_MOVES: weakref.WeakKeyDictionary[nn.Module, bool | None] = weakref.WeakKeyDictionary()
"""What the loss of a model was found to do, None where it has none; it takes a few forward passes of one datum."""


class TargetRules(Protocol):
    """Rules for targets: those of a likelihood."""

    @property
    def ignore_index(self) -> int | None:
        """Label that marks data which count nowhere, or None."""
        ...

    @property
    def numeric_targets(self) -> bool:
        """True if targets are numbers in columns, `[B, n]`."""
        ...


@dataclass(frozen=True)
class TargetsAsGiven:
    """Rules for targets that a user's own loss reads as they are."""

    ignore_index: int | None  # Label that marks data which count nowhere, or None
    numeric_targets: bool = False


def split(batch: Any, dict_key_y: str, model: nn.Module, rules: TargetRules | None = None) -> tuple[Inputs, Tensor]:
    """Inputs of a batch, and targets of the positions they are at.

    Moved are labels of a mapping alone, under the key by which the model takes its own, if its loss says so. The
    likelihood's rules know the label of the last position, which has no target, and if targets are columns.
    """
    batch = batches.without_weights(batch)
    x, y = batches.split(batch, dict_key_y)
    if x is batch and y.ndim == 1 and rules is not None and rules.numeric_targets:
        return x, y.unsqueeze(1)
    own = x is batch and isinstance(x, Mapping) and dict_key_y == batches.LABELS
    if not own or not _labels_tokens(x, y) or not _moves(model, x, y):
        return x, y
    ignored = None if rules is None else rules.ignore_index
    labels = y.long()
    return x, torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED if ignored is None else ignored)], 1)


def counted(
    batch: Any, dict_key_y: str, device: torch.device, rules: TargetRules, model: nn.Module
) -> tuple[Inputs, Tensor] | None:
    """Inputs and targets of a batch, without ignored ones, on a device; None if there are none."""
    data = weighted(batch, dict_key_y, device, rules, model)
    return None if data is None else data[:2]


def weighted(
    batch: Any, dict_key_y: str, device: torch.device, rules: TargetRules, model: nn.Module, *, all_count: bool = False
) -> tuple[Inputs, Tensor, Tensor | None] | None:
    """Inputs and targets of a batch, without ignored ones, with their weights; None if there are none.

    Weights are `[B]`, or of the shape of the targets; None if all weights are 1. A datum with the weight 0 is left out,
    whatever its numbers are. With `all_count` it is known that none is ignored.
    """
    x, y = split(batch, dict_key_y, model, rules)
    keep, weights = None if all_count else batches.counting(y, rules.ignore_index), None
    if keep is not None and keep.device != device:  # labels of the host, of which nobody waits for an answer
        keep = None if bool(keep.all()) else keep.to(device)
    x, y = batches.to_device(x, device), batches.moved(y, device)
    if isinstance(batch, batches.WeightedBatch):
        weights = batches.moved(batch.weigh(), device)
        counts = (weights > 0).flatten(1).any(1) if weights.ndim > 1 else weights > 0
        keep = counts if keep is None else keep & counts
    if keep is None or is_true(keep.all()):
        return x, y, weights
    if not keep.any():
        return None
    return batches.select(x, keep, len(y)), y[keep], None if weights is None else weights[keep]


def read(
    loader: Iterable[Any],
    dict_key_y: str,
    device: torch.device,
    rules: TargetRules,
    model: nn.Module,
    *,
    name: str = "batch {}",
    label: str = "",
    progress_bar: bool = False,
) -> Iterator[tuple[str, Inputs, Tensor]]:
    """Name, inputs and targets of every batch, without ignored ones, on a device; batches without any are left out.

    `name` is what messages call a batch by its number. A progress bar has a `label`, and counts what was made use of.
    """
    bar = DataBar(label, loader, shown=progress_bar)
    for number, batch in enumerate(reading(loader)):
        with named(name.format(number)):
            data = counted(batch, dict_key_y, device, rules, model)
        if data is not None:
            yield name.format(number), *data
            bar.add(len(data[1]))
    bar.close()


def all_count(some: Sequence[Any], rules: TargetRules) -> list[bool]:
    """Whether no label of a batch is ignored: of batches (x, y) of a device, in one transfer; False of others."""
    keeps: dict[int, Tensor] = {}
    for i, batch in enumerate(some):
        if type(batch) in (tuple, list) and len(batch) == 2 and isinstance(batch[1], Tensor) and batch[1].ndim:
            keep = batches.counting(batch[1], rules.ignore_index)
            if keep is not None and operations_are_dear(keep.device):
                keeps[i] = keep.all()
    known = torch.stack(list(keeps.values())).tolist() if len({keep.device for keep in keeps.values()}) == 1 else []
    answers = dict(zip(keeps, known, strict=False))
    return [answers.get(i, False) for i in range(len(some))]


def _labels_tokens(x: Mapping[str, Any], y: Tensor) -> bool:
    """True if there is a label for every token: others, cut or moved already, are not the model's own."""
    if y.ndim != 2 or y.is_floating_point() or y.numel() == 0:
        return False
    return any(value.shape[:2] == y.shape for value in _inputs(x))


def _moves(model: nn.Module, x: Mapping[str, Any], y: Tensor) -> bool:
    """True if the model's own loss compares the outputs at t with the label at t + 1; asked once for every model."""
    if model not in _MOVES:
        try:
            moves = _MOVES[model] = _asked(model, x, y)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            if ran_out(error):
                raise
            moves = None  # of this batch, which may be at fault itself
        if moves is None and _sees(x, y):
            warn(
                "the targets under 'labels' are the inputs: every position has its own token as target. For next-token "
                "prediction give pairs (x, y) with y = labels[:, 1:] and -100 in the last column, or a model whose "
                "forward takes labels and returns its loss, which shows the shift.",
                ApproximationWarning,
            )
    return _MOVES.get(model) is True


def _asked(model: nn.Module, x: Mapping[str, Any], y: Tensor) -> bool | None:
    """True if of one datum's labels the last one counts in the model's loss and the first one does not.

    None for a model without such a loss, or with one that says neither. Names of classes and of losses say too little:
    `BartForCausalLM` and `XLNetLMHeadModel` do not move their labels.
    """
    device = next(model.parameters(), y).device
    datum = batches.to_device(batches.select(x, slice(0, 1), len(y)), device)

    def loss(position: int, label: int) -> Tensor | None:
        labels = torch.full_like(y[:1], IGNORED, dtype=torch.long, device=device)
        labels[:, position] = label
        value = _loss(own, datum, labels)
        return None if value is None else value.nan_to_num()  # a mean over no labels

    with private_copy(model) as own, autograd_mode(), torch.no_grad():
        nothing = loss(0, IGNORED)
        if nothing is None:
            return None

        def counts(position: int) -> bool:
            # Two classes: a loss may leave out one of them, or be zero to rounding.
            losses = (loss(position, label) for label in (0, 1))
            return any(one is not None and not torch.equal(one, nothing) for one in losses)

        if counts(0):
            return False
        return True if y.shape[1] == 1 or counts(-1) else None


def _loss(model: nn.Module, datum: Mapping[str, Any], labels: Tensor) -> Tensor | None:
    """The model's own loss of a datum with labels `[1, T]`, all of whose positions are seen, 0-dim."""
    named = CallByName().keywords(model, datum)
    if named is not None and not batches.takes(model, batches.LABELS):
        return None
    arguments = (dict(datum.items()) if named is None else named) | {batches.LABELS: labels}
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == labels.shape:
        arguments["attention_mask"] = torch.ones_like(mask)  # some losses leave pads out, whatever their label
    output = model(arguments) if named is None else model(**arguments)
    if isinstance(output, tuple | list):
        output = output[0]
    loss = output if isinstance(output, Tensor) else batches.part(output, "loss")
    return loss if isinstance(loss, Tensor) and loss.ndim == 0 else None


def _sees(x: Mapping[str, Any], y: Tensor) -> bool:
    """True if every target that counts is what an input has at its position."""
    counts = ~batches.is_ignored(y, IGNORED)
    alike = [value == y for value in _inputs(x) if value.shape == y.shape]
    return bool(counts.any()) and any(bool(same[counts].all()) for same in alike)


def _inputs(x: Mapping[str, Any]) -> list[Tensor]:
    return [value for key, value in x.items() if key != batches.LABELS and isinstance(value, Tensor)]
