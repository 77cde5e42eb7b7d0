"""Questions about a posterior, one module each: functions of the object that users hold.

They use what is public, and what is documented for extenders: the posterior as a value (`la.snapshot()`), its engine,
Jacobians, precision and likelihood. Nothing else of the library imports them: `laplace.draw` and the other names are
imported when they are first read.
"""

from laplace.core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
