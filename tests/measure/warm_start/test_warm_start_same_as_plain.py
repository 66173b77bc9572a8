"""A job cannot tell whether it was forked from the helper or started as a fresh process."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.measure.warm_start.conftest import Lab, wait_until

pytestmark = pytest.mark.slow

both_ways = pytest.mark.parametrize("mode", ["warm", "plain"])


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        pytest.param("return 0", 0, id="success"),
        pytest.param("return 3", 3, id="returned"),
        pytest.param("return None", 0, id="returned-nothing"),
        pytest.param("sys.exit(7)", 7, id="sys.exit"),
        pytest.param("sys.exit()", 0, id="sys.exit-bare"),
        pytest.param("sys.exit('no such size')", 1, id="sys.exit-text"),
        pytest.param("sys.exit(256 + 5)", 5, id="sys.exit-beyond-a-byte"),
        pytest.param("raise RuntimeError('broken')", 1, id="exception"),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", -9, id="killed"),
        pytest.param("os.abort()", -6, id="aborted"),
        pytest.param("raise KeyboardInterrupt", -2, id="interrupted"),
        pytest.param("os._exit(9)", 9, id="os._exit"),
    ],
)
@both_ways
def test_every_way_to_end_gives_the_same_code(
    torch_lab: Lab, mode: str, ending: str, code: int
) -> None:
    source = f"import os, signal, sys\ndef main(argv):\n    {ending}\n"
    torch_lab.write("ending", source)
    assert torch_lab.run("ending", mode=mode).code == code


@both_ways
def test_an_uncaught_error_shows_its_traceback_and_an_exit_text_its_text(
    torch_lab: Lab, mode: str
) -> None:
    torch_lab.write("failing", "def main(argv):\n    raise RuntimeError('no attention')\n")
    torch_lab.write("refusing", "import sys\ndef main(argv):\n    sys.exit('no such size')\n")
    lines = torch_lab.run("failing", mode=mode).stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "RuntimeError: no attention"
    assert torch_lab.run("refusing", mode=mode).stderr == "no such size\n"


@both_ways
@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        pytest.param("", "module 'job' cannot be run: it has no function main(argv)", id="no-main"),
        pytest.param("import nowhere", "No module named 'nowhere'", id="failing-import"),
    ],
)
def test_a_module_that_cannot_be_run_says_why(
    torch_lab: Lab, mode: str, source: str, complaint: str
) -> None:
    torch_lab.write("job", source)
    outcome = torch_lab.run("job", mode=mode)
    assert outcome.code == 1
    assert complaint in outcome.stderr.splitlines()[-1]


SURROUNDINGS = """
import json, os, signal, sys, tempfile
def main(argv):
    os.write(1, b"first ")
    print(json.dumps({
        "argv": argv, "sys.argv": sys.argv, "cwd": os.getcwd(), "environ": dict(os.environ),
        "umask": os.umask(0), "path": sys.path, "typed": sys.stdin.read(),
        "temporary": tempfile.gettempdir(), "leader": os.getsid(0) == os.getpid(),
        "session's terminal": [os.isatty(fd) for fd in range(3)],
        "signals": {int(s): str(signal.getsignal(s)) for s in signal.valid_signals()
                    if not str(signal.getsignal(s)).startswith("<")},
        "blocked": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "streams": [(s.encoding, s.errors, s.line_buffering,
                     s.write_through, s.name, s.mode, type(s.buffer).__name__)
                    for s in (sys.stdin, sys.stdout, sys.stderr)],
        "descriptors": [fd for fd in range(256) if _is_open(fd)],
        "main": sys.modules["__main__"].__name__,
    }))
    print("apart", file=sys.stderr)

