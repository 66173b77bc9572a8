"""Helpers for child processes: waiting, liveness, git, and the scripts of workflow rules."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from lmlab.measure.identity import find_machine
from lmlab.study.files import ROOT
from lmlab.study.points import Point

LMLAB = (sys.executable, "-c", "import sys; from lmlab.cli import main; sys.exit(main())")
DEADLINE_S = 300.0  # for events that take milliseconds on an idle machine


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, even if its parent has yet to reap it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def files_in_git(*paths: str) -> list[Path]:
    """Project files that git tracks or would add; none outside a checkout."""
    command = ["git", "ls-files", "-co", "--exclude-standard", *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return [ROOT / line for line in listed.stdout.splitlines()]


def start_script(
    name: str, point: Point, out: Path, *command: str, cwd: Path, env: Mapping[str, str]
) -> subprocess.Popen[str]:
    """Start the script of a workflow rule as a direct child, which a test can interrupt."""
    given = ["--point", point.to_json(), "--machine", find_machine().id, "--out", str(out)]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "workflow" / "scripts" / name), *given, *command],
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
