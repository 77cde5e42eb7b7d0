"""Posteriors over functions: a Gaussian process is the linearised network seen from its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace import tuning
from laplace.core.arguments import as_tensor, check_call, check_counts, checked, positive
from laplace.core.batch import Inputs
from laplace.core.checks import named
from laplace.core.hyperparameters import GaussianPrior, Hyperparameters
from laplace.core.positions import target_rows
from laplace.engines.engine import CurvatureEngine
from laplace.enums import (
    LinkApprox,
    LinkName,
    PredType,
    PredTypeName,
    PriorStructure,
    PriorStructureName,
    TuningMethod,
    TuningMethodName,
)
from laplace.errors import InvalidArgument
from laplace.fitting.fit import FitOptions, fit
from laplace.gp.nystrom import DirectionPass, NystromCurvature, Watch
from laplace.network.model_guard import autograd_mode
from laplace.parametric import NamedPosterior
from laplace.posterior.posterior import Posterior
from laplace.predictive import latent
from laplace.predictive.options import FUNCTION_SPACE
from laplace.structures.precision import Precision
from laplace.tunable import SearchName
from laplace.tuning.candidates import Losses
from laplace.tuning.losses import Validation, find_score
from laplace.tuning.objectives import Loss, make_loss

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class BaseFunctionalLaplace(NamedPosterior):
    """Base of posteriors over functions: Gaussian processes, Nyström and variational approximations.

    You use them like any other posterior. Internally they work with kernels between data. Their predictive is called
    `"gp"`: the linearised network under this posterior (Immer et al., 2021).
    """

    pred_types = FUNCTION_SPACE

    @checked
    def __call__(
        self,
        x: Inputs,
        pred_type: PredTypeName = PredType.GP,
        joint: bool = False,
        link_approx: LinkName = LinkApprox.PROBIT,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        fitting: bool = False,
        **options: Any,
    ) -> Any:
        """Predictive distribution at x, as for `ParametricLaplace`.

        Args:
            x: Inputs of B data: a tensor, tuple or mapping.
            pred_type: `"gp"`.
            joint: Also compute covariances between inputs.
            link_approx: Link approximation of classification.
            n_samples: Number of Monte-Carlo samples.
            diagonal_output: Compute variances of the outputs only, no covariances between them.
            generator: Random generator; equal seeds give bitwise equal results.
            fitting: In reward modelling: return preference probabilities of pairs.
            **options: Further options of `ParametricLaplace.__call__`.

        Raises:
            InvalidArgument: Another predictive.
            NotFittedError: Before `fit`.
        """
        if str(pred_type) != PredType.GP:
            raise InvalidArgument(
                f"pred_type={str(pred_type)!r}; a {type(self).__name__} has the predictive 'gp' only."
            )
        return super().__call__(
            x, pred_type, joint, link_approx, n_samples, diagonal_output, generator, fitting, **options
        )

    @checked
    def optimize_prior_precision(
        self,
        pred_type: PredTypeName = PredType.GP,
        method: TuningMethodName | None = None,
        n_steps: int = 100,
        lr: float = 1e-1,
        init_prior_prec: float | Tensor = 1.0,
        prior_structure: PriorStructureName = PriorStructure.SCALAR,
        val_loader: Iterable[Any] | None = None,
        loss: Loss | None = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: LinkName = LinkApprox.PROBIT,
        n_samples: int = 100,
        verbose: bool = False,
        progress_bar: bool = False,
        log_prior_prec_base: float = 10.0,
        generator: torch.Generator | None = None,
        *,
        group: ProcessGroup | None = None,
    ) -> None:
        """Chooses the prior precision and assigns it, as `ParametricLaplace.optimize_prior_precision` does.

        `method=None` is `"gridsearch"` if `val_loader` is given, else `"marglik"`.

        Only the product of prior precision and `prior_factor` matters, so that this tunes the factor as well (Immer et
        al., 2021, appendix A.2.2: it is "selected on the held-out validation set").
        """
        self.pred_types.kind(pred_type)
        chosen = method or (TuningMethod.MARGLIK if val_loader is None else TuningMethod.GRIDSEARCH)
        super().optimize_prior_precision(
            pred_type, chosen, n_steps, lr, init_prior_prec, prior_structure, val_loader, loss, log_prior_prec_min,
            log_prior_prec_max, grid_size, link_approx, n_samples, verbose, progress_bar, log_prior_prec_base,
            generator, group=group,
        )  # fmt: skip


class SubsetPosterior(BaseFunctionalLaplace):
    """All weights, as a Gaussian process on a subset of M data (Immer et al., 2021).

    The kernel is K = J J'ᵀ / δ with the network's Jacobians J, the posterior covariance K** − K*M (K_MM + Λ⁻¹)⁻¹ K_M*
    with the output Hessian Λ. Since M of N data are used, the prior precision is δ·N/M. With M = N this equals the full
    Laplace approximation. The evidence is that of the M data under this prior.

    Privacy: the fitted posterior stores the Jacobians of the M data in factored form, which for a first layer contain
    the inputs. Saved states and pickles hold them too.

    Args:
        n_subset: M, the number of data in the subset.
        sigma_noise: σ, the standard deviation of the observation noise (regression).
        prior_precision: δ, the inverse variance of the prior: one number, or one per parameter tensor.
        backend: A GGN backend; None for the native one.
        backend_kwargs: Its options.
        independent_outputs: Use one Gaussian process per output, with the diagonal of Λ: C kernels of size M × M
            instead of one of M·C × M·C.
        seed: Seed of the random choice of data.
        selection: How the M data are chosen: `"random"`; `"top"`, the largest tr Λ (Pan et al., 2020); or
            `"leverage"`, the largest tr(Λ J Jᵀ).
        prior_factor: Factor on δ; None for N/M.

    Raises:
        InvalidArgument: A value that is not accepted.
    """

    n_subset = property(attrgetter("structure_options.n_subset"), doc="M, the number of data in the subset.")
    seed = property(attrgetter("structure_options.seed"), doc="Seed of random subsets.")
    independent_outputs = property(
        attrgetter("structure_options.independent_outputs"), doc="Whether there is one Gaussian process per output."
    )
    K_MM = property(attrgetter("H"), doc="The kernel J Jᵀ of the subset, `[M·C, M·C]`.")


def _directions(la: NystromPosterior) -> Tensor:
    curvature = la.fitted().curvature
    return curvature.directions.T if isinstance(curvature, NystromCurvature) else torch.empty(0)


class NystromPosterior(BaseFunctionalLaplace):
    """All weights, by the Nyström approximation of the kernel: ELLA (Deng et al., 2022).

    The k leading eigenvectors of the kernel of M data define k directions in weight space. The curvature of all data is
    then summed within their span, in a second pass over the loader. Outside the span predictions have no variance. The
    evidence is that of a full Laplace approximation with this curvature.

    Args:
        subsample_size: M, the number of data that define the directions.
        n_eigenvalues: k, the number of directions.
        sigma_noise: σ, the standard deviation of the observation noise (regression).
        prior_precision: δ, the inverse variance of the prior, one number.
        backend: A GGN backend; None for the native one.
        backend_kwargs: Its options.
        seed: Seed of the random choice of data.

    Raises:
        InvalidArgument: A value that is not accepted.
    """

    subsample_size = property(attrgetter("structure_options.subsample_size"), doc="M, the number of data.")
    n_eigenvalues = property(attrgetter("structure_options.n_eigenvalues"), doc="k, the number of directions.")
    seed = property(attrgetter("structure_options.seed"), doc="Seed of the choice of data.")
    dual_directions = property(_directions, doc="The directions V in weight space, `[P, k]`.")
    feature_gram = property(attrgetter("H"), doc="The curvature G within the span of the directions, `[k, k]`.")
    fit_history_: dict[str, list[Any]]

    def _construct(self, given: Mapping[str, Any]) -> None:
        super()._construct(given)
        self.fit_history_ = {}

    @checked
    def fit(
        self,
        train_loader: Iterable[Any],
        override: bool = True,
        progress_bar: bool = False,
        *,
        val_loader: Iterable[Any] | None = None,
        val_steps: int | None = None,
        balanced: bool = False,
        **options: Any,
    ) -> None:
        """Fits in two passes over the loader: first the directions, then the curvature in their span.

        Args:
            train_loader: The training data, as in `ParametricLaplace.fit`; it must be readable several times.
            override: Must be True: data cannot be added to a former fit.
            progress_bar: Show a progress bar for each pass over the data.
            val_loader: Validation data, whose negative log predictive density is recorded in
                `fit_history_["val_nll"]`, with the number of training data so far in `"processed_examples"`.
            val_steps: Number of batches between records; None for one record at the end.
            balanced: Choose data from the classes in turn, about equally many of each.
            **options: Further options of `ParametricLaplace.fit`, except `decay`.

        Raises:
            InvalidData: A batch cannot be used; the former posterior is kept, as after every error.
            InvalidArgument: A value that is not accepted, or a loader that can be read only once.
            CurvatureError: `override=False`.
        """
        check_call(super().fit, "fit", (train_loader,), options)
        if val_steps is not None:
            check_counts(val_steps=val_steps)
        history: dict[str, list[Any]] = {"processed_examples": [], "val_nll": [], "tuning": []}

        def record(engine: CurvatureEngine, curvature: NystromCurvature, seen: int) -> None:
            scale = self.likelihood_object.curvature_scale("ggn", self.sigma_noise, self.temperature).detach()
            prior = GaussianPrior(self.prior_precision.detach(), self.prior_mean.detach(), engine.problem.layout)
            precision = curvature.precision(scale.expand(curvature.n_terms), prior)
            history["processed_examples"].append(seen)
            loss = held_out_nll(self.snapshot(), engine, precision, self.sigma_noise.detach(), val_loader or ())
            history["val_nll"].append(loss)

        watch = None if val_loader is None else Watch(record, val_steps)
        chosen = replace(self.structure_options, balanced=balanced)
        how = FitOptions(
            override=override, progress_bar=progress_bar, **options,
            first_pass=lambda engine: DirectionPass(engine, chosen, watch),
        )  # fmt: skip
        self.set_posterior(fit(self.snapshot(), train_loader, how))
        self.fit_history_ = history

    def optimize_hyperparameters(
        self,
        tune: Any = "prior_precision",
        objective: Any = "evidence",
        method: SearchName | None = None,
        *,
        val_loader: Iterable[Any] | None = None,
        grid: Any = None,
        **options: Any,
    ) -> tuning.TuningResult:
        """Chooses hyper-parameters as `ParametricLaplace` does, or among listed candidates.

        `optimize_hyperparameters(val_loader, grid)`, by position or by name, with a sequence of prior precisions δ or
        pairs (δ, σ), assigns the one of the smallest mean negative log predictive density. Every search is recorded in
        `fit_history_["tuning"]`.

        Args:
            tune: Names of the hyper-parameters to tune; or the validation data.
            objective: The objective, as in `ParametricLaplace.optimize_hyperparameters`; or the candidates.
            method: As in `ParametricLaplace.optimize_hyperparameters`.
            val_loader: Validation data.
            grid: Values to try for each tuned hyper-parameter, by name; or the candidates.
            **options: As in `ParametricLaplace.optimize_hyperparameters`.

        Raises:
            InvalidArgument: Arguments that are not accepted, or no candidate with a finite loss; the hyper-parameters
                are left as they were.
        """
        listed = _asked_for_candidates(tune, objective, val_loader, grid)
        if listed is None:
            result = super().optimize_hyperparameters(
                tune, objective, method, val_loader=val_loader, grid=grid, **options
            )
        else:
            result = _best_candidate(self.snapshot(), *listed)
            self._take_over(self._group.assigned(**result.values_of()))
        self.fit_history_.setdefault("tuning", []).append(result)
        return result


# Scores on data that a posterior has not seen.


def held_out_nll(
    posterior: Posterior, engine: CurvatureEngine, precision: Precision, sigma_noise: Tensor, loader: Iterable[Any]
) -> float:
    """Mean negative log predictive density, of a regression with its noise, else by the probit approximation."""
    likelihood, total, count = posterior.likelihood, 0.0, 0
    narrow = likelihood.target.reads_variances(likelihood, LinkApprox.PROBIT, for_scores=True)
    form, nll = "diagonal" if narrow else "full", find_score("nll", likelihood)
    for name, x, y in Validation(loader).batches(posterior):
        with named(name):
            outputs = latent.linearised(engine, precision, x, form)
            targets = likelihood.check_targets(outputs.mean, target_rows(y, outputs.mean, (), posterior.channel_dim))
        summary = likelihood.target.summary(
            likelihood, outputs.mean, outputs.covariance, LinkApprox.PROBIT, for_scores=True
        )
        total += nll(likelihood, summary, targets, sigma_noise).sum().item()
        count += len(targets)
    return total / count


def _asked_for_candidates(
    tune: Any, objective: Any, val_loader: Iterable[Any] | None, grid: Any
) -> tuple[Iterable[Any], Iterable[Any]] | None:
    """Validation data and a sequence of candidates, where arguments stand for these; None for names and tables."""
    if not isinstance(tune, str) and not (isinstance(tune, Sequence) and all(isinstance(one, str) for one in tune)):
        return tune, (objective if grid is None else grid)
    if isinstance(grid, Sequence | Tensor) and val_loader is not None:
        return val_loader, grid
    return None


def _best_candidate(
    posterior: Posterior, loader: Iterable[Any], candidates: Iterable[float | Sequence[float]]
) -> tuning.TuningResult:
    """The prior precision δ, or pair (δ, σ), of the smallest mean negative log predictive density."""
    posterior.require_fitted()
    now, likelihood = posterior.hypers.detached(), posterior.likelihood
    settings = [_setting(now, candidate, has_noise=likelihood.has_noise) for candidate in candidates]
    if not settings:
        raise InvalidArgument("grid holds no candidate; give prior precisions, or pairs of one and a noise.")
    with autograd_mode(), torch.no_grad():
        objective = make_loss(None, likelihood)
        predictive = tuning.Predictive(str(PredType.GLM), str(LinkApprox.PROBIT), 1, None)
        group = tuning.PosteriorGroup((posterior,))
        losses = Losses(group.candidates(settings, predictive, whole_covariance=objective.whole_covariance), objective)
        for name, x, y in Validation(loader).batches(posterior):
            with named(name):
                losses.update(x, y)
        values = losses.results()
    finite = values.isfinite()
    if not finite.any():
        raise InvalidArgument("no candidate of the grid has a finite loss; the hyper-parameters are left as they were.")
    best = int(torch.where(finite, values, torch.inf).argmin())
    chosen = settings[best]
    return tuning.TuningResult(
        chosen.prior_precision, chosen.sigma_noise, chosen.temperature, values[best].item(), values, {}, True, ()
    )


def _setting(now: Hyperparameters, candidate: float | Sequence[float], *, has_noise: bool) -> Hyperparameters:
    """The present setting with a candidate in it.

    Raises:
        InvalidArgument: Neither δ nor (δ, σ), or a noise without a noisy likelihood.
    """
    values = list(candidate) if isinstance(candidate, Sequence) else [candidate]
    if not 1 <= len(values) <= 2 or (len(values) == 2 and not has_noise):
        accepted = "a prior precision or a pair (prior_precision, sigma_noise)" if has_noise else "a prior precision"
        raise InvalidArgument(f"grid holds {candidate!r}; a candidate is {accepted}.")
    tensors = [positive("grid", as_tensor("grid", value, like=now.prior_precision)) for value in values]
    setting = replace(now, prior_precision=tensors[0].reshape(1))
    return setting if len(tensors) == 1 else replace(setting, sigma_noise=tensors[1].reshape(()))
