"""Foundations: batches, flat parameter vectors, Gaussians, random numbers, memory; nothing here knows a posterior."""
