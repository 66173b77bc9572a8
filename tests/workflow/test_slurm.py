"""The study as jobs of a real Slurm: measured inside allocations, one at a time, page included."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from lmlab.jobs.catalog import chapters
from lmlab.study.files import ROOT
from lmlab.study.results import Result, read
from tests.workflow.conftest import MACHINE, Project, checkout
from tests.workflow.slurm_cluster import Cluster, missing_programs, running_cluster

PROFILE = "snakemake --workflow-profile slurm --slurm-init-seconds-before-status-checks 2"
# Two allocations, so that they compete for the node's one GPU.
HERE = f"{PROFILE} --group-components points=2 --config study=nano machine={MACHINE} measure=always"
ELSEWHERE = (
    f"{PROFILE} --retries 0 --config study=nano machine=nvidia-h200 measure=always "
    "-- results/nvidia-h200/machine.json"
)
ROUNDING = timedelta(seconds=1)  # both Slurm and a result give whole seconds

needs_slurm = pytest.mark.skipif(
    bool(missing_programs()),
    reason=f"no Slurm here: {', '.join(missing_programs())} not found (Debian: slurm-wlm, munge)",
)


def environment_of(cluster: Cluster) -> dict[str, str]:
    """A login node's environment."""
    python = Path(sys.executable).parent
    path = os.pathsep.join(map(str, (cluster.commands, python, os.environ["PATH"])))
    return {"PATH": path, **cluster.environment}


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
    shape = {"sizes": ["cpu-small"], "context": 16, "batch": 2, "precision": "fp32"}
    cold = {**shape, "warmups": {"forward": [0]}}
    grid = {"precisions": ["fp32"], "modes": ["forward"], "cold_start": cold}
    project.configure("end_to_end", end_to_end=grid)
    return project


@pytest.fixture(scope="module")
def more(project: Project) -> dict[str, Project]:
    """Two more checkouts of the same study in which nothing has run yet."""
    names = ("inside", "cancelled")
    return {name: project.copy_to(project.folder.with_name(name)) for name in names}


@pytest.fixture(scope="module")
def lost(project: Project) -> Project:
    """A checkout whose user names a GPU that the cluster does not have."""
    return project.copy_to(project.folder.with_name("lost"))


@pytest.fixture(scope="module")
def printed(
    cluster: Cluster, project: Project, lost: Project, more: dict[str, Project]
) -> dict[Project, str]:
    """What the two users see, who have started their runs at the same time."""
    environment = environment_of(cluster)
    running = {
        user: user.start(command, **environment)
        for user, command in ((project, HERE), (lost, ELSEWHERE))
    }
    try:
        return {user: process.communicate(timeout=300)[1] for user, process in running.items()}
    finally:
        for process in running.values():
            process.kill()


def results_of(project: Project) -> list[Result]:
    """The results in the order in which they were measured."""
    files = (project.folder / "results" / MACHINE).rglob("*.json")
    return sorted((read(file) for file in files), key=lambda result: result.started_at)


def span(result: Result) -> tuple[datetime, datetime]:
    """From when to when a result was measured, in Slurm's local time."""
    start = datetime.fromisoformat(result.started_at).astimezone().replace(tzinfo=None)
    return start, start + timedelta(seconds=result.elapsed_s)


@pytest.mark.slow
@needs_slurm
def test_every_point_is_measured_inside_an_allocation_with_a_gpu(
    cluster: Cluster, project: Project, printed: dict[Project, str]
) -> None:
    jobs = cluster.jobs(project.folder)
    assert {job.state for job in jobs} == {"COMPLETED"}, printed[project]
    assert {job.gpus for job in jobs} == {"gres:gpu:1"}
    results = results_of(project)
    assert len(results) == 3
    for result in results:
        start, end = span(result)
        assert any(job.start <= start and end <= job.end + ROUNDING for job in jobs), result


