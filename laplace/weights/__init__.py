"""Choices of the random weights: all, the last layer, or a subnetwork chosen by a mask."""

from laplace.core.registry import Registry
from laplace.weights.all_weights import AllWeights
from laplace.weights.base import Weights
from laplace.weights.last_layer import LastLayer
from laplace.weights.subnetwork import Subnetwork

WEIGHTS: Registry[type[Weights]] = Registry("subset_of_weights")
WEIGHTS.register("all")(AllWeights)
WEIGHTS.register("last_layer")(LastLayer)
WEIGHTS.register("subnetwork")(Subnetwork)

__all__ = ["WEIGHTS", "AllWeights", "LastLayer", "Subnetwork", "Weights"]
