"""A job behaves the same whether it was forked from the helper or started as a fresh process."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.measure.warm_start.conftest import CLIENT, Lab, finish
from tests.processes import DEADLINE_S, wait_until, warm_helpers

pytestmark = pytest.mark.slow
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
both_modes = pytest.mark.parametrize("mode", ["warm", "plain"])


@both_modes
@pytest.mark.parametrize(
    ("ending", "status", "last_line"),
    [
        ("return 3", 3, ""),
        ("return None", 0, ""),
        ("sys.exit('no such size')", 1, "no such size"),
        ("sys.exit(256 + 5)", 5, ""),
        ("raise RuntimeError('broken')", 1, "RuntimeError: broken"),
        ("import nowhere", 1, "ModuleNotFoundError: No module named 'nowhere'"),
        ("raise KeyboardInterrupt", -signal.SIGINT, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("os.abort()", -signal.SIGABRT, ""),
        ("os._exit(9)", 9, ""),
    ],
)
def test_exit_status(shared_lab: Lab, mode: str, ending: str, status: int, last_line: str) -> None:
    shared_lab.write("job", f"import os, signal, sys\ndef main(argv):\n    {ending}\n")
    outcome = shared_lab.run("job", mode=mode)
    assert (outcome.status, outcome.stderr.strip().rpartition("\n")[2]) == (status, last_line)


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
import json, os, signal, sys, tempfile, threading
def main(argv):
    os.write(1, b"first ")
    print(json.dumps({
        "argv": argv, "sys.argv": sys.argv, "path": sys.path, "threads": threading.active_count(),
        "cwd": os.getcwd(), "umask": os.umask(0), "temporary": tempfile.gettempdir(),
        "environment": {k: v for k, v in os.environ.items() if k != "LMLAB_WARM_START"},
        "stdin": sys.stdin.read(), "session leader": os.getsid(0) == os.getpid(),
        "handlers": {int(s): str(signal.getsignal(s)).split(" at ")[0]
                     for s in signal.valid_signals()},
        "blocked": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "streams": [(s.encoding, s.errors, s.line_buffering, s.write_through, s.name, s.mode,
                     type(s.buffer).__name__) for s in (sys.stdin, sys.stdout, sys.stderr)],
        "descriptors": [fd for fd in range(256) if os.path.exists(f"/proc/self/fd/{fd}")],
    }, sort_keys=True))
    print("apart", file=sys.stderr)
if __name__ == "__main__":
    main(sys.argv[1:])
"""


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_surroundings_are_those_of_a_program(lab: Lab, unbuffered: str) -> None:
    lab.write("job", SURROUNDINGS)
    (lab.directory / "relative").mkdir()
    environment = {
        "PYTHONPATH": f"relative:{lab.python_path}",
        "PYTHONUNBUFFERED": unbuffered,
        "NOT_UTF_8": "\udcff ü",
        "TMPDIR": str(lab.directory),
    }
    arguments = ("--size", "a b", "")
    program = subprocess.run(
        [sys.executable, "-m", "job", *arguments],
        cwd=lab.directory,
        env=lab.environment("warm", **environment),
        input="two\nlines",
        capture_output=True,
        start_new_session=True,
        text=True,
        check=True,
    )
    for mode in ("warm", "plain"):
        outcome = lab.run("job", *arguments, mode=mode, stdin="two\nlines", **environment)
        assert outcome == (0, program.stdout, program.stderr)


WAITING = """
import pathlib, signal, sys, time
def main(argv):
    def handler(number, frame):
        print(signal.Signals(number).name, flush=True)
        sys.exit(20)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if argv[0] != "default":
            signal.signal(number, handler if argv[0] == "handled" else signal.SIG_IGN)
    pathlib.Path(argv[1]).touch()
    while True:  # a signal just before a long sleep would be handled after it
        time.sleep(0.01)
"""


@both_modes
@pytest.mark.parametrize(
    ("handling", "number", "expected"),
    [
        *(("handled", n, (20, f"{n.name}\n", "")) for n in SIGNALS),
        *(("default", n, (-n, "", "")) for n in SIGNALS),
        ("ignored", signal.SIGINT, (-signal.SIGKILL, "", "")),
    ],
)
def test_a_signal_to_the_client_ends_the_job_without_a_traceback(
    shared_lab: Lab, tmp_path: Path, mode: str, handling: str, number: int, expected: object
) -> None:
    shared_lab.write("job", WAITING)
    grace = {} if handling == "ignored" else {"GRACE_S": str(DEADLINE_S)}
    client = shared_lab.start("job", handling, str(tmp_path / "running"), mode=mode, **grace)
    wait_until((tmp_path / "running").exists)
    client.send_signal(number)
    assert finish(client) == expected


@both_modes
def test_a_caller_that_ignores_sigchld_still_gets_the_exit_status(lab: Lab, mode: str) -> None:
    script = f"import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n{CLIENT}"
    command, environment = [sys.executable, "-c", script, "trivial"], lab.environment(mode)
    client = subprocess.run(command, cwd=lab.directory, env=environment, stderr=subprocess.PIPE)
    assert client.stderr == b"status 4\n"
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


def test_a_fork_has_the_libraries_but_nothing_of_ours_and_no_gpu(tmp_path: Path) -> None:
    with warm_helpers() as runtime:
        lab = Lab(tmp_path, runtime, real_torch=True)
        lab.write("job", LOADED)
        outcome = lab.run("job")
    libraries = [True, True, torch.cuda.is_available()]
    assert outcome == (0, f"{libraries}\n[]\nFalse\nTrue\n", "")
