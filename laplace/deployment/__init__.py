"""Predictions as plain modules of PyTorch, for programs that have no Laplace approximation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laplace.core.lazy import attach

if not TYPE_CHECKING:
    __getattr__, __dir__ = attach(__name__, {})

__all__: list[str] = []
