"""Pages: what templates see, escaping, and parts that cannot be rendered."""

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from lmlab.measure.records import value
from lmlab.report import provenance
from lmlab.report.compare import Compare
from lmlab.report.frame import Results
from lmlab.report.page import Report, answers_in, build_chapters
from lmlab.report.table import Table, time
from tests.report.study import result, small_study, time_record, written
from tests.report.test_figure import STEPS

TEMPLATES = {
    "preface.md.j2": "",
    "front.md.j2": "# {{ results.name }}\n\n"
    "{% for s in sections.values() %}\n{{ s }}\n{% endfor %}\n",
    "index.md.j2": "{% for slug, answer in answers.items() %}\n"
    "- {{ slug }}: {{ answer.sentence }}\n{% endfor %}\n{{ summary() }}\n",
    "steps.md.j2": "# {{ chapter.title }}\n\n{{ chapter.table('steps') }}\n\n"
    "{{ figure('steps') }}\n\n{{ provenance() }}\n",
    "front/steps.md.j2": "### Is it fast?\n\n**{{ chapter.facts.answer }} It is.**\n"
    "{{ figure('steps') }}\n",
}


TABLE = Table(title="T", rows=["size", "precision"], columns={"ms": time(phase="total")})


def page(**more: Any) -> ModuleType:
    declared = {
        "TITLE": "Steps",
        "TABLES": {"steps": TABLE},
        "FIGURES": {"steps": STEPS},
        "COMPARISONS": {
            "bf16": Compare(
                variant={"precision": "bf16"}, baseline={"precision": "fp32"}, on=["size"]
            )
        },
        "facts": lambda chapter: {"answer": "Yes."},
    }
    return cast(ModuleType, SimpleNamespace(**{**declared, **more}))


def report(folder: Path, results: Results, module: ModuleType) -> tuple[Report, list[str]]:
    for name, text in TEMPLATES.items():
        path = folder / "templates" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    chapters, faults = build_chapters({"steps": module}, results)
    return Report(results, chapters, folder / "out", folder / "templates"), faults


RAISING = Mock(side_effect=KeyError("no such column"))


@pytest.mark.parametrize(
    ("broken", "count"),
    [({"facts": RAISING}, 1), ({"derive": RAISING}, 1), ({"TABLES": {}}, 1), ({"FIGURES": {}}, 2)],
    ids=["facts", "derive", "table", "figure"],
)
def test_a_part_that_fails_costs_that_part(tmp_path: Path, broken: Any, count: int) -> None:
    made, faults = report(tmp_path, small_study(tmp_path / "results"), page(**broken))
    faults += made.write()
    assert len(faults) == count
    assert all("(page.py:" in line and "\n" not in line for line in faults)
    assert "# Test GPU" in (tmp_path / "out" / "writeup.md").read_text()


def test_text_from_results_is_escaped(tmp_path: Path) -> None:
    hostile = "<b>|*{{ 'zq' * 3 }}*|</b>\n# heading"
    records = [time_record([1.0], phase="total"), value("name", hostile, "")]
    named = result({"size": "a", "precision": "x"}, records)
    reason = hostile.replace("\n", " ")
    failed = result({"size": "b", "precision": "x"}, status="failed", reason=reason)
    results = written(tmp_path / "results", [named, failed])
    made, _ = report(tmp_path, results, page(facts=lambda chapter: {"answer": hostile}))
    assert made.write() == []
    for file in (tmp_path / "out").rglob("*.md"):
        text = file.read_text()
        assert "<b>" not in text
        assert "zqzqzq" not in text
        assert "\n# heading" not in text


def test_answers_are_the_first_sentences_in_bold() -> None:
    text = (
        "### Does it pay?\n\n**Yes, by 2.3x. Not\neverywhere.**\n\n## Setting\n\nPlain text.\n\n"
        "## Why?\n\n**Because.** And so on.\n"
    )
    answers = {link: answer["sentence"] for link, answer in answers_in(text, "a.md").items()}
    assert answers == {"a.md#does-it-pay": "Yes, by 2.3x.", "a.md#why": "Because."}


def test_results_that_no_commit_reproduces_are_marked_and_counted(tmp_path: Path) -> None:
    commits: dict[str, Any] = {
        "clean": {"id": "a" * 40, "dirty": False},
        "edited": {"id": "a" * 40, "dirty": True},
        "given": {"id": "a" * 40, "dirty": None, "unverified": True},
        "unknown": {"id": None, "dirty": None},
    }
    records = [time_record([7.0], phase="total")]
    results = [
        result({"size": size, "precision": "fp32"}, records, commit=commit)
        for size, commit in commits.items()
    ]
    found = written(tmp_path, results)
    table = TABLE.render(found.rows)
    assert {size: f"| {size} | 7.00§ |" in table for size in commits} == {
        size: size == "edited" for size in commits
    }
    alone = TABLE.render(written(tmp_path / "edited", results[1:2]).rows)
    assert "| edited | fp32 | 7.00 |" in alone, "what holds for all is in the caption"
    assert "All: measured with uncommitted code" in alone
    numbers = re.findall(r"\d+", provenance.unreproducible(found))
    assert numbers == ["4", "1", "2"], "of 4 results, 1 uncommitted, 2 unverified"
    assert provenance.unreproducible(written(tmp_path / "clean", results[:1])) == ""


@pytest.mark.parametrize(
    ("starts", "cost"),
    [
        (["00:00:00", "00:01:02"], "2.03 minutes: 49 % measuring, 25 % compiling and 26 % set-up"),
        (["00:00:00", "00:59:00"], "2.00 minutes: 50 % measuring, 25 % compiling and 25 % set-up"),
        (["00:00:00", "00:00:01"], "2.00 minutes: 50 % measuring, 25 % compiling and 25 % set-up"),
        (["00:00:00", "00:99:00"], "2.00 minutes: 50 % measuring, 25 % compiling and 25 % set-up"),
    ],
    ids=["in turn", "with a pause", "at the same time", "no such time"],
)
def test_the_cost_includes_time_between_points(
    tmp_path: Path, starts: list[str], cost: str
) -> None:
    results = [
        result(
            {"size": start},
            spent_s={"measuring": 30, "compiling": 15},
            started_at=f"2026-01-01T{start}Z",
            elapsed_s=60,
        )
        for start in starts
    ]
    assert f"Measured in {cost}" in provenance.summary(written(tmp_path, results))
    # Kernels that Triton compiles for torch.compile are counted by both.
    twice = [replace(each, spent_s={"measuring": 30, "compiling": 50}) for each in results]
    assert " and 0 % set-up" in provenance.summary(written(tmp_path / "twice", twice[:1]))
    # If a reset cleared torch.compile's counter, first calls and compile times in results count.
    first = value("first_call_time", 15e3, "ms", variant="compiled")
    rung = value("compile_time", 5e3, "ms", variant="masters")
    short = value("first_call_time", 900, "ms", variant="naive")
    measured = (first, rung, short)
    forgotten = [replace(each, measurements=measured) for each in results]
    text = provenance.summary(written(tmp_path / "forgotten", forgotten[:1]))
    assert "50 % measuring, 33 % compiling and 17 % set-up" in text


def test_unreadable_results_beyond_some_are_counted(tmp_path: Path) -> None:
    problems = [f"{number}.json: bad" for number in range(provenance.MAX_LINES + 2)]
    found = replace(written(tmp_path, [result({"size": "small"})]), problems=problems)
    text = provenance.summary(found)
    assert text.count("Unreadable") == provenance.MAX_LINES
    assert "2 more" in text
