"""A folder with jobs in it, real clients that run them, and a helper that ends with the test.

Most tests here are about processes, not about torch. Their helper imports an empty package of that
name, which starts in a tenth of a second; those who need the real one ask for `torch_lab`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from lmlab.measure.warm_start.__main__ import ask

# A client is a process of its own: it is to be killed, and must hold no torch.
CLIENT = """
import json, sys
from lmlab.measure.warm_start import run
code = run(sys.argv[2], sys.argv[3:])
json.dump({"code": code, "torch": "torch" in sys.modules}, open(sys.argv[1], "w"))
"""


@dataclass(frozen=True)
class Outcome:
    """What a client saw of its job."""

    code: int
    stdout: str
    stderr: str


class Client:
    """A running client of the warm start."""

    def __init__(self, process: subprocess.Popen[str], report: Path) -> None:
        self.process = process
        self._report = report

    def finish(self, typed: str | None = None) -> Outcome:
        stdout, stderr = self.process.communicate(typed, timeout=60)
        report = json.loads(self._report.read_text())
        assert not report["torch"]
        return Outcome(report["code"], stdout, stderr)


class Lab:
    """Jobs, clients and helpers of one test."""

    def __init__(self, folder: Path, *, real_torch: bool) -> None:
        self.folder = folder / "jobs"
        self.runtime = folder / "runtime"
        self.folder.mkdir()
        self._clients = 0
        own = [] if real_torch else [str(_empty_libraries(folder))]
        given = os.environ.get("PYTHONPATH")
        self.python_path = os.pathsep.join([*own, *([given] if given else [])])

    def environment(self, mode: str = "warm", **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("LMLAB_", "XDG_"))}
        switch = "1" if mode == "warm" else "0"
        chosen = {"LMLAB_RUNTIME_DIR": str(self.runtime), "LMLAB_WARM_START": switch}
        return {**kept, **chosen, "PYTHONPATH": self.python_path, **more}

    def write(self, module: str, source: str) -> None:
        file = self.folder / f"{module}.py"
        file.write_text(source)
        # Python takes an edit of equal length within the same second for no edit.
        Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)

    def start(self, *words: str, mode: str = "warm", **more: str) -> Client:
        self._clients += 1
        report = self.folder / f"report_{self._clients}.json"
        process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(report), *words],
            cwd=self.folder,
            env=self.environment(mode, **more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return Client(process, report)

    def run(self, *words: str, mode: str = "warm", typed: str = "", **more: str) -> Outcome:
        return self.start(*words, mode=mode, **more).finish(typed)

    def command(self, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lmlab.measure.warm_start", *options],
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )

    def helpers(self) -> list[dict[str, Any]]:
        reports = [ask(path, {"status": True}) for path in sorted(self.runtime.glob("*.sock"))]
        return [report for report in reports if report is not None]

    def helper(self) -> psutil.Process:
        (report,) = self.helpers()
        return psutil.Process(report["pid"])

    def noted_pids(self, name: str, count: int) -> list[int]:
        """The pids that a job has written down, once they are all there."""
        note = self.folder / name
        wait_until(lambda: note.exists() and len(note.read_text().split()) == count)
        return [int(word) for word in note.read_text().split()]

    def close(self) -> None:
        for path in self.runtime.glob("*.sock"):
            ask(path, {"stop": True})


def _empty_libraries(folder: Path) -> Path:
    libraries = folder / "libraries"
    for file in ("torch/__init__.py", "torch/_dynamo.py", "triton/__init__.py"):
        (libraries / file).parent.mkdir(parents=True, exist_ok=True)
        (libraries / file).touch()
    return libraries


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for a condition, and fail if it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def gone(pids: list[int]) -> bool:
    """Whether none of the processes lives; a zombie that its new parent has yet to reap is dead."""
    return not any(_is_alive(pid) for pid in pids)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path, real_torch=False)
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def torch_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The real torch, and one helper for all tests of a module: they leave it as it was."""
    lab = Lab(tmp_path_factory.mktemp("warm_start"), real_torch=True)
    yield lab
    lab.close()
