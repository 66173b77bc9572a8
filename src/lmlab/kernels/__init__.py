"""Triton kernels and their launch configurations, nothing else."""
