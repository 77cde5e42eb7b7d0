"""The independent truth: dense float64 oracles that share no code with the library."""
