"""Choices of the weights with a distribution: all, the last layer, or a subnetwork chosen by a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laplace.core.lazy import attach
from laplace.core.registry import Registry

if TYPE_CHECKING:
    from laplace.weights.base import Weights

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "laplace.weights.base": "AllWeights Subnetwork Weights",
        "laplace.weights.last_layer": "LastLayer",
    },
    own="WEIGHTS",
)

WEIGHTS: Registry[type[Weights]] = Registry("subset_of_weights")
WEIGHTS.refer("all", "laplace.weights.base:AllWeights")
WEIGHTS.refer("last_layer", "laplace.weights.last_layer:LastLayer")
WEIGHTS.refer("subnetwork", "laplace.weights.base:Subnetwork")
