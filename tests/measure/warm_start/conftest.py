"""Jobs in a temporary directory, real clients that run them, and helpers that end with the test.

Most of these tests are about processes, not about torch: their helper imports an empty package of
that name. A client's output is read to its end, which would never come if a helper or a process of
a job kept the client's pipes open.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import DEADLINE_S, start, wait_until, warm_helpers

# A process of its own, because it is to be killed and to import no torch.
CLIENT = """
import os, sys
from lmlab.measure.warm_start import processes, run
processes.GRACE_S = float(os.environ.get("GRACE_S", processes.GRACE_S))
status = run(sys.argv[1], sys.argv[2:])
assert "torch" not in sys.modules
print(f"status {status}", file=sys.stderr)
"""
# Starts a process in its session, one in a session of its own, and one that is orphaned as well.
FAMILY = """
import json, os, pathlib, subprocess, sys
SLEEP, ORPHAN = ["sleep", "3600"], ["sh", "-c", "sleep 3600 >&2 & echo $!"]
def main(argv):
    pids = {"supervisor": os.getppid(), "job": os.getpid()}
    pids["child"] = subprocess.Popen(SLEEP).pid
    pids["session"] = subprocess.Popen(SLEEP, start_new_session=True).pid
    pids["orphan"] = int(subprocess.check_output(ORPHAN, start_new_session=True))
    pathlib.Path("temporary").write_text(json.dumps(pids))
    pathlib.Path("temporary").rename("pids")
    sys.stdin.read()
"""


class Outcome(NamedTuple):
    status: int
    stdout: str
    stderr: str


def finish(client: subprocess.Popen[str], stdin: str | None = None) -> Outcome:
    stdout, stderr = client.communicate(stdin, timeout=DEADLINE_S)
    assert client.returncode == 0, stderr
    stderr, _, status = stderr.rpartition("status ")
    return Outcome(int(status), stdout, stderr)


class Lab:
    """Jobs, clients and helpers of one test."""

    def __init__(self, directory: Path, runtime: str, *, real_torch: bool = False) -> None:
        self.runtime = Path(runtime)
        self.directory, self.libraries = directory / "jobs", directory / "libraries"
        self.directory.mkdir()
        self.write("trivial", "def main(argv):\n    return 4\n")
        self.torch = self.libraries / "torch" / "__init__.py"
        for file in () if real_torch else ("torch/_dynamo.py", "torch/__init__.py", "triton.py"):
            (self.libraries / file).parent.mkdir(parents=True, exist_ok=True)
            (self.libraries / file).touch()
        self.python_path = f"{self.libraries}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")

    def write(self, module: str, source: str) -> None:
        (self.directory / f"{module}.py").write_text(source)

    def environment(self, mode: str, **more: str) -> dict[str, str]:
        switches = {"LMLAB_RUNTIME_DIR": str(self.runtime), "PYTHONDONTWRITEBYTECODE": "1"}
        switches["LMLAB_WARM_START"] = "1" if mode == "warm" else "0"
        return {**os.environ, **switches, "PYTHONPATH": self.python_path, **more}

    def start(self, *job: str, mode: str = "warm", **environment: str) -> subprocess.Popen[str]:
        command, variables = [sys.executable, "-c", CLIENT, *job], self.environment(mode)
        return start(command, cwd=self.directory, env={**variables, **environment})

    def run(self, *job: str, mode: str = "warm", stdin: str = "", **environment: str) -> Outcome:
        return finish(self.start(*job, mode=mode, **environment), stdin)

    def helpers(self, *options: str) -> list[int]:
        """The pids of the helpers that listen."""
        command = [sys.executable, "-m", "lmlab.measure.warm_start", *options]
        environment = self.environment("warm")
        listed = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
        return [int(pid) for pid in re.findall(rb"^helper (\d+) at ", listed, re.MULTILINE)]

    def start_family(self, **options: str) -> tuple[subprocess.Popen[str], dict[str, int]]:
        """A client, and the pids of its job and of what that has started."""
        self.write("family", FAMILY)
        client = self.start("family", **options)
        wait_until((self.directory / "pids").exists)
        return client, json.loads((self.directory / "pids").read_text())


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with warm_helpers() as runtime:
        yield Lab(tmp_path, runtime)


@pytest.fixture(scope="module")
def shared_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One helper for all tests of a module that leave it as it was."""
    with warm_helpers() as runtime:
        yield Lab(tmp_path_factory.mktemp("shared"), runtime)
