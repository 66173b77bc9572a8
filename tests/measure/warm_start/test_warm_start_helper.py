"""The helper: cheap after the first point, one for all clients, never stale, gone when idle."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from lmlab.measure.warm_start.libraries import CudaTouchedError
from lmlab.measure.warm_start.meeting_place import WarmStartUnavailable, private_directory
from lmlab.measure.warm_start.starting import WarmStartSettingError

from lmlab.measure.warm_start import libraries, run
from tests.measure.warm_start.conftest import CLIENT, Lab, gone, wait_until

pytestmark = pytest.mark.slow

TRIVIAL = "import torch\ndef main(argv):\n    print(torch.__version__)\n"
IGNORING_ITS_CHILDREN = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])
"""
PLAIN_LINE = "; a fresh process is used instead\n"


@pytest.mark.slow
def test_twenty_points_cost_well_under_a_second_each_beyond_the_first(torch_lab: Lab) -> None:
    torch_lab.write("trivial", TRIVIAL)
    torch_lab.run("trivial")
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        assert torch_lab.run("trivial").code == 0
        seconds.append(time.perf_counter() - start)
    assert max(seconds) < 1.0
    assert sorted(seconds)[10] < 0.5
    assert torch_lab.helpers()[0]["served"] == 21


def test_an_edit_between_two_points_is_seen(lab: Lab) -> None:
    package = lab.folder / "lmlab_like"
    package.mkdir()
    (package / "__init__.py").touch()
    lab.write("job", "from lmlab_like.model import NAME\ndef main(argv):\n    print(NAME)\n")
    for name in ("first", "the second"):
        (package / "model.py").write_text(f"NAME = {name!r}\n")
        assert lab.run("job").stdout == f"{name}\n"
    assert lab.helpers()[0]["served"] == 2


def test_clients_that_come_at_once_share_one_helper(lab: Lab) -> None:
    lab.write("parent", "import os\ndef main(argv):\n    print(os.getppid())\n")
    clients = [lab.start("parent") for _ in range(4)]
    parents = {client.finish().stdout for client in clients}
    assert parents == {f"{lab.helper().pid}\n"}


@pytest.mark.parametrize("remains", ["a-socket-nobody-answers", "a-plain-file"])
def test_what_a_dead_helper_left_behind_is_replaced(lab: Lab, remains: str) -> None:
    lab.write("trivial", "def main(argv):\n    return 0\n")
    assert lab.run("trivial").code == 0
    (path,) = lab.runtime.glob("*.sock")
    helper = lab.helper()
    helper.kill()
    wait_until(lambda: gone([helper.pid]))
    if remains == "a-plain-file":
        path.unlink()
        path.touch()
    outcome = lab.run("trivial")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert lab.helper().pid != helper.pid


def test_an_idle_helper_ends_and_takes_its_socket_along(lab: Lab) -> None:
    lab.write("trivial", "import time\ndef main(argv):\n    time.sleep(1)\n")
    client = lab.start("trivial", LMLAB_WARM_START_IDLE_S="0.3")
    wait_until(lambda: bool(lab.helpers()))
    helper = lab.helper()
    assert client.finish().code == 0  # a job longer than that is not idleness
    wait_until(lambda: gone([helper.pid]))
    assert list(lab.runtime.glob("*.sock")) == []


