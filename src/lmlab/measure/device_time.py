"""Device time: how long the GPU was busy in each phase of a step.

A small model leaves the GPU waiting for the host, and wall time then says more about the host than
about the model. The device time of a phase is the union of its kernel, copy and memset intervals;
it is reproducible across hosts, and its ratio to wall time shows who waits for whom.

Several steps run in one profiler session. The device is idle at every edge of a phase, so an
interval belongs to the phase in which it starts; the profiler's timestamps follow the host's clock.
A CPU has no device time: nothing is recorded there.

CUDA graphs provide a cross-check: the same kernels are captured and replayed. A graph is launched
as a whole, so the host cannot be late, and CUDA events time it without a profiler. Replay time
minus the replay's busy time is the gaps between kernels, which device time excludes; a difference
between the two busy times comes from the kernels themselves.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch.profiler import ProfilerActivity

from lmlab.measure.clock import TOTAL, synchronize
from lmlab.measure.intervals import Interval, interval, is_gpu_work, length, profiled_events
from lmlab.measure.records import Record, timed, value
from lmlab.measure.statistics import Measurement

PROFILED_STEPS = 5

Phases = Sequence[tuple[str, Callable[[], object]]]
Work = dict[str, list[list[Interval]]]
"""Intervals in which the GPU worked, in nanoseconds: by phase, one list per step."""


def device_times(
    phases: Phases, device: torch.device, *, prepare: Callable[[], object] = lambda: None
) -> dict[str, Measurement]:
    """Busy time of every phase and of the whole step; empty on a CPU."""
    return busy_times(profiled_work(phases, device, prepare=prepare))


def profiled_work(
    phases: Phases, device: torch.device, *, prepare: Callable[[], object] = lambda: None
) -> Work:
    """Run some steps under the profiler; `prepare` runs before each and belongs to no phase."""
    if device.type != "cuda":
        return {}
    edges: list[tuple[str, int, int]] = []

    def run_steps() -> None:
        for _ in range(PROFILED_STEPS):
            prepare()
            synchronize(device)
            for name, run in phases:
                started_ns = time.time_ns()
                run()
                synchronize(device)
                edges.append((name, started_ns, time.time_ns()))

    events = profiled_events(run_steps, device, [ProfilerActivity.CUDA])
    return by_phase(edges, [interval(event) for event in events if is_gpu_work(event, device)])


def by_phase(edges: Sequence[tuple[str, int, int]], intervals: Sequence[Interval]) -> Work:
    """Group the intervals by the phase and step in which they start."""
    ordered = sorted(intervals)
    work: Work = {}
    for name, *phase in edges:
        start, end = (bisect_left(ordered, (moment,)) for moment in phase)
        work.setdefault(name, []).append(ordered[start:end])
    return work


def busy_times(work: Mapping[str, Sequence[Sequence[Interval]]]) -> dict[str, Measurement]:
    """Statistics over the steps, by phase; the total is their sum, since phases do not overlap."""
    busy = {name: [length(step) / 1e6 for step in steps] for name, steps in work.items()}
    if busy:
        busy[TOTAL] = [sum(step) for step in zip(*busy.values(), strict=True)]
    return {
        name: Measurement(
            samples_ms=tuple(samples),
            clock="device",
            stopped=f"{len(samples)} profiled steps",
        )
        for name, samples in busy.items()
    }


# As many replays as fit into SECONDS, but within these bounds.
FEWEST_REPLAYS, REPLAYS, SECONDS = 5, 20, 2.0
WARMUPS = 3

Graphs = dict[str, torch.cuda.CUDAGraph]


def graph_replay_records(
    phases: Phases, device: torch.device, *, prepare: Callable[[], object]
) -> list[Record]:
    """Capture every phase, then time and profile the replays; nothing on a CPU. Records by phase:
    `graph_replay_time` (CUDA events), `graph_busy_time` (device), `kernels`."""
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
    """Time replays queued back to back, so that the device never waits for a launch; the first,
    for which it does wait, is dropped."""
    (first,) = _replayed(graphs, 1, device)
    fitting = int(1e3 * SECONDS / sum(first))
    samples = _replayed(graphs, 1 + max(FEWEST_REPLAYS, min(REPLAYS, fitting)), device)[1:]
    return {
        name: Measurement(samples_ms=found, clock="events", stopped=f"{len(found)} replays")
        for name, found in zip(graphs, zip(*samples, strict=True), strict=True)
    }


def _replayed(graphs: Graphs, count: int, device: torch.device) -> list[list[float]]:
    """Replay all graphs `count` times; the milliseconds per graph of each repetition."""
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
