"""Measuring in tests: one thread, and a lock that no real measurement holds."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from lmlab.jobs import run
from lmlab.measure.identity import find_machine
from lmlab.study.files import ROOT
from lmlab.study.points import Point


@pytest.fixture(autouse=True)
def _alone_with_one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Two threads on a busy machine wait for each other at every operation."""
    threads = torch.get_num_threads()
    monkeypatch.setenv("LMLAB_LOCK_DOMAIN", tmp_path.name)
    monkeypatch.setattr(run, "set_threads", lambda: torch.set_num_threads(1))
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def wait_for() -> Callable[[Path], None]:
    """Returns when a file exists, however slow the machine is."""

    def wait(path: Path) -> None:
        deadline = time.monotonic() + 300
        while not path.exists():
            assert time.monotonic() < deadline, f"{path} never appeared"
            time.sleep(0.02)

    return wait


@pytest.fixture(scope="session")
def start_script() -> Callable[..., subprocess.Popen[str]]:
    """Starts the script of a workflow's rule, which an interrupt reaches as in a terminal."""

    def start(
        name: str, point: Point, out: Path, *command: str, cwd: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        given = ["--point", point.to_json(), "--machine", find_machine().id, "--out", str(out)]
        return subprocess.Popen(
            [sys.executable, str(ROOT / "workflow" / "scripts" / name), *given, *command],
            cwd=cwd,
            env={**os.environ, **env},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def cpu() -> torch.device:
    return torch.device("cpu")
