"""Continual learning by recursive Bayes: the posterior after one task is the prior of the next.

With the data of former tasks gone, p(θ | D_1, …, D_t) ∝ p(D_t | θ) p(θ | D_1, …, D_{t−1}) (Daxberger et al., 2021,
appendix C.4) is all that task t needs. Laplace approximations keep the former posterior as
N(θ_{t−1}, P_{t−1}⁻¹), so that task t minimises

    −log p(D_t | θ) + ½ (θ − θ_{t−1})ᵀ P_{t−1} (θ − θ_{t−1}),        P_t = s Σ_{t' ≤ t} H_{t'} + diag(δ)

with the curvature H_{t'} of every task at the weights θ_{t'} at which it ended, s = 1/(σ²T), and one prior in all.
A posterior that is fitted with `override=False` holds exactly θ_{t−1} and the sum: nothing else is kept between tasks.
Kronecker factors are summed one by one, which approximates the sum of the products (Ritter et al., 2018); `TaskMemory`
keeps the products of every task for the penalty.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm.auto import trange

from laplace.core import batch as batches
from laplace.core.arguments import CheckedConstructor, check_counts, checked
from laplace.core.batch import Inputs, require_rereadable
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.positions import as_rows
from laplace.errors import InvalidArgument, InvalidData, StateError
from laplace.fitting.fit import FitOptions, compute_fit
from laplace.network import next_token
from laplace.network.input_errors import call_with_context
from laplace.network.model_guard import autograd_mode, flags_put_back
from laplace.parametric import ParametricLaplace
from laplace.state import checked_device
from laplace.structures.base import Curvature, Precision, move
from laplace.structures.fit import Fit
from laplace.training.online import check_step_size, random_weights
from laplace.tuning.search import SearchOptions, minimise

# ----------------------------------------------------------------------------------------------------------------------
# One task
# ----------------------------------------------------------------------------------------------------------------------


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
    def from_data(cls, la: ParametricLaplace, train_loader: Iterable[Any], *, progress_bar: bool = False) -> TaskFit:
        """Fits a task, whose curvature is added [Redux, appendix eq. 16]; the posterior `la` is not changed.

        Args:
            la: The posterior of the former tasks.
            train_loader: Data of the task.
            progress_bar: Show a progress bar.

        Raises:
            InvalidData: A batch cannot be used.
        """
        options = FitOptions(override=False, progress_bar=progress_bar)
        task, after = compute_fit(la.snapshot(), train_loader, options), _copied(la)
        with torch.no_grad():
            after.set_posterior(task.after(la.fitted() + task.fit if la.is_fitted else task.fit))
        return cls(la, task.fit, after)

    def log_marginal_likelihood(self, prior_precision: Tensor | None = None) -> Tensor:
        """Log evidence of the task given the former ones, 0-dim, differentiable in δ.

        log p(D_t | D_<t) ≈ log p(D_t | θ_t) − ½ (log det P_t − log det P_{t−1} + Δᵀ P_{t−1} Δ),   Δ = θ_t − θ_{t−1}

        is the log evidence with the former posterior as prior, which normalises the posterior of the task. For the
        first task it is that of the fit.

        Args:
            prior_precision: δ in P_t and P_{t−1}, `[1]`, `[n_tensors]` or `[P]`; None for the present one.
        """
        delta = self.former.prior_precision if prior_precision is None else prior_precision
        joint = self.posterior.evidence(prior_precision=delta)
        if not self.former.is_fitted:
            return joint.log_marginal_likelihood
        former = self.former.evidence(prior_precision=delta)
        fit, distance = self.fit, former.precision.quad(self.posterior.snapshot().mean - self.former.snapshot().mean)
        log_likelihood = joint.likelihood.log_likelihood(
            fit.loss_terms, fit.n_observed, fit.n_outputs, joint.sigma_noise, joint.temperature
        )
        return log_likelihood - 0.5 * (joint.log_det_ratio - former.log_det_ratio + distance)

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

        def evaluate(logs: Tensor) -> tuple[Tensor, Tensor]:
            with autograd_mode(), torch.enable_grad():
                leaf = logs.clone().requires_grad_()
                value = -self.log_marginal_likelihood(leaf.exp())
                (gradient,) = torch.autograd.grad(value, leaf)
                return value.detach(), gradient

        return minimise(evaluate, start.log(), SearchOptions("adam", n_steps, lr)).best.exp()

    def finish(self) -> None:
        """Ends the task: adds its curvature to the former posterior and moves its mean to the present weights."""
        after = self.posterior.snapshot()
        self.former.set_posterior(after.at_hyperparameters(self.former.snapshot().hypers))


@dataclass(frozen=True, eq=False)
class TaskResult:
    """Result of one task.

    Attributes:
        prior_precision: Prior precision δ, `[1]`, `[n_tensors]` or `[P]`.
        log_marginal_likelihood: Log evidence of the task given the former ones, in nats.
        losses: Training objective per input, in nats: its mean over each epoch.
    """

    prior_precision: Tensor
    log_marginal_likelihood: float
    losses: list[float]


# ----------------------------------------------------------------------------------------------------------------------
# The loop over tasks
# ----------------------------------------------------------------------------------------------------------------------


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
    """Learns one task with the posterior of the former ones as prior, and adds it to that [Redux, appendix eq. 15].

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
            former.prior_precision = TaskFit.from_data(former, train_loader).tuned_prior_precision(n_hypersteps, lr_hyp)
    task = TaskFit.from_data(former, train_loader)
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
    """Descent on the negative log posterior of one task, per input."""

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
        """One pass over the data, in training mode; the mean objective per input, in nats."""
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
        rules = la.engine.target_rules
        for _, x, y in next_token.read(self.loader, la.dict_key_y, la.prior_mean.device, rules, la.weights.model):
            yield x, y


