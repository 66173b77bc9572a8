"""The table of `lmlab measure`: times, and what there is to know of those that are not there."""

from __future__ import annotations

import pytest

from lmlab.cli.measure import table
from lmlab.study.points import Point
from lmlab.study.results import Result


def result_with(stops: dict[str, str], arms: object = None) -> Result:
    """A result of times that ended as said, and of arms."""
    times = {"n": 1, "mean_ms": 1.0, "sd_ms": None, "median_ms": 1.0, "min_ms": 1.0, "max_ms": 1.0}
    return Result(
        chapter="attention",
        parameters={},
        settings={},
        status="ok",
        machine={"id": "cpu-test", "device": "cpu", "name": "Test"},
        versions={"torch": "2"},
        commit={"id": None, "dirty": False},
        code_fingerprint="0" * 16,
        started_at="2026-01-01T00:00:00Z",
        elapsed_s=1.0,
        measurements={name: {**times, "stopped": stop} for name, stop in stops.items()},
        data={} if arms is None else {"arms": arms},
    )


CAPPED = "time cap of 10 s after 1 sample"
UNSHOWN: dict[str, tuple[Result, list[str]]] = {
    "all samples": (result_with({"forward": "10 samples"}), []),
    "capped": (
        result_with({"forward": CAPPED, "total": CAPPED}),
        [f"stopped early: {CAPPED}"],
    ),
    "arms of a race, each with its own end": (
        result_with({"naive": CAPPED, "flash": "20 samples"}),
        [],
    ),
    "an arm without a time": (
        result_with(
            {"naive": "20 samples"},
            {"naive": {"status": "ok"}, "flash": {"status": "oom", "reason": "9 GiB"}},
        ),
        ["flash: oom: 9 GiB"],
    ),
    "an arm of a list without a time": (
        result_with(
            {"nested": "2 samples"},
            [
                {"name": "none", "status": "oom", "reason": "9 GiB"},
                {"name": "nested", "status": "ok", "reason": None},
            ],
        ),
        ["none: oom: 9 GiB"],
    ),
    "arms that are a list": (result_with({"none": "2 samples"}, [{"strategy": "none"}]), []),
}


@pytest.mark.parametrize(("result", "lines"), UNSHOWN.values(), ids=UNSHOWN)
def test_the_table_says_what_its_rows_do_not_show(result: Result, lines: list[str]) -> None:
    above_rows = table(Point("attention"), result).splitlines()[2:]
    assert above_rows[: len(lines)] == lines
    assert above_rows[len(lines)].startswith("phase")
