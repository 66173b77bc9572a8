"""A job behaves the same whether it was forked from the helper or started as a fresh process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.measure.warm_start.conftest import CLIENT, Lab, finish, wait_until

pytestmark = pytest.mark.slow
both_modes = pytest.mark.parametrize("mode", ["warm", "plain"])


@both_modes
@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("return 3", 3),
        ("return None", 0),
        ("sys.exit(7)", 7),
        ("sys.exit()", 0),
        ("sys.exit('no such size')", 1),
        ("sys.exit(256 + 5)", 5),
        ("raise RuntimeError('broken')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.abort()", -signal.SIGABRT),
        ("os._exit(9)", 9),
    ],
)
def test_exit_status(shared_lab: Lab, mode: str, ending: str, status: int) -> None:
    shared_lab.write("job", f"import os, signal, sys\ndef main(argv):\n    {ending}\n")
    assert shared_lab.run("job", mode=mode).status == status


@both_modes
@pytest.mark.parametrize(
    ("source", "last_line"),
    [
        ("def main(argv):\n    raise RuntimeError('broken')", "RuntimeError: broken"),
        ("import sys\ndef main(argv):\n    sys.exit('no such size')", "no such size"),
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        ("", "ValueError: module 'job' cannot be run: it has no function main(argv)"),
    ],
)
def test_errors_are_shown(shared_lab: Lab, mode: str, source: str, last_line: str) -> None:
    shared_lab.write("job", source)
    outcome = shared_lab.run("job", mode=mode)
    assert (outcome.status, outcome.stderr.splitlines()[-1]) == (1, last_line)


THREAD = """
import atexit, threading
def late():
    threading.main_thread().join()
    print("thread")
def main(argv):
    atexit.register(print, "exit function")
    threading.Thread(target=late).start()
"""
SPAWN = """
import multiprocessing
def double(x):
    return 2 * x
def main(argv):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
"""


@both_modes
@pytest.mark.parametrize(
    ("source", "stdout"),
    [
        pytest.param("def main(_):\n    print('x' * 300_000)\n", "x" * 300_000, id="unflushed"),
        pytest.param(THREAD, "thread\nexit function", id="thread-and-atexit"),
        pytest.param(SPAWN, "[2, 4]", id="multiprocessing"),
    ],
)
def test_output_is_complete(shared_lab: Lab, mode: str, source: str, stdout: str) -> None:
    shared_lab.write("job", source)
    assert shared_lab.run("job", mode=mode) == (0, f"{stdout}\n", "")


SURROUNDINGS = """
import json, os, signal, sys, tempfile
def main(argv):
    os.write(1, b"first ")
    print(json.dumps({
        "argv": argv, "sys.argv": sys.argv, "path": sys.path, "main": __name__,
        "cwd": os.getcwd(), "umask": os.umask(0), "temporary": tempfile.gettempdir(),
        "environment": {k: v for k, v in os.environ.items() if k != "LMLAB_WARM_START"},
        "stdin": sys.stdin.read(), "session leader": os.getsid(0) == os.getpid(),
        "handlers": {int(s): str(signal.getsignal(s)).split(" at ")[0]
                     for s in signal.valid_signals()},
        "blocked": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "streams": [(s.encoding, s.errors, s.line_buffering, s.write_through, s.name, s.mode,
                     type(s.buffer).__name__) for s in (sys.stdin, sys.stdout, sys.stderr)],
        "descriptors": [fd for fd in range(256) if os.path.exists(f"/proc/self/fd/{fd}")],
    }))
    print("apart", file=sys.stderr)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_surroundings(lab: Lab, unbuffered: str) -> None:
    lab.write("job", SURROUNDINGS)
    (lab.directory / "relative").mkdir()
    environment = {
        "PYTHONPATH": f"relative:{lab.python_path}",
        "PYTHONUNBUFFERED": unbuffered,
        "NOT_UTF_8": "\udcff ü",
        "TMPDIR": str(lab.directory),
    }
    found: dict[str, dict[str, Any]] = {}
    for mode in ("warm", "plain"):
        outcome = lab.run("job", "--size", "a b", "", mode=mode, stdin="two\nlines", **environment)
        assert (outcome.status, outcome.stderr) == (0, "apart\n")
        assert outcome.stdout.startswith("first {")
        found[mode] = json.loads(outcome.stdout.removeprefix("first "))
    assert found["warm"] == found["plain"]
    assert found["warm"]["argv"] == ["--size", "a b", ""]
    assert found["warm"]["stdin"] == "two\nlines"
    assert found["warm"]["session leader"]


