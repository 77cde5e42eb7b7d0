"""Callbacks of Lightning: hyper-parameters that follow the evidence during training, and a posterior after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, distributed, nn

from laplace.curvature import CurvatureInterface
from laplace.enums import HessianStructure, Likelihood, LikelihoodName, StructureName
from laplace.errors import InvalidArgument, MissingDependency, NotFittedError
from laplace.grid import from_names
from laplace.likelihoods.base import Likelihood as LikelihoodObject
from laplace.parametric import ParametricLaplace
from laplace.structures.base import Curvature
from laplace.training import OnlineLaplace

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise MissingDependency(
        "laplace.integrations.lightning needs Lightning: pip install lightning. Without it use laplace.OnlineLaplace "
        "in a loop of your own, or laplace.Laplace after training."
    ) from error


class OnlineLaplaceCallback(Callback):
    """Callback that learns prior precision and noise during training, by `laplace.OnlineLaplace`.

    Return `callback.loss(f, y)` from your `training_step`. After an epoch in which it is due, the evidence is
    estimated, and logged as `"log_marginal_likelihood"`; at the end the best weights are loaded. The loss contains the
    prior: optimisers with a weight decay, which would add it twice, are refused.

    Example:
        class Net(lightning.LightningModule):
            def __init__(self, net, evidence):
                super().__init__()
                self.net, self.evidence = net, evidence

            def training_step(self, batch, batch_idx):
                x, y = batch
                return self.evidence.loss(self.net(x), y)

        evidence = OnlineLaplaceCallback("regression", model=net)
        lightning.Trainer(callbacks=[evidence]).fit(Net(net, evidence), loader)
        evidence.la(x)

    Args:
        likelihood: A name, e.g. `"classification"`, or a likelihood object.
        hessian_structure: How the curvature is approximated, as in `Laplace`.
        backend: Class that computes the curvature; None for the native GGN.
        model: The network; None for the Lightning module itself, by its `forward`.
        train_loader: Data on which the evidence is estimated; None for the trainer's training data.
        **options: Further options of `OnlineLaplace`.

    Attributes:
        online: The `OnlineLaplace`; None before training.
        la: The posterior at the best weights; None before training has ended.
    """

    def __init__(
        self,
        likelihood: LikelihoodObject | LikelihoodName = Likelihood.CLASSIFICATION,
        hessian_structure: StructureName | type[Curvature] = HessianStructure.KRON,
        backend: type[CurvatureInterface] | None = None,
        *,
        model: nn.Module | None = None,
        train_loader: Iterable[Any] | None = None,
        **options: Any,
    ) -> None:
        self.online: OnlineLaplace | None = None
        self.la: ParametricLaplace | None = None
        self._choice = (likelihood, hessian_structure, backend)
        self._model, self._loader, self._options = model, train_loader, options

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Training objective of a batch, 0-dim: `OnlineLaplace.loss`.

        Raises:
            NotFittedError: Before training.
        """
        if self.online is None:
            raise NotFittedError(
                "OnlineLaplaceCallback has no loss before training: pass it to Trainer(callbacks=[…])."
            )
        return self.online.loss(f, y)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the `OnlineLaplace`.

        Raises:
            InvalidArgument: An optimiser has a weight decay.
        """
        _refuse_weight_decay(trainer)
        model, loader = _given(trainer, pl_module, self._model, self._loader)
        self.online = OnlineLaplace(model, loader, *self._choice, **{"group": _group(trainer), **self._options})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Estimates the evidence and updates the hyper-parameters, if due, and logs the evidence."""
        value = None if self.online is None else self.online.step(trainer.current_epoch + 1)
        if value is not None:
            pl_module.log("log_marginal_likelihood", value)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Loads the best weights."""
        if self.online is not None:
            self.la = self.online.finish()


class LaplaceCallback(Callback):
    """Callback that fits a posterior to the trainer's training data after training, at the last weights.

    Arguments are checked when training starts.

    Example:
        posterior = LaplaceCallback("classification", model=net, tuning={})
        lightning.Trainer(callbacks=[posterior]).fit(module, loader)
        posterior.la(x)

    Args:
        likelihood: A name, e.g. `"classification"`, or a likelihood object.
        model: The network; None for the Lightning module itself, by its `forward`.
        train_loader: Data to fit the posterior to; None for the trainer's training data.
        tuning: Options of `la.optimize_prior_precision`, which is called after the fit: `{}` for its defaults; None to
            keep the prior.
        **options: Further arguments of `Laplace`.

    Attributes:
        la: The posterior; None before training has ended.
    """

    def __init__(
        self,
        likelihood: LikelihoodObject | LikelihoodName = Likelihood.CLASSIFICATION,
        *,
        model: nn.Module | None = None,
        train_loader: Iterable[Any] | None = None,
        tuning: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.la: ParametricLaplace | None = None
        self._likelihood, self._tuning, self._options = likelihood, tuning, options
        self._model, self._loader = model, train_loader
        self._made: ParametricLaplace | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the posterior, so that a wrong argument stops training before it begins."""
        model, _ = _given(trainer, pl_module, self._model, self._loader)
        self.la, self._made = None, from_names(model, self._likelihood, **self._options)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fits the posterior."""
        _, loader = _given(trainer, pl_module, self._model, self._loader)
        if self._made is not None:
            self._made.fit(loader, group=_group(trainer))
            if self._tuning is not None:
                self._made.optimize_prior_precision(**self._tuning)
        self.la = self._made


def _given(
    trainer: Trainer, pl_module: LightningModule, model: nn.Module | None, loader: Iterable[Any] | None
) -> tuple[nn.Module, Any]:
    """Network and data, the trainer's where there are no others."""
    return pl_module if model is None else model, trainer.train_dataloader if loader is None else loader


def _group(trainer: Trainer) -> distributed.ProcessGroup | None:
    return distributed.group.WORLD if trainer.world_size > 1 else None


def _refuse_weight_decay(trainer: Trainer) -> None:
    decays = [group.get("weight_decay", 0) for optimizer in trainer.optimizers for group in optimizer.param_groups]
    if any(decays):
        raise InvalidArgument(
            f"the optimiser has weight_decay={max(decays)}: a second prior, besides the one that "
            "OnlineLaplaceCallback.loss contains. Make the optimiser with weight_decay=0."
        )
