"""Notices that a network was changed after `fit`, without a copy of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laplace.errors import ModelChangedError


@dataclass(frozen=True)
class Fingerprint:
    """Versions and checksums of a model's tensors.

    Versions are compared first, at no cost; only if autograd counted an in-place change are the checksums.

    Attributes:
        versions: Identity and version of every tensor; only good within one process.
        sums: Two weighted sums of every tensor, float64, `[n, 2]`.
    """

    versions: tuple[tuple[int, int], ...]
    sums: Tensor

    @classmethod
    def of(cls, model: nn.Module) -> Fingerprint:
        """The fingerprint of a model's present tensors."""
        return cls(_versions(model), checksums(model))

    def check(self, model: nn.Module) -> Fingerprint:
        """This fingerprint, or an equal one with new versions.

        Raises:
            ModelChangedError: The tensors differ.
        """
        versions = _versions(model)
        if versions == self.versions:
            return self
        if not same_sums(checksums(model), self.sums):
            raise ModelChangedError(
                "the network's weights changed after fit, so its predictions do not belong to this posterior any more; "
                "call fit again, or load the weights at which it was fitted."
            )
        return Fingerprint(versions, self.sums)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _versions(model: nn.Module) -> tuple[tuple[int, int], ...]:
    return tuple((id(t), 0 if t.is_inference() else t._version) for t in _tensors(model))


def checksums(model: nn.Module) -> Tensor:
    """Two weighted sums per tensor, `[n, 2]`, float64 on the CPU."""
    with torch.no_grad():
        rows = [_sums(tensor) for tensor in _tensors(model)]
    return torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.float64)


def _sums(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    flat = flat.double()
    places = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.float64)
    return torch.stack([flat.sum(), flat @ torch.cos(places)]).cpu()


def same_sums(a: Tensor, b: Tensor) -> bool:
    """Whether two checksums agree up to the order of float64 sums."""
    return a.shape == b.shape and bool(torch.allclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True))
