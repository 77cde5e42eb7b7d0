"""Tests of the library; `tests.reference` holds the independent truth they compare with."""
