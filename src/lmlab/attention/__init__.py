"""Attention functions with one contract, found by name."""
