"""A chapter's pages from chosen results, and records of an outcome by their labels."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

from matplotlib.figure import Figure as Canvas

from lmlab.cli.report import page_of
from lmlab.jobs.outcome import Outcome
from lmlab.report.figure import Figure
from lmlab.report.frame import Results
from lmlab.report.page import Chapter, Report, build_chapters
from lmlab.study.files import TEMPLATES
from lmlab.study.results import Result


def found(outcome: Outcome | Result, quantity: str, **labels: Any) -> list[dict[str, Any]]:
    return [
        record
        for record in outcome.measurements
        if record["quantity"] == quantity and labels.items() <= record["labels"].items()
    ]


def value_of(outcome: Outcome | Result, quantity: str, **labels: Any) -> Any:
    (record,) = found(outcome, quantity, **labels)
    return record["value"]


def by(outcome: Outcome, label: str, quantity: str, **labels: Any) -> dict[Any, Any]:
    rows = found(outcome, quantity, **labels)
    return {record["labels"][label]: record["value"] for record in rows}


def built(results: Results, *names: str) -> dict[str, Chapter]:
    """Chapters from loaded results; a fault fails the test."""
    chapters, faults = build_chapters({name: page_of(name) for name in names}, results)
    assert faults == []
    return chapters


def rendered(
    folder: Path, results: Results, *names: str, draw: bool = True
) -> tuple[str, dict[str, str]]:
    """Front page and chapter pages of some chapters; a fault fails the test.

    Figures are composed but not written, which takes half the time; golden pages have them. Without
    `draw` only their data is prepared.
    """
    report = Report(results, built(results, *names), folder / "out", TEMPLATES)
    undrawn = patch.object(Figure, "draw", lambda figure, own, path: not figure.rows(own).empty)
    with patch.object(Canvas, "savefig") if draw else undrawn:
        faults = report.write()
    assert faults == [], faults
    pages = {name: (folder / "out" / "chapters" / f"{name}.md").read_text() for name in names}
    return (folder / "out" / "writeup.md").read_text(), pages


def answer(front: str, question: str) -> str:
    """The bold answer to a question of the front page."""
    return front.split(f"### {question}\n", 1)[1].split("\n### ", 1)[0].split("**")[1]
