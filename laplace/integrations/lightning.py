"""Online Laplace in Lightning: a callback that estimates the evidence at the end of epochs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import Tensor, distributed, nn

from laplace.curvature import CurvatureInterface
from laplace.enums import HessianStructure, Likelihood
from laplace.errors import MissingDependency, NotFittedError
from laplace.likelihoods.base import Likelihood as LikelihoodObject
from laplace.training import OnlineLaplace


def OnlineLaplaceCallback(
    likelihood: LikelihoodObject | str = Likelihood.CLASSIFICATION,
    hessian_structure: HessianStructure | str = HessianStructure.KRON,
    backend: type[CurvatureInterface] | None = None,
    *,
    model: nn.Module | None = None,
    train_loader: Iterable[Any] | None = None,
    **options: Any,
) -> Any:
    """A Lightning callback around `laplace.OnlineLaplace`, for the module's `training_step` to take its loss from.

    The object is made when training starts, the model being where it is trained. After every epoch the evidence is
    estimated, where it is due, and logged as `"log_marginal_likelihood"`; at the end the best weights are loaded.

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
        likelihood: A name or a likelihood object.
        hessian_structure: Structure of the curvature.
        backend: Curvature backend, a class; None for the native GGN.
        model: The network; None for the Lightning module itself, whose `forward` it then is.
        train_loader: Data of the evidence; None for the trainer's training data.
        **options: Further ones of `OnlineLaplace`.

    Returns:
        A `lightning.pytorch.Callback` with `loss(f, y)`, `online` (the `OnlineLaplace`, None before training) and `la`
        (the posterior at the best weights, None before training has ended).

    Raises:
        MissingDependency: Lightning is not installed.
    """
    return _callback_class()(likelihood, hessian_structure, backend, model, train_loader, options)


@cache
def _callback_class() -> type:
    """The class, which must derive from Lightning's."""
    try:
        from lightning.pytorch import Callback
    except ImportError as error:
        raise MissingDependency(
            "OnlineLaplaceCallback needs Lightning: pip install lightning. Without it use laplace.OnlineLaplace."
        ) from error

    class _OnlineLaplaceCallback(Callback):
        """Class of the object that `OnlineLaplaceCallback` returns."""

        def __init__(self, *parts: Any) -> None:
            *self._choice, self._model, self._loader, self._options = parts
            self.online: OnlineLaplace | None = None
            self.la: Any = None

        def loss(self, f: Tensor, y: Tensor) -> Tensor:
            if self.online is None:
                raise NotFittedError(
                    "OnlineLaplaceCallback has no loss before training: pass it to Trainer(callbacks=[…])."
                )
            return self.online.loss(f, y)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            group = distributed.group.WORLD if trainer.world_size > 1 else None
            model = pl_module if self._model is None else self._model
            loader = trainer.train_dataloader if self._loader is None else self._loader
            self.online = OnlineLaplace(model, loader, *self._choice, **{"group": group, **self._options})

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            value = None if self.online is None else self.online.step(trainer.current_epoch + 1)
            if value is not None:
                pl_module.log("log_marginal_likelihood", value)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if self.online is not None:
                self.la = self.online.finish()

    return _OnlineLaplaceCallback
