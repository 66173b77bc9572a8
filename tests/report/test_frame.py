"""One row per measured quantity; a missing value is a row with a reason."""

from pathlib import Path

import pytest

from lmlab.measure.records import value
from lmlab.report.frame import combine, derived, load, select
from lmlab.result_sets.published import load_published
from lmlab.study.points import Point
from tests.report.study import MACHINE, result, small_study, time_record, written


def test_an_unusable_file_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    good = result({"size": "small"}, [time_record([1.0], phase="total")])
    written(tmp_path, [good])
    points = [Point("steps", {"size": size}, {}) for size in ("small", "bad")]
    bad = points[1].path(tmp_path, MACHINE)
    bad.write_text("[" * 200_000)
    results = load(points, tmp_path, MACHINE)
    assert len(results.results) == 1
    assert [str(bad) in line and "\n" not in line for line in results.problems] == [True]
    assert list(select(results.rows, size="bad")["status"]) == ["invalid"]


def test_a_label_may_not_hide_a_parameter(tmp_path: Path) -> None:
    clash = result({"size": "small"}, [value("peak", 1, "B", size="large")])
    assert "'size'" in written(tmp_path, [clash]).problems[0]


def test_select_takes_values_lists_and_predicates(tmp_path: Path) -> None:
    rows = small_study(tmp_path).rows
    assert set(select(rows, size=["small", "huge"])["size"]) == {"small", "huge"}
    assert set(select(rows, size=lambda size: size != "small")["size"]) == {"large", "huge"}
    assert select(rows, no_such_field=1).empty


def test_derived_quantities_join_the_rows(tmp_path: Path) -> None:
    rows = small_study(tmp_path).rows
    times = {"quantity": "time", "phase": "total"}
    layers = derived(rows, "per_layer", times, lambda found: found.value / found.num_layers)
    assert sorted(select(layers, quantity="per_layer")["value"]) == [2.5, 5.0, 50.0]
    parts = {"time": times, "memory": {"quantity": "peak_memory"}}
    lacking = rows.drop(select(rows, quantity="peak_memory", precision="bf16").index)
    both = combine(lacking, "bytes_per_ms", parts, lambda part: part.memory / part.time)
    found = select(both, quantity="bytes_per_ms")
    assert list(found["size"]) == ["small", "large"], "in the order of the study"
    assert list(found["value"]) == pytest.approx([2**30 / 10.0, 2**30 / 100.0])
    nothing = derived(rows, "nothing", {"quantity": "absent"}, lambda found: found.value)
    assert len(nothing) == len(rows)


@pytest.mark.parametrize("parts", [("time", "memory"), ("memory", "time")])
def test_what_is_computed_from_an_unsteady_time_is_marked(
    tmp_path: Path, parts: tuple[str, str]
) -> None:
    unsteady = [time_record([1.0, 1.2] * 10, phase="total"), value("memory", 2**30, "B")]
    rows = written(tmp_path, [result({"size": "small"}, unsteady)]).rows
    rows = combine(rows, "rate", {name: {"quantity": name} for name in parts}, lambda p: p.memory)
    rows = derived(rows, "share", {"quantity": "rate"}, lambda found: found.value / 2**31)
    assert list(select(rows, quantity=["rate", "share"])["stability"]) == ["bimodal"] * 2


def test_what_a_published_source_leaves_out_is_not_stated(tmp_path: Path) -> None:
    (tmp_path / "times.csv").write_text("source,gpu,context,ms\n001,A100,,2.5\n001,A100,128,3\n")
    rows = load_published(tmp_path)
    assert list(rows["context"]) == ["not stated", 128]
    assert list(rows["value"]) == [2.5, 3]
    assert set(rows["topic"]) == {"times"}
