"""Small networks of the problem catalogue, one file per family."""
