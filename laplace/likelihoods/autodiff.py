"""A likelihood from its density alone: gradients and Hessians by automatic differentiation."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Generator, Tensor
from torch.distributions import Distribution, constraints
from torch.func import grad, vjp, vmap

from laplace.errors import InvalidArgument, InvalidData, UnsupportedError
from laplace.likelihoods.base import NoiseFreeLikelihood, OutputHessian
from laplace.likelihoods.checks import check_outputs, check_tensor, for_each, require_finite_targets


class LikelihoodFromLoss(NoiseFreeLikelihood):
    """Base of likelihoods of your own: write a name and a density; derivatives are by automatic differentiation.

    The density should be log-concave in f, as its Hessian is the output Hessian of the GGN (otherwise
    `OutputHessian.root` raises). It is enough for a fit, and for mean and variance of f; predictions of y
    need `sample` and `inverse_link`. They average `inverse_link` over samples, `link_approx="mc"`; list
    further names of `LINKS` in `links` if they fit (`"probit"` suits sigmoids and softmax). Variances, entropies and
    intervals are by samples too; `conditional` makes them cheaper, and gives a distribution.

    Example:
        class Poisson(LikelihoodFromLoss):
            name = "poisson"

            def negative_log_likelihood(self, f, y):
                return (f.exp() - y * f + torch.lgamma(y + 1)).sum()

            def sample(self, f, n, generator=None):
                rates = f.exp().expand(n, *f.shape)
                return torch.poisson(rates, generator=generator)

            def inverse_link(self, f):
                return f.exp()
    """

    @abstractmethod
    def negative_log_likelihood(self, f: Tensor, y: Tensor) -> Tensor:
        """−log p(y | f) of one datum, 0-dim, in operations that torch.func can differentiate twice.

        What reads numbers, as `f[y]` does, runs datum by datum, which is slow; `f.gather(0, y.unsqueeze(0))` does not.

        Args:
            f: Outputs of the datum, `[C]`.
            y: Its target, one row of the batch's targets.
        """

    def sample(self, f: Tensor, n: int, generator: Generator | None = None) -> Tensor:
        """Targets drawn from p(y | f), `[n, B, …]`, for outputs `[B, C]`.

        Raises:
            UnsupportedError: The class does not define it.
        """
        raise self._lacking("how y is drawn given f", "sample(f, n, generator=None) -> [n, B, ...]")

    def inverse_link(self, f: Tensor) -> Tensor:
        """Mean of the target given outputs f `[..., C]`, same shape.

        Raises:
            UnsupportedError: The class does not define it.
        """
        raise self._lacking("what the mean of y is given f", "inverse_link(f) -> [..., C]")

    def _lacking(self, what: str, method: str) -> UnsupportedError:
        return UnsupportedError(
            f"likelihood={self.name!r} does not say {what}, which this prediction needs: define {method} in its class."
        )

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """One finite target per datum; floating targets are cast to the dtype of f.

        Raises:
            InvalidData: Another number of targets, NaN or infinite values.
        """
        check_outputs(f)
        y = check_tensor(y)
        if y.ndim == 0 or y.shape[0] != f.shape[0]:
            raise InvalidData(
                f"Targets have shape {list(y.shape)}, outputs {list(f.shape)}; one row of targets per datum is "
                "accepted: give targets [B, ...]."
            )
        require_finite_targets(y)
        return y.to(f) if y.is_floating_point() else y.to(f.device)

    def loss_terms(self, f: Tensor, y: Tensor) -> Tensor:
        """Σ_b −log p(y_b | f_b), `[1]`."""
        return for_each(self.negative_log_likelihood, f, y).sum().reshape(1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Gradients of `negative_log_likelihood`, `[B, C]`."""
        return for_each(grad(self.negative_log_likelihood), f, y)

    def hessian(self, f: Tensor, y: Tensor | None = None) -> OutputHessian:
        """Hessians of `negative_log_likelihood` at the targets, dense.

        Raises:
            InvalidArgument: No targets, on which the Hessian may depend.
        """
        if y is None:
            raise InvalidArgument(f"The output Hessian of likelihood={self.name!r} needs targets: give y.")
        # Reverse over reverse: forward mode would ask every operation of a user for a forward derivative. The rows are
        # those of all data at once, for vmap over rows within vmap over data is wrong of some operations (PReLU).
        rows = vjp(lambda f: for_each(grad(self.negative_log_likelihood), f, y), f)[1]
        hot = torch.eye(f.shape[1], dtype=f.dtype, device=f.device).unsqueeze(1).expand(-1, len(f), -1)
        dense = vmap(rows)(hot)[0].transpose(0, 1)
        return OutputHessian(diag=dense.diagonal(dim1=1, dim2=2), dense=dense)

    def sample_gradients(
        self, f: Tensor, y: Tensor | None, n_samples: int, generator: Generator | None = None
    ) -> Tensor:
        """Gradients at targets from `sample`, `[S, B, C]`: their second moment is the Fisher matrix."""
        targets = self.sample(f.detach(), n_samples, generator)
        return torch.stack([self.gradient(f, target) for target in targets])

    def conditional(self, f: Tensor) -> Distribution:
        """p(y | f) by `sample` and `negative_log_likelihood`, of targets with C entries per datum."""
        return DistributionFromLoss(self, f)

    def predictive_nll(self, prediction: Tensor, variance: Tensor | None, y: Tensor, sigma_noise: Tensor) -> Tensor:
        """Not defined by the mean of the target alone.

        Raises:
            UnsupportedError: Always; override it where the mean of the target says its density.
        """
        raise UnsupportedError(
            f"likelihood={self.name!r} does not say how good a predicted mean is: define "
            "predictive_nll(prediction, variance, y, sigma_noise) -> [B] in its class, "
            "give `loss`, or tune by the evidence."
        )


class DistributionFromLoss(Distribution):
    """p(y | f) by the methods of a likelihood, for outputs `[..., C]`."""

    def __init__(self, likelihood: LikelihoodFromLoss, f: Tensor) -> None:
        super().__init__(f.shape[:-1], f.shape[-1:], validate_args=False)
        self.likelihood = likelihood
        self.f = f

    @property
    def arg_constraints(self) -> dict[str, constraints.Constraint]:
        return {}

    @property
    def support(self) -> constraints.Constraint:
        return constraints.real_vector

    @property
    def mean(self) -> Tensor:
        """E[y | f], `[..., C]`."""
        return self.likelihood.inverse_link(self.f)

    @property
    def variance(self) -> Tensor:
        """½ (y − y′)² of two samples, of which Var(y | f) is the mean, `[..., C]`."""
        first, second = self.sample((2,))
        return 0.5 * (first - second).square()

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Targets `[*sample_shape, ..., C]`, of the global random numbers."""
        rows = self.f.detach().flatten(0, -2)
        targets = self.likelihood.sample(rows, math.prod(sample_shape))
        if targets.shape[1:] != rows.shape:
            raise UnsupportedError(
                f"likelihood={self.likelihood.name!r} has targets {list(targets.shape[1:])} of outputs "
                f"{list(rows.shape)}, whose moments are not known: define conditional(f) in its class."
            )
        return targets.view(*sample_shape, *self.f.shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log p(value | f), `[...]`, of targets `[..., C]`."""
        f, y = torch.broadcast_tensors(self.f, value)
        each = for_each(self.likelihood.negative_log_likelihood, f.flatten(0, -2), y.flatten(0, -2))
        return -each.view(f.shape[:-1])
