"""Private names of laplace-torch that public code reads, in terms of what is public here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from laplace.core import overrides
from laplace.core.batch import Inputs

if TYPE_CHECKING:
    from laplace.compat.kronecker import Kron


class _Posterior(Protocol):
    """The public members that the names below stand for."""

    sigma_noise: Tensor
    temperature: Tensor
    prior_precision: Tensor
    asdl_fisher_kwargs: dict[str, Any]

    posterior_scale: Tensor

    def fitted(self) -> Any:
        """Curvature and loss of the data."""
        ...

    def restart_H(self) -> None:
        """Sets H alone to zero."""
        ...

    def curvature_of(self, x: Inputs, y: Tensor, n_data: int) -> tuple[Tensor, Any]:
        """Loss and curvature of a batch of N data."""
        ...

    def predictive_moments(
        self, x: Inputs, *, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the latent outputs."""
        ...

    def functional_samples(self, x: Inputs, *args: Any, **options: Any) -> Tensor:
        """Samples of the latent outputs."""
        ...

    def predictive_samples(self, x: Inputs, *args: Any, **options: Any) -> Tensor:
        """Samples of the target's mean."""
        ...


class LegacyMembers:
    """Members by the names that scripts written for laplace-torch use; a base of the class that users hold."""

    def _init_H(self: _Posterior) -> None:
        self.restart_H()

    def _curv_closure(self: _Posterior, X: Inputs, y: Tensor, N: int) -> tuple[Tensor, Any]:
        return self.curvature_of(X, y, N)

    def _check_H_init(self: _Posterior) -> None:
        self.fitted()

    @staticmethod
    def _rescale_factors(kron: Kron, factor: float) -> Kron:
        """Factors of which those on the input side, the last of two, are scaled."""
        return type(kron)([[*block[:-1], factor * block[-1]] if len(block) == 2 else block for block in kron.kfacs])

    @property
    def _posterior_scale(self: _Posterior) -> Tensor:
        return self.posterior_scale

    @_posterior_scale.setter
    def _posterior_scale(self: _Posterior, root: Tensor) -> None:
        self.posterior_scale = root

    def _glm_predictive_distribution(
        self: _Posterior, X: Inputs, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        return self.predictive_moments(X, joint=joint, diagonal_output=diagonal_output)

    def _nn_functional_samples(
        self: _Posterior, X: Inputs, n_samples: int = 100, generator: torch.Generator | None = None, **model_kwargs: Any
    ) -> Tensor:
        return self.functional_samples(X, "nn", n_samples, generator=generator, **model_kwargs)

    def _nn_predictive_samples(
        self: _Posterior, X: Inputs, n_samples: int = 100, generator: torch.Generator | None = None, **model_kwargs: Any
    ) -> Tensor:
        return self.predictive_samples(X, "nn", n_samples, generator=generator, **model_kwargs)

    @property
    def _H_factor(self: _Posterior) -> Tensor:
        """1/(σ²T): what the curvature of a GGN is multiplied with in the precision."""
        return 1 / (self.sigma_noise.square() * self.temperature)

    @property
    def _asdl_fisher_kwargs(self: _Posterior) -> dict[str, Any]:
        """Keyword arguments of ASDL: `{}` without any, so that they can be passed on to every backend."""
        return dict(self.asdl_fisher_kwargs)

    @property
    def _device(self: _Posterior) -> torch.device:
        return self.prior_precision.device

    @property
    def _dtype(self: _Posterior) -> torch.dtype:
        return self.prior_precision.dtype


overrides.check_class(LegacyMembers, LegacyMembers)
