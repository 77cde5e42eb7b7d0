"""Likelihoods: loss, output Hessian, samples of targets, normaliser, link.

Everything here refers to one network output per datum, the latent `f`, `[B, C]`. The *unit*
negative log likelihood is the one at noise 1 and temperature 1 without its normaliser:
cross-entropy, or half the squared error. Noise and temperature enter by `curvature_scale`
and `log_likelihood`, so that a fitted curvature outlives a change of either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from laplace.core.precision_policy import widened
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.likelihoods.links import LINKS
from laplace.likelihoods.output_hessian import OutputHessian
from laplace.likelihoods.target import Target
from laplace.likelihoods.targets import TARGETS


class Likelihood(ABC):
    """p(y | f), behind the names `"regression"`, `"classification"`, … and open to users' own objects.

    Attributes:
        name: The string users write.
        target: What predictions say of y: its variance, entropy, intervals, distributions and scores; by samples
            unless the class has one of `laplace.likelihoods.targets`, or one of its own. A class that writes
            `target_kind`, `"class"`, `"binary"`, `"real"` or `"other"`, has the target of that name.
        has_noise: True if `sigma_noise` is a parameter of this likelihood.
        links: Link approximations that `predict` accepts, names in `laplace.likelihoods.links.LINKS`; empty if E[y]
            needs none.
        latent_prediction: True if `la(x)` is the latent Gaussian itself, (mean, variance).
        moment_prediction: True if `la(x)` is (E[y], Var[y]).
        ignore_index: Label that marks data which count nowhere, or None.
        numeric_targets: True if targets are numbers in columns, `[B, n]`: batches that are mappings may give a single
            column as `[B]`.
        class_targets: True if targets are labels of classes, indices `[B]` or probabilities `[B, C]`.
        independent_outputs: True if loss and inverse link act on every output alone.
        some_outputs: True if any K outputs alone have a likelihood of this form, so that predictions can be asked for
            some (`outputs=`): outputs act alone, or are classes, of which y is then one of K.
        sums_to_zero: True if rows of the output Hessian do, so that an exact GGN takes C − 1 backward passes.
        activation: `"softmax"` or `"sigmoid"` for a likelihood that takes it of the outputs, so that outputs of which
            the network has taken it already are refused.
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
        """Name of the kind of target."""
        return self.target.kind

    @property
    def links(self) -> tuple[str, ...]:
        """Names in `LINKS`."""
        return ()

    @abstractmethod
    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Validates and returns targets in the form the other methods take.

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
        """Hessian (= Fisher, for the exponential families here) with respect to f; ignored labels in y count zero."""

    @abstractmethod
    def sample_gradients(
        self, f: Tensor, y: Tensor | None, n_samples: int, generator: torch.Generator | None = None
    ) -> Tensor:
        """Gradients at targets drawn from p(y | f), `[S, B, C]`, with E[g gᵀ] = Λ (Monte-Carlo Fisher)."""

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Unit negative log likelihood summed over the batch, 0-dim, differentiable in f."""
        return self.loss_terms(f, y).sum()

    @property
    def peer_name(self) -> Likelihood | str:
        """The likelihood as a user's own backend takes it: a name that it knows, or the object itself."""
        return self

    def torch_loss(self) -> tuple[nn.Module, float]:
        """PyTorch's summed loss module, and the factor that makes it the unit negative log likelihood.

        Raises:
            UnsupportedError: There is none.
        """
        raise UnsupportedError(
            f"likelihood={self.name!r} has no loss module of PyTorch, which this backend reads; use the default "
            "backend, NativeGGN."
        )

    def as_targets(self, values: Tensor) -> Tensor:
        """Values `[B, C]` that were computed, with their rounding, as targets of the form that loaders give."""
        return values

    @property
    def weighs_targets(self) -> bool:
        """True if data count by what their targets are, see `weights`."""
        return False

    def weights(self, y: Tensor) -> Tensor | None:
        """Number of times that every datum counts by its checked target, `[B]`; None where all count once.

        Loss, gradient and Hessian are of data that count so often; gradients at targets that are drawn have the root.
        """
        del y
        return None

    def count(self, f: Tensor, y: Tensor) -> int | Tensor:
        """Number of data that count (ignored labels do not), a 0-dim tensor where a device knows it; y is checked."""
        weights = self.weights(y)
        if weights is not None:
            return widened(weights).sum()
        return f.shape[0] if self.ignore_index is None or y.ndim > 1 else (y != self.ignore_index).sum()

    @abstractmethod
    def log_likelihood(
        self, loss_terms: Tensor, n_data: float, n_outputs: int, sigma_noise: Tensor, temperature: Tensor
    ) -> Tensor:
        """Log likelihood of the data at a noise and temperature, 0-dim, from the fitted sums of `loss_terms`."""

    @abstractmethod
    def curvature_scale(self, kind: str, sigma_noise: Tensor, temperature: Tensor) -> Tensor:
        """Factor between the unit curvature and its share of the precision, 0-dim or `[C]`.

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
        """Mean of the target given latents `[..., C]` (softmax, sigmoid, identity), same shape."""

    @abstractmethod
    def predict(
        self,
        mean: Tensor,
        covariance: Tensor,
        link: str,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Mean of the target under f ~ N(mean, covariance), `[B, C]`.

        Args:
            mean: `[B, C]`.
            covariance: `[B, C, C]` or, for a diagonal one, `[B, C]`.
            link: One of `links`.
            n_samples: Samples of `link="mc"`.
            generator: Source of randomness of `link="mc"`.

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
        """Negative log predictive density of each datum, `[B]`: what tuning minimises on validation data.

        Args:
            prediction: Mean of the target, `[B, C]`.
            variance: Latent variance `[B, C]` for likelihoods with noise (σ² is added here), else None.
            y: Checked targets (ignored labels give NaN, to be left out of the mean).
            sigma_noise: 0-dim or `[C]`.
        """


class NoiseFreeLikelihood(Likelihood):
    """A likelihood without a noise parameter: temperature alone scales it, `sigma_noise` is not read.

    Attributes:
        response: `"softmax"` or `"sigmoid"` where `inverse_link` is that function, for which links are made; None for
            any other.
    """

    response: str | None = None

    @property
    def links(self) -> tuple[str, ...]:
        """Those that serve the inverse link."""
        return tuple(name for name, link in LINKS.items() if link.serves(self.response))

    def predict(
        self,
        mean: Tensor,
        covariance: Tensor,
        link: str,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
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
        self, loss_terms: Tensor, n_data: float, n_outputs: int, sigma_noise: Tensor, temperature: Tensor
    ) -> Tensor:
        """−loss / T, 0-dim."""
        return -loss_terms.sum() / temperature

    def curvature_scale(self, kind: str, sigma_noise: Tensor, temperature: Tensor) -> Tensor:
        """1/T for every kind, 0-dim."""
        check_kind(kind)
        return temperature.reciprocal()


def check_kind(kind: str) -> None:
    """Refuses names that are no curvature kind.

    Raises:
        InvalidArgument: Neither "ggn", "hessian" nor "ef".
    """
    if kind not in ("ggn", "hessian", "ef"):
        raise InvalidArgument(f"kind={kind!r} is unknown; accepted are 'ggn', 'hessian', 'ef'.")
