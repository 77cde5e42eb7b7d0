"""What a decision head knows after `fit`: weights, posterior, left-out predictions, and the stack that predicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from laplace.core import nested
from laplace.core.cached import cached_property
from laplace.core.gaussian import GaussianOutputs
from laplace.core.positions import OutputRows
from laplace.core.precision_policy import wide_dtype, widened
from laplace.core.random_numbers import replayed
from laplace.enums import LinkApprox
from laplace.errors import InvalidData, UnsupportedError
from laplace.gp.heads import FLAT, INTERCEPT, FeatureBasis, Labelled, RidgeHead, SoftmaxHead, ridge_heads, softmax_heads
from laplace.grid import from_names
from laplace.likelihoods import Categorical, get_likelihood
from laplace.likelihoods.base import Likelihood
from laplace.parametric import ParametricLaplace
from laplace.predictive.latent import GaussianSource
from laplace.predictive.options import PredictOptions
from laplace.predictive.prediction import PosteriorOutputs, Prediction
from laplace.tuning.stacked import Stacked

_MOST_ROWS = 5000
"""Data × classes, or weights, up to which `la` has full curvature; above it has Kronecker factors."""


class Standardised(nn.Module):
    """A linear head on features that are standardised and weighed as the prior has them, `[B, D]` → `[B, K]`."""

    def __init__(self, basis: FeatureBasis, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        for name, tensor in vars(basis).items():
            self.register_buffer(name, tensor.clone())
        self.linear = nn.Linear(weight.shape[1], len(weight), dtype=weight.dtype, device=weight.device)
        self.linear.load_state_dict({"weight": weight, "bias": bias})

    def forward(self, features: Tensor) -> Tensor:
        """Logits, or numbers."""
        return self.linear(FeatureBasis(*self.buffers()).weighed(features))  # in the order of its fields


@dataclass(frozen=True, eq=False)
class FittedHead:
    """A head with its posterior.

    Attributes:
        features: Of the data, `[N, D]`, as they were given.
        targets: Indices of the labels `[N]`, or numbers, float64.
        class_weight: A weight for every class; None for 1, and for numbers.
        basis: Coordinates of the features.
        head: At the chosen weight decay.
        stacked: What predicts.
        left_out_mean, left_out_variance: Moments of the outputs of every datum, given all that differ from it,
            `[N, K]`; of numbers in units of `unit`.
        shift, unit: Of numbers: what was subtracted from them, and what they were divided by.
    """

    features: Tensor
    targets: Tensor
    class_weight: tuple[float, ...] | None
    basis: FeatureBasis
    head: SoftmaxHead | RidgeHead
    stacked: Stacked
    left_out_mean: Tensor
    left_out_variance: Tensor
    shift: float = 0.0
    unit: float = 1.0

    @classmethod
    def of_classes(
        cls, features: Tensor, labels: Tensor, n_classes: int, class_weight: Sequence[float] | None = None
    ) -> FittedHead:
        """Weight decay by the left-out log density of the mode, then the stack.

        Inputs that are given twice are one, with the shares of their labels: left out, nothing is left of it.

        Args:
            features: `[N, D]`.
            labels: Indices of classes, `[N]`.
            n_classes: K.
            class_weight: How often data of every class count; None for once.
        """
        weights = None if class_weight is None else tuple(float(weight) for weight in class_weight)
        counts = (
            torch.ones(n_classes, dtype=wide_dtype()) if weights is None else torch.tensor(weights, dtype=wide_dtype())
        )
        counts = counts[labels]
        distinct, data, index, basis = _distinct(features, nn.functional.one_hot(labels, n_classes), counts)
        others = basis.without_each(distinct, data.counts)

        def score(one: SoftmaxHead) -> tuple[Tensor, SoftmaxHead, Tensor, Tensor]:
            left = one.left_out(data, others)
            log_p = left.mean.log_softmax(1)[index, labels]
            return counts @ log_p, one, left.mean[index], left.variance[index]

        best = max((score(one) for one in softmax_heads(data, basis)), key=lambda found: float(found[0]))
        _, head, mean, variance = best
        stacked = Stacked.of_classes(mean, variance, labels, counts)
        return cls(features, labels, weights, basis, head, stacked, mean, variance)

    @classmethod
    def of_numbers(cls, features: Tensor, y: Tensor) -> FittedHead:
        """The same for numbers `[N]`, by the density of left-out targets at the noise that suits them."""
        y = widened(y)
        shift, unit = float(y.mean()), float(y.std(correction=0)) or 1.0
        targets = ((y - shift) / unit).unsqueeze(1)
        _, data, index, basis = _distinct(features, targets, torch.ones_like(y))

        def score(one: RidgeHead) -> tuple[Tensor, RidgeHead, Tensor, Tensor]:
            left = one.left_out(data)
            mean, variance = left.mean[index], left.variance[index]
            return -(targets - mean).square().mean(), one, mean, variance

        heads = ridge_heads(data, targets, index, basis)
        _, head, mean, variance = max((score(one) for one in heads), key=lambda found: float(found[0]))
        stacked = Stacked.of_numbers(mean, variance, head.noise, targets)
        return cls(features, y, None, basis, head, stacked, mean, variance, shift, unit)

    @property
    def is_regression(self) -> bool:
        """True of a head of numbers."""
        return isinstance(self.head, RidgeHead)

    # Predictions.

    def moments(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Means `[B, K]` and covariances `[B, K, K]` of logits less their mean, or of the function `[B, 1]`."""
        mean, covariance = self.head.moments(*self.basis.coordinates(self._checked(features)))
        return mean * self.unit + self.shift, covariance * self.unit**2

    def _checked(self, features: Tensor) -> Tensor:
        n_features = len(self.basis.mean)
        if features.ndim != 2 or features.shape[1] != n_features:
            raise InvalidData(f"features of shape {list(features.shape)}; the head was fitted to [N, {n_features}].")
        return features

    @cached_property
    def _marginals(self) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        return self.head.marginals(self.basis)

    def call(self, features: Tensor) -> Any:
        """Probabilities `[B, K]`, or mean and variance of a number, `[B, 1]` each."""
        mean, variance = self._marginals(self._checked(features))
        if not self.is_regression:
            return self.stacked.probabilities(mean, variance)
        mean, variance = mean * self.unit + self.shift, variance * self.unit**2
        weights = self.stacked.weights.view(-1, 1, 1)
        return mean, (weights * self.stacked.variances(variance, self._noise)).sum(0)

    def predict(self, features: Tensor, n_samples: int = 100, generator: Generator | None = None) -> Prediction:
        """The mixture as a `Prediction`; samples are drawn where they are read."""
        outputs, stacked = _Outputs(self, features), self.stacked
        options = PredictOptions(n_samples=n_samples, generator=generator, link_approx=LinkApprox.PROBIT)
        options.kind()
        draws = replayed(generator, features.device)
        likelihood = _likelihood(self.is_regression, None)
        noise = self._noise if self.is_regression else torch.ones_like(stacked.weights[0])
        parts = [
            PosteriorOutputs(
                _Tempered(outputs, 1.0, c) if self.is_regression else _Tempered(outputs, t, c),
                likelihood, t * noise.sqrt(), options, draws,
            )
            for t, c in zip(stacked.temperatures.tolist(), stacked.scales.tolist(), strict=True)
        ]  # fmt: skip

        def of_samples() -> Tensor:
            return torch.multinomial(stacked.weights, n_samples, replacement=True, generator=draws())

        return Prediction(tuple(parts), stacked.weights, drawn_components=of_samples)

    @property
    def _noise(self) -> Tensor:
        """σ² of numbers in their own units."""
        if isinstance(self.head, SoftmaxHead):
            raise UnsupportedError("classes have no noise.")
        return self.head.noise * self.unit**2

    def left_out_probabilities(self) -> Tensor:
        """Of every datum by the stack without it, `[N, K]`."""
        return self.stacked.probabilities(self.left_out_mean, self.left_out_variance)

    # The posterior for everything else.

    @cached_property
    def la(self) -> ParametricLaplace:
        """The same posterior as a Laplace object over the head's weights; its inputs are features `[B, D]`."""
        weight, bias = self.basis.weights(self.head.at)
        n_classes, prior = len(weight), weight.new_tensor([self.head.decay, FLAT if self.is_regression else INTERCEPT])
        options: dict[str, Any] = {"prior_precision": prior}
        if self.is_regression:
            weight, bias, noise = weight * self.unit, bias * self.unit + self.shift, self._noise
            mean = torch.zeros(weight.numel() + 1, dtype=weight.dtype)
            mean[-1] = self.shift
            options = {"prior_precision": prior / noise, "prior_mean": mean, "sigma_noise": noise.sqrt()}
        rows = min(len(self.features) * n_classes, weight.numel())
        structure = "full" if rows <= _MOST_ROWS else "kron"
        la = from_names(
            Standardised(self.basis, weight, bias), _likelihood(self.is_regression, self.class_weight), "all",
            structure, **options,
        )  # fmt: skip
        targets = self.targets.unsqueeze(1) if self.is_regression else self.targets
        la.fit([(widened(self.features), targets)])
        return la

    # States.

    def state(self) -> dict[str, Any]:
        """Tensors and numbers, from which it is made again."""
        return nested.state_of(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> FittedHead:
        """The head of a state."""
        kind = SoftmaxHead if "inverse" in state["head"] else RidgeHead
        basis = dict(state["basis"])
        if "gains" not in basis:  # saved when the prior was the same in all directions
            vectors = basis["vectors"]
            basis |= {"gains": vectors.new_ones(vectors.shape[1]), "rest": vectors.new_ones(())}
        return nested.from_state(cls, {**state, "head": nested.from_state(kind, state["head"], "head"), "basis": basis})


def _likelihood(is_regression: bool, class_weight: tuple[float, ...] | None) -> Likelihood:
    if is_regression:
        return get_likelihood("regression")
    return Categorical(class_weight=class_weight)


def _distinct(features: Tensor, targets: Tensor, counts: Tensor) -> tuple[Tensor, Labelled, Tensor, FeatureBasis]:
    """Features that differ; with the mean targets of each; the row of every datum among them, `[N]`; and a basis."""
    distinct, index = torch.unique(features, dim=0, return_inverse=True)
    total = counts.new_zeros(len(distinct)).index_add_(0, index, counts)
    sums = counts.new_zeros(len(distinct), targets.shape[1])
    sums.index_add_(0, index, counts.unsqueeze(1) * targets)
    counted = total > 0
    total = torch.where(counted, total, torch.finfo(total.dtype).tiny)  # a class that counts nothing
    basis = FeatureBasis.from_features(distinct, total)
    return distinct, Labelled(basis.coordinates(distinct)[0], sums / total.unsqueeze(1), total), index, basis


# The stack as components of one prediction.


class _Outputs:
    """Moments at some features, computed when they are first read."""

    def __init__(self, head: FittedHead, features: Tensor) -> None:
        self._head, self._features = head, features

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        return self._head.moments(self._features)


@dataclass(frozen=True, eq=False)
class _Tempered(GaussianSource):
    """Logits divided by a temperature, with a scaled covariance."""

    outputs: _Outputs
    temperature: float
    scale: float
    create_graph: bool = False

    def mean(self) -> OutputRows:
        return OutputRows(self.outputs.moments[0] / self.temperature, (), None)

    def gaussian(self, form: str, *, wide: bool = False) -> GaussianOutputs:
        mean, covariance = self.outputs.moments
        gaussian = GaussianOutputs(mean / self.temperature, covariance * (self.scale / self.temperature**2))
        if form in ("diagonal", "centred"):  # logits are less their mean already
            return replace(gaussian, covariance=gaussian.variance)
        return gaussian
