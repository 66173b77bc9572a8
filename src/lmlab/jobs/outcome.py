"""How measuring a point can end: with numbers, or with a reason why there are none.

A gap in a table raises a question; "out of memory: asked for 40 GiB" answers it. So what a device
cannot do is recorded like any number. Only an interrupt leaves no result: a person or a scheduler
stopped the job, and the point is not to blame.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmlab.measure.records import Record
    from lmlab.study.results import Status

NOTHING_WRITTEN = 2  # exit status of a program that has no result to write
TOTAL = "total"
LONGEST_REASON = 300
# Signals that mean a process crashed, or that the kernel killed it. SIGINT and SIGTERM are requests
# to stop and leave the point unmeasured.
CRASHES = frozenset(
    getattr(signal, name)
    for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGKILL")
)


class Unsupported(Exception):
    """The device, or the model, cannot do what the point asks; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a point."""

    status: Status = "ok"
    reason: str | None = None
    measurements: Sequence[Record] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()

    @property
    def noisy(self) -> bool:
        """Judged by step totals if there are any: phases of microseconds are always noisy."""
        timed = [record for record in self.measurements if "noisy" in record]
        totals = [record for record in timed if record["labels"].get("phase") == TOTAL]
        return any(record["noisy"] for record in totals or timed)


def without_numbers(status: Status, reason: str) -> Outcome:
    """An outcome that only has a reason, cut to fit one line."""
    line = " ".join(reason.split()) or "no reason given"
    short = line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON - 3]}..."
    return Outcome(status=status, reason=short)


def death_reason(number: int) -> str:
    """The reason to record for a process that was killed by a signal."""
    name = signal.Signals(number).name
    hint = ", perhaps by the kernel because memory ran out" if name == "SIGKILL" else ""
    return f"process killed by {name}{hint}"
