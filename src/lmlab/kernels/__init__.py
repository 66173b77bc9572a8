"""Triton kernels for attention, their launch configurations and launches.

Kernel parameters are untyped in Python: Triton types them at every call.
"""
