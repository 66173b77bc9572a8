"""Words of the profile chapter: modes, families and parts as a reader calls them, and units."""

from __future__ import annotations

import pandas as pd

MODES = ("forward", "forward_backward", "train_step")
MODE_NAMES = {
    "forward": "forward",
    "forward_backward": "forward and backward",
    "train_step": "train step",
}
RUN_NAMES = {
    "forward": "a forward pass",
    "forward_backward": "a forward and backward pass",
    "train_step": "a train step",
}
MATMULS = ("matmul_tensor_core", "matmul_simt", "matmul")
FAMILIES = (
    *MATMULS, "softmax", "elementwise", "reduction", "copy", "communication", "optimizer", "other",
)  # fmt: skip
FAMILY_NAMES = {
    "matmul_tensor_core": "matmul, tensor cores",
    "matmul_simt": "matmul, SIMT cores",
}
PARTS = ("scores", "scale_and_mask", "softmax", "output")
PART_NAMES = {
    "scores": "scores QKᵀ",
    "scale_and_mask": "scale and mask",
    "softmax": "softmax",
    "output": "output PV",
}

PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}


def prefix(values: pd.Series) -> str:
    """The prefix in which the largest of some numbers is at least one."""
    most = values.max()
    return next((name for name, one in PREFIXES.items() if most >= one), "k")


def part_title(part: str) -> str:
    """A part's name with a capital, its formula as it is."""
    name = PART_NAMES[part]
    return name[0].upper() + name[1:]
