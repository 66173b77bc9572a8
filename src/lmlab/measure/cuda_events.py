"""Samples of GPU time: CUDA events around a call, with a cold L2 and without launch latency.

Two effects would distort the time of a short kernel. Its inputs may still be in the L2 from the
previous repetition, unlike in a real step; so a buffer of at least twice the L2 is zeroed before
each repetition. And an event is stamped when the GPU reaches it: if the host is still preparing the
launch when the start event fires, the GPU's idle time counts as kernel time. So a kernel that only
sleeps runs first; meanwhile the host queues start event, call and end event, and the events then
bracket GPU time alone.

nvbench does the same with a kernel that spins until the host releases it. A sleep of fixed length
needs no extension and cannot deadlock, but it is bounded: a call that takes the host longer to
queue (hundreds of launches) includes some launch time again, which is realistic for such a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_MIN_FLUSH_BYTES = 256 * 2**20
# The sleep is counted in SM cycles. At 2 GHz, about the highest clock of any GPU, it lasts as long
# as requested; at a lower clock longer, which does no harm.
_CYCLES_PER_S = 2e9
_MIN_SLEEP_S = 20e-6
_MAX_SLEEP_S = 10e-3


class EventSampler:
    """Takes batches of samples by CUDA events; synchronizes once per batch."""

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
        """Twice the time the host needs to queue one call, within the bounds above."""
        torch.cuda.synchronize(self._device)
        before = time.perf_counter()
        self._fn()
        queued_s = time.perf_counter() - before
        torch.cuda.synchronize(self._device)
        return min(max(2 * queued_s, _MIN_SLEEP_S), _MAX_SLEEP_S)


def _flush_buffer(device: torch.device) -> torch.Tensor:
    """Memory that evicts everything else from the L2 when it is written."""
    l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    size = max(2 * l2_bytes, _MIN_FLUSH_BYTES)
    return torch.empty(size, dtype=torch.uint8, device=device)
