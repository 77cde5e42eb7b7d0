"""A posterior as a model of BoTorch: what acquisition functions read, for every structure of the curvature.

    f | D ~ GP(m, k),    m(x) = f(x, θ̂),    k(x, x') = J(x) P⁻¹ J(x')ᵀ

is the linearised network under the posterior over its weights (Immer et al., 2021; Kristiadi et al., 2023, for Bayesian
optimisation). New observations condition this Gaussian process exactly, without a fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.models.model import FantasizeMixin, Model
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.posteriors import GPyTorchPosterior, Posterior
from botorch.sampling.pathwise.paths import SamplePath
from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths
from torch import Tensor

import laplace
from laplace.core.checks import is_true
from laplace.core.precision_policy import widened
from laplace.errors import InvalidArgument, InvalidType, UnsupportedError
from laplace.network.model_guard import autograd_mode
from laplace.parametric import ParametricLaplace
from laplace.posterior.posterior import Posterior as Snapshot
from laplace.predictive.predict import Predictor


class LaplaceModel(Model, FantasizeMixin):
    """A Laplace posterior as a BoTorch model: the Gaussian process of the linearised network.

    Example:
        model = LaplaceModel(la)
        candidate, _ = optimize_acqf(LogExpectedImprovement(model, best_f=y.max()), bounds, 1, 8, 64)

    The network must take points `[B, d]`. Predictions can be differentiated with respect to X, whatever
    `la.enable_backprop` is. Each call uses the posterior that `la` has at that time. Covariances are summed in float64;
    results have the dtype of X.

    Args:
        la: A fitted posterior with `likelihood="regression"`.
        input_transform: Transform from X to the inputs that the network was trained with, e.g. `Normalize`.
        outcome_transform: Transform from Y to the targets that the network was trained with, e.g. `Standardize`; call
            it on the training data first.

    Attributes:
        la: The posterior.

    Raises:
        InvalidType: `la` is no Laplace posterior of a single network.
        UnsupportedError: The likelihood is not `"regression"`.
    """

    def __init__(
        self,
        la: ParametricLaplace,
        *,
        input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(la, ParametricLaplace):
            raise InvalidType(f"la is of type {type(la).__name__}; give a posterior, as of laplace.Laplace.")
        likelihood = la.snapshot().likelihood
        if not (likelihood.has_noise and likelihood.latent_prediction):
            raise UnsupportedError(
                f"likelihood={likelihood.name!r}: BoTorch's models are Gaussian processes with Gaussian noise; fit "
                "with likelihood='regression'."
            )
        self.la = la
        self._observed: _Observed | None = None
        if input_transform is not None:
            self.input_transform = input_transform
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform
        self.eval()

    @property
    def likelihood(self) -> Any:
        """The likelihood of `la`, with whose noise fantasies are drawn."""
        return self.la.snapshot().likelihood

    @property
    def num_outputs(self) -> int:
        """Number of outputs m."""
        return self.la.n_outputs

    @property
    def batch_shape(self) -> torch.Size:
        """Batch dimensions of the observations that the model was conditioned on; empty without any."""
        return torch.Size() if self._observed is None else self._observed.batch_shape

    def posterior(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> Posterior:
        """Joint distribution of the outputs at the q points of each batch.

        Args:
            X: Points, `[*batch, q, d]`.
            output_indices: Indices of the outputs; None for all.
            observation_noise: True to add the noise of the likelihood; or the variances to add, of transformed
                outcomes, `[*batch, 1 or q, m]`.
            posterior_transform: Transform that is applied to the result.

        Returns:
            Gaussians with batch shape `[*broadcast(batch, batch_shape)]`, mapped back by the outcome transform.
        """
        self.eval()
        X = self.transform_inputs(X)
        mean, covariance = self._moments(X)
        if observation_noise is not False:
            noise = observation_noise if isinstance(observation_noise, Tensor) else None
            covariance = covariance + torch.diag_embed(self._noise(noise, mean).flatten(-2))
            mean = mean.expand(*covariance.shape[:-2], *mean.shape[-2:])
        gaussian: Posterior = _gaussian(mean.to(X.dtype), covariance.to(X.dtype))
        if self._outcome_transform is not None:
            gaussian = self._outcome_transform.untransform_posterior(gaussian, X=X)
        if output_indices is not None:
            gaussian = _some_outputs(gaussian, output_indices)
        return gaussian if posterior_transform is None else posterior_transform(posterior=gaussian, X=X)

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> LaplaceModel:
        """The model given more observations: exact conditioning of the Gaussian process, no weight is fitted.

            m'(x) = m(x) + k(x, X) (k(X, X) + N)⁻¹ (Y − m(X))
            k'(x, x') = k(x, x') − k(x, X) (k(X, X) + N)⁻¹ k(X, x')

        Use it for fantasies and pending points: every later call also computes the covariances with these n points. For
        many observations, fit the posterior again.

        Args:
            X: Points, `[*batch, n, d]`.
            Y: Observed outcomes, `[*more, *batch, n, m]`, in their original units.
            noise: Variances of the transformed outcomes, broadcast to the shape of Y; None for σ².
            **kwargs: No others are accepted.

        Raises:
            InvalidArgument: An unknown argument; outcomes that do not belong to the points, or are not finite.
        """
        if kwargs:
            raise InvalidArgument(f"condition_on_observations has no arguments {sorted(kwargs)}; noise= is known.")
        if X.shape[-2:-1] != Y.shape[-2:-1] or Y.shape[-1] != self.num_outputs:
            raise InvalidArgument(
                f"X has shape {list(X.shape)}, Y {list(Y.shape)}; [*batch, n, d] and [*more, *batch, n, m] with "
                f"m = {self.num_outputs} are accepted."
            )
        self.eval()
        X = self.transform_inputs(X)
        if self._outcome_transform is not None:
            Y, _ = self._outcome_transform(Y, X=X)
        Y = widened(Y)
        if not is_true(Y.isfinite().all()):
            raise InvalidArgument("Y has NaN or infinite entries, after its transform where there is one.")
        observed = _Observed(X, Y, self._noise(noise, Y))
        conditioned = LaplaceModel(
            self.la, input_transform=self._input_transform, outcome_transform=self._outcome_transform
        )
        conditioned._observed = observed if self._observed is None else self._observed.and_then(observed)
        return conditioned

    # Moments of the transformed outcomes.

    @property
    def _input_transform(self) -> InputTransform | None:
        return getattr(self, "input_transform", None)

    @property
    def _outcome_transform(self) -> OutcomeTransform | None:
        return getattr(self, "outcome_transform", None)

    def _noise(self, given: Tensor | None, like: Tensor) -> Tensor:
        """Variances of the noise of outcomes `[*batch, n, m]`, float64: those given, or σ² in `[n, m]`."""
        variances = self.la.snapshot().predictive().noise_of_targets.detach().square() if given is None else given
        if given is not None and not is_true((given.isfinite() & (given >= 0)).all()):
            raise InvalidArgument("variances of the noise are negative or not finite.")
        return widened(variances).to(like.device).expand(*variances.shape[:-2], *like.shape[-2:])

    def _moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean `[*batch, q, m]` and covariance `[*batch, q·m, q·m]`, float64, given all observations."""
        observed = self._observed
        if observed is None:
            return self._joint(X)
        batch = torch.broadcast_shapes(X.shape[:-2], observed.X.shape[:-2])
        points = torch.cat([part.expand(*batch, *part.shape[-2:]) for part in (X, observed.X.to(X))], -2)
        return observed.given(*self._joint(points), n_points=X.shape[-2])

    def _joint(self, X: Tensor, posterior: Snapshot | None = None) -> tuple[Tensor, Tensor]:
        """The same without observations but those of the fit; under the posterior of now, or one of before."""
        *batch, q, d = X.shape
        size = q * self.num_outputs
        if not prod((*batch, q)):
            empty = widened(X.new_zeros(0))
            return empty.view(*batch, q, self.num_outputs), empty.new_zeros(*batch, size, size)
        posterior = (posterior or self.la.snapshot()).predictive()
        predictor = Predictor(posterior, torch.is_grad_enabled() and X.requires_grad)
        source = predictor.linearised(X.reshape(-1, d).to(predictor.posterior.expansion_point), group_size=q)
        with autograd_mode(), torch.set_grad_enabled(predictor.graph):
            gaussian = source.gaussian("joint", wide=True)
        mean = widened(gaussian.mean).to(X.device).view(*batch, q, self.num_outputs)
        return mean, widened(gaussian.covariance).to(X.device).view(*batch, size, size)

    def _set_transformed_inputs(self) -> None:
        """No training inputs are held that would be transformed."""


