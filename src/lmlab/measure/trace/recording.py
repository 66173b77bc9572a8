"""Runs a function once under a profiler: PyTorch's own, or Nsight Systems around the process.

The first session of PyTorch's profiler on a GPU takes seconds and loses kernels while CUPTI starts,
so an empty session comes first. nsys is started around the whole program and waits for the CUDA
profiler API; its report exists once the program has ended. The caller must warm up and keep the run
short: one train step of a large model already has a hundred thousand events.

Never take a profiled run as a timing. The profiler adds microseconds to every operator on the host,
which stretches the gaps between kernels; the kernels themselves keep their time.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as session

from lmlab.measure.clock import synchronize
from lmlab.measure.trace import chrome_trace, ranges
from lmlab.measure.trace.frames import Trace
from lmlab.measure.trace.nsys_command import UNDER_NSYS


def profile(
    function: Callable[[], object], *, device: torch.device, keep_as: Path | None = None
) -> Trace:
    """Run `function` once under the PyTorch profiler; optionally keep the trace file.

    The file opens in a browser's trace viewer and is gzipped if its name ends in .gz.
    """
    with TemporaryDirectory() as folder:
        file = keep_as or Path(folder) / "trace.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            with session(activities=activities):
                synchronize(device)
        synchronize(device)
        with ranges.recording(), session(activities=activities) as profiler:
            function()
            synchronize(device)
        profiler.export_chrome_trace(str(file))
        tool = f"torch profiler {torch.__version__}"
        return chrome_trace.read(file, on_cpu=device.type == "cpu", tool=tool)


def under_nsys() -> bool:
    """Whether nsys records this process."""
    return os.environ.get(UNDER_NSYS) == "1"


def capture(function: Callable[[], object], *, device: torch.device) -> None:
    """Run `function` once as the only nsys capture range of this process."""
    synchronize(device)
    # Without a GPU, nsys waits for a capture that never starts.
    opened = torch.cuda.profiler.profile() if device.type == "cuda" else nullcontext()
    with opened, ranges.recording():
        function()
        synchronize(device)
