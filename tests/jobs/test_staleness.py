"""A result is compared with the present: its code, its settings, its torch."""

from pathlib import Path
from typing import Any

import pytest

from lmlab.jobs import staleness
from lmlab.jobs.budget import SKIPPED_PREFIX
from lmlab.jobs.registry import fingerprint
from lmlab.jobs.staleness import PointState, estimate, missing_parts, state_of
from lmlab.study.results import Result
from tests.jobs.points import precision_point
from tests.study.test_results import make

POINT = precision_point("accumulation", terms=1000, term=0.01)
TORCH = "2.13.0"
MACHINE = "cpu-test"


def current(**changes: Any) -> Result:
    """A result of the point as the present would make it, changed as asked."""
    values: dict[str, Any] = {
        "chapter": POINT.chapter,
        "parameters": POINT.parameters,
        "settings": POINT.settings,
        "measurements": (),
        "machine": {"id": MACHINE, "device": "cpu", "name": "Test"},
        "versions": {"python": "3.11.0", "torch": "2.13.0+cu130", "lmlab": "0.1.0"},
        "code_fingerprint": fingerprint(POINT),
        "flags": (),
    }
    return make(**{**values, **changes})


def test_the_next_run_is_estimated_from_what_the_last_one_took() -> None:
    states = [
        PointState(point=POINT, state="ok", elapsed_s=119.5, counted=[staleness.CODE]),
        PointState(point=POINT, state="ok", elapsed_s=1000),
        PointState(point=POINT, state="missing"),
        PointState(point=POINT, state="ok", elapsed_s=9.0, counted=[staleness.SETTINGS]),
        PointState(point=POINT, state="unsupported", elapsed_s=0.1, counted=[staleness.SKIPPED]),
    ]
    assert estimate(states) == "4 to measure: about 2 min for 1 measured before, unknown for 3"
    assert estimate(states[1:2]) == "nothing to measure"


OLD = {"python": "3.11.0", "torch": "2.11.0", "lmlab": "0.1.0"}
FOREIGN = {"id": "h200", "device": "cuda", "name": "H200"}
CASES: dict[str, tuple[dict[str, Any], bool, str]] = {
    "current, whatever the build is called": ({}, False, ""),
    "code": ({"code_fingerprint": "0" * 16}, True, "stale: code changed"),
    "a setting": ({"settings": {**POINT.settings, "terms": 10}}, True, "terms 10, now 1000"),
    "a new setting": ({"settings": {"seed": 0, "term": 0.01}}, True, "terms absent, now 1000"),
    "torch": ({"versions": OLD}, True, "measured with torch 2.11.0"),
    "another point's": ({"parameters": {"topic": "layernorm"}}, True, "of another point"),
    "another chapter's": ({"chapter": "machine"}, True, "of another point"),
    "another machine's": ({"machine": FOREIGN}, True, "measured on h200"),
    "no numbers": ({"status": "oom", "reason": "asked for 9 GiB"}, False, "asked for 9 GiB"),
}


@pytest.mark.parametrize(("change", "stale", "remark"), CASES.values(), ids=CASES)
def test_what_has_changed_since_makes_a_result_stale(
    tmp_path: Path, change: dict[str, Any], stale: bool, remark: str
) -> None:
    current(**change).write(POINT.path(tmp_path, MACHINE))
    found = state_of(POINT, tmp_path, MACHINE, TORCH)
    foreign = not change.keys().isdisjoint({"parameters", "chapter", "machine"})
    expected = "unreadable" if foreign else change.get("status", "ok")
    assert (found.state, found.needs_attention) == (expected, stale)
    assert len(found.remarks) == bool(remark)
    assert remark in "".join(found.remarks)


@pytest.mark.parametrize(
    ("change", "due"),
    [
        ({}, False),
        ({"code_fingerprint": "0" * 16}, True),
        ({"settings": {**POINT.settings, "terms": 10}}, True),
        ({"versions": OLD}, False),
        ({"status": "unsupported", "reason": f"{SKIPPED_PREFIX}no time"}, True),
        ({"status": "unsupported", "reason": "needs 4 GPUs"}, False),
    ],
)
def test_what_is_measured_again_without_a_record(
    tmp_path: Path, change: dict[str, Any], due: bool
) -> None:
    current(**change).write(POINT.path(tmp_path, MACHINE))
    assert state_of(POINT, tmp_path, MACHINE, TORCH).due == due


def test_the_summary_counts_states_and_remarks(tmp_path: Path) -> None:
    second = f"{MACHINE}@repeat"  # another set of the machine
    states = [state_of(POINT, tmp_path / "none", MACHINE, TORCH)]
    for change in ({}, {"code_fingerprint": "0" * 16}, {"commit": {"id": None, "dirty": True}}):
        current(**change).write(POINT.path(tmp_path, second))
        states.append(state_of(POINT, tmp_path, second, TORCH))
    assert staleness.summary(states) == (
        "4 points: 3 ok, 1 missing; 1 stale (code changed); 1 from uncommitted code"
    )


def test_missing_parts_of_a_report_are_pages_and_images(tmp_path: Path) -> None:
    page = tmp_path / "writeup.md"
    page.write_text('![a](figures/a.svg) ![b](figures/b.png "title") ![c](https://x.org/c.png)')
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "a.svg").touch()
    gone = tmp_path / "index.md"
    missing = missing_parts([str(page), str(gone)])
    assert missing == [gone, tmp_path / "figures" / "b.png"]
