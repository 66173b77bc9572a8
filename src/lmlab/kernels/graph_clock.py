"""Device time without host overhead: capture several calls in a CUDA graph and time its replay.

A short kernel takes less time than its launch, so events around a call would time the host. Inputs
stay in the L2 from one call to the next if they fit.
"""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]
ROUNDS, GRAPH_MS, MAX_CALLS = 7, 1.0, 16


@dataclass(frozen=True)
class Recording:
    """A graph of several calls; `call` keeps the tensors that the graph reads alive."""

    call: Call
    count: int
    graph: torch.cuda.CUDAGraph


def record(call: Call) -> Recording:
    """Capture enough calls to time; the current stream must not be the default stream."""
    for _ in range(3):
        call()
    once_ms = replay_ms(_capture(call, 1))
    return _capture(call, max(1, min(MAX_CALLS, round(GRAPH_MS / max(once_ms, 1e-3)))))


def _capture(call: Call, count: int) -> Recording:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(count):
            call()
    return Recording(call, count, graph)


def replay_ms(recording: Recording) -> float:
    """Time per call of one replay, after a warm-up replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    recording.graph.replay()
    start.record()
    recording.graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / recording.count


def medians_ms(recordings: Sequence[Recording], rounds: int = ROUNDS) -> list[float]:
    """Median time per call of each recording. Every round is in random order, because a recording
    heats the GPU for the next one."""
    times: list[list[float]] = [[] for _ in recordings]
    order = random.Random(0)
    for _ in range(rounds):
        for place in order.sample(range(len(recordings)), len(recordings)):
            times[place].append(replay_ms(recordings[place]))
    return [statistics.median(found) for found in times]
