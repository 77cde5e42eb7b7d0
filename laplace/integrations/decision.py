"""Typed decisions with few labels: a head on a frozen model, with probabilities that hold.

    head = decision(model, tokenizer, ["negative", "positive"])
    head.fit(texts, labels)                       # 60 labels will do; no other data are needed
    probabilities = head(texts)

The features of the data are computed once. On standardised features, whose directions count as the data vary in them
(`FeatureBasis`), heads of eight weight decays are found, each at its own mode, with the posterior there; the decay is
chosen by the leave-one-out log density, and what predicts is a mixture over temperatures T and scales c of the
covariance, weighted by stacking of left-out predictions (`FittedHead`). No label is held out.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Generator, Tensor, nn

from laplace.core import lazy, nested
from laplace.core.arguments import check_counts
from laplace.core.precision_policy import wide_dtype, widened
from laplace.errors import (
    DataWarning,
    InvalidArgument,
    InvalidData,
    InvalidType,
    NotFittedError,
    StateError,
    UnsupportedError,
    warn,
)
from laplace.integrations.encoder import POOLS, Encoder, ZeroShot, are_texts, inputs_of
from laplace.integrations.fitted_head import FittedHead
from laplace.parametric import ParametricLaplace
from laplace.predictive.prediction import Prediction

if TYPE_CHECKING:
    from laplace.integrations.sklearn import DecisionHead

    __all__ = ["Decision", "DecisionHead", "Threshold", "decision", "load"]

__getattr__, __dir__ = lazy.attached(
    __name__, lazy.lazy_names("laplace.integrations.sklearn", "DecisionHead"), lambda name: False
)

LEAST_LABELS = 10
"""Labels from which a head is fitted."""

MOST_CHOICES = 100

_FORMAT = "laplace decision 1"


def decision(
    model: nn.Module | None,
    tokenizer: Any,
    choices: Sequence[Any] | None,
    *,
    pool: str | None = None,
    question: str = "",
    class_weight: str | Mapping[Any, float] | Sequence[float] | None = None,
    batch_size: int = 32,
    max_length: int | None = None,
) -> Decision:
    """A decision between choices, or a rating, by a head on a frozen model.

    Args:
        model: A model of transformers, causal or encoder, also with adapters; any module whose forward pass returns
            features `[B, D]`, or `[B, T, D]`; or None where inputs are features `[N, D]`. It is not changed.
        tokenizer: The model's tokenizer, for texts; else None.
        choices: The K answers, 2 to 100 of them; None for a regression of ratings.
        pool: Which hidden state is the feature of a text: `"last"`, of its last token, or `"mean"`; None for the last
            one of models that write, and the mean of others.
        question: What is asked of every text. It follows the text, in what the model reads.
        class_weight: How often data of every choice count: K numbers, a mapping from choices, `"balanced"` for equal
            sums over the labels that there are, or None for once each.
        batch_size: Texts that the model reads at once.
        max_length: Tokens of a text, with the question, that are read; None for as many as the model can. Of a long
            text they are the first ones, and the question.

    Raises:
        InvalidArgument: Choices that are fewer than two, more than 100 or equal, another pool, or weights that are not
            accepted.
        InvalidType: The model is no module.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise InvalidType(f"model is a {type(model).__name__}; a module is accepted, or None for features.")
    if pool is not None and pool not in POOLS:
        raise InvalidArgument(f"pool={pool!r}; accepted are {POOLS}, or None.")
    check_counts(batch_size=batch_size, **({} if max_length is None else {"max_length": max_length}))
    own = None if choices is None else _checked_choices(choices)
    _class_weights(class_weight, own, None)
    encoder = Encoder(model, tokenizer, pool, batch_size, max_length, f"\n\n{question}" if question else "")
    return Decision(encoder, own, question, class_weight)


