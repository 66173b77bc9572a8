"""Triton kernels: attention and its launch configurations, AdamW, the fused loss, and the small
kernels of the `principles` chapter.

Kernel parameters have no Python annotations: Triton infers their types at each call.
"""
