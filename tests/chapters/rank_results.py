"""What tests of the pages about several ranks share: process groups, and rendering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmlab.report.page import Chapter, Report
from lmlab.study.files import ROOT


def group(world_size: int, *, gpus: int = 0) -> dict[str, Any]:
    """`data` with what a process group reports of itself."""
    own = gpus == world_size
    return {
        "ranks": {
            "backend": "nccl" if own else "gloo",
            "world_size": world_size,
            "device": "cuda" if gpus else "cpu",
            "gpus": gpus,
            "nnodes": 1,
            "threads": 1,
        }
    }


def render(chapter: Chapter, folder: Path, *others: Chapter) -> tuple[str, str]:
    """A chapter's front page sections and its page; fails if a part cannot be rendered."""
    chapters = {each.name: each for each in (chapter, *others)}
    report = Report(chapter.results, chapters, folder, ROOT / "report" / "templates", "full")
    faults = [fault for fault in report.write() if chapter.name in fault]
    assert faults == []
    front = (folder / "writeup.md").read_text()
    return front, (folder / "chapters" / f"{chapter.name}.md").read_text()
