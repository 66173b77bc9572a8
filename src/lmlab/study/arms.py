"""The arms of a result, several variants raced in one point, and what became of each.

A point is ok as long as one of its arms is, so an arm that broke shows only in what the result
keeps of its arms. Where no arm is ok the point's own reason names them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Arm = Mapping[str, Any]

FAILED = "failed"


def without_a_time(data: Mapping[str, Any]) -> list[str]:
    """A line for each arm that gave no times: out of memory, over its cap, unsupported, failed."""
    return [_told(name, arm) for name, arm in _arms(data) if _status(arm) != "ok"]


def failed_arms(data: Mapping[str, Any]) -> list[str]:
    """A line for each arm whose code broke or whose numbers are wrong."""
    return [_told(name, arm) for name, arm in _arms(data) if _status(arm) == FAILED]


def _arms(data: Mapping[str, Any]) -> Iterator[tuple[str, Arm]]:
    """Names and arms; some chapters keep a mapping, some a list."""
    arms = data.get("arms", {})
    yield from (
        arms.items() if isinstance(arms, Mapping) else ((arm.get("name"), arm) for arm in arms)
    )


def _status(arm: Arm) -> str:
    return str(arm.get("status", "ok"))


def _told(name: str, arm: Arm) -> str:
    return f"{name}: {arm['status']}: {arm['reason']}"
