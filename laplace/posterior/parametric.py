"""Laplace approximations in weight space, for any choice of weights and structure: predictions, tuning, state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laplace.compat.members import LegacyMembers
from laplace.core.arguments import checked
from laplace.core.batch import Inputs
from laplace.core.hyperparameters import check_counts
from laplace.core.overrides import is_overridden
from laplace.core.positions import in_users_layout, unrolled
from laplace.core.random_numbers import check_generator, standard_normal
from laplace.enums import LinkApprox, PredType
from laplace.errors import InvalidArgument, InvalidType
from laplace.jacobian.jacobian import Jacobian
from laplace.network.model_guard import own_mode, own_precision
from laplace.posterior import overridden, own_outputs, state
from laplace.posterior.weight_predictor import WeightPredictor
from laplace.predictive import latent
from laplace.predictive.posterior_outputs import PredictionOptions
from laplace.predictive.prediction import Prediction, laid_out
from laplace.tuning import PosteriorGroup, Tunable


class ParametricLaplace(WeightPredictor, Tunable, LegacyMembers):
    """Base of all weight-space posteriors; a concrete class binds `structure` and `weights_type`.

    The arguments are those of `WeightFit`.
    """

    # Predictions.

    @checked
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
        `observation_noise`. Classification returns probabilities `[B, C]`. Counts (`"poisson"`) and a noise that
        depends on the input (`"heteroscedastic"`) return mean and variance of y, `[B, C]` each.

        Of a network with outputs `[B, T, C]` (or `[B, C, H, W]` with `channel_dim=1`) means, variances and
        probabilities have that shape; covariances, one per position, are `[B, T, C, C]` (`[B, H, W, C, C]`).

        Args:
            x: Inputs, a tensor, tuple or mapping.
            pred_type: `"glm"`, the linearised network (Immer et al., 2021), or `"nn"`, sampled weights.
            joint: Covariance over all inputs; with classification, samples of `link_approx="mc"` are joint.
            link_approx: One of the links of the likelihood, names in `laplace.likelihoods.links.LINKS`; `"nn"` always
                samples.
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
        options = PredictionOptions(str(link_approx), n_samples, _form(joint, diagonal_output))
        rows = self._quantities(x, kind, options, lambda: generator, model_kwargs)
        prediction = Prediction.of(self._as_overridden(rows, x, kind, model_kwargs), self.channel_dim)
        if likelihood.moment_prediction:
            return prediction.mean, prediction.variance
        if not likelihood.latent_prediction or (fitting and not likelihood.has_noise):
            return prediction.mean
        gaussian = prediction.latent
        if observation_noise:
            gaussian = gaussian.plus_noise(prediction.sigma_noise)
        return laid_out(gaussian, self.channel_dim, joint=joint)

    @checked
    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Samples of the weights, `[S, P]`; of a subnetwork `[S, all trainable parameters]`.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: A negative number of samples.
            ModelChangedError: The fixed weights around a subnetwork are not those of `fit` any more.
        """
        check_counts(0, n_samples=n_samples)
        check_generator(generator)
        with torch.set_grad_enabled(self.keeps_graph), own_precision():
            posterior = overridden.posterior_before(self, "sample")
            noise = standard_normal((n_samples, len(self.mean)), self.mean, generator)
            samples = self.mean + posterior.sample(noise)
            embedded = self.weights.embed(samples)
            if embedded is not samples:
                self.check_unchanged()
            return embedded

    @checked
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
        options = PredictionOptions(n_samples=n_samples, form=_form(joint, diagonal_output))
        rows = self._quantities(x, kind, options, lambda: generator, model_kwargs)
        return unrolled(rows.latent_samples, rows.positions, 1)

    @checked
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
        if is_overridden(self, "functional_samples"):
            kind = latent.check_options(pred_type, None, n_samples, generator)
            form = _form(joint, diagonal_output)
            drawn = own_outputs.own_samples(self, "functional_samples", x, kind, form, model_kwargs)(
                n_samples, generator
            )
            samples = unrolled(drawn.values, drawn.positions, 1)
        else:
            samples = self._latent_samples(x, pred_type, n_samples, diagonal_output, generator, joint, model_kwargs)
        return in_users_layout(self.likelihood_object.inverse_link(samples), self.channel_dim, 1)

    @checked
    def functional_variance(self, Js: Tensor | Jacobian) -> Tensor:
        """J_b P⁻¹ J_bᵀ of Jacobians `[B, C, P]`, `[B, C, C]`."""
        return overridden.posterior_before(self, "functional_variance").functional_variance(self._jacobian(Js))

    def functional_covariance(self, Js: Tensor | Jacobian) -> Tensor:
        """J P⁻¹ Jᵀ over all data of Jacobians `[B, C, P]`, `[B·C, B·C]`, data major."""
        return overridden.posterior_before(self, "functional_covariance").functional_covariance(self._jacobian(Js))

    @checked
    def predictive_moments(
        self, x: Inputs, *, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the linearised network's outputs, without noise, under any likelihood.

        Args:
            x: Inputs of B data.
            joint: Whether the covariance is of all data together.
            diagonal_output: Only variances of the outputs.

        Returns:
            `[B, C]` with `[B, C, C]`, or with `[B, C]` (`diagonal_output`), or `[B·C]` with `[B·C, B·C]` (`joint`).

        Raises:
            NotFittedError: Before `fit`.
            ModelChangedError: The network was trained further after `fit`.
        """
        with own_mode(), torch.set_grad_enabled(self._keeps_graph):
            return laid_out(self._latent(x, _form(joint, diagonal_output)), self.channel_dim, joint=joint)

    @checked
    def functional_variance_fast(self, X: Inputs) -> tuple[Tensor, Tensor]:
        """Mean and variances of the latent outputs at X, `[B, C]` each, without covariances between outputs."""
        with own_mode(), torch.set_grad_enabled(self._keeps_graph):
            return laid_out(self._latent(X, "diagonal"), self.channel_dim)

    def _jacobian(self, Js: Tensor | Jacobian) -> Jacobian:
        if isinstance(Js, Jacobian):
            return Js
        n_params = self.problem.layout.n_params
        if not isinstance(Js, Tensor):
            raise InvalidType(f"Js is of type {type(Js).__name__}; give Jacobians [B, C, P], P = {n_params}.")
        if Js.ndim != 3 or Js.shape[2] != n_params:
            raise InvalidArgument(f"Js has shape {tuple(Js.shape)}; it must be [B, C, P] with P = {n_params}.")
        return Jacobian.from_dense(Js.to(self._like), self.problem.layout.sizes)

    # Tuning and state.

    @property
    def _subject(self) -> PosteriorGroup:
        return PosteriorGroup((self,))

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
        state.move(self, None if device is None else state.checked_device(device), dtype)
        return self

    def __repr__(self) -> str:
        return state.describe(self)


def _form(joint: bool, diagonal_output: bool) -> str:
    """The covariance of the latents that was asked for."""
    return "joint" if joint else "diagonal" if diagonal_output else "full"
