"""`ParametricLaplace`, layer by layer: hyper-parameters, fit, moments, predictions, and what users call."""
