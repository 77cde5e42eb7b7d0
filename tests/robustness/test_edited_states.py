"""States that somebody edited, or that were damaged: they are refused when they are loaded, or answer with numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import laplace
from laplace import ELLA, FunctionalLaplace, MixtureLaplace, VaLLA
from laplace.core import nested
from laplace.errors import InvalidType, LaplaceError, LaplaceWarning
from tests import grid
from tests.pairs import ALL
from tests.robustness.edits import edited, edits, places
from tests.test_saving import copied

EDITS = 400 if ALL else 45
"""Edits of every state that are tried, drawn by a fixed seed."""

CELLS = [(w, s, likelihood) for w, s in grid.TURNS for likelihood in ("classification", "regression")]
if ALL:
    CELLS += [(w, s, name) for w, s in grid.CELLS for name in grid.LIKELIHOODS if (w, s, name) not in CELLS]


def _functional(family: str) -> Any:
    makes = {
        "sod": lambda: FunctionalLaplace(grid.network(), "classification", 7),
        "nystrom": lambda: ELLA(grid.network(), "classification", 7, 4),
        "variational": lambda: VaLLA(grid.network(), "classification", "random", 4),
    }
    return makes[family]()


def _fitted(la: Any, likelihood: str = "classification", **options: Any) -> None:
    la.fit(grid.batches(likelihood), **options)


def _refined(la: Any) -> None:
    la.fit(grid.batches("regression"))
    la.refine(grid.batches("regression"))


def _calibrated(la: Any) -> None:
    la.fit(grid.batches("regression"))
    la.optimize_prior_precision(n_steps=2)
    la.calibrate([grid.data("regression", seed=9)])


def _mixture() -> Any:
    return MixtureLaplace([grid.make("all", "kron"), grid.make("last_layer", "diag")])


OTHERS: dict[str, tuple[Callable[[], Any], Callable[[Any], object], str]] = {
    "sod": (lambda: _functional("sod"), _fitted, "classification"),
    "nystrom": (lambda: _functional("nystrom"), _fitted, "classification"),
    "variational": (lambda: _functional("variational"), lambda la: _fitted(la, iterations=1), "classification"),
    "refined": (lambda: grid.make("all", "full", "regression"), _refined, "regression"),
    "calibrated": (lambda: grid.make("all", "kron", "regression"), _calibrated, "regression"),
    "mixture": (_mixture, _fitted, "classification"),
}  # fmt: skip


def answers(la: Any, x: Tensor) -> Iterator[Tensor]:
    """Numbers that a posterior gives: predictions and their variances, evidence, samples."""
    prediction = la(x)
    yield from [prediction] if isinstance(prediction, Tensor) else prediction
    if getattr(la, "calibration", None) is None:
        yield la.log_marginal_likelihood()
    if not isinstance(la, MixtureLaplace):
        yield la.sample(2, torch.Generator().manual_seed(0))
    assert repr(la) and la.state_dict()


def require_refused_or_right(load: Callable[[], Any], x: Tensor, label: str) -> None:
    """Loads an edited state: the library refuses it, then or by its own error later, or all numbers are finite.

    A kind that no saved state has is refused at once. What only numbers tell, a curvature with negative directions,
    say, may be told when they are first used.
    """
    try:
        la = load()
        if la is None:
            return
        for value in answers(la, x):
            assert value.isfinite().all(), f"{label}: not finite"
    except (LaplaceError, LaplaceWarning):
        return
    except Exception as error:
        raise AssertionError(f"{label}: {error!r}") from error


def check_edits(make: Callable[[], Any], fit: Callable[[Any], object], likelihood: str, seed: str) -> None:
    """Draws edits of the state of a posterior."""
    la = make()
    fit(la)
    state, x, source = la.state_dict(), grid.data(likelihood)[0], random.Random(seed)
    every = [(path, name, new) for path, value in places(state) for name, new in edits(value).items()]
    for path, name, new in source.sample(every, min(EDITS, len(every))):
        label = f"{'.'.join(map(str, path))}: {name}"
        kept = make()
        fit(kept) if source.random() < 0.1 else None
        parts = kept.components if isinstance(kept, MixtureLaplace) else [kept]
        before = [(part.snapshot().data, part.snapshot().hypers) for part in parts]

        def load(kept: Any = kept, path: Any = path, new: Any = new, parts: Any = parts, before: Any = before) -> Any:
            try:
                kept.load_state_dict(edited(state, path, new))
            except LaplaceError:
                for part, (data, hypers) in zip(parts, before, strict=True):
                    assert part.snapshot().data is data and part.snapshot().hypers is hypers
                return None
            return kept

        require_refused_or_right(load, x, label)


@pytest.mark.filterwarnings("ignore::laplace.errors.LaplaceWarning")
@pytest.mark.turns
@pytest.mark.parametrize(("weights", "structure", "likelihood"), CELLS)
def test_edited_states(weights: str, structure: str, likelihood: str) -> None:
    """The former posterior is as it was where they are refused."""
    model = grid.network(likelihood)
    check_edits(
        lambda: grid.make(weights, structure, likelihood, model=model),
        lambda la: _fitted(la, likelihood), likelihood, f"{weights} {structure} {likelihood}",
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore::laplace.errors.LaplaceWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_edited_states_of_other_posteriors(name: str) -> None:
    make, fit, likelihood = OTHERS[name]
    check_edits(make, fit, likelihood, name)


@pytest.mark.filterwarnings("ignore::laplace.errors.LaplaceWarning")
@pytest.mark.parametrize(("structure", "weights"), [(s, w) for w, s in grid.TURNS])
def test_edited_files(structure: str, weights: str, tmp_path: Path) -> None:
    """With the checksum that belongs to them: in the recipe, too, and in words about the tensors."""
    pytest.importorskip("safetensors")
    la, path, source = grid.fitted(weights, structure, "regression"), tmp_path / "la", random.Random(structure)
    la.save(path)
    whole, x, model = nested.read(path), grid.data("regression")[0], copied(la)
    every = [(place, name, new) for place, value in places(whole) for name, new in edits(value).items()]
    of_recipe = [edit for edit in every if edit[0][:1] == ("recipe",)]
    chosen = source.sample(every, EDITS // 3) + source.sample(of_recipe, min(EDITS // 3, len(of_recipe)))
    for place, name, new in chosen:
        try:
            nested.write(path, edited(whole, place, new))
        except (InvalidType, NotImplementedError, TypeError):  # of edits that no file holds
            continue
        require_refused_or_right(lambda: laplace.load(path, model), x, f"{'.'.join(map(str, place))}: {name}")