def _negative_log_likelihood(la: ParametricLaplace, x: Inputs, y: Tensor) -> Tensor:
    """−log p(y | f(x)) of a batch at the model's present weights, 0-dim, at the posterior's noise and temperature."""
    likelihood = la.likelihood_object
    f = batches.latent(call_with_context(la.weights.model, la.snapshot().call, x))
    f, y = as_rows(f, y, la.channel_dim if la.channels_known else None)
    y = la.engine.checked(f, y)
    terms, seen = likelihood.loss_terms(f, y), likelihood.observations(f, y)
    return -likelihood.log_likelihood(
        terms,
        float(likelihood.count(f, y)) if seen is None else seen,
        f.shape[1],
        la.sigma_noise.detach(),
        la.temperature.detach(),
    )


def _keep_fixed_entries(la: ParametricLaplace) -> None:
    """Zeroes the gradients of a subnetwork's fixed entries."""
    for slot, tensor in zip(la.problem.slots, la.params, strict=True):
        if slot.entries is not None and tensor.grad is not None:
            gradient = torch.zeros_like(tensor.grad).view(-1)
            entries = slot.entries.to(gradient.device)
            gradient[entries] = tensor.grad.reshape(-1)[entries]
            tensor.grad = gradient.view_as(tensor.grad)


# ----------------------------------------------------------------------------------------------------------------------
# Penalties of former tasks: the negative log density of their posterior
# ----------------------------------------------------------------------------------------------------------------------
#
# `TaskMemory` keeps the curvature of every task: a penalty with the sum of Kronecker products (Ritter et al., 2018).
# Kronecker factors of tasks that are summed one by one, as those of data are, stand for more than the sum of their
# products: (B_1 + B_2) ⊗ (A_1 + A_2) has cross terms. Kept separately, the products are summed exactly, in the penalty,
# at a product with each of them: time and memory grow with the number of tasks.


def quadratic_penalty(la: ParametricLaplace, theta: Tensor | None = None) -> Tensor:
    """½ (θ − θ*)ᵀ P (θ − θ*) [Redux, eq. 4]: the posterior's negative log density, without its normaliser.

    Before `fit` it is the one of the prior, ½ (θ − μ₀)ᵀ diag(δ) (θ − μ₀), so that the first task needs no special case.
    Add it to the *summed* loss of a task, or divided by N to the mean loss.

    Args:
        la: The posterior of the former tasks.
        theta: Weights θ, `[P]`; None for the network's present weights, with their graph.

    Returns:
        The penalty in nats, 0-dim, differentiable in θ.

    Raises:
        NotFittedError: The last layer is not known yet.
        UnsupportedError: A structure (`"matrix_free"`) whose curvature cannot be used after the weights change.
    """
    la.structure.require_stored("a penalty on weights that train on")
    theta = random_weights(la) if theta is None else theta
    if not la.is_fitted:
        return 0.5 * la.prior.quad(theta)
    return half_quadratic(theta - la.snapshot().mean, la.posterior())


def half_quadratic(vector: Tensor, matrix: Precision | MemoryPenalty) -> Tensor:
    """½ vᵀ M v, 0-dim, differentiable in v; value and gradient take one product `matrix.product(v)`."""
    return _HalfQuadratic.apply(vector, matrix)  # pyright: ignore[reportReturnType]


