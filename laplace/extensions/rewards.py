"""Rewards that are not trusted beyond what the data say: the soft minimum over a posterior.

A learned reward r that is maximised is exploited where it is wrong. The value of r under the worst distribution within
a Kullback–Leibler penalty τ of the posterior, min_q E_q r + τ KL(q ‖ p), is

    −τ log E_p exp(−r/τ) = μ − σ²/(2τ)            for r ~ N(μ, σ²),

and of a mixture Σ_k π_k N(μ_k, σ_k²) it is −τ log Σ_k π_k exp(−(μ_k − σ_k²/(2τ))/τ).
"""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.core.arguments import checked
from laplace.errors import CalibrationWarning, InvalidArgument, InvalidType, UnsupportedError, warn
from laplace.likelihoods.categorical import Preference
from laplace.likelihoods.gaussian import Gaussian
from laplace.predictive.prediction import Prediction


@checked
def pessimistic(prediction: Prediction, tau: float | Tensor) -> Tensor:
    """The reward that a prediction warrants, μ − σ²/(2τ), in the shape of `prediction.latent_mean`.

    It is −τ log E exp(−r/τ) of a reward r under the posterior: the mean for τ → ∞, and lower the less the data say
    of an input. For a mixture it is that of the mixture. It can be differentiated in whatever the prediction can, and
    in τ. Noise of observations has no part in it.

    Args:
        prediction: `la.predict(x)` of a reward model, `likelihood="reward_modeling"` or `"regression"`.
        tau: τ > 0, in the unit of the reward; a tensor is broadcast against the rewards.

    Raises:
        InvalidType: No prediction.
        InvalidArgument: τ is not positive and finite.
        UnsupportedError: Another likelihood, whose outputs are no rewards.

    Warns:
        CalibrationWarning: No reward is lowered: `calibrate` chose the network alone, or τ is out of proportion.
    """
    if not isinstance(prediction, Prediction):
        raise InvalidType(f"prediction is a {type(prediction).__name__}; that of la.predict(x) is accepted.")
    likelihood = prediction.likelihood
    if not isinstance(likelihood, Preference | Gaussian):
        raise UnsupportedError(
            f"outputs of likelihood={likelihood.name!r} are no rewards; fit 'reward_modeling' or 'regression'."
        )
    mean = prediction.latent_mean
    scale = torch.as_tensor(tau, dtype=mean.dtype, device=mean.device)
    parts = [Prediction.from_outputs(part, prediction.channel_dim) for part in prediction.components]
    penalties = torch.stack([one.latent_variance / (2 * scale) for one in parts])
    positive = (scale.isfinite() & (scale > 0)).all()
    valid, size, most = torch.stack([positive.to(mean), mean.abs().amax(), penalties.amax()]).tolist()
    if not valid:
        raise InvalidArgument(f"tau={tau}; a positive number in the unit of the reward is accepted, e.g. tau=1.0.")
    if most <= 1e-6 * size:
        warn(
            f"pessimistic lowers no reward by more than {most:.1e}, of up to {size:.1e}: tau is too large, or "
            "calibrate chose the network alone, which has no uncertainty; la.calibration = None undoes it.",
            CalibrationWarning,
        )
    values = torch.stack([one.latent_mean for one in parts]) - penalties
    if len(parts) == 1:
        return values[0]
    weights = prediction.weights.to(values).log().view(-1, *(1,) * (values.ndim - 1))
    return -scale * (weights - values / scale).logsumexp(0)
