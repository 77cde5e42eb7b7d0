"""The object that `la.predict` returns: it computes what is asked of it, once, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributions import Distribution

from laplace.core.distributions import mixture_of, normal_of
from laplace.core.gaussian import Gaussian
from laplace.core.positions import in_users_layout, unrolled
from laplace.errors import InvalidArgument
from laplace.likelihoods.decomposition import Decomposition
from laplace.likelihoods.target import Target
from laplace.network.model_guard import autograd_mode
from laplace.predictive.posterior_outputs import MixedOutputs, PosteriorOutputs, lazy


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """The predictive distribution at B inputs; every quantity is computed when it is first read, and kept.

    The posterior is that of the call: hyper-parameters that are set afterwards change nothing here. Quantities that
    are drawn start from the same state of the generator, whichever is read first.

    Of a mixture, moments are those of the mixture by the law of total variance; intervals, entropies and distributions
    are of the mixture itself, whose components disagree by what counts as epistemic.

    Of a network with positions, what is `[B, C]` below has the shape of its outputs (`[B, T, C]`, or `[B, C, H, W]`
    with `channel_dim=1`), what is `[B]` has one number per position, and covariances, one per position, come last.
    Of some outputs (`outputs=`) C is their number, and the prediction is that of a network which has no others.

    Attributes:
        rows: Outputs of every row (an input, or a position of one) under each component.
        channel_dim: Where the network's outputs have their channels.
    """

    rows: MixedOutputs
    channel_dim: int = -1

    @classmethod
    def of(cls, outputs: PosteriorOutputs, channel_dim: int = -1) -> Prediction:
        """The prediction of one posterior."""
        return cls(MixedOutputs.of(outputs), channel_dim)

    def __repr__(self) -> str:
        """The options of the prediction; nothing is computed for them."""
        options = self.rows.options
        return f"Prediction(link={options.link!r}, n_samples={options.n_samples}, form={options.form!r})"

    @property
    def create_graph(self) -> bool:
        """True if results can be differentiated, with respect to hyper-parameters or the inputs."""
        return self.rows.create_graph

    @property
    def target(self) -> Target:
        """The target of the likelihood."""
        return self.rows.target

    # Latents.

    @property
    def outputs(self) -> Tensor | None:
        """Indices of the outputs that were asked for, `[B, K]`, the largest first if they were; None for all."""
        chosen = self.rows.outputs
        return None if chosen is None else self._outputs(chosen)

    @property
    def latent(self) -> Gaussian:
        """Gaussian of the network's outputs in the form that was asked for; of positions, one per row."""
        return self.rows.latent

    @property
    def latent_mean(self) -> Tensor:
        """Mean of the network's outputs, `[B, C]`; alone it costs one forward pass (refined: one Jacobian more)."""
        return self._outputs(self.rows.latent_mean)

    @property
    def latent_covariance(self) -> Tensor:
        """Covariance of the outputs: `[B, C, C]`, `[B, C]` (`diagonal_output`) or `[B·C, B·C]` (`joint`).

        With groups of n inputs `[B/n, n·C, n·C]`.
        """
        return laid_out(self.rows.latent, self.channel_dim, joint=self.rows.options.form == "joint")[1]

    @property
    def latent_variance(self) -> Tensor:
        """Variances of the outputs, without observation noise, `[B, C]`."""
        return self._outputs(self.rows.latent_variance)

    @property
    def latent_samples(self) -> Tensor:
        """Samples of the outputs, `[S, B, C]`."""
        return self._outputs(self.rows.latent_samples, 1)

    # Targets.

    @property
    def mean(self) -> Tensor:
        """Mean of the target, `[B, C]`: that of a regression, or probabilities."""
        return self._outputs(self.rows.mean)

    @property
    def sigma_noise(self) -> Tensor:
        """σ at the time of the call, 0-dim or `[C]`."""
        return self.rows.sigma_noise

    @property
    def probabilities(self) -> Tensor:
        """Probabilities of the classes or labels by the link, `[B, C]`.

        Raises:
            UnsupportedError: The target has none (a regression, single rewards).
        """
        self.target.require_probabilities("probabilities", self.rows)
        return self.mean

    @property
    def probability_samples(self) -> Tensor:
        """Samples of the probabilities, `[S, B, C]`: p(y | f) at `latent_samples`.

        Raises:
            UnsupportedError: The target has none.
        """
        self.target.require_probabilities("probability_samples", self.rows)
        return self._outputs(self.rows.mean_samples, 1)

    @lazy
    def variance(self) -> Tensor:
        """Variance of the target, `[B, C]`: with observation noise, or p (1 − p) of an indicator.

        Raises:
            UnsupportedError: The likelihood does not say what a prediction means for the target.
        """
        return self._outputs(self.target.variance(self.rows))

    @lazy
    def entropy(self) -> Tensor:
        """Entropy of the predictive distribution of the target in nats, `[B]`: of `probabilities`, or differential.

        Raises:
            UnsupportedError: The likelihood does not say what a prediction means for the target.
        """
        return self._inputs(self.target.entropy(self.rows))

    @lazy
    def decomposition(self) -> Decomposition:
        """Aleatoric and epistemic parts, in variances and entropies; their `mutual_information` is BALD.

        Regression: exact for the Gaussian of the latents. Bernoulli: by quadrature over it. Classification: of the
        Dirichlet with `link_approx="bridge"` and `"bridge_norm"`, else over samples of the latents. With
        `pred_type="nn"`: over the samples (regression: their Gaussian). What is drawn comes from the `generator` of
        `la.predict`: equal seeds give equal bits.

        Raises:
            UnsupportedError: The likelihood does not say what a prediction means for the target.
        """
        parts = self.target.decomposition(self.rows)
        return parts.map(lambda part: self._outputs(part) if part.ndim == 2 else self._inputs(part))

    def interval(self, level: float = 0.95, *, observation_noise: bool = True) -> tuple[Tensor, Tensor]:
        """Central credible interval of every output, `[B, C]` each: lower and upper ends.

        Of a real target, or of f without `observation_noise`; of the *probability* of a class or label otherwise.
        Gaussian quantiles where the latents are Gaussian (a sigmoid carries them over), else those of the samples.

        Args:
            level: Probability that the interval holds, in (0, 1).
            observation_noise: Of the target y, not of f (regression).

        Raises:
            InvalidArgument: A level that is no probability.
            UnsupportedError: The likelihood does not say what a prediction means for the target.
        """
        if not 0 < level < 1:
            raise InvalidArgument(f"level={level}; it must lie in (0, 1), e.g. 0.95.")
        with autograd_mode(), torch.set_grad_enabled(self.create_graph):
            lower, upper = self.target.interval(self.rows, level, observation_noise=observation_noise)
            return self._outputs(lower), self._outputs(upper)

    def distribution(self, of: Literal["target", "latent", "probabilities"] = "target") -> Distribution:
        """The predictive as a distribution of PyTorch.

        | of | regression | classification | Bernoulli |
        |---|---|---|---|
        | `"target"` | `MultivariateNormal` (`Normal` with `diagonal_output`) with noise | `Categorical` | `Bernoulli` |
        | `"latent"` | `MultivariateNormal` (`Normal`) of f | the same | the same |
        | `"probabilities"` | – | `Dirichlet`, with the bridge links | – |

        Batch shape `[B]` (`Normal` and `Bernoulli`: `[B, C]`; with `joint` none, and events `[B·C]`), with positions
        `[B, *positions]`, wherever the channels of the network are. Of sampled latents the Gaussians are those with
        their moments. Of a mixture a `MixtureSameFamily` of what the components have, where that is no `Categorical` or
        `Bernoulli`; of `Normal`, every output is a mixture of its own.

        Args:
            of: `"target"`, `"latent"` or `"probabilities"`.

        Raises:
            InvalidArgument: Another name.
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
