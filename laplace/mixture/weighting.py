"""Mixture weights π: uniform, by the evidence, or given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laplace.core.precision_policy import wide_dtype, widened
from laplace.errors import InvalidArgument, InvalidType
from laplace.network.model_guard import own_precision
from laplace.parametric import ParametricLaplace
from laplace.tuning.group import PosteriorGroup, require_same_data

RULES = ("uniform", "evidence")
"""The ways to choose weights that have a name."""

Rule = str | Tensor
"""One of `RULES`, or weights `[K]`."""


def checked_rule(weights: str | Tensor | Sequence[float], n_components: int) -> Rule:
    """A rule as users give it: a name, or weights `[K]`, which are copied in float64 on the CPU.

    Raises:
        InvalidArgument: An unknown name, or weights that are negative, not finite, no distribution or of another
            length.
        InvalidType: Neither.
    """
    if isinstance(weights, str):
        if weights not in RULES:
            raise InvalidArgument(f"weights={weights!r}; accepted are {list(RULES)} and {n_components} numbers.")
        return weights
    try:
        given = torch.as_tensor(weights, dtype=wide_dtype(), device="cpu").detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidType(
            f"weights={weights!r} is no list of numbers; accepted are {list(RULES)} and {n_components} numbers."
        ) from error
    if given.shape != (n_components,):
        raise InvalidArgument(
            f"weights has shape {tuple(given.shape)}; give one for each of the {n_components} components."
        )
    # What a float32 tensor of any length that was normalised may be off by.
    if not bool(((given >= 0) & given.isfinite()).all()) or abs(given.sum().item() - 1) > 1e-4:
        raise InvalidArgument(f"weights={given.tolist()}; they must not be negative, and must sum to 1.")
    return given / given.sum()


def by_evidence(log_evidences: Tensor) -> Tensor:
    """π_k = p(D | M_k) / Σ_l p(D | M_l), `[K]` (Eschenhagen et al., 2021, equation 10), from logarithms `[K]`."""
    return log_evidences.softmax(0)


def weights_now(rule: Rule, posteriors: Sequence[ParametricLaplace]) -> Tensor:
    """π at the posteriors' own hyper-parameters, `[K]`, float64, without a graph.

    Raises:
        NotFittedError: By the evidence before `fit`.
        InvalidArgument: By the evidence of different data.
    """
    if isinstance(rule, Tensor):
        return rule.clone()
    if rule == "uniform":
        return uniform(len(posteriors))
    with torch.no_grad():
        return by_evidence(log_evidences(posteriors))


def log_evidences(posteriors: Sequence[ParametricLaplace]) -> Tensor:
    """Log p(D | M_k) at the posteriors' own hyper-parameters, `[K]`, float64, with their graph.

    Raises:
        NotFittedError: Before `fit`.
        InvalidArgument: The components saw different numbers of data.
    """
    check_same_data(posteriors)
    values = [widened(_log_evidence(la)) for la in posteriors]
    return torch.stack([value.to(values[0].device) for value in values])


def _log_evidence(la: ParametricLaplace) -> Tensor:
    """Log p(D | M); of a calibrated posterior that of the one whose covariance was scaled."""
    posterior = la.snapshot()
    if posterior.calibration is None:
        return la.log_marginal_likelihood()
    with own_precision():
        return posterior.unscaled().log_evidence()


def weights_of(rule: Rule, group: PosteriorGroup) -> Tensor:
    """π of posteriors, `[K]`, float64, with the graph of their hyper-parameters."""
    if isinstance(rule, Tensor):
        return rule
    return uniform(len(group.posteriors)) if rule == "uniform" else by_evidence(group.log_evidences())


def uniform(n_components: int) -> Tensor:
    """1/K, `[K]`, float64."""
    return torch.full((n_components,), 1 / n_components, dtype=wide_dtype())


def check_same_data(posteriors: Sequence[ParametricLaplace]) -> None:
    """Raises where evidences are no basis of a comparison.

    Raises:
        InvalidArgument: The components saw different numbers of data.
    """
    require_same_data([la.fitted().n_data for la in posteriors])