def test_a_helper_does_not_hold_on_to_the_pipes_of_the_client_that_started_it(lab: Lab) -> None:
    lab.write("trivial", "def main(argv):\n    print('out')\n")
    start = time.perf_counter()
    finished = subprocess.run(
        [sys.executable, "-c", "from lmlab.measure.warm_start import run; run('trivial', [])"],
        cwd=lab.folder,
        env=lab.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert finished.stdout == "out\n"
    held = {file.path for file in lab.helper().open_files()}
    assert held == {str(path) for path in lab.runtime.glob("*.log")}
    assert time.perf_counter() - start < 30


def test_other_environments_and_cpus_get_other_helpers(lab: Lab) -> None:
    lab.write("threads", "import os\ndef main(argv):\n    print(os.environ['OMP_NUM_THREADS'])\n")
    for threads in ("1", "2"):
        assert lab.run("threads", OMP_NUM_THREADS=threads).stdout == f"{threads}\n"
        devices = lab.run("threads", OMP_NUM_THREADS=threads, CUDA_VISIBLE_DEVICES=threads)
        assert devices.code == 0
    assert [helper["served"] for helper in lab.helpers()] == [2, 2]


def test_a_helper_whose_imports_open_the_gpu_refuses_to_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "listdir", lambda _: ["7"])
    monkeypatch.setattr(os, "readlink", lambda _: "/dev/nvidiactl")
    monkeypatch.setattr(libraries, "_AHEAD", ("json",))
    with pytest.raises(CudaTouchedError, match="importing json opened the GPU"):
        libraries.import_ahead()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A compiler that asks for GPUs while it is imported, on a machine that has one."""
    (tmp_path / "curious.py").write_text("import torch\nFOUND = torch.cuda.is_available()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(libraries, "_AHEAD", ("json",))
    monkeypatch.setattr(libraries, "_COMPILER", ("curious",))
    monkeypatch.setattr(libraries, "_sees_a_gpu", lambda: True)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.delitem(sys.modules, "curious", raising=False)
    return "curious"


def test_where_there_is_a_gpu_the_compiler_is_imported_without_asking_it(compiler: str) -> None:
    before = torch.cuda.is_available

    libraries.import_ahead()

    assert sys.modules.pop(compiler).FOUND is True
    assert torch.cuda.is_available is before


def test_a_compiler_that_opens_the_gpu_is_left_to_the_points(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "_cuda_is_open", lambda: compiler in sys.modules)

    libraries.import_ahead()

    assert compiler not in sys.modules


@pytest.mark.parametrize("broken", [False, True])
def test_without_a_gpu_or_an_answer_no_compiler_is_imported(
    broken: bool, compiler: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def sees_a_gpu() -> bool:
        assert not broken, "the driver is broken"
        return False

    monkeypatch.setattr(libraries, "_sees_a_gpu", sees_a_gpu)

    libraries.import_ahead()

    assert compiler not in sys.modules
    assert ("the driver is broken" in capfd.readouterr().err) is broken


def test_a_caller_that_ignores_the_end_of_its_children_gets_a_helper_too(lab: Lab) -> None:
    lab.write("trivial", "def main(argv):\n    return 3\n")
    client = [sys.executable, "-c", CLIENT, str(lab.folder / "report.json"), "trivial"]
    finished = subprocess.run(
        [sys.executable, "-c", IGNORING_ITS_CHILDREN, *client],
        cwd=lab.folder,
        env=lab.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.stderr == ""
    assert [helper["served"] for helper in lab.helpers()] == [1]


def test_a_folder_with_a_very_long_name_will_do(lab: Lab) -> None:
    lab.runtime = lab.runtime / ("long" * 40)
    lab.write("trivial", "def main(argv):\n    return 0\n")
    outcome = lab.run("trivial")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert len(lab.helpers()) == 1


def test_a_folder_that_others_can_enter_is_refused_and_the_job_done_plainly(lab: Lab) -> None:
    lab.write("trivial", "def main(argv):\n    return 4\n")
    lab.runtime.mkdir(mode=0o755)
    outcome = lab.run("trivial")
    complaint = f"warm start: {lab.runtime} is open to others (mode 755, must be 700)"
    assert (outcome.code, outcome.stderr) == (4, complaint + PLAIN_LINE)


def test_a_folder_of_somebody_else_or_a_link_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMLAB_RUNTIME_DIR", str(tmp_path / "link"))
    (tmp_path / "target").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(WarmStartUnavailable, match="is not a folder"):
        private_directory()
    monkeypatch.setenv("LMLAB_RUNTIME_DIR", str(tmp_path / "target"))
    assert private_directory() == tmp_path / "target"
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(WarmStartUnavailable, match=r"belongs to user \d+, not to user \d+"):
        private_directory()


def test_a_helper_that_cannot_start_says_why_and_the_job_is_done_plainly(lab: Lab) -> None:
    (lab.folder / "broken").mkdir()
    (lab.folder / "broken" / "torch.py").write_text("raise ImportError('no torch on this disk')\n")
    lab.write("trivial", "def main(argv):\n    return 4\n")
    outcome = lab.run("trivial", PYTHONPATH=f"{lab.folder / 'broken'}:{lab.python_path}")
    reason = "the helper cannot start: ImportError: no torch on this disk"
    assert (outcome.code, outcome.stderr) == (4, f"warm start: {reason}{PLAIN_LINE}")


def test_switched_off_no_helper_is_started(lab: Lab) -> None:
    lab.write("trivial", "def main(argv):\n    return 4\n")
    outcome = lab.run("trivial", mode="plain")
    assert (outcome.code, outcome.stderr) == (4, "")
    assert not lab.runtime.exists()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("LMLAB_WARM_START", "yes", "0 and 1 are allowed"),
        ("LMLAB_WARM_START_IDLE_S", "soon", "a number of seconds above 0 is allowed"),
        ("LMLAB_WARM_START_IDLE_S", "-1", "a number of seconds above 0 is allowed"),
    ],
)
def test_a_setting_that_means_nothing_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(WarmStartSettingError, match=f"^{name} is '{value}': {allowed}$"):
        run("job", [])


def test_the_command_shows_helpers_and_stops_them(lab: Lab) -> None:
    lab.write("trivial", "def main(argv):\n    return 0\n")
    assert lab.command("--status").stdout == "no helper runs\n"
    assert lab.command("--status").returncode == 1
    lab.run("trivial")
    helper = lab.helper()
    shown = lab.command("--status")
    assert shown.returncode == 0
    assert shown.stdout.startswith(f"helper {helper.pid}: ")
    assert "1 jobs served, 0 running" in shown.stdout
    assert f"helper {helper.pid} stopped" in lab.command("--stop").stdout
    wait_until(lambda: gone([helper.pid]))
    assert list(lab.runtime.glob("*.sock")) == []
    assert lab.command("--stop").returncode == 0


def test_a_silent_client_holds_nobody_up(lab: Lab) -> None:
    lab.write("trivial", "def main(argv):\n    return 0\n")
    lab.run("trivial")
    (path,) = lab.runtime.glob("*.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(str(path))
        silent.sendall(b"\0\0")
        assert lab.run("trivial").code == 0
    assert psutil.pid_exists(lab.helper().pid)
