"""The flat parameter vector: which entries belong to which tensor, in `model.parameters()` order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from laplace.core.cached import cached_property
from laplace.errors import InvalidArgument


@dataclass(frozen=True)
class Layout:
    """Names and sizes of the random parameter tensors, concatenated into one vector `[P]`, row-major."""

    names: tuple[str, ...]  # qualified parameter names
    sizes: tuple[int, ...]  # number of random entries of each tensor

    @property
    def n_params(self) -> int:
        """P, the length of the vector."""
        return sum(self.sizes)

    @property
    def n_tensors(self) -> int:
        """Number of tensors ("layers" of a layerwise prior)."""
        return len(self.sizes)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Entries of each tensor in the vector."""
        ends = tuple(accumulate(self.sizes))
        return tuple(slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True))

    @cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the tensors of each module: neighbours whose names differ in the last part only."""
        owners = (name.rpartition(".")[0] for name in self.names)
        numbered = groupby(enumerate(owners), key=lambda pair: pair[1])
        return tuple(tuple(index for index, _ in run) for _, run in numbered)

    def split(self, vector: Tensor) -> tuple[Tensor, ...]:
        """Pieces `[..., p_i]` of a vector `[..., P]`."""
        return vector.split(list(self.sizes), dim=-1)

    def checked(self, vector: Tensor) -> Tensor:
        """A vector `[..., P]`; one number would be spread to all entries."""
        if vector.ndim == 0 or vector.shape[-1] != self.n_params:
            raise InvalidArgument(
                f"value has shape {list(vector.shape)}; it must be [..., P] with P = {self.n_params}."
            )
        return vector

    def repeat_per_tensor(self, values: Tensor) -> Tensor:
        """Spreads one value per tensor, `[n_tensors]`, over the entries of each, `[P]`."""
        return repeated(values, self.sizes)


def repeated(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """Every value `[n]` as often as its size says, one run after the other; its gradient is a sum over every run."""
    return torch.cat([value.expand(size) for value, size in zip(values.unbind(), sizes, strict=True)])


def flatten(tensors: Sequence[Tensor] | Mapping[str, Tensor]) -> Tensor:
    """Concatenates tensors, row-major, into one vector `[P]`."""
    values = tensors.values() if isinstance(tensors, Mapping) else tensors
    return torch.cat([tensor.reshape(-1) for tensor in values])


def linked(keys: Sequence[Collection[str]]) -> tuple[tuple[int, ...], ...]:
    """Tensors that are linked by keys that they have in common, directly or by way of others."""
    groups = list(range(len(keys)))  # the group of every tensor
    first: dict[str, int] = {}  # the first tensor that has a key
    for i, own in enumerate(keys):
        for key in own:
            theirs, mine = groups[first.setdefault(key, i)], groups[i]
            if theirs != mine:
                groups = [theirs if group == mine else group for group in groups]
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    return tuple(sorted(tuple(each) for each in members.values()))
