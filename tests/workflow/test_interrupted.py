"""Runs that were killed, ran out of time, or have a failing point."""

import json

import pytest

from tests.processes import wait_until
from tests.workflow.conftest import COLD, MACHINE, NANO, Project

pytestmark = pytest.mark.slow


def test_a_second_run_in_the_same_folder_names_the_first_and_stops(fresh: Project) -> None:
    fresh.configure("precision")
    first = fresh.start(f"snakemake {NANO}")
    lock = fresh.folder / ".snakemake/lmlab.lock"
    wait_until(lambda: first.poll() is not None or (lock.exists() and lock.read_text() != ""))
    second = fresh.run(f"snakemake {NANO}", check=False)
    first.kill()
    first.communicate()
    assert second.returncode != 0
    [line] = [line for line in second.stderr.splitlines() if "is running in this folder" in line]
    assert f"process {first.pid} on " in line
    assert "LockException" not in second.stderr


def test_a_study_that_was_killed_goes_on_where_it_stopped(fresh: Project) -> None:
    fresh.configure("precision")
    process = fresh.start(f"snakemake {NANO}")
    wait_until(lambda: len(fresh.results()) >= 3 or process.poll() is not None)
    process.kill()
    process.communicate()
    # Snakemake may not have recorded the newest result.
    by_age = sorted(fresh.results().items(), key=lambda item: item[1][1])
    before = dict(by_age[:2])
    assert not (fresh.folder / "report/writeup.md").exists()
    fresh.run(f"snakemake {NANO}")
    assert before.items() <= fresh.results().items()
    assert len(fresh.results()) == 5
    assert not list((fresh.folder / "results").rglob(".*"))
    assert (fresh.folder / "report/writeup.md").exists()


def test_points_after_the_time_budget_are_left_for_the_next_run(fresh: Project) -> None:
    grid = {"contexts": [16, 24], "precisions": ["fp32"], "modes": ["forward"], "cold_start": COLD}
    fresh.configure(
        "end_to_end", "collectives", end_to_end=grid, collectives={"placements": {"cpu": [1, 2]}}
    )
    fresh.run(f"snakemake {NANO}", LMLAB_BUDGET='{"began": 1, "study_s": 240, "chapters_s": {}}')
    results = {path: json.loads(text) for path, (text, _) in fresh.results().items()}
    reason = "skipped: the study's time budget of 240 s was used up"
    skipped = {path for path, result in results.items() if result["reason"] == reason}
    assert {results[path]["status"] for path in skipped} == {"unsupported"}
    assert len(results) == 5
    measured = sorted(path.rpartition("/")[2] for path in results.keys() - skipped)
    assert measured[-1] == "world_size~1.json"
    jobs = fresh.plan()
    assert {*jobs["end_to_end"], *jobs["collectives"]} == skipped
    assert len(skipped) == 2


def test_a_point_that_fails_is_a_result_and_the_report_still_comes(fresh: Project) -> None:
    fresh.configure("calculations")
    fresh.append("src/lmlab/chapters/calculations/measure.py", "\nraise RuntimeError('broken')\n")
    fresh.run(f"snakemake {NANO}")
    text, _ = fresh.results()[f"results/{MACHINE}/calculations.json"]
    assert json.loads(text)["status"] == "failed"
    assert (fresh.folder / "report/writeup.md").exists()
