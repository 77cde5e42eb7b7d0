"""Accounts of a fit: what is fitted how, in values that other processes, and later ones, can compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from laplace.core.digest import digest
from laplace.network.fingerprint import checksums, same_sums
from laplace.posterior.posterior import Posterior


@dataclass(frozen=True, eq=False)
class Account:
    """A fit that is about to be made, without its data.

    Attributes:
        settings: Settings by name, as words.
        names: Names of the network's parameters and buffers.
        kinds: Their shapes and dtypes.
        sums: Checksums of them, `[n, 3]`.
        random: Name, shape and a digest of the random entries of every random tensor; none where they are unknown.
        layer: Name of the last layer, where one is random.
        channel_dim: Dimension of the channels, if it is known.
    """

    settings: Mapping[str, str]
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    sums: Tensor
    random: tuple[str, ...]
    layer: str | None
    channel_dim: int | None

    @classmethod
    def of(cls, posterior: Posterior, settings: Mapping[str, Any]) -> Account:
        """The account of a fit of data to a network.

        Args:
            posterior: The former posterior, with what the first batch tells.
            settings: What else all fits must have in common that are compared, by name.
        """
        choices, hypers = posterior.choices, posterior.hypers
        problem, model = posterior.weights.problem, posterior.weights.model
        said = {
            "likelihood": choices.likelihood_object.name,
            "attributes of the likelihood": _plain(vars(choices.likelihood_object)),
            "hessian_structure": choices.structure.name,
            "structure_kwargs": choices.structure_options,
            "backend": choices.backend_cls.__name__,
            "backend_kwargs": _plain(choices.backend_kwargs),
            "lengths of prior_precision and sigma_noise": (hypers.prior_precision.numel(), hypers.sigma_noise.numel()),
            **settings,
        }
        tensors = (*model.named_parameters(), *model.named_buffers())
        slots = () if problem is None else problem.slots
        entries = [None if slot.entries is None else digest([slot.entries]) for slot in slots]
        return cls(
            settings={name: repr(value) for name, value in said.items()},
            names=tuple(name for name, _ in tensors),
            kinds=tuple(f"{tuple(tensor.shape)} {tensor.dtype}" for _, tensor in tensors),
            sums=checksums(model, together=False),
            random=tuple(f"{s.name} {tuple(s.shape)} {own}" for s, own in zip(slots, entries, strict=True)),
            layer=None if problem is None else problem.head,
            channel_dim=choices.channel_dim,
        )

    def difference(self, other: Account, whose: str) -> tuple[str, str | None]:
        """Words for the first difference from another account, and the tensor that has other numbers; none if equal.

        Args:
            other: To compare with; what only data tell is left out.
            whose: Words for its owner.
        """
        for name, value in self.settings.items():
            if value != other.settings.get(name):
                return f"has {name} = {value}, {whose} {other.settings.get(name)}", None
        if (self.names, self.kinds) != (other.names, other.kinds):
            return f"has a network of other tensors than {whose} (names, shapes or dtypes)", None
        for i, name in enumerate(self.names):
            if not same_sums(self.sums[i : i + 1], other.sums[i : i + 1]):
                return f"has other numbers in {name!r} than {whose}", name
        return "", None


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and words by name, and digests of tensors; what cannot be compared is left out."""
    told = {name: digest([value]) if isinstance(value, Tensor) else value for name, value in sorted(values.items())}
    plain = (str, int, float, tuple, type(None))
    return {name: value for name, value in told.items() if isinstance(value, plain)}
