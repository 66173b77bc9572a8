"""`python -m lmlab.measure.warm_start --status | --stop`: this user's helpers, seen and ended.

There can be several: one for each interpreter, environment and control group that asked for one.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmlab.measure.warm_start.meeting_place import (
    WarmStartUnavailable,
    private_directory,
    runtime_directory,
)
from lmlab.measure.warm_start.messages import Inbox, send
from lmlab.measure.warm_start.starting import connect

_PATIENCE_S = 30.0


def main(argv: list[str]) -> int:
    """Exit 0 when there was a helper to show or nothing is left to stop, else 1."""
    parser = argparse.ArgumentParser(prog="python -m lmlab.measure.warm_start", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--status", action="store_true", help="show the helpers that run")
    action.add_argument("--stop", action="store_true", help="end them, and the jobs in them")
    options = parser.parse_args(argv)
    try:
        helpers = list(_helpers())
    except WarmStartUnavailable as trouble:
        print(f"warm start: {trouble}", file=sys.stderr)
        return 1
    if not helpers:
        print("no helper runs")
        return 0 if options.stop else 1
    for path, report in helpers:
        print(_line(path, report))
        if options.stop:
            ask(path, {"stop": True})
            print(f"helper {report['pid']} stopped")
    return 0


def _helpers() -> Iterator[tuple[Path, dict[str, Any]]]:
    if not runtime_directory().exists():
        return
    for path in sorted(private_directory().glob("*.sock")):
        report = ask(path, {"status": True})
        if report is not None:
            yield path, report


def ask(path: Path, question: dict[str, Any]) -> dict[str, Any] | None:
    """The helper's answer, or None once it is gone."""
    connection = connect(path)
    if connection is None:
        return None
    with connection:
        connection.settimeout(_PATIENCE_S)
        try:
            send(connection, question)
            return Inbox(connection).wait()
        except TimeoutError:
            raise WarmStartUnavailable(f"the helper at {path} does not answer") from None
        except ConnectionError:
            return None


def _line(path: Path, report: dict[str, Any]) -> str:
    running = len(report["running"])
    return (
        f"helper {report['pid']}: {report['age_s']:.0f} s old, {report['served']} jobs served, "
        f"{running} running, at {path}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
