"""Attention: naive and compiled, our FlashAttention against the others, tiles, inside the model."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd

from lmlab.chapters.attention import naive_page, tiles_page
from lmlab.chapters.attention.naive_page import COMPILED, NAIVE, PEAK
from lmlab.chapters.machine.page import kernel_time, with_share
from lmlab.report.compare import Compare, Comparison, Pair
from lmlab.report.figure import Axis, Figure
from lmlab.report.frame import Results, Rows, at_first, combine, distinct, extremes, records, select
from lmlab.report.page import Chapter
from lmlab.report.repeat import agreement
from lmlab.report.table import Column, Table, memory, quantity, speedup, time

TITLE = "Attention"

OURS, EAGER, CUDNN = "flash", "eager", "sdpa_cudnn"
FA4, FA4_SAME_BITS = "flash_attn_4", "flash_attn_4_deterministic"
NAMES = {
    "unfused": "naive, softmax written out",
    COMPILED: "compiled naive",
    "sdpa_flash": "SDPA flash",
    CUDNN: "SDPA cuDNN",
    "sdpa_efficient": "SDPA efficient",
    "sdpa_math": "SDPA math",
    "flex": "FlexAttention",
    "tiled": "tiled (PyTorch)",
    "flash_compiled_backward": "ours, compiled backward",
    FA4: "FlashAttention-4",
    FA4_SAME_BITS: "FlashAttention-4, deterministic",
    OURS: "ours (Triton)",
}
# Drawn in figures, each in its own color.
DRAWN = (NAIVE, COMPILED, "sdpa_flash", CUDNN, "flex", OURS, FA4)
PASSES = ("forward", "backward", "both")
STEP = "train_step"
SHAPE = ["precision", "head_dim", "sequence"]
MODEL_SHAPE = ["precision", "batch", "size", "context"]
IN_MODEL = ["size", "context", "clock"]
ON = {"benchmark": SHAPE, "leaderboard": SHAPE, "shapes": MODEL_SHAPE}
LABELS = ("topic", "variant", "phase", "stage", "tensor", "part", "direction", "specialized")
COLUMNS = (*LABELS, "block_m", "block_n", *dict.fromkeys([*SHAPE, *MODEL_SHAPE]))
OVER_CAP, OVER_CAP_REASON = "over-cap", "exceed the time cap"
TIMES = {"quantity": "time", "clock": ["wall", "events"]}
# Both passes in one call should take about as long as the two timed separately.
INCONSISTENT_ABOVE = 1.5


def derive(rows: Rows, results: Results) -> Rows:
    """Add display names, consistency flags, predicted memory, ratios and rates."""
    rows = rows.reindex(columns=[*dict.fromkeys([*rows, *COLUMNS])])
    kernel = rows["specialized"].map({True: "specialized warps", False: "plain"})
    rows = rows.assign(
        attention=rows["variant"].map(lambda name: NAMES.get(name, name)),
        kernel=kernel.where(rows["variant"] != tiles_page.CHOSEN, kernel.map("chosen, {}".format)),
        # Too slow to start is not the same as unsupported, and the cell says which.
        reason=rows["reason"].map(lambda why: OVER_CAP if OVER_CAP_REASON in str(why) else why),
    )
    rows = mark_inconsistent(rows)
    rows = pd.concat([rows, naive_page.expected_memory(rows)], ignore_index=True)
    peak = {"topic": "model", "quantity": "peak_memory"}
    peaks = {name: {**peak, "variant": name} for name in (OURS, NAIVE)}
    rows = combine(rows, "peak_reduction", peaks, lambda p: p.naive - p.flash)
    rows = naive_page.with_softmax(rows)
    work = {name: {"quantity": name, "topic": [*ON]} for name in ("time", "flops")}
    rows = combine(rows, "rate", work, lambda p: p.flops / p.time / 1e9, on=["source", "phase"])
    return with_share(rows, "matmul_share", results, "matmul_rate")


def mark_inconsistent(rows: Rows) -> Rows:
    """Flag times of both passes that far exceed the sum of the two timed separately."""
    parts = {p: {"quantity": "time", "topic": [*ON], "phase": p} for p in reversed(PASSES)}
    key = ["source", "variant"]
    rows = combine(rows, "excess", parts, lambda p: p.both / (p.forward + p.backward), on=key)
    excess = select(rows, quantity="excess", value=lambda ratio: ratio > INCONSISTENT_ABOVE)
    bad = pd.Series(is_among(rows, excess, [*key, "phase"]), index=rows.index)
    return rows.assign(flags=rows["flags"] + bad.map({True: ("inconsistent",), False: ()}))


def consistent(flags: Any) -> bool:
    """Whether a time may take part in comparisons."""
    return "inconsistent" not in flags


def versus(variant: str, baseline: str, topic: str, on: list[str], **where: Any) -> Compare:
    """Compare two variants at the same points, interleaved in one process."""
    where = {**TIMES, "topic": topic, "flags": consistent} | where
    ours, other = {"variant": variant}, {"variant": baseline}
    return Compare(variant=ours, baseline=other, on=on, where=where)


COMPARISONS = {
    "compiled_model": versus(COMPILED, EAGER, "model_compile", ["precision", "size", "phase"]),
    "compiled_naive": versus(COMPILED, NAIVE, "naive", [*SHAPE, "phase"]),
    "compiled_kernels": versus(COMPILED, NAIVE, "benchmark", [*SHAPE, "phase"]),
    "race_fa4": versus(OURS, FA4, "benchmark", SHAPE, phase="both"),
    "shapes_fa4": versus(OURS, FA4, "shapes", MODEL_SHAPE, phase="both"),
    "shapes_cudnn": versus(OURS, CUDNN, "shapes", MODEL_SHAPE, phase="both"),
    "model": versus(OURS, NAIVE, "model", IN_MODEL, phase=STEP, clock=["wall", "device"]),
    "model_cudnn": versus(OURS, CUDNN, "model", IN_MODEL, phase=STEP, clock=["wall", "device"]),
}


def ours_against_all(rows: Rows, topic: str) -> Comparison:
    """Our kernels against every other variant of a topic."""
    rows = select(rows, topic=topic)
    others = [name for (name,) in distinct(rows, ["variant"]) if name != OURS]
    compares = [versus(OURS, name, topic, [*ON[topic], "phase"]) for name in others]
    return Comparison([pair for compare in compares for pair in compare.run(rows)])


def ours_against_best(rows: Rows, topic: str) -> Comparison:
    """Our kernels against the fastest other variant at every shape and pass."""
    best: dict[str, Pair] = {}
    for pair in ours_against_all(rows, topic):
        best[pair.label] = min(best.get(pair.label, pair), pair, key=lambda each: each.ratio)
    return Comparison(list(best.values()))


def speedups(pairs: list[Pair]) -> Rows:
    """Pairs as rows, labeled with the variant that ours is compared with."""
    rows = Comparison(pairs).rows()
    return rows.assign(
        attention=[pair.baseline["attention"] for pair in pairs],
        theirs=[pair.baseline["value"] for pair in pairs],
        ours=[pair.variant["value"] for pair in pairs],
    )


def with_most_variants(rows: Rows) -> Rows:
    """The benchmark at the head dim that most variants cover; slow compilers skip the others."""
    rows = timed_variants(rows, "benchmark")
    ran = select(rows, quantity="memory", status="ok").groupby("head_dim")["variant"].nunique()
    return select(rows, head_dim=ran.idxmax()) if len(ran) else rows


def leaderboard(rows: Rows) -> Rows:
    """Variants, the fastest first, with our speed-up over each."""
    rows = select(rows, topic="leaderboard")
    both = select(rows, quantity="time", phase="both").drop_duplicates("attention")
    order = rows["attention"].map(both.set_index("attention")["value"])
    rows = rows.loc[pd.to_numeric(order).sort_values(kind="stable").index]
    return pd.concat([rows, speedups(ours_against_all(rows, "leaderboard"))])


def relative_speed(results: Results, topic: str) -> Rows:
    """Speed relative to the fastest of all variants, forward and backward, in bf16 if measured."""
    rows = select(results.rows, **TIMES, topic=topic, phase="both", status="ok", flags=consistent)
    if "bf16" in set(rows["precision"]):
        rows = select(rows, precision="bf16")
    return rows.assign(value=rows.groupby("source")["value"].transform("min") / rows["value"])


def race(results: Results) -> Rows:
    """Variants for the race figure: those in `DRAWN`, with only one SDPA backend."""
    rows = relative_speed(results, "benchmark")
    sdpa = CUDNN if CUDNN in set(rows["variant"]) else "sdpa_flash"
    panel = [f"{p}, head dim {d}" for p, d in zip(rows["precision"], rows["head_dim"], strict=True)]
    # A user's own variant is not in NAMES, so it is always drawn.
    left_out = {*NAMES} - {name for name in DRAWN if name == sdpa or not name.startswith("sdpa")}
    return select(rows.assign(panel=panel), variant=lambda name: name not in left_out)


def shape_race(results: Results) -> Rows:
    """The variants at the models' shapes, at the study's first batch size."""
    rows = at_first(relative_speed(results, "shapes"), "batch")
    return rows.assign(panel=rows["size"] + ", " + rows["precision"])


def by_variant(title: str, column: Column, topic: str = "benchmark", **more: Any) -> Table:
    """A table with one column per variant and one row per shape of a topic."""
    return Table(
        title=f"{title}, {{precision}}",
        rows=[name for name in ON[topic] if name != "precision"],
        columns={"{attention}": column},
        **{"data": partial(timed_variants, topic=topic), **more},
    )


def timed_variants(rows: Rows, topic: str) -> Rows:
    """Drop variants that have no time in a precision; provenance lists the reasons. Rows without a
    variant stay, such as those of a point that did not fit."""
    rows = select(rows, topic=topic)
    timed = is_among(rows, select(rows, quantity="time", status="ok"), ["precision", "variant"])
    return rows.loc[rows["variant"].isna() | timed]


def is_among(rows: Rows, others: Rows, key: list[str]) -> Any:
    """For each row, whether one of the others has the same key."""
    return pd.MultiIndex.from_frame(rows[key]).isin(distinct(others, key))


def side_by_side(variants: Mapping[str, str], **where: Any) -> dict[str, Column]:
    """Columns of wall times, one per variant, followed by their device times."""
    return {
        f"{name}{more} (ms)": time(variant=variant, clock=clock, **where)
        for clock, more in (("wall", ""), ("device", ", device"))
        for name, variant in variants.items()
    }


def slower(where: str, topic: str) -> Table:
    """Shapes of a topic at which another variant is faster than ours."""
    return Table(
        title=f"{where} another variant is faster, at most the 20 largest differences",
        rows=[*ON[topic], "phase", "attention"],
        data=lambda rows: speedups(ours_against_all(rows, topic).slower).sort_values("value"),
        columns={
            "its time (ms)": quantity("speedup", "ms", "theirs"),
            "ours (ms)": quantity("speedup", "ms", "ours"),
            "our speed-up": speedup(),
        },
        limit=20,
    )


BOTH = {"eager": EAGER, "compiled": COMPILED}
BOARD: Any = {"rows": ["attention"], "data": leaderboard}
COMPILING: Any = {"rows": ["precision", "size"], "where": {"topic": "model_compile"}}
TABLES = {
    **naive_page.TABLES,
    **tiles_page.TABLES,
    "front_compile": Table(
        title="Training step, eager and compiled, alternating; speed-up: in paired rounds",
        **COMPILING,
        columns=side_by_side(BOTH, phase=STEP) | {"speed-up": speedup(phase=STEP)},
    ),
    "front_leaderboard": Table(
        title="The fastest variants at the leaderboard's shape (d = 64) and with twice its head "
        "dim, forward and backward",
        **BOARD,
        limit=5,
        columns={
            "d = {head_dim} (ms)": kernel_time(phase="both"),
            "d = {head_dim}, our speed-up": speedup(phase="both"),
        },
    ),
    "compiled_model": Table(
        title="The whole model, eager and compiled, alternating in one process, {precision}",
        rows=["size", "phase"],
        where={"topic": "model_compile"},
        columns=side_by_side(BOTH) | {"speed-up": speedup()},
    ),
    "compiled_costs": Table(
        title="What compiling costs and saves",
        **COMPILING,
        columns={
            "first compiled step (s)": quantity("first_step_time", "s", variant=COMPILED),
            "peak, eager (GiB)": memory(variant=EAGER),
            "peak, compiled (GiB)": memory(variant=COMPILED),
        },
    ),
    "best": Table(
        title="Our speed-up over the fastest other variant, forward and backward, {precision}",
        rows=["head_dim"],
        data=lambda rows: speedups(ours_against_best(rows, "benchmark")),
        where={"phase": "both"},
        columns={"{sequence}": speedup()},
    ),
    "slower": slower("Where", "benchmark"),
    "shapes_slower": slower("Models' shapes where", "shapes"),
    "shapes": Table(
        title="Our speed-up over the fastest other variant at the models' shapes, {phase}",
        rows=["precision", "batch", "size"],
        data=lambda rows: speedups(ours_against_best(rows, "shapes")),
        columns={"{context}": speedup()},
    ),
    "shapes_times": by_variant(
        "Forward and backward in ms at the models' shapes", kernel_time(phase="both"), "shapes"
    ),
    "shapes_memory": by_variant(
        "Peak memory of forward and backward in MiB at the models' shapes", PEAK, "shapes"
    ),
    "host": by_variant(
        "Host time in µs of launching forward and backward",
        quantity("host_time", "us", phase="both"),
        "shapes",
    ),
    "race_memory": by_variant(
        "Peak memory of forward and backward in MiB, at the head dim with the most variants",
        PEAK,
        data=with_most_variants,
    ),
    "rates": Table(
        title="TFLOP/s of our kernels, forward and backward, {precision}",
        rows=["head_dim"],
        where={"topic": "benchmark", "variant": OURS},
        columns={"{sequence}": quantity("rate", phase="both")},
    ),
    "forward": by_variant("Forward in ms", kernel_time(phase="forward")),
    "backward": by_variant("Backward in ms", kernel_time(phase="backward")),
    "both": by_variant("Forward and backward in ms", kernel_time(phase="both")),
    "leaderboard": Table(
        title="Leaderboard shape, head dim {head_dim}",
        **BOARD,
        columns={
            **{f"{name} (ms)": kernel_time(phase=name) for name in PASSES},
            "sustained (ms)": quantity("sustained_time", "ms"),
            **{f"{name}, our speed-up": speedup(phase=name) for name in PASSES},
            "TFLOP/s": quantity("rate", phase="both"),
            "of matmul": quantity("matmul_share", "percent", phase="both"),
        },
    ),
    "model": Table(
        title="A training step with each attention; wall times alternate in one process",
        rows=["size", "context"],
        where={"topic": "model"},
        columns={
            **side_by_side({"naive": NAIVE, "cuDNN": CUDNN, "ours": OURS}, phase=STEP),
            "speed-up over naive": speedup(comparison="model", clock="wall"),
            "over cuDNN": speedup(comparison="model_cudnn", clock="wall"),
            "over naive, device": speedup(comparison="model", clock="device"),
            "over cuDNN, device": speedup(comparison="model_cudnn", clock="device"),
            "peak, naive (GiB)": memory(variant=NAIVE),
            "peak, ours (GiB)": memory(variant=OURS),
        },
    ),
    "published": Table(
        title="Published on other GPUs: no heads, batch 8, head dim 64; precision not stated; RTX "
        "4090: total of an unstated number of passes, taken to be 100",
        chapter="published",
        rows=["gpu", "implementation", "phase"],
        where={"topic": "attention", "batch": 8, "head_dim": 64, "phase": ["forward", "backward"]},
        columns={"{sequence} (ms)": quantity("published", "ms")},
    ),
}

RELATIVE: Any = {
    "facet": "panel",
    "color": "attention",
    "names": {name: name for name in (NAMES.get(each, each) for each in DRAWN)},
    "y": Axis("speed relative to the fastest"),
}
FIGURES = {
    **naive_page.FIGURES,
    **tiles_page.FIGURES,
    "race": Figure(
        title="Speed relative to the fastest variant, forward and backward, causal, one head",
        x=Axis(field="sequence", title="sequence", log=2),
        data=race,
        **RELATIVE,
    ),
    "shapes": Figure(
        title="Speed relative to the fastest variant at the models' shapes, forward and backward",
        x=Axis(field="context", title="context", log=2),
        data=shape_race,
        **RELATIVE,
    ),
}


def facts(chapter: Chapter) -> dict[str, Any]:
    rows = chapter.own.rows
    ours = select(rows, topic="benchmark", variant=OURS)
    untimed = select(ours, quantity="time", status="ok").empty
    best = ours_against_best(rows, "benchmark").where(phase="both")
    board = ours_against_best(rows, "leaderboard").where(phase="both")
    shapes = ours_against_best(rows, "shapes")
    return {
        "topics": {row["topic"]: row for row in records(rows.drop_duplicates("topic"))},
        "naive": naive_page.facts(rows),
        "best": {
            p: mine for (p,) in distinct(ours, ["precision"]) if (mine := best.where(precision=p))
        },
        # A comparison with a single sample on either side is always undecided.
        "single": sum(min(p.variant["n"], p.baseline["n"]) < 2 for p in best.undecided),
        "shapes": {p: shapes.where(phase=p) for p in PASSES} if shapes else {},
        "shapes_failed": failed_at(rows, "shapes"),
        "raced": set(select(rows, topic="benchmark", quantity="time", status="ok")["attention"]),
        "board": [board_facts(chapter, pair) for pair in board],
        "why_not_ours": next(iter(ours["reason"].dropna()), None) if untimed else None,
        "excess": excess_facts(chapter),
        "checked": checked(chapter),
        "repeat": agreement(chapter.results, chapter.name),
        "uncounted_compilers": [FA4, FA4_SAME_BITS],
    }


def failed_at(rows: Rows, topic: str) -> dict[str, dict[str, Any]]:
    """Per variant: the sizes at which it failed, at some or all contexts, and one reason."""
    failed = select(rows, topic=topic, status="failed")
    return {
        str(name): {"sizes": list(dict.fromkeys(mine["size"])), "reason": mine.iloc[0]["reason"]}
        for name, mine in failed.groupby("attention", sort=False)
    }


def excess_facts(chapter: Chapter) -> dict[str, Any] | None:
    """The range of inconsistent times, and how long the host takes to launch the worst one."""
    found = chapter.extremes(quantity="excess", flags=lambda flags: not consistent(flags))
    if found is None:
        return None
    worst = {key: found["high"][key] for key in ("source", "variant", "phase")}
    return {**found, "host": chapter.value(quantity="host_time", **worst)}


def board_facts(chapter: Chapter, pair: Pair) -> dict[str, Any]:
    """Ours and the fastest other variant at a leaderboard shape, and published results."""
    mine = {key: pair.variant[key] for key in ("source", "variant", "phase")}
    shape = {key: pair.variant[key] for key in ("batch", "heads", *SHAPE)}
    published = select(chapter.results.rows, chapter="published", topic="leaderboard", **shape)
    sustained = {"quantity": "sustained_time", "source": mine["source"], "status": "ok"}
    return {
        "pair": pair,
        "rate": chapter.value(quantity="rate", **mine),
        "share": chapter.value(quantity="matmul_share", **mine),
        "sustained": records(select(chapter.own.rows, **sustained)),
        "published": records(published),
    }


def checked(chapter: Chapter) -> list[dict[str, Any]]:
    """Per precision: how many pairs of variant and shape were checked, how many of them failed or
    got no time for another reason, and the largest errors of those that were timed."""
    rows, key = chapter.own.rows.fillna({"sequence": 0}), ["source", "sequence", "variant"]
    errors = select(rows, status="ok", quantity="error")
    timed = is_among(errors, select(rows, quantity="time", status="ok"), key)
    errors = errors.assign(timed=timed, failed=is_among(errors, select(rows, status="failed"), key))
    return [
        {
            "precision": precision,
            "count": len(distinct(mine, key)),
            "failed": len(distinct(select(mine, timed=False, failed=True), key)),
            "untimed": len(distinct(select(mine, timed=False, failed=False), key)),
            "worst": extremes(select(mine, timed=True)),
            "ours": extremes(select(mine, timed=True, variant=[OURS, tiles_page.CHOSEN])),
        }
        for precision, mine in errors.groupby("precision", sort=False)
    ]
