"""Who starts, shares, replaces and survives whom: helpers, supervisors, clients and jobs."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lmlab.measure.warm_start import helper, run
from lmlab.measure.warm_start.socket_path import (
    WarmStartUnavailable,
    connect,
    listen,
    private_directory,
)
from tests.measure.warm_start.conftest import Lab, finish, is_gone, wait_until

pytestmark = pytest.mark.slow

TRIVIAL = "def main(argv):\n    return 4\n"
# Starts a process in its session, one in a session of its own, and one that is orphaned as well.
FAMILY = """
import json, os, pathlib, subprocess, sys, time
SLEEP = [sys.executable, "-c", "import time; time.sleep(3600)"]
ORPHAN = f"import subprocess; print(subprocess.Popen({SLEEP!r}, stdout=2).pid)"
def main(argv):
    child = subprocess.Popen(SLEEP).pid
    session = subprocess.Popen(SLEEP, start_new_session=True).pid
    between = [sys.executable, "-c", ORPHAN]
    orphan = int(subprocess.check_output(between, start_new_session=True))
    pids = {"supervisor": os.getppid(), "job": os.getpid()}
    pids |= {"child": child, "session": session, "orphan": orphan}
    pathlib.Path("temporary").write_text(json.dumps(pids))
    pathlib.Path("temporary").rename("pids")
    if argv:
        time.sleep(3600)
