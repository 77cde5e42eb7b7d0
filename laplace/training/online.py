"""Online Laplace: MAP training whose prior precision and noise follow the evidence.

After Daxberger et al., "Laplace Redux" (2021), and Immer et al., "Scalable Marginal Likelihood Estimation
for Model Selection in Deep Learning" (2021): every F epochs a Laplace approximation is fitted at the present weights,
and a few steps of gradient ascent on its log evidence move the hyper-parameters, in their logarithms.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from tqdm.auto import trange

from laplace.core import batch as batches
from laplace.core import checks
from laplace.core.arguments import CheckedConstructor, check_counts, checked
from laplace.core.batch import ForwardFn, Inputs, require_rereadable
from laplace.core.positions import as_rows
from laplace.core.processes import Processes
from laplace.curvature.interface import CurvatureInterface
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
from laplace.errors import CurvatureError, InvalidArgument, InvalidData, TuningWarning, UnsupportedError, warn
from laplace.fitting.fit import infer_from_first_batch
from laplace.grid import from_names
from laplace.large_fits.processes import without_padding
from laplace.likelihoods.base import Likelihood as LikelihoodObject
from laplace.network import next_token
from laplace.network.fsdp import require_unsharded
from laplace.network.input_errors import call_with_context
from laplace.network.model_guard import autograd_mode, flags_put_back, private_copy, reading, same_random_state
from laplace.parametric import ParametricLaplace
from laplace.posterior.noise import unlike_outputs
from laplace.posterior.posterior import match_lengths
from laplace.structures.base import Curvature
from laplace.training.forecast import warn_if_worse
from laplace.tuning.search import prior_in_structure
from laplace.weights.base import Weights, trainable
from laplace.weights.last_layer import network_of
from laplace.weights.problem import ParameterSlice, Problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state of training with the largest evidence so far.

    Attributes:
        epoch: Number of the epoch.
        log_marginal_likelihood: Log evidence, in nats.
        prior_precision: Prior precision δ there, `[1]`, `[n_tensors]` or `[P]`.
        sigma_noise: Noise σ there, 0-dim or `[C]`.
        state_dict: The `state_dict` of the model.
    """

    epoch: int
    log_marginal_likelihood: float
    prior_precision: Tensor
    sigma_noise: Tensor
    state_dict: dict[str, Any]


