"""The comparison page: machines side by side, with ceilings, verdicts and published figures."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmlab.chapters import compare_page
from lmlab.chapters.end_to_end.page import NOISE
from lmlab.cli.machines import write_comparison
from lmlab.report.frame import table_of
from lmlab.report.table import Table, time
from lmlab.result_sets.differences import BOUNDS
from lmlab.result_sets.machines import Machine, Question, Section, ceilings
from lmlab.result_sets.published import load_published
from lmlab.study.files import REFERENCES, ROOT, TEMPLATES
from lmlab.study.selection import compared
from tests.project import GOLDEN_RESULTS, config
from tests.report.study import scale
from tests.report.test_table import cells

FACTOR = 3.0


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """The golden machine, and another that takes three times as long."""
    folder = tmp_path / "results"
    for path in GOLDEN_RESULTS.rglob("*.json"):
        result = json.loads(path.read_text())
        for name, factor in (("cpu-golden", 1.0), ("cpu-slow", FACTOR)):
            copy = json.loads(json.dumps(result))
            copy["machine"].update(id=name, name=f"The {name}")
            scale(copy["measurements"], factor)
            for record in copy["measurements"]:
                if record["quantity"] == "matmul_rate" and record["value"]:
                    record["value"] /= factor
            target = folder / name / path.relative_to(GOLDEN_RESULTS)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(copy))
    return folder


def write(results: Path, machines: Sequence[str]) -> tuple[str, list[str]]:
    out = results.parent / "report" / "compare.md"
    nano = config(study="nano")
    faults = write_comparison(nano, machines=machines, results=results, out=out)
    return out.read_text(), faults


def test_every_question_of_the_front_page_has_a_section(results: Path) -> None:
    page, faults = write(results, ["cpu-golden", "cpu-slow"])
    assert faults == []
    not_in_nano = ("sharded_optimizer.md.j2", "fsdp.md.j2")
    files = [file for file in (TEMPLATES / "front").iterdir() if file.name not in not_in_nano]
    parts = [part for file in files for part in file.read_text().split("### ")[1:]]
    asked = {part.partition("\n")[0]: part for part in parts}
    assert {*compare_page.TABLES, *compare_page.COLUMNS} <= set(asked)
    with_table = {heading for heading, part in asked.items() if ".table(" in part}
    shown = {part.partition("\n")[0]: part for part in page.split("\n## ")[1:]}
    assert with_table <= set(shown)
    for link in re.findall(r"\]\((compare/[^)]+)\)", page):
        assert (results.parent / "report" / link).stat().st_size > 0
    step = shown["How long is a step?"]
    assert "0.33x" in step  # the speed where it is decided
    assert "0.33x, 1.00x" in step  # matmul rates explain it, copy bandwidth does not


@pytest.mark.parametrize("machines", [["cpu-golden", "cpu-slow"], ["cpu-slow", "cpu-golden"]])
def test_a_chapter_that_a_set_lacks_is_named_and_no_fault(
    results: Path, machines: list[str]
) -> None:
    """Each chapter has results on only one of the two machines."""
    for index, path in enumerate(sorted((results / "cpu-golden").iterdir())):
        out = results / ("cpu-golden", "cpu-slow")[index % 2] / path.name
        shutil.rmtree(out) if out.is_dir() else out.unlink()
    page, faults = write(results, machines)
    assert faults == []
    for section in page.split("\n## ")[1:]:
        absent = [name for name in ("golden", "slow") if f"measured on The cpu-{name}." in section]
        assert len(absent) == 1 or "Not measured on any" in section, section


def test_two_machines_of_one_name_and_values_without_samples(results: Path) -> None:
    for path in (results / "cpu-slow").rglob("*.json"):
        path.write_text(path.read_text().replace("The cpu-slow", "The cpu-golden"))
    page, faults = write(results, ["cpu-golden", "cpu-slow"])
    assert faults == []
    # One value per machine: a ratio without a verdict.
    per_layer = page.split("## Is the host or the GPU the bottleneck?")[1].split("\n## ")[0]
    assert {line[-2] for line in cells(per_layer)[2:]} == {"0.33x"}


def test_a_machine_without_results_is_one_line(results: Path) -> None:
    assert compared({}, results) == ["cpu-golden", "cpu-slow"]
    assert compared({"compare": "cpu-slow"}, results) == ["cpu-slow"]
    with pytest.raises(ValueError, match=r"\A[^\n]*cpu-fast[^\n]*cpu-golden, cpu-slow\Z"):
        compared({"compare": "cpu-slow,cpu-fast"}, results)


def test_the_script_prints_only_what_is_wrong(results: Path) -> None:
    script = [sys.executable, ROOT / "workflow/scripts/compare.py", "--machines", "cpu-golden"]
    script += ["--config", json.dumps(config(study="nano")), "--out"]
    for out, status in (("compare.md", 0), ("results/cpu-golden/machine.json/compare.md", 1)):
        done = subprocess.run([*script, out], cwd=results.parent, capture_output=True, check=False)
        assert (done.returncode, len(done.stderr.splitlines())) == (status, status)
    assert "RTX 4090, published" in (results.parent / "compare.md").read_text()


TIMES = Table(
    title="Times, {precision}", facet="precision", rows=["size"], columns={"ms": time(phase="a")}
)
QUESTION = Question("How long?", "steps", TIMES)
UNIT = {"fp32": 10.0, "copy": 100.0}


def judged(machines: Sequence[Machine], **variation: tuple[float, int]) -> list[list[str]]:
    """The lines of the table, given the variation between processes by bound."""
    known = {**dict.fromkeys(BOUNDS, (0.001, 20)), **variation}
    return cells(Section(QUESTION, machines, NOISE, known).markdown())[2:]


def machine(
    name: str, values: dict[str, Any], device: Mapping[str, float] = {}, **more: Any
) -> Machine:
    rows = [
        {
            **{"chapter": "steps", "quantity": "time", "clock": clock, "phase": "a"},
            **{"precision": "fp32", "size": size, "flags": (), "status": "ok"},
            **({"status": "oom", "reason": "too large"} if ms is None else {"value": ms}),
            "samples": None if ms is None else [ms * noise for noise in (0.999, 1.0, 1.001, 1.0)],
        }
        for clock, times in (("wall", values), ("device", device))
        for size, ms in times.items()
    ]
    return Machine(
        name=name, chapters={"steps": table_of(rows)}, **{"ceilings": UNIT, "stated": UNIT, **more}
    )


def test_cells_ratios_and_ceilings() -> None:
    machines = [
        machine("A", {"small": 10.0, "large": 40.0, "huge": 100.0}),
        machine("B", {"small": 5.0, "large": 40.0, "huge": None}, ceilings={**UNIT, "fp32": 20.0}),
        machine("C, published", {"small": 20.0}, published=True),
    ]
    assert judged(machines) == [
        ["fp32", "small", "10.0", "5.00", "20.0", "2.0x", "0.50x", "2.0x, 1.00x", "1.00x, 1.00x"],
        ["fp32", "large", "40.0", "40.0", "not stated", "same", "–", "2.0x, 1.00x", "1.00x, 1.00x"],
    ]
    assert cells(ceilings(machines))[2:] == [
        ["matmul, fp32 (TFLOP/s)", "10.0", "20.0", "10.0 stated", "2.0x", "1.00x"],
        ["copy (GB/s)", "100", "100", "100 stated", "1.00x", "1.00x"],
    ]


def test_rows_that_one_machine_has_are_shown_if_none_is_shared() -> None:
    machines = [machine("A", {"small": 10.0}), machine("B", {"large": 5.0})]
    assert [row[1:4] for row in judged(machines)] == [
        ["small", "10.0", "–"],
        ["large", "–", "5.00"],
    ]


def test_variation_between_processes_widens_the_interval() -> None:
    machines = [machine("A", {"small": 10.0}), machine("B", {"small": 9.0})]
    assert judged(machines, unknown=(0.1, 20))[0][4] == "undecided"


@pytest.mark.parametrize(
    ("device", "shown", "verdict"),
    [
        ((4.0, 4.0), ["10.0 (4.00)", "20.0 (4.00)"], "same"),
        ((4.0, 2.0), ["10.0 (4.00)", "20.0 (2.00)"], "2.0x"),
        ((4.0, None), ["10.0 (4.00)", "20.0"], "undecided"),  # waits for the host, which varies
        ((9.0, None), ["10.0 (9.00)", "20.0"], "0.50x"),
    ],
)
def test_device_time_decides_where_both_have_it_else_what_limits_the_wall_time(
    device: tuple[float, float | None], shown: list[str], verdict: str
) -> None:
    machines = [
        machine(name, {"small": wall}, device={"small": ms} if ms else {})
        for name, wall, ms in zip("AB", (10.0, 20.0), device, strict=True)
    ]
    found = judged(machines, host=(0.5, 20))
    assert found[0][2:5] == [*shown, verdict]


def test_every_reference_file_is_used() -> None:
    files = {file.stem for file in REFERENCES.glob("*.csv")}
    assert files == {*compare_page.CONVERSIONS, "distributed"}  # on the data-parallel page
    found = compare_page.published(load_published(REFERENCES))
    assert {"H800 PCIe", "H100", "A10", "RTX 4090"} <= set(found)
    assert set(found["H800 PCIe"]) == {"end_to_end", "memory", "attention"}
    assert "unstated" not in found


@pytest.mark.parametrize("names", [[], ["distributed.csv"], ["memory.csv"]])
def test_reference_files_may_be_missing(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        shutil.copy(REFERENCES / name, tmp_path / name)
    chapters = compare_page.published(load_published(tmp_path)).values()
    assert {name for found in chapters for name in found} == {"memory"} & {n[:-4] for n in names}


def test_a_source_takes_part_where_it_states_enough() -> None:
    found = compare_page.published(load_published(REFERENCES))
    steps = compare_page.TABLES["How long is a step?"].cells([found["H800 PCIe"]["end_to_end"]])
    assert steps["fp32", "forward", "small", 4, 512, "ms"][0].text() == "27.2"
    assert "end_to_end" not in {
        chapter for chapter, rows in found["A10"].items() if (rows["status"] == "ok").any()
    }  # its context is not stated
    kernels = compare_page.TABLES["Which kernels take the time?"].cells([found["A10"]["profile"]])
    assert kernels["forward", "large", 256, "share"][0].text() == "48 %"
    naive = compare_page.TABLES["How long a sequence fits with naive attention?"]
    sides = [found[gpu]["attention"] for gpu in ("H800 PCIe", "RTX 4090")]
    cells = naive.cells(sides)["forward", 64, 16384, "ms"]
    assert [cell.text() for cell in cells] == ["79.8", "OOM"]
    # What did not fit says no more than its source: a row without a size is left out.
    rtx, a100 = (found[gpu]["end_to_end"].query("status == 'oom'") for gpu in ("RTX 4090", "A100"))
    assert rtx[["size", "precision", "context"]].values.tolist() == [["xl", "fp32", 256]]
    assert a100[["batch", "precision", "context"]].isna().all(axis=None)
