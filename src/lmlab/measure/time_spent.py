"""How a point's time splits into measuring, compiling and the rest (setup, checks, waiting).

Code that reads a clock, a trace or the allocator runs inside `measuring`. Compile time comes from
the compilers' own timers, so it counts wherever compilation happens, and never as measuring.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Ledger:
    """Seconds spent in this process so far."""

    def __init__(self) -> None:
        self.measuring_s = 0.0
        self.triton_s = 0.0
        self.depth = 0

    def on_triton(self, *, times: Any, cache_hit: bool, **_: object) -> None:
        """Triton calls this after each compilation."""
        self.triton_s += 0.0 if cache_hit else times.total / 1e6

    def compiling_s(self) -> float:
        """Compile time as Triton and torch.compile report it."""
        return self.triton_s + self.dynamo_s()

    def dynamo_s(self) -> float:
        """Compile time of torch.compile; 0 if it was never imported."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        return float(dynamo.calculate_time_spent()["total_wall_time"]) if dynamo else 0.0


_LEDGER = _Ledger()


def watch_triton() -> None:
    """Start counting Triton's compile time."""
    from triton import knobs  # only where a GPU is measured

    knobs.compilation.listener = _LEDGER.on_triton


@contextmanager
def measuring() -> Iterator[None]:
    """Count the block as measuring, minus compilation inside it; blocks may nest."""
    began_s, compiled_s = time.perf_counter(), _LEDGER.compiling_s()
    _LEDGER.depth += 1
    try:
        yield
    finally:
        _LEDGER.depth -= 1
        if _LEDGER.depth == 0:
            compiled_s = _LEDGER.compiling_s() - compiled_s
            _LEDGER.measuring_s += max(time.perf_counter() - began_s - compiled_s, 0.0)


def spent_s() -> dict[str, float]:
    """Seconds that this process has spent measuring and compiling so far."""
    seconds = {"measuring": _LEDGER.measuring_s, "compiling": _LEDGER.compiling_s()}
    return {name: round(value, 3) for name, value in seconds.items()}