class OnlineLaplace(CheckedConstructor):
    """Learns prior precision and noise by the evidence, within a training loop of your own.

    `laplace.marglik_training` is such a loop, ready-made. The loop minimises the usual loss plus the prior's penalty,

        L(θ) = (1/B) Σ_b ℓ(f(x_b), y_b) + (θ − μ₀)ᵀ diag(δ) (θ − μ₀) / (2 N w)

    with the loss ℓ (cross-entropy, half the squared error), N data, and w = 1/(σ²T): this is the negative log joint
    density divided by N w. Every `marglik_frequency` epochs a Laplace approximation is fitted at the present weights,
    and δ and σ take `n_hypersteps` steps of Adam, on their logarithms, towards a larger evidence.

    With `subset_of_weights="last_layer"` or `"subnetwork"`, δ is the prior precision of the random weights only. The
    other weights θ_F are trained by MAP under the prior N(0, 1/ε): ε ‖θ_F‖² / (2 N w) is added to L(θ). The evidence is
    then p(D | θ_F, δ, σ), and ε is not learnt.

    Example:
        online = OnlineLaplace(model, train_loader, "regression", "kron")
        for epoch in range(1, 301):
            for x, y in train_loader:
                optimizer.zero_grad()
                online.loss(model(x), y).backward()
                optimizer.step()
            online.step(epoch)
        la = online.finish()

    Args:
        model: The network, on the device on which it is trained.
        train_loader: The training data, ideally without augmentation; read once per estimate of the evidence.
        likelihood: A name, e.g. `"classification"`, or a likelihood object.
        hessian_structure: How the curvature is approximated, as in `Laplace`.
        backend: Class that computes the curvature; None for the native GGN.
        subset_of_weights: Which weights are random, as in `Laplace`: `"all"`, `"last_layer"`, or `"subnetwork"` with
            `laplace_kwargs={"subnetwork_indices": ...}`. Frozen weights are not trained.
        lr_hyp: Step size of Adam on log δ and log σ.
        prior_structure: `"scalar"`, `"layerwise"` (one δ per parameter tensor) or `"diag"` (one per parameter).
        n_epochs_burnin: Number of epochs before the evidence is estimated for the first time: as many as the training
            loss needs to become flat. Before that the evidence is biased, and may prefer an untrained network.
        n_hypersteps: Steps on the hyper-parameters per estimate of the evidence.
        marglik_frequency: Number of epochs between estimates.
        prior_prec_init: Initial prior precision δ: one number, or as many as `prior_structure` has.
        prior_prec_rest: ε, the prior precision of trainable weights that are not random; 0 for no prior.
        sigma_noise_init: Initial noise σ: one number, or one per output; 1 for a likelihood without noise.
        temperature: T of the tempered likelihood p(y | f)^(1/T).
        fix_sigma_noise: Keep σ at its initial value.
        enable_backprop: Whether predictions of the posterior can be differentiated with respect to the inputs.
        dict_key_x: Where batches are mappings: key of an input whose first dimension is the batch.
        dict_key_y: Where batches are mappings: key of the targets.
        forward_fn: `forward_fn(model, x)`, for models that need another call than `model(x)`.
        laplace_kwargs: Further options of the posterior's class (`backend_kwargs`, `damping`, `prior_mean`,
            `last_layer_name`, `subnetwork_indices`).
        group: Process group, as in `la.fit`, of processes that train the same network (`DistributedDataParallel`), each
            with a loader over its shard. Evidence, N and hyper-parameters are then those of all data.

    Attributes:
        la: The posterior, fitted again at every estimate, with the present hyper-parameters.
        rest: Trainable weights that are not random.
        margliks: Negative log evidences, one per step on the hyper-parameters, in nats.
        best: State with the largest log evidence so far; None before the first estimate.

    Raises:
        InvalidArgument: An option is out of range, the random weights are frozen, or the loader can be read only once.
        UnsupportedError: The likelihood has class weights.
    """

    def __init__(
        self,
        model: nn.Module,
        train_loader: Iterable[Any],
        likelihood: LikelihoodObject | LikelihoodName = Likelihood.CLASSIFICATION,
        hessian_structure: StructureName | type[Curvature] = HessianStructure.KRON,
        backend: type[CurvatureInterface] | None = None,
        *,
        subset_of_weights: WeightsName | type[Weights] = SubsetOfWeights.ALL,
        lr_hyp: float = 0.1,
        prior_structure: PriorStructureName = PriorStructure.LAYERWISE,
        n_epochs_burnin: int = 0,
        n_hypersteps: int = 10,
        marglik_frequency: int = 1,
        prior_prec_init: float | Tensor = 1.0,
        prior_prec_rest: float = 1.0,
        sigma_noise_init: float | Tensor = 1.0,
        temperature: float = 1.0,
        fix_sigma_noise: bool = False,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        forward_fn: ForwardFn | None = None,
        laplace_kwargs: dict[str, Any] | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        check_counts(n_hypersteps=n_hypersteps, marglik_frequency=marglik_frequency)
        check_step_size(lr_hyp)
        self.la: ParametricLaplace = from_names(
            model, likelihood, subset_of_weights, hessian_structure, sigma_noise=sigma_noise_init,
            temperature=temperature, backend=backend, enable_backprop=enable_backprop, dict_key_x=dict_key_x,
            dict_key_y=dict_key_y, forward_fn=forward_fn, **(laplace_kwargs or {}),
        )  # fmt: skip
        if self.la.likelihood_object.weighs_targets:
            raise UnsupportedError(
                "class_weight= in online training, whose N is a number of data; train with a weighted loss, and fit "
                "with Categorical(class_weight=...) afterwards."
            )
        self.model = require_unsharded(network_of(model), "training changes them")
        require_rereadable(train_loader, "training reads train_loader once per epoch")
        self.train_loader, self.group = train_loader, group
        self.forward_fn = self.la.snapshot().call
        self.n_hypersteps, self.marglik_frequency = n_hypersteps, marglik_frequency
        self.n_epochs_burnin = n_epochs_burnin
        self.margliks: list[float] = []
        self._first_epoch = 0
        self.best: Checkpoint | None = None
        find_random_weights(self.la, train_loader, Processes.from_argument(group))
        self.rest = RestOfWeights.from_posterior(self.la, prior_prec_rest)
        # All processes of a group count now, and not when one of them asks for it.
        processes = Processes.from_argument(group)
        self._n_counted = None if processes is None else sum(processes.gather_results(self._count))
        self.la.prior_precision = prior_in_structure(
            prior_prec_init, str(prior_structure), self.la.problem.layout, self.la.prior_mean, name="prior_prec_init"
        )
        learns_noise = self.la.likelihood_object.has_noise and not fix_sigma_noise
        with torch.inference_mode(False):
            self._log_prior = self.la.prior_precision.detach().log().requires_grad_()
            self._log_noise = self.la.sigma_noise.detach().log().requires_grad_() if learns_noise else None
        self._optimizer = Adam([leaf for leaf in (self._log_prior, self._log_noise) if leaf is not None], lr=lr_hyp)

    @property
    def prior_precision(self) -> Tensor:
        """Present prior precision δ, `[1]`, `[n_tensors]` or `[P]`."""
        return self.la.prior_precision

    @property
    def sigma_noise(self) -> Tensor:
        """Present noise σ, 0-dim or `[C]`."""
        return self.la.sigma_noise

    @property
    def n_data(self) -> int:
        """N, the number of training data without ignored labels; counted in one pass before the first estimate."""
        if self.la.is_fitted:
            return round(self.la.n_data)
        if self._n_counted is None:
            self._n_counted = self._count()
        if self._n_counted == 0:
            raise InvalidData("train_loader gave no data, or all are ignored; training needs at least one datum.")
        return self._n_counted

    def _count(self) -> int:
        """Number of data of this process's loader, or of positions, whose labels are not the ignored one."""
        la, total, per_row = self.la, 0, None
        loader = self.train_loader if self.group is None else without_padding(self.train_loader, la.dict_key_y)
        rules, ignored = la.engine.target_rules, la.engine.target_rules.ignore_index
        # A loader draws its shuffling from the global random state.
        with autograd_mode(), torch.no_grad(), same_random_state(self.model):
            for batch in reading(loader):
                x, y = next_token.split(batch, la.dict_key_y, la.weights.model, rules)
                if y.ndim > 1 and len(y):
                    per_row = per_row or self._entries_per_row(x, y)
                data = batches.without_ignored(x, y, ignored)
                labels = y[:0] if data is None else data[1]
                n_entries = per_row if per_row is not None and y.ndim > 1 else 1
                if ignored is None or n_entries > 1:  # entries of soft labels and of values are no indices
                    total += labels.numel() // n_entries
                else:
                    total += int((~batches.is_ignored(labels, ignored)).sum())
        return total

    def _entries_per_row(self, x: Inputs, y: Tensor) -> int:
        """Numbers in the target of one input or position: of `[B, n]` only the network knows what the n are."""
        la = self.la
        call = la.snapshot().call
        with private_copy(la.weights.model, call) as model:
            f = batches.latent(call_with_context(model, call, batches.to_device(x, la.prior_mean.device)))
        rows, _ = as_rows(f, y.to(f.device), la.channel_dim if la.channels_known else None)
        return max(1, y.numel() // len(rows))

    def forward(self, x: Inputs) -> Tensor:
        """Outputs `[B, C]` of the network; inputs are moved to its device."""
        return batches.latent(
            call_with_context(self.model, self.forward_fn, batches.to_device(x, self.prior_precision.device))
        )

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Training objective of a batch, L(θ) above [Redux, eq. 1], 0-dim: its mean loss plus the penalty of the prior.

        With one noise per output, output c has the weight w_c / mean(w), and w is mean(w).

        Args:
            f: Outputs `[B, C]`, with their graph.
            y: Targets as the loader gives them; ignored labels count nowhere.

        Raises:
            InvalidData: Outputs that are not finite, or targets that do not fit them.
        """
        likelihood = self.la.likelihood_object
        f = f.to(torch.promote_types(f.dtype, self.prior_precision.dtype))
        f, y = as_rows(f, y.to(f.device), self.la.channel_dim if self.la.channels_known else None)
        keep = batches.counting(y, likelihood.ignore_index) if y.ndim > 1 else None
        if keep is not None:  # labels `[B]` are checked to be the ignored one or classes
            f, y = f[keep], y[keep]
        with checks.together():
            y = self.la.engine.checked(f, y)
        count = likelihood.count(f, y)
        count = count.clamp(min=1) if isinstance(count, Tensor) else max(1, count)
        w = likelihood.curvature_scale("ggn", self.sigma_noise, self.la.temperature).detach()
        data = (w / w.mean() * likelihood.loss_terms(f, y)).sum() / count
        penalty = self.la.prior.quad(random_weights(self.la)) + self.rest.quad()
        return data + penalty / (2 * self.n_data * w.mean())

    def is_due(self, epoch: int) -> bool:
        """True if the evidence is estimated after this epoch, counted from 1."""
        return epoch >= self.n_epochs_burnin and epoch % self.marglik_frequency == 0

    def step(self, epoch: int) -> float | None:
        """Estimates the evidence and moves the hyper-parameters, if it is due after this epoch.

        The model is preserved: flags, buffers, gradients and random state are as before.

        Args:
            epoch: Number of the epoch that has ended, from 1.

        Returns:
            The log evidence before the last step, in nats, or None if none was due.

        Raises:
            InvalidData: A batch cannot be used, or the weights have become infinite.
            CurvatureError: The log evidence is not finite.
        """
        if not self.is_due(epoch):
            return None
        self.la.fit(self.train_loader, group=self.group)
        with torch.inference_mode(False), torch.enable_grad():
            values = [self._ascend() for _ in range(self.n_hypersteps)]
        if not self.margliks:
            self._first_epoch = epoch
        self.margliks += [-value for value in values]
        if self.best is None or values[-1] > self.best.log_marginal_likelihood:
            # At this point `la` holds the hyper-parameters at which the last value was computed.
            prior, noise = self.prior_precision.detach().clone(), self.sigma_noise.detach().clone()
            self.best = Checkpoint(epoch, values[-1], prior, noise, copy.deepcopy(self.model.state_dict()))
        self.la.prior_precision = self._log_prior.detach().exp()
        if self._log_noise is not None:
            self.la.sigma_noise = self._log_noise.detach().exp()
        return values[-1]

    def _ascend(self) -> float:
        """One step of Adam; the log evidence before it, at the hyper-parameters that `la` holds afterwards."""
        noise = None if self._log_noise is None else self._log_noise.exp()
        evidence = self.la.log_marginal_likelihood(self._log_prior.exp(), noise)
        value = evidence.item()
        if not math.isfinite(value):
            raise CurvatureError(
                f"the log evidence is {value} at prior precisions from {self.prior_precision.min().item():g} to "
                f"{self.prior_precision.max().item():g}; use a smaller lr_hyp, another prior_prec_init, or, if the "
                "curvature is an exact Hessian, the GGN, which has no negative directions."
            )
        self._optimizer.zero_grad()
        (-evidence).backward()
        self._optimizer.step()
        return value

    def finish(self) -> ParametricLaplace:
        """Loads the best weights into the model and returns a posterior fitted at them.

        Without an estimate so far, weights and hyper-parameters are those at the end of training.

        Warns:
            CalibrationWarning: The posterior is forecast to predict worse than the network (`training/forecast.py`).
                `la.calibrate` mends that, and leaves the network as it was trained.
        """
        if self.best is not None:
            n_estimates, epoch = len(self.margliks) // self.n_hypersteps, self.best.epoch
            if epoch == self._first_epoch and n_estimates > 1:
                warn(
                    f"the evidence was largest at its first estimate, after epoch {epoch}, so that the network is put "
                    f"back to that epoch; {n_estimates - 1} later estimates were smaller. Far from a minimum of the "
                    "training loss the evidence is biased: give n_epochs_burnin= the number of epochs until the loss "
                    "is flat.",
                    TuningWarning,
                )
            self.model.load_state_dict(self.best.state_dict)
            self.la.prior_precision, self.la.sigma_noise = self.best.prior_precision, self.best.sigma_noise
        self.la.fit(self.train_loader, group=self.group)
        if self._log_noise is not None:
            unlike = unlike_outputs(self.la.snapshot(), self.la.sigma_noise, "sigma_noise_init")
            if unlike:
                warn(f"{unlike}.", TuningWarning)
        if self.best is not None and self.group is None:
            warn_if_worse(self.la, self.rest.precision if self.rest.slots else None, self.train_loader)
        return self.la


def check_step_size(lr_hyp: float) -> None:
    """Refuses step sizes that are not positive and finite."""
    if not 0 < lr_hyp < math.inf:
        raise InvalidArgument(f"lr_hyp={lr_hyp}; it must be positive and finite.")


# ----------------------------------------------------------------------------------------------------------------------
# The training loop
# ----------------------------------------------------------------------------------------------------------------------


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

    This is [Redux, algorithm 1], with the objective `OnlineLaplace.loss`. During training the model
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

    Warns:
        CalibrationWarning: As of `OnlineLaplace.finish`: calibrate the posterior before you use its probabilities.
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


# ----------------------------------------------------------------------------------------------------------------------
# The weights that training moves: those that are random, and the rest, which has a prior of its own
# ----------------------------------------------------------------------------------------------------------------------


def random_weights(la: ParametricLaplace) -> Tensor:
    """Random entries of the model's present weights, `[P]`, with their graph."""
    tensors = [slot.take(tensor) for slot, tensor in zip(la.problem.slots, la.params, strict=True)]
    return torch.cat(tensors).to(la.prior_mean.dtype)


@dataclass(frozen=True)
class RestOfWeights:
    """Trainable weights that are not random, the trunk below a last layer for one, under N(0, 1/ε)."""

    problem: Problem  # the network, and its random entries
    slots: tuple[ParameterSlice, ...]  # tensors with entries of the rest
    precision: Tensor  # ε, 0-dim

    @classmethod
    def from_posterior(cls, la: ParametricLaplace, precision: float) -> RestOfWeights:
        """The rest of the weights of a posterior's network, whose random weights are known."""
        if not isinstance(precision, Real) or not 0 <= precision < math.inf:
            raise InvalidArgument(f"prior_prec_rest={precision!r}; it must be a number from 0, and finite.")
        if not all(tensor.requires_grad for tensor in la.params):
            raise InvalidArgument(
                "the random weights are frozen, and the evidence is that of weights that training moves; set "
                "requires_grad=True, or use Laplace(...) after training."
            )
        # By identity: a weight that is tied to another one's has a second name.
        random = {id(tensor): slot for tensor, slot in zip(la.params, la.problem.slots, strict=True)}
        slots = [
            _others(name, tensor.shape, random.get(id(tensor))) for name, tensor in trainable(la.weights.model).items()
        ]
        return cls(la.problem, tuple(slot for slot in slots if slot is not None), la.prior_mean.new_tensor(precision))

    def quad(self) -> Tensor:
        """ε ‖θ‖² at the present weights, 0-dim, with their graph."""
        total = torch.zeros_like(self.precision)
        for slot in self.slots:
            total = total + slot.take(self.problem.tensor(slot.name)).to(total.dtype).square().sum()
        return self.precision * total


def _others(name: str, shape: torch.Size, random: ParameterSlice | None) -> ParameterSlice | None:
    """Entries of a tensor that are not random; None without any."""
    if random is None:
        return ParameterSlice(name, shape)
    if random.entries is None:
        return None
    others = torch.ones(shape.numel(), dtype=torch.bool)
    others[random.entries.cpu()] = False
    return ParameterSlice(name, shape, others.nonzero().squeeze(1))


def find_random_weights(la: ParametricLaplace, train_loader: Iterable[Any], processes: Processes | None) -> None:
    """Finds the last layer by a pass of the first data, where it is random and was not named."""
    if la.weights.problem is not None:
        return

    def find() -> tuple[int | None, str | None] | None:
        rules, model, device = la.likelihood_object, la.weights.model, la.prior_mean.device
        with autograd_mode(), torch.no_grad(), same_random_state(model):
            for _, x, y in next_token.read(train_loader, la.dict_key_y, device, rules, model):
                posterior = infer_from_first_batch(la.snapshot(), x, y)
                return posterior.choices.channel_dim, posterior.problem.head
        return None

    # A process may have no data.
    outcomes = [find()] if processes is None else processes.gather_results(find)
    known = [outcome for outcome in outcomes if outcome is not None]
    if not known:
        raise InvalidData("train_loader gave no data, or all are ignored; training needs at least one datum.")
    posterior = la.snapshot().apply_inferred(*known[0])
    la.set_posterior(posterior.at_hyperparameters(match_lengths(posterior.hypers, posterior.weights)))
