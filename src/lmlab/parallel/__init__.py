"""Distributed training: data parallelism, sharded optimizer state and fully sharded models.

Every rank runs the same program on its own part of the batch. The classes differ in what each rank
stores and in when ranks communicate:

    NaiveDDP, FlatDDP             everything replicated; gradients averaged after backward
    OverlappedDDP, BucketedDDP    everything replicated; gradients averaged during backward
    ShardedOptimizer              optimizer state sharded by parameter (ZeRO stage 1)
    FSDP                          parameters, gradients and optimizer state sharded (ZeRO stage 3)

All of them use the default process group, which the caller has initialized with NCCL or gloo.

Names are imported on first use, and no import statement here names a submodule: importing this
package does not import torch, and a measurement of one class does not become stale when another
class changes.
"""

import importlib
from typing import Any

_MODULE_OF = {
    **dict.fromkeys(("NaiveDDP", "FlatDDP", "OverlappedDDP", "BucketedDDP"), "ddp"),
    "ShardedOptimizer": "sharded_optimizer",
    "FSDP": "fsdp",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
