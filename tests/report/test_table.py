"""Tables from declarations: cells, reasons, marks and captions."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from lmlab.measure.records import value
from lmlab.report.frame import select
from lmlab.report.table import Table, memory, time
from lmlab.report.text import FORMATS, escape, join, number, percent, slug, times
from tests.report.study import result, small_study, time_record, written

STEP = time(phase="total")
BY_SIZE = Table(title="T", rows=["size"], columns={"ms": STEP})


def cells(markdown: str) -> list[list[str]]:
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_rows_columns_and_reasons(tmp_path: Path) -> None:
    table = Table(
        title="Steps",
        rows=["size", "precision"],
        columns={"step (ms)": STEP, "peak (GiB)": memory()},
    )
    text = table.render(small_study(tmp_path).rows)
    header, rule, *lines = cells(text)
    assert header == ["size", "precision", "step (ms)", "peak (GiB)"]
    assert rule == ["---", "---", "--:", "--:"]
    assert lines == [
        ["small", "fp32", "10.0", "1.00"],
        ["small", "bf16", "5.00", "1.00"],
        ["large", "fp32", "100", "1.00"],
        ["large", "bf16", "OOM", "OOM"],
        ["huge", "fp32", "not measured", "not measured"],
    ]
    assert "asked for 40 GiB" in text
    assert "median of 3" in text


def test_a_column_without_any_value_is_left_out(tmp_path: Path) -> None:
    columns = {"device (ms)": time(phase="total", clock="device"), "step (ms)": STEP}
    table = Table(title="Steps", rows=["size", "precision"], columns=columns)
    rows = small_study(tmp_path).rows
    small = table.render(select(rows, size="small"))
    assert cells(small)[0] == ["precision", "step (ms)"]
    assert "\n*Steps. All rows: size small. " in small  # said once
    header, _, first, *_ = cells(table.render(rows))  # but a column with reasons is kept
    assert (header[2:], first[2:]) == (list(columns), ["–", "10.0"])


def test_reasons_that_differ_only_in_numbers_are_one(tmp_path: Path) -> None:
    reasons = ("needs 16.0 GiB more", "needs 2e+01 GiB more", "no room")
    failed = [result({"size": n}, status="oom", reason=why) for n, why in enumerate(reasons)]
    caption = BY_SIZE.render(written(tmp_path, failed).rows).rpartition("\n")[2]
    assert "OOM: could not allocate 16.0 GiB, and similar. OOM: no room." in caption


@pytest.mark.parametrize(
    ("reason", "cell"), [(None, "OOM"), (float("nan"), "OOM"), ("overflow", "overflow")]
)
def test_a_cell_without_a_value_shows_a_short_reason_or_its_status(
    reason: str | float | None, cell: str, tmp_path: Path
) -> None:
    rows = written(tmp_path, [result({"size": 1}, status="oom", reason="no room")]).rows
    text = BY_SIZE.render(rows.assign(reason=reason))
    assert cells(text)[2] == ["1", cell]
    assert "OOM:" not in text


def test_across_and_facet(tmp_path: Path) -> None:
    rows = small_study(tmp_path).rows
    across = Table(title="T", rows=["size"], across="precision", columns={"{precision}": STEP})
    assert cells(across.render(rows))[0] == ["size", "fp32", "bf16"]
    facet = Table(title="T {precision}", rows=["size"], facet="precision", columns={"ms": STEP})
    text = facet.render(rows)
    assert "T fp32" in text
    assert "T bf16" in text


def test_noisy_and_capped_values_are_marked(tmp_path: Path) -> None:
    noisy = result({"size": "a"}, [time_record([1.0, 2.0, 3.0], phase="total")])
    records = [time_record([1.0], phase="total"), value("peak_memory", 2**30, "B")]
    capped = result({"size": "b"}, records, flags=("power_capped",))
    rows = written(tmp_path, [noisy, capped]).rows
    table = Table(title="T", rows=["size"], columns={"ms": STEP, "GiB": memory()})
    assert [line[1] for line in cells(table.render(rows))[2:]] == ["2.00~", "1.00†"]
    text = table.render(written(tmp_path / "capped", [capped]).rows)
    assert cells(text)[2] == ["b", "1.00", "1.00"]
    assert "All: power-capped" in text


def test_an_ambiguous_cell_is_an_error_and_nothing_is_empty(tmp_path: Path) -> None:
    rows = small_study(tmp_path).rows
    with pytest.raises(ValueError, match=r"'ms'.* 2 rows .*'size': 'small'"):
        BY_SIZE.render(rows)
    assert BY_SIZE.render(rows.head(0)) == ""


@given(st.text(max_size=60))
def test_any_text_is_harmless_in_markdown(text: str) -> None:
    """Escaped text adds no cells or scripts to the rendered page."""
    line = " ".join(text.split())
    html = (
        MarkdownIt("gfm-like", {"linkify": False})
        .enable("table")
        .render(f"| a | b |\n| --- | --- |\n| x {escape(line)} y | end |\n")
    )
    assert html.count("<td") == 2
    assert "<script" not in html.lower()


@given(st.floats(min_value=1e-6, max_value=1e12))
def test_rounding_keeps_three_digits(value: float) -> None:
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=6e-3)


def test_formats() -> None:
    values = (0.0123456, 12.345, 1234.5, 9.996, 0.0, 7)
    assert [number(value) for value in values] == ["0.0123", "12.3", "1,234", "10.0", "0", "7"]
    assert [percent(share) for share in (0.0, 0.012, 0.5)] == ["0 %", "1.2 %", "50 %"]
    ratios = (0.5, 0.998, 2.34, 14.9)
    assert [times(ratio) for ratio in ratios] == ["0.50x", "1.00x", "2.3x", "14.9x"]
    assert join(["a", "b", "c"]) == "a, b and c"
    assert slug("Does bf16 pay?") == "does-bf16-pay"
    assert FORMATS["GiB"](2**31) == "2.00"
