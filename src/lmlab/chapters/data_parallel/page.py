"""Data parallel: step times by variant, the share of communication, overlap, a bucket model.

Let n messages carry S bytes of gradients, with bandwidth B, a time c per message and a backward
pass of length h. Sent after backward, they add S/B + n c. Sent during backward, up to h (1 - 1/n)
of that is hidden, but never the last message: max(S/B + n c - h (1 - 1/n), S/(n B) + c).
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from lmlab.chapters import rank_page
from lmlab.chapters.rank_page import STEP, compare_with, first_value, lead_rows, variant_table
from lmlab.report.compare import Compare
from lmlab.report.figure import Axis, Figure
from lmlab.report.frame import Results, Rows, computed, records, select, values_of
from lmlab.report.page import Chapter
from lmlab.report.table import Table, quantity, time
from lmlab.report.text import percent
from lmlab.report.verdict import SLOWER

TITLE = "Data parallelism"

ALONE, FLAT, TORCH = "alone", "flat", "torch_ddp"
SENT = ["added", "messages", "message_bytes"]


def derive(rows: Rows, results: Results) -> Rows:
    """Add names, the time and share of communication, and the fitted bucket model."""
    rows = rank_page.with_ranks(rows, results)
    names: Any = [*map(name_of, rows.variant, rows.torch_bucket_mb)]
    same_bucket = rows.variant == rows.torch_bucket_mb.map(lambda mb: f"bucketed_{mb:g}")
    rows = rows.assign(variant_name=names, same_bucket=same_bucket)
    flat = compare_with(select(rows, variant=lambda v: v != ALONE), FLAT).rows()
    parts = [rows, *communication(rows), flat.assign(quantity="versus_flat")]
    rows = pd.concat([part for part in parts if not part.empty], ignore_index=True)
    rows = pd.concat([rows, *_models(rows)], ignore_index=True)
    return rank_page.with_rank_maxima(rows)


def name_of(variant: Any, torch_bucket_mb: float) -> str | None:
    if not isinstance(variant, str):
        return None
    if variant == TORCH:
        return f"PyTorch DDP, {torch_bucket_mb:g} MB"
    if variant.startswith("bucketed_"):
        return f"buckets, {float(variant.removeprefix('bucketed_')):,g} MB"
    return "no communication" if variant == ALONE else variant


def communication(rows: Rows) -> Iterator[Rows]:
    """Per variant: the share of communication, (step - alone) / step, shown as the verdict unless
    that is "slower", and the time `added` to a step (median over rounds)."""
    for pair in compare_with(rows, ALONE):
        added = float(np.median(np.subtract(pair.variant["samples"], pair.baseline["samples"])))
        numbers = {"communication_share": 1 - pair.ratio, "added": added}
        share = percent(1 - pair.ratio) if pair.verdict == SLOWER else pair.verdict
        # `min` and `max` stay those of the whole step, which `step_parts` draws.
        own = {name: pair.variant[name] for name in ("min", "max")} | {"stability": None}
        yield computed(pair.variant, numbers, share=share, verdict=pair.verdict, **own)


def added_ms(total: float, n: Any, hide_ms: Any, per_byte: float, call_ms: float) -> Any:
    """What `total` bytes in n messages add to a step; overlap hides at most `hide_ms`."""
    sending = total * per_byte + n * call_ms
    last = total / n * per_byte + call_ms
    return np.where(hide_ms > 0, np.maximum(sending - hide_ms * (1 - 1 / n), last), sending)


def fit_model(total: float, n: Any, hide_ms: Any, added: Any) -> tuple[float, float]:
    """Milliseconds per byte and per message, fitted to all variants."""
    scale = max(float(np.max(added)), 1e-6)

    def missed(unknown: Any) -> Any:
        per_byte, call = np.exp(unknown)
        return added_ms(total, n, hide_ms, per_byte, call) - added

    fits = [
        least_squares(missed, np.log([scale * share / total, scale * call]))
        for share in (0.01, 0.3, 1.0)
        for call in (1e-6, 1e-4, 1e-2)
    ]
    per_byte, call = np.exp(min(fits, key=lambda fit: fit.cost).x)
    return float(per_byte), float(call)


def best_messages(total: float, hide_ms: float, per_byte: float, call_ms: float) -> int:
    """The number of messages with the lowest cost if they are sent during backward."""
    tried = np.unique(np.geomspace(1, 1e5, 2000).round())
    return int(tried[int(np.argmin(added_ms(total, tried, hide_ms, per_byte, call_ms)))])


def _models(rows: Rows) -> Iterator[Rows]:
    """The fitted model of each job, its optimum, and its prediction per variant."""
    for _, mine in select(rows, status="ok").groupby("source", sort=False):
        sent = select(mine, quantity=SENT)
        sent = sent.pivot(index="variant", columns="quantity", values="value")
        sent = sent.reindex(columns=SENT).dropna().astype(float)
        h = first_value(mine, quantity="phase_time", phase="backward")
        if h is None or len(sent) < 3:
            continue
        total, n, added = sent["message_bytes"].max(), sent["messages"], sent["added"]
        hide = np.where(sent.index.map(_overlaps), h, 0.0)
        per_byte, call = fit_model(total, n.to_numpy(), hide, added.to_numpy())
        model = pd.Series(added_ms(total, n, hide, per_byte, call), sent.index)
        best = best_messages(total, h, per_byte, call)
        numbers = {
            "model_bandwidth": 1e-6 / per_byte,
            "model_call_time": call,
            "model_best_messages": best,
            "model_best_bucket": total / best,
            "model_error": float(np.sqrt(np.mean((model - added) ** 2)) / added.abs().mean()),
        }
        measured = select(mine, quantity="added", variant=list(sent.index))
        yield measured.assign(quantity="modelled", value=measured["variant"].map(model))
        yield computed(records(measured)[0], numbers, variant=None, variant_name=None)


def _overlaps(variant: str) -> bool:
    return variant == "overlapped" or variant.startswith("bucketed_")


def step_parts(results: Results) -> Rows:
    """Each variant's step in two parts: without communication, and what communication adds."""
    rows = lead_rows(results.rows)
    alone = select(rows, variant=ALONE, status="ok", **STEP)
    if alone.empty:
        return alone
    added = select(rows, quantity="added")
    base = pd.concat([alone, added.assign(value=alone.iloc[0]["value"])])
    base = base.assign(part="step without communication", min=None, max=None)
    found = pd.concat([base, added.assign(part="communication, after overlap")])
    short = found["variant_name"].str.removeprefix("buckets, ").str.split(", ").str[0]
    return found.assign(label=short.str.replace(" ", "\n"))


