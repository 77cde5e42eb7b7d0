"""Variational posteriors carried by inducing outputs (after Ortega et al., 2024, "Variational linearized Laplace").

q(θ) = N(θ*, (δ + J_Zᵀ L Lᵀ J_Z)⁻¹), where J_Z are the Jacobians of M outputs at M locations. Its evidence lower bound,
with the log likelihood to second order around the network's outputs (exact for a regression), is

    log p(D | θ*) − ½ (log det(P/δ) + δ|θ* − μ₀|² + tr(H P⁻¹) + δ tr(P⁻¹) − P),    H = Σ_n J_nᵀ Λ_n J_n,

at most the evidence of the full Laplace approximation, and equal to it where P = H + δ. For given locations the best L
has L Lᵀ = K⁻¹ S K⁻¹, S = Σ_n K_Zn Λ_n K_nZ: the posterior of all data in the span of J_Z.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core import nested
from laplace.core.arguments import check_call, check_counts, checked
from laplace.core.batch import Inputs
from laplace.core.cached import cached_property
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.inference import kept_for_later
from laplace.core.layout import Layout
from laplace.core.precision_policy import wide_dtype, widened
from laplace.engines.engine import BatchSummary, CurvatureEngine
from laplace.errors import CurvatureError, InvalidArgument, NotFittedError, StateError, UnsupportedError
from laplace.extensions.valla_training import (
    LEARNT,
    STRATEGIES,
    Energy,
    Inducing,
    Places,
    Training,
    TrainingPass,
    chosen,
    make_pool,
    start,
)
from laplace.fitting.fit import FitOptions, check_override, fit
from laplace.function_space.posteriors import BaseFunctionalLaplace, held_out_nll
from laplace.gp.reading import HOLDS_INPUTS, ObservingPass, uncounted
from laplace.jacobian.jacobian import Jacobian, kernel_at, require_rows
from laplace.large_structures.dual import JointPrecision, ProjectedScan
from laplace.structures.base import Curvature, DataPass, require_finite, require_read
from laplace.structures.precision import Precision


@dataclass(frozen=True, eq=False)
class VariationalOptions:
    """Choice of the inducing outputs and of the objective.

    Attributes:
        inducing_locations: Inputs, or `"random"` or `"kmeans"`.
        num_inducing: M, of a strategy.
        inducing_classes: The output of every location, `[M]`.
        seed: Of the choice and of samples.
        alpha: α.
        mc_softmax_samples: Samples of the energy, or 0 for the probit approximation.

    Raises:
        InvalidArgument: A value that is not accepted.
    """

    inducing_locations: Inputs | str
    num_inducing: int | None = None
    inducing_classes: Tensor | None = None
    seed: int = 0
    alpha: float = 1.0
    mc_softmax_samples: int = 0

    def __post_init__(self) -> None:
        given, count = self.inducing_locations, self.num_inducing
        if isinstance(given, str) and given not in STRATEGIES:
            raise InvalidArgument(f"inducing_locations={given!r}; accepted are inputs, or one of {list(STRATEGIES)}.")
        if count is None and isinstance(given, str):
            raise InvalidArgument(f"inducing_locations={given!r} needs num_inducing=, how many.")
        if count is not None:
            check_counts(num_inducing=count)
        if isinstance(given, torch.Tensor) and count not in (None, len(given) if given.ndim else None):
            raise InvalidArgument(f"num_inducing={count}, but inducing_locations has shape {list(given.shape)}.")
        classes = self.inducing_classes
        if classes is not None and (classes.ndim != 1 or classes.is_floating_point()):
            raise InvalidArgument(
                f"inducing_classes has shape {list(classes.shape)} and dtype {classes.dtype}; it must be [M] integers."
            )


@dataclass(frozen=True, eq=False)
class VariationalCurvature(Curvature):
    """J_Zᵀ L Lᵀ J_Z, and what the evidence lower bound needs to know of all data."""

    inducing: Inducing  # J_Z and L
    places: Places  # The inducing outputs
    second: Tensor  # Σ_n K_Zn Λ_n K_nZ, `[E, M, M]`, float64
    total: Tensor  # Σ_n tr(Λ_n K_nn), `[E]`, float64
    name = "gp"
    exact_ggn = True
    weighs_data = False
    options = VariationalOptions
    n_passes = 2
    scaled_by_noise = False
    holds_inputs = True

    @property
    def n_terms(self) -> int:
        return len(self.total)

    @property
    def note(self) -> str:
        return f"variational approximation with {len(self.inducing.root)} inducing outputs; {HOLDS_INPUTS}"

    @cached_property
    def shares(self) -> Tensor:
        """Diagonals of Uᵀ Lᵀ S L U in the eigenvectors U of Lᵀ K L, `[E, r]`."""
        with kept_for_later():
            mixed = self.inducing.root @ self.inducing.unit.vectors
            return torch.einsum("mr,emn,nr->er", mixed, self.second, mixed)

    @classmethod
    def first_pass(cls, engine: CurvatureEngine, options: Any) -> DataPass:
        raise UnsupportedError(
            "a variational posterior is found by its training alone, la.fit(...): it can neither be refined nor "
            "forget data. Use hessian_structure='full', or functional_approximation='sod'."
        )

    @classmethod
    def before_data(cls, prior: GaussianPrior) -> Precision:
        raise UnsupportedError(
            "a variational approximation has no density over weights before fit; call fit(train_loader)."
        )

    def __add__(self, other: Curvature) -> VariationalCurvature:
        raise CurvatureError("variational posteriors cannot be added; train one with all data.")

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> VariationalPrecision:
        """The variational posterior; noise and temperature enter its bound alone.

        Raises:
            UnsupportedError: More than one prior precision.
        """
        if not prior.is_scalar:
            raise UnsupportedError(
                "the variational approximation takes one prior precision. Use functional_approximation='sod' for one "
                "per tensor, or hessian_structure='full' or 'lowrank'."
            )
        one = torch.ones(1, dtype=wide_dtype(self.total.device), device=self.total.device)
        return VariationalPrecision((self.inducing,), one, prior, weights.dtype, self, weights)

    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> ProjectedScan:
        one = torch.ones((), dtype=wide_dtype(weights.device), device=weights.device)
        return ProjectedScan(lambda *asked: (self.inducing.unit.split(*asked),), one, 1.0, weights.dtype)

    def state(self) -> dict[str, Any]:
        return {
            "parts": [part.state() for part in self.inducing.parts],
            "root": self.inducing.root,
            "locations": batches.plain(self.places.x),
            "classes": self.places.classes,
            "second": self.second,
            "total": self.total,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> VariationalCurvature:
        parts = [Jacobian.from_state(part) for part in state["parts"]]
        inducing = nested.from_state(Inducing, {"parts": parts, "root": widened(state["root"])})
        places = nested.from_state(Places, {**state, "x": batches.from_plain(state["locations"])})
        return cls(inducing, places, widened(state["second"]), widened(state["total"]))

    def require_of(self, layout: Layout, dtype: torch.dtype) -> None:
        require_rows([part.blocks for part in self.inducing.parts], layout)
        size, terms = sum(part.blocks[0].n_data for part in self.inducing.parts), len(self.total)
        nested.require_sizes("the triangle of H", self.inducing.root, size, size)
        nested.require_sizes("the second moment of H", self.second, terms, size, size)
        nested.require_sizes("the sum of H", self.total, None)
        classes = self.places.classes
        if classes is not None and (classes.dtype != torch.int64 or tuple(classes.shape) != (size,)):
            raise StateError(
                f"the classes of the inducing outputs are {classes.dtype}, of shape {list(classes.shape)}."
            )

    def public(self) -> Tensor:
        """L Lᵀ, `[M, M]`, float64: the curvature of the inducing outputs."""
        return self.inducing.root @ self.inducing.root.T


@dataclass(frozen=True, eq=False)
class VariationalPrecision(JointPrecision):
    """P = J_Zᵀ L Lᵀ J_Z + δ."""

    curvature: VariationalCurvature  # What the data say
    scale_of_data: Tensor  # 1/(σ²T) of every term, `[E]`

    def slack(self) -> Tensor:
        """tr(H P⁻¹) + δ tr(P⁻¹) − P, 0-dim, differentiable in noise, temperature and prior."""
        values, delta = self.curvature.inducing.unit.values, widened(self.prior.precision[0])
        inverse = 1 / (delta + values)
        data = (self.curvature.total - self.curvature.shares @ inverse) / delta
        return (widened(self.scale_of_data) * data).sum() - (values * inverse).sum()


class InducingPass(DataPass):
    """First reading: counts the data, and picks locations among them where none were given."""

    def __init__(
        self,
        engine: CurvatureEngine,
        options: VariationalOptions,
        training: Training,
        former: VariationalCurvature | None = None,
    ) -> None:
        self.engine = engine  # Computes Jacobians
        self.options = options  # Where the inducing outputs are
        self.training = training  # How they are trained
        self.former = former  # A posterior to go on from, or None
        self.energy = Energy(engine.likelihood, options.alpha, options.mc_softmax_samples)
        self.generator = torch.Generator().manual_seed(options.seed)
        self.n_data = 0
        self.pool = None
        if isinstance(options.inducing_locations, str) and former is None:
            self.pool = make_pool(options.inducing_locations, options.num_inducing or 1, self.generator)

    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        self.n_data += len(y)
        if self.pool is not None:
            self.pool.add(x, y)
        return uncounted(y)

    def finish(self) -> DataPass:
        places, root = self._start()
        engine = self.engine
        return TrainingPass(
            engine, self.energy, places, root, self.n_data, self.training, lambda *trained: BoundPass(engine, *trained)
        )

    def _start(self) -> tuple[Places, Tensor]:
        options = self.options
        if self.former is not None:
            return self.former.places, self.former.inducing.root
        if self.pool is None:
            x = batches.to_device(options.inducing_locations, self.engine.problem.device)
            places = Places(x, options.inducing_classes)
        else:
            choice = chosen(str(options.inducing_locations), options.num_inducing or 1, self.pool, self.generator)
            places = Places(choice.x, options.inducing_classes, choice.labels)
        return start(self.engine, places, self.n_data, self.training)


class BoundPass(ObservingPass):
    """Last reading: what the evidence lower bound needs to know of all data."""

    def __init__(self, engine: CurvatureEngine, places: Places, inducing: Inducing) -> None:
        super().__init__(engine)
        self.places, self.inducing = places, inducing
        self.second: Tensor | None = None
        self.total: Tensor | None = None

    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        for jacobian, f, targets in self.observed(x, y):
            hessian = self.engine.likelihood.hessian(widened(f), targets)
            cross = self.inducing.cross(jacobian).permute(2, 0, 1)
            within = hessian.matrix() * kernel_at(jacobian)
            # With a noise for every output Λ is diagonal: each output has a term of its own.
            terms = "c" if self.engine.split_outputs else ""
            second = torch.einsum(f"mbc,nbc->{terms}mn", cross, hessian.times(cross))
            total = torch.einsum(f"bcd->{terms}", within)
            require_finite(second.isfinite().all() & total.isfinite().all())
            self.second = second if self.second is None else self.second + second
            self.total = total if self.total is None else self.total + total
        return uncounted(y)

    def finish(self) -> VariationalCurvature:
        size = len(self.inducing.root)
        second, total = require_read(self.second).reshape(-1, size, size), require_read(self.total).reshape(-1)
        return VariationalCurvature(self.inducing, self.places, second, total)


# The posterior as users hold it.


class VariationalPosterior(BaseFunctionalLaplace):
    """All weights, by a sparse variational posterior with M inducing points: VaLLA (after Ortega et al., 2024).

    The predictive mean is the network's output. The covariance between outputs is J (δ + J_Zᵀ L Lᵀ J_Z)⁻¹ Jᵀ, with the
    Jacobians J_Z at the inducing points Z and a lower-triangular matrix L. `fit` trains L, Z, the prior precision and
    the noise by Adam, on α-energies of the data plus the divergence from the prior. The evidence is the lower bound
    `elbo`.

    Privacy: saved states and pickles hold the inducing points, which may be training data, and the inputs of the layers
    there.

    Args:
        inducing_locations: Initial inducing points: inputs of M data; `"random"`, a random choice of training data; or
            `"kmeans"`, cluster centres of them. A floating-point tensor is trained, other inputs stay fixed.
        num_inducing: M, with `"random"` and `"kmeans"`.
        inducing_classes: Index of the output that each inducing point stands for, `[M]`. None: output 0; with
            `"random"` and `"kmeans"` the label of the datum, or all outputs in turn if the targets are no labels.
        sigma_noise: Initial standard deviation σ of the observation noise (regression).
        prior_precision: Initial inverse variance δ of the prior, one number.
        backend: A GGN backend; None for the native one.
        backend_kwargs: Its options.
        seed: Seed of the choice of inducing points and of samples.
        alpha: α of the energies: 0 gives the evidence lower bound, 1 the predictive density.
        mc_softmax_samples: Number of samples in the energies of a likelihood without noise; 0 for the probit
            approximation, which needs α = 1.

    Raises:
        InvalidArgument: A value that is not accepted.
    """

    num_inducing = property(attrgetter("structure_options.num_inducing"), doc="M, if it was given.")
    alpha = property(attrgetter("structure_options.alpha"), doc="α of the energies.")
    mc_softmax_samples = property(attrgetter("structure_options.mc_softmax_samples"), doc="Samples of the energies.")
    seed = property(attrgetter("structure_options.seed"), doc="Seed of inducing points and samples.")
    fit_history_: dict[str, list[float]]

    def _construct(self, given: Mapping[str, Any]) -> None:
        super()._construct(given)
        Energy(self.likelihood_object, self.alpha, self.mc_softmax_samples)  # refused now, not at fit
        self.fit_history_ = {}

    @checked
    def fit(
        self,
        train_loader: Iterable[Any],
        override: bool = True,
        progress_bar: bool = False,
        *,
        iterations: int = 100,
        lr: float = 1e-3,
        n_epochs: int | None = None,
        val_loader: Iterable[Any] | None = None,
        val_steps: int | None = None,
        learn: Sequence[str] = LEARNT,
        **options: Any,
    ) -> None:
        """Trains the posterior, and assigns the learnt prior precision and noise.

        The loader is read once to count the data (and to choose inducing points), then for training, with one step of
        Adam per batch, and once more for the evidence lower bound.

        Args:
            train_loader: The training data, as in `ParametricLaplace.fit`; it must be readable several times.
            override: Start again with new L and inducing points; False continues from the former ones. Hyper-parameters
                continue from their present values in both cases.
            progress_bar: Show a progress bar for each pass over the data.
            iterations: Number of Adam steps; 0 keeps the initial L.
            lr: Step size of Adam, for L, log δ, log σ² and the inducing points.
            n_epochs: Number of passes over the data, instead of `iterations`.
            val_loader: Validation data, whose negative log predictive density is recorded in
                `fit_history_["val_nll"]`.
            val_steps: Number of steps between records; None for one record at the end.
            learn: Which of `"prior_precision"`, `"sigma_noise"` and `"inducing_locations"` are learnt besides L.
            **options: Further options of `ParametricLaplace.fit`, except `decay`.

        Raises:
            InvalidData: A batch cannot be used; the former posterior is kept, as after every error.
            InvalidArgument: A value that is not accepted, or a loader that can be read only once.
            UnsupportedError: More than one prior precision.
            CurvatureError: The training diverged.
        """
        history: dict[str, list[float]] = {"objective": [], "val_step": [], "val_nll": []}
        training = Training(
            iterations, n_epochs, lr, learn, self.prior_precision.detach(), self.sigma_noise.detach(),
            self.temperature.detach(), lambda problem: (problem.mean() - self.prior_mean.detach()).square().sum(),
            self.seed, self._watch(val_loader, history), val_steps, history["objective"],
        )  # fmt: skip
        check_override(override)
        check_call(super().fit, "fit", (train_loader,), options)
        former = self._trained if self.is_fitted and not override else None
        how = FitOptions(
            progress_bar=progress_bar, **options,
            first_pass=lambda engine: InducingPass(engine, self.structure_options, training, former),
        )  # fmt: skip
        self.set_posterior(fit(self.snapshot(), train_loader, how).assigned(**training.learnt))
        self.fit_history_ = history

    def _watch(self, val_loader: Iterable[Any] | None, history: dict[str, list[float]]) -> Any:
        """Callback that records the negative log predictive density of validation data."""
        if val_loader is None:
            return None

        def watch(engine: CurvatureEngine, inducing: Inducing, delta: Tensor, sigma: Tensor, step: int) -> None:
            like = self.prior_precision.detach()
            prior = GaussianPrior(delta.to(like).reshape(1), self.prior_mean.detach(), engine.problem.layout)
            precision = JointPrecision((inducing,), like.new_ones(1), prior, like.dtype)
            history["val_step"].append(step)
            history["val_nll"].append(held_out_nll(self.snapshot(), engine, precision, sigma, val_loader))

        return watch

    @property
    def _trained(self) -> VariationalCurvature:
        curvature = self.fitted().curvature
        if not isinstance(curvature, VariationalCurvature):
            raise NotFittedError("this VaLLA is not fitted; call fit(train_loader) first.")
        return curvature

    @property
    def inducing_locations(self) -> Inputs:
        """The trained inducing points; before `fit` the argument."""
        return self._trained.places.x if self.is_fitted else self.structure_options.inducing_locations

    @property
    def inducing_classes(self) -> Tensor | None:
        """Index of the output of each inducing point, `[M]`; before `fit` the argument."""
        return self._trained.places.classes if self.is_fitted else self.structure_options.inducing_classes

    @property
    def L(self) -> Tensor:
        """The lower-triangular matrix L, `[M, M]`, float64."""
        return self._trained.inducing.root

    @property
    def elbo(self) -> Tensor:
        """The evidence lower bound of all data, 0-dim; it is also `log_marginal_likelihood()`."""
        return self.log_marginal_likelihood().detach()
