"""The named posteriors over functions. As in `laplace.named`, constructors differ by the order of their arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from laplace import tuning
from laplace.base import Backend, Options
from laplace.constructors import bind
from laplace.core.argument_checks import check_counts
from laplace.core.arguments import check_call, checked
from laplace.core.batch import ForwardFn
from laplace.core.hyperparameters import GaussianPrior
from laplace.engines.engine import CurvatureEngine
from laplace.enums import FeatureReductionName, LikelihoodName
from laplace.function_space.base import BaseFunctionalLaplace
from laplace.function_space.held_out import asked_for_candidates, best_candidate, held_out_nll
from laplace.likelihoods.base import Likelihood
from laplace.named import OfLastLayer
from laplace.posterior import learning
from laplace.structures.gp.nystrom import DirectionPass, NystromCurvature, Watch
from laplace.structures.gp.subset_of_data import SubsetCurvature
from laplace.tuning.tunable import SearchName


class FunctionalLaplace(BaseFunctionalLaplace):
    """All weights, as a Gaussian process on a subset of M data (Immer et al., 2021, equations A.5 to A.7).

    The kernel is K = J J'ᵀ / δ with the network's Jacobians J, the posterior covariance K** − K*M (K_MM + Λ⁻¹)⁻¹ K_M*
    with the output Hessian Λ. Since M of N data are used, the prior precision is δ·N/M. With M = N this equals the full
    Laplace approximation. The evidence is that of the M data under this prior.

    Privacy: the fitted posterior stores the Jacobians of the M data in factored form, which for a first layer contain
    the inputs. Saved states and pickles hold them too.

    Args:
        model: The trained network.
        likelihood: A name, e.g. `"classification"`, or a likelihood object.
        n_subset: M, the number of data in the subset.
        sigma_noise: σ, the standard deviation of the observation noise (regression).
        prior_precision: δ, the inverse variance of the prior: one number, or one per parameter tensor.
        prior_mean: μ₀, the mean of the prior.
        temperature: T of the tempered likelihood p(y | f)^(1/T).
        enable_backprop: Whether predictions can be differentiated with respect to the inputs.
        dict_key_x: Where batches are mappings: key of the inputs.
        dict_key_y: Where batches are mappings: key of the targets.
        backend: A GGN backend; None for the native one.
        backend_kwargs: Its options.
        independent_outputs: Use one Gaussian process per output, with the diagonal of Λ: C kernels of size M × M
            instead of one of M·C × M·C.
        seed: Seed of the random choice of data.
        selection: How the M data are chosen: `"random"`; `"top"`, the largest tr Λ (Pan et al., 2020); or
            `"leverage"`, the largest tr(Λ J Jᵀ).
        prior_factor: Factor on δ; None for N/M.
        forward_fn: `forward_fn(model, x)`, for models that need another call than `model(x)`.

    Raises:
        InvalidArgument: A value that is not accepted.
    """

    _key = ("all", "gp")
    structure = SubsetCurvature
    n_subset = property(attrgetter("structure_options.n_subset"), doc="M, the number of data in the subset.")
    seed = property(attrgetter("structure_options.seed"), doc="Seed of random subsets.")
    independent_outputs = property(
        attrgetter("structure_options.independent_outputs"), doc="Whether there is one Gaussian process per output."
    )
    K_MM = property(attrgetter("H"), doc="The kernel J Jᵀ of the subset, `[M·C, M·C]`.")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | LikelihoodName,
        n_subset: int,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: Backend = None,
        backend_kwargs: Options = None,
        independent_outputs: bool = False,
        seed: int = 0,
        *,
        selection: Literal["random", "top", "leverage"] = "random",
        prior_factor: float | None = None,
        forward_fn: ForwardFn | None = None,
    ) -> None:
        bind(self, locals())


class FunctionalLLLaplace(OfLastLayer, FunctionalLaplace):
    """The last layer, as a Gaussian process on a subset of the data."""

    _key = ("last_layer", "gp")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | LikelihoodName,
        n_subset: int,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        enable_backprop: bool = False,
        feature_reduction: FeatureReductionName | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        last_layer_name: str | None = None,
        backend: Backend = None,
        backend_kwargs: Options = None,
        independent_outputs: bool = False,
        seed: int = 0,
        *,
        selection: Literal["random", "top", "leverage"] = "random",
        prior_factor: float | None = None,
        forward_fn: ForwardFn | None = None,
    ) -> None:
        bind(self, locals())


def _bind(la: ELLA, given: Mapping[str, Any]) -> None:
    bind(la, given)
    la.fit_history_ = {}


def _directions(la: ELLA) -> Tensor:
    curvature = la.fitted().curvature
    return curvature.directions.T if isinstance(curvature, NystromCurvature) else torch.empty(0)


class ELLA(BaseFunctionalLaplace):
    """All weights, by the Nyström approximation of the kernel: ELLA (Deng et al., 2022).

    The k leading eigenvectors of the kernel of M data define k directions in weight space. The curvature of all data is
    then summed within their span, in a second pass over the loader. Outside the span predictions have no variance. The
    evidence is that of a full Laplace approximation with this curvature.

    Args:
        model: The trained network.
        likelihood: A name, e.g. `"classification"`, or a likelihood object.
        subsample_size: M, the number of data that define the directions.
        n_eigenvalues: k, the number of directions.
        sigma_noise: σ, the standard deviation of the observation noise (regression).
        prior_precision: δ, the inverse variance of the prior, one number.
        prior_mean: μ₀, the mean of the prior.
        temperature: T of the tempered likelihood p(y | f)^(1/T).
        enable_backprop: Whether predictions can be differentiated with respect to the inputs.
        dict_key_x: Where batches are mappings: key of the inputs.
        dict_key_y: Where batches are mappings: key of the targets.
        backend: A GGN backend; None for the native one.
        backend_kwargs: Its options.
        seed: Seed of the random choice of data.
        forward_fn: `forward_fn(model, x)`, for models that need another call than `model(x)`.

    Raises:
        InvalidArgument: A value that is not accepted.
    """

    _key = ("all", "gp", "nystrom")
    structure = NystromCurvature
    subsample_size = property(attrgetter("structure_options.subsample_size"), doc="M, the number of data.")
    n_eigenvalues = property(attrgetter("structure_options.n_eigenvalues"), doc="k, the number of directions.")
    seed = property(attrgetter("structure_options.seed"), doc="Seed of the choice of data.")
    dual_directions = property(_directions, doc="The directions V in weight space, `[P, k]`.")
    feature_gram = property(attrgetter("H"), doc="The curvature G within the span of the directions, `[k, k]`.")
    fit_history_: dict[str, list[Any]]

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | LikelihoodName,
        subsample_size: int,
        n_eigenvalues: int,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: Backend = None,
        backend_kwargs: Options = None,
        seed: int = 1234,
        *,
        forward_fn: ForwardFn | None = None,
    ) -> None:
        _bind(self, locals())

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
        posterior = learning.fitted_to(
            self.snapshot(), train_loader, override=override, progress_bar=progress_bar,
            first_pass=lambda engine: DirectionPass(engine, chosen, watch), **options,
        )  # fmt: skip
        self.set_posterior(posterior)
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
        listed = asked_for_candidates(tune, objective, val_loader, grid)
        if listed is None:
            result = super().optimize_hyperparameters(
                tune, objective, method, val_loader=val_loader, grid=grid, **options
            )
        else:
            result = best_candidate(self.snapshot(), *listed)
            self._take_over(self._group.assigned(**result.values_of()))
        self.fit_history_.setdefault("tuning", []).append(result)
        return result


class LLELLA(OfLastLayer, ELLA):
    """The last layer, by the Nyström approximation of its kernel."""

    _key = ("last_layer", "gp", "nystrom")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | LikelihoodName,
        subsample_size: int,
        n_eigenvalues: int,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        enable_backprop: bool = False,
        feature_reduction: FeatureReductionName | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        last_layer_name: str | None = None,
        backend: Backend = None,
        backend_kwargs: Options = None,
        seed: int = 1234,
        *,
        forward_fn: ForwardFn | None = None,
    ) -> None:
        _bind(self, locals())
