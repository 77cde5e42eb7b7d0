"""The entries of the problem catalogue, one file per family; `tests.problems` is the way in."""
