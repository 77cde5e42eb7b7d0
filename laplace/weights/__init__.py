"""Choices of the random weights: all, the last layer, or a subnetwork chosen by a mask."""
