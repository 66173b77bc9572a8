"""A run that Nsight Systems records from outside: this process only says from when to when.

nsys was started around the whole program and waits for the CUDA profiler API; what lies between
start and stop goes into its report, which exists only after the program has ended. Importing,
building the model and warming up are therefore not in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from lmlab.measure.clock import synchronize
from lmlab.measure.trace import ranges
from lmlab.measure.trace.nsys_command import UNDER_NSYS


def under_nsys() -> bool:
    """Whether nsys records this process."""
    return os.environ.get(UNDER_NSYS) == "1"


def capture(function: Callable[[], object], *, device: torch.device) -> None:
    """Run `function` once with its ranges recorded, as the one capture of this process."""
    synchronize(device)
    on_gpu = device.type == "cuda"  # without one, nsys waits for a capture that never comes
    if on_gpu:
        torch.cuda.profiler.start()
    try:
        with ranges.recording():
            function()
            synchronize(device)
    finally:
        if on_gpu:
            torch.cuda.profiler.stop()
