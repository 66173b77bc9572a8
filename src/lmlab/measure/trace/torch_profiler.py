"""A run under PyTorch's profiler as frames: where nsys is not there, and on a CPU.

The profiler's own first session on a GPU takes seconds and loses the first kernels while CUPTI
starts, so an empty session goes before. The function is called once; warming up (kernels loaded,
shapes autotuned, memory held) is the caller's, as is keeping it short: the trace of one train step
of a large model already has a hundred thousand events.

A profiled run is never a timing. The profiler lengthens every operator on the host by microseconds,
which stretches the gaps between kernels; the kernels themselves keep their time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as session

from lmlab.measure.clock import synchronize
from lmlab.measure.trace import chrome_trace, ranges
from lmlab.measure.trace.frames import Trace


def profile(function: Callable[[], object], *, device: torch.device) -> Trace:
    """Run `function` once with its ranges recorded; the frames of what it did on `device`."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile_to(file, function, device=device)
        return chrome_trace.read(file, on_cpu=device.type == "cpu", tool=tool_name())


def tool_name() -> str:
    """The profiler and its version, for captions."""
    return f"torch profiler {torch.__version__}"


def profile_to(file: Path, function: Callable[[], object], *, device: torch.device) -> None:
    """The same, keeping the trace as a file that a browser can open; gzipped if named .gz."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        with session(activities=activities, acc_events=True):
            synchronize(device)
    synchronize(device)
    with ranges.recording(), session(activities=activities, acc_events=True) as profiler:
        function()
        synchronize(device)
    profiler.export_chrome_trace(str(file))
