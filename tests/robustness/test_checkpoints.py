"""States that were cut off, mixed up or made by something else: refused by name, and nothing has changed."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from laplace import ELLA, FunctionalLaplace, MixtureLaplace
from laplace.errors import StateError
from tests import grid
from tests.robustness.faults import leaves, nothing_changes, posterior_bits, same_bits

POSTERIORS: dict[str, Callable[[Any], Any]] = {
    f"{weights}-{structure}": lambda model, w=weights, s=structure: grid.make(w, s, model=model)
    for weights, structure in (*grid.DIAGONAL, *((w, s) for w, s in grid.CELLS if s not in grid.FIRST))
} | {
    "gp": lambda model: FunctionalLaplace(model, "classification", 7),
    "ella": lambda model: ELLA(model, "classification", 7, 4),
}
# What older or other states need not have.
OPTIONAL = {"draws", "refinement", "channel_dim", "backend", "shapes", "attributes"}


def places(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every entry of a nested state is."""
    parts = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in parts:
        yield (*path, key)
        yield from places(value, (*path, key))


def at(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        state = state[key]
    return state


def fitted(name: str) -> tuple[Any, Any]:
    model = grid.network()
    la = POSTERIORS[name](model)
    la.fit(grid.batches())
    return model, la


@pytest.mark.parametrize("name", POSTERIORS)
def test_every_entry_is_needed(name: str) -> None:
    _, la = fitted(name)
    state, before = la.state_dict(), posterior_bits(la)
    for path in list(places(state)):
        if path[0] in OPTIONAL or (len(path) > 1 and path[0] not in ("H", "layout")):
            continue
        broken = copy.deepcopy(state)
        del at(broken, path[:-1])[path[-1]]
        with pytest.raises(StateError):
            la.load_state_dict(broken)
    assert same_bits(before, posterior_bits(la))


@pytest.mark.parametrize("name", POSTERIORS)
def test_no_tensor_may_be_cut_off(name: str) -> None:
    """Not one of the curvature, the mean or a hyper-parameter."""
    _, la = fitted(name)
    la.prior_mean = torch.zeros(la.n_params)
    state, before = la.state_dict(), posterior_bits(la)
    cut = 0
    for path in list(places(state)):
        value = at(state, path)
        if path[0] not in ("H", "mean", "prior_mean") or not isinstance(value, Tensor) or not value.numel():
            continue
        for dim in range(value.ndim):
            broken = copy.deepcopy(state)
            at(broken, path[:-1])[path[-1]] = value.narrow(dim, 0, value.shape[dim] - 1).clone()
            with pytest.raises((StateError, ValueError), match=r"shape|length|malformed|it must be a dense tensor"):
                la.load_state_dict(broken)
            cut += 1
    assert cut > 2
    assert same_bits(before, posterior_bits(la))


def test_a_file_that_was_cut_off() -> None:
    """Half a file is no state at all, and what PyTorch makes of it reaches no posterior."""
    _, la = fitted("all-diag")
    before, file = posterior_bits(la), io.BytesIO()
    torch.save(la.state_dict(), file)
    whole = file.getvalue()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        with pytest.raises((RuntimeError, EOFError, ValueError)):
            la.load_state_dict(torch.load(io.BytesIO(whole[:size]), weights_only=True))
    assert same_bits(before, posterior_bits(la))


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (0, "0, this object's 1"),
        (2, "2, this object's 1"),
        ("1", "'1'; it must be of type int"),
        (None, "None; it must"),
    ],
)
def test_versions(version: Any, message: str) -> None:
    model, la = fitted("last_layer-kron")
    before = posterior_bits(la)
    with nothing_changes(model), pytest.raises(StateError, match=f"version is {message}"):
        la.load_state_dict(la.state_dict() | {"version": version})
    assert same_bits(before, posterior_bits(la))


def test_states_of_mixtures_are_taken_over_whole_or_not_at_all() -> None:
    """The first component's is right, the second one's is not."""
    models = [grid.network(), grid.network()]
    with torch.no_grad():
        models[1][0].weight.mul_(2)
    mixture = MixtureLaplace(models, "classification", "all", "kron")
    mixture.fit(grid.batches())
    state = mixture.state_dict()
    mixture.prior_precision = 3.0
    mixture.fit(grid.batches(seed=5))
    x = grid.data(seed=8)[0]
    before = [*leaves(mixture.state_dict()), mixture(x), mixture.log_marginal_likelihood()]

    def same() -> bool:
        return same_bits(before, [*leaves(mixture.state_dict()), mixture(x), mixture.log_marginal_likelihood()])

    swapped = state | {"components": state["components"][::-1]}
    cut = copy.deepcopy(state)
    del cut["components"][1]["H"]["factors"]
    fewer = state | {"components": state["components"][:1]}
    for broken in (swapped, cut, fewer, state | {"version": 7}, state["components"][0], {}, None):
        with nothing_changes(models[0]), nothing_changes(models[1]), pytest.raises(StateError):
            mixture.load_state_dict(broken)
        assert same()
    mixture.load_state_dict(state)
    assert not same()
