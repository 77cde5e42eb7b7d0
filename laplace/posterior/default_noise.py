"""Says when the noise of a regression was left at 1 where the residuals are of another size."""

from __future__ import annotations

import math

from laplace.core import checks
from laplace.core.precision_policy import widened
from laplace.errors import ApproximationWarning, warn
from laplace.posterior.posterior import Posterior

_LARGEST_RATIO = 5.0
"""Of the noise and the residuals, or of the residuals and the noise."""

_FEWEST = 10
"""Observed values whose root mean square tells a size: of ten normal ones it is below 0.2 twice in a million."""


def warn_of_default_noise(posterior: Posterior) -> None:
    """Warns, once per fit, where σ is 1 and the residuals of the training data are far from it.

    It is asked when something first depends on σ, a prediction or a tuning of the prior alone, and not by `fit`, after
    which many choose σ.

    Args:
        posterior: The posterior.
    """
    if not posterior.likelihood.has_noise or posterior.cache.noise_seen or posterior.data is None:
        return
    if not checks.numbers_are_known() or posterior.overrides("sigma_noise"):
        return
    posterior.cache.noise_seen = True
    fit = posterior.map_fit
    squares = posterior.likelihood.mean_squares(widened(fit.loss_terms), fit.n_data, fit.n_outputs)
    if squares is None or fit.n_data * fit.n_outputs / len(squares) < _FEWEST:
        return
    sigma = posterior.hypers.sigma_noise.detach()
    if not bool((sigma == 1).all()):
        return
    spreads = (squares if sigma.ndim else squares.mean(0, keepdim=True)).sqrt().tolist()
    spread = max(spreads, key=lambda each: abs(math.log(each)) if each > 0 else 0.0)
    if spread == 0 or 1 / _LARGEST_RATIO <= spread <= _LARGEST_RATIO:  # a loss of 0 was never summed
        return
    wrong = f"{1 / spread:.3g} times as large" if spread < 1 else f"{spread:.3g} times smaller"
    warn(
        f"sigma_noise is 1, its default, and the root mean square of the residuals is {spread:.3g}: the noise that "
        f"the posterior and its predictions assume is {wrong}. Give sigma_noise=, tune it by "
        "la.optimize_hyperparameters(('prior_precision', 'sigma_noise')) or, on validation data, by "
        "la.calibrate(val_loader), or standardise targets in units of their own.",
        ApproximationWarning,
    )
