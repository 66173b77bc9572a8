"""The rule that profiles, for real, around a stand-in for nsys: three versions, and faults."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmlab.chapters.profile.measure import trace_folder
from lmlab.jobs.catalog import points_of
from lmlab.measure.identity import find_machine
from lmlab.measure.trace.nsys_command import NSYS_UNAVAILABLE
from lmlab.study.config import load
from lmlab.study.files import ROOT
from lmlab.study.results import Result, read
from tests.measure.trace.standin_nsys import SUFFIX, VERSIONS, install
from tests.workflow.conftest import Project

pytestmark = pytest.mark.slow

POINT = "profile/size~cpu-small/context~16/batch~2/precision~fp32/attention~naive"
RESULT = f"results/{find_machine().id}/{POINT}.json"
TRACE = f"traces/{find_machine().id}/{POINT}.trace"
LOG = f"logs/{find_machine().id}/{POINT}.log"
COMMAND = f"snakemake --cores 1 {RESULT} --config study=nano"
# nsys sees kernels of a GPU alone, so that `auto` leaves it alone on a CPU; here it must not.
WITHOUT_A_GPU = ('(asked == "auto" and SELECTION.device != "cuda")', "False")


def configure(project: Project, **changes: Any) -> None:
    """Change keys of the nano study's profile block."""
    path = project.folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["studies"]["nano"]["profile"].update(changes)
    path.write_text(yaml.safe_dump(config, sort_keys=False))


def path_with(project: Project, *, version: str = VERSIONS[-1], fault: str | None = "") -> str:
    """A PATH that begins with a stand-in for nsys; without one if the fault is None."""
    folder = project.folder / "bin"
    if fault is not None:
        install(folder, version, fault)
    return os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])


def value_of(result: Result, quantity: str, **labels: str) -> object:
    """The first value of a quantity with these labels; None if there is none."""
    return next(
        (
            record["value"]
            for record in result.measurements
            if record["quantity"] == quantity and labels.items() <= record["labels"].items()
        ),
        None,
    )


def kept(project: Project) -> list[str]:
    """What lies in the point's trace folder, Snakemake's own mark left out."""
    return [file.name for file in (project.folder / TRACE).iterdir() if file.name[0] != "."]


@pytest.mark.parametrize("version", VERSIONS)
def test_nsys_records_in_the_words_of_its_version(fresh: Project, version: str) -> None:
    configure(fresh, profiler="nsys")
    fresh.run(COMMAND, PATH=path_with(fresh, version=version))
    result = read(fresh.folder / RESULT)
    assert result.status == "ok"
    assert str(value_of(result, "profiler_version")).startswith("nsys ")
    assert value_of(result, "profiler_note") is None
    assert value_of(result, "family_instances", mode="forward", family="matmul_simt") == 8
    (wall,) = (record for record in result.measurements if record["quantity"] == "time")
    assert wall["n"] == 3, "the host's clock is of the process itself"
    assert kept(fresh) == [f"report{SUFFIX[version]}"]


def test_a_point_without_numbers_is_a_result_without_a_report(fresh: Project) -> None:
    configure(fresh, profiler="nsys", precisions=["tf32"])
    fresh.run(COMMAND.replace("fp32", "tf32"), PATH=path_with(fresh))
    result = read(fresh.folder / RESULT.replace("fp32", "tf32"))
    assert result.status == "unsupported"
    assert "tf32" in str(result.reason)


FAILED = "nsys 2026.3.1.97 failed, the log has what it said"


def test_torchs_profiler_takes_over_from_an_nsys_that_records_nothing(fresh: Project) -> None:
    fresh.edit("rules/nsys.smk", *WITHOUT_A_GPU)
    fresh.run(COMMAND, PATH=path_with(fresh, fault="records nothing"))
    result = read(fresh.folder / RESULT)
    assert result.status == "ok"
    assert str(value_of(result, "profiler_version")).startswith("torch profiler ")
    assert value_of(result, "profiler_note") == FAILED
    log = (fresh.folder / LOG).read_text().splitlines()
    assert log.count(f"profile: {FAILED}") == 1
    assert "recorded no kernels in 'mode forward'" in log[log.index(f"profile: {FAILED}") - 1]


def test_an_nsys_that_was_asked_for_and_cannot_record_is_a_failed_job(fresh: Project) -> None:
    configure(fresh, profiler="nsys")
    done = fresh.run(COMMAND, check=False, PATH=path_with(fresh, fault="cannot record"))
    assert done.returncode != 0
    assert (fresh.folder / LOG).read_text().splitlines()[-1] == f"profile: {FAILED}"
    assert not (fresh.folder / RESULT).exists()


def test_a_broken_nsys_is_one_line_before_any_job_and_torch_records(fresh: Project) -> None:
    fresh.edit("rules/nsys.smk", *WITHOUT_A_GPU)
    done = fresh.run(f"{COMMAND} -n -p", PATH=path_with(fresh, fault="broken"))
    lines = [line for line in done.stderr.splitlines() if line.startswith("profile: ")]
    assert len(lines) == 1
    assert "error while loading shared libraries" in lines[0]
    assert lines[0].endswith("; torch's profiler records instead")
    assert "nsys profile" not in done.stderr
    assert f"env {NSYS_UNAVAILABLE}=" in done.stderr


AMISS = {
    "not there": (None, "nsys is not on the PATH"),
    "broken": ("broken", "--version exits with 1"),
}


@pytest.mark.parametrize("case", AMISS)
def test_an_nsys_that_was_asked_for_and_is_amiss_ends_in_one_line(
    fresh: Project, case: str
) -> None:
    fault, complaint = AMISS[case]
    configure(fresh, profiler="nsys")
    done = fresh.run(f"{COMMAND} -n", check=False, PATH=path_with(fresh, fault=fault))
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if line.startswith("config: ")]
    assert len(ours) == 1
    assert complaint in ours[0]
    assert ours[0].endswith("allowed here: auto, torch")
    assert "Traceback" not in done.stderr


def test_on_a_cpu_auto_never_asks_nsys(fresh: Project) -> None:
    done = fresh.run(f"{COMMAND} -n -p", PATH=path_with(fresh, fault="broken"))
    assert "nsys profile" not in done.stderr
    assert "loading shared libraries" not in done.stderr


def test_traces_that_are_not_there_measure_nothing_again(measured: Project) -> None:
    """As in a clone: results are committed, traces are not."""
    folder = measured.folder / "traces"
    assert folder.is_dir()
    folder.rename(measured.folder / "elsewhere")
    assert measured.measures() == []


def test_a_kept_trace_lies_where_the_rule_declares_it() -> None:
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    (point,) = points_of(load({**config, "study": "nano"}, "cpu"), "profile")
    assert str(trace_folder(point)) == TRACE
