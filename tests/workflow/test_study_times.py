"""How long whole studies take on two cores that nobody else uses."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import pytest
import torch
import yaml

from lmlab.jobs.catalog import GRIDS, all_points
from lmlab.jobs.preflight import is_slow
from lmlab.measure.identity import find_machine
from lmlab.study.config import load
from tests.workflow.conftest import COMMAND, Project, Run


@pytest.mark.slow
@pytest.mark.skipif(find_machine().device == "cuda", reason="with a GPU the study is another one")
def test_the_tiny_study_measures_every_point_in_under_5_minutes(fresh: Project) -> None:
    if is_slow(torch.bfloat16):
        pytest.skip("bf16 has no fast products on this CPU: most of its points are refused")
    start = time.monotonic()
    fresh.run(COMMAND, timeout_s=900)
    seconds = time.monotonic() - start
    results = [json.loads(file) for file, _ in fresh.results().values()]
    assert {result["status"] for result in results} == {"ok", "unsupported"}
    # A CPU has neither tiles of our kernels to compare nor the leaderboard's shape.
    without_numbers = {
        result["parameters"]["topic"] for result in results if result["status"] == "unsupported"
    }
    assert without_numbers == {"tiles", "leaderboard"}
    assert {result["chapter"] for result in results} == set(GRIDS)
    study = load(yaml.safe_load((fresh.folder / "config.yaml").read_text()), "cpu")
    asked = [point.path(Path("results"), find_machine().id) for point in all_points(study)]
    assert set(fresh.results()) == {path.as_posix() for path in asked}
    page = (fresh.folder / "report/writeup.md").read_text()
    assert "CPU" in page
    assert "GPU busy" not in page
    assert seconds < 300


@pytest.mark.slow
def test_the_whole_nano_study_takes_under_a_minute(first_run: Run) -> None:
    assert first_run.seconds < 60


def cpu_seconds() -> float:
    """What the processes that ended so far have worked: a busy neighbour does not count."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.slow
def test_a_dry_run_of_the_full_study_takes_under_5_s(fresh: Project) -> None:
    before = cpu_seconds()
    jobs = fresh.would_run("--config study=full")
    assert cpu_seconds() - before < 5
    assert len(jobs["end_to_end"]) == 140
    assert len(jobs["profile"]) == 20
    assert len(jobs["memory"]) == 41


@pytest.mark.slow
def test_a_rerun_with_nothing_to_do_takes_under_5_s(measured: Project) -> None:
    before = cpu_seconds()
    done = measured.run(f"{COMMAND} --config study=nano")
    assert cpu_seconds() - before < 5
    assert "Nothing to be done" in done.stderr
