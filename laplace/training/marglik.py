"""The training loop of online Laplace: `marglik_training`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from tqdm.auto import trange

from laplace.core import batch as batches
from laplace.core.arguments import check_counts, checked
from laplace.core.batch import ForwardFn, Inputs
from laplace.curvature import CurvatureInterface
from laplace.enums import (
    HessianStructure,
    Likelihood,
    LikelihoodName,
    PriorStructure,
    PriorStructureName,
    StructureName,
    SubsetOfWeights,
    WeightsName,
)
from laplace.errors import TuningWarning, warn
from laplace.likelihoods.base import Likelihood as LikelihoodObject
from laplace.network import next_token
from laplace.network.model_guard import flags_put_back
from laplace.parametric import ParametricLaplace
from laplace.structures.base import Curvature
from laplace.training.online import OnlineLaplace
from laplace.weights.base import Weights

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@checked
def marglik_training(
    model: nn.Module,
    train_loader: Iterable[Any],
    likelihood: LikelihoodObject | LikelihoodName = Likelihood.CLASSIFICATION,
    hessian_structure: StructureName | type[Curvature] = HessianStructure.KRON,
    backend: type[CurvatureInterface] | None = None,
    optimizer_cls: type[Optimizer] = Adam,
    optimizer_kwargs: dict[str, Any] | None = None,
    scheduler_cls: type[LRScheduler] | None = None,
    scheduler_kwargs: dict[str, Any] | None = None,
    n_epochs: int = 300,
    lr_hyp: float = 0.1,
    prior_structure: PriorStructureName = PriorStructure.LAYERWISE,
    n_epochs_burnin: int = 0,
    n_hypersteps: int = 10,
    marglik_frequency: int = 1,
    prior_prec_init: float | Tensor = 1.0,
    sigma_noise_init: float | Tensor = 1.0,
    temperature: float = 1.0,
    fix_sigma_noise: bool = False,
    progress_bar: bool = False,
    enable_backprop: bool = False,
    dict_key_x: str = "input_ids",
    dict_key_y: str = "labels",
    *,
    subset_of_weights: WeightsName | type[Weights] = SubsetOfWeights.ALL,
    prior_prec_rest: float = 1.0,
    forward_fn: ForwardFn | None = None,
    laplace_kwargs: dict[str, Any] | None = None,
    group: ProcessGroup | None = None,
) -> tuple[ParametricLaplace, nn.Module, list[float], list[float]]:
    """Trains a network together with its prior precision and noise, by the evidence; no validation data are needed.

    This is algorithm 1 of Daxberger et al. (2021), with the objective `OnlineLaplace.loss`. During training the model
    is in train mode, except for submodules that you set to eval mode; afterwards all modes are as before.

    Args:
        model: The network; its weights are trained.
        train_loader: Batches `(x, y)`, tuples `(x1, …, y)` or mappings with `dict_key_y`, read once per epoch.
        likelihood: A name, e.g. `"classification"`, or a likelihood object.
        hessian_structure: How the curvature is approximated, as in `Laplace`.
        backend: Class that computes the curvature; None for the native GGN.
        optimizer_cls: Class of the optimiser of the weights.
        optimizer_kwargs: Options of the optimiser, e.g. `{"lr": 1e-3}`. `weight_decay` is ignored: the prior replaces
            it.
        scheduler_cls: Class of the learning-rate scheduler, stepped per batch (`ReduceLROnPlateau`: per epoch).
        scheduler_kwargs: Options of the scheduler.
        n_epochs: Number of epochs.
        lr_hyp: Step size of Adam on the logarithms of prior precision δ and noise σ.
        prior_structure: `"scalar"`, `"layerwise"` (one δ per parameter tensor) or `"diag"` (one per parameter).
        n_epochs_burnin: Number of epochs before the evidence is estimated for the first time: as many as the training
            loss needs to become flat. Before that the evidence is biased, and may prefer an untrained network.
        n_hypersteps: Steps on the hyper-parameters per estimate of the evidence.
        marglik_frequency: Number of epochs between estimates.
        prior_prec_init: Initial prior precision δ.
        sigma_noise_init: Initial noise σ, one number or one per output.
        temperature: T of the tempered likelihood p(y | f)^(1/T).
        fix_sigma_noise: Keep σ at its initial value.
        progress_bar: Show a progress bar over the epochs.
        enable_backprop: Whether predictions of the returned posterior can be differentiated with respect to inputs.
        dict_key_x: Where batches are mappings: key of the inputs.
        dict_key_y: Where batches are mappings: key of the targets.
        subset_of_weights: Which weights are random, as in `OnlineLaplace`; the others are trained by MAP.
        prior_prec_rest: Prior precision of these other weights.
        forward_fn: `forward_fn(model, x)`, for models that need another call than `model(x)`.
        laplace_kwargs: Further options of the posterior's class (`backend_kwargs`, `damping`, `prior_mean`,
            `last_layer_name`, `subnetwork_indices`).
        group: Process group, as in `OnlineLaplace`; the model must then be a `DistributedDataParallel`.

    Returns:
        Four values: the posterior, fitted where the evidence was largest; the model, with the weights at that time; the
        negative log evidences, one per step on the hyper-parameters; and the mean training objective of each epoch.

    Raises:
        InvalidArgument: An option is out of range, or the loader can be read only once.
        InvalidData: A batch cannot be used, or training diverged.
    """
    check_counts(n_epochs=n_epochs)
    online = OnlineLaplace(
        model, train_loader, likelihood, hessian_structure, backend, subset_of_weights=subset_of_weights,
        lr_hyp=lr_hyp, prior_structure=prior_structure, n_epochs_burnin=n_epochs_burnin, n_hypersteps=n_hypersteps,
        marglik_frequency=marglik_frequency, prior_prec_init=prior_prec_init, prior_prec_rest=prior_prec_rest,
        sigma_noise_init=sigma_noise_init, temperature=temperature, fix_sigma_noise=fix_sigma_noise,
        enable_backprop=enable_backprop, dict_key_x=dict_key_x, dict_key_y=dict_key_y, forward_fn=forward_fn,
        laplace_kwargs=laplace_kwargs, group=group,
    )  # fmt: skip
    losses: list[float] = []
    with torch.inference_mode(False), torch.enable_grad(), flags_put_back(model):
        optimizer = _without_decay(optimizer_cls([p for p in model.parameters() if p.requires_grad],
                                                 **(optimizer_kwargs or {})))  # fmt: skip
        scheduler = None if scheduler_cls is None else scheduler_cls(optimizer, **(scheduler_kwargs or {}))
        epochs = trange(1, n_epochs + 1, desc="online Laplace", disable=not progress_bar)
        for epoch in epochs:
            if not model.training:
                model.train()
            losses.append(_train_epoch(online, optimizer, scheduler))
            evidence = online.step(epoch)
            if evidence is not None:
                epochs.set_postfix(loss=losses[-1], log_evidence=evidence)
        optimizer.zero_grad()
        return online.finish(), model, online.margliks, losses


def _train_epoch(online: OnlineLaplace, optimizer: Optimizer, scheduler: LRScheduler | None) -> float:
    """One pass over the data; the mean objective."""
    objectives: list[Tensor] = []
    counts: list[int] = []
    for batch in online.train_loader:
        la, rules = online.la, online.la.engine.target_rules
        x, y = next_token.split(batch, la.dict_key_y, la.weights.model, rules)
        data = batches.without_ignored(x, y, rules.ignore_index)
        if data is None:
            continue
        objectives.append(_train_step(online, optimizer, *data))
        counts.append(len(data[1]))
        if scheduler is not None and not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()
    read = torch.stack(objectives).tolist() if objectives else []  # once an epoch: who reads waits for the device
    mean = sum(value * n for value, n in zip(read, counts, strict=True)) / max(1, sum(counts))
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(mean)
    return mean


def _train_step(online: OnlineLaplace, optimizer: Optimizer, x: Inputs, y: Tensor) -> Tensor:
    """One step of the optimiser, which may ask for the loss several times (L-BFGS); the objective before it, 0-dim."""
    values: list[Tensor] = []

    def closure() -> Any:  # Optimizer.step is annotated for a number, L-BFGS takes a tensor
        optimizer.zero_grad()
        loss = online.loss(online.forward(x), y)
        loss.backward()
        values.append(loss.detach())
        return loss

    optimizer.step(closure)
    return values[0]


def _without_decay(optimizer: Optimizer) -> Optimizer:
    """The optimiser without weight decay, which would be a second prior, unknown to the evidence."""
    decays = {group.get("weight_decay", 0) for group in optimizer.param_groups} - {0}
    if decays:
        warn(
            f"the optimiser's weight_decay={decays.pop():g} is not used: the prior precision is the weight decay, and "
            "the evidence chooses it. Pass optimizer_kwargs={'weight_decay': 0, ...}, or start it by prior_prec_init; "
            "of weights that are not random it is prior_prec_rest.",
            TuningWarning,
        )
    for group in optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    return optimizer
