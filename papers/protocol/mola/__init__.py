"""The parts of `mixtures.py`: its tasks, methods, costs, claims and plot."""
