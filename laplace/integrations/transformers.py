"""A posterior at the end of training by the `Trainer` of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from laplace.core.arguments import check_call
from laplace.enums import Likelihood, LikelihoodName
from laplace.errors import MissingDependency
from laplace.grid import from_names
from laplace.likelihoods.base import Likelihood as LikelihoodObject
from laplace.parametric import ParametricLaplace

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise MissingDependency(
        "laplace.integrations.transformers needs transformers: pip install 'transformers[torch]'. Without it use "
        "laplace.Laplace after training."
    ) from error


class LaplaceCallback(TrainerCallback):
    """A callback of the `Trainer` that fits a posterior when training ends, and saves it beside the checkpoints.

    Arguments are checked when training begins. At its end the posterior is fitted to the trainer's training data, at
    the final weights (with `load_best_model_at_end=True` the best ones), and `la.state_dict()` is saved in the output
    directory. The data are one pass of the trainer's loader: `dataloader_drop_last=True` drops the last ones. With
    several processes, each gets the posterior given all data, and the first one saves it. The network stays in its
    mode, train or eval.

    Example:
        posterior = LaplaceCallback(hessian_structure="lowrank_kron", subset_of_weights="all")
        Trainer(model, arguments, train_dataset=data, callbacks=[posterior]).train()
        posterior.la(batch)

    Args:
        likelihood: A name, e.g. `"classification"`, or a likelihood object.
        tuning: Options of `la.optimize_prior_precision`, which is called after the fit: `{}` for its defaults; None to
            keep the prior.
        filename: Name of the saved file in the trainer's output directory.
        **options: Further arguments of `Laplace`.

    Attributes:
        la: The posterior; None before training has ended.
    """

    def __init__(
        self,
        likelihood: LikelihoodObject | LikelihoodName = Likelihood.CLASSIFICATION,
        *,
        tuning: Mapping[str, Any] | None = None,
        filename: str = "laplace.pt",
        **options: Any,
    ) -> None:
        self.la: ParametricLaplace | None = None
        self._likelihood, self._tuning, self._options = likelihood, tuning, options
        self._filename = filename
        self._made: ParametricLaplace | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Makes the posterior, so that a wrong argument stops training before it begins."""
        self.la, self._made = None, from_names(kwargs["model"], self._likelihood, **self._options)
        tune = self._made.optimize_prior_precision
        check_call(tune, tune.__name__, (), self._tuning or {})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Fits the posterior, and saves it."""
        if self._made is None:  # training did not begin with this callback
            return
        self._made.fit(kwargs["train_dataloader"], group=distributed.group.WORLD if args.world_size > 1 else None)
        self.la = self._made  # also where tuning raises
        if self._tuning is not None:
            self.la.optimize_prior_precision(**self._tuning)
        if args.should_save:
            path = Path(args.output_dir or "") / self._filename
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self.la.state_dict(), path)