"""


@pytest.mark.parametrize(
    ("mode", "victim", "status"),
    [
        ("warm", "client", None),
        ("warm", "helper", os.EX_TEMPFAIL),
        ("warm", "supervisor", os.EX_TEMPFAIL),
        ("warm", "job", -signal.SIGKILL),
        ("plain", "client", None),
        ("plain", "job", -signal.SIGKILL),
    ],
)
def test_no_process_remains_after_kill_9(
    lab: Lab, mode: str, victim: str, status: int | None
) -> None:
    lab.write("family", FAMILY)
    client = lab.start("family", "wait", mode=mode)
    pids = lab.read_pids("pids")
    others = {"client": client.pid, "helper": psutil.Process(pids["supervisor"]).ppid()}
    os.kill({**pids, **others}[victim], signal.SIGKILL)
    wait_until(lambda: all(map(is_gone, pids.values())))
    if status is None:
        client.communicate()
    else:
        assert finish(client).status == status
    lab.write("trivial", TRIVIAL)
    assert lab.run("trivial", mode=mode) == (4, "", "")
    if mode == "warm":
        assert (lab.helpers() == [others["helper"]]) == (victim != "helper")


@pytest.mark.parametrize("mode", ["warm", "plain"])
def test_no_process_remains_after_success(lab: Lab, mode: str) -> None:
    lab.write("family", FAMILY)
    assert lab.run("family", mode=mode).status == 0
    wait_until(lambda: all(map(is_gone, lab.read_pids("pids").values())))


def test_killing_one_job_leaves_others_alone(lab: Lab) -> None:
    lab.write("family", FAMILY)
    lab.write("echo", "import sys\ndef main(argv):\n    print(sys.stdin.read())\n")
    killed, other = lab.start("family", "wait"), lab.start("echo")
    pids = lab.read_pids("pids")
    killed.kill()
    wait_until(lambda: all(map(is_gone, pids.values())))
    killed.communicate()
    assert finish(other, "still here").stdout == "still here\n"


def test_simultaneous_clients_share_one_helper(lab: Lab) -> None:
    lab.write("job", "import os\ndef main(argv):\n    print(os.getppid(), input())\n")
    clients = [lab.start("job") for _ in range(4)]
    outputs = [finish(client, "done\n").stdout.split() for client in clients]
    assert len({supervisor for supervisor, _ in outputs}) == 4
    assert len(lab.helpers()) == 1


def test_a_client_that_sends_nothing_holds_nobody_up(lab: Lab) -> None:
    lab.write("job", TRIVIAL)
    lab.run("job")
    (path,) = lab.runtime.glob("*.sock")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(path))
        assert lab.run("job") == (4, "", "")


@pytest.mark.parametrize("left_behind", ["socket", "file"])
def test_what_a_dead_helper_left_behind_is_replaced(lab: Lab, left_behind: str) -> None:
    lab.write("job", TRIVIAL)
    lab.run("job")
    (path,) = lab.runtime.glob("*.sock")
    (first,) = lab.helpers()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: is_gone(first))
    if left_behind == "file":
        path.unlink()
        path.touch()
    assert lab.run("job") == (4, "", "")
    assert lab.helpers() != [first]


def test_an_idle_helper_ends_but_not_while_it_has_a_client(tmp_path: Path) -> None:
    listener = listen(tmp_path / "sock")
    client = connect(tmp_path / "sock")
    assert client is not None
    if (pid := os.fork()) == 0:
        try:
            client.close()
            helper.serve(listener, idle_s=0.001)
        finally:
            os._exit(0)
    with client, listener:
        time.sleep(0.05)  # a loaded machine makes this longer, which is just as good
        assert not is_gone(pid)
    wait_until(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid)


def test_a_client_can_be_ended_while_the_helper_imports(lab: Lab) -> None:
    importing = lab.directory / "importing"
    source = f"import time; open({str(importing)!r}, 'w'); time.sleep(3600)\n"
    (lab.libraries / "torch" / "__init__.py").write_text(source)
    client = lab.start("job")
    wait_until(importing.exists)
    client.terminate()
    client.communicate()
    assert client.returncode == -signal.SIGTERM


def test_helpers_end_by_themselves_and_on_request(lab: Lab) -> None:
    lab.write("job", TRIVIAL)
    for threads in ("1", "2"):  # OpenMP reads it when it is loaded: two helpers
        assert lab.run("job", OMP_NUM_THREADS=threads).status == 4
    lab.run("job", OMP_NUM_THREADS="2", CUDA_VISIBLE_DEVICES="")  # read later: no third one
    helpers = lab.helpers()
    assert len(helpers) == 2
    assert lab.helpers("--stop") == helpers
    wait_until(lambda: all(map(is_gone, helpers)))
    assert list(lab.runtime.glob("*.sock")) == lab.helpers() == []
    lab.run("job", LMLAB_WARM_START_IDLE_S="0.001")
    wait_until(lambda: not list(lab.runtime.glob("*.sock")))


def test_another_version_of_a_library_gets_another_helper(lab: Lab) -> None:
    lab.write("job", TRIVIAL)
    lab.run("job")
    (lab.libraries / "torch" / "__init__.py").write_text("__version__ = '2'\n")
    lab.run("job")
    assert len(lab.helpers()) == 2


def open_to_others(lab: Lab) -> None:
    lab.runtime.chmod(0o755)


def broken_library(lab: Lab) -> None:
    (lab.libraries / "torch" / "__init__.py").write_text("raise ImportError('no torch')\n")


def too_long_address(lab: Lab) -> None:
    lab.runtime = lab.runtime / ("long" * 40)


@pytest.mark.parametrize("obstacle", [open_to_others, broken_library, too_long_address])
def test_without_a_usable_helper_the_job_runs_plainly(
    lab: Lab, obstacle: Callable[[Lab], None]
) -> None:
    obstacle(lab)
    lab.write("job", "import os\ndef main(argv):\n    return 4\n")
    outcome = lab.run("job")
    assert (outcome.status, outcome.stdout) == (4, "")
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("warm start: ")
    assert line.endswith("; using a fresh process instead")


def test_a_directory_of_another_user_or_a_link_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "target").mkdir(mode=0o700)
    monkeypatch.setenv("LMLAB_RUNTIME_DIR", str(tmp_path / "target"))
    assert private_directory() == tmp_path / "target"
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(WarmStartUnavailable, match="target is drwx------ of user"):
        private_directory()
    monkeypatch.undo()
    monkeypatch.setenv("LMLAB_RUNTIME_DIR", str(tmp_path / "link"))
    with pytest.raises(WarmStartUnavailable, match="link is lrwx"):
        private_directory()


def test_switched_off_no_helper_is_started(lab: Lab) -> None:
    lab.write("job", TRIVIAL)
    assert lab.run("job", mode="plain") == (4, "", "")
    assert list(lab.runtime.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LMLAB_WARM_START", "yes"),
        ("LMLAB_WARM_START_IDLE_S", "soon"),
        ("LMLAB_WARM_START_IDLE_S", "-1"),
    ],
)
def test_an_invalid_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{name} = '{value}'; allowed: "):
        run("job", [])
