"""Attention variants behind one interface, selected by name.

The public names below are imported on first use, so the registry can be queried without torch and
an unused variant costs nothing.
"""

import importlib
from typing import Any

_MODULES = {
    "FlashAttention": "lmlab.attention.flash",
    "FlashAttentionTiled": "lmlab.attention.tiled",
    "flash_attention": "lmlab.attention.flash",
}

__all__ = ["FlashAttention", "FlashAttentionTiled", "flash_attention"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
