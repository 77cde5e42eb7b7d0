"""Fixtures of MaldiDeepKit's tests, which its source archive lacks: small tables of spectra with labels."""

from __future__ import annotations

import numpy as np
import pytest


def _spectra(n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """48 spectra of 64 bins, with a peak for every class, and their labels."""
    draw = np.random.default_rng(0)
    y = np.arange(48) % n_classes
    x = draw.random((48, 64)).astype(np.float32)
    x[np.arange(48), 10 * (y + 1)] += 3.0
    return x, y


@pytest.fixture
def synthetic_binary() -> tuple[np.ndarray, np.ndarray]:
    return _spectra(2)


@pytest.fixture
def synthetic_multiclass() -> tuple[np.ndarray, np.ndarray]:
    return _spectra(3)
