"""What the GPU clock queues around a call, on a fake CUDA: cold L2, no launch latency."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmlab.measure import cuda_events
from lmlab.measure.cuda_events import EventSampler

MIB = 2**20


@pytest.mark.parametrize("flush", [True, False])
def test_the_cache_is_flushed_and_the_gpu_sleeps_before_each_timed_call(
    flush: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue: list[str] = []

    def log(entry: str) -> Any:
        return lambda *_: queue.append(entry)

    def buffer(size: int, **_: Any) -> Any:
        queue.append(f"buffer of {size // MIB} MiB")
        return SimpleNamespace(zero_=log("flush"))

    cuda = SimpleNamespace(
        Event=lambda enable_timing: SimpleNamespace(
            record=log("event"), elapsed_time=lambda end: 1.5 * enable_timing
        ),
        synchronize=log("synchronize"),
        device=nullcontext,
        _sleep=log("sleep"),
        get_device_properties=lambda device: SimpleNamespace(L2_cache_size=200 * MIB),
    )
    fake = SimpleNamespace(cuda=cuda, empty=buffer, uint8=torch.uint8)
    monkeypatch.setattr(cuda_events, "torch", fake)
    sampler = EventSampler(log("call"), torch.device("cuda", 0), flush_cache=flush)
    assert queue.count("buffer of 400 MiB") == flush, "twice the L2"
    queue.clear()
    assert sampler(2) == [1.5, 1.5]
    one = ["sleep", "event", "call", "event"]
    assert queue == [*(["flush", *one] if flush else one)] * 2 + ["synchronize"]
