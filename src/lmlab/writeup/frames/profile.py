"""Profiles as tidy frames: one row a point, a mode, a phase, a family, a kernel, a part.

Every frame has the place of its point (size, context, batch, precision) in front, so that they can
be put beside each other. Times are milliseconds, those of single kernels microseconds. Points that
were not measured have a row in `points` with their status, and none in the other frames.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from lmlab.study.results import Result
from lmlab.writeup.collect import Collected, Row
from lmlab.writeup.profile_words import MATMULS, MODE_NAMES

PLACE = ["size", "context", "batch", "precision"]
CLOCK = ("n", "mean_ms", "sd_ms", "median_ms", "q1_ms", "q3_ms")
POINT_COLUMNS = [*PLACE, "attention", "status", "tool", "tool_note", "tf32", *CLOCK]
MODE_COLUMNS = [
    *PLACE, "mode", "kernels", "total_ms", "busy_ms", "span_ms", "table_ms", "copies_ms", "copies",
    "wait_ms", "wait_call", "wait_after", "launch_us", "delay_ms", "gap_ms", "late_gap_ms", "gaps",
    "host_ms", "longest_gap_ms", "gap_before", "gap_phase",
]  # fmt: skip
PHASE_COLUMNS = [*PLACE, "mode", "phase", "kernels", "total_ms", "busy_ms", "span_ms", "host_ms"]
FAMILY_COLUMNS = [*PLACE, "mode", "family", "total_ms", "instances", "share"]
KERNEL_COLUMNS = [
    *PLACE, "mode", "name", "short_name", "family", "share", "total_ms", "instances",
    "avg_us", "med_us", "min_us", "max_us", "sd_us",
]  # fmt: skip
PART_COLUMNS = [
    *PLACE, "part", "kernels", "total_ms", "product_ms", "share",
    "flops", "bytes", "tflops", "gb_per_s",
]  # fmt: skip
COPIES = "copies and fills"
SLOW_COLUMNS = [*PLACE, "run", "range", "duration_ms", "times", "instances", "kernel", "call"]


def points(collected: Collected) -> pd.DataFrame:
    """Every point of the study, with the host's clock where it was measured."""
    return pd.DataFrame([_point(row) for row in collected.rows], columns=POINT_COLUMNS)


def modes(collected: Collected) -> pd.DataFrame:
    """Every recorded run as a whole, and what the host did meanwhile."""
    rows = [
        {**place, "mode": mode, **_run(run)}
        for place, data in _recorded(collected)
        for mode, run in _modes(data)
    ]
    return pd.DataFrame(rows, columns=MODE_COLUMNS)


def phases(collected: Collected) -> pd.DataFrame:
    """Every phase of every run."""
    rows = [
        {**place, "mode": mode, "phase": phase["phase"], **_in_ms(phase)}
        for place, data in _recorded(collected)
        for mode, run in _modes(data)
        for phase in run["phases"]
    ]
    return pd.DataFrame(rows, columns=PHASE_COLUMNS)


def families(collected: Collected) -> pd.DataFrame:
    """Every family of every run; shares are of the run's work on the device."""
    rows = [
        {
            **place,
            "mode": mode,
            "family": family,
            "total_ms": total["total_ns"] / 1e6,
            "instances": total["instances"],
            "share": total["total_ns"] / max(run["total_ns"], 1),
        }
        for place, data in _recorded(collected)
        for mode, run in _modes(data)
        for family, total in run["families"].items()
    ]
    return pd.DataFrame(rows, columns=FAMILY_COLUMNS)


def kernels(collected: Collected) -> pd.DataFrame:
    """The kernel tables, largest total first; shares are of all kernels, copies left out."""
    rows = [
        {**place, "mode": mode, **row}
        for place, data in _recorded(collected)
        for mode, run in _modes(data)
        for row in _kernels(run, data["names"])
    ]
    return pd.DataFrame(rows, columns=KERNEL_COLUMNS)