def load(path: str | os.PathLike[str], model: nn.Module | None = None, tokenizer: Any = None) -> Decision:
    """The decision that `head.save` wrote, given the same model and tokenizer.

    Raises:
        FileNotFoundError: There is no such file.
        MissingDependency: safetensors is not installed.
        StateError: The file is damaged, or nothing that `head.save` wrote.
        ModelChangedError: At the first prediction, of another model or tokenizer.
    """
    saved = nested.read(path)
    if not isinstance(saved, Mapping) or saved.get("format") != _FORMAT:
        raise StateError(f"{os.fspath(path)!r} holds no decision; laplace.load reads posteriors.")
    head = decision(model, tokenizer, saved["choices"], **saved["options"])
    if saved["probe"] is not None and model is None:
        raise InvalidArgument("the decision was saved with a model; give it: load(path, model, tokenizer).")
    head._fitted = FittedHead.from_state(saved["fitted"])
    head._probe = None if saved["probe"] is None else (saved["probe"][0], saved["probe"][1])
    return head


class Decision:
    """What `decision` returns.

    Attributes:
        choices: The K answers; None of a rating.
    """

    def __init__(self, encoder: Encoder, choices: tuple[Any, ...] | None, question: str, class_weight: Any) -> None:
        self.choices = choices
        self._encoder, self._question, self._class_weight = encoder, question, class_weight
        self._fitted: FittedHead | None = None
        self._probe: tuple[Any, Tensor] | None = None

    # The model, which may be replaced by an equal one: another one is noticed.

    @property
    def model(self) -> nn.Module | None:
        """The frozen model; None of features."""
        return self._encoder.model

    @model.setter
    def model(self, model: nn.Module | None) -> None:
        self._encoder.model = model

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self._encoder.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._encoder.tokenizer = tokenizer

    def features(self, inputs: Any) -> Tensor:
        """What the head sees of inputs, `[N, D]`: the inputs of `head.la`.

        Args:
            inputs: Texts; batches, as a loader or a list of tensors or mappings gives them; a tensor or a mapping of
                tensors that the model takes; features `[N, D]` of a decision without a model.

        Raises:
            InvalidData: Empty texts, or features that are not finite or of another shape.
            ModelChangedError: Model or tokenizer are not those of the fit.
        """
        self._encoder.require_same(self._probe)
        return self._encoder.features(self._asked(_as_array(inputs)))

    def _asked(self, inputs: Any) -> Any:
        """Inputs with the question after every text, those of batches, too."""
        if not self._question or isinstance(inputs, Tensor | Mapping):
            return inputs
        if are_texts(inputs):
            _require_filled(inputs)
            return [f"{text}{self._encoder.end}" for text in inputs]
        if self.model is None or isinstance(inputs, np.ndarray):
            return inputs
        each = (inputs_of(batch) for batch in inputs)
        return (self._asked(x) if not isinstance(x, str) and are_texts(x) else x for x in each)

    # Fit.

    def fit(self, inputs: Any, labels: Any = None) -> Decision:
        """Fits the head, and chooses all that predicts, by these data alone; a former fit is replaced.

        Args:
            inputs: As in `features`.
            labels: One of the choices for every input, or its index `[N]`; of ratings numbers `[N]`. None where
                batches hold them: pairs `(x, labels)`, or mappings with `"labels"`.

        Raises:
            InvalidData: Labels that are no choices or no numbers, of another number than the inputs, all the same, or
                fewer than 10, of a model that has no answers of its own.
            UnsupportedError: No labels, of a model that has no answers of its own.

        Warns:
            DataWarning: Choices without a label; fewer than 10 labels, in the place of which the model's own answers
                stay.
        """
        inputs = _as_array(inputs)
        if not isinstance(inputs, Tensor | np.ndarray | Mapping) and not are_texts(inputs):
            if not hasattr(inputs, "__iter__"):
                raise InvalidData(
                    f"inputs are of type {type(inputs).__name__}; texts, batches or features are accepted."
                )
            inputs = list(inputs)
        labels = _labels_of(inputs) if labels is None else labels
        targets = _numbers(labels) if self.choices is None else _indices(labels, self.choices)
        if len(targets) < LEAST_LABELS and self.choices is not None and are_texts(inputs):
            self._zero_shot()  # or says what is missing
            warn(
                f"{len(targets)} labels are fewer than {LEAST_LABELS}: the model's own answers stay, without a head.",
                DataWarning,
            )
            self._fitted = self._probe = None
            return self
        if len(targets) < LEAST_LABELS:
            raise InvalidData(f"{len(targets)} labels; give {LEAST_LABELS} or more.")
        features = self._encoder.features(self._asked(inputs))
        if len(features) != len(targets):
            raise InvalidData(f"{len(features)} inputs and {len(targets)} labels; give one label for every input.")
        fitted = self._fit(features.clone(), targets)  # `la` reads them later: they are no tensor of the user's
        self._probe, self._fitted = self._encoder.probe(self._asked(inputs)), fitted
        return self

    def _fit(self, features: Tensor, targets: Tensor) -> FittedHead:
        if self.choices is None:
            if bool((targets == targets[0]).all()):
                raise InvalidData(f"all ratings are {float(targets[0]):g}; nothing can be learnt from them.")
            return FittedHead.of_numbers(features, targets)
        counts = torch.bincount(targets, minlength=len(self.choices))
        if int((counts > 0).sum()) == 1:
            raise InvalidData(
                f"all {len(targets)} labels are {self.choices[int(targets[0])]!r}; give labels of two choices or more."
            )
        fitted = FittedHead.of_classes(
            features, targets, len(self.choices), _class_weights(self._class_weight, self.choices, counts)
        )
        missing = [choice for choice, count in zip(self.choices, counts.tolist(), strict=True) if not count]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            warn(
                f"no label is {', '.join(map(repr, missing[:3]))}{more}: their probabilities are guesses, about those "
                f"of one label in {len(targets)}.",
                DataWarning,
            )
        return fitted

    # Predictions.

    def __call__(self, inputs: Any) -> Any:
        """Probabilities of the choices, `[N, K]`; of ratings mean and variance, noise included, `[N, 1]` each.

        Without a fit they are a language model's own: its next token after the text, the question and the choices by
        letters, averaged over all rotations of their order.

        Raises:
            NotFittedError: Before `fit`, of a model that has no answers of its own.
            InvalidData: As in `features`.
            ModelChangedError: Model or tokenizer are not those of the fit.
        """
        if self._fitted is None:
            return self._own_answers(inputs).exp()
        features = self.features(inputs)
        found = self._fitted.call(features)
        if isinstance(found, tuple):
            return tuple(part.to(features.dtype) for part in found)
        return found.to(features.dtype)

    def predict(self, inputs: Any, *, n_samples: int = 100, generator: Generator | None = None) -> Prediction:
        """The same as an object with all that follows: entropies, mutual information, intervals, samples.

        Args:
            inputs: As in `features`.
            n_samples: Samples of what is drawn.
            generator: Source of randomness of what is drawn.

        Raises:
            NotFittedError: Before `fit`.
        """
        return self.fitted.predict(self.features(inputs), n_samples, generator)

    def choose(self, inputs: Any, threshold: Threshold | float = 0.0) -> list[Any]:
        """The most probable choice for every input, or None where its probability is below a threshold: pass it on."""
        if self.choices is None:
            raise UnsupportedError("choose of a rating; its mean and variance are head(inputs).")
        confidence, index = self(inputs).max(1)
        answered = confidence >= float(threshold)
        return [self.choices[k] if known else None for k, known in zip(index.tolist(), answered.tolist(), strict=True)]

    def _own_answers(self, inputs: Any) -> Tensor:
        try:
            zero_shot = self._zero_shot()
        except UnsupportedError as error:
            raise NotFittedError(f"the decision has no labels yet, call head.fit(inputs, labels): {error}") from error
        if not are_texts(inputs):
            raise NotFittedError("before head.fit(inputs, labels) the model answers texts alone.")
        _require_filled(inputs)
        return zero_shot.log_probabilities(list(inputs))

    def _zero_shot(self) -> ZeroShot:
        if self.choices is None:
            raise UnsupportedError("ratings have no choices that a model could answer with.")
        return ZeroShot(self._encoder, self.choices, self._question)

    # What the fit knows.

    @property
    def is_fitted(self) -> bool:
        """False before `fit`, and while the model's own answers stand in for a head."""
        return self._fitted is not None

    @property
    def fitted(self) -> FittedHead:
        """Weights, posterior, stack and left-out predictions.

        Raises:
            NotFittedError: Before `fit`.
        """
        if self._fitted is None:
            raise NotFittedError(
                f"the decision has no head yet: call head.fit(inputs, labels), {LEAST_LABELS} or more."
            )
        return self._fitted

    @property
    def la(self) -> ParametricLaplace:
        """The head's posterior at temperature 1, for all else: `laplace.acquire(head.la, head.features(x), 5)`.

        Its inputs are features. With more than 5,000 data × choices its curvature has Kronecker factors; predictions of
        the decision itself are exact for any number.

        Raises:
            NotFittedError: Before `fit`.
        """
        return self.fitted.la

    def threshold(self, risk: float, confidence: float = 0.9, *, inputs: Any = None, labels: Any = None) -> Threshold:
        """The least probability at which answers are wrong with a share of at most `risk`: below it, pass on.

        Learn then test (Angelopoulos et al., 2021): from the surest down, thresholds are tested in turn by the binomial
        tail of wrong answers, until one cannot be certified any more; the last that was is returned.

        Args:
            risk: Share of wrong answers among those that are given.
            confidence: Probability, over data, that the share is at most `risk`.
            inputs: Held-out data; None for the data of the fit, each left out.
            labels: Their labels.

        Raises:
            InvalidArgument: Numbers outside of (0, 1).
            NotFittedError: Before `fit`.
            UnsupportedError: A regression.
        """
        for name, value in {"risk": risk, "confidence": confidence}.items():
            if not 0 < value < 1:
                raise InvalidArgument(f"{name}={value}; it must lie in (0, 1).")
        fitted = self.fitted
        if self.choices is None:
            raise UnsupportedError("threshold of a rating; intervals are head.predict(inputs).interval(0.9).")
        if inputs is None:
            probabilities, targets = fitted.left_out_probabilities(), fitted.targets
            guarantee = (
                "approximate: the data of the fit, each left out by one Newton step, chose the weight decay and the "
                "stack, too"
            )
        else:
            probabilities, targets = self(inputs), _indices(labels, self.choices)
            if len(probabilities) != len(targets):
                raise InvalidData(
                    f"{len(probabilities)} inputs and {len(targets)} labels; give one label for every input."
                )
            guarantee = "exact for data like the held-out ones, which had no part in the fit"
        return _certified(probabilities, targets, risk, confidence, guarantee)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves head and posterior to a safetensors file, without weights of the model: `load(path, model, tokenizer)`.

        The file holds features and labels of the data, and two of the inputs, by which the model is known again.

        Raises:
            NotFittedError: Before `fit`.
            UnsupportedError: Choices that are neither texts nor numbers.
            MissingDependency: safetensors is not installed.
        """
        encoder, choices = self._encoder, self.choices
        if choices is not None and not all(isinstance(choice, str | int | float) for choice in choices):
            raise UnsupportedError("head.save with choices that are neither texts nor numbers.")
        weight = self._class_weight
        weight = weight if isinstance(weight, str) else _class_weights(weight, choices, None)
        options = {
            "pool": encoder.pool,
            "question": self._question,
            "class_weight": list(weight) if isinstance(weight, tuple) else weight,
            "batch_size": encoder.batch_size,
            "max_length": encoder.max_length,
        }
        probe = None if self._probe is None else list(self._probe)
        nested.write(
            path,
            {
                "format": _FORMAT,
                "choices": None if choices is None else list(choices),
                "options": options,
                "fitted": self.fitted.state(),
                "probe": probe,
            },
        )

    def __repr__(self) -> str:
        """Choices, number of labels, and what was chosen."""
        what = "rating" if self.choices is None else f"{len(self.choices)} choices"
        if self._fitted is None:
            return f"Decision({what}, no labels)"
        return f"Decision({what}, {len(self._fitted.targets)} labels, weight decay {self._fitted.head.decay:.3g})"


# Answer or pass on.


@dataclass(frozen=True)
class Threshold:
    """The least probability of the most probable choice at which a decision answers.

    Attributes:
        value: The threshold; infinite where none could be certified, so that everything is passed on.
        risk, confidence: As they were asked for.
        coverage: Share of the data that decided which is answered.
        n_data: Number of these data.
        guarantee: In which sense the risk holds.
    """

    value: float
    risk: float
    confidence: float
    coverage: float
    n_data: int
    guarantee: str

    def __float__(self) -> float:
        """The threshold itself."""
        return self.value

    def answers(self, probabilities: Tensor) -> Tensor:
        """Whether each of `[B, K]` is answered, `[B]`."""
        return probabilities.amax(1) >= self.value


def _certified(probabilities: Tensor, targets: Tensor, risk: float, confidence: float, guarantee: str) -> Threshold:
    """The last threshold of a sequence, from the surest down, at which the binomial test rejects a larger risk.

    The order is fixed, so that every test has the whole level. The first is of as many answers as can be certified with
    one wrong among them; of few data, with none.
    """
    confidences, index = widened(probabilities).max(1)
    order = confidences.argsort(descending=True, stable=True)
    wrong = widened((index != targets)[order]).cumsum(0)
    ranked, n_data, level, answered = confidences[order], len(order), 1 - confidence, 0
    firsts = [_least_answers(allowed, risk, level, n_data) for allowed in (1, 0)]
    for n in range(next((first for first in firsts if first <= n_data), n_data + 1), n_data + 1):
        if n < n_data and ranked[n] == ranked[n - 1]:
            continue  # answered together
        if _binomial_tail(int(wrong[n - 1]), n, risk) > level:
            break
        answered = n
    value = float(ranked[answered - 1]) if answered else math.inf
    return Threshold(value, risk, confidence, answered / n_data, n_data, guarantee)


def _least_answers(allowed: int, risk: float, level: float, most: int) -> int:
    """The least number of answers of which so many wrong ones reject a larger risk at a level; `most + 1` if above."""
    none = math.ceil(math.log(level) / math.log1p(-risk))
    return next((n for n in range(max(none, 1), most + 1) if _binomial_tail(allowed, n, risk) <= level), most + 1)


def _binomial_tail(k: int, n: int, rate: float) -> float:
    """P(X ≤ k) of a binomial X."""
    logs = [
        math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)
        + i * math.log(rate) + (n - i) * math.log1p(-rate) for i in range(k + 1)
    ]  # fmt: skip
    return math.fsum(math.exp(value) for value in logs)


# Labels and choices as they are given.


def _checked_choices(choices: Any) -> tuple[Any, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence | np.ndarray | Tensor):
        raise InvalidArgument(f"choices={choices!r}; a list of two or more is accepted: choices=['no', 'yes'].")
    own = tuple(_plain(choices))
    if not all(map(_is_key, own)):
        raise InvalidArgument(f"choices={choices!r}; texts, numbers or other values with a hash are accepted.")
    if not 2 <= len(own) <= MOST_CHOICES:
        raise InvalidArgument(f"{len(own)} choices; 2 to {MOST_CHOICES} are accepted.")
    twice = [choice for choice, count in Counter(own).items() if count > 1]
    if twice:
        raise InvalidArgument(f"choices hold {twice[0]!r} twice; give every choice once.")
    return own


def _labels_of(inputs: Any) -> Any:
    """Labels that batches hold."""
    if isinstance(inputs, Mapping) and "labels" in inputs:
        return inputs["labels"]
    found: list[Any] = []
    for batch in inputs if isinstance(inputs, list) else []:
        if isinstance(batch, Mapping) and "labels" in batch:
            found.extend(_plain(batch["labels"]))
        elif isinstance(batch, tuple | list) and len(batch) == 2 and not are_texts(batch):
            found.extend(_plain(batch[1]))
        else:
            raise InvalidData("a batch holds no labels; give pairs (x, labels), mappings with 'labels', or labels=.")
    if not found:
        raise InvalidData("there are no labels: head.fit(inputs, labels).")
    return found


def _as_array(inputs: Any) -> Any:
    """Frames and series of pandas as arrays, other inputs as they are."""
    return inputs.to_numpy() if callable(getattr(inputs, "to_numpy", None)) else inputs


def _plain(labels: Any) -> list[Any]:
    """Labels as Python's own values."""
    if isinstance(labels, Tensor | np.ndarray):
        labels = labels.tolist()
    if isinstance(labels, str) or not hasattr(labels, "__iter__"):
        raise InvalidData(f"labels are {labels!r}; one for every input is accepted.")
    return [label.item() if isinstance(label, Tensor | np.generic) else label for label in labels]


