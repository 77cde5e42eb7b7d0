"""The object that `la.predict` returns: it computes what is asked of it, once, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.distributions import Distribution

from laplace.core.gaussian import Gaussian, mixture_of, normal_of
from laplace.core.positions import in_users_layout, unrolled
from laplace.errors import InvalidArgument
from laplace.likelihoods.targets import Decomposition, Target
from laplace.network.model_guard import autograd_mode
from laplace.predictive.posterior_outputs import MixedOutputs, PosteriorOutputs, lazy


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """The predictive distribution at B inputs; each quantity is computed when you first read it, and cached.

    f are the network's outputs, y is the target. Hyper-parameters assigned after the call of `la.predict` have no
    effect. Random quantities start from the same state of the generator, in whichever order you read them.

    For a network with an output per token or pixel, `[B, C]` below stands for the shape of the outputs (`[B, T, C]`, or
    `[B, C, H, W]` with `channel_dim=1`), `[B]` for one number per token or pixel, and covariances have two trailing
    dimensions. With `outputs=` in the call, C is the number of these outputs.

    For a mixture, means and variances are those of the mixture, by the law of total variance, and so are intervals,
    entropies and distributions; disagreement between its components is epistemic.

    Attributes:
        rows: Outputs under each component of a mixture; rows are inputs, or their tokens or pixels.
        channel_dim: Dimension of the network's outputs that holds the C classes or values.
    """

    rows: MixedOutputs
    channel_dim: int = -1

    @classmethod
    def of(cls, outputs: PosteriorOutputs, channel_dim: int = -1) -> Prediction:
        """The prediction of one posterior."""
        return cls(MixedOutputs.of(outputs), channel_dim)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Hint for a name of tensors; what a property has raised, once more."""
            if not name.startswith("_") and name in dir(Tensor):
                raise AttributeError(
                    f"a Prediction has no attribute {name!r}, it is no tensor: prediction.mean is one, of class "
                    "probabilities or means [B, C], e.g. prediction.mean.argmax(-1); la(x) returns tensors."
                )
            return object.__getattribute__(self, name)

    def __repr__(self) -> str:
        """The options of the prediction; nothing is computed for them."""
        options = self.rows.options
        link = "" if self.target.mean_is_latent else f"link={options.link!r}, "
        return f"Prediction({link}n_samples={options.n_samples}, form={options.form!r})"

    @property
    def create_graph(self) -> bool:
        """True if results can be differentiated with respect to hyper-parameters or inputs."""
        return self.rows.create_graph

    @property
    def target(self) -> Target:
        """The part of the likelihood that derives mean, variance and distribution of y from those of f."""
        return self.rows.target

    # Latents.

    @property
    def outputs(self) -> Tensor | None:
        """Indices of the predicted outputs, `[B, K]` (for the K largest in descending order); None for all outputs."""
        chosen = self.rows.outputs
        return None if chosen is None else self._outputs(chosen)

    @property
    def latent(self) -> Gaussian:
        """Gaussian distribution of the outputs f, an object with mean and covariance; one row per token or pixel."""
        return self.rows.latent

    @property
    def latent_mean(self) -> Tensor:
        """Mean of the outputs f, `[B, C]`. Alone it costs one forward pass; after `refine` also the Jacobian."""
        return self._outputs(self.rows.latent_mean)

    @property
    def latent_covariance(self) -> Tensor:
        """Covariance of the outputs f, `[B, C, C]`.

        With `diagonal_output` variances, `[B, C]`; with `joint` `[B·C, B·C]`, or `[B/n, n·C, n·C]` with `group_size=n`.
        """
        return laid_out(self.rows.latent, self.channel_dim, joint=self.rows.options.form == "joint")[1]

    @property
    def latent_variance(self) -> Tensor:
        """Variances of the outputs f, without observation noise, `[B, C]`."""
        return self._outputs(self.rows.latent_variance)

    @property
    def latent_samples(self) -> Tensor:
        """Samples of the outputs f, `[S, B, C]`, with S the `n_samples` of the call."""
        return self._outputs(self.rows.latent_samples, 1)

    # Targets.

    @property
    def mean(self) -> Tensor:
        """Mean of the target y, `[B, C]`; in classification the class probabilities."""
        return self._outputs(self.rows.mean)

    @property
    def sigma_noise(self) -> Tensor:
        """Standard deviation σ of the observation noise at the time of the call, 0-dim or `[C]`."""
        return self.rows.sigma_noise

    @property
    def probabilities(self) -> Tensor:
        """Probabilities of the classes or labels, `[B, C]`, by the link approximation of the call.

        Raises:
            UnsupportedError: The target has none (regression, rewards of single items).
        """
        self.target.require_probabilities("probabilities", self.rows)
        return self.mean

    @property
    def probability_samples(self) -> Tensor:
        """Samples of the probabilities, `[S, B, C]`, which are p(y | f) at `latent_samples`.

        Raises:
            UnsupportedError: The target has no probabilities.
        """
        self.target.require_probabilities("probability_samples", self.rows)
        return self._outputs(self.rows.mean_samples, 1)

    @lazy
    def variance(self) -> Tensor:
        """Variance of the target y, `[B, C]`, observation noise included; p (1 − p) for each class or label.

        Raises:
            UnsupportedError: The likelihood does not say what a prediction means for the target.
        """
        return self._outputs(self.target.variance(self.rows))

    @property
    def std(self) -> Tensor:
        """Standard deviation of the target y, `[B, C]`: the square root of `variance`.

        Raises:
            UnsupportedError: The likelihood does not say what a prediction means for the target.
        """
        return self.variance.sqrt()

    @lazy
    def entropy(self) -> Tensor:
        """Entropy of the predictive distribution of y, in nats, `[B]`; differential entropy for a real y.

        Raises:
            UnsupportedError: The likelihood does not say what a prediction means for the target.
        """
        return self._inputs(self.target.entropy(self.rows))

    @lazy
    def decomposition(self) -> Decomposition:
        """Aleatoric and epistemic parts of the uncertainty about y, as variances and as entropies.

        `decomposition.mutual_information` is the BALD score of active learning. Regression: exact. Bernoulli: by
        quadrature. Classification: exact for the Dirichlet of `link_approx="bridge"` and `"bridge_norm"`, otherwise
        from samples of f. With `pred_type="nn"`: from the samples. Equal seeds of `generator` give equal results.

        Raises:
            UnsupportedError: The likelihood does not say what a prediction means for the target.
        """
        parts = self.target.decomposition(self.rows)
        return parts.map(lambda part: self._outputs(part) if part.ndim == 2 else self._inputs(part))

    def interval(self, level: float = 0.95, *, observation_noise: bool = True) -> tuple[Tensor, Tensor]:
        """Central credible interval: its lower and upper ends, `[B, C]` each.

        In regression the interval is one for y, or for f without `observation_noise`; in classification it is one for
        the *probability* of each class or label. Quantiles are Gaussian where f is Gaussian (for labels carried through
        the sigmoid), otherwise those of the samples.

        Args:
            level: Probability of the interval, in (0, 1).
            observation_noise: Whether the interval is one for y rather than for f (regression).

        Raises:
            InvalidArgument: `level` is not in (0, 1).
            UnsupportedError: The likelihood does not say what a prediction means for the target.
        """
        if not 0 < level < 1:
            raise InvalidArgument(f"level={level}; it must lie in (0, 1), e.g. 0.95.")
        with autograd_mode(), torch.set_grad_enabled(self.create_graph):
            lower, upper = self.target.interval(self.rows, level, observation_noise=observation_noise)
            return self._outputs(lower), self._outputs(upper)

    def distribution(self, of: Literal["target", "latent", "probabilities"] = "target") -> Distribution:
        """The predictive as an object of `torch.distributions`.

        `"target"`, the distribution of y: `MultivariateNormal` with observation noise for regression (`Normal` with
        `diagonal_output`), `Categorical` for classification, `Bernoulli` for labels.

        `"latent"`, the distribution of f: `MultivariateNormal`, or `Normal` with `diagonal_output`.

        `"probabilities"`: `Dirichlet`, for classification with the links `"bridge"` and `"bridge_norm"`.

        The batch shape is `[B]` (`Normal` and `Bernoulli`: `[B, C]`), or `[B, *tokens or pixels]`; with `joint` it is
        empty, and the event shape `[B·C]`. Where f is sampled, the Gaussians have the moments of the samples. For a
        mixture it is a `MixtureSameFamily` of the components' distributions, except for `Categorical` and `Bernoulli`.

        Args:
            of: `"target"`, `"latent"` or `"probabilities"`.

        Raises:
            InvalidArgument: `of` is another name.
            UnsupportedError: There is no such distribution for this likelihood, link or predictive.
            CurvatureError: The covariance is singular.
        """
        distributions = {
            "target": self.target.distribution,
            "latent": latent_distribution,
            "probabilities": self.target.probability_distribution,
        }
        if of not in distributions:
            raise InvalidArgument(f"of={of!r}; accepted are 'target', 'latent' and 'probabilities'.")
        with autograd_mode(), torch.set_grad_enabled(self.create_graph):
            return distributions[of](self.rows)

    # Shapes.

    def _outputs(self, rows: Tensor, lead: int = 0) -> Tensor:
        """Rows `[*lead, B, C]` in the shape of the network's outputs."""
        return in_users_layout(unrolled(rows, self.rows.positions, lead), self.channel_dim, lead)

    def _inputs(self, rows: Tensor) -> Tensor:
        return unrolled(rows, self.rows.positions)