class _HalfQuadratic(torch.autograd.Function):
    """½ vᵀ M v, whose gradient M v is known with the value: autograd would pay for it a second time."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, matrix: Precision | MemoryPenalty) -> Tensor:
        product = matrix.product(vector)
        ctx.save_for_backward(vector, product)
        ctx.matrix = matrix
        return 0.5 * (vector @ product)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        vector, product = ctx.saved_tensors
        if torch.is_grad_enabled():
            product = _Product.apply(vector, ctx.matrix)
        return grad_outputs[0] * product, None


class _Product(torch.autograd.Function):
    """M v, whose gradient is one more product."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, matrix: Precision | MemoryPenalty) -> Tensor:
        ctx.matrix = matrix
        return matrix.product(vector)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Product.apply(grad_outputs[0], ctx.matrix), None  # pyright: ignore[reportReturnType]


_VERSION = 1
"""Version of the format of states."""


class TaskMemory(CheckedConstructor):
    """Stores the curvature H_t and the weights θ_t of every finished task, for `train_task(la, loader, memory=...)`.

    The penalty of the next task is, with s = 1/(σ²T),

        ½ (θ − θ_T)ᵀ (Σ_t s H_t + diag(δ)) (θ − θ_T)                    centre="last", the recursion of Bayes' rule
        Σ_t ½ s (θ − θ_t)ᵀ H_t (θ − θ_t) + ½ (θ − μ₀)ᵀ diag(δ) (θ − μ₀)   centre="own", a quadratic per task

    (Ritter et al., 2018, "Online structured Laplace approximations for overcoming catastrophic forgetting"; the latter
    with Kirkpatrick et al.'s centres, 2017). The first is `quadratic_penalty` where curvatures add up exactly, as
    `full`, `block` and `diag` do. Predictions and the evidence are those of the posterior, whose factors are summed.

    Example:
        memory = TaskMemory()
        for loader in loaders:
            train_task(la, loader, memory=memory)

    Args:
        centre: `"last"`: all penalties are centred at the last weights θ_T; `"own"`: each at its own θ_t.

    Attributes:
        fits: Curvature and loss of each task alone.
        means: Weights at the end of each task, `[P]`.

    Raises:
        InvalidArgument: `centre` is another name.
    """

    def __init__(self, centre: Literal["last", "own"] = "last") -> None:
        if centre not in ("last", "own"):
            raise InvalidArgument(f"centre={centre!r}; 'last' and 'own' are accepted.")
        self.centre = centre
        self.fits: list[Fit] = []
        self.means: list[Tensor] = []
        self._layout: dict[str, list[Any]] | None = None  # of the posterior whose penalty was asked for

    def add(self, fit: Fit, mean: Tensor) -> None:
        """Stores a finished task.

        Args:
            fit: Curvature and loss of the task alone, `TaskFit.fit`.
            mean: Weights θ_t at its end, `[P]`.
        """
        self.fits.append(fit)
        self.means.append(mean)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> TaskMemory:
        """Moves the tasks to a device or dtype, in place, as `la.to` moves the posterior; returns itself."""
        to = None if device is None else checked_device(device)
        self.fits = [fit.moved(to, dtype) for fit in self.fits]
        self.means = [mean.to(device=to, dtype=dtype) for mean in self.means]
        return self

    def state_dict(self) -> dict[str, Any]:
        """The tasks as tensors, numbers and strings, to be saved beside the posterior's own state."""
        tasks = [_state_of_task(fit, mean) for fit, mean in zip(self.fits, self.means, strict=True)]
        return {"version": _VERSION, "centre": self.centre, "layout": self._layout, "tasks": tasks}

    def load_state_dict(self, state_dict: dict[str, Any], la: ParametricLaplace) -> None:
        """Replaces the tasks by saved ones.

        Args:
            state_dict: What `state_dict` returned.
            la: The posterior of the same tasks, whose structure the curvatures have and to whose device they are moved.

        Raises:
            StateError: A state of another centre, structure or network, or none of this class.
        """
        _check(state_dict, {"version": _VERSION, "centre": self.centre})
        layout, structure, like = _layout_of(la), la.snapshot().choices.structure, la.prior_mean
        if state_dict.get("layout") is not None:
            _check(state_dict["layout"], layout)
        try:
            for task in state_dict["tasks"]:
                size = {"structure": structure.name, "n_params": sum(layout["sizes"])}
                _check(task | {"n_params": len(task["mean"])}, size)
            fits = [_fit_of_task(task, structure, like.device).moved(None, like.dtype) for task in state_dict["tasks"]]
            means = [task["mean"].to(like, copy=True) for task in state_dict["tasks"]]
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            raise StateError(f"the state is malformed: {error!r}; save it anew by memory.state_dict().") from error
        self.fits, self.means, self._layout = fits, means, layout

    def penalty(self, la: ParametricLaplace) -> MemoryPenalty:
        """The penalty as a function of the weights, at the present noise and temperature.

        Args:
            la: The posterior of the same tasks; not fitted, if there are none. Its prior precision may change later.

        Raises:
            InvalidArgument: The posterior was fitted to other data, or has other random weights.
            UnsupportedError: A structure (`"matrix_free"`) whose curvature cannot be used after the weights change.
        """
        la.structure.require_stored("a penalty on weights that train on")
        layout = _layout_of(la)
        if self._layout not in (None, layout):
            raise InvalidArgument(
                "the tasks that are kept are of other random weights than the posterior's; give train_task the same "
                "network from the first task on, and a new TaskMemory with a new one."
            )
        self._layout = layout
        n_kept, n_data = float(sum(fit.n_data for fit in self.fits)), float(la.n_data) if la.is_fitted else 0.0
        if n_kept != n_data:
            raise InvalidArgument(
                f"the tasks that are kept have {n_kept:g} data, the posterior {n_data:g}; give train_task the same "
                "TaskMemory from the first task on, and a new one with a new posterior."
            )
        if not self.fits:
            return MemoryPenalty(la, (), (), self.centre)
        with torch.no_grad():
            # Without a prior a precision is s H.
            prior = GaussianPrior(la.prior_mean.new_zeros(1), la.prior_mean.new_zeros(()), la.problem.layout)
            alone = [replace(la.evidence(), fit=fit, prior=prior).constant().precision for fit in self.fits]
        return MemoryPenalty(la, tuple(alone), tuple(self.means), self.centre)


