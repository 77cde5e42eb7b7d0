"""Features of texts, or of whatever a frozen network takes; and what a language model answers by itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, filterfalse
from operator import attrgetter, is_, methodcaller
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from laplace.core.precision_policy import wide_dtype
from laplace.errors import InvalidArgument, InvalidData, ModelChangedError, UnsupportedError
from laplace.network.model_guard import flags_put_back
from laplace.network.tree import modules_of

POOLS = ("last", "mean")

_UNLIMITED = 10**6
"""Lengths that tokenizers have where nobody has said one."""

Batch = dict[str, Tensor]


class Encoder:
    """A frozen network that gives features; without one, inputs are features.

    Args:
        model: A model of transformers, causal or encoder, with or without adapters; any module from inputs to features
            `[B, D]` or `[B, T, D]`; or None.
        tokenizer: The model's; None where no texts are given.
        pool: How features of tokens become those of a text: `"last"` token or `"mean"`.
        batch_size: Inputs per pass.
        max_length: Tokens of a text, of which the first are read; None for what tokenizer and model can read.
        end: What all texts end with, which is read of long ones, too.
    """

    def __init__(
        self,
        model: nn.Module | None,
        tokenizer: Any,
        pool: str | None,
        batch_size: int,
        max_length: int | None,
        end: str = "",
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.batch_size, self.end = batch_size, end
        self.pool = pool or ("last" if is_causal(model) else "mean")
        self.max_length = max_length or _longest(model, tokenizer)
        self._known: tuple[Any, ...] = ()
        self._tensors: list[Tensor] = []
        self._walked: tuple[list[nn.Module], list[nn.Module | None]] = [], []

    def features(self, inputs: Any) -> Tensor:
        """Features of all inputs, `[N, D]`, on the CPU, in float32 or float64.

        Raises:
            InvalidData: Empty texts, or features that are not finite or of another shape.
        """
        if self.model is None:
            found = as_features(inputs)
        elif are_texts(inputs):
            found = self._of_texts(list(inputs))
        else:
            found = self._of_batches(self.batches(inputs))
        if not math.isfinite(float(found.sum())):  # or the sum alone is too large
            rows = (~found.isfinite().all(1)).nonzero().flatten().tolist()
            if not rows:
                return found
            raise InvalidData(
                f"features of {len(rows)} inputs are not finite, the first is input {rows[0]}; leave these inputs out, "
                "or run the model in float32."
            )
        return found

    def _of_texts(self, texts: list[str]) -> Tensor:
        """Of every text that differs once, those of about one length together."""
        distinct = list(dict.fromkeys(texts))
        tokens = self.tokens(distinct)
        order = sorted(range(len(distinct)), key=lambda i: len(tokens[i]["input_ids"]))
        rows = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        parts = self._of_batches(self.padded([tokens[i] for i in some]) for some in rows)
        place = {distinct[i]: row for row, i in enumerate(order)}
        wanted = [place[text] for text in texts]
        return parts if wanted == list(range(len(parts))) else parts[wanted]

    def _of_batches(self, batches: Iterable[Any]) -> Tensor:
        with evaluated(self.modules()), torch.no_grad():
            found = [self._of_batch(batch) for batch in batches]
        if not found:
            raise InvalidData("there are no inputs; give one text or one row of tensors at least.")
        return torch.cat(found)

    def _of_batch(self, batch: Any) -> Tensor:
        model: Any = self.model
        device = _device_of(model)
        if isinstance(batch, Mapping):
            given = {name: value for name, value in batch.items() if name != "labels"}
            given = to_the_left({name: value.to(device) for name, value in given.items() if isinstance(value, Tensor)})
            outputs = encoder_of(model)(**given)
            mask = given.get("attention_mask")
        else:
            outputs, mask = encoder_of(model)(batch.to(device)), None
        outputs = getattr(outputs, "last_hidden_state", outputs)
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        if not isinstance(outputs, Tensor) or outputs.ndim not in (2, 3) or not outputs.is_floating_point():
            shape = list(getattr(outputs, "shape", [])) or type(outputs).__name__
            raise InvalidData(f"the model returns {shape}; features [B, D], or [B, T, D] of tokens, are accepted.")
        pooled = outputs if outputs.ndim == 2 else _pooled(outputs, mask, self.pool)
        return pooled.float().cpu() if pooled.dtype in (torch.float16, torch.bfloat16) else pooled.cpu()

    def batches(self, inputs: Any) -> Iterator[Any]:
        """Batches of inputs: those of a loader, or parts of a tensor, an array or a mapping of tensors."""
        if isinstance(inputs, np.ndarray):
            inputs = torch.as_tensor(inputs)
        if isinstance(inputs, Tensor):
            yield from inputs.split(self.batch_size)
        elif isinstance(inputs, Mapping):
            sizes = [len(value) for value in inputs.values() if isinstance(value, Tensor)]
            for i in range(0, max(sizes, default=0), self.batch_size):
                part = slice(i, i + self.batch_size)
                yield {name: value[part] for name, value in inputs.items() if isinstance(value, Tensor)}
        else:
            for batch in inputs:
                x = inputs_of(batch)
                if isinstance(x, str):
                    raise InvalidData(f"a batch is one text, {x[:40]!r}; give texts alone, as one list: [text, …].")
                if are_texts(x):
                    yield self.padded(self.tokens(list(x)))
                elif isinstance(x, Tensor | Mapping):
                    yield x
                else:
                    raise InvalidData(f"a batch holds a {type(x).__name__}; texts, tensors and mappings are accepted.")

    # Tokens.

    def tokens(self, texts: Sequence[str], *, to_the_end: bool = False) -> list[dict[str, list[int]]]:
        """What the tokenizer makes of every text, without pads; of long ones the beginning and `end`, or the end."""
        if self.tokenizer is None:
            raise InvalidArgument("texts were given, and tokenizer=None; give the model's tokenizer.")
        empty = [i for i, text in enumerate(texts) if not text.strip()]
        if empty:
            raise InvalidData(f"{len(empty)} texts are empty, {texts[empty[0]]!r} among them; leave them out.")
        most = self.max_length
        limits = most is not None and not to_the_end and not self.end
        options: dict[str, Any] = {"truncation": True, "max_length": most} if limits else {}
        found = self.tokenizer(list(texts), **options)
        names = [name for name in ("input_ids", "token_type_ids") if name in found]
        rows = [{name: list(found[name][i]) for name in names} for i in range(len(texts))]
        if most is None or all(len(row["input_ids"]) <= most for row in rows):
            return rows
        last = most if to_the_end else min(most, len(self.tokenizer(self.end)["input_ids"])) if self.end else 0
        return [{name: _shortened(row[name], most, last) for name in names} for row in rows]

    def padded(self, tokens: Sequence[Mapping[str, list[int]]]) -> Batch:
        """A batch with pads on the right, whether the tokenizer has a token for them or not."""
        config = getattr(self.model, "config", None)
        pads = (getattr(self.tokenizer, "pad_token_id", None), getattr(config, "pad_token_id", None), 0)
        pad = next(value for value in pads if isinstance(value, int))
        lengths = [len(row["input_ids"]) for row in tokens]
        short = [max(lengths) - n for n in lengths]
        filled = {
            name: [[*row[name], *[pad if name == "input_ids" else 0] * n] for row, n in zip(tokens, short, strict=True)]
            for name in tokens[0]
        } | {"attention_mask": [[1] * n + [0] * m for n, m in zip(lengths, short, strict=True)]}
        return {name: torch.tensor(rows) for name, rows in filled.items()}

    # Whether model and tokenizer are those of the fit.

    def probe(self, inputs: Any) -> tuple[Any, Tensor] | None:
        """Two inputs and their features, by which model and tokenizer are known again; None of features."""
        if self.model is None:
            return None
        few = list(inputs[:2]) if are_texts(inputs) else _first_two(next(iter(self.batches(inputs))))
        self._remember()
        return few, self.features(few)

    def require_same(self, probe: tuple[Any, Tensor] | None) -> None:
        """Compares features of the probe, where model or tokenizer were replaced, or tensors of the model changed.

        Raises:
            ModelChangedError: They differ.
        """
        if probe is None or self._known == self._signature():
            return
        few, expected = probe
        self._remember()
        try:
            found = self.features(few)
            largest = max((torch.finfo(t.dtype).eps for t in self._tensors if t.is_floating_point()), default=0.0)
            same = found.shape == expected.shape and bool(
                (found - expected).norm() <= max(largest**0.5, 1e-6) * expected.norm()
            )
        except (IndexError, RuntimeError, TypeError):  # tokens that the model does not know
            same = False
        if not same:
            self._known = ()
            raise ModelChangedError(
                "the features of two probes are not those of the fit: the model, its weights or the tokenizer changed. "
                "Give the former ones back, or fit the head again."
            )

    def _remember(self) -> None:
        self._tensors = self._tensors_now()  # held, so that no other tensor has their identities
        self._known = self._signature()

    def modules(self) -> list[nn.Module]:
        """All modules of the model: those that were found last, while each has the children that it had."""
        known, children = self._walked
        if not known or known[0] is not self.model or not _same(_held(known, "_modules"), children):
            known = [] if self.model is None else modules_of(self.model)
            self._walked = known, _held(known, "_modules")
        return known

    def _tensors_now(self) -> list[Tensor]:
        """Tensors of the model, in whichever modules it has by now: adapters may have taken the place of layers."""
        modules = self.modules()
        return [t for table in ("_parameters", "_buffers") for t in _held(modules, table) if t is not None]

    def _signature(self) -> tuple[Any, ...]:
        size = len(self.tokenizer) if hasattr(self.tokenizer, "__len__") else 0
        tensors = self._tensors_now()
        versions = [*map(attrgetter("_version"), filterfalse(Tensor.is_inference, tensors))]
        return id(self.model), id(self.tokenizer), size, [*map(id, tensors)], versions, self.pool, self.max_length


def _held(modules: list[nn.Module], table: str) -> list[Any]:
    """What tables of modules hold, found in no loop of Python: every prediction asks."""
    return [*chain.from_iterable(map(methodcaller("values"), map(attrgetter(table), modules)))]


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def are_texts(inputs: Any) -> bool:
    """True of a list, tuple or array of texts.

    Raises:
        InvalidData: One text, which is no list.
    """
    if isinstance(inputs, str):
        raise InvalidData(f"one text was given, {inputs[:40]!r}; give a list of texts: [text].")
    if isinstance(inputs, np.ndarray):
        return inputs.dtype.kind in "OU" and all(isinstance(text, str) for text in inputs.flat)
    return isinstance(inputs, list | tuple) and bool(inputs) and all(isinstance(text, str) for text in inputs)


def inputs_of(batch: Any) -> Any:
    """What a model takes of a batch, which may be a pair of inputs and labels."""
    return batch[0] if isinstance(batch, tuple | list) and batch and not are_texts(batch) else batch


def as_features(inputs: Any) -> Tensor:
    """Features as they are given, `[N, D]`; half precision becomes float32.

    Raises:
        InvalidData: Anything else.
    """
    if are_texts(inputs):
        raise InvalidData(
            "texts were given to a head without a model; give decision(model, tokenizer, …), or features."
        )
    try:
        found = inputs.detach().to_dense().cpu() if isinstance(inputs, Tensor) else torch.tensor(np.asarray(inputs))
    except (TypeError, ValueError) as error:
        raise InvalidData(
            f"features are a {type(inputs).__name__}; a tensor or an array [N, D] is accepted."
        ) from error
    if found.ndim != 2 or not found.numel():
        raise InvalidData(f"features of shape {list(found.shape)}; [N, D] is accepted.")
    if found.is_complex():
        raise InvalidData(f"features are of {found.dtype}; real numbers are accepted.")
    return found.to(torch.promote_types(found.dtype, torch.float32))


def encoder_of(model: Any) -> Any:
    """The part of a model of transformers that gives hidden states; of adapters the model that has them."""
    inner = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        return inner.get_encoder()
    return inner.base_model if hasattr(inner, "base_model_prefix") else inner


def is_causal(model: Any) -> bool:
    """True of a language model that writes."""
    inner = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model
    can = getattr(inner, "can_generate", None)
    is_pair = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    return callable(can) and bool(can()) and not is_pair


@contextmanager
def evaluated(modules: list[nn.Module]) -> Iterator[None]:
    """A model, by all of its modules, in evaluation mode; every one gets its own mode back."""
    if not any(map(attrgetter("training"), modules)):
        yield
        return
    with flags_put_back(modules[0]):
        modules[0].eval()
        yield


def to_the_left(batch: Batch) -> Batch:
    """Rows of tokens that begin at the first place: pads on the left, of which positions would count, go to the right.

    Raises:
        InvalidData: A row without a token.
    """
    mask = batch.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return batch
    if mask.shape[1] and bool(mask[:, 0].all()):
        return batch
    if not bool(mask.any(1).all()):
        raise InvalidData("a text has no token: its attention_mask is zero. Leave it out.")
    order = (mask == 0).long().argsort(dim=1, stable=True)
    rows = torch.arange(len(order), device=order.device).unsqueeze(1)
    return {name: value[rows, order] if value.shape[:2] == mask.shape else value for name, value in batch.items()}


def _pooled(hidden: Tensor, mask: Tensor | None, pool: str) -> Tensor:
    """Hidden states `[B, T, D]` of the last token, or their mean."""
    mask = torch.ones(hidden.shape[:2], device=hidden.device) if mask is None else mask
    if pool == "mean":
        shares = mask.to(hidden) / mask.sum(1, keepdim=True)
        return (shares.unsqueeze(1) @ hidden).squeeze(1)
    places = torch.arange(mask.shape[1], device=mask.device)
    return hidden[torch.arange(len(hidden), device=hidden.device), (places * (mask != 0)).argmax(1)]


def _device_of(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))


def _shortened(values: list[int], most: int, last: int) -> list[int]:
    """So many at most, of which so many are the last ones."""
    return values if len(values) <= most else values[: most - last] + values[len(values) - last :]


def _first_two(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {name: value[:2].cpu() for name, value in batch.items() if isinstance(value, Tensor)}
    return batch[:2].cpu()


def _longest(model: Any, tokenizer: Any) -> int | None:
    """Tokens that a model can read, as its tokenizer or its positions say."""
    of_tokenizer = getattr(tokenizer, "model_max_length", None)
    of_model = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    known = [n for n in (of_tokenizer, of_model) if isinstance(n, int) and 0 < n < _UNLIMITED]
    return min(known, default=None)


# What a language model answers without a label.

_MARKS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class ZeroShot:
    """Probabilities of K choices by a causal model's next token after a question that lists them by letters.

    Every choice stands in every place once: the mean over all rotations of their order does not depend on the letters
    that the model likes. Choices may have several tokens, and begin alike.

    Raises:
        UnsupportedError: No causal model, more choices than letters, or letters of several tokens.
    """

    def __init__(self, encoder: Encoder, choices: Sequence[Any], question: str) -> None:
        from laplace.integrations.transformers import answers

        if not is_causal(encoder.model) or encoder.tokenizer is None:
            raise UnsupportedError("the model writes no text, so that it has no answers of its own: fit labels first.")
        if len(choices) > len(_MARKS):
            raise UnsupportedError(
                f"{len(choices)} choices; a model is asked for {len(_MARKS)} at most without labels."
            )
        self.encoder, self.choices, self.question = encoder, [str(choice) for choice in choices], question
        marks = _MARKS[: len(choices)]
        spaced = [encoder.tokenizer.encode(f" {mark}", add_special_tokens=False) for mark in marks]
        plain = [encoder.tokenizer.encode(mark, add_special_tokens=False) for mark in marks]
        tokens = next((some for some in (spaced, plain) if all(len(one) == 1 for one in some)), None)
        if tokens is None:
            raise UnsupportedError("the tokenizer has no single tokens for the letters A, B, …: fit labels first.")
        model: Any = encoder.model
        self.answers = answers(model, encoder.tokenizer, [one[0] for one in tokens])

    def log_probabilities(self, texts: Sequence[str]) -> Tensor:
        """Logarithm of the mean over rotations, `[B, K]`, float64."""
        n = len(self.choices)
        turns = [[(k + turn) % n for k in range(n)] for turn in range(n)]
        total = torch.zeros(len(texts), n, dtype=wide_dtype())
        for order in turns:
            prompts = [self.prompt(text, order) for text in texts]
            total[:, order] += torch.cat(list(self._asked(prompts))).softmax(1) / n
        return total.clamp(min=torch.finfo(total.dtype).tiny).log()

    def prompt(self, text: str, order: Sequence[int]) -> str:
        """The text, the question, and the choices in an order."""
        listed = "\n".join(f"{_MARKS[place]}. {self.choices[k]}" for place, k in enumerate(order))
        return "\n\n".join(part for part in (text, self.question) if part) + f"\n{listed}\nAnswer:"

    def _asked(self, prompts: list[str]) -> Iterator[Tensor]:
        encoder = self.encoder
        device = _device_of(self.answers.model)
        with evaluated(encoder.modules()), torch.no_grad():
            for i in range(0, len(prompts), encoder.batch_size):
                batch = encoder.padded(encoder.tokens(prompts[i : i + encoder.batch_size], to_the_end=True))
                yield self.answers({name: value.to(device) for name, value in batch.items()}).cpu().to(wide_dtype())
