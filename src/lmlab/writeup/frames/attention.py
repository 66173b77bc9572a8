"""Attention results as one tidy frame: a row for each point, arm and pass.

Every arm that the study asks for has its rows, measured or not. `status` is the arm's own (a race
goes on without an arm that broke), the point's where nothing of it ran. Rates are those of medians,
by the operations that have to be done: half of the square under a causal mask, whoever computes
more gets no credit for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from lmlab.writeup.collect import Collected, Row
from lmlab.writeup.comparison import ACROSS_POINTS, margin_of, with_verdicts
from lmlab.writeup.numbers import counted
from lmlab.writeup.table import STATUS_CELLS

PASSES = {
    "naive": ("forward", "backward"),
    "model_compile": ("forward", "forward_backward", "train_step"),
    "benchmark": ("forward", "backward", "both"),
    "leaderboard": ("forward", "backward", "both"),
    "model": ("train_step",),
}
INSIDE_A_MODEL = ("model", "model_compile")
FIRST_RUN = {"naive": "first_call_s", "model_compile": "first_step_s"}
"""What a measured arm took the first time, where a table says so."""
OURS, NAIVE = "flash", "naive"
EAGER, COMPILED = "eager", "compiled"
STATUSES = {**STATUS_CELLS, "capped": "over its cap"}
STATISTICS = ("n", "mean_ms", "sd_ms", "median_ms", "q1_ms", "q3_ms")
FACTS = (
    "first_call_s", "first_step_s", "memory_before_backward_bytes", "peak_memory_bytes",
    "saved_bytes", "attention_replaced", "kept", "walked", "warps", "stages", "specialised",
    "shared_bytes", "shared_by_count_bytes", "registers", "spills",
)  # fmt: skip
PLACE = ("topic", "size", "context", "head_dim", "sequence", "precision", "batch", "heads")
COLUMNS = [
    *PLACE, "arm", "pass", "status", "reason", *STATISTICS, "tflops", "clock", *FACTS, "errors",
]  # fmt: skip
NOT_THERE = ("missing", "unreadable")
FEWEST_TO_FIT = 3
LEAST_APART = ACROSS_POINTS
"""Arms that took turns share their process, but a page with two limits would contradict itself."""
LOWER_BELOW = 0.98
"""Of a peak of memory; who saves less saves nothing."""
LARGE_FROM = 4096
"""Sequences from which on the scores and not the launches set the time on any GPU."""
LABELS = {
    "naive": "naive",
    "compiled": "compiled naive",
    "sdpa_flash": "SDPA flash",
    "sdpa_cudnn": "SDPA cuDNN",
    "sdpa_efficient": "SDPA efficient",
    "sdpa_math": "SDPA math",
    "flex": "FlexAttention",
    "tiled": "tiled (PyTorch)",
    "flash": "flash (ours)",
}


def frame(collected: Collected) -> pd.DataFrame:
    """All arms of all points, pass by pass, in the study's order."""
    records = [record for row in collected.rows for record in _records(row)]
    # As they are: a column of sequences with a gap would else turn into fractions.
    data = pd.DataFrame(records, columns=COLUMNS, dtype=object)
    return data.astype(dict.fromkeys([*STATISTICS, "tflops"], float))


def rows_of(collected: Collected, topic: str) -> list[Row]:
    """The points of one topic."""
    return [row for row in collected.rows if row.point.parameters["topic"] == topic]