def _is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
"""


def _surroundings(lab: Lab, mode: str, unbuffered: str) -> dict[str, object]:
    # A relative PYTHONPATH, a text that is not UTF-8, a folder for temporary files.
    (lab.folder / "elsewhere").mkdir(exist_ok=True)
    more = {
        "PYTHONPATH": f"elsewhere:{lab.python_path}",
        "PYTHONUNBUFFERED": unbuffered,
        "ODD": "\udcff ü",
        "TMPDIR": str(lab.folder),
    }
    outcome = lab.run("surroundings", "--size", "a b", "", mode=mode, typed="two\nlines", **more)
    assert outcome.code == 0
    assert outcome.stderr == "apart\n"
    assert outcome.stdout.startswith("first {")
    found: dict[str, object] = json.loads(outcome.stdout.removeprefix("first "))
    return found


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_arguments_folder_environment_streams_and_signals_are_those_of_a_plain_run(
    lab: Lab, unbuffered: str
) -> None:
    lab.write("surroundings", SURROUNDINGS)
    warm, plain = (_surroundings(lab, mode, unbuffered) for mode in ("warm", "plain"))
    assert warm["argv"] == ["--size", "a b", ""]
    assert warm["cwd"] == str(lab.folder)
    assert warm["typed"] == "two\nlines"
    for found in (warm, plain):
        environment = found["environ"]
        assert isinstance(environment, dict)
        del environment["LMLAB_WARM_START"]  # what tells the two runs apart
    assert warm == plain


@both_ways
def test_all_output_arrives_also_what_was_not_flushed(torch_lab: Lab, mode: str) -> None:
    torch_lab.write("chatty", "def main(argv):\n    print('x' * 300_000, end='')\n")
    assert torch_lab.run("chatty", mode=mode).stdout == "x" * 300_000


@both_ways
def test_exit_functions_run_and_threads_are_waited_for(torch_lab: Lab, mode: str) -> None:
    source = (
        "import atexit, threading, time\n"
        "def late():\n    time.sleep(0.2)\n    print('thread')\n"
        "def main(argv):\n"
        "    atexit.register(print, 'exit function')\n"
        "    threading.Thread(target=late).start()\n"
    )
    torch_lab.write("late", source)
    assert torch_lab.run("late", mode=mode).stdout.split("\n") == ["thread", "exit function", ""]


@both_ways
def test_a_spawned_worker_finds_the_functions_of_the_job(torch_lab: Lab, mode: str) -> None:
    source = (
        "import multiprocessing\n"
        "def double(x):\n    return 2 * x\n"
        "def main(argv):\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(double, [1, 2]))\n"
    )
    torch_lab.write("spawning", source)
    assert torch_lab.run("spawning", mode=mode).stdout == "[2, 4]\n"


WAITING = """
import pathlib, signal, sys, time
def main(argv):
    def note(number, frame):
        print(signal.Signals(number).name, flush=True)
        sys.exit(20)
    if argv[0] == "handled":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, note)
    pathlib.Path(argv[1]).touch()
    time.sleep(60)
"""


@both_ways
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("handling", ["handled", "default"])
def test_a_signal_to_the_client_reaches_the_job(
    torch_lab: Lab, mode: str, number: signal.Signals, handling: str, tmp_path: Path
) -> None:
    torch_lab.write("waiting", WAITING)
    client = torch_lab.start("waiting", handling, str(tmp_path / "there"), mode=mode)
    wait_until((tmp_path / "there").exists)
    client.process.send_signal(number)
    outcome = client.finish()
    expected = (20, f"{number.name}\n") if handling == "handled" else (-number, "")
    assert (outcome.code, outcome.stdout) == expected


TORCH = """
import torch
def main(argv):
    torch.set_num_threads(2)
    a = torch.ones(512, 512)
    for _ in range(2):
        assert (a @ a).sum().item() == 512.0**3
    parameter = torch.nn.Parameter(a.clone())
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    (parameter @ a).sum().backward()
    optimizer.step()
    print(torch.cuda.is_available() in (True, False), parameter[0, 0].item())
"""


@both_ways
def test_parallel_torch_operations_and_the_question_for_cuda_work(
    torch_lab: Lab, mode: str
) -> None:
    torch_lab.write("calculating", TORCH)
    outcome = torch_lab.run("calculating", mode=mode)
    assert (outcome.code, outcome.stdout) == (0, "True -511.0\n"), outcome.stderr


def test_a_job_finds_nothing_of_ours_imported(torch_lab: Lab) -> None:
    source = (
        "import sys\n"
        "def main(argv):\n"
        "    print([name for name in sys.modules if name.startswith('lmlab')])\n"
        "    print('torch' in sys.modules, len(sys.argv))\n"
    )
    torch_lab.write("looking", source)
    assert torch_lab.run("looking").stdout == "[]\nTrue 1\n"


def test_a_job_with_cold_asked_for_is_a_fresh_interpreter(torch_lab: Lab) -> None:
    torch_lab.write("looking", "import sys\ndef main(argv):\n    return 'torch' in sys.modules\n")
    torch_lab.write(
        "asking",
        "from lmlab.measure.warm_start import run\n"
        "def main(argv):\n    print(run('looking', []), run('looking', [], cold=True))\n",
    )
    assert torch_lab.run("asking", mode="warm").stdout == "1 0\n"
