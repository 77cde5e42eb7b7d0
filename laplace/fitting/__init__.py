"""From data to one frozen `Fit`, and the next posterior."""

from __future__ import annotations

from typing import Any

from laplace.core.registry import Registry

FITS: Registry[Any] = Registry("a fit")
"""Other ways to read the data than all of them here, and the check of memory: each by the option of `fit` for it."""
FITS.refer("group", "laplace.large_fits.processes:GroupReading")
FITS.refer("subset", "laplace.large_fits.subset:SubsetReading")
FITS.refer("memory", "laplace.large_fits.planning:MemoryCheck")
