"""From a Gaussian over the network's outputs to a distribution over targets."""
