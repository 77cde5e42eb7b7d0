"""Speed and memory as ratios: every cost is compared with a plain computation timed in the same run."""
