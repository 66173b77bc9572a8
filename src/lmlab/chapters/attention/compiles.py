"""Variants that compile themselves, once per shape: seconds each."""

COMPILES = frozenset({"compiled", "flex", "flash_compiled_backward"})
