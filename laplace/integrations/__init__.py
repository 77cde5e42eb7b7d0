"""Bridges to other packages, each imported where it is used."""
