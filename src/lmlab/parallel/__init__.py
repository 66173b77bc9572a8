"""Training one model on several processes: data parallelism, sharded optimizer state, FSDP.

Every rank runs the same program on its own part of the batch. What the variants differ in is what
each rank keeps and when ranks talk:

    NaiveDDP, FlatDDP             everything on every rank; gradients averaged after backward
    OverlappedDDP, BucketedDDP    the same, averaged while backward still runs
    ShardedOptimizer              optimizer state only for the parameters that a rank owns
    FSDP                          parameters, gradients and optimizer state cut into shards

All of them work on a process group that the caller has initialised, NCCL or gloo.

A public name imports its module when it is first asked for, and no import statement here names
one: importing this package imports no torch, and a measurement that runs one variant does not
become stale when another changes.
"""

import importlib
from typing import Any

_HOMES = {
    "NaiveDDP": "lmlab.parallel.after_backward",
    "FlatDDP": "lmlab.parallel.after_backward",
    "OverlappedDDP": "lmlab.parallel.during_backward",
    "BucketedDDP": "lmlab.parallel.during_backward",
    "ShardedOptimizer": "lmlab.parallel.sharded_optimizer",
    "FSDP": "lmlab.parallel.fsdp",
}


def __getattr__(name: str) -> Any:
    """The class of that name, imported now."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """What there is to import."""
    return sorted({*globals(), *_HOMES})