def _indices(labels: Any, choices: tuple[Any, ...]) -> Tensor:
    """Indices of labels among the choices, `[N]`: choices themselves, or, where these are no numbers, their indices."""
    place = {choice: k for k, choice in enumerate(choices)}
    if not any(isinstance(choice, int | float) for choice in choices):
        place |= {k: k for k in range(len(choices))}
    given = _plain(labels)
    rows = [label for label in given if isinstance(label, list | np.ndarray)]
    if rows:
        how = ".reshape(-1)" if len(rows[0]) == 1 else ".argmax(1)"
        raise InvalidData(
            f"labels of shape {[len(given), *np.shape(rows[0])]}; one for every input, [N], is accepted, a choice or "
            f"its index: np.asarray(labels){how}."
        )
    unknown = [
        label
        for label in given
        if not _is_key(label) or label not in place or (isinstance(label, bool) and label not in choices)
    ]
    if unknown:
        some = ", ".join(map(repr, dict.fromkeys(map(str, unknown[:3]))))
        raise InvalidData(
            f"{len(unknown)} labels are none of the choices, e.g. {some}; accepted are {list(choices)[:10]}."
        )
    return torch.tensor([place[label] for label in given], dtype=torch.int64)


def _is_key(label: Any) -> bool:
    return label.__hash__ is not None


