"""Training of a variational posterior: its objective, its inducing locations, and steps of Adam over both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from laplace.core.arguments import check_counts
from laplace.core.batch import Inputs
from laplace.core.cached import cached_property
from laplace.core.gaussian import GaussianOutputs
from laplace.core.precision_policy import wide_dtype, widened
from laplace.core.random_numbers import uniform
from laplace.engines.engine import BatchSummary, CurvatureEngine
from laplace.enums import LinkApprox
from laplace.errors import CurvatureError, InvalidArgument, InvalidData, UnsupportedError
from laplace.gp.reading import jacobians, observed, uncounted
from laplace.gp.subset import Pool, joined
from laplace.jacobian.jacobian import Jacobian, Scales, kernel, kernel_at, kernel_diagonal
from laplace.large_structures.dual import Span
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.categorical import classes_of
from laplace.likelihoods.targets import mean_of, variance_of
from laplace.structures.base import DataPass, require_finite
from laplace.tuning.losses import find_score
from laplace.weights.problem import Problem

# Objective of a variational posterior: α-energies of the data and its distance from the prior.
#
# An α-energy of a datum is −(1/α) log E_q[p(y | f)^α] (Hernández-Lobato et al., 2016, "Black-box α-divergence
# minimization"): at α → 0 the expected negative log likelihood, with which the objective is the negative evidence lower
# bound, and at α = 1 the negative log predictive density.


@dataclass(frozen=True)
class Energy:
    """(1/α) log E_q[p(y | f)^α] of every datum, in closed form, by the probit approximation or by samples."""

    likelihood: Likelihood  # p(y | f)
    alpha: float  # α
    n_samples: int  # Samples of a likelihood without noise; 0 for the probit approximation at α = 1

    def __post_init__(self) -> None:
        if isinstance(self.alpha, bool) or not 0 <= self.alpha < math.inf:
            raise InvalidArgument(f"alpha={self.alpha}; it must be at least 0 and finite.")
        check_counts(0, mc_softmax_samples=self.n_samples)
        if not self.likelihood.has_noise and self.alpha != 1 and self.n_samples == 0:
            raise InvalidArgument(
                f"alpha={self.alpha} with likelihood={self.likelihood.name!r}: the probit approximation is of alpha=1; "
                "give mc_softmax_samples=, the number of samples, for another alpha."
            )

    @property
    def form(self) -> str:
        """Form of the covariance that is read: `"diagonal"` or `"full"`."""
        if self.likelihood.has_noise:
            return "diagonal"
        return "full" if self.n_samples or not self._reads_variances else "diagonal"

    @property
    def _reads_variances(self) -> bool:
        return self.likelihood.target.reads_variances(self.likelihood, LinkApprox.PROBIT)

    def log_terms(
        self, latent: GaussianOutputs, y: Tensor, sigma_noise: Tensor, temperature: Tensor, generator: torch.Generator
    ) -> Tensor:
        """The terms of B data, `[B]`; differentiable in the latent and the noise."""
        if self.likelihood.has_noise:
            return self._gaussian(latent, y, sigma_noise.square(), temperature)
        if self.n_samples == 0:
            summary = self.likelihood.target.summary(
                self.likelihood, latent.mean, latent.covariance, LinkApprox.PROBIT, for_scores=True
            )
            return -find_score("nll", self.likelihood)(self.likelihood, summary, y, sigma_noise) / temperature
        return self._sampled(latent, y, sigma_noise, generator) / temperature

    def _gaussian(self, latent: GaussianOutputs, y: Tensor, noise: Tensor, temperature: Tensor) -> Tensor:
        """The energy in closed form; every output is a likelihood term of its own."""
        residual, variance = (y - latent.mean).square(), latent.covariance
        if self.alpha == 0:
            data = (residual + variance) / noise
        else:
            spread = self.alpha * variance
            data = residual / (noise + spread) + (spread / noise).log1p() / self.alpha
        return -0.5 * (data / temperature + (2 * math.pi * noise).log()).sum(1)

    def _sampled(self, latent: GaussianOutputs, y: Tensor, sigma_noise: Tensor, generator: torch.Generator) -> Tensor:
        samples = latent.sample(self.n_samples, generator)
        repeated = y.repeat(self.n_samples, *[1] * (y.ndim - 1))
        summary = self.likelihood.target.summary_of_samples(self.likelihood, samples.flatten(0, 1).unsqueeze(0))
        means, variances = mean_of(summary), variance_of(summary)
        logs = -self.likelihood.predictive_nll(means, variances, repeated, sigma_noise).view(self.n_samples, -1)
        if self.alpha == 0:
            return logs.mean(0)
        return ((self.alpha * logs).logsumexp(0) - math.log(self.n_samples)) / self.alpha


def divergence(gram: Tensor, prior_precision: Tensor, distance: Tensor) -> Tensor:
    """KL(q ‖ p) between N(θ*, (δ + Aᵀ A)⁻¹) and N(μ₀, δ⁻¹), 0-dim, differentiable.

    ½ (log det(I + G/δ) − tr((δ + G)⁻¹ G) + δ |θ* − μ₀|²) with G = A Aᵀ.
    """
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    root = torch.linalg.cholesky(eye + gram / prior_precision)
    logdet = 2 * root.diagonal().log().sum()
    # tr((δ + G)⁻¹ G) = M − tr((I + G/δ)⁻¹) would cancel where G is small.
    ratio = torch.cholesky_solve(gram / prior_precision, root).trace()
    return 0.5 * (logdet - ratio + prior_precision * distance)


# Inducing outputs: single outputs of the network at M locations, whose Jacobians carry a variational posterior.


STRATEGIES = ("random", "kmeans")
"""How locations are chosen from the data."""

_CANDIDATES = 100
"""Data per centre that k-means looks at: a random sample of more says nothing new."""

_ROUNDS = 100


@dataclass(frozen=True, eq=False)
class Inducing(Span):
    """A = Lᵀ J_Z: the rows of J of the inducing outputs, mixed by a lower triangle."""

    parts: tuple[Jacobian, ...]  # J_Z, with one cotangent
    root: Tensor  # L, `[M, M]`, float64

    @cached_property
    def kernel(self) -> Tensor:
        """J_Z J_Zᵀ, `[M, M]`, float64, with the graph of the parts."""
        return torch.cat([self.cross(part)[:, 0] for part in self.parts])

    def cross(self, jacobian: Jacobian) -> Tensor:
        """J J_Zᵀ of B data, `[B, C, M]`, float64."""
        return torch.cat([kernel(jacobian, part)[..., 0] for part in self.parts], 2)

    def gram(self, weights: Tensor | None, scales: Scales) -> Tensor:
        """Lᵀ K L, `[M, M]`: the posterior is none of a prior per tensor, and L knows its weights."""
        return self.root.T @ self.kernel @ self.root

    def lift(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        return self.root.to(rows) @ rows

    def lower(self, outputs: Tensor, weights: Tensor | None) -> Tensor:
        return outputs @ self.root.to(outputs)


@dataclass(frozen=True, eq=False)
class Places:
    """Locations of the inducing outputs."""

    x: Inputs  # Locations, inputs of M data
    classes: Tensor | None = None  # Which output of each, `[M]`, or None for the first
    labels: Tensor | None = None  # The targets that came with the locations, or None

    @property
    def trainable(self) -> bool:
        """True if the locations are real numbers that can be moved."""
        return isinstance(self.x, Tensor) and self.x.is_floating_point()

    def settled(self, f: Tensor, likelihood: Likelihood) -> Places:
        """The places with one output each, given the network's outputs there `[M, C]`.

        A class label names its output, a soft one that of its most probable class; data of other targets take the
        outputs in turn.
        """
        count, n_outputs = f.shape
        classes = self.classes
        if classes is None and self.labels is not None:
            hard = classes_of(widened(self.labels), likelihood)
            labels = self.labels if hard is None else hard
            named = labels.ndim == 1 and not labels.is_floating_point() and labels.amax() < n_outputs
            classes = labels if named else torch.arange(count) % n_outputs
        if classes is None:
            classes = torch.zeros(count)
        classes = classes.to(device=f.device, dtype=torch.long)
        if len(classes) != count:
            raise InvalidArgument(f"inducing_classes has {len(classes)} entries for {count} inducing locations.")
        if not bool(((classes >= 0) & (classes < n_outputs)).all()):
            raise InvalidArgument(
                f"inducing_classes lie between {int(classes.min())} and {int(classes.max())}; the network has "
                f"{n_outputs} outputs, 0 to {n_outputs - 1}."
            )
        return Places(self.x, classes)


def inducing_jacobians(engine: CurvatureEngine, places: Places, *, create_graph: bool = False) -> tuple[Jacobian, ...]:
    """J_Z, one cotangent; with `create_graph` it can be differentiated with respect to the locations."""
    parts: list[Jacobian] = []
    start = 0
    for jacobian, f in jacobians(engine, places.x, create_graph=create_graph):
        stop = start + len(f)
        rows = jacobian.select_outputs(_classes(places)[start:stop].unsqueeze(1))
        parts.append(rows if create_graph else rows.detached())
        start = stop
    return tuple(parts)


def _classes(places: Places) -> Tensor:
    """The outputs."""
    if places.classes is None:
        raise InvalidArgument("the inducing outputs are not settled.")
    return places.classes


# Choices among the data.


def make_pool(strategy: str, count: int, generator: torch.Generator) -> Pool:
    """Pool of the data that a strategy chooses from."""
    return Pool(count * (_CANDIDATES if strategy == "kmeans" else 1), lambda x, y: uniform((len(y),), y, generator))


def chosen(strategy: str, count: int, pool: Pool, generator: torch.Generator) -> Places:
    """M places among the data of a pool."""
    pool.size = count if pool.seen < count else min(pool.size, pool.seen)
    whole = None
    for rows in pool.chunks():
        both = rows if whole is None else joined(whole, rows, pool.size)
        if both is None:
            raise InvalidData(
                f"inducing_locations={strategy!r} needs inputs of one shape; give the locations themselves."
            )
        whole = both
    if whole is None:
        raise InvalidData("no data were read.")
    if strategy == "random":
        return Places(whole.x, labels=whole.y)
    if not isinstance(whole.x, Tensor) or not whole.x.is_floating_point():
        raise InvalidArgument(
            "inducing_locations='kmeans' averages inputs, which takes a tensor of real numbers; use 'random', or give "
            "the locations themselves."
        )
    points = widened(whole.x.flatten(1))
    centres = k_means(points, count, generator)
    nearest = torch.cdist(centres, points).argmin(1)
    return Places(centres.to(whole.x.dtype).view(count, *whole.x.shape[1:]), labels=whole.y[nearest])


def k_means(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Centres `[M, D]` of points `[n, D]`: Lloyd's algorithm from the start of Arthur and Vassilvitskii (2007)."""
    # Every further centre is drawn with the squared distance from the nearest one before as its weight.
    picks = uniform((count,), points, generator)
    centres = points[(picks[:1] * len(points)).long()]
    for pick in picks[1:]:
        weights = torch.cdist(points, centres).amin(1).square()
        reached = weights.cumsum(0)
        place = torch.searchsorted(reached, pick * reached[-1], right=True).clamp(max=len(points) - 1)
        centres = torch.cat([centres, points[place].unsqueeze(0)])
    former = torch.full((len(points),), -1, device=points.device)
    for _ in range(_ROUNDS):
        nearest = torch.cdist(points, centres).argmin(1)
        if torch.equal(nearest, former):
            break
        former = nearest
        counts = torch.bincount(nearest, minlength=count).unsqueeze(1)
        sums = torch.zeros_like(centres).index_add(0, nearest, points)
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
    return centres


