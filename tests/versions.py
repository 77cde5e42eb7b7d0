"""Tests of what an older PyTorch lacks are skipped there, with a reason."""

from __future__ import annotations

import pytest
import torch

_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def newer_torch(reason: str) -> pytest.MarkDecorator:
    """Skips tests with a PyTorch that is older than the one of `constraints.txt`.

    Args:
        reason: What goes wrong with PyTorch 2.4 or 2.6.
    """
    return pytest.mark.skipif(_VERSION < (2, 13), reason=f"with PyTorch 2.4 or 2.6 {reason}")
