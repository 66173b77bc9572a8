"""Triton kernels: attention with its launch configurations, AdamW, the fused loss, and the small
programs of the chapter on principles.

Kernel parameters are untyped in Python: Triton types them at every call.
"""
