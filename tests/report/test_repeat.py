"""Two sets of the same study: which values they share, and how many agree."""

from dataclasses import replace
from pathlib import Path

import pytest

from lmlab.measure.records import Record, value
from lmlab.report.frame import Results
from lmlab.report.repeat import DEVICE, GPU_BOUND, OTHER, agreement
from tests.report.study import result, time_record, written


def one_set(folder: Path, *, faster: float = 1.0, steps: int = 3) -> Results:
    """A GPU-bound and a host-bound size; `faster` is how much the host sped up."""
    walls = {"large": 100.0, "small": 50.0 / faster}
    results = []
    for size, wall in walls.items():
        records: list[Record] = [
            time_record([wall] * steps, phase="total"),
            time_record([98.0 if size == "large" else 10.0], clock="device", phase="total"),
            time_record([1.0], clock="events", phase="kernel"),
            time_record([0.0], clock="device", phase="zero_grad"),
            value("tokens", 7, ""),
        ]
        results.append(result({"size": size}, records, settings={"steps": steps}))
    return written(folder, results)


def both(folder: Path, faster: float) -> Results:
    second = one_set(folder / "second", faster=faster, steps=5)
    return replace(one_set(folder / "first"), repeat=second)


def test_times_are_counted_by_what_limits_them(tmp_path: Path) -> None:
    found = {each["kind"]: each for each in agreement(both(tmp_path, 2.0), "steps")}
    assert {kind: (each["count"], each["within"]) for kind, each in found.items()} == {
        DEVICE: (4, 4),
        GPU_BOUND: (1, 1),
        OTHER: (1, 0),
    }
    other = found[OTHER]
    assert (other["worst"], other["first"], other["second"]) == pytest.approx((1.0, 50, 25))
    assert other["where"] == "small, total"


@pytest.mark.parametrize(("faster", "within"), [(1.029, 1), (1 / 1.029, 1), (1.031, 0)])
def test_values_agree_within_three_percent(tmp_path: Path, faster: float, within: int) -> None:
    found = {each["kind"]: each for each in agreement(both(tmp_path, faster), "steps")}
    assert found[OTHER]["within"] == within


def test_only_what_both_sets_have_is_compared(tmp_path: Path) -> None:
    first = one_set(tmp_path / "first")
    assert agreement(first, "steps") == []
    alone = written(
        tmp_path / "second", [result({"size": "small"}, [time_record([1.0], phase="a")])]
    )
    assert agreement(replace(first, repeat=alone), "steps") == []
