"""Packages that wrap laplace-torch, with this library in its place: `make clients`."""
