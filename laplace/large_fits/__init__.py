"""Fits to much data: by several processes, within the memory that there is, and of a random subset."""
