"""The real profiling rule with a stand-in for nsys."""

import os
import sys
from pathlib import Path

import pytest

from lmlab.study.results import read
from tests.chapters.pages import value_of
from tests.measure.trace.standin_nsys import install
from tests.workflow.conftest import MACHINE, NANO, Project

pytestmark = pytest.mark.slow

POINT = "profile/size~cpu-small/context~16/batch~2/precision~fp32/attention~naive"
COMMAND = f"snakemake results/{MACHINE}/{POINT}.json {NANO}"


def path_with(project: Project, fault: str = "") -> str:
    """A PATH that starts with a stand-in for nsys."""
    folder = project.folder / "bin"
    install(folder, fault=fault)
    return os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])


def test_nsys_records_and_its_report_stays(fresh: Project) -> None:
    fresh.configure(profile={"profiler": "nsys"})
    fresh.run(COMMAND, PATH=path_with(fresh))
    result = read(fresh.folder / f"results/{MACHINE}/{POINT}.json")
    assert result.status == "ok", result.reason
    assert value_of(result, "profiler_version").startswith("nsys ")
    trace = fresh.folder / f"traces/{MACHINE}/{POINT}.trace"
    kept = [file.name for file in trace.iterdir() if not file.name.startswith(".")]
    assert kept == ["report.nsys-rep"]


def test_torchs_profiler_takes_over_from_an_nsys_that_records_nothing(fresh: Project) -> None:
    # On a CPU, `auto` does not try nsys, which only sees GPU kernels.
    condition = '(asked == "auto" and SELECTION.device != "cuda")'
    fresh.replace("rules/common.smk", condition, "False")
    fresh.run(COMMAND, PATH=path_with(fresh, fault="records nothing"))
    result = read(fresh.folder / f"results/{MACHINE}/{POINT}.json")
    assert result.status == "ok", result.reason
    assert value_of(result, "profiler_version").startswith("torch profiler ")
    assert value_of(result, "profiler_note").startswith("nsys 2026.3.1.97 failed")
    log = (fresh.folder / f"logs/{MACHINE}/{POINT}.log").read_text()
    assert "profile: nsys 2026.3.1.97 failed" in log


def test_an_nsys_that_was_asked_for_and_cannot_record_is_a_failed_job(fresh: Project) -> None:
    fresh.configure(profile={"profiler": "nsys"})
    done = fresh.run(COMMAND, check=False, PATH=path_with(fresh, fault="cannot record"))
    assert done.returncode != 0
    assert not fresh.results()


def test_an_nsys_that_was_asked_for_and_does_not_work_ends_in_one_line(fresh: Project) -> None:
    fresh.configure(profile={"profiler": "nsys"})
    done = fresh.run(f"{COMMAND} -n", check=False, PATH=path_with(fresh, fault="broken"))
    assert done.returncode != 0
    [line] = [line for line in done.stderr.splitlines() if line.startswith("config: ")]
    assert "--version exits with 1" in line
    assert line.endswith("allowed here: auto, torch")


def test_nsys_around_torchrun_leaves_a_report_and_no_result(fresh: Project) -> None:
    nsys = {"profiler": "nsys", "nsys_options": ["--cuda-memory-usage=true"]}
    fresh.configure(profile=nsys, collectives={"placements": {"cpu": [1]}})
    stem = f"{MACHINE}/collectives/placement~cpu/world_size~1"
    fresh.run(f"snakemake traces/{stem}.nsys {NANO}", PATH=path_with(fresh))
    trace = fresh.folder / f"traces/{stem}.nsys"
    assert read(trace / "result.json").status == "ok"
    assert (trace / "report.nsys-rep").exists()
    assert not (fresh.folder / f"results/{stem}.json").exists()
