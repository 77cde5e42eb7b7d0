"""Says when the evidence chose a noise far larger than the residuals.

In σ the evidence is stationary where σ² = Σ r² / (n − γ) for n observed values with residuals r, of which γ, the
effective number of parameters, count as explained by the weights (MacKay, 1992, "Bayesian interpolation"). Curvature
that leaves out how weights depend on each other has a larger γ than the GGN; with fewer data than weights it may come
close to n, and σ is then too large by √(n / (n − γ)).
"""

from __future__ import annotations

from torch import Tensor

from laplace.core.precision_policy import widened
from laplace.posterior.posterior import Posterior

_LARGEST_RATIO = 1.5
"""Of the noise and the residuals: at 1.5 five ninths of the observed values count as explained."""


def inflated_noise(posterior: Posterior, sigma_noise: Tensor, temperature: Tensor) -> str | None:
    """A note where the noise that the evidence chose is far larger than the residuals, or None.

    Args:
        posterior: What was tuned.
        sigma_noise: The noise σ, 0-dim or `[C]`.
        temperature: The temperature T, by which σ² is multiplied in the likelihood.
    """
    fit = posterior.fit
    squares = posterior.likelihood.mean_squares(widened(fit.loss_terms), fit.n_data, fit.n_outputs)
    if squares is None:
        return None
    noise = (widened(sigma_noise.detach()).square() * widened(temperature.detach())).sqrt()
    residual = (squares if noise.ndim else squares.mean()).sqrt()
    worst = (noise / residual).argmax()
    sigma, spread = noise.reshape(-1)[worst].item(), residual.reshape(-1)[worst].item()
    if not sigma > _LARGEST_RATIO * spread:
        return None
    explained = 100 * (1 - (spread / sigma) ** 2)
    ratio = f"{sigma / spread:.3g} times " if spread else "with "
    return (
        f"the evidence chose a noise of {sigma:.3g}, {ratio}the root mean square {spread:.2g} of the "
        f"residuals, since it counts {explained:.0f} % of the observed values as explained by the weights; a curvature "
        "that leaves out how weights depend on each other overstates that where data are few: compare "
        "hessian_structure='full', use the last layer, or tune on validation data"
    )
