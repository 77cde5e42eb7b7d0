"""Scripts of public projects that were written for laplace-torch, in small: the same calls, with numbers to hold."""
