"""Attention functions with one contract, found by name.

The three names below are there for users; each is imported when it is first asked for, so that the
registry can be asked for names without torch, and nobody pays for a variant that is not used.
"""

import importlib
from typing import Any

_HOMES = {
    "FlashAttention": "lmlab.attention.flash",
    "FlashAttentionTiled": "lmlab.attention.tiled",
    "flash_attention": "lmlab.attention.flash",
}

__all__ = ["FlashAttention", "FlashAttentionTiled", "flash_attention"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
