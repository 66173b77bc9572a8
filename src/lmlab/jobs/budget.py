"""Two limits of time: for a study, whose later points are skipped, and for a point that hangs.

The workflow sets an environment variable when it starts: the study's deadline as seconds since the
epoch, which processes on other nodes understand too, and the budget. A point that begins later is
recorded as unsupported, so that the report says why it has no numbers; the next run measures it.
Without the variable there is no budget.

A point that has not ended after another limit never will: a kernel does not return, a message does
not arrive. It is killed and recorded as failed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "LMLAB_DEADLINE"
PREFIX = "skipped: "
LIMIT = "LMLAB_POINT_LIMIT_S"
DEFAULT_LIMIT_S = "900"  # the longest points of the full study take three minutes
# A result without numbers is small; larger files need not be read to know that they have some.
_SMALL_BYTES = 20_000


def limit_s() -> float:
    """Seconds that a point in one process may take once it has the device."""
    text = os.environ.get(LIMIT, DEFAULT_LIMIT_S)
    try:
        if 0 < float(text) < float("inf"):
            return float(text)
    except ValueError:
        pass
    raise ValueError(f"{LIMIT} = {text!r}; allowed: seconds above 0")


@contextmanager
def enforced(seconds: float) -> Iterator[None]:
    """Have the kernel kill this process if the block takes longer, whatever it waits for."""
    signal.setitimer(signal.ITIMER_REAL, seconds)  # 0: no limit
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def start(budget_s: float) -> None:
    """Begin a budget for this process and those it starts, unless one is running already."""
    os.environ.setdefault(VARIABLE, f"{time.time() + budget_s:.3f} {budget_s:g}")


def why_skipped() -> str | None:
    """A reason not to begin a point now."""
    deadline, _, budget_s = os.environ.get(VARIABLE, "").partition(" ")
    if not deadline or time.time() <= float(deadline):
        return None
    return f"{PREFIX}the study's time budget of {budget_s} s was used up"


def was_skipped(path: Path) -> bool:
    """Whether a result file holds a point that was skipped for lack of time."""
    if not path.exists() or path.stat().st_size > _SMALL_BYTES:
        return False
    try:
        return str(json.loads(path.read_text())["reason"]).startswith(PREFIX)
    except (ValueError, KeyError, TypeError):
        return False
