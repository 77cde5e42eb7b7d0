"""From data to one frozen `Fit`."""

from typing import TYPE_CHECKING

from laplace.core.lazy import attach

if TYPE_CHECKING:
    from laplace.fitting.checks import (
        check_decay,
        check_override,
        check_weight,
        require_rereadable,
        warn_of_diagonals,
        warn_of_dropped,
        warn_of_repeated,
        warn_of_shards,
    )
    from laplace.fitting.fit import NO_DATA, Fit, accumulate
    from laplace.fitting.processes import without_padding
    from laplace.fitting.reading import FirstPass, ReadOptions, begin_reading
    from laplace.fitting.resuming import Resumable
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "laplace.fitting.checks": (
                "check_decay check_override check_weight require_rereadable warn_of_diagonals warn_of_dropped "
                "warn_of_repeated warn_of_shards"
            ),
            "laplace.fitting.fit": "NO_DATA Fit accumulate",
            "laplace.fitting.processes": "without_padding",
            "laplace.fitting.reading": "FirstPass ReadOptions begin_reading",
            "laplace.fitting.resuming": "Resumable",
        },
    )

__all__ = [
    "NO_DATA",
    "FirstPass",
    "Fit",
    "ReadOptions",
    "Resumable",
    "accumulate",
    "begin_reading",
    "check_decay",
    "check_override",
    "check_weight",
    "require_rereadable",
    "warn_of_diagonals",
    "warn_of_dropped",
    "warn_of_repeated",
    "warn_of_shards",
    "without_padding",
]
