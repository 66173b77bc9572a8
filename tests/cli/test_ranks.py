"""Ranks of `lmlab measure`: Ctrl-C ends them in one line, a failure keeps its traceback."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmlab.cli import main, ranks

COLLECTIVES = ["measure", "collectives", "--config", "study=nano"]

# As torchrun does, it answers a signal with a traceback and the status of a failure.
ENDED_BY_A_SIGNAL = """
import pathlib, signal, sys, time
def end(number, frame):
    sys.exit("Traceback (most recent call last): got signal")
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, end)
pathlib.Path("ready").touch()
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A lock and temporary files of our own, and the project's config.yaml."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Puts a program in the place of the workflow's script."""

    def program(text: str) -> None:
        (tmp_path / "stand_in.py").write_text(text)
        monkeypatch.setattr(ranks, "SCRIPT", tmp_path / "stand_in.py")

    return program


@pytest.fixture
def signal_when_ready(tmp_path: Path) -> Iterator[Callable[[int], None]]:
    """Sends this process a signal as soon as the ranks are up."""
    threads: list[threading.Thread] = []

    def send(number: int) -> None:
        give_up = time.monotonic() + 30
        while not (tmp_path / "ready").exists():
            if time.monotonic() > give_up:
                return
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    def start(number: int) -> None:
        threads.append(threading.Thread(target=send, args=(number,)))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()


def test_an_interrupt_ends_in_one_line_without_the_ranks_tracebacks(
    program: Callable[[str], None],
    signal_when_ready: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    program(ENDED_BY_A_SIGNAL)
    signal_when_ready(signal.SIGINT)
    assert main(COLLECTIVES) == 130
    assert capsys.readouterr().err == "lmlab: interrupted, nothing is written\n"


def test_another_signal_gives_the_status_that_a_shell_knows(
    program: Callable[[str], None],
    signal_when_ready: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    program(ENDED_BY_A_SIGNAL)
    signal_when_ready(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        main(COLLECTIVES)
    assert ended.value.code == 143
    assert capsys.readouterr().err == ""


def test_a_failure_keeps_its_traceback_and_its_status(
    program: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    program("raise RuntimeError('broken')")
    with pytest.raises(SystemExit) as ended:
        main(COLLECTIVES)
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("Traceback (most recent call last)")
    assert error.endswith("RuntimeError: broken\n")


def test_ranks_are_read_to_their_end_though_nobody_listens(
    program: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    program("import sys; sys.stderr.write('a line\\n' * 100_000); sys.exit(3)")
    monkeypatch.setattr(sys, "stderr", Closed())
    with pytest.raises(SystemExit) as ended:
        main(COLLECTIVES)
    assert ended.value.code == 3


def test_the_workflows_script_understands_what_it_is_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["placement=own_gpu", "world_size=1024"]
    assert main([*COLLECTIVES[:2], *words, *COLLECTIVES[2:]]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["status"] == "unsupported"
    assert result["reason"].startswith("needs 1024 GPUs")


def test_nodes_that_cannot_share_a_world_are_named_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["world_size=3", "nnodes=2"]
    assert main([*COLLECTIVES[:2], *words, *COLLECTIVES[2:]]) == 2
    error = capsys.readouterr().err
    assert error == "lmlab: world_size = 3 cannot be spread evenly over 2 nodes\n"
