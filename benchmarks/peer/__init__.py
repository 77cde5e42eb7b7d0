"""Side by side with laplace-torch: the same work by both packages in turn, `python -m benchmarks --peer PYTHON`."""
