"""Laplace approximations in weight space, for any choice of weights and structure: predictions, tuning, state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laplace import state, tuning
from laplace.batch import Inputs
from laplace.curvature.jacobian import Jacobian
from laplace.enums import LinkApprox, PredType, PriorStructure, TuningMethod
from laplace.errors import InvalidArgument
from laplace.lending import own_mode, own_precision, same_random_state
from laplace.positions import in_users_layout, unrolled
from laplace.predicting import WeightPredictor
from laplace.predictive import latent
from laplace.predictive.prediction import Prediction, laid_out
from laplace.predictive.quantities import PredictionOptions


class ParametricLaplace(WeightPredictor):
    """Base of all weight-space posteriors; a concrete class binds `structure` and `weights_type`.

    The arguments are those of `WeightFit`.
    """

    # Predictions.

    def __call__(
        self,
        x: Inputs,
        pred_type: PredType | str = PredType.GLM,
        joint: bool = False,
        link_approx: LinkApprox | str = LinkApprox.PROBIT,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        fitting: bool = False,
        *,
        observation_noise: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """Predictive distribution at x.

        Regression (and rewards) return the latent Gaussian `(mean, variance)`: `[B, C]` with `[B, C, C]`,
        `[B, C]` (`diagonal_output`), or `[B·C]` with `[B·C, B·C]` (`joint`); the variance is that of f, plus σ² with
        `observation_noise`. Classification returns probabilities `[B, C]`.

        Of a network with outputs `[B, T, C]` (or `[B, C, H, W]` with `channel_dim=1`) means, variances and
        probabilities have that shape; covariances, one per position, are `[B, T, C, C]` (`[B, H, W, C, C]`).

        Args:
            x: Inputs, a tensor, tuple or mapping.
            pred_type: `"glm"`, the linearised network (Immer et al., 2021), or `"nn"`, sampled weights.
            joint: Covariance over all inputs; with classification, samples of `link_approx="mc"` are joint.
            link_approx: `"probit"`, `"mc"`, `"bridge"`, `"bridge_norm"` or `"delta"`; `"nn"` always samples.
            n_samples: Monte-Carlo samples.
            diagonal_output: Only variances of the outputs.
            generator: Source of randomness; equal seeds give equal bits.
            fitting: Return preference probabilities of pairs with reward modelling.
            observation_noise: Add σ² to the variance (regression).
            **model_kwargs: For the model, with `pred_type="nn"`.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: An option is not accepted.
            ModelChangedError: The network was trained further after `fit`.
        """
        kind = latent.check_options(pred_type, link_approx, n_samples, generator)
        if observation_noise and not self.likelihood_object.has_noise:
            raise InvalidArgument(
                f"observation_noise=True, but likelihood={self.likelihood_object.name!r} has no noise."
            )
        likelihood = self.likelihood_object
        if kind == PredType.NN:
            joint, diagonal_output = False, True
        form = "joint" if joint else "diagonal" if diagonal_output else "full"
        options = PredictionOptions(str(link_approx), n_samples, form)
        rows = self._quantities(x, kind, options, lambda: generator, model_kwargs)
        prediction = Prediction(rows, self.channel_dim)
        if not likelihood.latent_prediction or (fitting and not likelihood.has_noise):
            return prediction.mean
        gaussian = prediction.latent
        if observation_noise:
            gaussian = latent.with_noise(gaussian, prediction.sigma_noise)
        return laid_out(gaussian, self.channel_dim, joint=joint)

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Samples of the weights, `[S, P]`; of a subnetwork `[S, all trainable parameters]`.

        Raises:
            NotFittedError: Before `fit`.
            ModelChangedError: The fixed weights around a subnetwork are not those of `fit` any more.
        """
        with torch.no_grad(), own_precision():
            samples = self._theta_samples(n_samples, generator)
            embedded = self.weights.embed(samples)
            if embedded is not samples:
                self.check_unchanged()
            return embedded

    def functional_samples(
        self,
        x: Inputs,
        pred_type: PredType | str = PredType.GLM,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        joint: bool = False,
        **model_kwargs: Any,
    ) -> Tensor:
        """Samples of the latent outputs, `[S, B, C]`: per input, or of all inputs together with `joint`.

        Of outputs with positions `[S, *shape of the network's outputs]`, positions being inputs in this sense.
        """
        samples = self._latent_samples(x, pred_type, n_samples, diagonal_output, generator, joint, model_kwargs)
        return in_users_layout(samples, self.channel_dim, 1)

    def _latent_samples(
        self,
        x: Inputs,
        pred_type: PredType | str,
        n_samples: int,
        diagonal_output: bool,
        generator: torch.Generator | None,
        joint: bool,
        model_kwargs: dict[str, Any],
    ) -> Tensor:
        """`[S, B, *positions, C]`."""
        kind = latent.check_options(pred_type, None, n_samples, generator)
        form = "joint" if joint else "diagonal" if diagonal_output else "full"
        options = PredictionOptions(n_samples=n_samples, form=form)
        rows = self._quantities(x, kind, options, lambda: generator, model_kwargs)
        return unrolled(rows.latent_samples, rows.positions, 1)

    def predictive_samples(
        self,
        x: Inputs,
        pred_type: PredType | str = PredType.GLM,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        joint: bool = False,
        **model_kwargs: Any,
    ) -> Tensor:
        """Samples of the target's mean, `[S, B, C]`: probabilities, or the latents of a regression or of rewards.

        Reward modelling gives preference probabilities for pairs (C = 2) and latent rewards for single items.
        """
        samples = self._latent_samples(x, pred_type, n_samples, diagonal_output, generator, joint, model_kwargs)
        return in_users_layout(self.likelihood_object.inverse_link(samples), self.channel_dim, 1)

    def functional_variance(self, Js: Tensor | Jacobian) -> Tensor:
        """J_b P⁻¹ J_bᵀ of Jacobians `[B, C, P]`, `[B, C, C]`."""
        return self.posterior().functional_variance(self._jacobian(Js))

    def functional_covariance(self, Js: Tensor | Jacobian) -> Tensor:
        """J P⁻¹ Jᵀ over all data of Jacobians `[B, C, P]`, `[B·C, B·C]`, data major."""
        return self.posterior().functional_covariance(self._jacobian(Js))

    def functional_variance_fast(self, X: Inputs) -> tuple[Tensor, Tensor]:
        """Mean and variances of the latent outputs at X, `[B, C]` each, without covariances between outputs."""
        with own_mode(), torch.set_grad_enabled(self.enable_backprop):
            return laid_out(self._latent(X, "diagonal"), self.channel_dim)

    def _jacobian(self, Js: Tensor | Jacobian) -> Jacobian:
        if isinstance(Js, Jacobian):
            return Js
        n_params = self.problem.layout.n_params
        if Js.ndim != 3 or Js.shape[2] != n_params:
            raise InvalidArgument(f"Js has shape {tuple(Js.shape)}; it must be [B, C, P] with P = {n_params}.")
        return Jacobian.from_dense(Js.to(self._like), self.problem.layout.sizes)

    # Tuning and state.

    def optimize_prior_precision(
        self,
        pred_type: PredType | str = PredType.GLM,
        method: TuningMethod | str = TuningMethod.MARGLIK,
        n_steps: int = 100,
        lr: float = 1e-1,
        init_prior_prec: float | Tensor = 1.0,
        prior_structure: PriorStructure | str = PriorStructure.SCALAR,
        val_loader: Iterable[Any] | None = None,
        loss: Any = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: LinkApprox | str = LinkApprox.PROBIT,
        n_samples: int = 100,
        verbose: bool = False,
        progress_bar: bool = False,
        log_prior_prec_base: float = 10.0,
        generator: torch.Generator | None = None,
    ) -> None:
        """Chooses the prior precision and assigns it.

        `method="marglik"` maximises the log evidence by Adam on log δ and keeps the best value seen.
        `method="gridsearch"` (the paper's `"CV"`) minimises a validation loss over scalar candidates
        `base^min … base^max`; the network runs once over the validation data.

        Args:
            pred_type: Predictive of the grid search.
            method: `"marglik"`, `"gridsearch"` or `"CV"`.
            n_steps: Steps of Adam.
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

        Raises:
            InvalidArgument: Unknown method or structure, no validation data, or no candidate with a finite loss;
                the prior precision is left as it was.
        """
        options = tuning.TuningOptions(
            method=str(method), n_steps=n_steps, lr=lr, init_prior_prec=init_prior_prec,
            prior_structure=str(prior_structure), val_loader=val_loader, loss=loss,
            log_prior_prec_min=log_prior_prec_min, log_prior_prec_max=log_prior_prec_max, grid_size=grid_size,
            log_prior_prec_base=log_prior_prec_base, progress_bar=progress_bar,
            predictive=tuning.Predictive(str(pred_type), str(link_approx), n_samples, generator),
        )  # fmt: skip
        with same_random_state(self.weights.model):
            result = tuning.choose_prior_precision(self, options)
        tuning.report(result)
        self.prior_precision = result.prior_precision
        if verbose:
            print(f"Optimized prior precision is {self.prior_precision}.")  # noqa: T201

    def optimize_hyperparameters(
        self,
        tune: str | Sequence[str] = "prior_precision",
        objective: Any = "evidence",
        method: str | None = None,
        *,
        prior_structure: PriorStructure | str | None = None,
        val_loader: Iterable[Any] | None = None,
        ood_loader: Iterable[Any] | None = None,
        ood_weight: float = 1.0,
        grid: Mapping[str, Tensor | Sequence[float]] | None = None,
        n_steps: int = 100,
        lr: float = 1e-1,
        tolerance: float = 1e-4,
        pred_type: PredType | str = PredType.GLM,
        link_approx: LinkApprox | str = LinkApprox.PROBIT,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        progress_bar: bool = False,
    ) -> tuning.TuningResult:
        """Chooses prior precision, noise and temperature together and assigns them; the search starts where they are.

        Args:
            tune: One or more of `"prior_precision"`, `"sigma_noise"` (in the shape that it has) and `"temperature"`.
            objective: `"evidence"`; or a loss on validation data: `"nll"`, `"brier"`, `"crps"` (regression), `"ece"`
                (classification), a `laplace.tuning.Thresholds`, a running metric or a callable, as `loss` of
                `optimize_prior_precision`.
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

        Raises:
            InvalidArgument: Arguments that do not belong together, no finite objective, or thresholds that no candidate
                meets; the hyper-parameters are left as they were, as after every error.
            InvalidData: A loader without data.
            UnsupportedError: A score without a meaning for this likelihood.

        Warns:
            TuningWarning: The objective is flat or was not finite somewhere, the best value is on an edge, or the
                search did not converge.
        """
        options = tuning.SearchOptions(
            tune=tune, objective=objective, method=method,
            prior_structure=None if prior_structure is None else str(prior_structure), val_loader=val_loader,
            ood_loader=ood_loader, ood_weight=ood_weight, grid=grid, n_steps=n_steps, lr=lr, tolerance=tolerance,
            progress_bar=progress_bar,
            predictive=tuning.Predictive(str(pred_type), str(link_approx), n_samples, generator),
        )  # fmt: skip
        with same_random_state(self.weights.model):
            result = tuning.choose_hyperparameters(self, options)
        tuning.report(result)
        result.setting.assign(self)
        return result

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides a prediction but the model's weights: tensors, numbers and strings only.

        Raises:
            NotFittedError: Before `fit`.
        """
        return state.save(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a saved posterior for the same model.

        Raises:
            StateError: The state belongs to another class, model, likelihood or choice of weights.
        """
        state.load(self, state_dict)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> ParametricLaplace:
        """Moves the posterior (and the model, as `nn.Module.to` does) to a device or dtype; returns itself."""
        state.move(self, None if device is None else torch.device(device), dtype)
        return self

    def __repr__(self) -> str:
        return state.describe(self)
