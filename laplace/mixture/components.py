"""The components of a mixture: made from networks, checked against each other, kept together when something fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from laplace.core.precision_policy import wide_dtype, widened
from laplace.enums import StructureName, WeightsName
from laplace.errors import InvalidArgument, InvalidType
from laplace.grid import from_names
from laplace.network.model_guard import own_precision
from laplace.parametric import ParametricLaplace
from laplace.structures.base import Curvature
from laplace.tuning.group import PosteriorGroup, require_same_data
from laplace.weights.base import Weights

# Mixture weights π: uniform, by the evidence, or given.


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


def make_components(
    components: Sequence[ParametricLaplace | nn.Module],
    likelihood: Any,
    subset_of_weights: WeightsName | type[Weights],
    hessian_structure: StructureName | type[Curvature],
    options: dict[str, Any],
) -> tuple[ParametricLaplace, ...]:
    """Posteriors: those that are given, and new ones of the networks among the components.

    Raises:
        InvalidArgument: None, a posterior twice, networks without a likelihood, options that nothing takes, or
            likelihoods or channel dimensions that differ.
        InvalidType: Neither a posterior over weights nor a network.
    """
    if isinstance(components, nn.Module | ParametricLaplace) or not isinstance(components, Iterable):
        raise InvalidType(
            f"components is of type {type(components).__name__}; give a sequence of networks or Laplace objects."
        )
    given = list(components)
    if not given:
        raise InvalidArgument("components is empty; a mixture has at least one.")
    networks = [part for part in given if not isinstance(part, ParametricLaplace)]
    for part in networks:
        if not isinstance(part, nn.Module):
            raise InvalidType(
                f"components holds a {type(part).__name__}; give networks (torch.nn.Module) or Laplace objects over "
                "weights."
            )
    if networks and likelihood is None:
        raise InvalidArgument("components holds networks, whose likelihood= is needed: 'classification', for example.")
    if options and not networks:
        raise InvalidArgument(
            f"{sorted(options)} are arguments for new Laplace objects, but all components are such objects already."
        )
    made = tuple(
        part
        if isinstance(part, ParametricLaplace)
        else from_names(part, likelihood, subset_of_weights, hessian_structure, **options)
        for part in given
    )
    if len({id(part) for part in made}) < len(made):
        raise InvalidArgument("components holds the same Laplace object more than once; give weights= instead.")
    _check_likelihoods(made, likelihood)
    _check_layouts(made)
    check_same_outputs([la for la in made if la.is_fitted])
    return made


def _check_likelihoods(posteriors: Sequence[ParametricLaplace], likelihood: Any) -> None:
    names = [la.likelihood_object.name for la in posteriors]
    if any(name != names[0] for name in names):
        raise InvalidArgument(f"the components have the likelihoods {names}; those of a mixture are the same.")
    wanted = likelihood if isinstance(likelihood, str | None) else likelihood.name
    if wanted is not None and str(wanted) != names[0]:
        raise InvalidArgument(f"likelihood={str(wanted)!r}, but the components have {names[0]!r}.")


def _check_layouts(posteriors: Sequence[ParametricLaplace]) -> None:
    dims = [la.channel_dim for la in posteriors]
    if any(dim != dims[0] for dim in dims):
        raise InvalidArgument(
            f"the components have channel_dim={dims}; the predictions of a mixture are averaged entry by entry: give "
            "networks whose outputs have one layout, or bring them to one by forward_fn=."
        )


def check_same_outputs(posteriors: Sequence[ParametricLaplace]) -> None:
    """Raises where fitted components have no outputs that could be averaged.

    Raises:
        InvalidArgument: Their networks have different numbers of outputs.
    """
    widths = [la.n_outputs for la in posteriors]
    if any(width != widths[0] for width in widths):
        raise InvalidArgument(f"the networks of the components have {widths} outputs; those of a mixture have as many.")


def check_repeatable(loader: Iterable[Any], n_components: int) -> None:
    """Raises where a loader can be read only once, but every component needs to read it.

    Raises:
        InvalidArgument: It is an iterator.
    """
    if n_components > 1 and isinstance(loader, Iterator):
        raise InvalidArgument(
            f"the loader is a {type(loader).__name__}, which can be read once; each of the {n_components} components "
            "reads the data: give a DataLoader or a list of batches."
        )


@contextmanager
def all_or_none(posteriors: Sequence[ParametricLaplace]) -> Iterator[None]:
    """Gives every component its posterior back where one of them fails: a user's own `fit` may be what fails."""
    former = [la.snapshot() for la in posteriors]
    try:
        yield
    except BaseException:
        for la, posterior in zip(posteriors, former, strict=True):
            la.set_posterior(posterior)
        raise


def shared(posteriors: Sequence[ParametricLaplace], name: str) -> Tensor:
    """The value of a hyper-parameter that all components have.

    Raises:
        InvalidArgument: They differ.
    """
    values = [getattr(la, name) for la in posteriors]
    first = values[0]
    if any(value.shape != first.shape or bool((value.to(first) != first).any()) for value in values[1:]):
        raise InvalidArgument(
            f"the components have no common {name}; read it of each, `mixture.components[k].{name}`, or assign one to "
            "the mixture."
        )
    return first
