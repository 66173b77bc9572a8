"""A clock that only the measured code advances, so that tests do not depend on real time."""

from __future__ import annotations


class FakeTime:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now_ns = 0

    def pass_ms(self, milliseconds: float) -> None:
        self.now_ns += round(milliseconds * 1e6)

    def perf_counter(self) -> float:
        return self.now_ns / 1e9

    def perf_counter_ns(self) -> int:
        return self.now_ns
