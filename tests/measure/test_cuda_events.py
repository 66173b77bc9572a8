"""What the GPU clock queues around a call, on a fake CUDA: cold L2, no launch latency."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmlab.measure import cuda_events
from lmlab.measure.cuda_events import EventSampler

GPU = torch.device("cuda", 0)
MIB = 2**20


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces torch by a fake that logs what is queued; every event pair measures 1.5 ms."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, end: Any) -> float:
            return 1.5

    class Buffer:
        def __init__(self, size: int, **_: Any) -> None:
            log.append(f"buffer of {size // MIB} MiB")

        def zero_(self) -> None:
            log.append("flush")

    cuda = SimpleNamespace(
        Event=Event,
        synchronize=lambda device: log.append("synchronize"),
        device=nullcontext,
        _sleep=lambda cycles: log.append("sleep"),
        get_device_properties=lambda device: SimpleNamespace(L2_cache_size=200 * MIB),
    )
    monkeypatch.setattr(
        cuda_events, "torch", SimpleNamespace(cuda=cuda, empty=Buffer, uint8=torch.uint8)
    )
    return log


@pytest.mark.parametrize("flush", [True, False])
def test_the_cache_is_flushed_and_the_gpu_sleeps_before_each_timed_call(
    queue: list[str], flush: bool
) -> None:
    sampler = EventSampler(lambda: queue.append("call"), GPU, flush_cache=flush)
    assert queue.count("buffer of 400 MiB") == flush, "twice the L2"
    queue.clear()
    assert sampler(2) == [1.5, 1.5]
    one = ["sleep", "event", "call", "event"]
    assert queue == [*(["flush", *one] if flush else one)] * 2 + ["synchronize"]
