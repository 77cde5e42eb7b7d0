"""Laplace approximations in weight space, as users hold them: fitting, moments, tuning, refinement."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from laplace.by_hand import FittedByHand
from laplace.compat.members import LegacyMembers
from laplace.core.arguments import checked
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.overrides import is_overridden
from laplace.core.registry import KeyedClasses
from laplace.errors import NotFittedError
from laplace.evidence import Evidence
from laplace.fitting import Fit
from laplace.fitting.planning import FitPlan
from laplace.network.fingerprint import Fingerprint
from laplace.posterior import learning, overridden
from laplace.posterior.assembled import with_root
from laplace.posterior.posterior import Posterior
from laplace.posterior.predictor import PosteriorPredictor
from laplace.posterior.refined import Refinement
from laplace.predicting import Predicting
from laplace.refinement.refine import refine
from laplace.refinement.refiner import RefineOptions
from laplace.state import Kept
from laplace.structures.base import Precision
from laplace.tuning import PosteriorGroup, Tunable

if TYPE_CHECKING:
    import os
    from datetime import timedelta

    from torch.distributed import ProcessGroup

    from laplace.core.data_weights import WeightFn

CELLS: KeyedClasses[ParametricLaplace] = KeyedClasses()
"""Classes with a `_key`: the cells of the grid that have one."""


class ParametricLaplace(Predicting, FittedByHand, Kept, Tunable, LegacyMembers):
    """Base of all weight-space posteriors; a concrete class binds `structure` and `weights_type`.

    The arguments are those of `BaseLaplace`.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Files a class with a `_key` of its own, by which `Laplace(...)` finds it."""
        super().__init_subclass__(**options)
        if "_key" in vars(cls):
            CELLS.add(vars(cls)["_key"], cls)

    # What the data say.

    @property
    def is_fitted(self) -> bool:
        """True if `fit` or `load_state_dict` gave a posterior."""
        return self._posterior.data is not None

    def fitted(self) -> Fit:
        """Curvature and loss of the data; after `refine`, at the outputs of the linearised network.

        Raises:
            NotFittedError: Before `fit`.
        """
        self._require_data()
        return self._posterior.fit

    def unrefined(self) -> Fit:
        """Curvature and loss of the data at the network's own outputs.

        Raises:
            NotFittedError: Before `fit`.
        """
        self._require_data()
        return self._posterior.map_fit

    def _require_data(self) -> None:
        if not self.is_fitted:
            raise NotFittedError(f"this {type(self).__name__} is not fitted; call fit(train_loader) first.")

    @property
    def fingerprint(self) -> Fingerprint | None:
        """Fingerprint of the network at the fit; None before it."""
        return None if self._posterior.data is None else self._posterior.data.watch.fingerprint

    def check_unchanged(self) -> None:
        """Raises `ModelChangedError` if the network's weights, or its outputs at data of the fit, are not as then."""
        self._posterior.check_unchanged()

    def coverage(self) -> dict[str, str]:
        """The layer rule or fallback that explains every random tensor, and the form in which its curvature is held.

        Raises:
            NotFittedError: Before `fit`.
        """
        return dict(self.fitted().coverage)

    @property
    def expansion_point(self) -> Tensor:
        """θ*, the network's weights at `fit`, around which predictions are linearised, `[P]`.

        Raises:
            NotFittedError: Before `fit`.
        """
        self._require_data()
        return self._posterior.expansion_point

    @property
    def refinement(self) -> Refinement | None:
        """The result of `refine`; None without one, and after a fit that followed."""
        return self._posterior.refinement

    # Moments and evidence.

    @property
    def prior(self) -> GaussianPrior:
        """N(μ₀, diag(δ)⁻¹)."""
        prior = GaussianPrior(self.prior_precision, self.prior_mean, self.problem.layout)
        if not is_overridden(self, "prior_precision_diag"):
            return prior
        return replace(prior, precision=overridden.own_diagonal(self, prior))

    @property
    def prior_precision_diag(self) -> Tensor:
        """δ of every random parameter, `[P]`."""
        return GaussianPrior(self.prior_precision, self.prior_mean, self.problem.layout).diagonal()

    def evidence(self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None) -> Evidence:
        self._require_data()
        given = {"prior_precision": prior_precision, "sigma_noise": sigma_noise}
        other = {name: value for name, value in given.items() if value is not None}
        if not other:
            return overridden.resolved(self, self._posterior).evidence
        with self.holding(self._posterior.at(replace(self._posterior.hypers, **other))):
            return self.evidence()

    def posterior(self) -> Precision:
        """The posterior precision with its factorisation, kept until a hyper-parameter or the fit changes.

        Where a hyper-parameter requires a gradient it is made anew, with the graph that leads to it, and not kept; so
        is one that a user's class computes.
        """
        self._require_data()
        return overridden.own_posterior(self, self._posterior)

    def predictive_posterior(self) -> Precision:
        """The posterior as predictions and samples see it: with what users' classes override."""
        return overridden.predictive_posterior(self)

    @property
    def posterior_precision(self) -> Any:
        """P: `[P, P]`, `[P]`, or a `KronDecomposed` with `diag()`, `to_matrix()`, `logdet()`, `bmm()`."""
        return self.evidence().precision.public

    @property
    def posterior_covariance(self) -> Tensor:
        """P⁻¹, `[P, P]`."""
        return overridden.posterior_before(self, "posterior_covariance").covariance

    @property
    def posterior_variance(self) -> Tensor:
        """Diagonal of P⁻¹, `[P]`."""
        return overridden.posterior_before(self, "posterior_variance").diagonal_of_inverse()

    @property
    def posterior_scale(self) -> Tensor:
        """L with L Lᵀ = P⁻¹: lower-triangular (full), symmetric (Kron), or standard deviations `[P]` (diag).

        Any root `[P, P]`, or `[P]`, can be assigned: it is that of predictions, samples and moments until another
        hyper-parameter or other data are given. The evidence and `posterior_precision` stay those of H and the prior.
        """
        return overridden.posterior_before(self, "posterior_scale").scale

    @posterior_scale.setter
    def posterior_scale(self, root: Tensor) -> None:
        self._posterior = with_root(self._posterior, root)

    def square_norm(self, value: Tensor) -> Tensor:
        """(θ − θ*)ᵀ P (θ − θ*) of `[..., P]`; the prior's before `fit`."""
        return self._density().quad(self.problem.layout.checked(value) - self.snapshot().mean)

    def log_prob(self, value: Tensor, normalized: bool = True) -> Tensor:
        """Log density of the posterior at θ `[..., P]`; the prior's before `fit`."""
        own = is_overridden(self, "square_norm")
        precision = self._density()
        value = self.problem.layout.checked(value)
        unnormalised = -0.5 * (self.square_norm(value) if own else precision.quad(value - self.snapshot().mean))
        if not normalized:
            return unnormalised
        own = is_overridden(self, "log_det_posterior_precision")
        logdet = self.log_det_posterior_precision if own else precision.logdet()
        normaliser = 0.5 * value.shape[-1] * math.log(2 * math.pi) - 0.5 * logdet
        return (unnormalised - normaliser).to(unnormalised.dtype)

    def _density(self) -> Precision:
        return self._precision() if self.is_fitted else self.structure.before_data(self.prior)

    # From data to the next posterior.

    @checked
    def fit(
        self,
        train_loader: Iterable[Any],
        override: bool = True,
        progress_bar: bool = False,
        *,
        decay: float = 1.0,
        subset: int | None = None,
        generator: torch.Generator | None = None,
        check_memory: bool = True,
        group: ProcessGroup | None = None,
        sharded: bool = False,
        resume: str | os.PathLike[str] | None = None,
        save_every: int | timedelta | None = None,
        weight_fn: WeightFn | None = None,
        dict_key_weight: str | None = None,
    ) -> None:
        """Fits the Gaussian to the curvature of the data at the model's present weights.

        Args:
            train_loader: Batches `(x, y)`, tuples `(x1, …, y)` or mappings with `dict_key_y`.
            override: Start anew; False adds the data to those of the former fit.
            progress_bar: Show one.
            decay: With `override=False`, how often former data count from now on, in (0, 1]; the prior does not fade.
            subset: M: take the curvature of M data drawn at random, times N/M, which is unbiased (Immer et al., 2021,
                appendix A.3.1); loss and number are those of all N. The data are read once more.
            generator: Source of that choice; None for the global one, which leads to another choice each time.
            check_memory: Refuse a fit that takes more memory than there is: above 1 GiB, under Linux and on CUDA.
            group: Processes of `torch.distributed`, each of which calls `fit` with a loader of its shard of the data;
                all have the sums of all data then. What `DistributedSampler` repeats counts once.
            sharded: Whether afterwards each of them keeps some tensors only (of `"kron"`, `"ekfac"`, `"diag"`,
                `"block"`, `"lowrank_kron"`): all must then ask the same, predictions or evidence, at the same time.
            resume: File to which the sums are written now and then (of a group: one each), from which a fit that was
                killed goes on, to the same bits; removed at the end.
            save_every: Batches, or time, from one writing to the next; None for ten minutes.
            weight_fn: How often every datum counts, in loss, curvature and `n_data`: `weight_fn(x, y)`, `[B]` of at
                least 0, of a batch as the loader gives it; None for once. Of 0 a datum is left out.
            dict_key_weight: Key of such numbers in batches that are mappings; the model does not get them.

        Raises:
            OutOfMemory: Memory does not hold the fit; the message names choices that take less.
            StateError: The file is of another fit.
            InvalidData: A batch cannot be used; the former posterior is kept, as after every error.
            InvalidArgument: A hyper-parameter's length does not fit the random parameters or the outputs, or a decay,
                a subset, another group, or a loader (of `resume`: whose order cannot be had again), not accepted.
            InvalidType: What is given for the loader cannot be iterated over, or targets are given beside it.
            ProcessError: Another process of the group failed, or has another network or settings; all of them raise.
            UnsupportedError: The structure is no sum over data, and the fit cannot fade, be of a group or resumed; or
                it is no sum over tensors, and cannot be sharded; or what is summed knows no weights of data.

        Warns:
            ApproximationWarning: Random outputs, several heads with a last layer, one of several processes without
                `group`, processes that read the same data, or many weights that Kronecker factors could not hold.
        """
        posterior = learning.fitted_to(
            self.snapshot(), train_loader, override=override, progress_bar=progress_bar, decay=decay, subset=subset,
            generator=generator, check_memory=check_memory, group=group, sharded=sharded, resume=resume,
            save_every=save_every, weight_fn=weight_fn, dict_key_weight=dict_key_weight,
        )  # fmt: skip
        self.set_posterior(posterior)

    @checked
    def forget(
        self,
        loader: Iterable[Any],
        progress_bar: bool = False,
        *,
        weight: float = 1.0,
        group: ProcessGroup | None = None,
        weight_fn: WeightFn | None = None,
        dict_key_weight: str | None = None,
    ) -> None:
        """Removes the contribution of data from the fit: their curvature, their loss and their number.

        The curvature is then that of a fit without them. The mean stays, for it is the network's weights, which were
        trained with the data; without all data the posterior is a Gaussian around them with the prior's precision.

        Args:
            loader: Batches of data that were fitted, at the weights that the network still has.
            progress_bar: Show one.
            weight: How often the data count in the fit: 1, or `decay**k` for data that faded in k later fits.
            group: As of `fit`.
            weight_fn: The weights with which they were fitted, as of `fit`.
            dict_key_weight: The same by their key.

        Raises:
            NotFittedError: Before `fit`.
            ModelChangedError: The weights are not those of the fit any more, at which the curvature was computed.
            InvalidData: More data than the fit has seen, or data that cannot be used.
            CurvatureError: The curvature would be indefinite: these data were not fitted.
            UnsupportedError: The structure is no sum over data, or its curvature is a random sample. After every error
                the former posterior is kept.
        """
        self._require_data()
        posterior = learning.without(
            self.snapshot(), loader, progress_bar=progress_bar, weight=weight, group=group, weight_fn=weight_fn,
            dict_key_weight=dict_key_weight,
        )  # fmt: skip
        self.set_posterior(posterior)

    @checked
    def plan(self, train_loader: Iterable[Any]) -> FitPlan:
        """Predicts memory and time of `fit` and of a prediction from the first batch; nothing is fitted or drawn.

        Where the last layer is not known yet, it is found, as `fit` would.

        Args:
            train_loader: What `fit` would be given; one batch of it is read.

        Raises:
            InvalidArgument: A loader that can be read only once: a fit would miss that batch.
            InvalidData: No data that count.
            UnsupportedError: A user's own backend or structure, which does not say what it takes.
        """
        posterior, plan = learning.planned(self._posterior, train_loader)
        self.set_posterior(posterior)
        return plan

    @checked
    def refine(
        self,
        loader: Iterable[Any],
        method: Literal["map", "variational"] = "map",
        *,
        max_steps: int = 100,
        tolerance: float | None = None,
        n_samples: int = 200,
        generator: torch.Generator | None = None,
        progress_bar: bool = False,
    ) -> Refinement:
        """Inference in the linearised model f(x, θ*) + J (θ − θ*), at the present hyper-parameters, and takes it over.

        The network's weights are its mode only where training converged; `"map"` finds the mode (a convex problem) and
        the curvature there, in the posterior's structure. `"variational"` finds the Gaussian that maximises the
        evidence lower bound among those of the structure, full, block, Kronecker-factored or diagonal (Immer et al.,
        2021, appendices A.3.2 and B.3). A Gaussian process on a subset (`"gp"`) is refined in function space, by the
        kernel of its M data, which are chosen from the loader as `fit` does.
        Afterwards predictions of `pred_type="glm"` have the mean f(x, θ*) + J (θ̂ − θ*); the evidence is
        log p(D | f_lin(θ̂)) − ½ (log det P − log det P₀ + (θ̂ − μ₀)ᵀ P₀ (θ̂ − μ₀)). A fit that follows removes it.

        Args:
            loader: All data of the fit; they are read once and held (of a Gaussian process its M data).
            method: `"map"` or `"variational"`.
            max_steps: Newton steps, or updates of the variational covariance.
            tolerance: Distance from the mode in posterior standard deviations, or relative change of the bound; None
                for what the precision of the numbers allows.
            n_samples: Points of the expectations of softmax likelihoods (others take quadrature).
            generator: Source of those points; None for seed 0.
            progress_bar: Show one.

        Returns:
            How it ended, `la.refinement`.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: An unknown method, or options that are not accepted.
            InvalidData: Other data than those of the fit.
            UnsupportedError: A backend other than the GGN of this library, or a structure without a variational form.
                After every error the former posterior is kept.

        Warns:
            ApproximationWarning: It did not converge.
        """
        options = RefineOptions(max_steps, tolerance, n_samples, generator, progress_bar)
        refinement = refine(self.snapshot(), loader, method, options)
        self._posterior = self._posterior.with_refinement(refinement)
        return refinement

    # Predictions and tuning.

    @property
    def _predictor(self) -> PosteriorPredictor:
        return PosteriorPredictor(self.snapshot(), self.enable_backprop)

    @property
    def _group(self) -> PosteriorGroup:
        return PosteriorGroup((self.snapshot(),))

    def _take_over(self, posteriors: tuple[Posterior, ...]) -> None:
        (posterior,) = posteriors
        self.set_posterior(posterior)
