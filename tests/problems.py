"""The catalogue of problems: small float64 networks with data, one for each thing that can go wrong.

Every test that is generated over networks takes its cases from here, by tags:

* the likelihood (`regression`, `classification`, `bernoulli`, `reward_modeling`, `poisson`, `heteroscedastic`);
* `kfac`: every trainable parameter belongs to a Linear or Conv module that is called once, so that
  `tests.reference.kfac` knows its Kronecker factors; `shared` if positions share weights, else expand = reduce;
* `linear`: the outputs are affine in the parameters; `single_output`: C = 1; `frozen`: some parameters are;
* the traits that the names speak of (`conv`, `norm`, `attention`, `recurrent`, `tied`, `reused`, `pair`, …).
"""

from __future__ import annotations

from tests.catalogue import convolution, dense, sequence
from tests.catalogue.problem import PROBLEMS, Problem

__all__ = ["PROBLEMS", "Problem", "get", "problems"]


def problems(*tags: str, without: tuple[str, ...] = ()) -> list[Problem]:
    """Problems that have all the tags and none of `without`, in the order of the catalogue.

    Raises:
        KeyError: A tag that no problem has, so that a typing error cannot select nothing in silence.
    """
    known = frozenset().union(*(problem.tags for problem in PROBLEMS.values()))
    unknown = (set(tags) | set(without)) - known
    if unknown:
        raise KeyError(f"no problem has the tags {sorted(unknown)}; there are {sorted(known)}")
    return [p for p in PROBLEMS.values() if p.tags.issuperset(tags) and p.tags.isdisjoint(without)]


def get(name: str) -> Problem:
    """The problem of that name."""
    return PROBLEMS[name]


def _register() -> None:
    if not PROBLEMS:
        dense.register()
        convolution.register()
        sequence.register()


_register()
