"""Fits in a group of processes, each of which sees its own data."""

from __future__ import annotations

from torch import distributed

from laplace.errors import ApproximationWarning, warn


def warn_of_shards() -> None:
    """Warns in a process group of several ranks, over which fits are not summed.

    Warns:
        ApproximationWarning: There is such a group.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    ranks = distributed.get_world_size()
    if ranks > 1:
        warn(
            f"this process is one of {ranks} in a group, and every process fits the data that its own loader gives: "
            "nothing is summed over processes. With a loader of a shard (DistributedSampler), posterior, evidence and "
            "number of data are those of the shard. Give the loader all the data, or fit in one process.",
            ApproximationWarning,
        )