class _Observed:
    """Observations that came after the fit.

    Args:
        X: Transformed points, `[*batch, n, d]`.
        Y: Transformed outcomes, `[*more, *batch, n, m]`, float64.
        noise: Their variances, in this shape or with less batch dimensions.
    """

    def __init__(self, X: Tensor, Y: Tensor, noise: Tensor) -> None:
        self.X, self.Y, self.noise = X, Y, noise

    @property
    def batch_shape(self) -> torch.Size:
        """Batch dimensions of points and outcomes."""
        return torch.broadcast_shapes(self.X.shape[:-2], self.Y.shape[:-2])

    def and_then(self, other: _Observed) -> _Observed:
        """Both sets of observations."""

        def joined(first: Tensor, second: Tensor) -> Tensor:
            batch = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
            return torch.cat([part.expand(*batch, *part.shape[-2:]) for part in (first, second)], -2)

        points = joined(self.X, other.X.to(self.X))
        return _Observed(points, joined(self.Y, other.Y), joined(self.noise, other.noise))

    def given(self, mean: Tensor, covariance: Tensor, n_points: int) -> tuple[Tensor, Tensor]:
        """Moments at some points given the observations.

        Args:
            mean: At these and then at the observed points, `[*batch, q + n, m]`.
            covariance: `[*batch, (q + n)·m, (q + n)·m]`.
            n_points: q.

        Returns:
            `[*batch, q, m]` and `[*batch, q·m, q·m]`.
        """
        inside, cross, own = _parts(covariance, n_points * mean.shape[-1])
        root = self.root(own)
        half = torch.linalg.solve_triangular(root, cross.mT, upper=False)  # [*batch, n·m, q·m]
        step = half.mT @ torch.linalg.solve_triangular(root, self.residual(mean[..., n_points:, :]), upper=False)
        mean = mean[..., :n_points, :] + step.squeeze(-1).unflatten(-1, (n_points, mean.shape[-1]))
        return mean, (inside - half.mT @ half).expand(*mean.shape[:-2], *inside.shape[-2:])

    def root(self, covariance: Tensor) -> Tensor:
        """Cholesky factor of their covariance with noise, `[*batch, n·m, n·m]`."""
        from linear_operator.utils.cholesky import psd_safe_cholesky  # of BoTorch's own Gaussian processes

        return psd_safe_cholesky(covariance + torch.diag_embed(self.noise.flatten(-2)))

    def residual(self, f: Tensor) -> Tensor:
        """Posterior less outputs f `[*batch, n, m]`, `[*batch, n·m, 1]`."""
        return (self.Y - f).flatten(-2).unsqueeze(-1)