def _numbers(labels: Any) -> Tensor:
    """Ratings `[N]`, float64."""
    try:
        found = torch.tensor(_plain(labels), dtype=wide_dtype())
    except (TypeError, ValueError) as error:
        raise InvalidData("ratings are numbers [N]; give choices= for labels of other kinds.") from error
    found = found.squeeze(1) if found.ndim == 2 and found.shape[1] == 1 else found
    if found.ndim != 1:
        raise InvalidData(f"ratings of shape {list(found.shape)}; one for every input, [N], is accepted.")
    unknown = (~found.isfinite()).nonzero().flatten().tolist()
    if unknown:
        raise InvalidData(
            f"{len(unknown)} ratings are not finite, the first is {float(found[unknown[0]])} of input {unknown[0]}; "
            "leave these inputs out."
        )
    return found


def _class_weights(given: Any, choices: tuple[Any, ...] | None, counts: Tensor | None) -> tuple[float, ...] | None:
    """A weight for every choice; None for 1. Those that balance depend on the counts of the labels, `[K]`."""
    if given is None:
        return None
    if choices is None:
        raise InvalidArgument("class_weight of a rating, which has no classes; leave it out.")
    if isinstance(given, str):
        if given != "balanced":
            raise InvalidArgument(f"class_weight={given!r}; 'balanced', K numbers or a mapping are accepted.")
        if counts is None:
            return None
        there = int((counts > 0).sum())
        return tuple(float(counts.sum()) / (there * count) if count else 1.0 for count in counts.tolist())
    if isinstance(given, Mapping):
        unknown = [choice for choice in given if choice not in choices]
        if unknown:
            raise InvalidArgument(
                f"class_weight has {unknown[0]!r}, which is none of the choices {list(choices)[:10]}."
            )
        given = [given.get(choice, 1.0) for choice in choices]
    weights = tuple(float(weight) for weight in given)
    if len(weights) != len(choices) or not all(0 < weight < math.inf for weight in weights):
        raise InvalidArgument(f"class_weight={list(weights)}; {len(choices)} positive numbers are accepted.")
    return weights


def _require_filled(texts: Sequence[str]) -> None:
    empty = [i for i, text in enumerate(texts) if not text.strip()]
    if empty:
        raise InvalidData(f"{len(empty)} texts are empty, the first is text {empty[0]}; leave them out.")
