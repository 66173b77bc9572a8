"""`lmlab ab REV1 REV2 -- CHAPTER key=value ...`: two revisions of the code, interleaved.

Runs on different days cannot resolve 2 %: clocks, hosts and other load vary by more. Here both
revisions are unpacked next to each other and alternate on one machine (A B, B A, A B, ...), each
time in a fresh process that measures one point as `lmlab measure` does. Each round is one pair, so
drift cancels, and variation between processes is part of the spread.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median

import pandas as pd

from lmlab.cli import WRONG_USE
from lmlab.cli.compare import gate, json_rows, line
from lmlab.report.compare import paired
from lmlab.report.frame import Rows
from lmlab.result_sets.sets import commit_of, git, repository_of
from lmlab.study.files import ROOT
from lmlab.study.results import Result, parse

PROGRAM = "import sys; from lmlab.cli import main; sys.exit(main())"
PATIENCE_S = 20
Round = tuple[Result, Result]


def command(arguments: argparse.Namespace) -> int:
    """Measure and print the verdicts; 1 if the gate finds something slower or missing."""
    root = repository_of(Path()) or ROOT
    revisions = (arguments.first, arguments.second)
    commits = [commit_of(root, revision) for revision in revisions]
    point = [word for word in arguments.point if word != "--"]
    with unpacked(root, commits) as folders:
        rounds = list(measure_in_turns(folders, point, arguments.rounds))
    pairs, lost = compared(rounds)
    names = [f"{name} ({commit[:7]})" for name, commit in zip(revisions, commits, strict=True)]
    if arguments.json:
        print(json.dumps({"a": names[0], "b": names[1], "pairs": json_rows(pairs)}))
    else:
        print(*report(names, rounds, pairs), sep="\n")
    for name, clock in lost:
        print(f"not measured by B in every round: {name} ({clock})", file=sys.stderr)
    return gate(pairs, arguments.gate) or int(arguments.gate is not None and bool(lost))


@contextmanager
def unpacked(root: Path, commits: Sequence[str]) -> Iterator[list[Path]]:
    """Unpack each commit into a temporary folder, which is removed however the run ends."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="lmlab-ab-") as folder:
            paths = [Path(folder, side) for side in "AB"]
            for path, commit in zip(paths, commits, strict=True):
                archive = path.with_suffix(".zip")
                if git(root, "archive", "--output", str(archive), commit) is None:
                    raise ValueError(f"{commit[:7]}: git archive failed in {root}")
                shutil.unpack_archive(archive, path)
            yield paths
    finally:
        signal.signal(signal.SIGTERM, previous)


def measure_in_turns(folders: Sequence[Path], point: Sequence[str], rounds: int) -> Iterator[Round]:
    """One result of each revision per round; the order alternates between rounds."""
    for turn in range(rounds):
        order = folders if turn % 2 == 0 else folders[::-1]
        found = {folder.name: measured(folder, point) for folder in order}
        print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
        yield found["A"], found["B"]


def measured(folder: Path, point: Sequence[str]) -> Result:
    """Measure the point with a revision's own code and config.yaml, in a new process."""
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
        raise ValueError(f"{folder.name}: {said.removeprefix('lmlab: ')}")
    result = parse(lines[-1], folder.name)
    if result.status != "ok":
        raise ValueError(f"{folder.name}: {result.status}: {result.reason}")
    return result


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt the measurement and its ranks; kill them if the process does not exit."""
    for end in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, end)
            process.wait(PATIENCE_S)


def compared(rounds: Sequence[Round]) -> tuple[Rows, list[tuple[str, str]]]:
    """Compare every time that all results have, with the medians of each round as one pair; also
    returns the times that A has in every round and B does not."""
    times = [[_times(result) for result in both] for both in rounds]
    known = [key for key in times[0][0] if all(key in first for first, _ in times)]
    lost = [key for key in known if not all(key in second for _, second in times)]
    pairs = []
    for key in (key for key in known if key not in lost):
        a, b = ([both[side][key] for both in times] for side in (0, 1))
        found, medians = paired(b, a), {"value_a": median(a), "value_b": median(b)}
        name = {"chapter": rounds[0][0].chapter, "point": key[0], "clock": key[1]}
        judged = {**asdict(found), "verdict": found.verdict}
        pairs.append({**name, "quantity": "time", "a": a, "b": b, **medians, **judged})
    if not pairs:
        raise ValueError("no time that both revisions measure")
    return pd.DataFrame(pairs), lost


def _times(result: Result) -> dict[tuple[str, str], float]:
    return {
        (", ".join(map(str, record["labels"].values())), record["clock"]): record["value"]
        for record in result.measurements
        if record["quantity"] == "time" and record["status"] == "ok" and record["value"] > 0
    }


def report(names: Sequence[str], rounds: Sequence[Round], pairs: Rows) -> list[str]:
    """The verdicts as text, after any differences in the work: each has its own config.yaml."""
    first, second = rounds[0]
    a, b = ({**result.parameters, **result.settings} for result in (first, second))
    where = f"{first.machine['name']}, torch {first.versions['torch']}"
    return [
        f"A: {names[0]}, B: {names[1]}, {len(rounds)} rounds on {where}",
        *(
            f"not the same work: {key} = {a.get(key)} | {b.get(key)}"
            for key in {**a, **b}
            if a.get(key) != b.get(key)
        ),
        *(line(row) for row in pairs.to_dict("records")),
    ]
