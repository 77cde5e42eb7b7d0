"""Refinement of the linearised model (Immer et al., 2021, appendix A.3.2): its mode, or a variational Gaussian."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laplace.core.lazy import attach

if not TYPE_CHECKING:
    __getattr__, __dir__ = attach(__name__, {})

__all__: list[str] = []
