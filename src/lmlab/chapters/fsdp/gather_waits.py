"""How long each block waits for its weights in FSDP: a watch on the gathers of one model.

A block is what is gathered in one message; an embedding or a head is one by itself. A gather that
has ended before its block needs it costs nothing. Whether it has shows at one place, where the
first layer of the block asks for its weights (`FSDPGroup.finish_gather`), and the cost is how long
the device is then idle. On a GPU that is read from two CUDA events around the call, on the
stream that computes: a host that waits and a stream that waits both show there, and so does the
copy of each matrix out of the message. On a CPU it is the host's clock. A gather that is not even
under way when its block asks (nothing was forecast, as in a first step) is waited for in full. One
whose block ended forward and begins backward is there still, and not waited for at all.
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

# A call that finds its weights there takes this long at most: longer is waiting.
NO_WAIT_MS = 0.2


@dataclass
class GatherWatch:
    """Waits by phase and block, in the order in which blocks asked."""

    device: torch.device
    waits_ms: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    _pending: list[tuple[tuple[str, str], Any, Any]] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time every wait while the context lasts."""
        original = FSDPGroup.finish_gather

        def timed(group: FSDPGroup) -> None:
            self._time(group, original)

        FSDPGroup.finish_gather = timed  # type: ignore[method-assign, assignment]
        try:
            yield
            self._settle()
        finally:
            FSDPGroup.finish_gather = original  # type: ignore[method-assign]

    def _time(self, group: FSDPGroup, finish: Callable[[FSDPGroup], None]) -> None:
        key = (BACKWARD if in_backward() else FORWARD, group.name)
        before = self._now()
        finish(group)
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

    def to_json(self) -> list[dict[str, Any]]:
        """The median wait of each block, under `layer`, in each phase."""
        return [
            {"phase": phase, "layer": layer, "wait_ms": statistics.median(waits)}
            for (phase, layer), waits in self.waits_ms.items()
        ]
