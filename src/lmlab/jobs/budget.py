"""Time budgets for a study and its chapters, and a time limit per point.

The workflow stores its start time and the budgets (`budget_s` and `budgets_s` in config.yaml) in an
environment variable. Once the budget of the study or of a chapter is used up, further points are
recorded as unsupported; the next run measures them. A point still running after LMLAB_POINT_LIMIT_S
(a GPU kernel that does not return) is killed and recorded as failed.
"""

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "LMLAB_BUDGET"
SKIPPED_PREFIX = "skipped: "
LIMIT = "LMLAB_POINT_LIMIT_S"
DEFAULT_LIMIT_S = "900"  # the longest points of the full study take three minutes


def limit_s() -> float:
    """Seconds that a point in one process may take once it has the device."""
    text = os.environ.get(LIMIT, DEFAULT_LIMIT_S)
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise ValueError(f"{LIMIT} = {text!r}; allowed: seconds above 0")


@contextmanager
def enforced(seconds: float) -> Iterator[None]:
    """Have a timer kill this process if the block takes longer, whatever it waits for."""
    signal.setitimer(signal.ITIMER_REAL, seconds)  # 0: no limit
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def start(study_s: float, chapters_s: Mapping[str, float]) -> None:
    """Begin a budget for this process and those it starts, unless one is running already."""
    plan = {"began": time.time(), "study_s": study_s, "chapters_s": chapters_s}
    os.environ.setdefault(VARIABLE, json.dumps(plan))


def why_skipped(chapter: str, out: Path) -> str | None:
    """Why a point of the chapter is skipped, or None; `out` is the path of its result."""
    plan = json.loads(os.environ.get(VARIABLE, "null"))
    if plan is None:
        return None
    if time.time() > plan["began"] + plan["study_s"]:
        return f"{SKIPPED_PREFIX}the study's time budget of {plan['study_s']:g} s was used up"
    budget_s = plan["chapters_s"].get(chapter)
    folder = next((folder for folder in out.parents if folder.name == chapter), None)
    if not budget_s or not folder:
        return None
    used_s = sum(_seconds(path, plan["began"]) for path in folder.rglob("*.json"))
    if used_s < budget_s:
        return None
    return f"{SKIPPED_PREFIX}the chapter's time budget of {budget_s:g} s was used up"


def _seconds(path: Path, began: float) -> float:
    """The time a result took, if written since `began`; another job may be replacing the file."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if path.stat().st_mtime >= began:
            return float(json.loads(path.read_text())["elapsed_s"])
    return 0.0