def panels(rows: Rows) -> dict[str, str]:
    """Two profiled steps: one flat message, and messages during backward."""
    overlapped = next(iter(select(rows, same_bucket=True)["variant"]), "overlapped")
    return {FLAT: "without overlap (flat)", overlapped: "with overlap (buckets)"}


def one_bucket_size(rows: Rows) -> Rows:
    """The lead's variants; of the bucketed ones, only the one with PyTorch's bucket size."""
    rows = lead_rows(rows)
    has_buckets = rows["variant"].str.startswith("bucketed_", na=False)
    return rows[~has_buckets | rows["same_bucket"].eq(True)]


def published(rows: Rows) -> Rows:
    """Published step times, the slower rank of each."""
    found = select(rows, topic="distributed", metric="train_step")
    found = select(found, variant=["naive", "flat", "overlap", "bucketed"])
    return found.sort_values("value", ascending=False).drop_duplicates(["variant", "parameter"])


VARIANT_COLUMNS = {
    "step (ms)": time(phase="total"),
    "communication": quantity("communication_share", "text", field="share"),
    "against flat": quantity("versus_flat", "text", field="speedup"),
}
TABLES = {
    "front": variant_table(
        "A training step by variant; communication: (step − step without it) / step, in "
        "paired rounds",
        VARIANT_COLUMNS,
        data=one_bucket_size,
    ),
    "variants": variant_table(
        "A training step by variant, {ranks}",
        {
            **VARIANT_COLUMNS,
            "device (ms)": time(phase="total", clock="device"),
            "fastest (ms)": time(phase="total", field="min"),
            "slowest (ms)": time(phase="total", field="max"),
            "sd (ms)": time(phase="total", field="sd"),
            "peak memory (GiB)": quantity("max_peak_memory", "GiB", phase="total"),
        },
    ),
    "messages": variant_table(
        "Messages of a step, {ranks}; in flight and overlapped: one profiled step of rank 0",
        {
            "messages": quantity("messages_seen", "integer"),
            "largest (MiB)": quantity("largest_message", "MiB"),
            "in flight (ms)": quantity("profiled_time", "ms", activity="communication"),
            "overlapped with computation": quantity("overlapped_share", "percent", rank=0),
        },
    ),
    "phases": Table(
        title="A step without communication, by phase",
        rows=["ranks"],
        data=rank_page.measured,
        columns={
            f"{phase} (ms)": quantity("phase_time", "ms", phase=phase)
            for phase in ("forward", "backward", "optimizer", "total")
        },
    ),
    "model": variant_table(
        "What communication adds to a step, {ranks}: measured (median over rounds of the "
        "difference within a round) and by the model",
        {
            "messages": quantity("messages", "integer"),
            "measured (ms)": quantity("added", "ms"),
            "model (ms)": quantity("modelled", "ms"),
        },
    ),
    "published": Table(
        title="Published: a step on two GPUs, the slower rank; batch, context and backend are not "
        "stated",
        chapter="published",
        data=published,
        rows=["gpu", "size", "variant", "parameter"],
        headers={"parameter": "bucket size"},
        columns={"step (s)": quantity("published")},
    ),
}

