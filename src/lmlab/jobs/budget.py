"""The time budget of a study: points that would begin after it is used up are not measured.

The workflow sets one environment variable when it starts: the deadline as seconds since the epoch,
which processes on other nodes understand too, and the budget. A point that begins later is recorded
as unsupported, so that the report says why it has no numbers; the next run measures it. Without the
variable there is no budget.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

VARIABLE = "LMLAB_DEADLINE"
PREFIX = "skipped: "
# A result without numbers is small; larger files need not be read to know that they have some.
_SMALL_BYTES = 20_000


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
