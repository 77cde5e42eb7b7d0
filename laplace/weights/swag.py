"""Diagonal SWAG: variances of the weights along further training with a constant learning rate.

After Maddox et al., "A Simple Baseline for Bayesian Uncertainty in Deep Learning" (2019).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from laplace.core import batch as batches
from laplace.core.positions import as_rows
from laplace.core.random_numbers import drawn_seed
from laplace.errors import CurvatureError, InvalidArgument, InvalidData
from laplace.likelihoods import Likelihood
from laplace.network import next_token
from laplace.network.misfits import called
from laplace.network.model_guard import unwrap

Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class MeanLoss:
    """The mean of −log p(y | f) over the targets that are not ignored, without constants: for any likelihood.

    Outputs that are independent are targets of their own, as in PyTorch's losses, and a noise is σ² = ½: of a
    classification it is the cross-entropy, of a regression the mean squared error.

    Attributes:
        likelihood: p(y | f).
    """

    likelihood: Likelihood

    def __call__(self, f: Tensor, y: Tensor) -> Tensor:
        """The mean, 0-dim, of outputs `[B, C]`, or with positions, and targets as a loader gives them; 0 without any.

        Raises:
            InvalidData: Targets that do not fit the likelihood.
        """
        f, y = as_rows(f, y, None)
        y = self.likelihood.check_targets(f, y)
        terms = self.likelihood.loss_terms(f, y)
        scale = self.likelihood.curvature_scale("ggn", terms.new_tensor(0.5).sqrt(), terms.new_ones(()))
        count = torch.as_tensor(self.likelihood.count(f, y), dtype=terms.dtype, device=terms.device)
        n_targets = count * f.shape[1] if self.likelihood.independent_outputs else count
        return (scale * terms).sum() / torch.where(count > 0, n_targets, 1.0)


def fit_diagonal_swag_var(
    model: nn.Module,
    train_loader: Iterable[Any],
    criterion: Criterion,
    n_snapshots_total: int = 40,
    snapshot_freq: int = 1,
    lr: float = 0.01,
    momentum: float = 0.9,
    weight_decay: float = 3e-4,
    min_var: float = 1e-30,
    dict_key_y: str = "labels",
    generator: torch.Generator | None = None,
    rules: next_token.TargetRules | None = None,
) -> Tensor:
    """Trains a copy of the model by SGD and returns the variance of its trainable parameters over the snapshots.

    Args:
        model: The network; it is copied, not written to.
        train_loader: Batches, pairs or mappings; iterated once per epoch.
        criterion: Mean loss of outputs and targets.
        n_snapshots_total: Number of snapshots S.
        snapshot_freq: Epochs between snapshots; `S * snapshot_freq` epochs are run.
        lr: Constant learning rate.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of SGD.
        min_var: Lower bound of the variances.
        dict_key_y: Key of the targets in batches that are mappings.
        generator: Seeds dropout and the loader's shuffling; the global random state, which is put back, if None.
        rules: The likelihood, which knows the form of targets in mappings and the label that is ignored, if there is
            one.

    Returns:
        Variances `(1/S) Σ_s (θ_s − θ̄)²`, `[P]`, at least `min_var`.

    Raises:
        InvalidArgument: S or the frequency is not a positive integer, or nothing is trainable.
        InvalidData: A loader without data.
        CurvatureError: The training diverged.
    """
    for name, value in {"n_snapshots_total": n_snapshots_total, "snapshot_freq": snapshot_freq}.items():
        if value < 1:
            raise InvalidArgument(f"{name}={value}; accepted is an integer of at least 1.")
    with _seeded(model, generator):
        learner = copy.deepcopy(unwrap(model)).train()
        trained = [p for p in learner.parameters() if p.requires_grad]
        if not trained:
            raise InvalidArgument("the model has no trainable parameter; set requires_grad=True for some.")
        optimizer = torch.optim.SGD(trained, lr=lr, momentum=momentum, weight_decay=weight_decay)
        moments = _Moments(parameters_to_vector(trained).detach())
        for epoch in range(1, n_snapshots_total * snapshot_freq + 1):
            _train_epoch(learner, train_loader, criterion, optimizer, dict_key_y, rules)
            if epoch % snapshot_freq == 0:
                moments.update(parameters_to_vector(trained).detach())
    return _finite(moments.variance()).clamp(min=min_var)


class _Moments:
    """Running mean and variance after Welford, which loses no digits where E[θ²] − E[θ]² cancels."""

    def __init__(self, like: Tensor) -> None:
        self.count = 0
        self.mean = torch.zeros_like(like)
        self.squares = torch.zeros_like(like)

    def update(self, value: Tensor) -> None:
        """Takes in one snapshot `[P]`."""
        self.count += 1
        step = value - self.mean
        self.mean = self.mean + step / self.count
        self.squares = self.squares + step * (value - self.mean)

    def variance(self) -> Tensor:
        """Population variance, `[P]`."""
        return self.squares / self.count


def _train_epoch(
    model: nn.Module,
    loader: Iterable[Any],
    criterion: Criterion,
    optimizer: torch.optim.Optimizer,
    dict_key_y: str,
    rules: next_token.TargetRules | None,
) -> None:
    device, empty = next(model.parameters()).device, True
    with torch.enable_grad():
        for batch in loader:
            x, y = next_token.split(batch, dict_key_y, model, rules)
            empty = False
            optimizer.zero_grad()
            f = batches.latent(called(model, None, batches.to_device(x, device)))
            criterion(f, y.to(device)).backward()
            optimizer.step()
    if empty:
        raise InvalidData("train_loader gave no data; without training there are no snapshots to take a variance of.")


@contextmanager
def _seeded(model: nn.Module, generator: torch.Generator | None) -> Iterator[None]:
    """A random state of its own for the training."""
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        if generator is not None:
            torch.manual_seed(drawn_seed(generator))
        yield


def _finite(variance: Tensor) -> Tensor:
    if not bool(torch.isfinite(variance).all()):
        raise CurvatureError("the SWAG training diverged to NaN or infinite weights; pass a smaller lr (swag_lr).")
    return variance
