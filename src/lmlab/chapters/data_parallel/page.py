"""Data parallel: step times by variant, the share of communication, what overlap can hide, buckets.

What averaging S bytes of gradients in n messages adds to a step, with bandwidth B, a time c per
message and a backward pass of h: after backward S/B + n c. During backward, up to h (1 - 1/n) of
that is hidden, but never the last message: max(S/B + n c - h (1 - 1/n), S/(n B) + c).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from lmlab.chapters.rank_memory_page import LABELS as RANK_LABELS
from lmlab.chapters.rank_memory_page import highest
from lmlab.chapters.rank_page import (
    against,
    lead,
    measured,
    not_started,
    of_lead,
    overlap_timeline,
    sizes,
    timeline,
    with_ranks,
)
from lmlab.report.compare import Compare
from lmlab.report.figure import Axis, Figure, value_axis
from lmlab.report.frame import Results, Rows, combine, distinct, select
from lmlab.report.page import Chapter
from lmlab.report.table import Table, quantity, time
from lmlab.report.text import percent

TITLE = "Data parallelism"

ALONE, FLAT, TORCH = "alone", "flat", "torch_ddp"
LABELS = [*RANK_LABELS, "activity", "torch_bucket_mb"]
POINT = ("source", "variant")


def derive(rows: Rows, results: Results) -> Rows:
    """Names, what communication adds, its share with a verdict, and the fitted bucket model."""
    rows = with_ranks(rows, results, LABELS)
    schemes: Any = [name_of(*p) for p in zip(rows.variant, rows.torch_bucket_mb, strict=True)]
    rows = rows.assign(
        scheme=schemes,
        same_bucket=rows.variant == rows.torch_bucket_mb.map(lambda mb: f"bucketed_{mb:g}"),
    )
    flat = against(select(rows, variant=lambda v: v != ALONE), FLAT).rows()
    parts = [rows, shares(rows), flat.assign(quantity="versus_flat")]
    rows = pd.concat([part for part in parts if not part.empty], ignore_index=True)
    profiled = {
        name: {"quantity": "profiled_time", "activity": name}
        for name in ("overlapped", "communication")
    }
    rows = combine(rows, "overlapped", profiled, lambda p: p.overlapped / p.communication, on=POINT)
    return highest(_with_model(_with_added(rows)))


def name_of(variant: Any, torch_bucket_mb: float) -> str | None:
    """Display name of a variant."""
    if not isinstance(variant, str):
        return None
    if variant == TORCH:
        return f"PyTorch DDP, {torch_bucket_mb:g} MB"
    if variant.startswith("bucketed_"):
        return f"buckets, {float(variant.removeprefix('bucketed_')):,g} MB"
    return "no communication" if variant == ALONE else variant


def shares(rows: Rows) -> Rows:
    """(step - alone) / step of every variant; "undecided" where rounds do not show that it adds
    anything."""
    found = against(rows, ALONE).rows()
    if found.empty:
        return found
    share = 1 - found["value"]
    text = [
        percent(s) if v == "slower" else v for s, v in zip(share, found["verdict"], strict=True)
    ]
    low, high = 1 - found["high"], 1 - found["low"]
    return found.assign(quantity="communication_share", value=share, share=text, low=low, high=high)


def _with_added(rows: Rows) -> Rows:
    """Median over rounds of the time that a variant adds to a step without communication."""
    found = []
    for pair in against(rows, ALONE).pairs:
        rounds = zip(pair.variant["samples"], pair.baseline["samples"], strict=False)
        added = float(np.median([ours - alone for ours, alone in rounds]))
        found.append({**pair.variant, "quantity": "added", "value": added, "clock": None})
    return pd.concat([rows, pd.DataFrame(found, columns=rows.columns, dtype=object)])


def added_ms(total: float, n: Any, hide_ms: Any, per_byte: float, call_ms: float) -> Any:
    """What n messages of `total` bytes add to a step."""
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


def _with_model(rows: Rows) -> Rows:
    """Per group: bandwidth and time per message, the best number of messages, and what the model
    says of each of our variants."""
    found: list[dict[str, Any]] = []
    for (source,) in distinct(select(rows, quantity="added"), ["source"]):
        mine = select(rows, source=source, status="ok")
        values = {
            name: select(mine, quantity=name).set_index("variant")["value"]
            for name in ("added", "messages", "message_bytes")
        }
        sent = pd.DataFrame(values).dropna().astype(float)
        backward = select(mine, quantity="phase_time", phase="backward")["value"]
        if len(sent) < 3 or backward.empty:
            continue
        h, total, n = float(backward.iloc[0]), sent["message_bytes"].max(), sent["messages"]
        hide = np.array([h if _overlaps(name) else 0.0 for name in sent.index])
        per_byte, call = fit_model(total, n.to_numpy(), hide, sent["added"].to_numpy())
        best = best_messages(total, h, per_byte, call)
        model = added_ms(total, n.to_numpy(), hide, per_byte, call)
        error = float(np.sqrt(np.mean((model - sent["added"]) ** 2)) / sent["added"].abs().mean())
        base: Any = select(mine, quantity="added").iloc[0].to_dict() | {"variant": None}
        numbers = {"bandwidth": 1e-6 / per_byte, "call_time": call, "best_messages": best}
        numbers |= {"best_bucket": total / best, "error": error}
        found += [{**base, "quantity": f"model_{k}", "value": v} for k, v in numbers.items()]
        ours = select(mine, quantity="added", variant=list(sent.index))
        said = dict(zip(sent.index, model, strict=True))
        ours = ours.assign(quantity="modelled", value=ours["variant"].map(said))
        found += [dict(row) for _, row in ours.iterrows()]
    return pd.concat([rows, pd.DataFrame(found, columns=rows.columns, dtype=object)])


def _overlaps(variant: str) -> bool:
    return variant == "overlapped" or variant.startswith("bucketed_")


def step_parts(results: Results) -> Rows:
    """The step of each variant: a step without communication, and what communication adds."""
    rows = of_lead(results.rows)
    alone = select(rows, quantity="time", variant=ALONE, phase="total", status="ok")
    if alone.empty:
        return alone
    added = select(rows, quantity="added")
    silent = alone.iloc[0]["value"]
    base = pd.concat([alone, added.assign(value=silent)])
    # `added` has the fastest and the slowest round of its variant.
    parts = [
        base.assign(part="step without communication", min=None, max=None),
        added.assign(part="communication, after overlap"),
    ]
    return pd.concat(parts).assign(label=lambda found: found["scheme"].map(_short))


def _short(scheme: str) -> str:
    return scheme.removeprefix("buckets, ").split(", ")[0].replace(" ", "\n")


def overlap_figure(results: Results) -> Rows:
    """Two profiled steps: one flat message, and messages during backward."""
    overlapped = select(of_lead(results.rows), same_bucket=True)["variant"]
    second = overlapped.iloc[0] if len(overlapped) else "overlapped"
    names = {FLAT: "without overlap (flat)", second: "with overlap (buckets)"}
    return timeline(results, [FLAT, second], names)


def published(rows: Rows) -> Rows:
    """Steps of other writeups, the slower rank of each."""
    found = select(rows, topic="distributed", metric="train_step")
    found = select(found, variant=["naive", "flat", "overlap", "bucketed"])
    return found.sort_values("value", ascending=False).drop_duplicates(["variant", "parameter"])


VARIANT_COLUMNS = {
    "step (ms)": time(phase="total"),
    "communication": quantity("communication_share", "text", field="share"),
    "against flat": quantity("versus_flat", "text", field="speedup"),
}
TABLES = {
    "front": Table(
        title="A training step by variant; communication: (step − step without it) / step",
        rows=["scheme"],
        headers={"scheme": "variant"},
        data=of_lead,
        columns=VARIANT_COLUMNS,
    ),
    "variants": Table(
        title="A training step by variant, {ranks}",
        facet="ranks",
        rows=["scheme"],
        headers={"scheme": "variant"},
        where={"scheme": lambda scheme: isinstance(scheme, str)},
        columns={
            **VARIANT_COLUMNS,
            "fastest": time(phase="total", field="min"),
            "slowest": time(phase="total", field="max"),
            "sd": time(phase="total", field="sd"),
            "peak memory (GiB)": quantity("most_peak_memory", "GiB", phase="total"),
        },
    ),
    "messages": Table(
        title="Messages of a step, {ranks}; in flight and overlapped: one profiled step of rank 0",
        facet="ranks",
        rows=["scheme"],
        headers={"scheme": "variant"},
        where={"scheme": lambda scheme: isinstance(scheme, str)},
        columns={
            "messages": quantity("messages_seen", "integer"),
            "largest (MiB)": quantity("largest_message", "MiB"),
            "in flight (ms)": quantity("profiled_time", "ms", activity="communication"),
            "overlapped with computation": quantity("overlapped", "percent"),
        },
    ),
    "phases": Table(
        title="A step without communication, by phase",
        rows=["ranks"],
        data=measured,
        columns={
            f"{phase} (ms)": quantity("phase_time", "ms", phase=phase)
            for phase in ("forward", "backward", "optimizer", "total")
        },
    ),
    "model": Table(
        title="What communication adds to a step, {ranks}: measured (median over rounds of the "
        "difference within a round) and by the model",
        facet="ranks",
        rows=["scheme"],
        headers={"scheme": "variant"},
        where={"scheme": lambda scheme: isinstance(scheme, str)},
        columns={
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
        columns={"step (s)": quantity("published")},
    ),
}

FIGURES = {
    "steps": Figure(
        title="A training step by variant: median, and fastest to slowest round",
        mark="stack",
        color="part",
        x=Axis(field="label", title="variant; MB: size of our buckets", categorical=True),
        y=value_axis("ms"),
        span=("min", "max"),
        data=step_parts,
    ),
    "overlap": overlap_timeline(overlap_figure),
}

COMPARISONS = {
    "overlapped": Compare(
        variant={"variant": "overlapped"}, baseline={"variant": "naive"}, on=["ranks"]
    ),
    "flat": Compare(variant={"variant": FLAT}, baseline={"variant": "naive"}, on=["ranks"]),
    "torch": Compare(variant={"same_bucket": True}, baseline={"variant": TORCH}, on=["ranks"]),
}


def facts(chapter: Chapter) -> dict[str, Any]:
    """Values that the templates use, for the group shown on the front page."""
    everything = chapter.own.rows
    rows = of_lead(everything)
    times = select(rows, quantity="time", phase="total", status="ok")
    if times.empty:
        return {"ranks": None, "not_started": not_started(everything)}
    backward = chapter.value(ranks=lead(rows), quantity="phase_time", phase="backward")
    flat = select(rows, quantity="added", variant=FLAT)["value"]
    communication = flat.iloc[0] if len(flat) else None
    ours = [v for (v,) in distinct(times, ["variant"]) if _overlaps(v)]
    added = select(rows, quantity="added", variant=ours)["value"]
    buckets = [v for v in ours if v.startswith("bucketed_")]
    first = times.iloc[0]
    return {
        "ranks": lead(rows),
        "own_gpu": first["placement"] == "own_gpu",
        "not_started": not_started(everything),
        "sizes": sizes(everything)["time"],
        "step_limit_s": first["step_limit_s"],
        "rounds": first["n"],
        "asked": first["rounds"],
        "drift": max((times["max"] - times["min"]) / times["value"]),
        "shares": select(rows, quantity="communication_share").to_dict("records"),
        "backward": backward,
        "communication": communication,
        "hideable": None if communication is None else max(0.0, min(communication, backward)),
        "saved": None if communication is None or added.empty else communication - min(added),
        "overlapping": against(select(rows, variant=[FLAT, *ours]), FLAT),
        "bucket_pairs": math.comb(len(buckets), 2),
        "bucket_pairs_decided": sum(
            pair.decided
            for index, one in enumerate(buckets)
            for pair in against(select(times, variant=buckets[index:]), one).pairs
        ),
        "model": {
            name: chapter.value(ranks=lead(rows), quantity=f"model_{name}")
            for name in ("bandwidth", "call_time", "best_messages", "best_bucket", "error")
        },
        "skew": _skew(rows),
    }


def _skew(rows: Rows) -> float:
    """How far apart the first and the last rank finish, as a share of the step: the median round
    of the worst variant."""
    own = select(rows, quantity="rank_time", phase="total")
    ranks = [np.array(list(mine["samples"])) for _, mine in own.groupby("variant", sort=False)]
    return max(float(np.median(np.ptp(times, axis=0) / times.max(axis=0))) for times in ranks)
