"""Weights of data: how often every datum counts, as users say it beside a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs, Weighed
from laplace.core.checks import require
from laplace.core.precision_policy import widened
from laplace.errors import InvalidArgument, InvalidData, InvalidType, MissingKey

WeightFn = Callable[[Inputs, Tensor], Any]
"""`weight_fn(x, y) -> [B]`, of inputs and targets as a loader gives them."""


@dataclass(frozen=True)
class DataWeights:
    """Weights of the data of a loader, by a function of each batch or by a key of its mapping.

    Attributes:
        name: How the user said it, for messages.
        function: `weight_fn(x, y)`, or None.
        key: Key of the weights, or None.
    """

    name: str
    function: WeightFn | None
    key: str | None

    @classmethod
    def of(cls, weight_fn: Any, dict_key_weight: Any) -> DataWeights | None:
        """The weights that the arguments of `fit` ask for; None if all weights are 1.

        Raises:
            InvalidArgument: Both are given.
            InvalidType: No function, or no string.
        """
        if weight_fn is None and dict_key_weight is None:
            return None
        if weight_fn is not None and dict_key_weight is not None:
            raise InvalidArgument(f"weight_fn= and dict_key_weight={dict_key_weight!r} are given; give one of them.")
        if weight_fn is None:
            if not isinstance(dict_key_weight, str):
                raise InvalidType(
                    f"dict_key_weight={dict_key_weight!r}; the key of the weights, a string, is accepted."
                )
            return cls(f"dict_key_weight={dict_key_weight!r}", None, dict_key_weight)
        if not callable(weight_fn):
            raise InvalidType(
                f"weight_fn is a {type(weight_fn).__name__}; a function is accepted: weight_fn=lambda x, y: ..., which "
                "returns a number for every datum, [B]."
            )
        return cls("weight_fn=", weight_fn, None)

    def loader(self, loader: Iterable[Any], dict_key_y: str) -> Iterable[Any]:
        """A loader whose batches know their weights."""
        return _WeighedLoader(self, loader, dict_key_y)

    def weighed(self, batch: Any, dict_key_y: str) -> Weighed:
        """A batch that knows its weights, which are computed when they are asked for; those of a key are taken out."""
        mapped = self.key is not None and batches.keys(batch) is not None
        rest = batches.without_key(batch, self.key) if mapped else batch
        return Weighed(rest, lambda: self._checked(batch, dict_key_y))

    def _checked(self, batch: Any, dict_key_y: str) -> Tensor:
        """Weights of a batch, `[B]`, float64.

        Raises:
            InvalidData: Another shape, negative weights, NaN or infinite ones.
            MissingKey: A batch without the key.
        """
        x, y = batches.split(batch, dict_key_y)
        given = self.function(x, y) if self.function is not None else self._under_key(batch)
        if not isinstance(given, Tensor):
            raise InvalidData(f"the weights of {self.name} are of type {type(given).__name__}; give a tensor [B].")
        if given.shape != y.shape[:1] or given.is_complex():
            raise InvalidData(
                f"the weights of {self.name} have shape {list(given.shape)} and dtype {given.dtype}; a real number for "
                f"every datum, {list(y.shape[:1])}, is accepted."
            )
        weights = widened(given.detach())
        require(
            (weights >= 0) & torch.isfinite(weights),
            lambda: InvalidData(
                f"the weights of {self.name} reach from {weights.min().item():.3g} to {weights.max().item():.3g}; they "
                "must be finite and at least 0."
            ),
        )
        return weights

    def _under_key(self, batch: Any) -> Any:
        """Weights under the key of a mapping.

        Raises:
            MissingKey: There are none.
        """
        keys = batches.keys(batch)
        if keys is not None and self.key in keys:
            return batch[self.key]
        form = "is no mapping" if keys is None else f"has the keys {keys}"
        raise MissingKey(f"{self.name}, but the batch {form}; give weight_fn=lambda x, y: ... instead.")


@dataclass(frozen=True, eq=False)
class _WeighedLoader:
    """The batches of a loader with their weights.

    Attributes:
        weights: Of the data.
        batches: The loader.
        dict_key_y: Key of the targets, for mappings.
    """

    weights: DataWeights
    batches: Iterable[Any]
    dict_key_y: str

    def __len__(self) -> int:
        return len(self.batches)  # pyright: ignore[reportArgumentType]  (a TypeError tells a progress bar of none)

    def __iter__(self) -> Iterator[Weighed]:
        return (self.weights.weighed(batch, self.dict_key_y) for batch in self.batches)
