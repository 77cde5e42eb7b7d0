"""Layer rules: Jacobian blocks of a parameter from the input of a module and the gradient of its output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from laplace.core.registry import Registry
from laplace.jacobian.blocks import Block


class BatchAxis(ABC):
    """Dimension of the data among the leading ones of an activation.

    `LEADING` reads `(B, T, …)` and `(B·T, …)`, `TRAILING` reads `(T, B, …)` and `(T·B, …)`. Shapes cannot tell
    the two apart (T may equal B); the probe of `plan.py` does. `RoutedRows` know the datum of every row.

    Attributes:
        value: Name in the coverage report.
    """

    LEADING: ClassVar[BatchAxis]
    TRAILING: ClassVar[BatchAxis]
    value: str

    @abstractmethod
    def positions(self, tensor: Tensor, n_data: int, n_features: int, *, batched: bool = False) -> Tensor:
        """`[B, T, *features]` of an activation with `n_features` trailing dimensions.

        Args:
            tensor: The activation; with `batched`, under one more leading dimension [K].
            n_data: B.
            n_features: Number of trailing dimensions that are not data or positions.
            batched: True if a leading [K] is kept.
        """


class _Leading(BatchAxis):
    value = "batch first"

    def positions(self, tensor: Tensor, n_data: int, n_features: int, *, batched: bool = False) -> Tensor:
        lead, features = _around(tensor, n_features, batched=batched)
        return tensor.reshape(*lead, n_data, -1, *features)


class _Trailing(BatchAxis):
    value = "batch second"

    def positions(self, tensor: Tensor, n_data: int, n_features: int, *, batched: bool = False) -> Tensor:
        lead, features = _around(tensor, n_features, batched=batched)
        return tensor.reshape(*lead, -1, n_data, *features).transpose(len(lead), len(lead) + 1)


BatchAxis.LEADING, BatchAxis.TRAILING = _Leading(), _Trailing()


@dataclass(frozen=True, eq=False)
class RoutedRows(BatchAxis):
    """Rows that are no dimension of data: those of them that were sent to an expert, or a packed batch.

    Every datum gets T positions, as many as the one with most rows. Places without a row hold zeros, and −1 for
    indices.

    Attributes:
        place: Datum · T + position of every row, `[R]`, all different.
        present: Places that hold a row, `[B, T]`.
    """

    place: Tensor
    present: Tensor
    value = "routed rows"

    @classmethod
    def of(cls, datum: Tensor, n_data: int) -> RoutedRows:
        """The rows of some data, `[R]`, in their order."""
        counts = torch.bincount(datum, minlength=n_data)
        order = datum.argsort(stable=True)
        position = torch.empty_like(datum)
        position[order] = torch.arange(len(datum), device=datum.device) - (counts.cumsum(0) - counts)[datum[order]]
        width = max(1, int(counts.max()))
        return cls.at(datum * width + position, n_data, width)

    @classmethod
    def at(cls, place: Tensor, n_data: int, width: int) -> RoutedRows:
        """The rows of given places among T of every datum."""
        present = torch.zeros(n_data * width, dtype=torch.bool, device=place.device)
        return cls(place, present.index_fill(0, place, True).view(n_data, width))

    def positions(self, tensor: Tensor, n_data: int, n_features: int, *, batched: bool = False) -> Tensor:
        lead, features = _around(tensor, n_features, batched=batched)
        shape = *lead, n_data, self.present.shape[1], *features
        if tensor.is_meta:
            return tensor.new_empty(shape)
        rows = tensor.reshape(*lead, len(self.place), *features)
        nothing = rows.new_full((*lead, self.present.numel(), *features), 0 if rows.is_floating_point() else -1)
        return nothing.index_copy(len(lead), self.place, rows).view(shape)


def _around(tensor: Tensor, n_features: int, *, batched: bool) -> tuple[torch.Size, torch.Size]:
    """The dimensions before and after those of data and positions."""
    return tensor.shape[: int(batched)], tensor.shape[tensor.ndim - n_features :]


A = TypeVar("A")


class LayerRule(ABC, Generic[A]):
    """The Jacobian blocks of one family of layers, from activations of type A: mostly tensors.

    Attributes:
        parameters: Attribute names of the parameters that this rule explains.
        name: Name in the coverage report.
    """

    parameters: tuple[str, ...] = ("weight", "bias")
    name: str

    def accepts(self, module: nn.Module, x: Tensor) -> bool:
        """True if the rule holds for this module and input."""
        return True

    @abstractmethod
    def positions(self, module: nn.Module, x: Tensor, n_data: int) -> int:
        """Positions per datum in the leading dimensions of the input, 0 if they cannot hold `n_data` data."""

    @abstractmethod
    def activation(self, module: nn.Module, attribute: str, x: Tensor, n_data: int, axis: BatchAxis) -> A | None:
        """The part of the forward pass that the parameter's block needs; computed once for all cotangents."""

    @abstractmethod
    def block(self, module: nn.Module, attribute: str, a: A | None, g: Tensor, n_data: int, axis: BatchAxis) -> Block:
        """The block from the activation and the gradients `[K, *shape of the module's output]`."""


def evenly(total: int, n_data: int) -> int:
    """Positions per datum, 0 if the total is no multiple of the data."""
    return total // n_data if total % n_data == 0 else 0


RULES: Registry[LayerRule[Any]] = Registry("layer rule")
"""Rules by the qualified name of the module class they are for."""


def rule_for(module: nn.Module) -> LayerRule[Any] | None:
    """The rule of a module's class, or of the nearest base class that has one.

    A subclass may have another forward: whether the rule holds for it is for the probe to say.
    """
    return rule_of(type(module))


def rule_of(kind: type[nn.Module]) -> LayerRule[Any] | None:
    """The rule of a module class, or of the nearest base class that has one."""
    base = class_with_rule(kind)
    return None if base is None else RULES[_name(base)]


def class_with_rule(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class, or the nearest base class, that has a rule."""
    return next((base for base in kind.__mro__ if _name(base) in RULES), None)


def files(rule: LayerRule[Any], *kinds: type[nn.Module]) -> None:
    """Files one rule for several module classes, and for the classes that derive from them.

    Raises:
        InvalidArgument: A class has another rule of its own.
    """
    for kind in kinds:
        name = _name(kind)
        if name not in RULES or RULES[name] is not rule:
            RULES.register(name)(rule)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
