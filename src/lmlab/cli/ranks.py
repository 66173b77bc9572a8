"""The ranks of a point, started by the workflow's own script and ended by Ctrl-C in one line.

That script hands on every signal and then ends as its ranks do, whose status does not tell an
interrupt from a failure. So it runs in a process of its own, and signals are noted on their way to
it. What the ranks write to the error stream is passed on until a signal came: the tracebacks with
which they end then say nothing about the measured code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from lmlab.jobs.job import SIGNAL_BASE
from lmlab.measure.warm_start.client import SignalRelay
from lmlab.measure.warm_start.processes import die_with_parent
from lmlab.study.files import ROOT
from lmlab.study.points import Point

SCRIPT = ROOT / "workflow" / "scripts" / "ranks.py"
_LAST_WORDS_S = 5.0


class NotingRelay(SignalRelay):
    """Hands signals on to the job, and knows which came."""

    def __init__(self) -> None:
        super().__init__()
        self.came: list[int] = []

    def _relay(self, number: int, frame: FrameType | None) -> None:
        self.came.append(number)
        super()._relay(number, frame)


def run_ranks(point: Point, machine: str, out: Path, torchrun: Sequence[str]) -> int:
    """Measure the point into a file; the exit status, or KeyboardInterrupt after Ctrl-C."""
    words = ["--point", point.to_json(), "--machine", machine, "--out", str(out), "--", *torchrun]
    with NotingRelay() as relay:
        status = _run_to_its_end([sys.executable, str(SCRIPT), *words], relay)
    if signal.SIGINT in relay.came:
        raise KeyboardInterrupt
    return SIGNAL_BASE + relay.came[0] if relay.came else status


def _run_to_its_end(command: Sequence[str], relay: NotingRelay) -> int:
    tie = partial(die_with_parent, os.getpid()) if sys.platform == "linux" else None
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=tie,  # no thread runs yet
    )
    relay.aim(process.pid)
    assert process.stderr is not None
    listener = threading.Thread(target=_pass_on, args=(process.stderr, relay), daemon=True)
    listener.start()
    status = process.wait()
    listener.join(timeout=_LAST_WORDS_S)
    return status if status >= 0 else SIGNAL_BASE - status


def _pass_on(stream: IO[str], relay: NotingRelay) -> None:
    heard = True
    for line in stream:  # to the end, whoever listens: ranks that nobody reads would wait for ever
        if heard and not relay.came:
            heard = _say(line)


def _say(line: str) -> bool:
    """Whether anybody reads what goes to the error stream."""
    try:
        sys.stderr.write(line)
        sys.stderr.flush()
    except OSError:
        return False
    return True
