"""Tuning as users call it, of one posterior or of several that share their hyper-parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from laplace.core.arguments import checked
from laplace.core.processes import Processes
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
from laplace.posterior.posterior import Posterior
from laplace.tuning.choose import (
    EVIDENCE,
    EVIDENCES,
    TuningResult,
    by_evidence,
    by_gradient,
    check_predictive,
    coordinates_of,
    on_grid,
    powers,
    prior_by_evidence,
    prior_on_grid,
    report,
)
from laplace.tuning.fixed_point import prior_by_fixed_point
from laplace.tuning.grid import make_axes
from laplace.tuning.group import PosteriorGroup
from laplace.tuning.objectives import Loss, make_objective
from laplace.tuning.optimise import Climb
from laplace.tuning.predictive import Predictive
from laplace.tuning.settings import Tuned
from laplace.tuning.validation import Validation, ValidationLoss

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


SearchName = Literal["lbfgs", "adam", "grid"]
"""Searches of `optimize_hyperparameters`."""


class Tunable(ABC):
    """Object whose hyper-parameters can be chosen: a posterior, or a mixture, whose components share them.

    The evidence of a mixture is that of `MixtureLaplace.log_marginal_likelihood`, a validation loss that of its
    predictions (Eschenhagen et al., 2021, appendix B.2); the search of their appendix F.4 is
    `loss=laplace.tuning.Thresholds(...)`. Where tuned values differ between the components the search starts at their
    geometric mean.
    """

    @property
    @abstractmethod
    def _group(self) -> PosteriorGroup:
        """The posteriors that are tuned, as they are now."""

    @abstractmethod
    def _take_over(self, posteriors: tuple[Posterior, ...]) -> None:
        """Takes over the tuned posteriors, in their order."""

    @checked
    def optimize_prior_precision(
        self,
        pred_type: PredTypeName = PredType.GLM,
        method: TuningMethodName = TuningMethod.MARGLIK,
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
        """Chooses the prior precision and assigns it.

        `method="marglik"` maximises the log evidence by Adam on log δ and keeps the best value seen.
        `method="gridsearch"` (the paper's `"CV"`) minimises a validation loss over scalar candidates
        `base^min … base^max`; the network runs once over the validation data. `method="em"` looks for the δ at which
        the gradient of the evidence vanishes, by its fixed point δ ← γ / ‖θ* − μ₀‖²: in few steps, without step sizes.

        Args:
            pred_type: Predictive of the grid search.
            method: `"marglik"`, `"gridsearch"`, `"CV"` or `"em"`.
            n_steps: Steps of Adam, or of the fixed point at most.
            lr: Its step size on log δ.
            init_prior_prec: Where Adam starts; a vector keeps its structure.
            prior_structure: `"scalar"`, `"layerwise"` or `"diag"`.
            val_loader: Validation data of the grid search.
            loss: A running metric (`update`, `compute`, `reset`), or `loss(prediction, y)`,
                `loss(mean, variance, y)` for regression; None for the negative log predictive density. Further names
                are those of `optimize_hyperparameters`.
            log_prior_prec_min: Exponent of the smallest candidate.
            log_prior_prec_max: Exponent of the largest.
            grid_size: Number of candidates.
            link_approx: Link of the grid search.
            n_samples: Its Monte-Carlo samples.
            verbose: Print the result.
            progress_bar: Show one.
            log_prior_prec_base: Base of the grid.
            generator: Source of randomness of the grid search, the same for every candidate.
            group: As of `fit`: processes whose validation loaders each give a shard of the data of the grid search.

        Raises:
            InvalidArgument: Unknown method or structure, no validation data, no candidate with a finite loss, or a
                prior per tensor or per parameter of a mixture's components with different ones; the prior precision is
                left as it was.
        """
        check_predictive(pred_type)
        posteriors, structure = self._group, str(prior_structure)
        posteriors.check_structure(structure)
        with posteriors.same_random_states():
            if method == TuningMethod.MARGLIK:
                climb = Climb("adam", n_steps, lr, label=EVIDENCE, progress_bar=progress_bar)
                result = prior_by_evidence(posteriors, init_prior_prec, structure, climb)
                if val_loader is not None:
                    result = result.noting(_UNUSED)
            elif method in (TuningMethod.GRIDSEARCH, TuningMethod.CV):
                if val_loader is None:
                    raise InvalidArgument(f"method={str(method)!r} needs val_loader=, the validation data.")
                exponents = (log_prior_prec_min, log_prior_prec_max)
                values = powers(log_prior_prec_base, *exponents, grid_size, posteriors.first.hypers.prior_precision)
                data = Validation(val_loader, progress_bar=progress_bar, processes=Processes.of(group))
                predictive = Predictive(str(pred_type), str(link_approx), n_samples, generator)
                scored = ValidationLoss(make_objective(loss, posteriors.likelihood), data, predictive)
                result = prior_on_grid(posteriors, values, structure, scored)
            elif method == TuningMethod.EM:
                result = prior_by_fixed_point(
                    posteriors, init_prior_prec, structure, n_steps, progress_bar=progress_bar
                )
            else:
                raise InvalidArgument(f"method={str(method)!r}; accepted are 'marglik', 'gridsearch', 'CV' and 'em'.")
        report(result)
        self._take_over(posteriors.assigned(prior_precision=result.prior_precision))
        if verbose:
            print(f"Optimized prior precision is {result.prior_precision}.")  # noqa: T201

    @checked
    def optimize_hyperparameters(
        self,
        tune: Tuned | Sequence[Tuned] = "prior_precision",
        objective: Literal["evidence", "joint_evidence"] | Loss = "evidence",
        method: SearchName | None = None,
        *,
        prior_structure: PriorStructureName | None = None,
        val_loader: Iterable[Any] | None = None,
        ood_loader: Iterable[Any] | None = None,
        ood_weight: float = 1.0,
        grid: Mapping[str, Tensor | Sequence[float]] | None = None,
        n_steps: int = 100,
        lr: float = 1e-1,
        tolerance: float = 1e-4,
        pred_type: PredTypeName = PredType.GLM,
        link_approx: LinkName = LinkApprox.PROBIT,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        progress_bar: bool = False,
        group: ProcessGroup | None = None,
    ) -> TuningResult:
        """Chooses prior precision, noise and temperature together and assigns them; the search starts where they are.

        Args:
            tune: One or more of `"prior_precision"`, `"sigma_noise"` (in the shape that it has) and `"temperature"`.
            objective: `"evidence"`, which of a mixture is the log of the mean, (1/K) Σ_k p(D | M_k): the best network
                alone decides; `"joint_evidence"`, Σ_k log p(D | M_k), in which all count alike (Eschenhagen et al.,
                2021, appendix B.2, "the components' marginal likelihoods"); or a loss on validation data: `"nll"`,
                `"brier"`, `"crps"` (regression), `"ece"` (classification), a `laplace.tuning.Thresholds`, a running
                metric or a callable, as `loss` of `optimize_prior_precision`.
            method: `"lbfgs"` or `"adam"` on logarithms, which keep the best value seen and need a differentiable
                objective; `"grid"`, for validation losses, whose prior is a scalar. None is `"lbfgs"` for the evidence,
                else `"grid"`.
            prior_structure: `"scalar"`, `"layerwise"` or `"diag"`; None keeps the present one.
            val_loader: Validation data.
            ood_loader: Inputs from elsewhere, on which predictions are to be uncertain (Daxberger et al., 2021,
                eq. 12); targets are not read.
            ood_weight: λ of that equation.
            grid: Values of each tuned hyper-parameter, `[n]`; powers of 10 where there are none.
            n_steps: Steps of Adam, iterations of L-BFGS.
            lr: Step size of Adam.
            tolerance: Convergence: largest slope per log unit, relative to max(1, |objective|).
            pred_type: Predictive of validation losses; `"nn"` on a grid alone.
            link_approx: Link of classification.
            n_samples: Monte-Carlo samples.
            generator: Source of randomness, the same for every candidate.
            progress_bar: Show one.
            group: As of `fit`: processes whose validation loaders each give a shard of the data of a grid.

        Raises:
            InvalidArgument: Arguments that do not belong together, no finite objective, thresholds that no candidate
                meets, or components of a mixture that differ in what is not tuned or, for `"evidence"`, in the number
                of their data; the hyper-parameters are left as they were, as after every error.
            InvalidData: A loader without data.
            UnsupportedError: A score without a meaning for this likelihood.

        Warns:
            TuningWarning: The objective is flat or was not finite somewhere, the best value is on an edge, or the
                search did not converge.
        """
        structure = None if prior_structure is None else str(prior_structure)
        posteriors, combined = self._group, EVIDENCES.get(objective) if isinstance(objective, str) else None
        posteriors.check_structure(structure)
        method = method or ("grid" if combined is None else "lbfgs")
        with posteriors.same_random_states():
            coordinates = coordinates_of(posteriors, tune, structure, by_evidence=combined is not None)
            if method != "grid" and grid is not None:
                raise InvalidArgument(f"grid= is not used by method={method!r}; use method='grid', or leave it out.")
            climb = Climb(method, n_steps, lr, tolerance, progress_bar=progress_bar)
            if combined is not None:
                _refuse_data(val_loader, ood_loader, method)
                result = by_evidence(replace(posteriors, combined=combined), coordinates, climb)
            elif val_loader is None:
                raise InvalidArgument(f"objective={objective!r} needs val_loader=, the validation data.")
            else:
                data = Validation(val_loader, ood_loader, ood_weight, progress_bar, Processes.of(group))
                predictive = Predictive(str(pred_type), str(link_approx), n_samples, generator)
                loss = ValidationLoss(make_objective(objective, posteriors.likelihood), data, predictive)
                if method == "grid":
                    start = coordinates.start.prior_precision
                    result = on_grid(posteriors, make_axes(coordinates.names, grid, start), start, loss)
                else:
                    result = by_gradient(posteriors, coordinates, loss, climb)
        report(result)
        self._take_over(posteriors.assigned(**result.values_of()))
        return result


_UNUSED = "val_loader is not used by method='marglik'; use method='gridsearch' to tune on validation data"


def _refuse_data(val_loader: Iterable[Any] | None, ood_loader: Iterable[Any] | None, method: str) -> None:
    """Raises where the evidence is given what it does not use.

    Raises:
        InvalidArgument: Data, or a grid.
    """
    if val_loader is not None or ood_loader is not None:
        raise InvalidArgument(
            "the evidence uses no validation data; leave val_loader and ood_loader out, or give another objective, "
            "such as 'nll'."
        )
    if method == "grid":
        raise InvalidArgument(
            "method='grid' is for validation data; the evidence has gradients: use 'lbfgs' or 'adam'."
        )
