"""Which weights are random: all, the last layer, or a subnetwork chosen by a mask."""
