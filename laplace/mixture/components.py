"""The components of a mixture: made from networks, checked against each other, kept together when something fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from laplace.enums import StructureName, WeightsName
from laplace.errors import InvalidArgument, InvalidType
from laplace.grid import from_names
from laplace.parametric import ParametricLaplace
from laplace.structures.base import Curvature
from laplace.weights.base import Weights


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