def _layout_of(la: ParametricLaplace) -> dict[str, list[Any]]:
    layout = la.snapshot().problem.layout
    return {"names": list(layout.names), "sizes": list(layout.sizes)}


def _state_of_task(fit: Fit, mean: Tensor) -> dict[str, Any]:
    return {
        "structure": fit.curvature.name,
        "mean": mean.clone(),
        "H": fit.curvature.state(),
        "loss": fit.loss_terms.clone(),
        "n_data": fit.n_data,
        "n_outputs": fit.n_outputs,
        "coverage": dict(fit.coverage),
        "is_weighed": fit.is_weighed,
        "gaps": None if fit.gaps is None else fit.gaps.clone(),
    }


def _fit_of_task(task: dict[str, Any], structure: type[Curvature], device: torch.device) -> Fit:
    curvature, loss = structure.from_state(move(task["H"], device, None)), task["loss"].to(device, copy=True)
    size, coverage = (task["n_data"], task["n_outputs"]), dict(task["coverage"])
    return Fit(curvature, loss, *size, coverage, is_weighed=task["is_weighed"], gaps=task.get("gaps"))


def _check(state: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises `StateError` unless a state has these entries."""
    if not isinstance(state, dict):
        raise StateError(f"the state is of type {type(state).__name__}; give what memory.state_dict() returned.")
    for name, value in expected.items():
        if state.get(name) != value:
            raise StateError(
                f"the state's {name} is {state.get(name)!r}, here it is {value!r}; give the state of a TaskMemory of "
                "the same network, structure and centre."
            )


@dataclass(frozen=True, eq=False)
class MemoryPenalty:
    """A penalty of `TaskMemory`, in nats: to be added to the summed loss of a task, or with 1/N to the mean."""

    la: ParametricLaplace  # of the tasks; its prior precision and present weights are read
    precisions: tuple[Precision, ...]  # s H_t of every task
    means: tuple[Tensor, ...]  # θ_t of every task, `[P]`
    centre: str

    def __call__(self, theta: Tensor | None = None) -> Tensor:
        """The penalty at θ `[P]`, or at the network's present weights with their graph; 0-dim, differentiable in θ."""
        theta, prior = random_weights(self.la) if theta is None else theta, self.la.prior
        if not self.means:
            return 0.5 * prior.quad(theta)
        if self.centre == "last":
            last = self.means[-1]
            return half_quadratic(theta - last, self) + 0.5 * replace(prior, mean=last).quad(theta)
        tasks = zip(self.means, self.precisions, strict=True)
        return sum((half_quadratic(theta - mean, alone) for mean, alone in tasks), 0.5 * prior.quad(theta))

    def product(self, vectors: Tensor) -> Tensor:
        """Σ_t s H_t v of vectors `[..., P]`, same shape, without gradient."""
        return torch.stack([alone.product(vectors) for alone in self.precisions]).sum(0)
