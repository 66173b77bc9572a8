"""Points that share an allocation of a cluster: when it breaks, what to show of it.

Snakemake then calls every point of the allocation failed, with ten lines on each: those that were
measured, those that had not begun, and the one that somebody is looking for. That one has
something in its log and no result. Where no point is to blame (the time was up, the node died),
the last lines of the allocation's own log say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

LAST_LINES = 8


def failure(error: Mapping[str, Any]) -> str:
    """Snakemake's report of a group that failed, in a few lines."""
    jobs, logs = error["job_error_info"], [Path(name) for name in error["aux_logs"]]
    where = f", see {', '.join(map(str, logs))}" if logs else ""
    said = [f"An allocation of {len(jobs)} point{'s' if len(jobs) > 1 else ''} failed{where}"]
    if not any(broke(job) for job in jobs):
        said += [line for log in logs for line in _last_lines(log)]
    return "\n".join(said)


def broke(job: Mapping[str, Any]) -> bool:
    """Whether a job of a failed group began, and gave nothing."""
    began = any(_holds_text(Path(name)) for name in job["log"])
    return began and not any(Path(name).exists() for name in job["output"])


def _holds_text(log: Path) -> bool:
    return log.is_file() and log.stat().st_size > 0


def _last_lines(log: Path) -> list[str]:
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return [f"    {line}" for line in lines[-LAST_LINES:]]
