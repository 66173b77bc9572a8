"""Two processes never hold the same lock, and a waiting one says so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmlab.measure import exclusive as module
from lmlab.measure.exclusive import exclusive, lock_path

HOLDS_UNTIL_STDIN_CLOSES = """
import sys
from lmlab.measure.exclusive import exclusive
with exclusive("device"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def lock_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_UNTIL_STDIN_CLOSES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_waits_and_says_so_once(
    holder: subprocess.Popen[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    polls = []

    def poll(seconds: float) -> None:
        """In place of sleeping; the third time, the holder dies and leaves no lock behind."""
        polls.append(seconds)
        if len(polls) == 3:
            holder.kill()
            holder.wait()

    monkeypatch.setattr(module, "_SILENT_WAIT_S", -1.0)
    monkeypatch.setattr(module.time, "sleep", poll)
    with exclusive("device"):
        assert len(polls) >= 3
    assert capsys.readouterr().err == (
        f"waiting for another measurement on device to finish (process {holder.pid})\n"
    )


def test_locks_are_files_per_name_and_released_after_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="inside"), exclusive("one"), exclusive("two"):
        raise RuntimeError("inside")
    with exclusive("one"):
        pass
    assert capsys.readouterr().err == ""
    path = lock_path("../NVIDIA H200 / 0")
    assert (path.parent, path.name[-22:]) == (tmp_path, "-..-NVIDIA-H200-0.lock")
