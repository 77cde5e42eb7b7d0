"""Searches by gradients: hyper-parameters as a vector of logarithms, and the minimum of an objective over it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from tqdm.auto import tqdm

from laplace.core.arguments import as_tensor, check_counts, check_length, positive
from laplace.core.hyperparameters import Hyperparameters
from laplace.core.layout import Layout
from laplace.core.precision_policy import widened
from laplace.enums import PriorStructure
from laplace.errors import InvalidArgument

Tuned = Literal["prior_precision", "sigma_noise", "temperature"]
"""What can be tuned."""

NAMES: tuple[Tuned, ...] = get_args(Tuned)
"""The same, in order."""


@dataclass(frozen=True)
class Coordinates:
    """The logarithms of the tuned hyper-parameters as one vector.

    Attributes:
        names: Which are tuned, out of `NAMES`.
        start: The values to begin with; those that are not tuned keep them.
    """

    names: tuple[str, ...]
    start: Hyperparameters

    def vector(self) -> Tensor:
        """Logarithms of the start, `[n]`, float64."""
        return widened(torch.cat([getattr(self.start, name).reshape(-1) for name in self.names])).log()

    def hypers(self, logs: Tensor) -> Hyperparameters:
        """The hyper-parameters at a vector of logarithms `[n]`, with its graph."""
        shapes = [getattr(self.start, name).shape for name in self.names]
        numbers = logs.exp().to(self.start.prior_precision.dtype)
        parts = (numbers,) if len(shapes) == 1 else numbers.split([shape.numel() for shape in shapes])
        values = {name: part.view(shape) for name, shape, part in zip(self.names, shapes, parts, strict=True)}
        return replace(self.start, **values)


def checked_names(tune: str | Sequence[str], *, has_noise: bool, by_evidence: bool) -> tuple[str, ...]:
    """The names of what is tuned, in the order of `NAMES`.

    Raises:
        InvalidArgument: None, an unknown name, a noise without a noisy likelihood, or a temperature by the evidence.
    """
    names = (tune,) if isinstance(tune, str) else tuple(str(name) for name in tune)
    unknown = [name for name in names if name not in NAMES]
    if not names or unknown:
        raise InvalidArgument(f"tune={tune!r}; give one or more of {list(NAMES)}.")
    if "sigma_noise" in names and not has_noise:
        raise InvalidArgument("tune holds 'sigma_noise', but the likelihood has no observation noise; leave it out.")
    if "temperature" in names and by_evidence:
        # d/dT of −loss/T − ½ log det(H/T + δ) is loss/T² + ½ tr((H/T + δ)⁻¹ H)/T² ≥ 0 (the GGN, losses ≥ 0).
        raise InvalidArgument(
            "tune holds 'temperature', but the evidence never falls in it: p(y | f)^(1/T) is no normalised density, "
            "and T = ∞ explains all data. Tune the temperature on validation data, by objective='nll' for example."
        )
    return tuple(name for name in NAMES if name in names)


def spread(init: float | Tensor, structure: str, layout: Layout, like: Tensor, name: str = "init_prior_prec") -> Tensor:
    """A prior precision in the asked structure: a vector keeps its own, a scalar is spread over it.

    `name` is that of the caller's argument, for messages.

    Raises:
        InvalidArgument: Unknown structure, or a vector whose length fits nothing.
    """
    lengths = _lengths(structure, layout)
    value = positive(name, as_tensor(name, init, like=like)).detach().reshape(-1)
    if value.numel() == 1:
        return value.repeat(lengths[structure])
    check_length(name, value, lengths)
    return value


def restructured(prior: Tensor, structure: str | None, layout: Layout) -> Tensor:
    """A prior precision in another structure: repeated where it gets longer, else the geometric mean of what it was.

    Args:
        prior: δ, `[1]`, `[n_tensors]` or `[P]`.
        structure: `"scalar"`, `"layerwise"`, `"diag"`, or None for the present one.
        layout: Which entries belong to which tensor.

    Raises:
        InvalidArgument: Unknown structure.
    """
    if structure is None:
        return prior
    length = _lengths(structure, layout)[structure]
    if prior.numel() == length:
        return prior
    if length == layout.n_params and prior.numel() == layout.n_tensors:
        return layout.repeat_per_tensor(prior)
    if length == layout.n_tensors and prior.numel() == layout.n_params:
        return torch.stack([part.log().mean().exp() for part in layout.split(prior)])
    return prior.log().mean().exp().repeat(length)


def _lengths(structure: str, layout: Layout) -> dict[str, int]:
    """Number of precisions in every structure.

    Raises:
        InvalidArgument: Unknown structure.
    """
    lengths = {
        str(PriorStructure.SCALAR): 1,
        str(PriorStructure.LAYERWISE): layout.n_tensors,
        str(PriorStructure.DIAG): layout.n_params,
    }
    if structure not in lengths:
        raise InvalidArgument(f"prior_structure={structure!r}; accepted are {list(lengths)}.")
    return lengths


# One engine for every smooth objective: Adam or L-BFGS on logarithms, and the best value seen.


Evaluate = Callable[[Tensor], tuple[float, Tensor]]
"""Maps a vector of logarithms `[n]` to the value to be made small and its gradient `[n]`."""

BOUND = 23.0
"""Largest |log| that a search reaches from a start within it: 1e-10 to 1e10."""


_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-8
"""Constants of Adam: the two decays, and what keeps the step finite."""


@dataclass
class Search:
    """The course of a search.

    Attributes:
        best: Where the best value was seen, `[n]`.
        best_value: That value; infinite before the first finite one.
        slope: Largest entry of the gradient there.
        values: All values in order.
        bad: How many values or gradients were not finite.
        converged: Whether the gradient vanished, or nothing got better any more.
    """

    best: Tensor
    best_value: float = math.inf
    slope: float = math.inf
    values: list[float] = field(default_factory=list)
    bad: int = 0
    converged: bool = False

    def saw(self, logs: Tensor, value: float, gradient: Tensor) -> float | None:
        """Takes note of an evaluation; its slope, or None where it is not finite."""
        self.values.append(value)
        slope = gradient.abs().max().item()  # NaN if an entry is
        if not math.isfinite(value) or not math.isfinite(slope):
            self.bad += 1
            return None
        if value < self.best_value:
            self.best, self.best_value, self.slope = logs.detach().clone(), value, slope
        return slope

    def is_flat(self) -> bool:
        """True if all values were the same number but for rounding."""
        finite = [value for value in self.values if math.isfinite(value)]
        return len(finite) > 1 and max(finite) - min(finite) <= 1e-7 * abs(max(finite, key=abs))

    def at_bound(self) -> bool:
        """True if the best value lies where the search was stopped."""
        return bool((self.best.abs() >= BOUND).any())


@dataclass(frozen=True)
class Climb:
    """A search by gradients, and its options.

    Attributes:
        method: As of `minimise`, like the others.
        n_steps: Steps of Adam, or iterations of L-BFGS.
        lr: Step size of Adam.
        tolerance: Of the gradient; None makes all steps.
        label: Name of the progress bar.
        progress_bar: Show a progress bar.
    """

    method: str
    n_steps: int
    lr: float
    tolerance: float | None = None
    label: str = "tuning"
    progress_bar: bool = False

    def __call__(self, evaluate: Evaluate, start: Tensor) -> Search:
        """Makes a function of logarithms small, from a start `[n]`.

        Raises:
            InvalidArgument: As of `minimise`.
        """
        return minimise(
            evaluate, start, method=self.method, n_steps=self.n_steps, lr=self.lr, tolerance=self.tolerance or 0.0,
            label=self.label, progress_bar=self.progress_bar,
        )  # fmt: skip

    def shortfall(self, search: Search) -> tuple[str, ...]:
        """A note where a search should have converged and did not."""
        if self.tolerance is None or search.converged or search.is_flat():
            return ()
        slope = f"largest slope {search.slope:.2g} per log unit"
        return (f"the search did not converge in {self.n_steps} steps ({slope}); raise n_steps",)


class _Finished(Exception):
    """A signal out of the line search, never seen by callers: the gradient is small enough, or there is none."""


def minimise(
    evaluate: Evaluate,
    start: Tensor,
    *,
    method: str,
    n_steps: int,
    lr: float,
    tolerance: float,
    label: str = "tuning",
    progress_bar: bool = False,
) -> Search:
    """Makes a function of logarithms small.

    Args:
        evaluate: The function with its gradient.
        start: `[n]`.
        method: `"adam"` or `"lbfgs"` (with a strong Wolfe line search).
        n_steps: Steps of Adam, or iterations of L-BFGS.
        lr: Step size of Adam; L-BFGS finds its own.
        tolerance: The search ends where no entry of the gradient exceeds it times max(1, |value|); 0 never ends early.
        label: Name of the progress bar.
        progress_bar: Show a progress bar.

    Raises:
        InvalidArgument: No step, a step size or tolerance out of range, an unknown method, or no finite value at the
            start.
    """
    check_counts(n_steps=n_steps)
    if not 0 < lr < math.inf:
        raise InvalidArgument(f"lr={lr}; it must be positive and finite.")
    if not 0 <= tolerance < math.inf:
        raise InvalidArgument(f"tolerance={tolerance}; it must be at least 0 and finite.")
    if method not in _METHODS:
        raise InvalidArgument(f"method={method!r}; accepted are {[*_METHODS, 'grid']}.")
    search = Search(start.detach().clone())
    upper = start.detach().abs().clamp(min=BOUND)
    lower = -upper

    with tqdm(total=n_steps + 1 if method == "adam" else None, desc=label, disable=not progress_bar) as bar:

        def step(logs: Tensor) -> tuple[float, Tensor] | None:
            inside = logs.detach().clamp(lower, upper)
            value, gradient = evaluate(inside)
            bar.update()
            slope = search.saw(inside, value, gradient)
            if slope is None:
                return None
            if slope <= tolerance * max(1.0, abs(value)):
                search.converged = True
                raise _Finished
            # Outside of the bound nothing changes.
            return value, gradient.where(inside == logs.detach(), 0.0)

        with contextlib.suppress(_Finished):
            search.converged = _METHODS[method](step, start.detach().clone(), n_steps, lr, search)
        if len(search.values) == 1 and search.slope == 0:  # a minimum, or a flat function?
            search.saw(start + 1, *evaluate(start + 1))
    if not math.isfinite(search.best_value):
        raise InvalidArgument(
            "the objective is not finite where the search starts; check the data, the fit and the start."
        )
    return search


Step = Callable[[Tensor], tuple[float, Tensor] | None]


def _adam(step: Step, logs: Tensor, n_steps: int, lr: float, search: Search) -> bool:
    """After a value that is not finite Adam begins anew at the best point, with half the step size."""
    update = _AdamUpdate(logs, lr)
    for _ in range(n_steps + 1):
        evaluation = step(logs)
        if evaluation is None:
            if not math.isfinite(search.best_value):
                return False
            lr = lr / 2
            logs = search.best.clone()
            update = _AdamUpdate(logs, lr)
            continue
        logs = update(logs, evaluation[1])
    return False


class _AdamUpdate:
    """Steps of Adam (Kingma & Ba, 2015, algorithm 1).

    PyTorch's optimiser computes the same, and imports PyTorch's compiler with its first step: most of a second.

    Args:
        like: Gives shape, dtype and device.
        lr: Step size.
    """

    def __init__(self, like: Tensor, lr: float) -> None:
        self.lr = lr
        self.n = 0
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)

    def __call__(self, logs: Tensor, gradient: Tensor) -> Tensor:
        """The point after a step against a gradient."""
        self.n += 1
        self.first.lerp_(gradient, 1 - _BETA_1)
        self.second.mul_(_BETA_2).addcmul_(gradient, gradient, value=1 - _BETA_2)
        spread = self.second.sqrt().div_(math.sqrt(1 - _BETA_2**self.n)).add_(_EPSILON)
        return logs.addcdiv(self.first, spread, value=-self.lr / (1 - _BETA_1**self.n))


def _lbfgs(step: Step, logs: Tensor, n_steps: int, lr: float, search: Search) -> bool:
    """A value that is not finite counts as a very bad one, which the line search steps back from."""
    logs.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [logs], lr=1.0, max_iter=n_steps, max_eval=4 * n_steps, tolerance_grad=0.0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        evaluation = step(logs)
        if evaluation is None and not math.isfinite(search.best_value):
            raise _Finished
        penalty = 1e3 * (1 + abs(search.best_value)), torch.zeros_like(logs)
        value, gradient = penalty if evaluation is None else evaluation
        logs.grad = gradient
        return logs.new_tensor(value)

    optimizer.step(closure)
    spent = optimizer.state[logs]
    return spent["n_iter"] < n_steps and spent["func_evals"] < 4 * n_steps


_METHODS: dict[str, Callable[[Step, Tensor, int, float, Search], bool]] = {"adam": _adam, "lbfgs": _lbfgs}
