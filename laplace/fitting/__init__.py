"""From data to one frozen `Fit`."""

from laplace.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
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
