"""Notices that a network was changed after `fit`, without a copy of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from laplace.errors import ModelChangedError
from laplace.lending import undisturbed

_PERIOD = 4096
"""Entries are weighed by their place modulo this number, so that no tensor is copied."""


@dataclass(frozen=True)
class Fingerprint:
    """Versions and checksums of a model's tensors.

    Versions and norms are compared first, at the cost of reading the weights once; only if one of them differs are
    the checksums. The norms notice what autograd does not count: writes through `.data`.

    Attributes:
        places: Device and dtype of every tensor.
        versions: Identity and version of every tensor; only good within one process.
        norms: Norms of the floating-point tensors, per device.
        sums: Two weighted sums of every tensor, float64, `[n, 2]`.
    """

    places: tuple[tuple[torch.device, torch.dtype], ...]
    versions: tuple[tuple[int, int], ...]
    norms: tuple[Tensor, ...]
    sums: Tensor

    @classmethod
    def of(cls, model: nn.Module) -> Fingerprint:
        """The fingerprint of a model's present tensors."""
        with undisturbed(model):
            return cls(_places(model), _versions(model), _norms(model), checksums(model))

    def check(self, model: nn.Module) -> Fingerprint:
        """This fingerprint, or an equal one with new versions.

        Raises:
            ModelChangedError: The tensors differ, or were moved.
        """
        with undisturbed(model):
            return self._checked(model)

    def _checked(self, model: nn.Module) -> Fingerprint:
        versions, norms = _versions(model), _norms(model)
        if versions == self.versions and _equal(norms, self.norms):
            return self
        if _places(model) != self.places:
            raise ModelChangedError(
                "the network was moved to another device or dtype after fit, and the posterior was not; move both by "
                "la.to(device=..., dtype=...), or call fit again."
            )
        if not same_sums(checksums(model), self.sums):
            raise ModelChangedError(
                "the network's weights or buffers changed after fit (a call in training mode writes the running "
                "statistics of BatchNorm), so its predictions do not belong to this posterior any more; call fit "
                "again, or load the weights and buffers at which it was fitted."
            )
        return replace(self, versions=versions, norms=norms)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _versions(model: nn.Module) -> tuple[tuple[int, int], ...]:
    return tuple((id(t), 0 if t.is_inference() else t._version) for t in _tensors(model))


def _places(model: nn.Module) -> tuple[tuple[torch.device, torch.dtype], ...]:
    return tuple((t.device, t.dtype) for t in _tensors(model))


def _norms(model: nn.Module) -> tuple[Tensor, ...]:
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in _tensors(model):
        if tensor.is_floating_point():
            by_device.setdefault(tensor.device, []).append(tensor.detach())
    return tuple(torch.stack(torch._foreach_norm(tensors)) for tensors in by_device.values())


def _equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y.to(x.device)) for x, y in zip(a, b, strict=True))


def checksums(model: nn.Module) -> Tensor:
    """Two weighted sums per tensor, `[n, 2]`, float64 on the CPU."""
    with torch.no_grad(), undisturbed(model):
        rows = [_sums(tensor) for tensor in _tensors(model)]
    return torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.float64)


def _sums(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    whole = flat.numel() // _PERIOD * _PERIOD
    columns = flat[:whole].view(-1, _PERIOD).sum(0, dtype=torch.float64)
    rest = flat[whole:].double()
    columns[: len(rest)] += rest
    places = torch.arange(1, _PERIOD + 1, device=flat.device, dtype=torch.float64)
    return torch.stack([columns.sum(), columns @ torch.cos(places)]).cpu()


def same_sums(a: Tensor, b: Tensor) -> bool:
    """Whether two checksums agree up to the order of float64 sums."""
    return a.shape == b.shape and bool(torch.allclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True))
