"""What the attention chapter claims of a small study that a test has altered."""

from __future__ import annotations

from functools import cache
from typing import Any

from lmlab.study.points import Point
from lmlab.writeup.findings.attention import findings
from tests.writeup.small_attention import (
    STUDY,
    Change,
    collected,
    study,
)

TOPICS = {
    **dict.fromkeys(("out_of_memory", "account"), "naive"),
    **dict.fromkeys(("growth_sequence", "growth_head_dim"), "naive"),
    **dict.fromkeys(("flash_wins", "not_slower", "growth_flash", "limit"), "benchmark"),
    **{"tiles": "tiles", "leaderboard": "leaderboard", "model_attention": "model"},
}
"""What a finding is made from: the rest of the chapter need not be made for it."""

OOM = ("oom", "asked for 128 GiB, 9 GiB free")


@cache
def plain() -> dict[str, str]:
    """Of the small study as it is, which most tests ask for."""
    return findings(collected())


def told(name: str, change: Change | None = None, device: str = "cuda", **topics: Any) -> str:
    if change is None and device == "cuda" and not topics:
        return plain()[name]
    made = collected(change, study(**topics) if topics else STUDY, device)
    topic = TOPICS.get(name)
    rows = [row for row in made.rows if topic in {None, row.point.parameters["topic"]}]
    return findings(type(made)(**{**vars(made), "rows": rows}))[name]


def all_ok(point: Point, values: dict[str, Any]) -> bool | None:
    """Leaves out the shape that is there to not fit."""
    return False if values["status"] == "oom" else None


def only(**where: Any) -> Change:
    """Leaves out every point with other parameters."""

    def change(point: Point, values: dict[str, Any]) -> bool | None:
        return None if where.items() <= point.parameters.items() else False

    return change
