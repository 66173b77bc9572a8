"""Two processes never hold the same lock, and who waits says so."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lmlab.measure.exclusive import exclusive, lock_path

HOLDS_UNTIL_STDIN_CLOSES = """
import sys
from lmlab.measure.exclusive import exclusive
with exclusive("device"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_lock_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def holder() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS_UNTIL_STDIN_CLOSES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_waits_for_the_first_and_says_so_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with holder() as first:
        threading.Timer(1.5, first.kill).start()
        started = time.monotonic()
        with exclusive("device"):
            waited_s = time.monotonic() - started
    assert waited_s > 1
    assert capsys.readouterr().err == (
        f"waiting for another measurement on device to finish (process {first.pid})\n"
    )


def test_a_killed_holder_leaves_no_lock_behind() -> None:
    with holder() as first:
        first.kill()
    started = time.monotonic()
    with exclusive("device"):
        assert time.monotonic() - started < 10, "else it would wait for ever"


def test_another_name_is_another_lock(capsys: pytest.CaptureFixture[str]) -> None:
    with exclusive("one"), exclusive("two"):
        pass
    assert capsys.readouterr().err == ""


def test_the_lock_is_free_again_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="inside"), exclusive("device"):
        raise RuntimeError("inside")
    with exclusive("device"):
        pass


def test_any_name_makes_one_file_in_the_temporary_folder(tmp_path: Path) -> None:
    path = lock_path("../NVIDIA H200 / 0")
    assert path.parent == tmp_path
    assert path.name.endswith("-..-NVIDIA-H200-0.lock")
