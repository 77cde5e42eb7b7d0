"""Laplace approximations in weight space, as users hold them: fitting, moments, tuning, refinement."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from laplace.base import BaseLaplace
from laplace.core.arguments import check_counts, checked
from laplace.core.batch import Inputs
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.overrides import COVARIANCES, is_overridden
from laplace.core.registry import KeyedClasses
from laplace.enums import LinkApprox, LinkName
from laplace.errors import InvalidArgument, InvalidType, NotFittedError
from laplace.evidence import Evidence
from laplace.fitting.fit import fit, forget, infer_channels, plan
from laplace.fitting.options import FitOptions
from laplace.fitting.planning import FitPlan
from laplace.network.model_guard import own_precision
from laplace.network.watch import Fingerprint
from laplace.posterior.calibration import Calibration
from laplace.posterior.manual_fit import batch_of, restarted, with_parts, with_root, without_data
from laplace.posterior.posterior import Posterior, Refinement
from laplace.posterior.user_hooks import (
    UsersPrecision,
    posterior_before,
    precision_of_moment,
    require_positive,
    require_shape,
    with_users_values,
)
from laplace.predicting import Predicting
from laplace.predictive.predict import PosteriorPredictor
from laplace.saving import Recipe, Saved
from laplace.state import describe, loaded, moved_with_model
from laplace.state import save as state_of
from laplace.structures.base import Curvature, Precision
from laplace.structures.fit import Fit
from laplace.tuning.tunable import Tunable

if TYPE_CHECKING:
    import os
    from datetime import timedelta

    from torch.distributed import ProcessGroup

    from laplace.compat.kron import Kron
    from laplace.core.batch import WeightFn
    from laplace.predictive.projected import KernelOf, Projected
    from laplace.refinement.conformal import Conformal, ConformalMethod
    from laplace.refinement.leave_one_out import LeaveOneOut
    from laplace.tuning.group import PosteriorGroup

P = TypeVar("P", bound="ParametricLaplace")

CELLS: KeyedClasses[ParametricLaplace] = KeyedClasses()
"""Classes with a `_key`: the cells of the grid that have one."""


class ParametricLaplace(Predicting, Saved, Tunable, BaseLaplace):
    """Base of all posteriors over weights; what `Laplace(...)` returns is of a class derived from it.

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
    def n_data(self) -> float:
        """Number of training data, without ignored labels; if they have weights, the sum of these. 0 before `fit`."""
        return 0 if self._posterior.data is None else self._posterior.data.source.n_data

    @n_data.setter
    def n_data(self, value: float) -> None:
        self._posterior = with_parts(self._posterior, n_data=value)

    @property
    def n_outputs(self) -> int:
        """Number of outputs, C; 0 before `fit`."""
        return 0 if self._posterior.data is None else self._posterior.data.source.n_outputs

    @n_outputs.setter
    def n_outputs(self, value: int) -> None:
        self._posterior = with_parts(self._posterior, n_outputs=value)

    @property
    def loss(self) -> float | Tensor:
        """Summed loss of the training data, 0-dim: the negative log likelihood at σ = T = 1, without constants.

        0 before `fit`.
        """
        return 0.0 if self._posterior.data is None else self._posterior.data.active_fit.loss_terms.sum()

    @loss.setter
    def loss(self, value: float | Tensor) -> None:
        self._posterior = with_parts(self._posterior, loss=value)

    @property
    def H(self) -> Any:
        """Curvature of the training data at σ = T = 1: `[P, P]`, `[P]` (diagonal), or a `KronDecomposed`.

        It is zero before `fit`. It can be assigned, and summed in a loop by `la.H += …`, which makes no copies.
        """
        return self._posterior.H

    @H.setter
    def H(self, value: Any) -> None:
        self._posterior = with_parts(self._posterior, H=value)

    @property
    def mean(self) -> Tensor | None:
        """Mean of the posterior, `[P]`: the trained weights θ*, after `refine` θ̂.

        Before `fit` it is the prior's mean, or None while the last layer is not known yet. An assigned mean is used by
        samples, densities and the evidence, not by linearised predictions. Reading it gives a copy.
        """
        return None if self._posterior.weights.problem is None else self._posterior.mean.clone()

    @mean.setter
    def mean(self, value: Tensor) -> None:
        self._posterior = with_parts(self._posterior, mean=value)

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
        values = require_shape(self, "prior_precision_diag", self.prior_precision_diag, (prior.layout.n_params,))
        return replace(prior, precision=require_positive(self, "prior_precision_diag", values.to(prior.precision)))

    @property
    def prior_precision_diag(self) -> Tensor:
        """Prior precision δ of every random parameter, `[P]`."""
        return GaussianPrior(self.prior_precision, self.prior_mean, self.problem.layout).diagonal()

    def evidence(self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None) -> Evidence:
        self._require_data()
        given = {"prior_precision": prior_precision, "sigma_noise": sigma_noise}
        other = {name: value for name, value in given.items() if value is not None}
        if not other:
            return with_users_values(self, self._posterior).evidence
        with self.holding(self._posterior.at(replace(self._posterior.hypers, **other))):
            return self.evidence()

    def posterior(self) -> Precision:
        """The posterior precision P = s H + diag(δ) with its factorisation; of a GGN s = 1 / (σ² T).

        It is cached until a hyper-parameter or the fit changes; where a hyper-parameter requires a gradient it is
        computed at every call, with its graph.
        """
        self._require_data()
        if is_overridden(self, "posterior_precision"):
            return precision_of_moment(self, "posterior_precision")
        if is_overridden(self, "evidence"):
            with own_precision():
                return self.evidence().precision
        return with_users_values(self, self._posterior).precision()

    def predictive_posterior(self) -> Precision:
        """The posterior precision that predictions and samples use, with overrides of your own class applied."""
        precision, posterior = posterior_before(self, "functional_variance"), self.snapshot()
        return UsersPrecision(posterior, precision) if posterior.overrides(*COVARIANCES) else precision

    @property
    def posterior_precision(self) -> Any:
        """Posterior precision P: `[P, P]`, `[P]` (diagonal), or a `KronDecomposed`, whose `to_matrix()` is dense."""
        return self.evidence().precision.public

    @property
    def posterior_covariance(self) -> Tensor:
        """Posterior covariance P⁻¹, dense, `[P, P]`."""
        return posterior_before(self, "posterior_covariance").covariance

    @property
    def posterior_variance(self) -> Tensor:
        """Posterior variance of every random parameter, the diagonal of P⁻¹, `[P]`."""
        return posterior_before(self, "posterior_variance").diagonal_of_inverse()

    @property
    def posterior_scale(self) -> Tensor:
        """Root L of the posterior covariance, L Lᵀ = P⁻¹: triangular (full), symmetric (Kron) or `[P]` (diag).

        You may assign a root of your own, `[P, P]` or `[P]`. Predictions, samples and moments use it until a
        hyper-parameter or the data change; the evidence and `posterior_precision` do not.
        """
        return posterior_before(self, "posterior_scale").scale

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
        options = FitOptions(
            override=override, progress_bar=progress_bar, decay=decay, subset=subset, generator=generator,
            check_memory=check_memory, group=group, sharded=sharded, resume=resume, save_every=save_every,
            weight_fn=weight_fn, dict_key_weight=dict_key_weight,
        )  # fmt: skip
        self.set_posterior(fit(self.snapshot(), train_loader, options))

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
        move_mean: bool = False,
    ) -> None:
        """Removes data from the fit: subtracts their curvature, their loss and their number.

        The curvature is then that of a fit without these data. The mean stays, since it is the trained weights, which
        still depend on them, unless `move_mean=True` takes one Newton step to what training without them would give:
        m + (P − s H_S)⁻¹ s (g_S + H_S (m − θ*)), g_S the gradient of their loss. `la.mean` then holds the new weights,
        and linearised predictions follow; the network is not changed. For a linear Gaussian model that is the fit to
        the rest; for networks it is an approximation, and no certificate that the data left no trace.

        Args:
            loader: Batches of data that were fitted before, at the network's present weights.
            progress_bar: Show a progress bar.
            weight: Weight of these data in the fit: 1, or `decay**k` if k later fits had that `decay`.
            group: As in `fit`.
            weight_fn: The weights with which the data were fitted, as in `fit`.
            dict_key_weight: The key of these weights, as in `fit`.
            move_mean: Whether the mean moves, too.

        Raises:
            NotFittedError: Before `fit`.
            ModelChangedError: The network's weights are no longer those of the fit.
            InvalidData: More data than were fitted, or data that cannot be used.
            CurvatureError: The curvature would be indefinite: these data were not fitted.
            UnsupportedError: The structure is no sum over data, or its curvature is a random estimate. After every
                error the former posterior is kept.
        """
        from laplace.posterior.combining import moved_by_removal

        self._require_data()
        options = FitOptions(
            override=False, progress_bar=progress_bar, group=group, weight_fn=weight_fn,
            dict_key_weight=dict_key_weight, removed_weight=weight,
        )  # fmt: skip
        before, loader = self.snapshot(), list(loader) if move_mean else loader
        posterior = forget(before, loader, options)
        if move_mean:
            posterior = moved_by_removal(before.uncalibrated(), posterior, loader, options.weights, weight)
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
        posterior, planned = plan(self._posterior, train_loader)
        self.set_posterior(posterior)
        return planned

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
        from laplace.refinement.linear_model import RefineOptions
        from laplace.refinement.refine import refine

        options = RefineOptions(max_steps, tolerance, n_samples, generator, progress_bar)
        posterior = self.snapshot().before_new_data("refine")
        refinement = refine(posterior, loader, method, options)
        self.set_posterior(posterior.with_refinement(refinement))
        return refinement

    @checked
    def leave_one_out(
        self, loader: Iterable[Any], *, link_approx: LinkName = LinkApprox.PROBIT, progress_bar: bool = False
    ) -> LeaveOneOut:
        """Predictions of every input of the fit without that input, from the fit alone (Nickl et al., 2023).

        One Newton step in the linearised model per input; for squared loss and full curvature it is a fit to all other
        inputs. Scores of two posteriors that differ in their prior compare them without validation data, each at the
        mode of its own prior (`la.refine`). Compare them with each other, not with scores on a test set.

        Args:
            loader: All data of the fit, in any order; the result is in that of the loader.
            link_approx: Link approximation of the score of classes, one that does not draw.
            progress_bar: Show a progress bar.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: A link that is not accepted, or a calibrated posterior.
            InvalidData: The data are not those of the fit.
            UnsupportedError: A structure that does not hold all that an input adds (`"diag"`, low ranks, subsets of the
                data), Kronecker factors from which more than 1 % of the inputs cannot be removed, another backend than
                this library's GGN, outputs with positions, or a likelihood without a score in closed form.

        Warns:
            ApproximationWarning: The mean is far from the mode of the prior.
        """
        from laplace.refinement.leave_one_out import leave_one_out

        posterior = self.snapshot()
        posterior.refuse_calibrated("leave_one_out")
        return leave_one_out(posterior, loader, link_approx, progress_bar=progress_bar)

    @checked
    def conformal(
        self,
        train_loader: Iterable[Any] | None = None,
        *,
        val_loader: Iterable[Any] | None = None,
        method: ConformalMethod = "jackknife+",
        folds: int = 10,
        generator: torch.Generator | None = None,
        progress_bar: bool = False,
    ) -> Conformal:
        """Intervals for regression targets whose coverage is counted on data, not modelled: `.interval(x, level)`.

        From the training data and this one fit: `"jackknife+"` and `"cv+"` (Barber et al., 2021) promise a coverage of
        at least 2·level − 1 and have about the level in practice, `"full"` promises the level. For a linear model, or a
        head on features that the targets did not train, their residuals are those of refits, exactly; for trained
        networks they are approximate, and nothing is promised. With validation data, split conformal prediction (Lei
        et al., 2018) promises the level, whatever the network. The noise σ need not be right.

        Args:
            train_loader: All data of the fit.
            val_loader: Data that neither the network nor the fit has seen, in place of them.
            method: Of the training data: `"jackknife+"`, `"full"` or `"cv+"` (linear models and heads alone).
            folds: Number of folds of `"cv+"`.
            generator: Random generator of the folds; None for seed 0.
            progress_bar: Show a progress bar.

        Returns:
            A `Conformal`, with `.interval(x, level)` → lower and upper ends `[B, C]`, and `.guarantee(level)` in words.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: Both loaders, or none; an unknown method, or folds that are none.
            InvalidData: The training data are not those of the fit, or there are no validation data.
            UnsupportedError: Another likelihood than that of regression (for sets of classes see the package MAPIE), or
                a structure that does not hold all that an input adds, without validation data.

        Warns:
            ApproximationWarning: The network is not linear in its weights, or far from the mode of the prior.
        """
        from laplace.refinement import conformal

        self._require_data()
        if (train_loader is None) == (val_loader is None):
            raise InvalidArgument(
                "give either train_loader, the data of the fit, or val_loader=, data it has not seen."
            )
        if val_loader is not None:
            return conformal.split_conformal(self, val_loader)
        return conformal.conformal(self.snapshot(), train_loader, method, folds, generator, progress_bar=progress_bar)

    @checked
    def projected(
        self,
        train_loader: Iterable[Any],
        n_samples: int = 30,
        *,
        kernel: KernelOf = "outputs",
        max_sweeps: int = 500,
        tolerance: float = 0.01,
        generator: torch.Generator | None = None,
        progress_bar: bool = False,
    ) -> Projected:
        """Networks sampled around the trained one that fit the training data as it does (Miani et al., 2025).

        Samples of the prior are projected onto the weights in whose direction no output of the training data changes,
        to first order, by alternating projections over its batches. Samples of a Laplace approximation of a network,
        as `pred_type="nn"` has them, underfit; these do not, and differ where there were no data.

        Args:
            train_loader: The training data, read several times. Larger batches take fewer sweeps and more memory.
            n_samples: Number S of networks.
            kernel: `"outputs"`, or `"loss"`: only the loss of every input stays, which leaves more room where there are
                more outputs than weights, and keeps less of the fit.
            max_sweeps: Largest number of passes.
            tolerance: Change of the outputs, relative to that without projection, at which to stop.
            generator: Random generator of the samples.
            progress_bar: Show a progress bar.

        Returns:
            The networks: call it for their mean prediction; `.weights` `[S, P]`, `.kept`, `.residual`.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: Numbers that are none, another kernel, or a loader that can be read only once.
            InvalidData: No data.
            UnsupportedError: Outputs with positions, or a backend that computes no Jacobians.

        Warns:
            ApproximationWarning: Nothing is left of the samples, or the tolerance was not reached.
        """
        from laplace.predictive.projected import projected

        self._require_data()
        return projected(
            self.snapshot(),
            train_loader,
            n_samples,
            kernel,
            max_sweeps,
            tolerance,
            generator,
            progress_bar=progress_bar,
        )

    # Posteriors beside each other.

    @checked
    def kl(self, other: ParametricLaplace) -> Tensor:
        """KL(self ‖ other), the divergence of two posteriors over the same weights, in nats, 0-dim, float64.

        ½ (tr(P₂ P₁⁻¹) − P + (m₂ − m₁)ᵀ P₂ (m₂ − m₁) + log det P₁ − log det P₂). Structures, priors and the networks'
        weights may differ. The trace is exact, by as many products as the largest block has weights.

        Args:
            other: A fitted posterior over the same weights.

        Raises:
            NotFittedError: One is not fitted.
            InvalidType: No posterior over weights.
            InvalidArgument: Other weights have a distribution.
            UnsupportedError: A sharded posterior.
        """
        from laplace.posterior.combining import kl

        if not isinstance(other, ParametricLaplace):
            raise InvalidType(
                f"other is a {type(other).__name__}; a fitted posterior over the same weights is accepted."
            )
        return kl(self.snapshot(), other.snapshot())

    @checked
    def saliency(self) -> Tensor:
        """m_p² P_pp of every weight with a distribution, `[P]`: twice the log density that setting it to zero costs.

        Weights with a small saliency can be pruned first (LeCun et al., 1990). Computed by as many products as the
        largest block has weights.

        Raises:
            NotFittedError: Before `fit`.
            UnsupportedError: A sharded posterior.
        """
        from laplace.posterior.combining import saliency

        return saliency(self.snapshot())

    # Fits by hand: a loop of your own instead of `fit`.

    @checked
    def start_fit(self) -> None:
        """Starts a fit in a loop of your own: sets H, loss, `n_data` and `n_outputs` to zero, at the present weights.

        Example:
            la.start_fit()
            for x, y in loader:
                loss, H = la.curvature_of(x, y, n_data)
                la.loss += loss
                la.H += H
            la.n_data, la.n_outputs = n_data, n_outputs

        Raises:
            NotFittedError: The last layer is not known yet: give `last_layer_name=`.
            UnsupportedError: The structure has no curvature that could be summed by hand.
        """
        self._posterior = without_data(self._posterior.before_new_data("start_fit"))

    @checked
    def restart_H(self) -> None:
        """Sets only H to zero, at the network's present weights; loss, `n_data` and `la.H_facs` keep their values.

        From then on `la.H_facs` is stored apart from H, for loops that add new factors to those of former data.

        Raises:
            NotFittedError: The last layer is not known yet: give `last_layer_name=`.
            UnsupportedError: The structure has no curvature that could be summed by hand.
        """
        former = self._posterior.data
        self.start_fit()
        self._posterior = restarted(self._posterior, former)

    @checked
    def curvature_of(self, x: Inputs, y: Tensor, n_data: int) -> tuple[Tensor, Any]:
        """Loss and curvature of one batch, as in `fit`; sum them over all batches.

        Args:
            x: Inputs of the batch.
            y: Targets of the batch.
            n_data: N, the number of data in all batches together, by which Kronecker factors are normalised: the sum of
                `len(y)`, however many tokens or pixels and ignored labels there are.

        Returns:
            The negative log likelihood at σ = T = 1, 0-dim, and H in the form of `la.H` (a `Kron` for Kronecker
            factors).

        Raises:
            InvalidData: A batch that cannot be used.
            NotFittedError: The last layer is not known yet: give `last_layer_name=`.
            UnsupportedError: The structure has no curvature that could be summed by hand.
        """
        check_counts(n_data=n_data)
        self._posterior = infer_channels(self._posterior.with_backend_loss(), x, y)
        return batch_of(self._posterior, x, y, n_data)

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

    # States.

    def state_dict(self) -> dict[str, Any]:
        """The posterior as a dictionary of tensors, numbers and strings, without the weights of the model.

        Raises:
            NotFittedError: Before `fit`.
        """
        return state_of(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces this posterior by a saved one of the same model, as `state_dict` returned it.

        Raises:
            StateError: The state belongs to another class, model, likelihood or choice of weights.
        """
        self.set_posterior(loaded(self, state_dict))
        self.enable_backprop = state_dict["enable_backprop"]

    @property
    def _recipe(self) -> dict[str, Any]:
        return Recipe.of(self).plain()

    @property
    def _structures(self) -> list[type[Curvature]]:
        return [self.structure]

    def to(self: P, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> P:
        """Moves the posterior and the model to a device or dtype, in place, as `nn.Module.to`; returns itself."""
        self.set_posterior(moved_with_model(self, device, dtype))
        return self

    def __repr__(self) -> str:
        return describe(self)

    # Private names of laplace-torch that public code reads.

    def _init_H(self) -> None:
        self.restart_H()

    def _curv_closure(self, X: Inputs, y: Tensor, N: int) -> tuple[Tensor, Any]:
        return self.curvature_of(X, y, N)

    def _check_H_init(self) -> None:
        self.fitted()

    @staticmethod
    def _rescale_factors(kron: Kron, factor: float) -> Kron:
        """Factors of which those on the input side, the last of two, are scaled."""
        return type(kron)([[*block[:-1], factor * block[-1]] if len(block) == 2 else block for block in kron.kfacs])

    @property
    def _posterior_scale(self) -> Tensor:
        return self.posterior_scale

    @_posterior_scale.setter
    def _posterior_scale(self, root: Tensor) -> None:
        self.posterior_scale = root

    def _glm_predictive_distribution(
        self, X: Inputs, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        return self.predictive_moments(X, joint=joint, diagonal_output=diagonal_output)

    def _nn_functional_samples(
        self, X: Inputs, n_samples: int = 100, generator: torch.Generator | None = None, **model_kwargs: Any
    ) -> Tensor:
        return self.functional_samples(X, "nn", n_samples, generator=generator, **model_kwargs)

    def _nn_predictive_samples(
        self, X: Inputs, n_samples: int = 100, generator: torch.Generator | None = None, **model_kwargs: Any
    ) -> Tensor:
        return self.predictive_samples(X, "nn", n_samples, generator=generator, **model_kwargs)

    @property
    def _H_factor(self) -> Tensor:
        """1/(σ²T): what the curvature of a GGN is multiplied with in the precision."""
        return 1 / (self.sigma_noise.square() * self.temperature)

    @property
    def _asdl_fisher_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of ASDL: `{}` without any, so that they can be passed on to every backend."""
        return dict(self.asdl_fisher_kwargs)

    @property
    def _device(self) -> torch.device:
        return self.prior_precision.device

    @property
    def _dtype(self) -> torch.dtype:
        return self.prior_precision.dtype
