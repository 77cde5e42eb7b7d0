"""Subnetwork masks that keep the n parameters with the largest score."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from laplace.core.precision_policy import wide_dtype
from laplace.enums import Likelihood, LikelihoodName
from laplace.errors import InvalidArgument
from laplace.likelihoods import Likelihood as LikelihoodObject
from laplace.likelihoods import get_likelihood
from laplace.weights.masks import SubnetMask, require_loader
from laplace.weights.swag import MeanLoss, fit_diagonal_swag_var


class VarianceModel(Protocol):
    """The part of a diagonal Laplace approximation that `LargestVarianceDiagLaplaceSubnetMask` needs."""

    def fit(self, train_loader: Iterable[Any]) -> object:
        """Fits the posterior."""
        ...

    @property
    def posterior_variance(self) -> Tensor:
        """Marginal variances of the trainable parameters, `[P]`."""
        ...


class ScoreBasedSubnetMask(SubnetMask):
    """Base of the masks that select the weights with the largest scores; among equal scores the first.

    Args:
        model: The network; it is not changed.
        n_params_subnet: n, the number of weights to select, from 1 to P.

    Raises:
        InvalidArgument: n is None or out of range.
    """

    def __init__(self, model: nn.Module, n_params_subnet: int) -> None:
        super().__init__(model)
        if not isinstance(n_params_subnet, int) or not 1 <= n_params_subnet <= self._n_params:
            raise InvalidArgument(
                f"n_params_subnet={n_params_subnet!r}; accepted is an integer from 1 to {self._n_params}, the number "
                "of trainable parameters."
            )
        self._n_kept = n_params_subnet

    def get_subnet_mask(self, train_loader: Iterable[Any] | None) -> Tensor:
        """The mask `[P]` of the n largest scores, boolean.

        Raises:
            InvalidArgument: The scores are not one number per trainable parameter.
        """
        scores = self.compute_param_scores(train_loader)
        bad = bool(scores.isnan().any())
        if bad or scores.shape != self.parameter_vector.shape:
            raise InvalidArgument(
                f"{type(self).__name__} made scores of shape {list(scores.shape)}{' with NaN' * bad}; one number per "
                f"trainable parameter, [{self._n_params}], is needed."
            )
        mask = torch.zeros_like(scores, dtype=torch.bool)
        mask[scores.argsort(descending=True, stable=True)[: self._n_kept]] = True
        return mask

    @abstractmethod
    def compute_param_scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        """Scores of the trainable parameters, `[P]`."""


class RandomSubnetMask(ScoreBasedSubnetMask):
    """Selects n weights at random.

    Args:
        model: The network.
        n_params_subnet: n, the number of weights to select.
        generator: Random generator; None for PyTorch's global one.
    """

    def __init__(self, model: nn.Module, n_params_subnet: int, generator: torch.Generator | None = None) -> None:
        super().__init__(model, n_params_subnet)
        self._generator = generator

    def compute_param_scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        """Uniform numbers `[P]`."""
        device = self.parameter_vector.device if self._generator is None else self._generator.device
        # float64: among many float32 numbers there are equal ones, and a tie prefers the first parameter.
        scores = torch.rand(self._n_params, generator=self._generator, device=device, dtype=wide_dtype(device))
        return scores.to(self.parameter_vector.device)


class LargestMagnitudeSubnetMask(ScoreBasedSubnetMask):
    """Selects the weights with the largest absolute values."""

    def compute_param_scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        """|θ|, `[P]`."""
        return self.parameter_vector.abs()


class LargestVarianceDiagLaplaceSubnetMask(ScoreBasedSubnetMask):
    """Selects the weights with the largest posterior variance under a diagonal Laplace approximation.

    After Daxberger et al., "Bayesian Deep Learning via Subnetwork Inference" (2021).

    Args:
        model: The network.
        n_params_subnet: n, the number of weights to select.
        diag_laplace_model: A `DiagLaplace` of the same network; it is fitted by `select`.
    """

    def __init__(self, model: nn.Module, n_params_subnet: int, diag_laplace_model: VarianceModel) -> None:
        super().__init__(model, n_params_subnet)
        self.diag_laplace_model = diag_laplace_model

    def compute_param_scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        """Posterior variances, `[P]`.

        Raises:
            InvalidArgument: No loader is given.
        """
        self.diag_laplace_model.fit(require_loader(self, train_loader))
        return self.diag_laplace_model.posterior_variance


class LargestVarianceSWAGSubnetMask(ScoreBasedSubnetMask):
    """Selects the weights with the largest variance over snapshots of further training by SGD (diagonal SWAG).

    Args:
        model: The network; a copy of it is trained.
        n_params_subnet: n, the number of weights to select.
        likelihood: A name, e.g. `"classification"`, or a likelihood object; its mean loss is minimised.
        swag_n_snapshots: Number of snapshots.
        swag_snapshot_freq: Number of epochs between snapshots.
        swag_lr: Learning rate.
        generator: Random generator that seeds the training; None for PyTorch's global one.

    Raises:
        InvalidArgument: The likelihood is unknown.
    """

    def __init__(
        self,
        model: nn.Module,
        n_params_subnet: int,
        likelihood: LikelihoodObject | LikelihoodName = Likelihood.CLASSIFICATION,
        swag_n_snapshots: int = 40,
        swag_snapshot_freq: int = 1,
        swag_lr: float = 0.01,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(model, n_params_subnet)
        self.criterion = MeanLoss(get_likelihood(likelihood))
        self.swag_n_snapshots = swag_n_snapshots
        self.swag_snapshot_freq = swag_snapshot_freq
        self.swag_lr = swag_lr
        self._generator = generator

    def compute_param_scores(self, train_loader: Iterable[Any] | None) -> Tensor:
        """Variances of the snapshots, `[P]`.

        Raises:
            InvalidArgument: No loader is given.
        """
        return fit_diagonal_swag_var(
            self.model,
            require_loader(self, train_loader),
            self.criterion,
            n_snapshots_total=self.swag_n_snapshots,
            snapshot_freq=self.swag_snapshot_freq,
            lr=self.swag_lr,
            generator=self._generator,
            rules=self.criterion.likelihood,
        )
