"""Everything that a mixture's prediction can be asked for: from what its components say, computed when it is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Normal

from laplace.core.gaussian import Gaussian
from laplace.core.positions import unrolled
from laplace.network.model_guard import own_mode
from laplace.predictive.decomposition import Decomposition, entropy_of
from laplace.predictive.distributions import mixture_of, normal_of
from laplace.predictive.latent import with_noise
from laplace.predictive.lazy import lazy
from laplace.predictive.mixing import average, mixed_moments, quantile
from laplace.predictive.quantities import PredictionOptions, Quantities, checked_level

Choice = Callable[[], Tensor]
"""The component of every sample, `[S]`; the same at every call."""


@dataclass(frozen=True, eq=False)
class MixedQuantities:
    """The mixture Σ_k π_k p_k of predictive distributions at B rows (Eschenhagen et al., 2021, equation 9).

    What a single posterior offers (`Quantities`) means the same here. Moments are those of the mixture, by the law of
    total variance, and so is `latent`; quantiles, entropies and densities are those of the mixture itself, not of a
    Gaussian with its moments.

    Attributes:
        components: What each of them says, of the same options and likelihood.
        weights: π, `[K]`.
        choice: Which component each sample is of.
    """

    components: tuple[Quantities, ...]
    weights: Tensor
    choice: Choice

    @property
    def options(self) -> PredictionOptions:
        """Of all components."""
        return self.components[0].options

    @property
    def create_graph(self) -> bool:
        """Whether results can be differentiated with respect to the inputs."""
        return any(part.create_graph for part in self.components)

    @property
    def positions(self) -> tuple[int, ...]:
        """The dimensions of the positions, empty for outputs `[B, C]`."""
        return self.components[0].positions

    @property
    def sampled(self) -> bool:
        """Whether the latents of a component are known by samples alone."""
        return any(part.sampled for part in self.components)

    @lazy
    def sigma_noise(self) -> Tensor:
        """√Σ_k π_k σ_k², 0-dim or `[C]`: σ, where the components have one in common."""
        return self._average([part.sigma_noise.square() for part in self.components]).sqrt()

    # Latents.

    @lazy
    def latent_mean(self) -> Tensor:
        """`[B, C]`."""
        return self._average([part.latent_mean for part in self.components])

    @lazy
    def latent(self) -> Gaussian:
        """The Gaussian with the mixture's moments."""
        return self._with_moments([part.latent for part in self.components])

    @property
    def latent_covariance(self) -> Tensor:
        """Of the mixture, in the form that was asked for."""
        return self.latent.shown

    @lazy
    def latent_variance(self) -> Tensor:
        """`[B, C]`."""
        means = [part.latent_mean for part in self.components]
        variances = [part.latent_variance for part in self.components]
        return self._moments(means, variances)[1]

    @lazy
    def latent_samples(self) -> Tensor:
        """`[S, B, C]`, each of a component by its weight."""
        return self._chosen([part.latent_samples for part in self.components])

    # Targets.

    @lazy
    def mean(self) -> Tensor:
        """Mean of the target, `[B, C]`."""
        return self._average([part.mean for part in self.components])

    @property
    def probabilities(self) -> Tensor:
        """Σ_k π_k p_k, `[B, C]`."""
        self.require("probabilities", "class", "binary")
        return self.mean

    @lazy
    def probability_samples(self) -> Tensor:
        """`[S, B, C]`, each of a component by its weight."""
        return self._chosen([part.probability_samples for part in self.components])

    @lazy
    def variance(self) -> Tensor:
        """Variance of the target, `[B, C]`."""
        kind = self.require("variance", "real", "class", "binary")
        if kind == "real":
            return self.latent_variance + self.sigma_noise.square()
        return self.mean * (1 - self.mean)

    @lazy
    def entropy(self) -> Tensor:
        """`[B]`; differential entropies of mixtures are Monte-Carlo estimates, of `n_samples` per component."""
        kind = self.require("entropy", "real", "class", "binary")
        return self._differential_entropy if kind == "real" else entropy_of(self.mean, kind)

    @lazy
    def decomposition(self) -> Decomposition:
        """Parts within the components, and what they disagree by, which is epistemic.

        E[Var(y | f)] = Σ_k π_k E_k[Var(y | f)],  Var(E[y | f]) = Σ_k π_k (Var_k(E[y | f]) + (m_k − m)²).
        """
        kind = self.require("decomposition", "real", "class", "binary")
        found = [part.decomposition for part in self.components]
        mean, epistemic = self._moments([part.mean for part in found], [part.epistemic for part in found])
        return Decomposition(
            self._average([part.aleatoric for part in found]),
            epistemic,
            self._differential_entropy if kind == "real" else entropy_of(mean, kind),
            self._average([part.expected_entropy for part in found]),
            mean,
        )

    @lazy
    def _differential_entropy(self) -> Tensor:
        """−Σ_k π_k E_k[log Σ_l π_l N(y; m_l, V_l)] over noisy targets, `[B]`; in closed form of one component."""
        if len(self.components) == 1:
            return self.components[0].decomposition.predictive_entropy
        noisy = [with_noise(part.of_each, part.sigma_noise) for part in self.components]
        density = mixture_of([_of_rows(gaussian) for gaussian in noisy], self.weights)
        n = self.options.n_samples
        draws = [gaussian.sample(n, part.draws()) for gaussian, part in zip(noisy, self.components, strict=True)]
        return self._average([-density.log_prob(draw.to(draws[0])).mean(0) for draw in draws])

    def interval(self, level: float = 0.95, *, observation_noise: bool = True) -> tuple[Tensor, Tensor]:
        """Lower and upper ends `[B, C]`: quantiles of the mixture; see `Prediction.interval`."""
        checked_level(level)
        kind = self.require("interval", "real", "class", "binary")
        ends = (0.5 - 0.5 * level, 0.5 + 0.5 * level)
        with own_mode(), torch.set_grad_enabled(self.create_graph):
            if kind == "class" or self.sampled:
                values = self._target_samples(observation_noise) if kind == "real" else self.probability_samples
                lower, upper = torch.quantile(values, values.new_tensor(ends), dim=0).unbind(0)
                return lower, upper
            noisy = kind == "real" and observation_noise
            means = self._together([part.latent_mean for part in self.components])
            variances = self._together([part.variance if noisy else part.latent_variance for part in self.components])
            lower, upper = (quantile(means, variances, self.weights, end) for end in ends)
            link = self.components[0].likelihood.inverse_link
            return (lower, upper) if kind == "real" else (link(lower), link(upper))

    def _target_samples(self, observation_noise: bool) -> Tensor:
        return self._chosen([part.target_samples(observation_noise) for part in self.components])

    def distribution(self, of: str = "target") -> Distribution:
        """Mixtures (`MixtureSameFamily`) of what the components have; of labels `Categorical` and `Bernoulli`.

        See `Prediction.distribution`.
        """
        if of == "target":
            kind = self.require("distribution", "real", "class", "binary")
            if kind != "real":
                probabilities = unrolled(self.mean, self.positions)
                if kind == "class":
                    return Categorical(probs=probabilities)
                return Bernoulli(probs=probabilities.clamp(0, 1))
        return mixture_of([part.distribution(of) for part in self.components], self.weights)

    def require(self, what: str, *kinds: str) -> str:
        """The kind of target, if it is one of these.

        Raises:
            UnsupportedError: It is not.
        """
        return self.components[0].require(what, *kinds)

    # Mixing.

    def _average(self, values: Sequence[Tensor]) -> Tensor:
        return average(values, self.weights)

    def _moments(self, means: Sequence[Tensor], variances: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and (co)variance of the mixture, in the components' shapes."""
        return mixed_moments(list(zip(means, variances, strict=True)), self.weights)

    def _with_moments(self, gaussians: Sequence[Gaussian]) -> Gaussian:
        joint = self.options.form == "joint"
        means = [gaussian.mean.flatten() if joint else gaussian.mean for gaussian in gaussians]
        mean, covariance = self._moments(means, [gaussian.covariance for gaussian in gaussians])
        return replace(gaussians[0], mean=mean.view_as(gaussians[0].mean), covariance=covariance)

    def _together(self, values: Sequence[Tensor]) -> Tensor:
        """Of all components, `[K, …]`, on the device of the first."""
        return torch.stack([value.to(values[0]) for value in values])

    def _chosen(self, samples: Sequence[Tensor]) -> Tensor:
        """Samples `[S, …]`: the s-th one of the component that was chosen for it."""
        stacked = self._together(samples)
        return stacked[self.choice().to(stacked.device), torch.arange(stacked.shape[1], device=stacked.device)]


def _of_rows(gaussian: Gaussian) -> Distribution:
    """Over the C outputs of each of B rows."""
    found = normal_of(replace(gaussian, positions=()))
    return Independent(found, 1) if isinstance(found, Normal) else found
