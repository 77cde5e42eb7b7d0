"""Continual learning by recursive Bayes: the posterior after one task is the prior of the next.

With the data of former tasks gone, p(θ | D_1, …, D_t) ∝ p(D_t | θ) p(θ | D_1, …, D_{t−1}) (Daxberger et al., 2021,
appendix C.4, equations 14 and 15) is all that task t needs. Laplace approximations keep the former posterior as
N(θ_{t−1}, P_{t−1}⁻¹), so that task t minimises

    −log p(D_t | θ) + ½ (θ − θ_{t−1})ᵀ P_{t−1} (θ − θ_{t−1}),        P_t = s Σ_{t' ≤ t} H_{t'} + diag(δ)    (eq. 16)

with the curvature H_{t'} of every task at the weights θ_{t'} at which it ended, s = 1/(σ²T), and one prior in all.
A posterior that is fitted with `override=False` holds exactly θ_{t−1} and the sum: nothing else is kept between tasks.
Kronecker factors are summed one by one, which approximates the sum of the products (Ritter et al., 2018); `TaskMemory`
keeps the products of every task for the penalty.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import trange

from laplace.core import batch as batches
from laplace.core.arguments import check_counts, checked
from laplace.core.batch import Inputs, require_rereadable
from laplace.core.positions import as_rows
from laplace.errors import InvalidArgument, InvalidData
from laplace.evidence import Evidence
from laplace.fitting import Fit
from laplace.network import next_token
from laplace.network.misfits import called
from laplace.network.model_guard import autograd_mode, flags_put_back
from laplace.parametric import ParametricLaplace
from laplace.posterior.learning import call_of, measured
from laplace.training.online import check_step_size
from laplace.training.task_memory import TaskMemory, quadratic_penalty
from laplace.tuning.search import minimise

# The pieces.


@dataclass(frozen=True)
class TaskFit:
    """Fit to the data of one task at the network's present weights θ_t; the former posterior is not changed yet.

    Attributes:
        former: The posterior of the former tasks; not fitted before the first task.
        fit: Curvature and loss of this task alone.
        posterior: The posterior after the task: a copy of the former one with the task added.
    """

    former: ParametricLaplace
    fit: Fit
    posterior: ParametricLaplace

    @classmethod
    def of(cls, la: ParametricLaplace, train_loader: Iterable[Any], *, progress_bar: bool = False) -> TaskFit:
        """Fits a task; the posterior `la` is not changed.

        Args:
            la: The posterior of the former tasks.
            train_loader: Data of the task.
            progress_bar: Show a progress bar.

        Raises:
            InvalidData: A batch cannot be used.
        """
        task, after = measured(la.snapshot(), train_loader, progress_bar=progress_bar), _copied(la)
        with torch.no_grad():
            after.set_posterior(task.after(la.fitted() + task.fit if la.is_fitted else task.fit))
        return cls(la, task.fit, after)

    def log_marginal_likelihood(self, prior_precision: Tensor | None = None) -> Tensor:
        """Log evidence of the task given the former ones, 0-dim, differentiable in δ.

        log p(D_t | D_<t) ≈ log p(D_t | θ_t) − ½ (log det P_t − log det P_{t−1} + Δᵀ P_{t−1} Δ),   Δ = θ_t − θ_{t−1}

        is equation 6 of Daxberger et al. (2021) with the former posterior as prior, the normaliser of their equation
        15. For the first task it is the log evidence of the fit.

        Args:
            prior_precision: δ in P_t and P_{t−1}, `[1]`, `[n_tensors]` or `[P]`; None for the present one.
        """
        delta = self.former.prior_precision if prior_precision is None else prior_precision
        joint = self.posterior.evidence(prior_precision=delta)
        if not self.former.is_fitted:
            return joint.log_marginal_likelihood
        former = self.former.evidence(prior_precision=delta)
        moved = former.precision.quad(self.posterior.snapshot().mean - self.former.snapshot().mean)
        return self._log_likelihood(joint) - 0.5 * (joint.log_det_ratio - former.log_det_ratio + moved)

    def _log_likelihood(self, joint: Evidence) -> Tensor:
        fit = self.fit
        return joint.likelihood.log_likelihood(
            fit.loss_terms, fit.n_data, fit.n_outputs, joint.sigma_noise, joint.temperature
        )

    def tuned_prior_precision(self, n_steps: int = 100, lr: float = 0.1) -> Tensor:
        """The prior precision after some steps towards a larger evidence, in the shape of the present one.

        Adam on log δ, starting from the present value; returns the best value seen. The prior is adapted in every task,
        the curvature of former tasks stays (appendix C.4.2 of Daxberger et al., 2021).

        Args:
            n_steps: Number of steps.
            lr: Step size on log δ.

        Raises:
            InvalidArgument: The evidence is not finite, no step, or a step size that is not positive.
        """
        start = self.former.prior_precision.detach()

        def evaluate(logs: Tensor) -> tuple[float, Tensor]:
            with autograd_mode(), torch.enable_grad():
                leaf = logs.clone().requires_grad_()
                value = -self.log_marginal_likelihood(leaf.exp())
                (gradient,) = torch.autograd.grad(value, leaf)
                return value.item(), gradient

        return minimise(evaluate, start.log(), method="adam", n_steps=n_steps, lr=lr, tolerance=0.0).best.exp()

    def finish(self) -> None:
        """Ends the task: adds its curvature to the former posterior and moves its mean to the present weights."""
        after = self.posterior.snapshot()
        self.former.set_posterior(after.at(self.former.snapshot().hypers))


@dataclass(frozen=True, eq=False)
class TaskResult:
    """Result of one task.

    Attributes:
        prior_precision: Prior precision δ, `[1]`, `[n_tensors]` or `[P]`.
        log_marginal_likelihood: Log evidence of the task given the former ones, in nats.
        losses: Training objective per datum, in nats: its mean over each epoch.
    """

    prior_precision: Tensor
    log_marginal_likelihood: float
    losses: list[float]


# The loop.


@checked
def continual_training(
    la: ParametricLaplace,
    train_loaders: Iterable[Iterable[Any]],
    after_task: Callable[[int, TaskResult], object] | None = None,
    **options: Any,
) -> list[TaskResult]:
    """Trains a network on one task after another: the posterior of each task is the prior of the next.

    Args:
        la: A posterior that is not fitted yet, or that of former tasks. Its model is trained; in the end `la` is the
            posterior given all tasks.
        train_loaders: One loader per task; an iterator is advanced when the former task has ended.
        after_task: `after_task(n, result)`, called after each task, with the number of tasks so far.
        **options: Options of `train_task`.

    Returns:
        One result per task.

    Raises:
        InvalidArgument: An option is not accepted.
        InvalidData: A batch cannot be used, or training diverged.
    """
    results: list[TaskResult] = []
    for loader in train_loaders:
        results.append(train_task(la, loader, **options))
        if after_task is not None:
            after_task(len(results), results[-1])
    return results


@checked
def train_task(
    la: ParametricLaplace,
    train_loader: Iterable[Any],
    *,
    n_epochs: int = 100,
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.Adam,
    optimizer_kwargs: dict[str, Any] | None = None,
    scheduler_cls: type[torch.optim.lr_scheduler.LRScheduler] | None = None,
    scheduler_kwargs: dict[str, Any] | None = None,
    fix_prior_precision: bool = False,
    n_epochs_burnin: int = 0,
    marglik_frequency: int = 10,
    n_hypersteps: int = 10,
    lr_hyp: float = 0.1,
    progress_bar: bool = False,
    memory: TaskMemory | None = None,
) -> TaskResult:
    """Learns one task with the posterior of the former tasks as prior, then adds the task to the posterior.

    Only the random weights are trained: all weights, the last layer, or a subnetwork.

    Args:
        la: The posterior of the former tasks; not fitted before the first task. Its model is trained.
        train_loader: Data of the task, read once per epoch.
        n_epochs: Number of epochs.
        optimizer_cls: Class of the optimiser, created anew for every task; L-BFGS works too.
        optimizer_kwargs: Options of the optimiser, e.g. `{"lr": 1e-3}`.
        scheduler_cls: Class of the learning-rate scheduler, stepped after every batch.
        scheduler_kwargs: Options of the scheduler.
        fix_prior_precision: Keep the prior precision, instead of adapting it by the evidence.
        n_epochs_burnin: Number of epochs before it is adapted for the first time.
        marglik_frequency: Number of epochs between adaptations; one more follows the last epoch.
        n_hypersteps: Steps of Adam on log δ per adaptation.
        lr_hyp: Step size of Adam on log δ.
        progress_bar: Show a progress bar.
        memory: Stores the curvature of every task, for a penalty that sums Kronecker products exactly; this task is
            added to it. None: the penalty of the posterior, whose Kronecker factors are summed.

    Returns:
        Prior precision, log evidence and losses.

    Raises:
        InvalidArgument: An option is not accepted, or the loader can be read only once.
        InvalidData: A batch cannot be used, or outputs became infinite in training; the posterior then stays that of
            the former tasks.
        NotFittedError: The last layer is not known; pass `last_layer_name=` to the posterior.
    """
    check_counts(n_epochs=n_epochs, marglik_frequency=marglik_frequency, n_hypersteps=n_hypersteps)
    check_step_size(lr_hyp)
    require_rereadable(train_loader, "training reads train_loader once per epoch")
    former = _copied(la)  # whose prior precision moves with the training, which may fail
    penalty = partial(quadratic_penalty, former) if memory is None else memory.penalty(former)
    descent = _Descent(former, train_loader, penalty, optimizer_cls, optimizer_kwargs, scheduler_cls, scheduler_kwargs)
    losses: list[float] = []
    for epoch in trange(1, n_epochs + 1, desc="task", disable=not progress_bar):
        losses.append(descent.epoch())
        due = epoch > n_epochs_burnin and epoch % marglik_frequency == 0 and epoch < n_epochs
        if due and not fix_prior_precision:
            former.prior_precision = TaskFit.of(former, train_loader).tuned_prior_precision(n_hypersteps, lr_hyp)
    task = TaskFit.of(former, train_loader)
    if not fix_prior_precision:
        former.prior_precision = task.tuned_prior_precision(n_hypersteps, lr_hyp)
    with torch.no_grad():
        evidence = task.log_marginal_likelihood().item()
    task.finish()
    la.set_posterior(former.snapshot())
    if memory is not None:
        memory.add(task.fit, former.snapshot().mean)
    return TaskResult(la.prior_precision.detach().clone(), evidence, losses)


def _copied(la: ParametricLaplace) -> ParametricLaplace:
    """Another object with the same posterior."""
    other = copy.copy(la)
    other.set_posterior(la.snapshot())
    return other


class _Descent:
    """Descent on the negative log posterior of one task, per datum."""

    def __init__(
        self,
        la: ParametricLaplace,
        loader: Iterable[Any],
        penalty: Callable[[], Tensor],
        optimizer_cls: type[torch.optim.Optimizer],
        optimizer_kwargs: dict[str, Any] | None,
        scheduler_cls: type[torch.optim.lr_scheduler.LRScheduler] | None,
        scheduler_kwargs: dict[str, Any] | None,
    ) -> None:
        self.la, self.loader, self.penalty = la, loader, penalty
        self.n_data = sum(len(y) for _, y in self._batches())
        if self.n_data == 0:
            raise InvalidData("train_loader gave no data, or all are ignored; a task needs at least one datum.")
        self.optimizer = optimizer_cls(la.params, **(optimizer_kwargs or {}))
        for decay in (group.get("weight_decay", 0) for group in self.optimizer.param_groups):
            if decay:  # of some optimisers, AdamW for one, it is the default
                raise InvalidArgument(
                    f"weight_decay={decay} of {optimizer_cls.__name__} would be a second prior, and would move the "
                    "fixed entries of a subnetwork; pass optimizer_kwargs={'weight_decay': 0, ...}, the prior "
                    "precision of the posterior regularises."
                )
        self.scheduler = None if scheduler_cls is None else scheduler_cls(self.optimizer, **(scheduler_kwargs or {}))

    def epoch(self) -> float:
        """One pass over the data, in training mode; the mean objective per datum, in nats."""
        total = 0.0
        model = self.la.weights.model
        with flags_put_back(model), torch.enable_grad():
            model.train()
            for x, y in self._batches():
                total += self._step(x, y) * len(y)
        return total / self.n_data

    def _step(self, x: Inputs, y: Tensor) -> float:
        def objective() -> float:
            self.optimizer.zero_grad()
            value = _negative_log_likelihood(self.la, x, y) / len(y) + self.penalty() / self.n_data
            value.backward()
            _keep_fixed_entries(self.la)
            return value.item()

        value = self.optimizer.step(objective)
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        return value

    def _batches(self) -> Iterator[tuple[Inputs, Tensor]]:
        """The data that are not ignored, on the model's device."""
        la = self.la
        for batch in self.loader:
            device, rules = la.prior_mean.device, la.engine.target_rules
            data = next_token.counted(batch, la.dict_key_y, device, rules, la.weights.model)
            if data is not None:
                yield data


def _negative_log_likelihood(la: ParametricLaplace, x: Inputs, y: Tensor) -> Tensor:
    """−log p(y | f(x)) of a batch at the model's present weights, 0-dim, at the posterior's noise and temperature."""
    likelihood = la.likelihood_object
    f = batches.latent(called(la.weights.model, call_of(la.snapshot()), x))
    f, y = as_rows(f, y, la.channel_dim if la.channels_known else None)
    y = la.engine.checked(f, y)
    terms = likelihood.loss_terms(f, y)
    return -likelihood.log_likelihood(
        terms, float(likelihood.count(f, y)), f.shape[1], la.sigma_noise.detach(), la.temperature.detach()
    )


def _keep_fixed_entries(la: ParametricLaplace) -> None:
    """Zeroes the gradients of a subnetwork's fixed entries."""
    for slot, tensor in zip(la.problem.slots, la.params, strict=True):
        if slot.entries is not None and tensor.grad is not None:
            gradient = torch.zeros_like(tensor.grad).view(-1)
            entries = slot.entries.to(gradient.device)
            gradient[entries] = tensor.grad.reshape(-1)[entries]
            tensor.grad = gradient.view_as(tensor.grad)