WAITING = """
import pathlib, signal, sys, time
def main(argv):
    def handler(number, frame):
        print(signal.Signals(number).name, flush=True)
        sys.exit(20)
    if argv[0] == "handled":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, handler)
    pathlib.Path(argv[1]).touch()
    time.sleep(600)
"""


@both_modes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("handling", ["handled", "default"])
def test_a_signal_to_the_client_ends_the_job(
    shared_lab: Lab, mode: str, number: signal.Signals, handling: str, tmp_path: Path
) -> None:
    shared_lab.write("job", WAITING)
    client = shared_lab.start("job", handling, str(tmp_path / "running"), mode=mode)
    wait_until((tmp_path / "running").exists)
    client.send_signal(number)
    outcome = finish(client)
    expected = (20, f"{number.name}\n") if handling == "handled" else (-number, "")
    assert (outcome.status, outcome.stdout) == expected


@both_modes
def test_a_caller_that_ignores_sigchld_still_gets_the_exit_status(lab: Lab, mode: str) -> None:
    lab.write("job", "def main(argv):\n    return 3\n")
    script = f"import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n{CLIENT}"
    command, environment = [sys.executable, "-c", script, "job"], lab.environment(mode)
    client = subprocess.run(command, cwd=lab.directory, env=environment, stderr=subprocess.PIPE)
    assert client.stderr == b"status 3\n"
    assert len(lab.helpers()) == (mode == "warm")


def test_an_edit_between_two_jobs_is_seen(lab: Lab) -> None:
    lab.write("job", "from model import NAME\ndef main(argv):\n    print(NAME)\n")
    for name in ("first", "second"):
        lab.write("model", f"NAME = {name!r}\n")
        assert lab.run("job").stdout == f"{name}\n"
    assert len(lab.helpers()) == 1


LOADED = """
import os, sys
print([name in sys.modules for name in ("torch", "triton", "torch._inductor.compile_fx")])
print([name for name in sys.modules if name.split(".")[0] == "lmlab"])
print(any(os.path.realpath(f"/proc/self/fd/{fd}").startswith("/dev/nvidia") for fd in range(256)))
def main(argv):
    import torch
    a = torch.ones(512, 512, device="cuda" if torch.cuda.is_available() else "cpu")
    print((a @ a).sum().item() == 512.0**3)  # parallel, which some forks do not survive
"""


def test_a_fork_has_the_libraries_but_nothing_of_ours_and_no_gpu(torch_lab: Lab) -> None:
    torch_lab.write("job", LOADED)
    outcome = torch_lab.run("job")
    libraries = [True, True, torch.cuda.is_available()]
    assert outcome == (0, f"{libraries}\n[]\nFalse\nTrue\n", "")


def test_a_cold_job_is_a_fresh_interpreter(torch_lab: Lab) -> None:
    torch_lab.write("inner", "import sys\ndef main(argv):\n    return 'torch' in sys.modules\n")
    outer = "def main(argv):\n    print(run('inner', []), run('inner', [], cold=True))\n"
    torch_lab.write("outer", f"from lmlab.measure.warm_start import run\n{outer}")
    assert torch_lab.run("outer").stdout == "1 0\n"