def outside_products(collected: Collected) -> pd.DataFrame:
    """What forward runs that is no product, largest first; shares are of its work on the device.

    Copies and fills are no kernels and have no row in a kernel table; here they are one.
    """
    runs = of(modes(collected), mode="forward")
    runs = runs.assign(row=range(len(runs)), whole_ms=runs["total_ms"])
    copies = runs[runs["copies"] > 0].assign(
        short_name=COPIES, family="copy", total_ms=runs["copies_ms"], instances=runs["copies"]
    )
    table = of(kernels(collected), mode="forward")
    table = table[~table["family"].isin(MATMULS)].merge(runs[[*PLACE, "row", "whole_ms"]], on=PLACE)
    rows = pd.concat([table, copies.reindex(columns=table.columns)]) if len(copies) else table
    rows = rows.assign(share=rows["total_ms"] / rows["whole_ms"])
    return rows.sort_values(["row", "share"], ascending=[True, False], kind="stable")


def parts(collected: Collected) -> pd.DataFrame:
    """Attention's parts in a forward pass, with the rates at which they ran."""
    rows = [
        {**place, **_part(part, data)}
        for place, data in _recorded(collected)
        for part in data["attention_parts"] or ()
    ]
    return pd.DataFrame(rows, columns=PART_COLUMNS)


def slow_ranges(collected: Collected) -> pd.DataFrame:
    """Ranges that took many times their name's median, and what ran in them."""
    rows = [
        {
            **place,
            "run": str(row["run"] or "").removeprefix("mode "),
            "range": row["range"],
            "duration_ms": row["duration_ns"] / 1e6,
            "times": row["duration_ns"] / max(row["median_ns"], 1),
            "instances": row["instances"],
            "kernel": row["kernel"],
            "call": row["call"],
        }
        for place, data in _recorded(collected)
        for row in data["slow_ranges"]
    ]
    return pd.DataFrame(rows, columns=SLOW_COLUMNS)


def end_to_end_forward(collected: Collected) -> pd.DataFrame:
    """The forward pass as the end-to-end chapter timed it, in processes of its own."""
    rows = [
        {
            **{key: row.result.parameters[key] for key in PLACE},
            "other_median_ms": row.result.measurements["forward"]["median_ms"],
        }
        for row in collected.beside.get("end_to_end", ())
        if row.result is not None and row.status == "ok" and _is_warm_forward(row.result)
    ]
    return pd.DataFrame(rows, columns=[*PLACE, "other_median_ms"])


