"""Where the numbers come from: commits, versions, dates, and points without a value."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd
from markupsafe import Markup

from lmlab.report.frame import Results, select
from lmlab.report.text import escape, grouped_reasons, join, markdown_table, number, shortened
from lmlab.study.results import Result

MAX_LINES = 12
PAUSE_S = 3
FIRST_CALLS = ("first_call_time", "first_step_time", "compile_time")
NAMES = {"ok": "measured", "oom": "out of memory"}
VERSIONS = ("torch", "triton", "cuda", "cudnn", "driver", "python", "lmlab")


def summary(results: Results, uncounted_compilers: Sequence[str] = ()) -> Markup:
    """Summarize points, code, cost and unreadable files for the front page. The compilation of
    `uncounted_compilers`, variants that no counter covers, is attributed to measuring."""
    points = results.rows["source"].nunique()
    readable = list(results.results.values())
    states = Counter(NAMES.get(result.status, result.status) for result in readable)
    states["unreadable"] = len(results.problems)
    states["not measured"] = points - states.total()
    parts = [f"{points} points: {_counted(states)}"]
    if readable:
        parts[0] += f", from {_code(readable)}"
        parts.append(_cost(readable, uncounted_compilers))
    problems = [f"Unreadable: {escape(problem)}" for problem in results.problems]
    listed = shortened(problems, MAX_LINES, "{} more unreadable files; `lmlab status` lists them.")
    return Markup("\n\n".join([". ".join(parts) + ".", *listed]))


def _cost(results: Sequence[Result], uncounted: Sequence[str]) -> str:
    """Total wall time, with a breakdown if every result records one."""
    starts = pd.to_datetime([result.started_at for result in results], errors="coerce")
    rows = pd.DataFrame({"start": starts, "s": [result.elapsed_s for result in results]})
    rows = rows.sort_values("start")
    # Gaps between consecutive points; starts are whole seconds, and a long gap is a pause.
    gaps = rows["start"].diff().dt.total_seconds() - rows["s"].shift()
    total_s = rows["s"].sum() + gaps[gaps.between(-1, PAUSE_S)].sum()
    cost = f"Measured in {number(total_s / 60)} minutes"
    spent = [result.spent_s for result in results if result.spent_s]
    if len(spent) < len(results) or not total_s:
        return cost
    parts = pd.DataFrame(spent)
    # Kernels that Triton compiles for torch.compile are counted by both, hence the upper limit. A
    # reset clears torch.compile's counter, but first calls over a second are compilation.
    rest = pd.Series([result.elapsed_s for result in results]) - parts["measuring"]
    calls = [[m for m in r.measurements if m["quantity"] in FIRST_CALLS] for r in results]
    calls = [[m for m in each if m["labels"].get("variant") not in uncounted] for each in calls]
    first = pd.Series([sum(m["value"] for m in c if (m["value"] or 0) > 1e3) / 1e3 for c in calls])
    parts["compiling"] = parts["compiling"].clip(lower=first).clip(upper=rest)
    shares = parts.sum() / total_s
    shares["set-up, checks and starting processes"] = 1 - shares.sum()
    return f"{cost}: " + join([f"{100 * share:.0f} % {name}" for name, share in shares.items()])


def unreproducible(results: Results) -> Markup:
    """Warn at the top of the page of results that no known commit reproduces; empty if none."""
    found = list(results.results.values())
    parts = _doubts(found)
    marks = " (§ in tables)" if any(result.commit["dirty"] for result in found) else ""
    return Markup(f"**{len(found)} results, of which {join(parts)}{marks}.**" if parts else "")


def _doubts(results: Sequence[Result]) -> list[str]:
    """Count results from uncommitted code and from commits that could not be verified."""
    commits = [result.commit for result in results]
    dirty = sum(commit["dirty"] is True for commit in commits)
    unverified = sum(c["dirty"] is None or bool(c.get("unverified")) for c in commits)
    found = {"from uncommitted code": dirty, "from an unverified commit": unverified}
    return [f"{n} {'is' if n == 1 else 'are'} {what}" for what, n in found.items() if n]


def _code(results: Sequence[Result]) -> str:
    commits = dict.fromkeys(str(result.commit["id"] or "unknown")[:7] for result in results)
    code = f"commit {next(iter(commits))}" if len(commits) == 1 else f"{len(commits)} commits"
    doubts = _doubts(results)
    return f"{code}; of the results, {join(doubts)}" if doubts else code


def of_chapter(results: Results, chapter: str, folder: Path) -> Markup:
    """The end of a chapter's page: versions, commits, dates, flags, and points without a value."""
    rows = select(results.rows, chapter=chapter)
    lines = []
    if mine := results.of(chapter):
        starts = sorted(result.started_at[:10] for result in mine)
        # One row per point, preferably one with a value.
        points = rows.sort_values("status", key=lambda status: status != "ok", kind="stable")
        flags = Counter(flag for result in mine for flag in result.flags)
        parts = Path(rows["source"].iloc[0]).parts
        target = Path(*parts[: parts.index(results.machine) + 2])  # the chapter's folder or file
        found = {name: _distinct(result.versions.get(name) for result in mine) for name in VERSIONS}
        table = {
            "points": _counted(Counter(points.drop_duplicates("source").sort_index()["status"])),
            "machine": join(_distinct(result.machine["name"] for result in mine)),
            "versions": ", ".join(f"{name} {join(each)}" for name, each in found.items() if each),
            "code": _code(mine),
            "fingerprints": str(len({result.code_fingerprint for result in mine})),
            "measured": f"{' to '.join(dict.fromkeys([starts[0], starts[-1]]))}, "
            f"{number(sum(result.elapsed_s for result in mine))} s",
            "flags": join([f"{flag} ({count})" for flag, count in flags.items()]) or "none",
            "results": f"[{escape(target)}]({os.path.relpath(target, folder)})",
        }
        lines.append(markdown_table(["", ""], [list(row) for row in table.items()], 2))
    failed = select(rows, status=lambda state: state != "ok")
    states = failed.reindex(columns=["status", "variant"]).to_numpy()
    named = [f"{state} (variant {name})" if pd.notna(name) else state for state, name in states]
    pairs = zip(map(escape, named), map(escape, failed["reason"]), strict=True)
    reasons = sorted(grouped_reasons(map(": ".join, pairs)), key=lambda group: -group[0])
    if without := [f"- {n} x {why}" for n, why in reasons]:
        lines.append("Measurements without a value, including some in points that succeeded:")
        lines.append("\n".join(shortened(without, MAX_LINES, "- {} more")))
    return Markup("\n\n".join(lines))


def _counted(states: Mapping[str, int]) -> str:
    return join([f"{count} {state}" for state, count in states.items() if count])


def _distinct(values: Iterable[str | None]) -> list[str]:
    return [escape(value) for value in dict.fromkeys(values) if value]
