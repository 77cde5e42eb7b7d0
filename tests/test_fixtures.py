"""Stored posteriors load bit for bit, and say what they said when they were stored.

The files are made by `tests.fixtures.make`, which says when one may be replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import laplace
from laplace import BaseLaplace
from laplace.likelihoods import LIKELIHOODS
from laplace.likelihoods.links import LINKS
from tests.fixtures.cases import CASES, FOLDER, OWN, WEIGHTS, Case
from tests.fixtures.numbers import numbers
from tests.reference.compare import assert_close

BASES = {"ParametricLaplace", "BaseLaplace", "BaseFunctionalLaplace", "LLLaplace", "SubnetLaplace"}


def content(case: Case) -> dict[str, Any]:
    """What the case's file holds."""
    assert case.file.exists(), f"{case.name} has no file; python -m tests.fixtures.make {case.name} writes it"
    return torch.load(case.file, weights_only=True)


def loaded(case: Case, stored: dict[str, Any]) -> Any:
    """A posterior that was made anew and took over the stored state."""
    models = case.models()
    for model, weights in zip(models, stored["models"], strict=True):
        model.load_state_dict(weights)
    la = case.posterior(models)
    la.load_state_dict(stored["state"])
    return la


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every entry of nested dictionaries and lists by its place."""
    if isinstance(value, dict):
        parts: Any = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    else:
        yield name, value
        return
    yield name, (type(value).__name__, len(value))
    for key, part in parts:
        yield from leaves(part, f"{name}.{key}")


# Entries of blocks that states no longer have, for the others tell them; older states that have them load.
DERIVED = ("n_data", "identity", "rotated")


def as_written_now(state: Any) -> Any:
    """The state without the derived entries of blocks, and without their shapes."""
    if isinstance(state, list | tuple):
        return type(state)(as_written_now(part) for part in state)
    if not isinstance(state, dict):
        return state
    block = state.get("kind") == "outer"
    return {
        key: as_written_now(part)
        for key, part in state.items()
        if not (key in DERIVED if block else key.startswith("H.parts.") and key.rpartition(".")[2] in DERIVED)
    }


def assert_same_state(present: dict[str, Any], stored: dict[str, Any]) -> None:
    """Equal entries under equal names, tensors bit for bit, checksums of the network apart.

    A state does not carry these over: they are computed anew, by cosines, whose last bit is the processor's.
    """
    actual, expected = dict(leaves(present)), dict(leaves(as_written_now(stored)))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if name.endswith(".model_sums"):
            assert_close(actual[name], value, "fixture", label=name)
        elif isinstance(value, Tensor):
            assert actual[name].dtype == value.dtype, name
            assert torch.equal(actual[name], value), name
        else:
            assert actual[name] == value, name


@pytest.mark.portable
@pytest.mark.parametrize("name", CASES)
def test_a_stored_posterior(name: str) -> None:
    case = CASES[name]
    stored = content(case)
    la = loaded(case, stored)
    assert_same_state(la.state_dict(), stored["state"])
    present = numbers(la, stored["inputs"])
    assert present.keys() == stored["numbers"].keys()
    for label, value in stored["numbers"].items():
        assert_same_number(present[label], value, label)
    assert_same_state(la.state_dict(), stored["state"])


def assert_same_number(present: Any, stored: Any, label: str) -> None:
    """Equal numbers, of a mean and a covariance one after the other; or the same error."""
    if isinstance(stored, str) or isinstance(present, str):
        assert present == stored, label
    elif isinstance(stored, tuple):
        for i, (actual, expected) in enumerate(zip(present, stored, strict=True)):
            assert_close(actual, expected, "fixture", label=f"{label} {i}")
    else:
        assert_close(present, stored, "fixture", label=label)


# The table is complete.


def test_every_cell_is_stored() -> None:
    stored = {(case.weights, case.structure, case.problem) for case in CASES.values() if not case.note}
    assert set(product(WEIGHTS, OWN, ("classification", "regression"))) <= stored


def test_every_class_is_stored() -> None:
    """Of the public ones that have a structure, and so can be made."""
    public = {name: getattr(laplace, name) for name in laplace.__all__}
    posteriors = {
        name
        for name, value in public.items()
        if isinstance(value, type) and issubclass(value, BaseLaplace) and name not in BASES
    }
    stored = {content(case)["state"]["cls_name"] for case in CASES.values()}
    assert posteriors | {"MixtureLaplace"} == stored


def test_every_likelihood_and_link_is_stored() -> None:
    assert {case.source.likelihood for case in CASES.values()} == set(LIKELIHOODS)
    links = {label for case in CASES.values() for label in content(case)["numbers"]} & set(LINKS)
    assert links == set(LINKS) - {"mc"}


def test_every_file_is_in_the_table() -> None:
    assert {path.stem for path in FOLDER.glob("*.pt")} == set(CASES)
