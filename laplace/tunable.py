"""Tuning as users call it, of one posterior or of several that share their hyper-parameters.

The searches are imported by those who tune: every posterior is `Tunable`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.arguments import check_counts, checked, positive
from laplace.core.processes import Processes
from laplace.core.random_numbers import check_generator
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
from laplace.errors import InvalidArgument, InvalidType, UnsupportedError
from laplace.posterior.calibration import Calibration
from laplace.posterior.posterior import Posterior

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from laplace.tuning.group import PosteriorGroup
    from laplace.tuning.losses import Loss
    from laplace.tuning.search import Tuned, TuningResult


SCORED_LINK = LinkApprox.PROBIT
"""Link approximation by which `calibrate` scores candidates by default."""

SearchName = Literal["lbfgs", "adam", "grid"]
"""Searches of `optimize_hyperparameters`."""


class Tunable(ABC):
    """Base of objects whose hyper-parameters can be tuned: a posterior, or a mixture, whose components share them.

    For a mixture the evidence is `MixtureLaplace.log_marginal_likelihood`, and a validation loss is that of its
    predictions (Eschenhagen et al., 2021, appendix B.2). If the components' values differ, the search starts at their
    geometric mean.
    """

    @property
    @abstractmethod
    def _group(self) -> PosteriorGroup:
        """The posteriors that are tuned, as they are now."""

    @abstractmethod
    def _take_over(self, posteriors: tuple[Posterior, ...]) -> None:
        """Takes over the tuned posteriors, in their order."""

    @property
    @abstractmethod
    def _calibration(self) -> Calibration | None:
        """The calibration that is stored with the posteriors."""

    @property
    def calibration(self) -> Calibration | None:
        """What the last `calibrate` chose, and predictions are made by; None without one.

        Hyper-parameters and evidence are those without it. None can be assigned, which undoes it, and what `calibrate`
        has returned, as long as the hyper-parameters are those for which it was chosen. A fit drops it, and so does an
        assigned or tuned hyper-parameter, with a warning.
        """
        stored = self._calibration
        return None if stored is None else stored.bound(partial(self._undo, stored))

    @calibration.setter
    def calibration(self, value: Calibration | None) -> None:
        posteriors = self._group.posteriors
        if value is not None:
            if not isinstance(value, Calibration):
                raise InvalidType(
                    f"calibration is a {type(value).__name__}; None is accepted, and what la.calibrate returned."
                )
            if not all(value.is_of(posterior.hypers) for posterior in posteriors):
                raise InvalidArgument(
                    "this calibration was chosen at other hyper-parameters than the present ones; call la.calibrate "
                    "again."
                )
            value = value.bound(None)
        self._take_over(_calibrated(posteriors, value))

    def _undo(self, calibration: Calibration) -> None:
        if not calibration.is_copy_of(self._calibration):
            raise InvalidArgument("this calibration is not the present one any more; use that of la.calibration.")
        self.calibration = None

    @checked
    def calibrate(
        self,
        val_loader: Iterable[Any] | None = None,
        *,
        train_loader: Iterable[Any] | None = None,
        link_approx: LinkName = SCORED_LINK,
        n_samples: int = 100,
        keep_noise: bool = False,
        folds: int = 5,
        generator: torch.Generator | None = None,
        progress_bar: bool = False,
    ) -> Calibration:
        """Chooses, on held-out data, the posterior that predicts best, or the network where none is shown to be better.

        First a width that follows the input is chosen: how far the inputs of layers are from those of the training
        data, relative to a typical held-out input, with the widest of seven factors that is not shown to be worse than
        the network (`laplace.posterior.tilt`). It needs the second moments of these inputs, which a fit with Kronecker
        factors has, and one over a last layer (up to 64 MiB of features); else give `train_loader` as well. Of a last
        layer of a classification give it in any case: then the dense layer that the network begins with counts too,
        which sees more of what is strange about an input. Predictions cost no Jacobian for it. Of a mixture every
        network has its own distances, and the mixture's predictions choose one factor. `calibration.untilted` says why
        there is none. Where the held-out data lose more than 0.005 nats by it, after all that follows, it
        stays for inputs alone that are farther than all of them.

        On top of it candidates are prior precisions δ from 0.1 to 1000 times the present one, scales c from 1e-4 to 1
        of the covariance, and in regression noises σ around the size of the residuals. They are compared by the log
        predictive density of n held-out targets. The chosen one has the smallest mean difference from the network plus
        ½ + 4/√n paired standard errors; where that gains less than 0.001 nats, the network is chosen. Predictions,
        samples, intervals and exports then have the covariance c Σ(δ) (a cold posterior: Wenzel et al., 2020) and the
        chosen noise; of the network they are its own. No new fit is needed.

        With validation data the network runs once over them with its Jacobians, and in regression a forward pass before
        finds the size of the residuals. Without them, `train_loader` serves. Of a last layer with full curvature on
        frozen features, at the mode of its prior (`la.refine`), every label is scored by the posterior without it
        (`la.leave_one_out`); then the width, by r of every input against all others (with at least two data for every
        input of a layer), and the scale c alone are chosen. Of other last layers the head is refitted on the features
        of the other folds, which is honest where the features have not seen the labels (a frozen, pretrained network)
        and otherwise a forecast. Of other weights a fifth of the data is held out from a fit to the rest, and the
        forecast is about a network that has seen them.

        What was chosen is a value beside the posterior, `la.calibration`, and saved with it. `la.prior_precision`,
        `la.sigma_noise`, `la.temperature`, the evidence and the weights of a mixture stay what they were;
        `la.calibration = None` undoes it. It is of the posterior at its present hyper-parameters: where one is assigned
        or tuned, or data are added, it is dropped with a warning. In a regression part of the noise becomes a variance
        of the function: that of an observation is `la(x, observation_noise=True)[1]`, not f_var + la.sigma_noise².

        Of a refined posterior the linearised network at the refined mean takes the network's place, and may itself
        predict worse than the network: `la.compare` tells.

        Args:
            val_loader: Validation data, batches as `fit` takes them: labelled data that neither the network nor the
                posterior was fitted to. A hundred or more; below 20 a warning says that luck decides.
            train_loader: The training data, where there are no validation data. With these it is read once: of a last
                layer, and where the fit does not hold the second moments of the layers' inputs.
            link_approx: Link approximation that is scored: `"probit"`, `"mc"` or `"delta"`.
            n_samples: Number of Monte-Carlo samples with `"mc"`.
            keep_noise: Leave `la.sigma_noise` as it is (regression).
            folds: K, the number of refits of a head without validation data.
            generator: Random generator of folds, held-out parts and samples; None for those of fixed seeds.
            progress_bar: Show a progress bar.

        Returns:
            What was chosen, the scores of network and posterior and the table of all candidates; also `la.calibration`.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: Neither loader, a link that is no network's at zero covariance, or options out of range.
            InvalidType: A loader that is no iterable of batches, or another object than a generator.
            InvalidData: No data, one datum, one class alone, or a batch that cannot be used. As after every error, the
                posterior is as it was.
            ModelChangedError: The network is not that of the fit any more.
            UnsupportedError: A posterior whose covariance does not scale with its temperature (VaLLA, or one of a
                class that overrides moments), or a mixture without validation data.

        Warns:
            CalibrationWarning: Fewer than 20 data decide.
        """
        from laplace.tuning import calibrate as search
        from laplace.tuning.candidates import Predictive
        from laplace.tuning.losses import Validation

        check_generator(generator)
        if val_loader is not None:
            batches.require_loader(val_loader, "val_loader")
        group = self._group
        group = replace(group, posteriors=tuple(posterior.calibrated(None) for posterior in group.posteriors))
        for posterior in group.posteriors:
            search.refuse_unscalable(posterior)
            search.check_link(posterior.likelihood, link_approx, n_samples)
        predictive = Predictive(link_approx=str(link_approx), n_samples=n_samples, generator=generator)
        grid = search.CalibrationGrid(noise=not keep_noise, predictive=predictive)
        with group.same_random_states():
            if val_loader is not None:
                val_loader = list(val_loader) if isinstance(val_loader, Iterator) else val_loader
                data = Validation(val_loader, progress_bar=progress_bar, refuse_training_data=True)
                parts = [search.Fold(group, data)]
                chosen = search.calibrate(group, parts, grid, "validation data", train_loader=train_loader)
                chosen = replace(chosen, _content=data.seen[-1])
            elif train_loader is None:
                raise InvalidArgument(
                    "calibrate needs held-out data: give val_loader=, labelled data that training has not seen; or "
                    "train_loader=, of which a part is held out."
                )
            elif len(group.posteriors) > 1:
                raise UnsupportedError(
                    "calibrate of a mixture by train_loader, of which every network would have to forget a part; give "
                    "val_loader=, validation data."
                )
            else:
                parts, held_out, why = search.folds_of(group.first, train_loader, folds, generator, progress_bar)
                chosen = search.calibrate(group, parts, grid, held_out, why)
        self._take_over(_calibrated(group.posteriors, chosen))
        calibration = self.calibration
        return chosen if calibration is None else calibration

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
        """Chooses the prior precision δ and assigns it to `la.prior_precision`. No new fit is needed.

        `method="marglik"` maximises the log evidence over log δ, by Adam, and keeps the best value seen; it needs no
        validation data. `method="em"` finds a stationary point of the evidence by the fixed-point iteration
        δ ← γ / ‖θ* − μ₀‖² with γ the effective number of parameters: few steps, no step size. `method="gridsearch"`
        (`"CV"` in the Laplace Redux paper) minimises a loss on validation data over a grid of scalars
        `base^min … base^max`; the network runs once over these data.

        Args:
            pred_type: `"glm"` or `"nn"`: the predictive that the grid search evaluates.
            method: `"marglik"`, `"em"`, `"gridsearch"` or `"CV"`.
            n_steps: Number of Adam steps, or the largest number of fixed-point steps.
            lr: Step size of Adam on log δ.
            init_prior_prec: Value at which Adam or the fixed point starts; a vector keeps its length.
            prior_structure: `"scalar"`: one δ; `"layerwise"`: one per parameter tensor; `"diag"`: one per parameter.
            val_loader: Validation data of the grid search.
            loss: Loss of the grid search, lower is better: a function `loss(probabilities, y)`, or
                `loss(mean, variance, y)` for regression; a running metric (`update`, `compute`, `reset`); or a name as
                in `optimize_hyperparameters`. None for the negative log predictive density.
            log_prior_prec_min: Exponent of the smallest value on the grid.
            log_prior_prec_max: Exponent of the largest value on the grid.
            grid_size: Number of values on the grid.
            link_approx: Link approximation of the grid search.
            n_samples: Number of Monte-Carlo samples of the grid search.
            verbose: Print the result.
            progress_bar: Show a progress bar.
            log_prior_prec_base: Base of the grid.
            generator: Random generator of the grid search; every value sees the same random numbers.
            group: Process group, as in `fit`: every process gives a shard of the validation data.

        Raises:
            InvalidArgument: Unknown method or structure; no validation data; no value with a finite loss; or several
                prior precisions for a mixture of different networks. The prior precision is not changed then.

        Warns:
            CalibrationWarning: The evidence chose a posterior over a last layer that is forecast to predict worse than
                the network: call `la.calibrate`. It is looked for on features that `fit` kept (up to 64 MiB, of outputs
                without positions); of other weights, structures by products alone (`"lowrank"`, `"matrix_free"`) and
                loaded posteriors nothing is forecast, and no warning does not mean that all is well.
        """
        from laplace.tuning.candidates import Predictive
        from laplace.tuning.losses import Validation
        from laplace.tuning.objectives import EvidenceObjective, ValidationLoss
        from laplace.tuning.search import Coordinates, Search, SearchOptions, prior_in_structure

        _check_predictive(pred_type)
        posteriors, structure = self._group, str(prior_structure)
        _warn_of_noise(posteriors)
        posteriors.check_structure(structure)
        with posteriors.same_random_states():
            now = posteriors.hypers(("prior_precision",))
            like, layout = now.prior_precision, posteriors.layout
            if method in (TuningMethod.MARGLIK, TuningMethod.EM):
                if method == TuningMethod.EM and len(posteriors.posteriors) > 1:
                    raise UnsupportedError("method='em' is for one posterior; tune a mixture by method='marglik'.")
                name = "adam" if method == TuningMethod.MARGLIK else "em"
                options = SearchOptions(name, n_steps, lr, label="evidence", progress_bar=progress_bar)
                start = prior_in_structure(init_prior_prec, structure, layout, like)
                coordinates = Coordinates(("prior_precision",), replace(now, prior_precision=start))
                result = Search(EvidenceObjective(posteriors), coordinates, options).run()
                if method == TuningMethod.MARGLIK and val_loader is not None:
                    result = result.noting(_UNUSED)
            elif method in (TuningMethod.GRIDSEARCH, TuningMethod.CV):
                if val_loader is None:
                    raise InvalidArgument(f"method={str(method)!r} needs val_loader=, the validation data.")
                values = _powers(log_prior_prec_base, log_prior_prec_min, log_prior_prec_max, grid_size, like)
                data = Validation(val_loader, None, 1.0, progress_bar, Processes.from_argument(group))
                predictive = Predictive(str(pred_type), str(link_approx), n_samples, generator)
                objective = ValidationLoss(posteriors, loss, data, predictive)
                written = prior_in_structure(1.0, structure, layout, values)
                grid = objective.grid({"prior_precision": values}, written)
                result = Search(objective, grid, SearchOptions("grid")).run()
            else:
                raise InvalidArgument(f"method={str(method)!r}; accepted are 'marglik', 'gridsearch', 'CV' and 'em'.")
        by_evidence = method in (TuningMethod.MARGLIK, TuningMethod.EM)
        self._assign_tuned(posteriors, result, ("prior_precision",), by_evidence=by_evidence)
        if verbose:
            print(f"Optimized prior precision is {result.prior_precision}.")  # noqa: T201

    def _assign_tuned(
        self, posteriors: PosteriorGroup, result: TuningResult, names: Sequence[str], *, by_evidence: bool
    ) -> None:
        from laplace.tuning import held_out
        from laplace.tuning.search import report

        report(result)
        tuned = posteriors.assigned(**result.values_of(names))
        self._take_over(tuned)
        if by_evidence:
            held_out.warn_if_worse(tuned)

    @checked
    def optimize_hyperparameters(
        self,
        tune: Tuned | Sequence[Tuned] = "prior_precision",
        objective: Literal["evidence"] | Loss = "evidence",
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
        """Chooses prior precision δ, observation noise σ and temperature T together, and assigns them.

        Searches start from the present values. No new fit is needed afterwards.

        Args:
            tune: One or more of `"prior_precision"`, `"sigma_noise"` and `"temperature"`.
            objective: `"evidence"`, maximised on the training data; or a loss on validation data, minimised: `"nll"`,
                `"brier"`, `"crps"` (regression), `"ece"` (classification), a running metric or a function, as `loss`
                of `optimize_prior_precision`. For a mixture of K networks `"evidence"` is log (1/K) Σ_k p(D | M_k),
                which the best network dominates.
            method: `"lbfgs"` or `"adam"`: search over logarithms, for differentiable objectives; the best value seen
                is kept. `"grid"`: for validation losses, with a scalar prior precision. None: `"lbfgs"` for the
                evidence, else `"grid"`.
            prior_structure: `"scalar"`, `"layerwise"` or `"diag"`; None keeps the present one.
            val_loader: Validation data.
            ood_loader: Out-of-distribution inputs, at which predictions shall be uncertain (Daxberger et al.,
                2021); targets are not read.
            ood_weight: λ, the weight of the out-of-distribution term.
            grid: Values to try for each tuned hyper-parameter, `[n]`, by name; default: powers of 10.
            n_steps: Number of Adam steps or L-BFGS iterations.
            lr: Step size of Adam.
            tolerance: Stop when the largest gradient entry, per unit of a logarithm and relative to
                max(1, |objective|), is below this.
            pred_type: The predictive that validation losses evaluate; `"nn"` only with `method="grid"`.
            link_approx: Link approximation of classification.
            n_samples: Number of Monte-Carlo samples.
            generator: Random generator; every value sees the same random numbers.
            progress_bar: Show a progress bar.
            group: Process group, as in `fit`: with `"grid"` every process gives a shard of the validation data.

        Raises:
            InvalidArgument: Arguments that contradict each other; no finite objective; or components of a mixture that
                differ in what is not tuned or, for `"evidence"`, in the number of their data. As after every error, the
                hyper-parameters are not changed.
            InvalidData: A loader gives no data.
            UnsupportedError: A score that is not defined for this likelihood.

        Warns:
            TuningWarning: The objective is flat, or not finite somewhere; the best value is on an edge of the grid; or
                the search did not converge.
            CalibrationWarning: As of `optimize_prior_precision`, after a search of the evidence.
        """
        from laplace.tuning.candidates import Predictive
        from laplace.tuning.losses import Validation
        from laplace.tuning.objectives import EvidenceObjective, SmoothLoss, ValidationLoss
        from laplace.tuning.search import NAMES, Coordinates, Search, SearchOptions, checked_names, make_axes

        structure = None if prior_structure is None else str(prior_structure)
        posteriors, by_evidence = self._group, isinstance(objective, str) and objective == "evidence"
        posteriors.check_structure(structure)
        method = method or ("lbfgs" if by_evidence else "grid")
        with posteriors.same_random_states():
            has_noise = posteriors.likelihood.has_noise
            names = checked_names(tune, has_noise=has_noise, by_evidence=by_evidence)
            coordinates = Coordinates.around(posteriors, names, structure)
            if "sigma_noise" not in names:
                _warn_of_noise(posteriors)
            if method != "grid" and grid is not None:
                raise InvalidArgument(f"grid= is not used by method={method!r}; use method='grid', or leave it out.")
            options = SearchOptions(method, n_steps, lr, tolerance, progress_bar=progress_bar)
            if by_evidence:
                _refuse_data(val_loader, ood_loader, method)
                search = Search(EvidenceObjective(posteriors), coordinates, options)
            elif val_loader is None:
                raise InvalidArgument(f"objective={objective!r} needs val_loader=, the validation data.")
            else:
                data = Validation(val_loader, ood_loader, ood_weight, progress_bar, Processes.from_argument(group))
                predictive = Predictive(str(pred_type), str(link_approx), n_samples, generator)
                if method == "grid":
                    loss, start = ValidationLoss(posteriors, objective, data, predictive), coordinates.start
                    axes = make_axes(names, grid, start.prior_precision)
                    search = Search(loss, loss.grid(axes, start.prior_precision), options)
                else:
                    search = Search(SmoothLoss(posteriors, objective, data, predictive), coordinates, options)
            result = search.run()
        self._assign_tuned(posteriors, result, NAMES, by_evidence=by_evidence)
        return result


def _check_predictive(pred_type: Any) -> None:
    """Checks the first argument of `optimize_prior_precision`, in whose place others are given."""
    if str(pred_type) in tuple(PredType):
        return
    given = repr(str(pred_type)) if isinstance(pred_type, str) else f"a {type(pred_type).__name__}"
    raise InvalidArgument(
        f"pred_type is {given}; accepted are 'glm' and 'nn' ('gp' for hessian_structure='gp'). It is the first "
        "argument of optimize_prior_precision: give others by name, method='gridsearch', val_loader=..."
    )


def _powers(base: float, low: float, high: float, n: int, like: Tensor) -> Tensor:
    """The candidates base^low … base^high, `[n]`."""
    check_counts(grid_size=n)
    name = f"log_prior_prec_base={base} to the powers from log_prior_prec_min={low} to log_prior_prec_max={high}"
    return positive(name, torch.logspace(low, high, n, base, dtype=like.dtype, device=like.device))


def _warn_of_noise(posteriors: PosteriorGroup) -> None:
    """Warns where the noise that a search keeps is still 1, and far from the residuals."""
    from laplace.posterior.noise import warn_of_default_noise

    for posterior in posteriors.posteriors:
        warn_of_default_noise(posterior)


def _calibrated(posteriors: Sequence[Posterior], calibration: Calibration | None) -> tuple[Posterior, ...]:
    """The posteriors with what each of them predicts by."""
    each = [None] * len(posteriors) if calibration is None else calibration.of_components(len(posteriors))
    return tuple(posterior.calibrated(own) for posterior, own in zip(posteriors, each, strict=True))


_UNUSED = "val_loader is not used by method='marglik'; use method='gridsearch' to tune on validation data"


def _refuse_data(val_loader: Iterable[Any] | None, ood_loader: Iterable[Any] | None, method: str) -> None:
    """Raises where the evidence is given what it does not use."""
    if val_loader is not None or ood_loader is not None:
        raise InvalidArgument(
            "the evidence uses no validation data; leave val_loader and ood_loader out, or give another objective, "
            "such as 'nll'."
        )
    if method == "grid":
        raise InvalidArgument(
            "method='grid' is for validation data; the evidence has gradients: use 'lbfgs' or 'adam'."
        )