@pytest.mark.slow
@needs_slurm
def test_points_share_allocations(
    cluster: Cluster, project: Project, printed: dict[Project, str]
) -> None:
    submitted = printed[project].count("has been submitted with SLURM jobid")
    assert submitted == len(cluster.jobs(project.folder)) == 2


@pytest.mark.slow
@needs_slurm
def test_no_two_measurements_overlap(project: Project, printed: dict[Project, str]) -> None:
    spans = [span(result) for result in results_of(project)]
    for (_, end), (next_start, _) in pairwise(spans):
        assert end <= next_start + ROUNDING


@pytest.mark.slow
@needs_slurm
def test_the_page_is_written_where_the_run_was_started(
    project: Project, printed: dict[Project, str]
) -> None:
    assert (project.folder / "report/writeup.md").stat().st_size > 1000
    lines = [line for line in printed[project].splitlines() if line.startswith("[")]
    assert sum("end_to_end size=cpu-small" in line for line in lines) == 2


@pytest.mark.slow
@needs_slurm
def test_a_second_run_submits_nothing(
    cluster: Cluster, project: Project, printed: dict[Project, str]
) -> None:
    done = project.run(HERE, **environment_of(cluster))
    assert "Nothing to be done" in done.stderr


@pytest.mark.slow
@needs_slurm
def test_a_job_that_lands_on_another_machine_says_so_and_writes_nothing(
    lost: Project, printed: dict[Project, str]
) -> None:
    assert f"machine = 'nvidia-h200', but this is {MACHINE!r}" in printed[lost]
    assert "An allocation of 1 point failed" in printed[lost]
    assert lost.results() == {}


@pytest.mark.slow
@needs_slurm
def test_the_machine_must_be_named(cluster: Cluster, lost: Project) -> None:
    done = lost.run(f"{PROFILE} --config study=nano", check=False, **environment_of(cluster))
    assert done.returncode != 0
    assert "machine = 'auto', but the jobs run elsewhere" in done.stderr


@pytest.mark.slow
@needs_slurm
def test_the_main_command_runs_inside_one_allocation(
    cluster: Cluster, more: dict[str, Project]
) -> None:
    inside = more["inside"]
    shutil.copy(ROOT / "Makefile", inside.folder)
    config = inside.folder / "config.yaml"
    config.write_text(config.read_text().replace("study: auto", "study: nano", 1))
    batch = ["--wait", "--gpus=1", "--output=run.log", "--wrap", "make -o setup writeup"]
    words = ["sbatch", f"--chdir={inside.folder}", *batch]
    # Without cgroups Slurm cannot end the helper, which waits a while for the next study.
    environment = {**os.environ, **environment_of(cluster), "LMLAB_WARM_START": "0"}
    done = subprocess.run(words, env=environment, timeout=300, check=False)
    assert done.returncode == 0, (inside.folder / "run.log").read_text()
    assert len(inside.results()) == 3
    assert (inside.folder / "report/writeup.md").exists()


@pytest.mark.slow
@needs_slurm
def test_a_cancelled_allocation_keeps_what_it_has_measured(
    cluster: Cluster, more: dict[str, Project]
) -> None:
    user, environment = more["cancelled"], environment_of(cluster)
    command = HERE.replace("points=2", "points=10")
    run = user.start(command, **environment)
    while not user.results() and run.poll() is None:
        time.sleep(0.1)
    cluster.ask("scancel", *(job.id for job in cluster.jobs(user.folder)))
    printed = run.communicate(timeout=300)[1]
    before = user.results()
    assert run.returncode != 0, printed
    assert before
    user.run(command, **environment)
    assert before.items() <= user.results().items()
    assert len(user.results()) == 3


@pytest.mark.parametrize("name", ["slurm", "batch"])
def test_the_profile_groups_the_points_of_every_chapter(name: str) -> None:
    profile = yaml.safe_load((ROOT / f"profiles/{name}/config.yaml").read_text())
    grouped = {assignment.partition("=")[0] for assignment in profile["groups"]}
    assert grouped == set(chapters())
