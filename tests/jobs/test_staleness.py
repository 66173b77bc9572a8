"""A result is held against the present: its code, its settings, its torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lmlab.jobs.registry import fingerprint
from lmlab.jobs.staleness import Standing, advice, installed_torch, remarks_on, standing
from lmlab.study.results import Result
from tests.jobs.points import precision_point

POINT = precision_point("accumulation", terms=1000, term=0.01)
TORCH = "2.13.0"
MACHINE = "cpu-test"


@pytest.fixture
def result() -> Result:
    return Result(
        chapter=POINT.chapter,
        parameters=POINT.parameters,
        settings=POINT.settings,
        status="ok",
        machine={"id": MACHINE, "device": "cpu", "name": "Test"},
        versions={"python": "3.11.0", "torch": "2.13.0+cu130", "lmlab": "0.1.0"},
        commit={"id": None, "dirty": False},
        code_fingerprint=fingerprint(POINT),
        started_at="2026-01-01T00:00:00Z",
        elapsed_s=1.0,
    )


def test_a_point_without_a_file_is_missing(tmp_path: Path) -> None:
    found = standing(POINT, tmp_path, MACHINE, TORCH)
    assert found.state == "missing"
    assert found.remarks() == []


def test_a_result_of_the_present_is_current_whatever_the_build_is_called(
    result: Result, tmp_path: Path
) -> None:
    result.write(POINT.path(tmp_path, MACHINE))
    found = standing(POINT, tmp_path, MACHINE, TORCH)
    assert found.state == "ok"
    assert found.is_current
    assert found.remarks() == []


CHANGES = {
    "other code": ({"code_fingerprint": "0" * 16}, "made by other code"),
    "other settings": (
        {"settings": {**POINT.settings, "terms": 10}},
        "other settings: terms 10 (now 1000)",
    ),
    "a setting that is new": (
        {"settings": {"seed": 0, "term": 0.01}},
        "other settings: terms absent (now 1000)",
    ),
    "other torch": (
        {"versions": {"python": "3.11.0", "torch": "2.11.0", "lmlab": "0.1.0"}},
        "made with torch 2.11.0",
    ),
}


@pytest.mark.parametrize(("change", "remark"), CHANGES.values(), ids=CHANGES)
def test_what_has_changed_since_is_named(
    result: Result, tmp_path: Path, change: dict[str, object], remark: str
) -> None:
    replace(result, **change).write(POINT.path(tmp_path, MACHINE))  # type: ignore[arg-type]
    found = standing(POINT, tmp_path, MACHINE, TORCH)
    assert not found.is_current
    assert found.remarks() == [remark]


def test_torch_is_not_compared_for_another_machine(result: Result, tmp_path: Path) -> None:
    result.write(POINT.path(tmp_path, MACHINE))
    assert standing(POINT, tmp_path, MACHINE, None).is_current


def test_a_result_without_numbers_keeps_its_reason(result: Result, tmp_path: Path) -> None:
    replace(result, status="oom", reason="asked for 9 GiB").write(POINT.path(tmp_path, MACHINE))
    found = standing(POINT, tmp_path, MACHINE, TORCH)
    assert (found.state, found.remarks()) == ("oom", ["asked for 9 GiB"])


FOREIGN = {
    "of another point": ({"parameters": {"topic": "layernorm"}}, "the result of another point"),
    "of another chapter": ({"chapter": "machine"}, "the result of another point"),
    "of another machine": (
        {"machine": {"id": "nvidia-h200", "device": "cuda", "name": "H200"}},
        "measured on nvidia-h200, not on cpu-test",
    ),
}


@pytest.mark.parametrize(("change", "remark"), FOREIGN.values(), ids=FOREIGN)
def test_a_file_that_was_copied_here_is_no_result(
    result: Result, tmp_path: Path, change: dict[str, object], remark: str
) -> None:
    replace(result, **change).write(POINT.path(tmp_path, MACHINE))  # type: ignore[arg-type]
    found = standing(POINT, tmp_path, MACHINE, TORCH)
    assert found.state == "unreadable"
    assert remark in found.remarks()[0]


def test_a_damaged_file_is_unreadable_and_named(result: Result, tmp_path: Path) -> None:
    path = POINT.path(tmp_path, MACHINE)
    result.write(path)
    path.write_text(path.read_text()[:-20])
    found = standing(POINT, tmp_path, MACHINE, TORCH)
    assert found.state == "unreadable"
    assert path.name in found.remarks()[0]


def test_every_fault_of_results_is_one_line_that_names_a_file() -> None:
    standings = {
        "sound": Standing(point=POINT, state="ok"),
        "coded": Standing(point=POINT, state="ok", other_code=True),
        "set": Standing(point=POINT, state="ok", other_settings=("terms 1 (now 2)",)),
        "set too": Standing(point=POINT, state="ok", other_settings=("terms 3 (now 2)",)),
        "torched": Standing(point=POINT, state="ok", other_torch="1.0"),
        "broken": Standing(point=POINT, state="unreadable"),
        "none": Standing(point=POINT, state="missing"),
    }
    assert list(remarks_on(standings)) == [
        "1 of 7 results were made by other code than the present, coded among them",
        "2 of 7 results were made with other settings, set among them",
        "1 of 7 results were made with another torch, torched among them",
        "1 of 7 results cannot be read, broken among them",
    ]


def test_nobody_is_told_to_delete_what_cannot_be_measured_again_here() -> None:
    here = advice(MACHINE, MACHINE, measuring=True)
    nano = advice(MACHINE, MACHINE, measuring=True, options=["--config", "study=nano"])
    assert nano.startswith("`lmlab status --config study=nano` lists them")
    assert here == "`lmlab status` lists them, deleting them measures them anew"
    elsewhere = advice("nvidia-h200", MACHINE, measuring=False)
    assert elsewhere == "`lmlab status --machine nvidia-h200` lists them"


def test_the_installed_torch_is_the_one_that_measures() -> None:
    import torch

    assert torch.__version__.partition("+")[0] == installed_torch().partition("+")[0]
