"""Only what is stale runs again, on the real Snakefile with its records of a real run."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.workflow.conftest import MACHINE, NANO, Project, checkout

pytestmark = pytest.mark.slow

# Chapters of the nano study that run the model, and the others.
RUN_THE_MODEL = {"end_to_end", "profile", "memory", "attention", "data_parallel", "fastest_step"}
MEASURE = {"machine", "precision", "collectives", "calculations", "principles", *RUN_THE_MODEL}
CODE = "\nCHANGED = 1\n"
LAYERNORM = f"results/{MACHINE}/precision/topic~layernorm.json"


def test_what_changes_no_number_reruns_nothing(measured: Project, tmp_path: Path) -> None:
    """Comments, docstrings, file times, another place, another meeting point of nodes."""
    measured.append("config.yaml", "\n# why\n")
    measured.append("src/lmlab/model/transformer.py", "\n# why\n")
    adamw = measured.folder / "src/lmlab/model/adamw.py"
    adamw.write_text(adamw.read_text().replace('"""', '"""Changed. ', 1))
    config = measured.folder / "config.yaml"
    config.write_text(config.read_text())
    for path in measured.folder.rglob("*"):
        if path.is_file() and ".snakemake" not in path.parts:
            os.utime(path)
    assert measured.copy_to(tmp_path / "moved").plan() == {}


EDITS = {
    "a chapter's measure": ("src/lmlab/chapters/precision/measure.py", CODE, {"precision"}),
    "the model": ("src/lmlab/model/transformer.py", CODE, RUN_THE_MODEL),
    "how a device is found": ("src/lmlab/measure/device.py", CODE, MEASURE),
    "the stated peaks": ("src/lmlab/measure/peaks.yaml", "\n- names: [Test GPU]\n", {"machine"}),
}


@pytest.mark.parametrize(("file", "text", "stale"), EDITS.values(), ids=EDITS)
def test_an_edit_reruns_the_points_that_run_it(
    measured: Project, file: str, text: str, stale: set[str]
) -> None:
    path = measured.folder / file
    before = path.stat()
    measured.append(file, text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as rsync or tar leave it
    assert set(measured.plan()) == {*stale, "report"}


def test_an_attention_variant_reruns_only_the_points_that_name_it(measured: Project) -> None:
    measured.append("src/lmlab/attention/tiled.py", CODE)
    assert sorted(Path(path).parts[3] for path in measured.plan()["attention"]) == [
        "topic~benchmark",
        "topic~model",
    ]
    assert set(measured.plan()) == {"attention", "report"}


def test_another_torch_version_makes_measurements_stale(measured: Project) -> None:
    """A distribution found first on the path stands in for an installed version."""
    info = measured.folder / "src" / "torch-99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 99.0\n")
    assert set(measured.plan()) == {*MEASURE, "report"}


def test_a_template_reruns_only_the_report(measured: Project) -> None:
    template = next((measured.folder / "report/templates").rglob("*.j2"))
    template.write_text(f"{template.read_text()}\nOne more sentence.\n")
    assert set(measured.plan()) == {"report"}


def test_a_new_value_measures_only_its_own_points(measured: Project) -> None:
    measured.configure(end_to_end={"contexts": [16, 24]})
    jobs = measured.plan()
    assert set(jobs) == {"end_to_end", "report"}
    assert len(jobs["end_to_end"]) == 4
    assert all("context~24" in output for output in jobs["end_to_end"])


def test_deleted_results_pages_and_figures_are_made_again(measured: Project) -> None:
    figure = next((measured.folder / "report/figures").rglob("*.png"))
    figure.unlink()
    assert set(measured.plan()) == {"report"}
    (measured.folder / "report/chapters/machine.md").unlink()
    (measured.folder / LAYERNORM).unlink()
    before = measured.results()
    assert measured.plan()["precision"] == [LAYERNORM]
    measured.run(f"snakemake {NANO}")
    assert figure.exists()
    assert (measured.folder / "report/chapters/machine.md").exists()
    after = measured.results()
    assert set(after) - set(before) == {LAYERNORM}
    assert before.items() <= after.items()
    assert measured.plan() == {}


def test_a_fresh_clone_renders_another_machines_results_without_measuring(
    first_run: Project, tmp_path: Path
) -> None:
    """File times are checkout times, Snakemake has no records, a point is missing."""
    clone = checkout(tmp_path / "clone")
    for path, (text, _) in first_run.results().items():
        target = clone.folder / path.replace(MACHINE, "cpu-other")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.replace(f'"{MACHINE}"'.encode(), b'"cpu-other"'))
    (clone.folder / LAYERNORM.replace(MACHINE, "cpu-other")).unlink()
    before = clone.results()
    options = f"{NANO} machine=cpu-other"
    assert set(clone.plan(options)) == {"report"}
    clone.run(f"snakemake {options}")
    assert clone.results() == before
    assert (clone.folder / "report/writeup.md").exists()


def test_a_clone_of_ones_own_results_measures_nothing_and_says_what_is_stale(
    first_run: Project, tmp_path: Path
) -> None:
    clone = checkout(tmp_path / "clone")
    shutil.copytree(first_run.folder / "results", clone.folder / "results")
    clone.append("src/lmlab/chapters/precision/measure.py", CODE)
    done = clone.run(f"snakemake {NANO}")
    assert clone.results().keys() == first_run.results().keys()
    assert "3 stale (code changed)" in done.stderr
    status = clone.run(f"lmlab status {NANO}").stdout.splitlines()
    assert sum("stale: code changed" in line for line in status) == 3
    assert "3 stale (code changed)" in status[-1]


def test_a_study_that_was_killed_goes_on_where_it_stopped(fresh: Project) -> None:
    fresh.configure("precision", "end_to_end", end_to_end={"contexts": [16, 24, 32, 40]})
    process = fresh.start(f"snakemake {NANO}")
    while len(fresh.results()) < 3 and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    # Snakemake may not have recorded the newest.
    by_age = sorted(fresh.results().items(), key=lambda item: item[1][1])
    before = dict(by_age[:2])
    assert not (fresh.folder / "report/writeup.md").exists()
    fresh.run(f"snakemake --unlock {NANO}")
    fresh.run(f"snakemake {NANO}")
    assert before.items() <= fresh.results().items()
    assert len(fresh.results()) == 21
    assert not list((fresh.folder / "results").rglob(".*"))
    assert (fresh.folder / "report/writeup.md").exists()


def test_points_after_the_time_budget_are_skipped_and_measured_by_the_next_run(
    fresh: Project,
) -> None:
    shape = {"sizes": ["cpu-small"], "context": 16, "batch": 2, "precision": "fp32"}
    cold = {**shape, "warmups": {}}
    grid = {"contexts": [16, 24], "precisions": ["fp32"], "modes": ["forward"], "cold_start": cold}
    fresh.configure(
        "end_to_end", "collectives", end_to_end=grid, collectives={"placements": {"cpu": [1, 2]}}
    )
    fresh.run(f"snakemake {NANO}", LMLAB_DEADLINE="1 240")
    results = {path: json.loads(text) for path, (text, _) in fresh.results().items()}
    skipped = {
        path
        for path, result in results.items()
        if result["reason"] == "skipped: the study's time budget of 240 s was used up"
    }
    assert {results[path]["status"] for path in skipped} == {"unsupported"}
    assert len(results) == 5
    assert sorted(path.rpartition("/")[2] for path in results if path not in skipped)[-1] == (
        "world_size~1.json"
    )
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
