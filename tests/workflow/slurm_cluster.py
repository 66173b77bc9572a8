"""A real single-node Slurm in its own folder, started by a test and stopped after it.

It neither reads nor writes the machine's own Slurm and needs no root: the three daemons run as the
current user, on free ports and in the foreground, so they end with the test. The node declares
/dev/null as a GPU, which Slurm gives to one job at a time, and cores and memory that the machine
may lack. Slurm ends whole process groups: Snakemake can hang in its handler of SIGTERM.
"""

import contextlib
import os
import pwd
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from tests.processes import wait_until

# Daemons are installed outside an ordinary user's PATH.
SEARCHED = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
PROGRAMS = {
    name: shutil.which(name, path=SEARCHED) or ""
    for name in (
        *("munged", "slurmctld", "slurmd"),
        *("sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun"),
    )
}
MISSING = [name for name, path in PROGRAMS.items() if not path]
USER = pwd.getpwuid(os.getuid()).pw_name
PATIENCE_S = 60.0

SLURM_CONF = """\
ClusterName=lmlab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=100000
ReturnToService=2
MinJobAge=300
KillWait=5
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=200000 Gres=gpu:1
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
GRES_CONF = "NodeName={host} Name=gpu Count=1 File=/dev/null\n"
# Snakemake's job step removes SLURM_CONF from the environment of the srun that it calls.
SRUN = '#!/bin/sh\nSLURM_CONF={folder}/slurm.conf exec {srun} "$@"\n'


@dataclass(frozen=True)
class SlurmJob:
    id: str
    state: str
    gpus: str
    start: datetime
    end: datetime


@dataclass(frozen=True)
class Cluster:
    """A running Slurm, and how to reach it."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Variables that point Slurm's commands at this cluster; our `srun` comes first."""
        path = (self.folder / "bin", Path(sys.executable).parent, os.environ["PATH"])
        return {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": os.pathsep.join(map(str, path)),
        }

    def ask(self, *words: str) -> str:
        environment = {**os.environ, **self.environment}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    def jobs(self, folder: Path) -> list[SlurmJob]:
        """All jobs submitted from a folder; the controller keeps them for MinJobAge seconds."""
        shown = self.ask("scontrol", "--oneliner", "show", "job").splitlines()
        jobs = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in shown if "JobId=" in line]
        return [
            SlurmJob(
                *(job[key] for key in ("JobId", "JobState", "TresPerJob")),
                *(datetime.fromisoformat(job[key]) for key in ("StartTime", "EndTime")),
            )
            for job in jobs
            if job["WorkDir"] == str(folder)
        ]

    def processes(self) -> list[str]:
        """Command lines of this cluster's processes: daemons, job steps, leftovers of jobs."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if str(self.folder) in " ".join([*words, *process.environ().values()]):
                    found.append(" ".join(words))
        return found


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Start a cluster and wait until its node is idle; on exit, cancel jobs and stop daemons."""
    cluster = Cluster(folder)
    _write_files(folder)
    with _logs_shown(folder), contextlib.ExitStack() as daemons:
        for words in _daemons(folder):
            daemons.enter_context(_daemon(words, folder))
            if words[0].endswith("munged"):
                wait_until((folder / "munge.socket").exists, "munged")
        wait_until(lambda: _is_idle(cluster), "the node")
        try:
            yield cluster
        finally:
            cluster.ask("scancel", "--user", USER)
            wait_until(lambda: not cluster.ask("squeue", "-h"), "the end of all jobs")


@contextlib.contextmanager
def _logs_shown(folder: Path) -> Iterator[None]:
    """Print the ends of the daemons' logs if something is not as expected."""
    try:
        yield
    except AssertionError:
        print(*(log.read_text()[-2000:] for log in sorted(folder.glob("*.log"))), sep="\n")
        raise


def _write_files(folder: Path) -> None:
    folder.chmod(0o755)  # munge insists that everyone can reach its socket
    for name in ("state", "spool", "bin"):
        (folder / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    controller_port, node_port = _free_ports(2)
    known = {"host": host, "folder": folder, "user": USER}
    ports = {"controller_port": controller_port, "node_port": node_port}
    (folder / "slurm.conf").write_text(SLURM_CONF.format(**known, **ports))
    (folder / "gres.conf").write_text(GRES_CONF.format(host=host))
    srun = folder / "bin" / "srun"
    srun.write_text(SRUN.format(folder=folder, srun=PROGRAMS["srun"]))
    srun.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _daemons(folder: Path) -> list[list[str]]:
    """Command lines of the daemons, in the order in which they must start."""
    files = ("key-file", "socket", "pid-file", "log-file", "seed-file")
    options = [f"--{file}={folder}/munge.{file.removesuffix('-file')}" for file in files]
    configured = ["-D", "-f", str(folder / "slurm.conf")]
    return [
        [PROGRAMS["munged"], "--foreground", *options],
        [PROGRAMS["slurmctld"], *configured],
        [PROGRAMS["slurmd"], *configured],
    ]


@contextlib.contextmanager
def _daemon(words: Sequence[str], folder: Path) -> Iterator[None]:
    with (
        open(folder / "daemons.log", "ab") as log,
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
    ):
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _is_idle(cluster: Cluster) -> bool:
    try:
        return cluster.ask("sinfo", "-h", "-o", "%T").strip() == "idle"
    except subprocess.CalledProcessError:  # the controller does not listen yet
        return False
