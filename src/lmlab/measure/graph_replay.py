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
from itertools import pairwise

import torch

from lmlab.measure.clock import synchronize
from lmlab.measure.device_time import Phases, busy_times, profiled_work
from lmlab.measure.records import Record, timed, value
from lmlab.measure.statistics import Measurement

# As many replays as fit into so many seconds, within these bounds.
FEWEST_REPLAYS, REPLAYS, SECONDS = 5, 20, 2.0
WARMUPS = 3

Graphs = dict[str, torch.cuda.CUDAGraph]


def graph_replay_records(
    phases: Phases, device: torch.device, *, prepare: Callable[[], object]
) -> list[Record]:
    """Capture every phase, then time and profile the replays; nothing on a CPU."""
    if device.type != "cuda":
        return []
    graphs = capture(phases, device, prepare)
    replays = replay_times(graphs, device)
    work = profiled_work([(name, graph.replay) for name, graph in graphs.items()], device)
    busy = busy_times(work)
    records = []
    for phase, found in replays.items():
        records.append(timed(found, "graph_replay_time", phase=phase))
        records.append(timed(busy[phase], "graph_busy_time", phase=phase))
        records.append(value("kernels", len(work[phase][-1]), "", phase=phase))
    return records


def capture(phases: Phases, device: torch.device, prepare: Callable[[], object]) -> Graphs:
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
    graphs = {name: torch.cuda.CUDAGraph() for name, _ in phases}
    for name, run in phases:
        with torch.cuda.graph(graphs[name], pool=pool, stream=stream):
            run()
    return graphs


def replay_times(graphs: Graphs, device: torch.device) -> dict[str, Measurement]:
    """Replays queued back to back, so that the device never waits for a launch; the first, which
    it does wait for, is left out."""
    (first,) = _replayed(graphs, 1, device)
    fitting = int(1e3 * SECONDS / sum(first))
    samples = _replayed(graphs, 1 + max(FEWEST_REPLAYS, min(REPLAYS, fitting)), device)[1:]
    return {
        name: Measurement(
            samples_ms=found, clock="events", cache="warm", stopped=f"{len(found)} replays"
        )
        for name, found in zip(graphs, zip(*samples, strict=True), strict=True)
    }


def _replayed(graphs: Graphs, count: int, device: torch.device) -> list[list[float]]:
    """Milliseconds of each graph, for each time that all of them are replayed."""
    edges = []
    for _ in range(count):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]
        events[0].record()
        for event, graph in zip(events[1:], graphs.values(), strict=True):
            graph.replay()
            event.record()
        edges.append(events)
    synchronize(device)
    return [[a.elapsed_time(b) for a, b in pairwise(events)] for events in edges]
