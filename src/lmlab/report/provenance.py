"""Where the numbers come from: commits, versions, dates, and what has no number."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from lmlab.report.frame import Results, select
from lmlab.report.text import escape, join, markdown_table, number
from lmlab.study.results import Result

if TYPE_CHECKING:
    from lmlab.report.page import Chapter

MAX_LINES = 12


def summary(results: Results) -> Markup:
    """One paragraph for the front page: how many points, from which code, and what is wrong."""
    points = results.rows["source"].dropna().drop_duplicates()
    readable = list(results.results.values())
    parts = [f"{len(points)} points: {_counts(len(points), results)}"]
    parts += [_code(readable)] if readable else []
    if minutes := sum(result.elapsed_s for result in readable) / 60:
        parts.append(f"{number(minutes)} minutes of measuring")
    lines = [". ".join(parts) + "."]
    lines += [f"Unreadable: {escape(problem)}" for problem in results.problems[:MAX_LINES]]
    return Markup("\n\n".join(lines))


def _counts(total: int, results: Results) -> str:
    states: Counter[str] = Counter(result.status for result in results.results.values())
    states["unreadable"] = len(results.problems)
    states["not measured"] = total - sum(states.values())
    names = {"ok": "measured", "oom": "out of memory"}
    return join([f"{count} {names.get(state, state)}" for state, count in states.items() if count])


def unreproducible(results: Results) -> Markup:
    """How many results no known commit reproduces, for the top of the page; empty if none."""
    found = list(results.results.values())
    parts = _doubts(found)
    if not parts:
        return Markup("")
    marks = " (§ in tables)" if any(result.commit["dirty"] for result in found) else ""
    return Markup(f"**Of {len(found)} results, {join(parts)}{marks}.**")


def _doubts(results: Sequence[Result]) -> list[str]:
    """Results from code that was edited, or of which that is not known."""
    dirty = sum(result.commit["dirty"] is True for result in results)
    unverified = sum(
        result.commit["dirty"] is None or bool(result.commit.get("unverified"))
        for result in results
    )
    return [
        *([f"{dirty} are from uncommitted code"] if dirty else []),
        *([f"{unverified} from an unverified commit"] if unverified else []),
    ]


def _code(results: Sequence[Result]) -> str:
    commits = dict.fromkeys(str(result.commit["id"] or "unknown")[:7] for result in results)
    parts = [f"commit {next(iter(commits))}" if len(commits) == 1 else f"{len(commits)} commits"]
    parts += _doubts(results)
    converted = sum(result.converted_from is not None for result in results)
    parts += [f"{converted} converted from schema 1"] if converted else []
    return ", ".join(parts)


def of_chapter(results: Results, chapter: Chapter | None, folder: Path) -> Markup:
    """The end of a chapter's page: versions, commits, dates, flags, and points without a value."""
    if chapter is None:
        return Markup("")
    mine = results.of(chapter.name)
    lines = []
    if mine:
        starts = sorted(result.started_at[:10] for result in mine)
        dates = starts[0] if starts[0] == starts[-1] else f"{starts[0]} to {starts[-1]}"
        flags = Counter(flag for result in mine for flag in result.flags)
        rows = [
            ["points", _states(results, chapter.name)],
            ["machine", join(_distinct(result.machine["name"] for result in mine))],
            ["versions", _versions(mine)],
            ["code", _code(mine)],
            ["fingerprints", str(len({result.code_fingerprint for result in mine}))],
            ["measured", f"{dates}, {number(sum(result.elapsed_s for result in mine))} s"],
            ["flags", join([f"{flag} ({count})" for flag, count in flags.items()]) or "none"],
            ["results", _link(mine[0], results, folder)],
        ]
        lines.append(markdown_table(["", ""], [[a, b] for a, b in rows], 2))
    lines += _without_value(results, chapter.name)
    return Markup("\n\n".join(lines))


def _states(results: Results, chapter: str) -> str:
    points = select(results.rows, chapter=chapter).groupby("source", sort=False)["status"]
    states = Counter("ok" if "ok" in set(found) else found.iloc[0] for _, found in points)
    return join([f"{count} {state}" for state, count in states.items()])


def _versions(results: Sequence[Result]) -> str:
    names = ("torch", "triton", "cuda", "cudnn", "driver", "python", "lmlab")
    found = {name: _distinct(result.versions.get(name) for result in results) for name in names}
    return ", ".join(f"{name} {join(values)}" for name, values in found.items() if values)


def _distinct(values: Iterable[str | None]) -> list[str]:
    return [escape(value) for value in dict.fromkeys(values) if value]


def _link(result: Result, results: Results, folder: Path) -> str:
    path = next(path for path, found in results.results.items() if found is result)
    parts = Path(path).parts
    target = Path(*parts[: parts.index(results.machine) + 1]) / result.chapter
    if not result.parameters:
        target = target.with_suffix(".json")
    return f"[{escape(target)}]({os.path.relpath(target, folder)})"


def _without_value(results: Results, chapter: str) -> list[str]:
    """One line per distinct reason, with how many points share it."""
    rows = select(results.rows, chapter=chapter, status=lambda state: state != "ok")
    reasons = Counter(
        f"{row['status']}: {escape(row['reason'])}" for row in rows.to_dict("records")
    )
    lines = [f"- {count} x {reason}" for reason, count in reasons.most_common(MAX_LINES)]
    return ["Without a value:\n\n" + "\n".join(lines)] if lines else []
