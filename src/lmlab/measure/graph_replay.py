"""Device time checked by another method: the same kernels replayed as a CUDA graph.

A captured graph is launched as a whole, so the host cannot be late, and CUDA events around its
replay time the device without any profiler. What remains between the two is explained by two more
numbers: `graph_busy_time`, the union of kernel intervals of a profiled replay, and `kernels`. The
difference between a replay and its own busy time is the pauses between kernels, of which device
time knows nothing; the difference between the busy times is the kernels themselves.

Records by phase: `graph_replay_time` (CUDA events), `graph_busy_time` (device), `kernels`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lmlab.measure.clock import TOTAL, synchronize
from lmlab.measure.device_time import PROFILED_STEPS, Phases, measurements, profiled
from lmlab.measure.records import Record, timed, value
from lmlab.measure.statistics import Measurement

# As many replays as fit into so many seconds, within these bounds.
FEWEST_REPLAYS, REPLAYS, SECONDS = 5, 20, 2.0
WARMUPS = 3


def graph_replay_records(
    phases: Phases, device: torch.device, *, prepare: Callable[[], object]
) -> list[Record]:
    """Capture every phase, then time and profile the replays; nothing on a CPU."""
    if device.type != "cuda":
        return []
    graphs = capture(phases, device, prepare)
    replays = replay_times(graphs, device)
    runs = [(name, graph.replay) for name, graph in graphs.items()]
    profiles = profiled(runs, device, prepare=lambda: None, steps=PROFILED_STEPS)
    busy = measurements(profiles)
    kernels = {each.phase: len(each.work) for each in profiles}
    return [
        *(timed(found, "graph_replay_time", phase=phase) for phase, found in replays.items()),
        *(timed(busy[phase], "graph_busy_time", phase=phase) for phase in replays),
        *(value("kernels", count, "", phase=phase) for phase, count in kernels.items()),
    ]


def capture(
    phases: Phases, device: torch.device, prepare: Callable[[], object]
) -> dict[str, torch.cuda.CUDAGraph]:
    """One graph per phase. They share a memory pool, so they must be replayed in this order."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARMUPS):  # libraries allocate their workspaces once per stream
            prepare()
            for _, run in phases:
                run()
        prepare()
    synchronize(device)
    pool = torch.cuda.graph_pool_handle()
    graphs = {}
    for name, run in phases:
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], pool=pool, stream=stream):
            run()
    return graphs


def replay_times(
    graphs: dict[str, torch.cuda.CUDAGraph], device: torch.device
) -> dict[str, Measurement]:
    """Replays queued back to back, so that the device never waits for a launch; the first, which
    it does wait for, is left out."""
    (first,) = _queued(graphs, 1, device)
    count = max(FEWEST_REPLAYS, min(REPLAYS, int(1e3 * SECONDS / first[0].elapsed_time(first[-1]))))
    edges = _queued(graphs, count + 1, device)[1:]
    samples = {
        name: [events[i].elapsed_time(events[i + 1]) for events in edges]
        for i, name in enumerate(graphs)
    }
    samples[TOTAL] = [events[0].elapsed_time(events[-1]) for events in edges]
    return {
        name: Measurement(
            samples_ms=tuple(found), clock="events", cache="warm", stopped=f"{count} replays"
        )
        for name, found in samples.items()
    }


def _queued(
    graphs: dict[str, torch.cuda.CUDAGraph], count: int, device: torch.device
) -> list[list[torch.cuda.Event]]:
    """Replay all graphs a number of times; the events before, between and after them."""
    edges = []
    for _ in range(count):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]
        events[0].record()
        for event, graph in zip(events[1:], graphs.values(), strict=True):
            graph.replay()
            event.record()
        edges.append(events)
    synchronize(device)
    return edges
