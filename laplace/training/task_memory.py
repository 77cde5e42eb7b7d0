"""The curvature of every task on its own: a penalty with the sum of Kronecker products (Ritter et al., 2018).

Kronecker factors of tasks that are summed one by one, as those of data are, stand for more than the sum of their
products: (B_1 + B_2) ⊗ (A_1 + A_2) has cross terms. Kept apart, the products are summed exactly, in the penalty, at a
product with each of them: time and memory grow with the number of tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from laplace.core.arguments import CheckedConstructor
from laplace.core.hyperparameters import GaussianPrior
from laplace.errors import InvalidArgument, StateError
from laplace.fitting import Fit
from laplace.parametric import ParametricLaplace
from laplace.posterior.learning import require_held
from laplace.state import checked_device
from laplace.structures.base import Curvature, Precision, move
from laplace.training.trained_weights import random_weights

# The penalty of former tasks, the negative log density of their posterior; quadratic forms with half the work.


def quadratic_penalty(la: ParametricLaplace, theta: Tensor | None = None) -> Tensor:
    """Quadratic penalty ½ (θ − θ*)ᵀ P (θ − θ*): the posterior's negative log density, without its normaliser.

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
    require_held(la.snapshot(), "a penalty on weights that train on")
    theta = random_weights(la) if theta is None else theta
    if not la.is_fitted:
        return 0.5 * la.prior.quad(theta)
    return half_quadratic(theta - la.snapshot().mean, la.posterior())


class SymmetricProduct(Protocol):
    """A symmetric matrix that is known by its products."""

    def product(self, vectors: Tensor) -> Tensor:
        """M v of vectors `[..., P]`, same shape, without gradient."""
        ...


def half_quadratic(vector: Tensor, matrix: SymmetricProduct) -> Tensor:
    """½ vᵀ M v, 0-dim, differentiable in v; value and gradient take one product."""
    return _HalfQuadratic.apply(vector, matrix)  # pyright: ignore[reportReturnType]


class _HalfQuadratic(torch.autograd.Function):
    """½ vᵀ M v, whose gradient M v is known with the value: autograd would pay for it a second time."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, matrix: SymmetricProduct) -> Tensor:
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
    def forward(ctx: Any, vector: Tensor, matrix: SymmetricProduct) -> Tensor:
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
        tasks = [_task(fit, mean) for fit, mean in zip(self.fits, self.means, strict=True)]
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
            fits = [_fit(task, structure, like.device).moved(None, like.dtype) for task in state_dict["tasks"]]
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
        require_held(la.snapshot(), "a penalty on weights that train on")
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
    """Names and sizes of the random weights."""
    layout = la.snapshot().problem.layout
    return {"names": list(layout.names), "sizes": list(layout.sizes)}


def _task(fit: Fit, mean: Tensor) -> dict[str, Any]:
    """The state of a task."""
    return {
        "structure": fit.curvature.name,
        "mean": mean.clone(),
        "H": fit.curvature.state(),
        "loss": fit.loss_terms.clone(),
        "n_data": fit.n_data,
        "n_outputs": fit.n_outputs,
        "coverage": dict(fit.coverage),
        "is_weighed": fit.is_weighed,
    }


def _fit(task: dict[str, Any], structure: type[Curvature], device: torch.device) -> Fit:
    """Curvature and loss of a task's state."""
    curvature, loss = structure.from_state(move(task["H"], device, None)), task["loss"].to(device, copy=True)
    size, coverage = (task["n_data"], task["n_outputs"]), dict(task["coverage"])
    return Fit(curvature, loss, *size, coverage, is_weighed=task["is_weighed"])


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
    """A penalty of `TaskMemory`, in nats: to be added to the summed loss of a task, or with 1/N to the mean.

    Attributes:
        la: The posterior of the tasks, whose prior precision and present weights it reads.
        precisions: s H_t of every task.
        means: θ_t of every task, `[P]`.
        centre: `"last"` or `"own"`.
    """

    la: ParametricLaplace
    precisions: tuple[Precision, ...]
    means: tuple[Tensor, ...]
    centre: str

    def __call__(self, theta: Tensor | None = None) -> Tensor:
        """The penalty, 0-dim, differentiable in θ.

        Args:
            theta: Where, `[P]`; None for the network's present weights, with the graph that leads to them.
        """
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
