"""Training of a variational posterior: Adam over L, the hyper-parameters and the inducing locations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from laplace.core.argument_checks import check_counts
from laplace.core.batch import Inputs
from laplace.core.gaussian import Gaussian
from laplace.core.precision_policy import wide_dtype, widened
from laplace.engines.engine import BatchSummary, CurvatureEngine
from laplace.errors import CurvatureError, InvalidArgument, UnsupportedError
from laplace.function_space.variational_energy import Energy, divergence
from laplace.function_space.variational_inducing import Inducing, Places, inducing_jacobians
from laplace.jacobian.jacobian import Jacobian, kernel_at, kernel_diagonal
from laplace.structures.base import DataPass, require_finite
from laplace.structures.gp.dual import jacobians, observed, uncounted
from laplace.weights.problem import Problem

LEARNT = ("prior_precision", "sigma_noise", "inducing_locations")
"""What can be learnt besides L."""

_SMALL = 1e-4
"""The least curvature that an inducing output starts with: at L = 0 its gradient is 0."""


@dataclass
class Training:
    """Options of training a variational posterior, and what came out besides it.

    Attributes:
        iterations: Steps of Adam, one a batch.
        n_epochs: Readings of the data instead, or None.
        lr: Step size.
        learn: Names of `LEARNT`.
        prior_precision: Where δ starts, `[1]`.
        sigma_noise: Where σ starts, 0-dim or `[C]`.
        temperature: T.
        distance: |θ* − μ₀|² of the random weights, 0-dim.
        seed: Of the samples.
        watch: Called with the inducing outputs, δ and σ every `watch_steps` steps, and at the end.
        watch_steps: Steps between these calls, or None for the end alone.
        history: The objective per datum of every step.
        learnt: The hyper-parameters that were learnt, by their names.

    Raises:
        InvalidArgument: A value that is not accepted.
    """

    iterations: int
    n_epochs: int | None
    lr: float
    learn: Sequence[str]
    prior_precision: Tensor
    sigma_noise: Tensor
    temperature: Tensor
    distance: Callable[[Problem], Tensor]
    seed: int
    watch: Callable[[CurvatureEngine, Inducing, Tensor, Tensor, int], None] | None = None
    watch_steps: int | None = None
    history: list[float] = field(default_factory=list)
    learnt: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_counts(0, iterations=self.iterations)
        given = {"n_epochs": self.n_epochs, "val_steps": self.watch_steps}
        check_counts(**{name: count for name, count in given.items() if count is not None})
        if not 0 < self.lr < float("inf"):
            raise InvalidArgument(f"lr={self.lr}; it must be positive and finite.")
        unknown = sorted({self.learn} if isinstance(self.learn, str) else set(self.learn) - set(LEARNT))
        if unknown:
            raise InvalidArgument(f"learn has {unknown}; give a sequence of {list(LEARNT)}.")
        if self.prior_precision.numel() != 1:
            raise UnsupportedError(
                f"the variational approximation takes one prior precision; {self.prior_precision.numel()} were given. "
                "Use functional_approximation='sod' for one per tensor."
            )

    @property
    def steps(self) -> float:
        """Largest number of steps."""
        return self.iterations if self.n_epochs is None else float("inf")


class Variables:
    """Variables that Adam moves: all of them as coordinates without bounds.

    Args:
        engine: Gives the Jacobians of the locations.
        places: The inducing outputs.
        root: L, `[M, M]`.
        training: The hyper-parameters, and what of it all is learnt.
    """

    def __init__(self, engine: CurvatureEngine, places: Places, root: Tensor, training: Training) -> None:
        self.engine = engine
        self.training = training
        self.root = root.detach().clone().requires_grad_()
        self.log_prior = widened(training.prior_precision.detach()).reshape(()).log()
        self.log_noise = widened(training.sigma_noise.detach()).square().log()
        self.places = places
        self.leaves = [self.root]
        if "prior_precision" in training.learn:
            self.leaves.append(self.log_prior.requires_grad_())
        if "sigma_noise" in training.learn and engine.likelihood.has_noise:
            self.leaves.append(self.log_noise.requires_grad_())
        self.parts: tuple[Jacobian, ...] | None = None
        if "inducing_locations" in training.learn and places.trainable:
            self.places = replace(places, x=places.x.detach().clone().requires_grad_())
            self.leaves.append(self.places.x)

    @property
    def prior_precision(self) -> Tensor:
        """δ, 0-dim."""
        return self.log_prior.exp()

    @property
    def sigma_noise(self) -> Tensor:
        """σ, 0-dim or `[C]`."""
        return (0.5 * self.log_noise).exp()

    def inducing(self) -> Inducing:
        """The inducing outputs at the present values, with their graph."""
        moving = isinstance(self.places.x, Tensor) and self.places.x.requires_grad
        if moving:
            return Inducing(inducing_jacobians(self.engine, self.places, create_graph=True), self.root.tril())
        if self.parts is None:
            self.parts = inducing_jacobians(self.engine, self.places)
        return Inducing(self.parts, self.root.tril())

    def settled(self) -> tuple[Places, Inducing]:
        """The places and inducing outputs as constants."""
        x = self.places.x.detach() if isinstance(self.places.x, Tensor) else self.places.x
        places = replace(self.places, x=x)
        return places, Inducing(inducing_jacobians(self.engine, places), self.root.detach().tril())


def start(engine: CurvatureEngine, places: Places, n_data: int, training: Training) -> tuple[Places, Tensor]:
    """The inducing outputs and L of the subset-of-data posterior in which every output stands for N·C/M.

    Args:
        engine: Knows the network.
        places: Locations.
        n_data: N.
        training: Noise and temperature.
    """
    f = widened(torch.cat([f.detach() for _, f in jacobians(engine, places.x)]))
    places = places.settled(f, engine.likelihood)
    curvature = engine.likelihood.hessian(f).diagonal()
    scale = engine.likelihood.curvature_scale("ggn", widened(training.sigma_noise), widened(training.temperature))
    classes = torch.as_tensor(places.classes).unsqueeze(1)
    chosen = (scale * curvature).gather(1, classes).squeeze(1)
    share = n_data * f.shape[1] / len(f)
    return places, (share * chosen.clamp(min=_SMALL * float(scale.max()))).sqrt().diag()


def objective(
    variables: Variables, energy: Energy, x: Inputs, y: Tensor, n_data: int, generator: torch.Generator
) -> Tensor:
    """Energy of a batch times N/B plus the divergence, 0-dim and differentiable.

    At α = 0 and with all data as one batch it is the negative evidence lower bound.
    """
    training = variables.training
    delta, inducing = variables.prior_precision, variables.inducing()
    gram = inducing.gram(None, None)
    root = torch.linalg.cholesky(gram + delta * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    terms: list[Tensor] = []
    for jacobian, f, targets in observed(variables.engine, x, y, wide_dtype(variables.engine.problem.device)):
        latent = Gaussian(f, marginals(inducing, root, delta, jacobian, energy.form))
        temperature = widened(training.temperature)
        terms.append(energy.log_terms(latent, targets, variables.sigma_noise, temperature, generator))
    distance = widened(training.distance(variables.engine.problem))
    return divergence(gram, delta, distance) - n_data * torch.cat(terms).mean()


def marginals(inducing: Inducing, root: Tensor, delta: Tensor, jacobian: Jacobian, form: str) -> Tensor:
    """J_b (δ + J_Zᵀ L Lᵀ J_Z)⁻¹ J_bᵀ, `[B, C, C]`, or its diagonals `[B, C]`; float64, differentiable.

    By Woodbury's identity 1/δ (k_bb − k_bZ L (δ + G)⁻¹ Lᵀ k_Zb).

    Args:
        inducing: J_Z and L.
        root: Cholesky factor of δ + G.
        delta: δ, 0-dim.
        jacobian: J of B data.
        form: `"full"` or `"diagonal"`.
    """
    mixed = inducing.cross(jacobian) @ inducing.root
    solved = torch.linalg.solve_triangular(root, mixed.flatten(0, 1).T, upper=False).T.view_as(mixed)
    if form == "full":
        return (kernel_at(jacobian) - solved @ solved.mT) / delta
    return (kernel_diagonal(jacobian) - solved.square().sum(2)).clamp(min=0) / delta


class TrainingPass(DataPass):
    """Readings of the data in which every batch is a step of Adam, until there were enough.

    Args:
        engine: Computes Jacobians.
        energy: Of the data.
        places: The inducing outputs.
        root: L.
        n_data: N.
        training: How it is trained.
        last: The reading after the last one, of the trained places and inducing outputs.
    """

    def __init__(
        self,
        engine: CurvatureEngine,
        energy: Energy,
        places: Places,
        root: Tensor,
        n_data: int,
        training: Training,
        last: Callable[[Places, Inducing], DataPass],
    ) -> None:
        self.energy, self.n_data, self.training, self.last = energy, n_data, training, last
        self.variables = Variables(engine, places, root, training)
        self.optimizer = torch.optim.Adam(self.variables.leaves, lr=training.lr)
        self.generator = torch.Generator().manual_seed(training.seed)
        self.steps = self.epochs = 0

    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        if self.steps >= self.training.steps:
            return uncounted(y)
        with torch.enable_grad():
            loss = objective(self.variables, self.energy, x, y, self.n_data, self.generator)
            # Locations that no Jacobian depends on, as those of a lone bias, stay where they are.
            gradients = torch.autograd.grad(loss, self.variables.leaves, materialize_grads=True)
        require_finite(loss.isfinite())
        for leaf, gradient in zip(self.variables.leaves, gradients, strict=True):
            leaf.grad = gradient
        self.optimizer.step()
        self.training.history.append(loss.item() / self.n_data)
        self.steps += 1
        if self.training.watch_steps and self.steps % self.training.watch_steps == 0:
            self._watch()
        return uncounted(y)

    def _watch(self) -> None:
        if self.training.watch is not None:
            _, inducing = self.variables.settled()
            delta, sigma = self.variables.prior_precision.detach(), self.variables.sigma_noise.detach()
            self.training.watch(self.variables.engine, inducing, delta, sigma, self.steps)

    def finish(self) -> DataPass:
        self.epochs += 1
        training = self.training
        if self.epochs < training.n_epochs if training.n_epochs else self.steps < training.steps:
            return self
        if training.watch_steps is None or self.steps % training.watch_steps:
            self._watch()
        for leaf in self.variables.leaves:
            if not bool(leaf.detach().isfinite().all()):
                raise CurvatureError(f"the training diverged with lr={training.lr}; give a smaller one.")
        if self.steps and self.variables.log_prior.requires_grad:
            training.learnt["prior_precision"] = self.variables.prior_precision.detach()
        if self.steps and self.variables.log_noise.requires_grad:
            training.learnt["sigma_noise"] = self.variables.sigma_noise.detach()
        return self.last(*self.variables.settled())
