"""Samples of GPU time: two CUDA events around a call, cold cache, launch latency kept out.

Two things would spoil the time of a short kernel. Its inputs may still lie in the L2 from the
repetition before, which no caller in a real step would find there: so a buffer of at least twice
the L2 is zeroed before each repetition. And an event is stamped when the GPU reaches it, so if
the host is still preparing the launch when the start event fires, the GPU's idling is counted as
kernel time: so a kernel that only sleeps goes first. While it sleeps the host queues start event,
call and end event; when it wakes, all three are there, and the events bracket GPU time alone.
nvbench does the same with a kernel that spins until the host lets go; a sleep of known length
needs no extension and cannot deadlock, at the price of a bound: a call that takes the host longer
than that bound to queue (hundreds of launches) is partly launch time again, which for such a call
is the truth of the matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_FLUSH_BYTES_AT_LEAST = 256 * 2**20
# The sleep is counted in SM cycles. At 2 GHz, about as fast as any GPU clocks, it lasts as long as
# asked; at a lower clock longer, which does no harm.
_CYCLES_PER_S = 2e9
_SLEEP_AT_LEAST_S = 20e-6
_SLEEP_AT_MOST_S = 10e-3


class EventSampler:
    """Takes batches of samples by CUDA events; waits for the device once a batch."""

    def __init__(self, fn: Callable[[], object], device: torch.device, flush_cache: bool) -> None:
        self._fn = fn
        self._device = device
        self._flush = _flush_buffer(device) if flush_cache else None
        self._sleep_cycles = int(_CYCLES_PER_S * self._sleep_s())

    def __call__(self, count: int) -> list[float]:
        with torch.cuda.device(self._device):
            pairs = [self._queue_one() for _ in range(count)]
            torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) for start, end in pairs]

    def _queue_one(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        if self._flush is not None:
            self._flush.zero_()
        torch.cuda._sleep(self._sleep_cycles)
        start.record()
        self._fn()
        end.record()
        return start, end

    def _sleep_s(self) -> float:
        """How long to sleep: twice the host's time to queue one call, within the bounds above."""
        torch.cuda.synchronize(self._device)
        before = time.perf_counter()
        self._fn()
        queued_s = time.perf_counter() - before
        torch.cuda.synchronize(self._device)
        return min(max(2 * queued_s, _SLEEP_AT_LEAST_S), _SLEEP_AT_MOST_S)


def _flush_buffer(device: torch.device) -> torch.Tensor:
    """Memory that, once written, has pushed everything else out of the L2."""
    l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    size = max(2 * l2_bytes, _FLUSH_BYTES_AT_LEAST)
    return torch.empty(size, dtype=torch.uint8, device=device)
