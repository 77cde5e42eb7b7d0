"""Warnings of the noise of a regression: left at 1 though residuals have another size, or one for unlike outputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laplace.core import checks
from laplace.core.precision_policy import widened
from laplace.errors import ApproximationWarning, warn
from laplace.posterior.posterior import Posterior

_LARGEST_RATIO = 5.0
"""Ratio of the larger to the smaller of noise and residuals, from which on a noise of 1 is taken to be a mistake."""

_FEWEST = 10
"""Observed values whose root mean square tells a size: of ten normal ones it is below 0.2 twice in a million."""


def warn_of_default_noise(posterior: Posterior) -> None:
    """Warns, once per fit, where σ is 1 and the residuals of the training data are far from it.

    It is asked when something first depends on σ, a prediction or a tuning of the prior alone, and not by `fit`, after
    which many choose σ.
    """
    if not posterior.likelihood.has_noise or posterior.cache.noise_seen or posterior.data is None:
        return
    if not checks.numbers_are_known() or posterior.overrides("sigma_noise"):
        return
    posterior.cache.noise_seen = True
    fit = posterior.map_fit
    squares = posterior.likelihood.mean_squares(widened(fit.loss_terms), fit.n_observed, fit.n_outputs)
    if squares is None or fit.n_data * fit.n_outputs / len(squares) < _FEWEST:
        return
    sigma = posterior.hypers.sigma_noise.detach()
    if not bool((sigma == 1).all()):
        return
    spreads = (squares if sigma.ndim else squares.mean(0, keepdim=True)).sqrt().tolist()
    spread = max(spreads, key=lambda each: abs(math.log(each)) if each > 0 else 0.0)
    unlike = unlike_outputs(posterior, sigma)
    if spread == 0 or 1 / _LARGEST_RATIO <= spread <= _LARGEST_RATIO:  # a loss of 0 was never summed
        if unlike:
            warn(f"{unlike}.", ApproximationWarning)
        return
    wrong = f"{1 / spread:.3g} times as large" if spread < 1 else f"{spread:.3g} times smaller"
    warn(
        f"sigma_noise is 1, its default, and the root mean square of the residuals is {spread:.3g}: the noise that "
        f"the posterior and its predictions assume is {wrong}. Give sigma_noise=, tune it by "
        "la.optimize_hyperparameters(('prior_precision', 'sigma_noise')) or, on validation data, by "
        "la.calibrate(val_loader), or standardise targets in units of their own."
        + (f" And {unlike}." if unlike else ""),
        ApproximationWarning,
    )


_UNLIKE = 3.0
"""Ratio of two outputs' residuals above which one noise suits at most one of them."""


def unlike_outputs(posterior: Posterior, sigma_noise: Tensor, argument: str = "sigma_noise") -> str:
    """Words that one noise, 0-dim, serves outputs whose residuals in the fit are of unlike size; else none.

    `argument` is the one by which several are given.
    """
    fit = posterior.map_fit
    squares = posterior.likelihood.mean_squares(widened(fit.loss_terms), fit.n_observed, fit.n_outputs)
    return "" if squares is None else unlike_squares(squares, fit.n_data, sigma_noise, argument)


def unlike_squares(squares: Tensor, n_data: float, sigma_noise: Tensor, argument: str = "sigma_noise") -> str:
    """The same of residuals with mean squares `[C]` of so many data."""
    if sigma_noise.ndim or n_data < _FEWEST or not float(squares.max()) > _UNLIKE**2 * float(squares.min()):
        return ""
    low, high = (float(end.sqrt()) for end in squares.aminmax())
    return (
        f"one noise serves {len(squares)} outputs whose residuals (root mean squares) lie between {low:.2g} and "
        f"{high:.2g}, so that intervals are too wide for some and too narrow for others: give one per output from "
        f"the start, {argument}=torch.ones({len(squares)}), or standardise the targets"
    )


def noise_like(squares: Tensor, former: Tensor) -> Tensor:
    """Noises `[C]` of the size of the residuals, whose mean squares these are; the former where those have no size."""
    sizes = squares.sqrt()
    return torch.where((sizes > 0) & sizes.isfinite(), sizes.to(former), former)
