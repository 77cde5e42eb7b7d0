"""Hyper-parameters as users assign them: checked against the likelihood and the random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from laplace.core import hyperparameters as hyper
from laplace.core.hyperparameters import Hyperparameters
from laplace.core.inference import kept_for_later
from laplace.errors import InvalidArgument
from laplace.likelihoods.base import Likelihood
from laplace.weights.base import Weights

Given = float | Tensor
"""A hyper-parameter as users give it."""


def assigned(now: Hyperparameters, likelihood: Likelihood, weights: Weights, **given: Given) -> Hyperparameters:
    """The present hyper-parameters with some that a user gives, of which copies are kept with the caller's graph.

    Args:
        now: The present ones.
        likelihood: p(y | f), which may have no noise.
        weights: The random weights, by which lengths are checked as far as they are known.
        **given: New values by name.

    Raises:
        InvalidType: A value that is neither a number nor a tensor.
        InvalidArgument: A value that is not positive or not finite, or of a length that fits nothing.
    """
    like = now.prior_precision
    with kept_for_later():
        return replace(now, **{name: _CHECKED[name](value, like, likelihood, weights) for name, value in given.items()})


def restricted(now: Hyperparameters, weights: Weights) -> Hyperparameters:
    """Hyper-parameters whose lengths could not be checked while the random weights were unknown.

    Raises:
        InvalidArgument: A length that fits nothing.
    """
    prior = _of_weights("prior_precision", now.prior_precision, weights)
    mean = _mean_of_weights(now.prior_mean, weights)
    return now if prior is now.prior_precision and mean is now.prior_mean else replace(
        now, prior_precision=prior, prior_mean=mean
    )  # fmt: skip


def _prior_precision(value: Given, like: Tensor, likelihood: Likelihood, weights: Weights) -> Tensor:
    tensor = hyper.positive("prior_precision", hyper.as_tensor("prior_precision", value, like=like))
    return _of_weights("prior_precision", tensor if tensor.ndim else tensor.reshape(1), weights)


def _prior_mean(value: Given, like: Tensor, likelihood: Likelihood, weights: Weights) -> Tensor:
    tensor = hyper.finite("prior_mean", hyper.as_tensor("prior_mean", value, like=like))
    return _mean_of_weights(tensor if not isinstance(value, Tensor) else tensor.reshape(-1), weights)


def _sigma_noise(value: Given, like: Tensor, likelihood: Likelihood, weights: Weights) -> Tensor:
    tensor = hyper.positive("sigma_noise", hyper.as_tensor("sigma_noise", value, like=like))
    if not likelihood.has_noise and any(number != 1 for number in tensor.flatten().tolist()):
        raise InvalidArgument(
            f"sigma_noise={value} with likelihood={likelihood.name!r}, which has no observation noise; "
            "leave sigma_noise at 1."
        )
    return tensor.reshape(()) if tensor.numel() == 1 else tensor


def _temperature(value: Given, like: Tensor, likelihood: Likelihood, weights: Weights) -> Tensor:
    tensor = hyper.positive("temperature", hyper.as_tensor("temperature", value, like=like))
    if tensor.numel() != 1:
        raise InvalidArgument(f"temperature must be a scalar; {tensor.numel()} values were given.")
    return tensor.reshape(())


_CHECKED: dict[str, Callable[[Given, Tensor, Likelihood, Weights], Tensor]] = {
    "prior_precision": _prior_precision,
    "prior_mean": _prior_mean,
    "sigma_noise": _sigma_noise,
    "temperature": _temperature,
}


def _of_weights(name: str, value: Tensor, weights: Weights) -> Tensor:
    """A prior precision `[n]` whose length fits, restricted to the random weights."""
    problem = weights.problem
    if problem is None or value.numel() == 1:
        return value
    value, layout = weights.restrict_prior(value), problem.layout
    accepted = {"one": 1, "parameter tensors": layout.n_tensors, "random parameters": layout.n_params}
    hyper.check_length(name, value, accepted)
    return value


def _mean_of_weights(value: Tensor, weights: Weights) -> Tensor:
    """A prior mean whose length fits, restricted to the random weights."""
    problem = weights.problem
    if problem is None or value.numel() == 1:
        return value
    value = weights.restrict_prior(value)
    hyper.check_length("prior_mean", value, {"one": 1, "random parameters": problem.layout.n_params})
    return value
