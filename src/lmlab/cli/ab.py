"""`lmlab ab REV1 REV2 -- CHAPTER key=value ...`: two revisions of the code, measured in turns.

Two runs on two days cannot show 2 %: clocks, hosts and their other users change by more. Here both
revisions are checked out next to each other and take turns on one machine (A B, B A, A B, ...),
each time in a fresh process that measures one point as `lmlab measure` does. Neighbours in time are
paired, so drift cancels, and what differs from process to process is part of the spread.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmlab.cli.measure import aligned
from lmlab.comparison.sets import git
from lmlab.report.compare import Comparison, Pair, paired
from lmlab.report.text import number
from lmlab.study.files import ROOT
from lmlab.study.results import Result, ResultError, parse

PROGRAM = "import sys; from lmlab.cli import main; sys.exit(main())"
WRONG_USE = 2
PATIENCE_S = 20
SIDES = ("A", "B")


class AbError(ValueError):
    """A revision that cannot be measured, in one line."""


def command(arguments: argparse.Namespace) -> int:
    """Measure, print the verdicts; 1 if the gate finds something slower."""
    top = git(Path(), "rev-parse", "--show-toplevel")
    root = ROOT if top is None else Path(top.decode().rstrip("\n"))
    commits = [_commit(root, revision) for revision in (arguments.first, arguments.second)]
    point = [word for word in arguments.point if word != "--"]
    with worktrees(root, commits) as folders:
        rounds = list(measure_in_turns(folders, point, arguments.rounds))
    comparison = compared(rounds)
    names = [
        f"{revision} ({commit[:7]})"
        for revision, commit in zip((arguments.first, arguments.second), commits, strict=True)
    ]
    print(
        json.dumps(as_json(names, comparison))
        if arguments.json
        else "\n".join(report(names, rounds, comparison))
    )
    return _gate(comparison, arguments.gate)


def _commit(root: Path, revision: str) -> str:
    found = git(root, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    if found is None:
        raise AbError(f"{revision!r} is not a revision of {root}")
    return found.decode().strip()


@contextmanager
def worktrees(root: Path, commits: Sequence[str]) -> Iterator[list[Path]]:
    """A checkout per commit in a temporary folder; removed whatever ends the run."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="lmlab-ab-") as folder:
            paths = [Path(folder, side) for side in SIDES]
            try:
                for path, commit in zip(paths, commits, strict=True):
                    added = ("worktree", "add", "--detach", "--quiet", str(path), commit)
                    if git(root, "-c", "core.hooksPath=/dev/null", *added) is None:
                        raise AbError(f"{commit[:7]}: git worktree add failed in {root}")
                yield paths
            finally:
                for path in paths:
                    git(root, "worktree", "remove", "--force", "--force", str(path))
                git(root, "worktree", "prune")
    finally:
        signal.signal(signal.SIGTERM, previous)


def measure_in_turns(
    folders: Sequence[Path], point: Sequence[str], rounds: int
) -> Iterator[tuple[Result, Result]]:
    """One result of each checkout per round; who begins changes with every round."""
    for turn in range(rounds):
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        found = {side: measured(folders[side], point, SIDES[side]) for side in order}
        print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
        yield found[0], found[1]


def measured(folder: Path, point: Sequence[str], side: str) -> Result:
    """The point measured by a checkout's own code, with its own config.yaml, in a new process."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "measure", *point],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate()
    except BaseException:
        _end(process)
        raise
    lines = out.strip().splitlines()
    if process.returncode == WRONG_USE or not lines:
        said = (errors.strip().splitlines() or ["nothing was measured"])[-1]
        raise AbError(f"{side}: {said.removeprefix('lmlab: ')}")
    try:
        result = parse(lines[-1], side)
    except ResultError as error:
        raise AbError(str(error)) from error
    if result.status != "ok":
        raise AbError(f"{side}: {result.status}: {result.reason}")
    return result


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt the measurement with its ranks; a process that does not end is killed."""
    for end in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, end)
            process.wait(PATIENCE_S)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue


def compared(rounds: Sequence[tuple[Result, Result]]) -> Comparison:
    """Every time that all results have: the medians of each round are one pair of samples."""
    times = [[_times(result) for result in both] for both in rounds]
    shared = [key for key in times[0][0] if all(key in side for both in times for side in both)]
    pairs = []
    for key in shared:
        a, b = ([both[side][key] for both in times] for side in (0, 1))
        pairs.append(
            Pair(
                point=dict(json.loads(key)),
                baseline={"samples": a, "value": statistics.median(a)},
                variant={"samples": b, "value": statistics.median(b)},
                interval=paired(b, a),
            )
        )
    if not pairs:
        raise AbError("no time that both revisions measure")
    return Comparison(pairs)


def _times(result: Result) -> dict[str, float]:
    return {
        json.dumps({**record["labels"], "clock": record["clock"]}): record["value"]
        for record in result.measurements
        if record["quantity"] == "time" and record["status"] == "ok" and record["value"] > 0
    }


def report(
    names: Sequence[str], rounds: Sequence[tuple[Result, Result]], comparison: Comparison
) -> list[str]:
    """The verdicts for a person."""
    first, second = rounds[0]
    lines = [
        f"A: {names[0]}, B: {names[1]}, {len(rounds)} rounds on {first.machine['name']}, "
        f"torch {first.versions['torch']}"
    ]
    for key, (a, b) in _unlike(first, second).items():
        lines.append(f"not the same work: {key} = {a} | {b}")
    table = [["time", "A (ms)", "B (ms)", "B is", "95 % interval", "verdict"]]
    for pair in comparison.pairs:
        low, high = (f"{bound:.3f}" for bound in (pair.interval.low, pair.interval.high))
        values = (number(side["value"]) for side in (pair.baseline, pair.variant))
        table.append([pair.label, *values, f"{pair.ratio:.3f}x", f"{low} to {high}", pair.verdict])
    return [*lines, *aligned(table)]


def _unlike(first: Result, second: Result) -> dict[str, tuple[Any, Any]]:
    """Parameters and settings that differ: each revision has its own config.yaml."""
    a, b = ({**result.parameters, **result.settings} for result in (first, second))
    return {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}


def as_json(names: Sequence[str], comparison: Comparison) -> Mapping[str, Any]:
    """All samples and verdicts; an interval without bounds has null."""
    return {
        **dict(zip("ab", names, strict=True)),
        "pairs": [
            {
                "point": dict(pair.point),
                "a": pair.baseline["samples"],
                "b": pair.variant["samples"],
                "ratio": pair.ratio,
                "low": pair.interval.low,
                "high": pair.interval.high if pair.interval.high < float("inf") else None,
                "verdict": pair.verdict,
            }
            for pair in comparison.pairs
        ],
    }


def _gate(comparison: Comparison, allowed: float | None) -> int:
    if allowed is None:
        return 0
    slower = [pair for pair in comparison.slower if pair.ratio < 1 / (1 + allowed)]
    for pair in slower:
        print(f"slower than {100 * allowed:g} % allows: {pair.label}: {pair.ratio:.3f}x")
    return 1 if slower else 0
