"""Helpers for child processes: waiting, liveness, warm helpers, git, scripts of workflow rules."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from lmlab.measure.identity import find_machine
from lmlab.study.files import ROOT
from lmlab.study.points import Point

LMLAB = (sys.executable, "-c", "import sys; from lmlab.cli import main; sys.exit(main())")
DEADLINE_S = 300.0  # for events that take milliseconds on an idle machine


def wait_until(condition: Callable[[], bool], what: str = "a condition") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:g} s for {what}"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, even if its parent has yet to reap it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def warm_helpers() -> Iterator[str]:
    """LMLAB_RUNTIME_DIR for a test's own warm helpers, which end with it."""
    command = [sys.executable, "-m", "lmlab.measure.warm_start", "--stop"]
    # In /tmp, because the address of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory("", "lmlab-", "/tmp", ignore_cleanup_errors=True) as folder:
        try:
            yield folder
        finally:
            subprocess.run(command, env={**os.environ, "LMLAB_RUNTIME_DIR": folder}, check=True)


def start(command: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a program with these variables, and a pipe for each of its streams."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, cwd=cwd, env={**os.environ, **env}, text=True, **pipes)


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
    script = str(ROOT / "workflow" / "scripts" / name)
    return start([sys.executable, script, *given, *command], cwd=cwd, env=env)