FIGURES = {
    "steps": Figure(
        title="A training step by variant: median, and fastest to slowest round",
        mark="stack",
        color="part",
        x=Axis(field="label", title="variant; MB: size of our buckets", categorical=True),
        y=Axis("ms"),
        span=("min", "max"),
        data=step_parts,
    ),
    "overlap": rank_page.overlap_timeline(panels),
}

COMPARISONS = {
    name: Compare(variant=variant, baseline={"variant": baseline}, on=["ranks"])
    for name, variant, baseline in (
        ("overlapped", {"variant": "overlapped"}, "naive"),
        ("flat", {"variant": FLAT}, "naive"),
        ("torch", {"same_bucket": True}, TORCH),
    )
}


def facts(chapter: Chapter) -> dict[str, Any]:
    shared, rows = rank_page.group_facts(chapter), lead_rows(chapter.own.rows)
    times = select(rows, status="ok", **STEP)
    if times.empty:
        return {**shared, "ranks": None}
    backward = first_value(rows, quantity="phase_time", phase="backward")
    flat = first_value(rows, quantity="added", variant=FLAT)
    ours = [variant for variant in values_of(times, "variant") if _overlaps(variant)]
    added = select(rows, quantity="added", variant=ours).set_index("variant_name")["value"]
    buckets = [v for v in ours if v.startswith("bucketed_")]
    return {
        **shared,
        "sizes": shared["sizes"]["time"],
        "drift": max((times["max"] - times["min"]) / times["value"]),
        "shares": select(rows, quantity="communication_share").to_dict("records"),
        "communication": flat,
        "hideable": None if flat is None else max(0.0, min(flat, backward)),
        "saved": None if flat is None or added.empty else flat - min(added),
        "best": None if added.empty else pd.to_numeric(added).idxmin(),
        "bucket_pairs": math.comb(len(buckets), 2),
        "bucket_pairs_decided": sum(
            pair.decided
            for index, one in enumerate(buckets)
            for pair in compare_with(select(times, variant=buckets[index:]), one)
        ),
        "model": {
            name: first_value(rows, quantity=f"model_{name}")
            for name in ("bandwidth", "call_time", "best_messages", "best_bucket", "error")
        },
        "skew": _skew(rows),
    }


def _skew(rows: Rows) -> float:
    """Time from first to last rank as a share of a step: median over rounds, worst variant."""
    own = select(rows, quantity="rank_time", phase="total")
    ranks = [np.array(list(mine["samples"])) for _, mine in own.groupby("variant", sort=False)]
    return max(float(np.median(np.ptp(times, axis=0) / times.max(axis=0))) for times in ranks)