def _parts(covariance: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Covariances of the first `size` entries, between them and the others, and of the others."""
    return covariance[..., :size, :size], covariance[..., :size, size:], covariance[..., size:, size:]


def _gaussian(mean: Tensor, covariance: Tensor) -> GPyTorchPosterior:
    """A Gaussian over q points, `[*batch, q, m]` and `[*batch, q·m, q·m]`, points major."""
    from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
    from linear_operator import to_linear_operator  # factorised when samples are drawn, with jitter where it must be

    if mean.shape[-1] == 1:
        return GPyTorchPosterior(MultivariateNormal(mean.squeeze(-1), to_linear_operator(covariance)))
    return GPyTorchPosterior(MultitaskMultivariateNormal(mean, to_linear_operator(covariance)))


def _some_outputs(posterior: Posterior, outputs: Sequence[int]) -> Posterior:
    """The marginal over some outputs.

    Raises:
        UnsupportedError: The outcomes' transform leaves no Gaussian.
    """
    if not isinstance(posterior, GPyTorchPosterior):
        raise UnsupportedError(
            "output_indices with an outcome transform after which the posterior is no Gaussian: ask for all outputs."
        )
    mean = posterior.mean
    q, m = mean.shape[-2:]
    places = torch.arange(q * m, device=mean.device).view(q, m)[:, list(outputs)].flatten()
    covariance = posterior.distribution.covariance_matrix
    return _gaussian(mean[..., list(outputs)], covariance[..., places.unsqueeze(1), places])


class FunctionSamples(SamplePath):
    """Functions drawn from a `LaplaceModel`: of the linearised network at sampled weights, exact at all points.

    What `PathwiseThompsonSampling` and `get_matheron_path_model` ask for. After new observations the functions are
    f_s + k(·, X) (k(X, X) + N)⁻¹ (Y − f_s(X) − ε_s), Matheron's rule (Wilson et al., 2021). They are those of the
    posterior that `model.la` had when they were drawn.

    Args:
        model: The model.
        sample_shape: How many functions, `[*S]`.

    Raises:
        UnsupportedError: The model has batches of observations, or the structure has no weights to draw.
    """

    def __init__(self, model: LaplaceModel, sample_shape: torch.Size) -> None:
        super().__init__()
        if model.batch_shape:
            raise UnsupportedError("function samples of a model with batches of observations; condition it on one set.")
        self.model, self.sample_shape = model, torch.Size(sample_shape)
        self._posterior = model.la.snapshot()
        self._functions = laplace.draw(self._posterior, self.sample_shape.numel())
        with torch.no_grad():
            self._update = self._updates(model._observed)

    def set_ensemble_as_batch(self, ensemble_as_batch: bool) -> None:
        """Nothing: the network is one."""

    def forward(self, X: Tensor) -> Tensor:
        """Values of the functions at X, of each at its own points where X has such batch dimensions.

        Args:
            X: `[*batch, *S, n, d]`, or `[*batch, n, d]` with ones in the place of S or less dimensions.

        Returns:
            `[*batch, *S, n]`; of m > 1 outputs, whose dimension X has before the points as one, `[*batch, *S, m, n]`.
        """
        several = self.model.num_outputs > 1
        X = X.squeeze(-3) if several else X
        values = self._in_place(self._values(self.model.transform_inputs(X)), X).to(X.dtype)
        if self.model._outcome_transform is not None:
            values, _ = self.model._outcome_transform.untransform(values, X=X)
        return values.transpose(-1, -2) if several else values.squeeze(-1)

    def _in_place(self, values: Tensor, X: Tensor) -> Tensor:
        """Values `[S, *batch, n, m]` of all functions with S among the batch dimensions, before the points."""
        count, batch = len(self.sample_shape), X.shape[:-2]
        lead, own = batch[: max(0, len(batch) - count)], batch[max(0, len(batch) - count) :]
        points = values.shape[-2:]
        if own == self.sample_shape:
            each = values.reshape(len(values), *lead, own.numel(), *points)
            return each.diagonal(dim1=0, dim2=len(lead) + 1).movedim(-1, len(lead)).reshape(*batch, *points)
        if own.numel() > 1:
            raise InvalidArgument(f"X has batch dimensions {list(batch)}, which are not those of the functions.")
        each = values.reshape(len(values), *lead, *points).movedim(0, len(lead))
        return each.reshape(*lead, *self.sample_shape, *points)

    def _values(self, X: Tensor) -> Tensor:
        """Values at transformed X `[*batch, n, d]` of all functions, `[S, *batch, n, m]`, float64."""
        values = self._prior(X)
        observed = self.model._observed
        if observed is None:
            return values
        n_points, n_outputs = X.shape[-2], values.shape[-1]
        inputs = observed.X.to(X).expand(*X.shape[:-2], *observed.X.shape[-2:])
        _, covariance = self.model._joint(torch.cat([X, inputs], -2), self._posterior)
        _, cross, _ = _parts(covariance, n_points * n_outputs)
        update = self._update.view(len(values), *[1] * (X.ndim - 2), -1, 1)
        return values + (cross @ update).squeeze(-1).unflatten(-1, (n_points, n_outputs))

    def _updates(self, observed: _Observed | None) -> Tensor:
        """(k(X, X) + N)⁻¹ (Y − f_s(X) − ε_s) of every function, `[S, n·m]`; zero without observations."""
        if observed is None:
            return widened(self._posterior.expansion_point.new_zeros(len(self._functions), 0))
        _, covariance = self.model._joint(observed.X, self._posterior)
        f = self._prior(observed.X)
        f = f + observed.noise.sqrt() * torch.randn_like(f)
        return torch.cholesky_solve(observed.residual(f), observed.root(covariance)).squeeze(-1)

    def _prior(self, X: Tensor) -> Tensor:
        """f(x, θ*) + J (θ_s − θ*) at X `[*batch, n, d]`, `[S, *batch, n, m]`, float64."""
        x = X.reshape(-1, X.shape[-1]).to(self._posterior.expansion_point)
        return widened(type(self._functions[0]).stacked(self._functions, x)).to(X.device).unflatten(1, X.shape[:-1])


@DrawMatheronPaths.register(LaplaceModel)
def _function_samples(model: LaplaceModel, *, sample_shape: torch.Size, **unused: Any) -> FunctionSamples:
    """Functions of a model, for BoTorch's Thompson sampling."""
    return FunctionSamples(model, sample_shape)
