"""The library beside laplace-torch: one script, run under either package, and what comes of it."""