def of(data: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """Rows with these values; a set means any of its values. `pass_` stands for `pass`."""
    for column, value in wanted.items():
        values = data[column.rstrip("_")]
        data = data[values.isin(value) if isinstance(value, set) else values == value]
    return data


def measured(data: pd.DataFrame) -> pd.DataFrame:
    """Rows that carry a time."""
    return data[data["median_ms"].notna()]


def known(data: pd.DataFrame) -> pd.DataFrame:
    """Rows of points that have a result, whatever it says; all rows where no point has one.

    A table of which one row in twenty is measured would else be a page of "not measured".
    """
    there = data[~data["status"].isin(NOT_THERE)]
    return there if len(there) else data


def points(data: pd.DataFrame) -> int:
    """How many points the rows are of."""
    return len(data.drop_duplicates(list(PLACE)))


def not_there(data: pd.DataFrame, noun: str = "shape") -> str:
    """`20 of 21 shapes are not measured`; nothing to say where all are."""
    every = points(data)
    gone = every - points(data[~data["status"].isin(NOT_THERE)])
    verb = "is" if gone == 1 else "are"
    return f"{gone} of {counted(every, noun)} {verb} not measured" if gone else ""


def order(data: pd.DataFrame, column: str) -> list[Any]:
    """A column's values in the study's order."""
    return [value for value in dict.fromkeys(data[column]) if not _is_nothing(value)]


def arms_of(data: pd.DataFrame) -> list[str]:
    """The arms in the order in which the page names them, a user's own last."""
    found = order(data, "arm")
    return sorted(found, key=lambda arm: [*LABELS, arm].index(arm))


def label(arm: str) -> str:
    """A variant as the page calls it; a user's own by its name."""
    return LABELS.get(arm, arm)


def against(data: pd.DataFrame, arm: str, base: str) -> pd.DataFrame:
    """An arm beside a base of the same process: `speedup` (base / arm) and its `verdict`."""
    return against_each(data, arm, [base])


def against_each(data: pd.DataFrame, arm: str, bases: Sequence[str]) -> pd.DataFrame:
    """An arm beside several bases, one after the other; `arm_a` says which.

    Middle halves that stay apart by `LEAST_APART` differ: with many samples they come so narrow
    that any gap would do. Those of a few samples must stay apart further.
    """
    # Columns that a topic does not have would not match: nothing is not equal to nothing.
    where = ["topic", "pass", *(c for c in PLACE[1:] if data[c].notna().any())]
    # One merge for all of them: a merge takes the same milliseconds for a row as for a thousand.
    left = measured(data[data["arm"].isin(list(bases))])
    left = left.sort_values("arm", key=lambda names: names.map(list(bases).index), kind="stable")
    both = left.merge(measured(of(data, arm=arm)), on=where, suffixes=("_a", "_b"))
    return with_verdicts(both, [margin(row) for _, row in both.iterrows()])


def peak_shares(ratios: pd.DataFrame) -> list[float]:
    """What of the base's peak memory an arm holds, where both are known, and it is less."""
    known = ratios[ratios["peak_memory_bytes_a"].notna() & ratios["peak_memory_bytes_b"].notna()]
    shares = [float(b / a) for a, b in known[["peak_memory_bytes_a", "peak_memory_bytes_b"]].values]
    return shares if max(shares, default=1.0) < LOWER_BELOW else []


def margin(row: pd.Series) -> float:
    """By how much the middle halves of a pair must stay apart to differ."""
    return margin_of(row["n_a"], row["n_b"], enough=LEAST_APART)


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The power of x by which y grows, fitted over all points on logarithmic axes."""
    u, v = [math.log(value) for value in x], [math.log(value) for value in y]
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    spread = sum((a - mean_u) ** 2 for a in u)
    return sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v, strict=True)) / spread


def exponents(rows: pd.DataFrame, column: str, fewest: int = FEWEST_TO_FIT) -> list[float]:
    """The power of the sequence by which a column grows, one fit a head dimension."""
    parts = [of(rows, head_dim=head_dim) for head_dim in order(rows, "head_dim")]
    return [
        exponent(list(part["sequence"]), [float(value) for value in part[column]])
        for part in parts
        if part["sequence"].nunique() >= fewest
    ]


def long_ones(rows: pd.DataFrame) -> pd.DataFrame:
    """The shapes whose time is not that of launching; all of them where none is long."""
    long = rows[rows["sequence"] >= LARGE_FROM]
    return long if long["sequence"].nunique() >= FEWEST_TO_FIT else rows


def is_a_dot(rows: pd.DataFrame, column: str) -> bool:
    """Whether of several values that were asked for only one is measured: no line to be drawn."""
    return bool(measured(rows)[column].nunique() == 1 < rows[column].nunique())


def last_two(rows: pd.DataFrame, asked: Sequence[int]) -> pd.DataFrame:
    """The two longest sequences of each precision and head dimension, if no other lies between."""
    ranks = rows.groupby(["precision", "head_dim"])["sequence"].rank(ascending=False)
    last = rows[ranks <= 2]
    places = last["sequence"].map({sequence: at for at, sequence in enumerate(sorted(asked))})
    keys = [last["precision"], last["head_dim"]]
    apart = places.groupby(keys).transform("max") - places.groupby(keys).transform("min")
    return last[apart == 1]


def _records(row: Row) -> list[dict[str, Any]]:
    asked = {**row.point.settings, **row.point.parameters}
    place = {column: asked.get(column) for column in PLACE}
    known: Mapping[str, Mapping[str, Any]] = row.kept("arms", {})
    has_all = row.status == "ok"
    return [
        {**place, **_record(row, known[arm] if known or has_all else _gap(row), arm, name)}
        for arm in known or _arms_asked_for(asked)
        for name in _passes(asked)
    ]


def _gap(row: Row) -> dict[str, Any]:
    return {"status": row.status, "reason": row.reason}


def _record(row: Row, fact: Mapping[str, Any], arm: str, name: str) -> dict[str, Any]:
    measurement = _measurement(row, fact, f"{arm}.{name}")
    record = {
        "arm": arm,
        "pass": name,
        "status": "ok" if measurement else fact["status"],
        "reason": fact["reason"],
        "errors": fact.get("errors"),
        **{key: fact.get(key) for key in FACTS},
    }
    if measurement is None or row.result is None:
        return record
    topic = row.point.parameters["topic"]
    flops = math.nan if topic in INSIDE_A_MODEL else row.result.data["flops"][name]
    return {
        **record,
        **({FIRST_RUN[topic]: fact[FIRST_RUN[topic]]} if topic in FIRST_RUN else {}),
        **{key: _number(measurement[key]) for key in STATISTICS},
        "tflops": flops / measurement["median_ms"] / 1e9,
        "clock": measurement["clock"],
    }


def _measurement(row: Row, fact: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """An arm that is ok has a time of every pass; one that broke has those until then."""
    if row.result is None:
        return None
    times = row.result.measurements
    return times[name] if fact["status"] == "ok" else times.get(name)


def _arms_asked_for(asked: Mapping[str, Any]) -> list[str]:
    if asked["topic"] == "model_compile":
        return [EAGER, COMPILED]
    if asked["topic"] == "tiles":
        return [f"{kept}x{walked}" for kept, walked in asked["tiles"]]
    return list(asked["arms"])


def _passes(asked: Mapping[str, Any]) -> tuple[str, ...]:
    return PASSES.get(asked["topic"]) or (asked["direction"],)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
