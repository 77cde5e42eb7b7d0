"""A posterior at the end of training by the `Trainer` of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler

from laplace.core.arguments import check_call
from laplace.enums import Likelihood, LikelihoodName
from laplace.errors import InvalidData, MissingDependency
from laplace.factory import from_names
from laplace.likelihoods.base import Likelihood as LikelihoodObject


def LaplaceCallback(
    likelihood: LikelihoodObject | LikelihoodName = Likelihood.CLASSIFICATION,
    *,
    tuning: Mapping[str, Any] | None = None,
    filename: str = "laplace.pt",
    **options: Any,
) -> Any:
    """A callback of the `Trainer` that fits a posterior when training ends, and saves it beside the checkpoints.

    The posterior is made when training begins, so that a wrong argument stops it there and not after it. At the end it
    is fitted to the trainer's training data at the network's weights, the best ones with `load_best_model_at_end=True`,
    and `la.state_dict()` is saved in the output directory. The network stays in the mode that it is in. In one process
    the data are a pass of the trainer's loader: `dataloader_drop_last=True` leaves the last ones out.

    Example:
        posterior = LaplaceCallback(hessian_structure="lowrank_kron", subset_of_weights="all")
        Trainer(model, arguments, train_dataset=data, callbacks=[posterior]).train()
        posterior.la(batch)

    Args:
        likelihood: A name or a likelihood object.
        tuning: Options of `la.optimize_prior_precision`, which is called after the fit: `{}` for its defaults; None to
            keep the prior.
        filename: Name of the state in the trainer's output directory.
        **options: Further arguments of `Laplace`.

    Returns:
        A `transformers.TrainerCallback` with `la`: the posterior, None before training has ended. In several processes
        every one has the posterior of all data, and the first one saves it.

    Raises:
        MissingDependency: transformers is not installed.
    """
    return _callback_class()(likelihood, tuning, filename, options)


@cache
def _callback_class() -> type:
    """The class, which must derive from that of transformers."""
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise MissingDependency(
            "LaplaceCallback needs transformers: pip install 'transformers[torch]'. Without it use laplace.Laplace."
        ) from error

    class _LaplaceCallback(TrainerCallback):
        """Class of the object that `LaplaceCallback` returns."""

        def __init__(self, *parts: Any) -> None:
            self._likelihood, self._tuning, self._filename, self._options = parts
            self._made: Any = None
            self.la: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.la, self._made = None, from_names(given["model"], self._likelihood, **self._options)
            tune = self._made.optimize_prior_precision
            check_call(tune, tune.__name__, (), self._tuning or {})

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            several = args.world_size > 1
            loader, group = given["train_dataloader"], distributed.group.WORLD if several else None
            self._made.fit(_shard(loader, args.train_batch_size) if several else loader, group=group)
            self.la = self._made  # also where tuning raises
            if self._tuning is not None:
                self.la.optimize_prior_precision(**self._tuning)
            if args.should_save:
                path = Path(args.output_dir) / self._filename
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save(self.la.state_dict(), path)

    return _LaplaceCallback


def _shard(loader: Iterable[Any], batch_size: int) -> DataLoader[Any]:
    """The data of this process: those of the trainer's loader, which repeats some to give every process equally many.

    Raises:
        InvalidData: They are a stream, of which nobody knows what is repeated.
    """
    data = loader.dataset if isinstance(loader, DataLoader) else None
    if not isinstance(loader, DataLoader) or not isinstance(data, Sized):
        raise InvalidData(
            "LaplaceCallback in several processes needs training data with a length; fit a stream by la.fit(loader, "
            "group=...) with loaders of your own."
        )
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=False)  # pyright: ignore[reportArgumentType]
    return DataLoader(data, batch_size, sampler=sampler, collate_fn=loader.collate_fn)
