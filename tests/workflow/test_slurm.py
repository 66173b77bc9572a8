"""The study as jobs of a real Slurm: points are measured one at a time, inside allocations."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from lmlab.study.files import ROOT
from lmlab.study.results import read
from tests.processes import wait_until
from tests.workflow.conftest import COLD, MACHINE, Project, checkout
from tests.workflow.slurm_cluster import MISSING, Cluster, running_cluster

# Snakemake that polls its Slurm jobs every second.
SNAKEMAKE = f"{sys.executable} {Path(__file__).with_name('eager_snakemake.py')}"
PROFILE = f"{SNAKEMAKE} --workflow-profile slurm"
# Two allocations, so that they compete for the node's one GPU.
HERE = f"{PROFILE} --group-components points=2 --config study=nano machine={MACHINE} measure=always"
ELSEWHERE = (
    f"{PROFILE} --retries 0 --config study=nano machine=nvidia-h200 measure=always "
    "-- results/nvidia-h200/machine.json"
)
ROUNDING = timedelta(seconds=1)  # both Slurm and results record whole seconds

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"no Slurm here: {', '.join(MISSING)} not found (Debian: slurm-wlm, munge)",
    ),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    with running_cluster(folder) as cluster:
        yield cluster
    left = cluster.processes()
    shutil.rmtree(folder)
    assert left == [], "what was started is stopped, and no job left anything behind"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A checkout whose nano study is cut down to three points."""
    project = checkout(tmp_path_factory.mktemp("cluster") / "project")
    cold = {**COLD, "warmups": {"forward": [0]}}
    grid = {"precisions": ["fp32"], "modes": ["forward"], "cold_start": cold}
    project.configure("end_to_end", end_to_end=grid)
    return project


@pytest.fixture(scope="module")
def others(project: Project) -> dict[str, Project]:
    """More checkouts of the same study in which nothing has run yet."""
    names = ("lost", "inside", "cancelled")
    return {name: project.copy_to(project.folder.with_name(name)) for name in names}


@pytest.fixture(scope="module")
def printed(cluster: Cluster, project: Project, others: dict[str, Project]) -> dict[Project, str]:
    """Output of two users who start runs at the same time; one names a machine that this is not."""
    environment = cluster.environment
    running = {
        user: user.start(command, **environment)
        for user, command in ((project, HERE), (others["lost"], ELSEWHERE))
    }
    try:
        return {user: process.communicate(timeout=1200)[1] for user, process in running.items()}
    finally:
        for process in running.values():
            process.kill()


def spans(project: Project) -> list[tuple[datetime, datetime]]:
    """Start and end of each measurement, in local time like Slurm's."""
    found = []
    for result in map(read, (project.folder / "results" / MACHINE).rglob("*.json")):
        start = datetime.fromisoformat(result.started_at).astimezone().replace(tzinfo=None)
        found.append((start, start + timedelta(seconds=result.elapsed_s)))
    return sorted(found)


def test_every_point_is_measured_alone_inside_an_allocation_with_a_gpu(
    cluster: Cluster, project: Project, printed: dict[Project, str]
) -> None:
    jobs = cluster.jobs(project.folder)
    assert {job.state for job in jobs} == {"COMPLETED"}, printed[project]
    assert {job.gpus for job in jobs} == {"gres:gpu:1"}
    measured = spans(project)
    assert len(measured) == 3
    for start, end in measured:
        assert any(job.start <= start and end <= job.end + ROUNDING for job in jobs)
    for (_, end), (next_start, _) in pairwise(measured):
        assert end <= next_start + ROUNDING


def test_points_share_allocations_and_the_page_is_written_where_the_run_was_started(
    cluster: Cluster, project: Project, printed: dict[Project, str]
) -> None:
    submitted = printed[project].count("has been submitted with SLURM jobid")
    assert submitted == len(cluster.jobs(project.folder)) == 2
    assert (project.folder / "report/writeup.md").stat().st_size > 1000
    lines = [line for line in printed[project].splitlines() if line.startswith("[")]
    assert sum("end_to_end size=cpu-small" in line for line in lines) == 2


def test_a_second_run_submits_nothing(
    cluster: Cluster, project: Project, printed: dict[Project, str]
) -> None:
    done = project.run(HERE, **cluster.environment)
    assert "Nothing to be done" in done.stderr


def test_a_job_elsewhere_fails(others: dict[str, Project], printed: dict[Project, str]) -> None:
    lost = others["lost"]
    assert f"machine = 'nvidia-h200', but this is {MACHINE!r}" in printed[lost]
    assert "An allocation of 1 point failed" in printed[lost]
    assert lost.results() == {}


def test_the_machine_must_be_named(cluster: Cluster, others: dict[str, Project]) -> None:
    options = f"{PROFILE} --config study=nano"
    done = others["lost"].run(options, check=False, **cluster.environment)
    assert done.returncode != 0
    assert "machine = 'auto', but the jobs run elsewhere" in done.stderr


@pytest.mark.parametrize(
    ("resource", "reason"),
    [
        pytest.param("slurm_partition=nowhere", "invalid partition", id="by Slurm"),
        pytest.param("slurm_extra='--account=me'", "not allowed", id="by the plugin"),
    ],
)
def test_a_job_that_is_refused_ends_the_run_with_the_reason(
    cluster: Cluster, others: dict[str, Project], resource: str, reason: str
) -> None:
    lost = others["lost"]
    command = ELSEWHERE.replace("--retries 0", f"--default-resources {resource}")
    done = lost.run(command, check=False, **cluster.environment)
    assert done.returncode != 0
    assert reason in done.stderr
    assert lost.results() == {}


def test_the_main_command_in_one_allocation(cluster: Cluster, others: dict[str, Project]) -> None:
    inside = others["inside"]
    shutil.copy(ROOT / "Makefile", inside.folder)
    inside.replace("config.yaml", "study: auto", "study: nano")
    batch = ["--wait", "--gpus=1", "--output=run.log", "--wrap", "make -o setup writeup"]
    words = ["sbatch", f"--chdir={inside.folder}", *batch]
    # Without cgroups Slurm cannot end the helper, which waits a while for the next study.
    environment = {**os.environ, **cluster.environment, "LMLAB_WARM_START": "0"}
    done = subprocess.run(words, env=environment, timeout=1200, check=False)
    assert done.returncode == 0, (inside.folder / "run.log").read_text()
    assert len(inside.results()) == 3
    assert (inside.folder / "report/writeup.md").exists()


def test_a_cancelled_allocation_has_results(cluster: Cluster, others: dict[str, Project]) -> None:
    user, environment = others["cancelled"], cluster.environment
    command = HERE.replace("points=2", "points=10")
    run = user.start(command, **environment)
    wait_until(lambda: bool(user.results()) or run.poll() is not None)
    cluster.ask("scancel", *(job.id for job in cluster.jobs(user.folder)))
    printed = run.communicate(timeout=1200)[1]
    before = user.results()
    assert run.returncode != 0, printed
    assert before
    user.run(command, **environment)
    assert before.items() <= user.results().items()
    assert len(user.results()) == 3
