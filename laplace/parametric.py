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
from laplace.posterior import learning, user_hooks
from laplace.posterior.assembled import with_root
from laplace.posterior.calibration import Calibration
from laplace.posterior.posterior import Posterior, Refinement
from laplace.posterior.predictor import PosteriorPredictor
from laplace.predicting import Predicting
from laplace.state import Kept
from laplace.structures.base import Precision
from laplace.tuning.tunable import Tunable

if TYPE_CHECKING:
    import os
    from datetime import timedelta

    from torch.distributed import ProcessGroup

    from laplace.core.data_weights import WeightFn
    from laplace.tuning.group import PosteriorGroup

CELLS: KeyedClasses[ParametricLaplace] = KeyedClasses()
"""Classes with a `_key`: the cells of the grid that have one."""


class ParametricLaplace(Predicting, FittedByHand, Kept, Tunable, LegacyMembers):
    """Base of all posteriors over weights; what `Laplace(...)` returns is of a class derived from it."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Files a class with a `_key` of its own, by which `Laplace(...)` finds it."""
        super().__init_subclass__(**options)
        if "_key" in vars(cls):
            CELLS.add(vars(cls)["_key"], cls)

    # What the data say.

    @property
    def is_fitted(self) -> bool:
        """True after `fit` or `load_state_dict`."""
        return self._posterior.data is not None

    def fitted(self) -> Fit:
        """Curvature and loss of the training data; after `refine`, at the outputs of the linearised network.

        Raises:
            NotFittedError: Before `fit`.
        """
        self._require_data()
        return self._posterior.fit

    def unrefined(self) -> Fit:
        """Curvature and loss of the training data at the network's own outputs, also after `refine`.

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
        """Checksums of the network's weights at the fit, which tell later changes; None before `fit`."""
        return None if self._posterior.data is None else self._posterior.data.watch.fingerprint

    def check_unchanged(self) -> None:
        """Raises `ModelChangedError` if the network's weights, or its outputs at training data, changed since `fit`."""
        self._posterior.check_unchanged()

    def coverage(self) -> dict[str, str]:
        """Rule by which the curvature of each random tensor was computed, and the form in which it is stored, by name.

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
        """The result of the last `refine`; None without one, and again None after the next `fit`."""
        return self._posterior.refinement

    # Moments and evidence.

    @property
    def prior(self) -> GaussianPrior:
        """The prior N(μ₀, diag(δ)⁻¹) over the random parameters."""
        prior = GaussianPrior(self.prior_precision, self.prior_mean, self.problem.layout)
        if not is_overridden(self, "prior_precision_diag"):
            return prior
        return replace(prior, precision=user_hooks.users_prior_diagonal(self, prior))

    @property
    def prior_precision_diag(self) -> Tensor:
        """Prior precision δ of every random parameter, `[P]`."""
        return GaussianPrior(self.prior_precision, self.prior_mean, self.problem.layout).diagonal()

    def evidence(self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None) -> Evidence:
        self._require_data()
        given = {"prior_precision": prior_precision, "sigma_noise": sigma_noise}
        other = {name: value for name, value in given.items() if value is not None}
        if not other:
            return user_hooks.with_users_values(self, self._posterior).evidence
        with self.holding(self._posterior.at(replace(self._posterior.hypers, **other))):
            return self.evidence()

    def posterior(self) -> Precision:
        """The posterior precision P = s H + diag(δ) with its factorisation; of a GGN s = 1 / (σ² T).

        It is cached until a hyper-parameter or the fit changes; where a hyper-parameter requires a gradient it is
        computed at every call, with its graph.
        """
        self._require_data()
        return user_hooks.users_posterior(self, self._posterior)

    def predictive_posterior(self) -> Precision:
        """The posterior precision that predictions and samples use, with overrides of your own class applied."""
        return user_hooks.predictive_posterior(self)

    @property
    def posterior_precision(self) -> Any:
        """Posterior precision P: `[P, P]`, `[P]` (diagonal), or a `KronDecomposed`, whose `to_matrix()` is dense."""
        return self.evidence().precision.public

    @property
    def posterior_covariance(self) -> Tensor:
        """Posterior covariance P⁻¹, dense, `[P, P]`."""
        return user_hooks.posterior_before(self, "posterior_covariance").covariance

    @property
    def posterior_variance(self) -> Tensor:
        """Posterior variance of every random parameter, the diagonal of P⁻¹, `[P]`."""
        return user_hooks.posterior_before(self, "posterior_variance").diagonal_of_inverse()

    @property
    def posterior_scale(self) -> Tensor:
        """Root L of the posterior covariance, L Lᵀ = P⁻¹: triangular (full), symmetric (Kron) or `[P]` (diag).

        You may assign a root of your own, `[P, P]` or `[P]`. Predictions, samples and moments use it until a
        hyper-parameter or the data change; the evidence and `posterior_precision` do not.
        """
        return user_hooks.posterior_before(self, "posterior_scale").scale

    @posterior_scale.setter
    def posterior_scale(self, root: Tensor) -> None:
        self._posterior = with_root(self._posterior, root)

    def square_norm(self, value: Tensor) -> Tensor:
        """(θ − θ*)ᵀ P (θ − θ*) at weights θ, `[..., P]`; before `fit` with mean and precision of the prior."""
        return self._density().quad(self.problem.layout.checked(value) - self.snapshot().mean)

    def log_prob(self, value: Tensor, normalized: bool = True) -> Tensor:
        """Log density of the posterior at weights θ, `[..., P]`; before `fit` that of the prior."""
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
        """Fits the posterior: one pass over the data sums their curvature at the network's trained weights.

        Args:
            train_loader: The training data: batches `(x, y)`, tuples `(x1, …, y)` or mappings with the key
                `dict_key_y`.
            override: Start from scratch; False adds these data to those of the former fit.
            progress_bar: Show a progress bar.
            decay: With `override=False`: factor in (0, 1] on the curvature and loss of all former data. The prior is
                not scaled.
            subset: M: estimate the curvature from M data drawn at random, scaled by N/M, which is unbiased (Immer et
                al., 2021, appendix A.3.1). The loss is still that of all N data. Costs one more pass over the loader.
            generator: Random generator of that draw; None for PyTorch's global one.
            check_memory: Raise `OutOfMemory` before a fit that needs more than the free memory (checked from 1 GiB on,
                under Linux and on CUDA).
            group: Process group of `torch.distributed`. Every process calls `fit` with a loader over its shard, and all
                get the sums over all data. Data that `DistributedSampler` repeats are counted once.
            sharded: With `group`: each process stores the curvature of some layers only (`"kron"`, `"ekfac"`,
                `"diag"`, `"block"`, `"lowrank_kron"`). All processes must then make the same calls together.
            resume: File to which the sums are saved now and then (one per process). If the fit is killed, the same call
                continues from it, with bitwise equal results. It is removed at the end.
            save_every: Number of batches, or time, between two saves; None for ten minutes.
            weight_fn: Weights of the data in loss, curvature and `n_data`: `weight_fn(x, y)` returns `[B]`, at least 0,
                for a batch as the loader gives it; 0 leaves a datum out. None: all weights are 1.
            dict_key_weight: Where batches are mappings: key of such weights. The model does not get that entry.

        Raises:
            OutOfMemory: The fit does not fit into memory; the message names choices that need less.
            StateError: The file of `resume` belongs to another fit.
            InvalidData: A batch cannot be used. As after every error, the former posterior is kept.
            InvalidArgument: A hyper-parameter's length matches neither the random parameters nor the outputs; or
                `decay`, `subset`, `group` or the loader is not accepted (`resume` needs a repeatable order).
            InvalidType: The loader cannot be iterated over, or targets are given as a second argument.
            ProcessError: Another process of the group failed, or has another network or other settings; all raise.
            UnsupportedError: The structure has no `decay`, `group`, `resume`, `sharded` or weights of data.

        Warns:
            ApproximationWarning: Random outputs, several heads with a last layer, several processes without `group`,
                processes that read the same data, or many weights whose Kronecker factors would be too large.
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
        """Removes data from the fit: subtracts their curvature, their loss and their number.

        The curvature is then that of a fit without these data. The mean stays, since it is the trained weights, which
        still depend on them.

        Args:
            loader: Batches of data that were fitted before, at the network's present weights.
            progress_bar: Show a progress bar.
            weight: Weight of these data in the fit: 1, or `decay**k` if k later fits had that `decay`.
            group: As in `fit`.
            weight_fn: The weights with which the data were fitted, as in `fit`.
            dict_key_weight: The key of these weights, as in `fit`.

        Raises:
            NotFittedError: Before `fit`.
            ModelChangedError: The network's weights are no longer those of the fit.
            InvalidData: More data than were fitted, or data that cannot be used.
            CurvatureError: The curvature would be indefinite: these data were not fitted.
            UnsupportedError: The structure is no sum over data, or its curvature is a random estimate. After every
                error the former posterior is kept.
        """
        self._require_data()
        posterior = learning.without(
            self.snapshot(), loader, progress_bar=progress_bar, weight=weight, group=group, weight_fn=weight_fn,
            dict_key_weight=dict_key_weight,
        )  # fmt: skip
        self.set_posterior(posterior)

    @checked
    def plan(self, train_loader: Iterable[Any]) -> FitPlan:
        """Estimates memory and time of `fit` and of a prediction from the first batch; fits nothing.

        If the last layer is not known yet, it is determined as in `fit`.

        Args:
            train_loader: The loader that `fit` would be given; one batch of it is read.

        Raises:
            InvalidArgument: The loader can be read only once: a fit would miss that batch.
            InvalidData: The loader gives no data.
            UnsupportedError: A backend or structure of your own that has no estimate of its cost.
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
        """Improves the posterior by exact inference in the linearised network, f(x, θ*) + J (θ − θ*).

        The trained weights θ* are the mode of the linearised model only if training converged. `"map"` finds its mode
        θ̂ (a convex problem) and the curvature there, in the posterior's structure. `"variational"` finds the Gaussian
        of this structure (full, block, Kronecker-factored or diagonal) that maximises the evidence lower bound (Immer
        et al., 2021, appendices A.3.2 and B.3). A Gaussian process (`"gp"`) is refined in function space, on its subset
        of M data. Hyper-parameters stay as they are.
        Afterwards predictions with `pred_type="glm"` have the mean f(x, θ*) + J (θ̂ − θ*); the evidence is
        log p(D | f_lin(θ̂)) − ½ (log det P − log det P₀ + (θ̂ − μ₀)ᵀ P₀ (θ̂ − μ₀)). The next `fit` undoes it.

        Args:
            loader: All data of the fit; they are read once and kept in memory (for `"gp"` only M of them).
            method: `"map"` or `"variational"`.
            max_steps: Largest number of Newton steps, or of updates of the variational covariance.
            tolerance: Distance to the mode in posterior standard deviations, or relative change of the bound, at which
                to stop; None for what floating-point precision allows.
            n_samples: Number of samples in expectations under softmax likelihoods (others use quadrature).
            generator: Random generator of these samples; None for seed 0.
            progress_bar: Show a progress bar.

        Returns:
            Number of steps and whether it converged; also `la.refinement`.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: An unknown method, or options that are not accepted.
            InvalidData: The data are not those of the fit.
            UnsupportedError: A backend other than this library's GGN, or a structure without a variational form.
                After every error the former posterior is kept.

        Warns:
            ApproximationWarning: It did not converge.
        """
        from laplace.refinement.refine import refine
        from laplace.refinement.refiner import RefineOptions

        options = RefineOptions(max_steps, tolerance, n_samples, generator, progress_bar)
        posterior = self.snapshot().before_new_data("refine")
        refinement = refine(posterior, loader, method, options)
        self.set_posterior(posterior.with_refinement(refinement))
        return refinement

    # Predictions and tuning.

    @property
    def _predictor(self) -> PosteriorPredictor:
        return PosteriorPredictor(self.snapshot(), self.enable_backprop)

    @property
    def _group(self) -> PosteriorGroup:
        from laplace.tuning.group import PosteriorGroup

        return PosteriorGroup((self.snapshot(),))

    @property
    def _calibration(self) -> Calibration | None:
        return self._posterior.calibration

    def _take_over(self, posteriors: tuple[Posterior, ...]) -> None:
        (posterior,) = posteriors
        self.set_posterior(posterior)
