"""The rule for faster, slower, same and undecided, and how well two sets of results agree."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats.mstats import trimmed_mean_ci

from lmlab.measure.records import Record, value
from lmlab.report.compare import Compare, Variation, paired, process_variation, unpaired
from lmlab.report.frame import Results
from lmlab.report.repeat import DEVICE, GPU_BOUND, OTHER, agreement
from lmlab.report.verdict import FASTER, SAME, SLOWER, UNDECIDED, Interval, interval
from lmlab.study.results import Result
from tests.report.study import result, time_record, written


def between_jobs(
    ours: Sequence[float], theirs: Sequence[float], *variations: Variation
) -> Interval:
    return interval(*unpaired(time_record(ours), time_record(theirs), *variations))


POSITIVE = st.floats(min_value=1e-3, max_value=1e3)
SAMPLES = st.lists(POSITIVE, min_size=2, max_size=20)


@pytest.mark.parametrize(
    ("ratio", "low", "high", "verdict"),
    [
        (1.5, 1.4, 1.6, FASTER),
        (1.015, 1.01, 1.019, SAME),
        (1.01, 1.005, 1.03, UNDECIDED),
        (0.5, 0.4, 0.6, SLOWER),
        (1.5, 0.9, 2.5, UNDECIDED),
        (1.0, 0.99, 1.01, SAME),
    ],
)
def test_the_interval_decides(ratio: float, low: float, high: float, verdict: str) -> None:
    assert Interval(ratio=ratio, low=low, high=high).verdict == verdict


@given(SAMPLES, SAMPLES)
def test_swapping_sides_swaps_the_verdict(ours: list[float], theirs: list[float]) -> None:
    swapped = {FASTER: SLOWER, SLOWER: FASTER, SAME: SAME, UNDECIDED: UNDECIDED}
    for judged in (paired, between_jobs) if len(ours) == len(theirs) else (between_jobs,):
        there, back = judged(ours, theirs), judged(theirs, ours)
        assert back.verdict == swapped[there.verdict]
        assert there.ratio * back.ratio == pytest.approx(1)


@given(SAMPLES, POSITIVE)
def test_the_unit_of_time_does_not_matter(samples: list[float], unit: float) -> None:
    other = [sample * 1.3 for sample in samples]
    scaled = between_jobs([s * unit for s in samples], [s * unit for s in other])
    assert scaled.ratio == pytest.approx(between_jobs(samples, other).ratio)


def test_pairing_cancels_drift() -> None:
    drift = np.linspace(1, 2, 10)
    ours, theirs = list(10 * drift), list(11 * drift)
    assert paired(ours, theirs).verdict == FASTER
    assert between_jobs(ours, theirs).verdict == UNDECIDED


def test_one_hiccup_in_ten_rounds_decides_nothing() -> None:
    ours, theirs = [1.0, 1.01, 0.99, 1.0, 1.01] * 2, [1.3] * 10
    found, ours[0] = paired(ours, theirs), 50.0
    assert paired(ours, theirs).verdict == found.verdict == FASTER
    assert paired(ours, theirs).ratio == pytest.approx(found.ratio, rel=0.01)


def test_the_interval_is_that_of_a_trimmed_mean() -> None:
    logs = np.random.default_rng(0).normal(size=10)
    found = paired(list(np.exp(-logs)), [1.0] * 10)
    assert np.log([found.low, found.high]) == pytest.approx(trimmed_mean_ci(logs, (0.1, 0.1)))


def test_one_sample_decides_nothing_without_replicates() -> None:
    assert between_jobs([1.0], [2.0]).verdict == UNDECIDED
    assert between_jobs([1.0], [2.0], (0.01, 10)).verdict == FASTER


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.2])
def test_variation_between_processes_is_estimated_from_replicates(spread: float) -> None:
    generator = np.random.default_rng(0)
    rows = [
        {"point": index // 2, "value": math.exp(spread * generator.standard_normal())}
        for index in range(4000)
    ]
    found, freedom = process_variation(rows, ["point"])
    assert freedom == 2000
    assert found == pytest.approx(spread, rel=0.05)


def test_false_alarms_are_rare() -> None:
    """Two runs of the same thing are called different in at most about 5 % of cases."""
    generator = np.random.default_rng(1)
    wrong = sum(
        paired(*np.exp(0.05 * generator.standard_normal((2, 8)))).verdict in (FASTER, SLOWER)
        for _ in range(1000)
    )
    assert wrong < 80


OURS = Compare(variant={"variant": "ours"}, baseline={"variant": "theirs"}, on=["size"])


def test_a_variant_that_was_sampled_longer_is_judged_by_all_its_samples(tmp_path: Path) -> None:
    slow_start = time_record([1.05] * 10 + [1.0] * 90, variant="ours")
    point = result({"size": "a"}, [slow_start, time_record([1.0] * 10, variant="theirs")])
    assert [pair.verdict for pair in OURS.run(written(tmp_path, [point]).rows)] == [SAME]


def test_points_are_matched_and_summarized(tmp_path: Path) -> None:
    def point(size: str, ours: list[float], theirs: list[float] | None) -> Result:
        records = [time_record(ours, variant="ours")]
        records += [time_record(theirs, variant="theirs")] if theirs else []
        return result({"size": size}, records)

    rows = written(
        tmp_path,
        [
            point("a", [1.0, 1.01, 0.99], [2.0, 2.02, 1.98]),
            point("b", [1.0, 1.5, 0.5], [1.1, 0.9, 1.0]),
            point("c", [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]),
            point("d", [1.0, 1.0, 1.0], None),
        ],
    ).rows
    found = OURS.run(rows)
    assert [pair.label for pair in found.faster] == ["a"]
    assert [pair.label for pair in found.slower] == ["c"]
    assert [pair.label for pair in found.undecided] == ["b"]
    assert (found.best.point, found.worst.point) == ({"size": "a"}, {"size": "c"})
    paired = (1.1 * 0.6 * 2.0) ** (1 / 3)  # the mean of the rounds, not of the medians
    assert found.geomean == pytest.approx((2.0 * paired * 0.5) ** (1 / 3))
    assert list(found.rows()["speedup"]) == ["2.0x", "undecided", "0.50x"]
    assert found.rows()["stability"].isna().all(), "a ratio is one number, whatever its samples do"
    assert not found.where(size="z")
    assert not OURS.run(rows.head(0))
    with pytest.raises(ValueError, match=r"2 rows for .*'size': 'a'"):
        OURS.run(rows.iloc[[0, 0]])


def one_set(folder: Path, *, faster: float = 1.0, steps: int = 3) -> Results:
    """A GPU-bound and a host-bound size; `faster` is how much the host sped up."""
    walls = {"large": 100.0, "small": 50.0 / faster}
    results = []
    for size, wall in walls.items():
        records: list[Record] = [
            time_record([wall] * steps, phase="total"),
            time_record([wall] * steps, phase="forward"),  # the whole step: not counted twice
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
    assert other["where"] == "size small, phase total"


@pytest.mark.parametrize(("faster", "within"), [(1.029, 1), (1 / 1.029, 1), (1.031, 0)])
def test_values_agree_within_three_percent(tmp_path: Path, faster: float, within: int) -> None:
    found = {each["kind"]: each for each in agreement(both(tmp_path, faster), "steps")}
    assert found[OTHER]["within"] == within


def test_only_what_both_sets_have_is_compared(tmp_path: Path) -> None:
    first = one_set(tmp_path / "first")
    assert agreement(first, "steps") == []
    alone = result({"size": "small"}, [time_record([1.0], phase="a")])
    second = written(tmp_path / "second", [alone])
    assert agreement(replace(first, repeat=second), "steps") == []


def test_a_label_that_one_set_lacks_does_not_matter(tmp_path: Path) -> None:
    more = result({"size": "tiny"}, [time_record([1.0], phase="total", part="softmax")])
    other = [result({"size": s}, [time_record([1.0], phase="total")]) for s in ("tiny", "small")]
    first, second = (written(tmp_path / n, r) for n, r in (("1", [more, other[1]]), ("2", other)))
    assert [each["count"] for each in agreement(replace(first, repeat=second), "steps")] == [1]
