"""Who starts, shares, replaces and survives whom: helpers, supervisors, clients and jobs."""

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from lmlab.measure import warm_start
from lmlab.measure.warm_start import helper, run
from lmlab.measure.warm_start.processes import relay_signals
from lmlab.measure.warm_start.socket_path import connect, private_directory, socket_path
from tests.measure.warm_start.conftest import Lab, finish
from tests.processes import is_gone, wait_until

pytestmark = pytest.mark.slow

# Who is killed, if anyone, and the exit status that a client sees if it survives.
STATUS = {None: 0, "client": None, "job": -signal.SIGKILL, "helper": 0}
STATUS |= {"supervisor": os.EX_TEMPFAIL}
VICTIMS = {"warm": STATUS, "plain": (None, "client", "job")}


@pytest.mark.parametrize(("mode", "victim"), [(mode, v) for mode in VICTIMS for v in VICTIMS[mode]])
def test_no_process_survives(lab: Lab, mode: str, victim: str | None) -> None:
    status = STATUS[victim]
    client, pids = lab.start_family(mode=mode)
    others = {"client": client.pid, "helper": psutil.Process(pids["supervisor"]).ppid()}
    if victim:
        os.kill({**pids, **others}[victim], signal.SIGKILL)
    if status is None:
        client.communicate()
    else:
        assert finish(client).status == status, "a job not killed ends when its input does"
    wait_until(lambda: all(map(is_gone, pids.values())))
    assert lab.run("trivial", mode=mode) == (4, "", "")
    if mode == "warm":
        assert (lab.helpers() == [others["helper"]]) == (victim != "helper")


def test_clients_share_a_helper_and_leave_each_other_alone(lab: Lab) -> None:
    lab.write("echo", "import sys\ndef main(argv):\n    print(sys.stdin.read())\n")
    others = [lab.start("echo") for _ in range(3)]
    killed, pids = lab.start_family()
    (path,) = lab.runtime.glob("*.sock")
    with socket.socket(socket.AF_UNIX) as silent:  # one that never sends anything
        silent.connect(str(path))
        killed.kill()
        killed.communicate()
        wait_until(lambda: all(map(is_gone, pids.values())))
        assert {finish(other, "here").stdout for other in others} == {"here\n"}
    assert len(lab.helpers()) == 1


def test_a_file_in_place_of_a_socket_is_replaced(lab: Lab) -> None:
    lab.run("trivial")
    (path,) = lab.runtime.glob("*.sock")
    stopped = lab.helpers("--stop")
    path.touch()
    assert lab.run("trivial") == (4, "", "")
    assert lab.helpers() != stopped


def test_a_helper_ends_when_it_is_idle_and_has_no_client(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "sock"))
    listener.listen()
    client = connect(tmp_path / "sock")
    assert client is not None
    if (pid := os.fork()) == 0:
        try:
            client.close()
            helper.serve(listener, idle_s=0.001)
        finally:
            os._exit(0)
    with client, listener:
        assert client.recv(1), "there is a supervisor for this client"
        assert not is_gone(pid)
    wait_until(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid)


def test_a_client_can_be_ended_while_the_helper_imports(lab: Lab) -> None:
    importing = lab.directory / "importing"
    lab.torch.write_text(f"import time; open({str(importing)!r}, 'w'); time.sleep(3600)\n")
    client = lab.start("trivial")
    wait_until(importing.exists)
    client.terminate()
    client.communicate()
    assert client.returncode == -signal.SIGTERM


def test_a_process_that_differs_from_the_helper_gets_another(lab: Lab) -> None:
    lab.run("trivial", OMP_NUM_THREADS="1")
    lab.run("trivial", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")  # read when CUDA is first used
    assert len(lab.helpers()) == 1
    lab.run("trivial", OMP_NUM_THREADS="2")  # read when OpenMP is loaded
    lab.torch.write_text("__version__ = '2'\n")
    lab.run("trivial", OMP_NUM_THREADS="2")
    with pytest.raises(subprocess.CalledProcessError):
        lab.helpers("--misspelled")
    helpers = lab.helpers()
    assert len(helpers) == 3
    assert lab.helpers("--stop") == helpers
    wait_until(lambda: all(map(is_gone, helpers)))
    assert lab.helpers() == []


OBSTACLES: dict[str, Callable[[Lab], object]] = {
    "a directory open to others": lambda lab: lab.runtime.chmod(0o755),
    "a library that cannot be imported": lambda lab: lab.torch.write_text("raise ImportError\n"),
    "too long an address": lambda lab: setattr(lab, "runtime", lab.runtime / ("long" * 40)),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_without_a_usable_helper_the_job_runs_plainly(lab: Lab, obstacle: str) -> None:
    OBSTACLES[obstacle](lab)
    status, stdout, stderr = lab.run("trivial")
    lab.runtime.chmod(0o700)
    assert (status, stdout, stderr.count("\n")) == (4, "", 1)


def test_a_process_that_never_answers_has_failed_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMLAB_WARM_START", "0")
    monkeypatch.setattr(warm_start, "ANSWER_TIMEOUT_S", 0.001)
    monkeypatch.setattr(warm_start, "_start", lambda theirs: closing(theirs.dup()))
    assert run("job", []) == os.EX_TEMPFAIL


def test_an_unsafe_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "target").mkdir(mode=0o700)
    monkeypatch.setenv("LMLAB_RUNTIME_DIR", str(tmp_path / "target"))
    assert private_directory() == tmp_path / "target"
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="target"):
        private_directory()
    monkeypatch.undo()
    monkeypatch.setenv("LMLAB_RUNTIME_DIR", str(tmp_path / "link"))
    with pytest.raises(PermissionError, match="link"):
        private_directory()


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID"])
def test_an_allocation_has_a_helper_of_its_own(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    first = socket_path()
    monkeypatch.setenv(name, "2")
    assert socket_path() != first


def test_a_signal_before_the_job_is_known_is_held_for_it() -> None:
    with relay_signals() as set_target:
        signal.raise_signal(signal.SIGTERM)
        job = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        set_target(job.pid)
        assert job.wait() == -signal.SIGTERM
    with pytest.raises(KeyboardInterrupt), relay_signals():
        signal.raise_signal(signal.SIGINT)  # there is no job


def test_an_invalid_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMLAB_WARM_START", "yes")
    with pytest.raises(ValueError, match="LMLAB_WARM_START = 'yes'"):
        run("job", [])
