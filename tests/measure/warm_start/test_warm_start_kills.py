"""kill -9 of anyone loses the point that ran, leaves no process, and the next point works."""

from __future__ import annotations

import os
import signal

import pytest

from tests.measure.warm_start.conftest import Lab, gone, wait_until

pytestmark = pytest.mark.slow

# Writes down itself and two it has started: one in its session, one that opened its own.
FAMILY = """
import os, pathlib, subprocess, sys, time
def main(argv):
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    near = subprocess.Popen(sleeper)
    far = subprocess.Popen(sleeper, start_new_session=True)
    pathlib.Path("pids").write_text(f"{os.getpid()} {near.pid} {far.pid}")
    if argv == ["wait"]:
        time.sleep(600)
"""
# The one in between ends at once, so its child has neither the job's session nor its ancestry.
ORPHANING = """
import os, pathlib, subprocess, sys, time
def main(argv):
    sleep = "import time; time.sleep(600)"
    between = (
        "import subprocess, sys; "
        f"print(subprocess.Popen([sys.executable, '-c', '{sleep}'], stdout=2).pid)"
    )
    started = subprocess.run(
        [sys.executable, "-c", between], start_new_session=True, stdout=subprocess.PIPE
    )
    pathlib.Path("pids").write_text(started.stdout.decode())
"""
TRIVIAL = "def main(argv):\n    print('fine')\n"


@pytest.fixture
def jobs(lab: Lab) -> Lab:
    lab.write("family", FAMILY)
    lab.write("orphaning", ORPHANING)
    lab.write("trivial", TRIVIAL)
    return lab


def test_kill_of_the_client_ends_the_job_and_all_it_started(jobs: Lab) -> None:
    client = jobs.start("family", "wait")
    pids = jobs.noted_pids("pids", 3)
    helper = jobs.helper()
    client.process.kill()
    wait_until(lambda: gone(pids))
    client.process.wait()
    wait_until(lambda: not helper.children())
    assert jobs.run("trivial").stdout == "fine\n"
    assert jobs.helper() == helper
    client.process.communicate()


def test_kill_of_the_helper_ends_the_job_and_what_is_in_its_session(jobs: Lab) -> None:
    client = jobs.start("family", "wait")
    job, near, far = jobs.noted_pids("pids", 3)
    helper = jobs.helper()
    helper.kill()
    client.process.wait(timeout=20)
    # What opened a session of its own is beyond the reach of a client without a helper.
    os.kill(far, signal.SIGKILL)
    outcome = client.finish()
    wait_until(lambda: gone([helper.pid, job, near]))
    assert outcome.code == os.EX_TEMPFAIL
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("warm start: the helper was killed and the job with it; the next job")
    assert jobs.run("trivial").stdout == "fine\n"
    assert jobs.helper().pid != helper.pid


def test_kill_of_the_job_is_reported_and_ends_what_it_started(jobs: Lab) -> None:
    client = jobs.start("family", "wait")
    pids = jobs.noted_pids("pids", 3)
    helper = jobs.helper()
    os.kill(pids[0], signal.SIGKILL)
    assert client.finish().code == -signal.SIGKILL
    wait_until(lambda: gone(pids) and not helper.children())
    assert jobs.run("trivial").stdout == "fine\n"
    assert jobs.helper() == helper


def test_a_job_that_ends_well_leaves_nothing_running_either(jobs: Lab) -> None:
    assert jobs.run("family").code == 0
    wait_until(lambda: gone(jobs.noted_pids("pids", 3)))
    assert jobs.run("orphaning").code == 0
    wait_until(lambda: gone(jobs.noted_pids("pids", 1)))
    assert jobs.helper().children() == []


def test_kill_of_the_client_of_a_plain_run_ends_the_job(jobs: Lab) -> None:
    client = jobs.start("family", "wait", mode="plain")
    job, *started = jobs.noted_pids("pids", 3)
    client.process.kill()
    wait_until(lambda: gone([job]))
    for pid in started:  # nobody is left to end these: that is what the helper is for
        os.kill(pid, signal.SIGKILL)
    client.process.communicate()


def test_a_plain_run_leaves_nothing_of_its_session_running(jobs: Lab) -> None:
    client = jobs.start("family", mode="plain")
    _, near, far = jobs.noted_pids("pids", 3)
    client.process.wait(timeout=20)
    os.kill(far, signal.SIGKILL)
    assert client.finish().code == 0
    wait_until(lambda: gone([near]))


def test_one_job_dying_leaves_its_neighbour_alone(jobs: Lab) -> None:
    doomed = jobs.start("family", "wait")
    pids = jobs.noted_pids("pids", 3)
    jobs.write("patient", "import sys\ndef main(argv):\n    print(sys.stdin.read())\n")
    neighbour = jobs.start("patient")
    wait_until(lambda: len(jobs.helpers()[0]["running"]) == 2)
    doomed.process.kill()
    wait_until(lambda: gone(pids))
    assert neighbour.finish("still here").stdout == "still here\n"
    doomed.process.communicate()