def latent_distribution(rows: MixedOutputs) -> Distribution:
    """Gaussian of the outputs, or the mixture of those of the components."""
    return mixture_of([normal_of(part.latent) for part in rows.components], rows.weights)


def laid_out(gaussian: Gaussian, channel_dim: int, *, joint: bool = False) -> tuple[Tensor, Tensor]:
    """Mean and covariance of a Gaussian over rows, in the shape of the network's outputs.

    Args:
        gaussian: Over rows.
        channel_dim: Where the network's outputs have their channels.
        joint: Whether it is of all rows together, which the shapes of a single output do not say.

    Returns:
        `[B, *positions, C]` with the channels where the network has them, and variances of that shape or covariances
        `[B, *positions, C, C]`; of a joint Gaussian `[B·C]` and `[B·C, B·C]`, of groups `[B/n, n·C]` and
        `[B/n, n·C, n·C]`.
    """
    if joint:
        covariance = gaussian.shown
        return gaussian.mean.reshape(covariance.shape[:-1]), covariance
    mean, covariance = (unrolled(part, gaussian.positions) for part in (gaussian.mean, gaussian.shown))
    if gaussian.is_diagonal:
        covariance = in_users_layout(covariance, channel_dim)
    return in_users_layout(mean, channel_dim), covariance
