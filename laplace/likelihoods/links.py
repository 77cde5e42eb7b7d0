"""Link approximations: the mean of the target under Gaussian latents, E[inverse_link(f)] for f ~ N(μ, Σ).

All are pure functions, differentiable in mean and covariance. A covariance is `[B, C, C]` or, for a
diagonal one, `[B, C]`. Softmax links return rows that sum to 1 for every finite input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor

from laplace.core.checks import is_true
from laplace.core.gaussian import (
    GaussianDraws,
    GaussianOutputs,
    against_others,
    centred,
    centred_variance,
    centred_variance_of_independent,
)
from laplace.core.pieces import operations_are_dear
from laplace.core.precision_policy import exponent_share, wide_dtype, widened
from laplace.core.registry import Registry
from laplace.errors import ApproximationWarning, InvalidArgument, warn

InverseLink = Callable[[Tensor], Tensor]

Apply = Callable[[Tensor, Tensor, InverseLink, int, Generator | None], Tensor]


@dataclass(frozen=True)
class Link:
    """An entry of `LINKS`.

    Attributes:
        apply: `(mean, covariance, inverse_link, n_samples, generator) -> [B, C]`.
        diagonal: Whether only the variances are read, so that the caller may compute those alone.
        elementwise: The same for an inverse link that acts on every output alone, which reads variances only; None
            where `apply` serves every inverse link.
        responses: Inverse links that likelihoods offer it for, `"softmax"` and `"sigmoid"`; None for all.
        log_concentrations: `(mean, covariance) -> [B, C]`, logarithms of the concentrations of the Dirichlet that the
            softmax of the latents is approximated by; None where there is none.
        centred: The link that this one is of the latents less their mean over the outputs, if it reads variances alone:
            then the caller may compute those of the centred latents, and apply that one. None for others.
    """

    apply: Apply
    diagonal: bool = False
    elementwise: Apply | None = None
    responses: tuple[str, ...] | None = None
    log_concentrations: Callable[[Tensor, Tensor], Tensor] | None = None
    centred: str | None = None

    def serves(self, response: str | None) -> bool:
        """True if likelihoods with this inverse link offer it."""
        return self.responses is None or response in self.responses

    def serving(self, *, independent: bool) -> tuple[Apply, bool]:
        """The function for inverse links that act on every output alone, or not; whether it reads variances only."""
        if independent and self.elementwise is not None:
            return self.elementwise, True
        return self.apply, self.diagonal


LINKS: Registry[Link] = Registry("link_approx")


_FEW_CLASSES, _MANY_ROWS = 16, 256


def softmax(f: Tensor) -> Tensor:
    """Softmax over the last dimension.

    On a CPU PyTorch's kernel works along rows that fill a vector register, and number by number along shorter ones: a
    tenth of the time is that of many short rows side by side.
    """
    if operations_are_dear(f.device) or f.shape[-1] >= _FEW_CLASSES or f.numel() < _MANY_ROWS * f.shape[-1]:
        return torch.softmax(f, dim=-1)
    return torch.softmax(f.movedim(-1, 0).contiguous(), dim=0).movedim(0, -1).contiguous()


def probit(mean: Tensor, covariance: Tensor, inverse_link: InverseLink = softmax) -> Tensor:
    """Probit approximation: inverse_link(μ / √(1 + π/8 · diag Σ)), `[B, C]`.

    For the sigmoid this is MacKay's (1992) approximation of ∫ σ(f) N(f; μ, v) df [Redux, appendix B, probit]; for
    softmax its multi-class extension (Gibbs, 1997) [Redux, appendix B, probit of classes] [Mixtures, eq. 6].
    """
    variance = GaussianOutputs(mean, covariance).variance.clamp(min=0)
    return inverse_link(mean / torch.sqrt(1 + math.pi / 8 * variance).to(mean))


def probit_centred(mean: Tensor, covariance: Tensor, inverse_link: InverseLink = softmax) -> Tensor:
    """Probit approximation of every latent against the mean of the others, `[B, C]`.

    That is softmax(Π μ / √(1 + π/8 · v)) with Π = I − 11ᵀ/C and v = (C / (C − 1))² diag(Π Σ Π), the variances of
    f_c − Σ_{k≠c} f_k / (C − 1). Of two classes it is MacKay's approximation for the sigmoid of their difference.
    Softmax ignores a shift of all latents, and so does this: 11ᵀ added to Σ changes nothing, while `probit` counts it
    as doubt. The shift is 12 to 62 % of the variance of a softmax regression, whose curvature knows nothing of it.
    """
    of_variances = GaussianOutputs(mean, covariance).is_diagonal
    variance = centred_variance_of_independent(covariance) if of_variances else centred_variance(covariance)
    return probit(centred(mean), against_others(variance), inverse_link)


def monte_carlo(
    mean: Tensor,
    covariance: Tensor,
    inverse_link: InverseLink = softmax,
    n_samples: int = 100,
    generator: Generator | None = None,
) -> Tensor:
    """Average of inverse_link over draws from N(μ, Σ), `[B, C]`; standard error O(n_samples^−½).

    It estimates ∫ inverse_link(f) N(f; μ, Σ) df [Redux, appendix eq. 13] [Mixtures, eq. 5].
    """
    return average_response(GaussianOutputs(mean, covariance), inverse_link, n_samples, generator)


def average_response(
    gaussian: GaussianDraws, inverse_link: InverseLink, n_samples: int, generator: Generator | None
) -> Tensor:
    """The same of a Gaussian in any form."""
    largest = torch.finfo(gaussian.mean.dtype).max
    return gaussian.average(lambda f: inverse_link(f.clamp(-largest, largest)), n_samples, generator)


def delta(mean: Tensor, covariance: Tensor) -> Tensor:
    """Delta method: softmax(μ) + ½ tr(B Σ), B the Hessian of the softmax at μ, `[B, C]`.

    With p = softmax(μ) and v_k = (e_k − p)ᵀ Σ (e_k − p) it is [Redux, appendix B, delta method]

        p_k (1 + ½ (v_k − Σ_l p_l v_l)),

    which sums to 1. Where the variance is too large for an expansion at the mean, entries become negative: the
    correction is then scaled down, by one factor per row, to the last point at which none is, and a warning says so.
    """
    p = torch.softmax(widened(mean), 1)
    gaussian = GaussianOutputs(mean, covariance)
    # In units of the largest variance nothing overflows.
    unit = widened(gaussian.variance.detach().abs().amax(1, keepdim=True))
    unit = unit.clamp(min=1e-300 ** exponent_share(unit.dtype))
    variance = widened(gaussian.variance) / unit
    if gaussian.is_diagonal:
        mixed = variance * p
    else:
        mixed = ((widened(covariance) / unit.unsqueeze(2)) @ p.unsqueeze(2)).squeeze(2)
    spread = variance - 2 * mixed  # v_k up to a constant
    spread = 0.5 * (spread - (p * spread).sum(1, keepdim=True))
    lowest = -spread.amin(1, keepdim=True)
    limited = unit * lowest > 1
    _warn_of(limited, "probabilities would be negative")
    factor = torch.where(limited, 1 / torch.where(limited, lowest, 1.0), unit)
    return (p * (1 + factor * spread).clamp(min=0)).to(mean)


def delta_elementwise(mean: Tensor, covariance: Tensor, inverse_link: InverseLink) -> Tensor:
    """Delta method for a link g that acts on every output alone: g(μ) + ½ g″(μ) diag Σ, `[B, C]`."""
    keeps_graph = torch.is_grad_enabled() and mean.requires_grad
    with torch.enable_grad():
        leaf = mean if keeps_graph else mean.detach().requires_grad_()
        (first,) = torch.autograd.grad(inverse_link(leaf).sum(), leaf, create_graph=True)
        second = torch.zeros_like(leaf)
        if first.requires_grad:
            (second,) = torch.autograd.grad(first.sum(), leaf, create_graph=keeps_graph)
    return inverse_link(mean) + 0.5 * second * GaussianOutputs(mean, covariance).variance.to(mean)


def probabilities_within(values: Tensor) -> Tensor:
    """Probabilities of an expansion, cut to [0, 1]."""
    # Not finite: an infinite variance times a vanishing derivative.
    values = values.nan_to_num(nan=0.5)
    _warn_of(((values < 0) | (values > 1)).any(1), "probabilities would be outside of [0, 1]")
    return values.clamp(0, 1)


def _warn_of(rows: Tensor, what: str) -> None:
    if is_true(rows.any()):
        warn(
            f"link_approx='delta': the variances of {int(rows.sum())} of {len(rows)} data are too large for a "
            f"second-order expansion at the mean, {what}; they were clipped. Use link_approx='probit' or 'mc'.",
            ApproximationWarning,
        )


def bridge(mean: Tensor, covariance: Tensor) -> Tensor:
    """Laplace bridge: mean of the Dirichlet that matches the Gaussian, `[B, C]`.

    See `log_concentrations`. (Hobbhahn, Kristiadi and Hennig, 2022, "Fast predictive uncertainty for
    classification with Bayesian deep networks".)
    """
    return softmax(log_concentrations(mean, covariance)).to(mean)


def bridge_norm(mean: Tensor, covariance: Tensor) -> Tensor:
    """Laplace bridge after rescaling the latents so that the mean variance is √(C/2), `[B, C]`.

    With c = mean_k(Σ_kk) / √(C/2): μ ← μ/√c, Σ ← Σ/c (Hobbhahn et al., 2022). As the variance goes to
    zero, μ/√c grows without bound and the prediction goes to the most probable class.
    """
    return softmax(log_concentrations(mean, covariance, normalise=True)).to(mean)


def log_concentrations(mean: Tensor, covariance: Tensor, normalise: bool = False) -> Tensor:
    """Logarithms of the concentrations of the Laplace bridge, `[B, C]`, float64 [Redux, appendix B, Laplace bridge].

    Softmax ignores a shift of all latents, so the Gaussian is first conditioned on Σ_c f_c = 0:
    with s = Σ1 and t = 1ᵀΣ1, μ ← μ − s (1ᵀμ)/t and Σ ← Σ − s sᵀ/t. Then

        α_k = (1 − 2/C + e^{μ_k} / C² · Σ_l e^{−μ_l}) / Σ_kk        (Hobbhahn et al., 2022)

    in log space, where nothing overflows. The numerator is positive for C ≥ 2, so α_k > 0 as long as
    Σ_kk > 0. Conditional variances below ε times the largest variance (ε: machine precision of the mean, of float64
    for variances) are rounding, whatever their sign, and count as that floor; hence a covariance of zero, or one that
    conditioning exhausts, acts like a small multiple of the identity. Likewise t below the rounding of its
    sum counts as zero: such a Gaussian is conditioned already.
    """
    gaussian = GaussianOutputs(mean, covariance)
    n_classes = mean.shape[1]
    if n_classes < 2:
        raise InvalidArgument("The Laplace bridge needs at least 2 outputs, 1 was given: use link_approx='probit'.")
    if gaussian.is_joint:
        raise InvalidArgument(
            "The Laplace bridge takes one covariance per row, [B, C, C] or [B, C]; a joint one was "
            "given: take its diagonal blocks."
        )
    # Variances alone meet no cancellation that float64 does not resolve; a row sum carries the input's rounding.
    eps = torch.finfo(wide_dtype(mean.device) if gaussian.is_diagonal else mean.dtype).eps
    # The bridge depends on ratios within Σ only, so it is computed in units of the largest variance. Bounded means
    # keep numbers finite: at 1e100 (float32: 1e12) any softmax is saturated.
    unit = widened(gaussian.variance.detach().abs().amax(1, keepdim=True))
    unit = unit.clamp(min=1e-300 ** exponent_share(unit.dtype))
    variance = widened(gaussian.variance) / unit
    row_sums = variance if gaussian.is_diagonal else _row_sums(covariance, unit)
    largest = 1e100 ** exponent_share(variance.dtype)
    centred, conditional = _condition_on_zero_sum(widened(mean).clamp(-largest, largest), variance, row_sums, eps)
    if normalise:
        # The scale c = mean variance / √(C/2), in the original units, bounded away from zero.
        excess = conditional.mean(1, keepdim=True) * unit / math.sqrt(n_classes / 2)
        centred = centred / excess.clamp(min=1e-200 ** exponent_share(excess.dtype)).sqrt()
        unit = math.sqrt(n_classes / 2) / conditional.mean(1, keepdim=True)  # that of Σ/c, whatever the first one was
    log_constant = math.log(1 - 2 / n_classes) if n_classes > 2 else -math.inf
    peak = centred + torch.logsumexp(-centred, 1, keepdim=True) - 2 * math.log(n_classes)
    return torch.logaddexp(peak, peak.new_tensor(log_constant)) - conditional.log() - unit.log()


def _row_sums(covariance: Tensor, unit: Tensor) -> Tensor:
    """Σ1 / unit, `[B, C]`, summed in float64 without a copy of Σ.

    A positive semi-definite Σ has |Σ_kl| ≤ unit, so that C bounds a row sum up to rounding; beyond 2C it overflowed.
    """
    n_classes = covariance.shape[-1]
    sums = covariance.sum(2, dtype=wide_dtype(covariance.device)) / unit
    return sums.nan_to_num(nan=0.0).clamp(-2 * n_classes, 2 * n_classes)


def _condition_on_zero_sum(mean: Tensor, variance: Tensor, row_sums: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and variances, `[B, C]`, given that the latents sum to zero; needs only diag Σ and Σ1."""
    n_classes = mean.shape[1]
    total = row_sums.sum(1, keepdim=True)
    informative = total > 4 * eps * n_classes * variance.sum(1, keepdim=True)
    gain = torch.where(informative, row_sums / torch.where(informative, total, 1.0), 1 / n_classes)
    centred = mean - gain * mean.sum(1, keepdim=True)
    conditional = variance - torch.where(informative, gain * row_sums, 0.0)
    floor = (eps * variance.detach().amax(1, keepdim=True)).clamp(min=1e-300 ** exponent_share(variance.dtype))
    return centred, torch.maximum(conditional, floor)


_SOFTMAX, _BOTH = ("softmax",), ("softmax", "sigmoid")
_normalised_concentrations = partial(log_concentrations, normalise=True)

LINKS.register("probit")(Link(lambda mean, cov, g, *_: probit(mean, cov, g), diagonal=True, responses=_BOTH))
LINKS.register("probit_centred")(
    Link(
        lambda mean, cov, g, *_: probit_centred(mean, cov, g),
        elementwise=lambda mean, cov, g, *_: probit(mean, cov, g),  # independent labels share no shift
        responses=_BOTH,
        centred="probit",
    )
)
LINKS.register("mc")(Link(monte_carlo))
LINKS.register("bridge")(
    Link(lambda mean, cov, *_: bridge(mean, cov), responses=_SOFTMAX, log_concentrations=log_concentrations)
)
LINKS.register("bridge_norm")(
    Link(
        lambda mean, cov, *_: bridge_norm(mean, cov), responses=_SOFTMAX, log_concentrations=_normalised_concentrations
    )
)
LINKS.register("delta")(
    Link(
        lambda mean, cov, *_: delta(mean, cov),
        elementwise=lambda mean, cov, g, *_: delta_elementwise(mean, cov, g),
        responses=_BOTH,
    )
)