def of(data: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """Rows with these values; a set means any of its values."""
    for column, value in wanted.items():
        values = data[column]
        data = data[values.isin(value) if isinstance(value, set) else values == value]
    return data


def order(data: pd.DataFrame, column: str) -> list[Any]:
    """A column's values in the study's order."""
    return list(dict.fromkeys(data[column]))


def first_kind(data: pd.DataFrame) -> pd.DataFrame:
    """The rows of the study's first batch and precision, where a figure can show but one."""
    for column in ("batch", "precision"):
        data = data[data[column] == data[column].iloc[0]] if len(data) else data
    return data


def largest_context(data: pd.DataFrame) -> pd.DataFrame:
    """Of each size, the rows at the largest context that it was recorded at."""
    if data.empty:
        return data
    return data[data["context"] == data.groupby("size", sort=False)["context"].transform("max")]


def results_at_largest_context(collected: Collected) -> dict[str, Result]:
    """Of each size, the recorded result at the largest context; the first batch and precision."""
    found: dict[str, Result] = {}
    for result in _ok(collected):
        size = str(result.parameters["size"])
        kept = found.get(size)
        if kept is None or result.parameters["context"] > kept.parameters["context"]:
            found[size] = result
    return found


def _is_warm_forward(result: Result) -> bool:
    return result.parameters["mode"] == "forward" and result.parameters["start"] == "warm"


def _ok(collected: Collected) -> list[Result]:
    return [result for result in collected.results if result.status == "ok"]


def _recorded(collected: Collected) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    for result in _ok(collected):
        yield {key: result.parameters[key] for key in PLACE}, result.data


def _modes(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each mode by its name: a result that lacks one is found out, not read without it."""
    for mode in MODE_NAMES:
        yield mode, data["modes"][mode]


def _point(row: Row) -> dict[str, Any]:
    shared = {**row.point.parameters, "status": row.status}
    if row.result is None or row.status != "ok":
        return shared
    data, clock = row.result.data, row.result.measurements["forward"]
    said = {key: data[key] for key in ("tool", "tool_note", "tf32")}
    return {**shared, **said, **{name: _number(clock[name]) for name in CLOCK}}


def _run(run: Mapping[str, Any]) -> dict[str, Any]:
    host = run["host"]
    longest = host["waits"][0] if host["waits"] else {"name": None, "after": None}
    names = [phase["phase"] for phase in run["phases"]]
    in_tables = sum(run["table"]["total_ns"]) + run["rest"]["total_ns"]
    return {
        **_in_ms(run),
        "table_ms": in_tables / 1e6,
        "copies_ms": run["copies"]["total_ns"] / 1e6,
        "copies": run["copies"]["instances"],
        "wait_ms": host["wait_ns"] / 1e6,
        "wait_call": longest["name"],
        "wait_after": longest["after"],
        "launch_us": _mean_launch_us(host["calls"]),
        "delay_ms": _number(host["delay_median_ns"]) / 1e6,
        "gap_ms": host["gap_ns"] / 1e6,
        "late_gap_ms": host["host_late_gap_ns"] / 1e6,
        "gaps": host["gaps"],
        "host_ms": sum(phase["host_ns"] for phase in run["phases"]) / 1e6,
        **_longest_gap(host["longest_gaps"], names),
    }


def _mean_launch_us(calls: list[dict[str, Any]]) -> float:
    """What a launch of a kernel takes on the host, over all ways to ask for one."""
    launches = [call for call in calls if "Launch" in call["name"]]
    count = sum(call["calls"] for call in launches)
    return sum(call["total_ns"] for call in launches) / count / 1e3 if count else math.nan


def _longest_gap(gaps: list[dict[str, Any]], phases: list[str]) -> dict[str, Any]:
    """The longest time in which nothing ran, what came after it, and in which phase."""
    if not gaps:
        return {"longest_gap_ms": 0.0, "gap_before": None, "gap_phase": None}
    first = gaps[0]
    return {
        "longest_gap_ms": first["gap_ns"] / 1e6,
        "gap_before": first["before"],
        "gap_phase": next((name for name in first["ranges"] if name in phases), None),
    }


def _in_ms(times: Mapping[str, Any]) -> dict[str, Any]:
    """Counts as they are, times in milliseconds."""
    names = [name for name in ("total", "busy", "span", "host") if f"{name}_ns" in times]
    return {
        "kernels": times["kernels"],
        **{f"{name}_ms": times[f"{name}_ns"] / 1e6 for name in names},
    }


def _kernels(run: Mapping[str, Any], names: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    table = run["table"]
    whole = max(sum(table["total_ns"]) + run["rest"]["total_ns"], 1)
    for row, name in enumerate(table["name"]):
        yield {
            **names[name],
            "share": table["total_ns"][row] / whole,
            "total_ms": table["total_ns"][row] / 1e6,
            "instances": table["instances"][row],
            **{
                f"{key}_us": table[f"{key}_ns"][row] / 1e3
                for key in ("avg", "med", "min", "max", "sd")
            },
        }


def _part(part: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    cost = (data["attention_cost"] or {}).get(part["part"], {})
    flops, moved = (_number(cost.get(key)) for key in ("flops", "bytes"))
    whole = max(sum(each["total_ns"] for each in data["attention_parts"]), 1)
    seconds = part["total_ns"] / 1e9 or math.nan
    return {
        "part": part["part"],
        "kernels": part["kernels"],
        "total_ms": part["total_ns"] / 1e6,
        "product_ms": part["product_ns"] / 1e6,
        "share": part["total_ns"] / whole,
        "flops": flops,
        "bytes": moved,
        "tflops": flops / seconds / 1e12,
        "gb_per_s": moved / seconds / 1e9,
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
