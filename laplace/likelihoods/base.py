"""Likelihoods: loss, output Hessian, samples of targets, normaliser, link.

Everything here refers to one network output per datum, the latent `f`, `[B, C]`. The *unit*
negative log likelihood is the one at noise 1 and temperature 1 without its normaliser:
cross-entropy, or half the squared error. Noise and temperature enter by `curvature_scale`
and `log_likelihood`, so that a fitted curvature outlives a change of either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.distributions import Distribution

from laplace.core.precision_policy import widened
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.likelihoods.checks import for_each
from laplace.likelihoods.links import LINKS
from laplace.likelihoods.output_hessian import OutputHessian
from laplace.likelihoods.targets import TARGETS, Target, mean_of


class Likelihood(ABC):
    """Base of all likelihoods p(y | f): how the network's outputs f give a distribution over targets y.

    The names `"regression"`, `"classification"`, … stand for objects of such classes. For one of your own, derive from
    `LikelihoodFromLoss`. The unit negative log likelihood, below, is −log p(y | f) at σ = T = 1 without constants, i.e.
    the usual loss: cross-entropy, or half the squared error.

    Attributes:
        name: Name of the likelihood, for messages and saved states.
        target: Computes variance, entropy, intervals, distributions and scores of y from a prediction of f. By default
            from samples; `laplace.likelihoods.targets` has others. A class may set `target_kind` instead, to
            `"class"`, `"binary"`, `"real"` or `"other"`.
        has_noise: True if `sigma_noise` is a parameter of this likelihood.
        links: Names of the link approximations that `predict` accepts, out of `laplace.likelihoods.links.LINKS`; empty
            if E[y] needs none.
        latent_prediction: True if `la(x)` returns mean and variance of f.
        moment_prediction: True if `la(x)` returns E[y] and Var[y].
        ignore_index: Label of data to be ignored, or None.
        numeric_targets: True if targets are numbers in columns, `[B, n]`; where batches are mappings, a single column
            may then be given as `[B]`.
        class_targets: True if targets are class labels: indices `[B]` or probabilities `[B, C]`.
        independent_outputs: True if loss and inverse link act on each output separately.
        some_outputs: True if any K of the outputs have a likelihood of the same form, so that predictions can be asked
            for some of them (`outputs=`).
        sums_to_zero: True if the rows of the output Hessian sum to zero; an exact GGN then takes C − 1 backward passes.
        activation: `"softmax"` or `"sigmoid"`, if the likelihood applies it to the outputs; networks that have applied
            it already are then refused.
    """

    name: str
    target: Target = TARGETS["other"]
    has_noise: bool = False
    latent_prediction: bool = False
    moment_prediction: bool = False
    ignore_index: int | None = None
    numeric_targets: bool = False
    class_targets: bool = False
    independent_outputs: bool = False
    some_outputs: bool = False
    sums_to_zero: bool = False
    activation: str | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        kind = vars(cls).get("target_kind")
        if isinstance(kind, str):
            cls.target = TARGETS[kind]

    @property
    def target_kind(self) -> str:
        """Name of the kind of target, such as `"class"`, `"binary"` or `"real"`."""
        return self.target.kind

    @property
    def links(self) -> tuple[str, ...]:
        """Names of the link approximations that `predict` accepts."""
        return ()

    @abstractmethod
    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Checks targets, and returns them in the form that the other methods take.

        Args:
            f: Outputs `[B, C]`.
            y: Targets as the loader gives them.

        Raises:
            InvalidData: Wrong shape, labels out of range, NaN or infinite values.
        """

    @abstractmethod
    def loss_terms(self, f: Tensor, y: Tensor) -> Tensor:
        """Unit negative log likelihood summed over the batch: `[C]` with one noise per output, else `[1]`."""

    @abstractmethod
    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Gradient of the unit negative log likelihood of each datum with respect to f, `[B, C]`."""

    @abstractmethod
    def hessian(self, f: Tensor, y: Tensor | None = None) -> OutputHessian:
        """Hessian of the unit negative log likelihood of each datum with respect to f; zero for ignored labels."""

    @abstractmethod
    def sample_gradients(
        self, f: Tensor, y: Tensor | None, n_samples: int, generator: Generator | None = None
    ) -> Tensor:
        """Gradients at targets drawn from p(y | f), `[S, B, C]`, with E[g gᵀ] = Λ (Monte-Carlo Fisher)."""

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Unit negative log likelihood summed over the batch, 0-dim, differentiable in f."""
        return self.loss_terms(f, y).sum()

    @property
    def peer_name(self) -> Likelihood | str:
        """The likelihood as it is passed to backends of your own: its name, if they know it, or this object."""
        return self

    def torch_loss(self) -> tuple[nn.Module, float]:
        """PyTorch's loss module with `reduction="sum"`, and its factor to the unit negative log likelihood.

        Raises:
            UnsupportedError: There is none.
        """
        raise UnsupportedError(
            f"likelihood={self.name!r} has no loss module of PyTorch, which this backend reads; use the default "
            "backend, NativeGGN."
        )

    def as_targets(self, values: Tensor) -> Tensor:
        """Computed values `[B, C]`, such as means of y, as valid targets: rounding errors are removed."""
        return values

    @property
    def weighs_targets(self) -> bool:
        """True if data are weighted by their targets, e.g. by class weights: see `weights`."""
        return False

    def weights(self, y: Tensor) -> Tensor | None:
        """Weight of every datum given its checked target, `[B]`; None if all weights are 1.

        Loss, gradient and Hessian are multiplied by it, gradients at sampled targets by its square root.
        """
        del y
        return None

    def count(self, f: Tensor, y: Tensor) -> int | Tensor:
        """Number of data without ignored labels, or the sum of their weights; a 0-dim tensor if it is on a device."""
        weights = self.weights(y)
        if weights is not None:
            return widened(weights).sum()
        return f.shape[0] if self.ignore_index is None or y.ndim > 1 else (y != self.ignore_index).sum()

    def observations(self, f: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor | None:
        """Numbers of observed targets per output, `[C]`, of a likelihood whose normaliser needs them; else None.

        Args:
            f: Outputs `[B, C]`.
            y: Checked targets.
            weights: How often every row counts, `[B, 1]`, or every entry, `[B, C]`; None for once.
        """
        return None

    @abstractmethod
    def log_likelihood(
        self, loss_terms: Tensor, n_data: float | Tensor, n_outputs: int, sigma_noise: Tensor, temperature: Tensor
    ) -> Tensor:
        """Log likelihood of the data at a noise and temperature, 0-dim, from the fitted sums of `loss_terms`.

        `n_data` is `[C]` where `observations` differ between outputs.
        """

    def mean_squares(self, loss_terms: Tensor, n_data: float | Tensor, n_outputs: int) -> Tensor | None:
        """Mean squares of the residuals that a noise is the spread of, `[C]` or `[1]`; None without such a noise."""
        return None

    @abstractmethod
    def curvature_scale(self, kind: str, sigma_noise: Tensor, temperature: Tensor) -> Tensor:
        """Factor s of the curvature H in the posterior precision s H + δ, 0-dim or `[C]`.

        Args:
            kind: `"ggn"`, `"hessian"` (1/(σ²T)) or `"ef"` (1/(σ⁴T): an outer product of gradients).
            sigma_noise: 0-dim or `[C]`.
            temperature: 0-dim.

        Raises:
            InvalidArgument: Unknown kind.
            UnsupportedError: No factor exists (an outer product of gradients with one noise per output).
        """

    @abstractmethod
    def inverse_link(self, f: Tensor) -> Tensor:
        """Mean of the target given outputs f `[..., C]` (softmax, sigmoid, identity), same shape."""

    @abstractmethod
    def predict(
        self, mean: Tensor, covariance: Tensor, link: str, n_samples: int = 100, generator: Generator | None = None
    ) -> Tensor:
        """Mean of the target under f ~ N(mean, covariance), `[B, C]`.

        Args:
            mean: `[B, C]`.
            covariance: `[B, C, C]` or, for a diagonal one, `[B, C]`.
            link: Link approximation, one of `links`.
            n_samples: Number of samples with `link="mc"`.
            generator: Random generator with `link="mc"`.

        Raises:
            UnsupportedError: This likelihood has no such link.
        """

    def conditional(self, f: Tensor) -> Distribution:
        """p(y | f) as a distribution of PyTorch with batch shape `[...]` and events `[C]`, for outputs `[..., C]`.

        Raises:
            UnsupportedError: The class does not define it.
        """
        raise UnsupportedError(
            f"likelihood={self.name!r} does not say how y is distributed given f, from which samples, variances and "
            "entropies follow: define conditional(f) in its class, a torch.distributions.Distribution with events [C] "
            "for outputs f [..., C], e.g. Independent(Poisson(f.exp()), 1)."
        )

    @abstractmethod
    def predictive_nll(self, prediction: Tensor, variance: Tensor | None, y: Tensor, sigma_noise: Tensor) -> Tensor:
        """Negative log predictive density of each datum, in nats, `[B]`: what tuning minimises on validation data.

        Args:
            prediction: Mean of the target, `[B, C]`.
            variance: Variance of f, `[B, C]`, for likelihoods with noise (σ² is added here), else None.
            y: Checked targets. Ignored labels give NaN, to be left out of the mean.
            sigma_noise: 0-dim or `[C]`.
        """


class NoiseFreeLikelihood(Likelihood):
    """Base of likelihoods without observation noise: `sigma_noise` is not used.

    Attributes:
        response: `"softmax"` or `"sigmoid"`, if `inverse_link` is that function; it decides which link approximations
            are available. None for any other.
    """

    response: str | None = None

    @property
    def links(self) -> tuple[str, ...]:
        """Names of the link approximations for this inverse link."""
        return tuple(name for name, link in LINKS.items() if link.serves(self.response))

    def predict(
        self, mean: Tensor, covariance: Tensor, link: str, n_samples: int = 100, generator: Generator | None = None
    ) -> Tensor:
        """Mean of the target by an entry of `LINKS`, `[B, C]`.

        Raises:
            UnsupportedError: The link is not in `links`.
        """
        if link not in self.links:
            accepted = ", ".join(repr(str(name)) for name in self.links)
            raise UnsupportedError(
                f"link_approx={str(link)!r} has no meaning for likelihood={self.name!r}; accepted are {accepted}."
            )
        apply, _ = LINKS[link].serving(independent=self.independent_outputs)
        return apply(mean, covariance, self.inverse_link, n_samples, generator)

    def log_likelihood(
        self, loss_terms: Tensor, n_data: float | Tensor, n_outputs: int, sigma_noise: Tensor, temperature: Tensor
    ) -> Tensor:
        """−loss / T, 0-dim."""
        return -loss_terms.sum() / temperature

    def curvature_scale(self, kind: str, sigma_noise: Tensor, temperature: Tensor) -> Tensor:
        """1/T for every kind, 0-dim."""
        check_kind(kind)
        return temperature.reciprocal()


def check_kind(kind: str) -> None:
    """Refuses names that are no curvature kind."""
    if kind not in ("ggn", "hessian", "ef"):
        raise InvalidArgument(f"kind={kind!r} is unknown; accepted are 'ggn', 'hessian', 'ef'.")


class MomentLikelihood(NoiseFreeLikelihood):
    """A likelihood whose target is a `MomentTarget`: `la(x)` is (E[y], Var(y)), whatever the link."""

    moment_prediction = True
    numeric_targets = True

    @property
    def links(self) -> tuple[str, ...]:
        """None: moments need no link."""
        return ()

    def predict(
        self, mean: Tensor, covariance: Tensor, link: str, n_samples: int = 100, generator: Generator | None = None
    ) -> Tensor:
        """E[y], `[B, C]`, whatever the link."""
        return mean_of(self.target.summary(self, mean, covariance, link, n_samples, generator))


# Targets with the number of times that each of them counts: Π_b p(y_b | f_b)^{w_b}.


@dataclass(frozen=True, eq=False)
class Observed:
    """Checked targets of B rows under a likelihood; whole weights are those of rows that are repeated.

    Attributes:
        likelihood: p(y | f), which may weigh targets itself.
        y: Checked targets.
        data_weights: How often every row counts besides, `[B]`, or every entry, `[B, C]`; None for once.
    """

    likelihood: Likelihood
    y: Tensor
    data_weights: Tensor | None = None

    @property
    def weights(self) -> Tensor | None:
        """Number of times that every row counts, `[B]`, float64; None if all that count do so once."""
        own, given = self.likelihood.weights(self.y), self.data_weights
        if given is None:
            return None if own is None else widened(own)
        given = given.amax(1) if given.ndim > 1 else given  # an input is there for every entry
        return widened(given) if own is None else widened(own) * given

    def select(self, rows: Tensor | None) -> Observed:
        """The targets of some rows, indices `[n]`; None for all."""
        if rows is None:
            return self
        own = self.data_weights
        return replace(self, y=self.y[rows], data_weights=None if own is None else own[rows])

    def loss_terms(self, f: Tensor) -> Tensor:
        """Σ_b w_b ℓ_b of outputs `[B, C]`, as `Likelihood.loss_terms`, `[1]` or `[C]`."""
        if self.data_weights is None:
            return self.likelihood.loss_terms(f, self.y)
        if self.data_weights.ndim > 1:
            return self._losses_of_entries(f)
        each = for_each(lambda f, y: self.likelihood.loss_terms(f.unsqueeze(0), y.unsqueeze(0)), f, self.y)
        return self.data_weights.to(each) @ each

    def _losses_of_entries(self, f: Tensor) -> Tensor:
        """Σ_bc w_bc ℓ_bc, as `Likelihood.loss_terms`: those of every output by itself, of independent outputs."""
        weights, (n_rows, n_outputs) = self.data_weights, f.shape
        rows = f.reshape(-1, 1), self.y.reshape(-1, 1)
        each = for_each(lambda f, y: self.likelihood.loss_terms(f.unsqueeze(0), y.unsqueeze(0)), *rows)
        terms = (each.view(n_rows, n_outputs) * weights.to(each)).sum(0)  # pyright: ignore[reportOptionalMemberAccess]
        return terms if self.likelihood.has_noise else terms.sum().unsqueeze(0)

    def observations(self, f: Tensor) -> Tensor | None:
        """Σ_b w_bc of the entries that were observed, `[C]`; None where no normaliser needs them."""
        weights = self.data_weights
        weights = weights.unsqueeze(1) if weights is not None and weights.ndim == 1 else weights
        return self.likelihood.observations(f, self.y, weights)

    def count(self, f: Tensor) -> int | Tensor:
        """Σ_b w_b of the rows that are not ignored; 0-dim where a device knows it."""
        if self.data_weights is None:
            return self.likelihood.count(f, self.y)
        ignored = self.likelihood.ignore_index
        weights = widened(self.data_weights) if (both := self.weights) is None else both
        if ignored is None or self.y.ndim > 1 or self.y.is_floating_point():
            return weights.sum()
        return torch.where(self.y == ignored, 0.0, weights).sum()

    def hessian(self, f: Tensor) -> OutputHessian:
        """w_b Λ_b."""
        hessian, weights = self.likelihood.hessian(f, self.y), self.data_weights
        if weights is not None and weights.ndim > 1:
            return replace(hessian, diag=hessian.diag * weights.to(hessian.diag))
        return hessian.scaled(weights)

    def gradients(self, f: Tensor) -> Tensor:
        """Rows √w_b g_b, `[B, C]`, g_b the gradient of a target that counts once, with Σ w g gᵀ: of repeated data.

        The gradient of the weighted loss is w_b g_b, whose outer product would weigh a target by the square.
        """
        gradients, own = self.likelihood.gradient(f, self.y), self.likelihood.weights(self.y)
        if own is not None:
            root = own.to(f).sqrt()
            gradients = gradients * torch.where(root > 0, 1 / root, 0.0).unsqueeze(1)
        return self._rooted(gradients)

    def sample_gradients(self, f: Tensor, n_samples: int, generator: Generator | None) -> Tensor:
        """√w_b times gradients at targets drawn from p(y | f), `[S, B, C]`; the weight is that of what was observed."""
        return self._rooted(self.likelihood.sample_gradients(f, self.y, n_samples, generator))

    def _rooted(self, rows: Tensor) -> Tensor:
        """Rows `[..., B, C]` times √w of the data."""
        if self.data_weights is None:
            return rows
        root = self.data_weights.to(rows).sqrt()
        return (root if root.ndim > 1 else root.unsqueeze(1)) * rows
