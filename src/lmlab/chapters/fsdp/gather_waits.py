"""How long each block of an FSDP model waits for its weights.

A block is what is gathered in one message; an embedding or a head is one by itself. A gather that
ends before its block needs the weights costs nothing. The wait happens in one place, where the
first layer of the block asks for them (`FSDPGroup.finish_gather`). On a GPU it is measured with two
CUDA events around the call, on the compute stream: they cover a waiting host, a waiting stream, and
the copy of each matrix out of the message. On a CPU it is the host's clock. A gather that has not
even started (in a first step there is no forecast) is waited for in full. The block that ends
forward and begins backward keeps its weights and does not wait again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lmlab.measure.clock import synchronize
from lmlab.parallel.fsdp_group import FSDPGroup
from lmlab.parallel.hooks import in_backward

FORWARD, BACKWARD = "forward", "backward"


@dataclass
class GatherWatch:
    """Waits by phase and block, in the order in which blocks asked."""

    device: torch.device
    waits_ms: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    _pending: list[tuple[tuple[str, str], Any, Any]] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time every wait inside the context."""
        original = FSDPGroup.finish_gather

        def timed(bundle: FSDPGroup) -> None:
            self._time(bundle, original)

        FSDPGroup.finish_gather = timed  # type: ignore[method-assign, assignment]
        try:
            yield
            self._settle()
        finally:
            FSDPGroup.finish_gather = original  # type: ignore[method-assign]

    def _time(self, bundle: FSDPGroup, finish: Callable[[FSDPGroup], None]) -> None:
        key = (BACKWARD if in_backward() else FORWARD, bundle.name)
        before = self._now()
        finish(bundle)
        self._pending.append((key, before, self._now()))

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _settle(self) -> None:
        """Events can be read once the device has passed them."""
        synchronize(self.device)
        for key, before, after in self._pending:
            waited = (
                before.elapsed_time(after) if self.device.type == "cuda" else (after - before) * 1e3
            )
            self.waits_ms.setdefault(key, []).append(waited)
        self._pending.clear()

    def medians(self) -> dict[tuple[str, str], float]:
        """The median wait by phase and block."""
        return {key: statistics.median(waits) for key, waits in self.waits_ms.items()}
