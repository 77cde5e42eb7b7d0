"""Networks, data and posteriors drawn by a seed, against dense float64 oracles and against themselves."""