LEARNT = ("prior_precision", "sigma_noise", "inducing_locations")
"""What can be learnt besides L."""

_SMALL = 1e-4
"""The least curvature that an inducing output starts with: at L = 0 its gradient is 0."""


@dataclass
class Training:
    """Options of training a variational posterior, and what came out besides it."""

    iterations: int  # Steps of Adam, one a batch
    n_epochs: int | None  # Readings of the data instead, or None
    lr: float  # Step size
    learn: Sequence[str]  # Names of `LEARNT`
    prior_precision: Tensor  # Where δ starts, `[1]`
    sigma_noise: Tensor  # Where σ starts, 0-dim or `[C]`
    temperature: Tensor  # T
    distance: Callable[[Problem], Tensor]  # |θ* − μ₀|² of the random weights, 0-dim
    seed: int  # Of the samples
    # Called with the inducing outputs, δ and σ every `watch_steps` steps, and at the end
    watch: Callable[[CurvatureEngine, Inducing, Tensor, Tensor, int], None] | None = None
    watch_steps: int | None = None  # Steps between these calls, or None for the end alone
    history: list[float] = field(default_factory=list)  # The objective per datum of every step
    learnt: dict[str, Tensor] = field(default_factory=dict)  # The hyper-parameters that were learnt, by their names

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
    """Variables that Adam moves: all of them as coordinates without bounds."""

    def __init__(self, engine: CurvatureEngine, places: Places, root: Tensor, training: Training) -> None:
        self.engine = engine  # Gives the Jacobians of the locations
        self.training = training  # The hyper-parameters, and what of it all is learnt
        self.root = root.detach().clone().requires_grad_()  # L, `[M, M]`
        self.log_prior = widened(training.prior_precision.detach()).reshape(()).log()
        self.log_noise = widened(training.sigma_noise.detach()).square().log()
        self.places = places  # The inducing outputs
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
    """The inducing outputs and L of the subset-of-data posterior in which every output stands for N·C/M."""
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
        latent = GaussianOutputs(f, marginals(inducing, root, delta, jacobian, energy.form))
        temperature = widened(training.temperature)
        terms.append(energy.log_terms(latent, targets, variables.sigma_noise, temperature, generator))
    distance = widened(training.distance(variables.engine.problem))
    return divergence(gram, delta, distance) - n_data * torch.cat(terms).mean()


def marginals(inducing: Inducing, root: Tensor, delta: Tensor, jacobian: Jacobian, form: str) -> Tensor:
    """J_b (δ + J_Zᵀ L Lᵀ J_Z)⁻¹ J_bᵀ, `[B, C, C]`, or its diagonals `[B, C]`; float64, differentiable.

    By Woodbury's identity 1/δ (k_bb − k_bZ L (δ + G)⁻¹ Lᵀ k_Zb).
    """
    mixed = inducing.cross(jacobian) @ inducing.root
    solved = torch.linalg.solve_triangular(root, mixed.flatten(0, 1).T, upper=False).T.view_as(mixed)
    if form == "full":
        return (kernel_at(jacobian) - solved @ solved.mT) / delta
    return (kernel_diagonal(jacobian) - solved.square().sum(2)).clamp(min=0) / delta


class TrainingPass(DataPass):
    """Readings of the data in which every batch is a step of Adam, until there were enough."""

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
