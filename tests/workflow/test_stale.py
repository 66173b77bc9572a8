"""Only what is stale runs again, on the real Snakefile with its records of a real run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from lmlab.measure.identity import find_machine
from tests.workflow.conftest import Project, checkout

pytestmark = pytest.mark.slow

MACHINE = find_machine().id
POINT = f"results/{MACHINE}/end_to_end"

# Of the chapters of several ranks the nano study has the first two only.
RUN_THE_MODEL = {"end_to_end", "profile", "memory", "attention", "data_parallel"}
MEASURE = {"machine", "precision", "collectives", "calculations", *RUN_THE_MODEL}


def chapters(outputs: list[str]) -> set[str]:
    """The chapters that result files belong to."""
    return {Path(output).parts[2].removesuffix(".json") for output in outputs}


def test_nothing_changed_nothing_runs(measured: Project) -> None:
    assert measured.would_run() == {}


MODEL = "src/lmlab/model/transformer.py"
CODE = "\nCHANGED = 1\n"
UNCHANGED = {
    "a comment in the config": ("config.yaml", "\n# why\n"),
    "a comment in the model": (MODEL, "\n# why\n"),
    "a comment in a table": ("src/lmlab/writeup/tables/end_to_end.py", "\n# why\n"),
    "a comment in the page": ("src/lmlab/writeup/page.py", "\n# why\n"),
}


@pytest.mark.parametrize("case", UNCHANGED)
def test_what_changes_no_number_reruns_nothing(measured: Project, case: str) -> None:
    measured.append(*UNCHANGED[case])
    assert measured.would_run() == {}


def test_a_docstring_reruns_nothing(measured: Project) -> None:
    measured.edit(MODEL, '"""', '"""Changed. ')
    assert measured.would_run() == {}


def test_a_moved_checkout_reruns_nothing(measured: Project, tmp_path: Path) -> None:
    moved = measured.copy_to(tmp_path / "elsewhere" / "moved")
    assert moved.would_run() == {}


def test_touching_every_file_reruns_nothing(measured: Project) -> None:
    for path in measured.folder.rglob("*"):
        if path.is_file() and ".snakemake" not in path.parts:
            os.utime(path)
    assert measured.would_run() == {}


def test_a_change_in_the_model_reruns_what_imports_it(measured: Project) -> None:
    measured.append(MODEL, CODE)
    assert chapters(measured.measures()) == RUN_THE_MODEL


def test_an_edit_with_an_old_time_is_seen(measured: Project) -> None:
    file = measured.folder / MODEL
    before = file.stat()
    measured.append(MODEL, CODE)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert chapters(measured.measures()) == RUN_THE_MODEL


def test_a_change_in_how_a_device_is_found_reruns_every_measurement(measured: Project) -> None:
    measured.append("src/lmlab/measure/device.py", CODE)
    assert chapters(measured.measures()) == MEASURE


def test_a_change_in_a_template_reruns_only_the_page(measured: Project) -> None:
    before = measured.results()
    measured.edit("report/templates/end_to_end.md.j2", "\n", "\nA sentence more.\n")
    assert measured.would_run() == {"writeup": ["report/writeup.md"]}
    measured.run("snakemake --config study=nano")
    assert "A sentence more." in (measured.folder / "report/writeup.md").read_text()
    assert measured.results() == before


def test_a_change_in_a_table_measures_nothing(measured: Project) -> None:
    measured.append("src/lmlab/writeup/tables/precision.py", CODE)
    jobs = measured.would_run()
    assert set(jobs) == {"chapter", "writeup"}
    assert len(jobs["chapter"]) == 1
    assert "precision" in jobs["chapter"][0]


WIDER = {
    "context": {"contexts": [16, 24]},
    "precision": {"precisions": ["fp32", "bf16", "fp16"]},
    "size": {"sizes": ["cpu-small", "cpu-medium"]},
    "mode": {"modes": ["forward", "train_step", "forward_backward"]},
    "batch": {"batches": [2, 3]},
}


@pytest.mark.parametrize("axis", WIDER)
def test_a_new_value_measures_only_its_own_points(measured: Project, axis: str) -> None:
    existing = set(measured.results())
    measured.configure(**WIDER[axis])
    new = measured.measures()
    assert new
    assert not existing & set(new)
    assert chapters(new) == {"end_to_end"}


def test_new_points_leave_all_other_results_bytes_and_times(measured: Project) -> None:
    """Those of the same machine, and those of another one beside it."""
    results = measured.folder / "results"
    shutil.copytree(results / MACHINE, results / "cpu-other")
    before = measured.results()
    measured.only("end_to_end", "precision")
    measured.configure(contexts=[16, 24])
    measured.run("snakemake --config study=nano")
    after = measured.results()
    assert {name: after[name] for name in before} == before
    assert len(after) > len(before)
    assert measured.would_run() == {}


@pytest.mark.parametrize("target", ["", "report/writeup.md "], ids=["default", "page"])
def test_a_deleted_result_is_measured_again(measured: Project, target: str) -> None:
    path = f"results/{MACHINE}/precision/topic~layernorm.json"
    (measured.folder / path).unlink()
    options = f"{target}--config study=nano"
    assert measured.measures(options) == [path]
    measured.run(f"snakemake {options}")
    assert (measured.folder / path).exists()
    assert measured.would_run(options) == {}


def test_a_result_deleted_with_the_page_is_measured_again(measured: Project) -> None:
    path = f"results/{MACHINE}/precision/topic~layernorm.json"
    (measured.folder / path).unlink()
    (measured.folder / "report/writeup.md").unlink()
    assert measured.measures() == [path]


def test_deleted_figures_and_chapters_are_made_again(measured: Project) -> None:
    shutil.rmtree(measured.folder / "report/figures/precision")
    (measured.folder / "report/chapters/machine.json").unlink()
    jobs = measured.would_run()
    assert set(jobs) == {"chapter", "writeup"}
    assert sorted(Path(output.split(",")[0]).stem for output in jobs["chapter"]) == [
        "machine", "precision",
    ]  # fmt: skip


def test_an_attention_variant_reruns_only_the_points_that_name_it(measured: Project) -> None:
    measured.append("src/lmlab/attention/naive.py", CODE)
    named = measured.measures()
    assert named
    # Of the attention chapter all but the tiles of our kernels have naive as an arm.
    assert all("attention~naive" in output or "topic~" in output for output in named)
    assert chapters(named) == RUN_THE_MODEL
    assert not any("topic~tiles" in output for output in named)
    variants = measured.folder / "src/lmlab/attention"
    shutil.copy(variants / "naive.py", variants / "other.py")
    assert measured.measures() == named, "a variant that no point names counts for none"


def test_another_torch_version_makes_measurements_stale(measured: Project) -> None:
    """A distribution found first on the path stands in for an installed version."""
    info = measured.folder / "src" / "torch-99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 99.0\n")
    assert chapters(measured.measures()) == MEASURE


def test_a_new_gpu_in_the_table_of_peaks_reads_the_card_anew(measured: Project) -> None:
    measured.append("src/lmlab/measure/peaks.yaml", "\n# one more\n")
    assert chapters(measured.measures()) == {"machine"}


def test_a_fresh_clone_renders_another_machines_results_without_measuring(
    measured_once: Project, tmp_path: Path
) -> None:
    """File times are checkout times, Snakemake has no records, the machine is not this one."""
    clone = checkout(tmp_path / "clone")
    clone.only("end_to_end", "precision")
    source = measured_once.folder / "results" / MACHINE
    shutil.copytree(source, clone.folder / "results/cpu-other", copy_function=shutil.copyfile)
    before = clone.results()
    options = "--config study=nano machine=cpu-other"
    assert set(clone.would_run(options)) == {"chapter", "writeup"}
    clone.run(f"snakemake {options}")
    assert clone.results() == before
    assert (clone.folder / "report/writeup.md").exists()


def test_a_foreign_machines_missing_points_are_named_not_measured(
    measured_once: Project, tmp_path: Path
) -> None:
    clone = checkout(tmp_path / "clone")
    clone.only("end_to_end")
    other = clone.folder / "results/cpu-other"
    shutil.copytree(measured_once.folder / "results" / MACHINE, other)
    gone = next((other / "end_to_end").rglob("*bf16*/**/*.json"))
    gone.unlink()
    options = "--config study=nano machine=cpu-other"
    clone.run(f"snakemake {options}")
    assert not gone.exists()
    assert "not measured" in (clone.folder / "report/writeup.md").read_text().lower()


def test_a_clone_of_ones_own_results_measures_nothing_and_status_names_stale_ones(
    measured_once: Project, tmp_path: Path
) -> None:
    clone = checkout(tmp_path / "clone")
    shutil.copytree(measured_once.folder / "results", clone.folder / "results")
    assert clone.measures() == []
    clone.only("end_to_end")
    clone.append(MODEL, CODE)
    status = clone.run("lmlab status --config study=nano", check=False)
    assert "other code" in status.stdout
    done = clone.run("snakemake --config study=nano")
    assert "other code" in done.stderr


def test_an_interrupted_study_goes_on_where_it_stopped(fresh: Project) -> None:
    fresh.only("end_to_end", "memory", "precision")
    # So many points that it is not over before the signal is heeded, however busy the machine is.
    fresh.configure(contexts=[16, 24, 32, 40])
    process = fresh.start("snakemake --config study=nano")
    while len(fresh.results()) < 3 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    # The newest may be that of a job whose end Snakemake did not see any more.
    by_age = sorted(fresh.results().items(), key=lambda item: item[1][1])
    before = dict(by_age[:2])
    assert len(by_age) < 16, "the study was over"
    assert (fresh.folder / "report/writeup.md").exists() is False
    left_over = [path for path in (fresh.folder / "results").rglob("*") if path.is_file()]
    assert all(path.suffix == ".json" and not path.name.startswith(".") for path in left_over)
    fresh.run("snakemake --config study=nano")
    after = fresh.results()
    assert {name: after[name] for name in before} == before
    assert (fresh.folder / "report/writeup.md").exists()


def test_a_point_that_fails_is_recorded_and_the_page_still_comes(measured: Project) -> None:
    measured.only("end_to_end")
    measured.append(MODEL, "\nraise RuntimeError('broken on purpose')\n")
    measured.run("snakemake --config study=nano")
    files = [*(measured.folder / "results" / MACHINE / "end_to_end").rglob("*.json")]
    assert {json.loads(file.read_text())["status"] for file in files} == {"failed"}
    assert "broken on purpose" in (measured.folder / "report/writeup.md").read_text()
