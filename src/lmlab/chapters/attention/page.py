"""Attention: naive and compiled, our FlashAttention against the others, tiles, inside the model."""

from functools import partial
from typing import Any

import pandas as pd

from lmlab.chapters.attention import naive_memory
from lmlab.chapters.machine.page import with_share
from lmlab.report.compare import Compare, Comparison, Pair
from lmlab.report.figure import Axis, Figure
from lmlab.report.frame import (
    Results,
    Rows,
    at_first,
    combine,
    derived,
    distinct,
    extremes,
    records,
    select,
)
from lmlab.report.page import Chapter
from lmlab.report.repeat import agreement
from lmlab.report.table import Column, Table, memory, quantity, speedup, time
from lmlab.report.text import GIB

TITLE = "Attention"

OURS, NAIVE, COMPILED, EAGER, CHOSEN = "flash", "naive", "compiled", "eager", "chosen"
CUDNN, FA4, FA4_SAME_BITS = "sdpa_cudnn", "flash_attn_4", "flash_attn_4_deterministic"
NAMES = {
    "unfused": "naive, softmax written out",
    "compiled": "compiled naive",
    "sdpa_flash": "SDPA flash",
    CUDNN: "SDPA cuDNN",
    "sdpa_efficient": "SDPA efficient",
    "sdpa_math": "SDPA math",
    "flex": "FlexAttention",
    "tiled": "tiled (PyTorch)",
    "flash_compiled_backward": "ours, compiled backward",
    FA4: "FlashAttention-4",
    FA4_SAME_BITS: "FlashAttention-4, deterministic",
    "flash": "ours (Triton)",
}
# Drawn in figures, each in its own color.
DRAWN = (NAIVE, COMPILED, "sdpa_flash", CUDNN, "flex", OURS, FA4)
PASSES = ("forward", "backward", "both")
STEP = "train_step"
SHAPE = ["precision", "head_dim", "sequence"]
MODEL_SHAPE = ["precision", "batch", "size", "context"]
ON = {"benchmark": SHAPE, "leaderboard": SHAPE, "shapes": MODEL_SHAPE}
LABELS = ("topic", "variant", "phase", "stage", "tensor", "part", "direction", "specialized")
COLUMNS = (*LABELS, "block_m", "block_n", *dict.fromkeys([*SHAPE, *MODEL_SHAPE]))
WRITTEN_OUT = ("max", "subtract", "exp", "sum", "divide")
OVER_CAP, OVER_CAP_REASON = "over-cap", "exceed the time cap"
TIMES = {"quantity": "time", "clock": ["wall", "events"]}
# Both passes in one call should take about as long as the two timed apart.
INCONSISTENT_ABOVE = 1.5


def derive(rows: Rows, results: Results) -> Rows:
    """Display names, consistency flags, memory by the formula, ratios, rates."""
    rows = rows.reindex(columns=[*dict.fromkeys([*rows, *COLUMNS])])
    kernel = rows["specialized"].map({True: "specialized warps", False: "plain"})
    rows = rows.assign(
        attention=rows["variant"].map(lambda name: NAMES.get(name, name)),
        kernel=kernel.where(rows["variant"] != CHOSEN, kernel.map("chosen, {}".format)),
        # Too slow to be started is not the same as not supported: the cell names it.
        reason=rows["reason"].map(lambda why: OVER_CAP if OVER_CAP_REASON in str(why) else why),
    )
    rows = mark_inconsistent(rows)
    rows = pd.concat([rows, expected_memory(rows)], ignore_index=True)
    peak = {"topic": "model", "quantity": "peak_memory"}
    peaks = {name: {**peak, "variant": name} for name in (OURS, NAIVE)}
    rows = combine(rows, "peak_reduction", peaks, lambda p: p.naive - p.flash, unit="B")
    return with_rates(with_softmax(rows), results)


def with_softmax(rows: Rows) -> Rows:
    """Both softmaxes against the two matmuls of attention."""
    time_of = {"topic": "softmax", "quantity": "time"}
    parts = {part: {**time_of, "part": part} for part in ("softmax", "scores", "output")}
    steps = {part: {**time_of, "part": part} for part in WRITTEN_OUT}
    rows = combine(rows, "matmuls", parts, lambda p: p.scores + p.output, unit="ms")
    rows = combine(rows, "written_out", steps, lambda p: p.sum(axis=1), unit="ms")
    both = {name: {"quantity": name} for name in ("matmuls", "written_out")}
    fused = {"fused": parts["softmax"], **both}
    rows = combine(rows, "fused_to_matmuls", fused, lambda p: p.fused / p.matmuls)
    rows = combine(rows, "written_to_matmuls", both, lambda p: p.written_out / p.matmuls)
    return combine(rows, "written_to_fused", fused, lambda p: p.written_out / p.fused)


def mark_inconsistent(rows: Rows) -> Rows:
    """Flag times of both passes that far exceed the sum of the passes timed apart."""
    parts = {p: {"quantity": "time", "topic": [*ON], "phase": p} for p in reversed(PASSES)}
    key = ["source", "variant"]
    rows = combine(rows, "excess", parts, lambda p: p.both / (p.forward + p.backward), on=key)
    excess = select(rows, quantity="excess", value=lambda ratio: ratio > INCONSISTENT_ABOVE)
    bad = set(distinct(excess, [*key, "phase"]))
    keys = rows[[*key, "phase"]].itertuples(index=False, name=None)
    marks = [("inconsistent",) if key in bad else () for key in keys]
    return rows.assign(flags=rows["flags"] + pd.Series(marks, index=rows.index, dtype=object))


def consistent(flags: Any) -> bool:
    """Whether a time may take part in comparisons."""
    return "inconsistent" not in flags


def expected_memory(rows: Rows) -> Rows:
    """Memory of naive attention by its formula, at every shape of the study, measured or not."""
    copied = ["chapter", "source", "topic", *SHAPE]
    found = [
        {**{key: point[key] for key in copied}, "stage": stage, "tensor": tensor, "value": count}
        for point in select(rows, topic="naive").drop_duplicates("source").to_dict("records")
        for stage, tensor, count in naive_memory.account(point)
    ]
    expected = pd.DataFrame(found, columns=[*rows.columns], dtype=object)
    flags = pd.Series([()] * len(expected), dtype=object)
    return expected.assign(quantity="expected_memory", status="ok", flags=flags)


def with_rates(rows: Rows, results: Results) -> Rows:
    """TFLOP/s of every pass, and as a share of the fastest matmul of the same precision."""
    parts = {name: {"quantity": name, "topic": [*ON]} for name in ("time", "flops")}
    key = ["source", "phase"]
    rows = combine(rows, "rate", parts, lambda p: p.flops / p.time / 1e9, unit="TFLOP/s", on=key)
    return with_share(rows, "matmul_share", results, "matmul_rate")


def versus(variant: str, baseline: str, topic: str, on: list[str], **where: Any) -> Compare:
    """Two variants of the same points, which took turns in one process."""
    return Compare(
        variant={"variant": variant},
        baseline={"variant": baseline},
        on=on,
        where={**TIMES, "topic": topic, "flags": consistent, **where},
    )


COMPARISONS = {
    "compiled_model": versus(COMPILED, EAGER, "model_compile", ["precision", "size", "phase"]),
    "compiled_naive": versus(COMPILED, NAIVE, "naive", [*SHAPE, "phase"]),
    "compiled_kernels": versus(COMPILED, NAIVE, "benchmark", [*SHAPE, "phase"]),
    "race_fa4": versus(OURS, FA4, "benchmark", SHAPE, phase="both"),
    "shapes_fa4": versus(OURS, FA4, "shapes", MODEL_SHAPE, phase="both"),
    "shapes_cudnn": versus(OURS, CUDNN, "shapes", MODEL_SHAPE, phase="both"),
    "model": versus(OURS, NAIVE, "model", ["size", "context"], phase=STEP),
    "model_cudnn": versus(OURS, CUDNN, "model", ["size", "context"], phase=STEP),
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
    """Comparisons as rows, named after what ours is compared with."""
    rows = Comparison(pairs).rows()
    return rows.assign(
        attention=[pair.baseline["attention"] for pair in pairs],
        theirs=[pair.baseline["value"] for pair in pairs],
        ours=[pair.variant["value"] for pair in pairs],
    )


def at_largest(rows: Rows, topic: str, *fields: str) -> Rows:
    """Rows of a topic at the largest value of each field."""
    rows = select(rows, topic=topic)
    for field in fields:
        rows = rows[rows[field] == rows[field].max()]
    return rows


def with_most_variants(rows: Rows) -> Rows:
    """The race at the head dimension at which most variants ran: others compile too slowly."""
    rows = timed_variants(rows, "benchmark")
    ran = select(rows, quantity="memory", status="ok").groupby("head_dim")["variant"].nunique()
    return select(rows, head_dim=ran.idxmax()) if len(ran) else rows


def tried_tiles(rows: Rows, **where: Any) -> Rows:
    """Times of tile sizes other than the chosen one."""
    return select(rows, topic="tiles", quantity="time", variant=lambda v: v != CHOSEN, **where)


def best_tiles(rows: Rows) -> Rows:
    """The fastest tile of every direction, head dimension and sequence, next to the chosen one."""
    key = ["direction", "head_dim", "sequence"]
    ok = tried_tiles(rows, status="ok").sort_values("value", key=pd.to_numeric, kind="stable")
    best = ok.drop_duplicates(key).sort_index().assign(quantity="best_time")
    failed = tried_tiles(rows, status=lambda status: status != "ok").groupby(key).size().to_dict()
    counts = pd.MultiIndex.from_frame(best[key]).map(failed).fillna(0)
    chosen = select(rows, topic="tiles", quantity="time", variant=CHOSEN)
    return pd.concat([derived(best, "rejected", {}, lambda _: counts), chosen])


def rejected_tiles(rows: Rows) -> Rows:
    """Tile sizes that Triton or the GPU rejects, once per reason."""
    found = tried_tiles(rows, status=lambda status: status != "ok")
    found = found.drop_duplicates(["direction", "head_dim", "block_m", "block_n"])
    return found.assign(quantity="why", value=found["reason"], status="ok")


def leaderboard(rows: Rows) -> Rows:
    """Variants, the fastest first, with our speed-up over each."""
    rows = select(rows, topic="leaderboard")
    both = select(rows, quantity="time", phase="both").drop_duplicates("attention")
    order = rows["attention"].map(both.set_index("attention")["value"])
    rows = rows.loc[pd.to_numeric(order).sort_values(kind="stable").index]
    return pd.concat([rows, speedups(ours_against_all(rows, "leaderboard"))])


def extreme_naive(rows: Rows, status: str) -> dict[str, Any] | None:
    """The shortest sequence at which naive attention ran out of memory, or the longest it ran."""
    found = select(rows, topic="naive", status=status)
    found = found[found["variant"].eq(NAIVE) | found["quantity"].isna()]
    ordered = found.sort_values(["sequence", "head_dim"], key=pd.to_numeric).to_dict("records")
    return ordered[-1 if status == "ok" else 0] if ordered else None  # type: ignore[return-value]


def shown_naive(rows: Rows) -> Rows:
    """Naive attention at one head dimension: that which did not fit, or the largest."""
    shape = extreme_naive(rows, "oom") or extreme_naive(rows, "ok")
    if shape is None:
        return rows.head(0)
    title = f"{shape['precision']}, batch {shape['batch']}, head dim {shape['head_dim']}"
    found = select(rows, topic="naive", head_dim=shape["head_dim"])
    return found.assign(shape=title, reason=None)  # why it does not fit is in the text


def accounts(rows: Rows) -> Rows:
    """Memory by tensor at the smallest shape that does not fit and the largest that does."""
    points = [point for status in ("oom", "ok") if (point := extreme_naive(rows, status))]
    titles = {p["source"]: f"head dim {p['head_dim']}, sequence {p['sequence']:,}" for p in points}
    rows = select(rows, source=list(titles))
    rows = rows.assign(shape=rows["source"].map(titles))
    measured = select(rows, quantity="memory", variant=NAIVE).assign(tensor="measured")
    found = pd.concat([select(rows, quantity="expected_memory"), measured])
    found["quantity"] = "memory"
    return found.sort_values("tensor", key=lambda x: x.isin(["sum", "measured"]), kind="stable")


def relative_speed(results: Results, topic: str) -> Rows:
    """Speed relative to the fastest of all variants, forward and backward, in bf16 if measured."""
    rows = select(results.rows, topic=topic, quantity="time", phase="both", status="ok")
    rows = select(rows, flags=consistent)
    if "bf16" in set(rows["precision"]):
        rows = select(rows, precision="bf16")
    return rows.assign(value=rows.groupby("source")["value"].transform("min") / rows["value"])


def race(results: Results) -> Rows:
    """A few variants over one head."""
    rows = relative_speed(results, "benchmark")
    sdpa = CUDNN if CUDNN in set(rows["variant"]) else "sdpa_flash"
    panel = [f"{p}, head dim {d}" for p, d in zip(rows["precision"], rows["head_dim"], strict=True)]
    # A user's own variant has no name there, and is drawn.
    left_out = {*NAMES} - {name for name in DRAWN if name == sdpa or not name.startswith("sdpa")}
    return select(rows.assign(panel=panel), variant=lambda name: name not in left_out)


def shape_race(results: Results) -> Rows:
    """The variants at the models' shapes, at the first batch of the study."""
    rows = at_first(relative_speed(results, "shapes"), "batch")
    return rows.assign(panel=rows["size"] + ", " + rows["precision"])


def naive_panels(results: Results) -> Rows:
    """Times and peak memory of naive attention at the smallest and the largest head dimension."""
    rows = select(results.rows, topic="naive", status="ok", variant=[NAIVE, COMPILED])
    dims = sorted(set(rows["head_dim"]))
    rows = select(rows, head_dim=[*dims[:1], *dims[-1:]])
    rows = rows.assign(dim=rows["head_dim"].map("head dim {}".format))
    peaks = select(rows, quantity="memory", stage="peak")
    panels = {
        "forward (ms)": select(rows, quantity="time", phase="forward"),
        "backward (ms)": select(rows, quantity="time", phase="backward"),
        "peak memory (GiB)": peaks.assign(value=peaks["value"] / GIB),
    }
    return pd.concat([found.assign(panel=panel) for panel, found in panels.items()])


# A time by CUDA events, or by wall clock on a CPU.
kernel_time: Any = partial(time, clock=("events", "wall"))


def passes(variant: str) -> dict[str, Column]:
    """Forward and backward of a variant."""
    return {f"{name} (ms)": time(variant=variant, phase=name) for name in PASSES[:2]}


def by_variant(title: str, column: Column, topic: str = "benchmark", **more: Any) -> Table:
    """One column per variant, at every shape of a topic."""
    return Table(
        title=f"{title}, {{precision}}",
        rows=["head_dim", "sequence"] if topic == "benchmark" else ["batch", "size", "context"],
        columns={"{attention}": column},
        **{"data": partial(timed_variants, topic=topic), **more},
    )


def timed_variants(rows: Rows, topic: str) -> Rows:
    """A topic without the variants that have no time in a precision; provenance lists the reasons.
    A point without any variant, one that did not fit, stays."""
    rows = select(rows, topic=topic)
    return rows.loc[rows["variant"].isna() | is_timed(rows, rows, ["precision", "variant"])]


def is_timed(rows: Rows, among: Rows, key: list[str]) -> "pd.Series[bool]":
    """For each row, whether a time among others has the same key."""
    return is_among(rows, select(among, quantity="time", status="ok"), key)


def is_among(rows: Rows, others: Rows, key: list[str]) -> "pd.Series[bool]":
    """For each row, whether one of the others has the same key."""
    keys = set(distinct(others, key))
    found = [each in keys for each in rows[key].itertuples(index=False, name=None)]
    return pd.Series(found, index=rows.index, dtype=bool)


def slower(title: str, topic: str) -> Table:
    """Shapes of a topic at which another variant is faster than ours."""
    return Table(
        title=title,
        rows=[*ON[topic], "phase", "attention"],
        data=lambda rows: speedups(ours_against_all(rows, topic).slower).sort_values("value"),
        columns={
            "its time (ms)": quantity("speedup", "ms", "theirs"),
            "ours (ms)": quantity("speedup", "ms", "ours"),
            "our speed-up": quantity("speedup", "times"),
        },
        limit=20,
    )


TABLES = {
    "front_naive": Table(
        title="Naive attention, eager, {shape}",
        rows=["sequence"],
        data=shown_naive,
        columns=passes(NAIVE) | {"peak (GiB)": memory("memory", variant=NAIVE, stage="peak")},
    ),
    "front_compile": Table(
        title="Training step, eager and compiled, alternating in one process",
        rows=["precision", "size"],
        where={"topic": "model_compile"},
        columns={
            "eager (ms)": time(variant=EAGER, phase=STEP),
            "compiled (ms)": time(variant=COMPILED, phase=STEP),
            "eager, device (ms)": time(variant=EAGER, phase=STEP, clock="device"),
            "compiled, device (ms)": time(variant=COMPILED, phase=STEP, clock="device"),
            "speed-up": speedup(phase=STEP),
        },
    ),
    "front_leaderboard": Table(
        title="The fastest variants at the leaderboard's shape (d = 64) and with twice its head "
        "dim, forward and backward",
        rows=["attention"],
        data=leaderboard,
        limit=5,
        columns={
            "d = {head_dim} (ms)": kernel_time(phase="both"),
            "d = {head_dim}, our speed-up": speedup(phase="both"),
        },
    ),
    "naive": Table(
        title="Naive attention, eager",
        rows=["head_dim", "sequence"],
        where={"topic": "naive"},
        columns={
            **passes(NAIVE),
            "saved (MiB)": memory("saved_memory", "MiB", variant=NAIVE),
            "before backward (MiB)": memory(
                "memory", "MiB", variant=NAIVE, stage="before_backward"
            ),
            "peak (MiB)": memory("memory", "MiB", variant=NAIVE, stage="peak"),
        },
    ),
    "account": Table(
        title="Memory of naive attention in GiB by its formula: {shape}",
        rows=["tensor"],
        data=accounts,
        columns={
            "forward peak": memory("memory", stage="forward_peak"),
            "before backward": memory("memory", stage="before_backward"),
            "backward peak": memory("memory", stage="peak"),
        },
    ),
    "compiled_naive": Table(
        title="Naive attention, compiled, and its speed-up over eager in the same process",
        rows=["head_dim", "sequence"],
        where={"topic": "naive"},
        columns={
            **passes(COMPILED),
            "forward, speed-up": speedup(phase="forward"),
            "backward, speed-up": speedup(phase="backward"),
            "peak (MiB)": memory("memory", "MiB", variant=COMPILED, stage="peak"),
            "first pass (s)": quantity("first_call_time", "s", variant=COMPILED),
        },
    ),
    "compiled_model": Table(
        title="The whole model, eager and compiled, alternating in one process, {precision}",
        rows=["size", "phase"],
        where={"topic": "model_compile"},
        columns={
            "eager (ms)": time(variant=EAGER),
            "compiled (ms)": time(variant=COMPILED),
            "eager, device (ms)": time(variant=EAGER, clock="device"),
            "compiled, device (ms)": time(variant=COMPILED, clock="device"),
            "speed-up": speedup(),
        },
    ),
    "compiled_costs": Table(
        title="What compiling costs and saves",
        rows=["precision", "size"],
        where={"topic": "model_compile"},
        columns={
            "first compiled step (s)": quantity("first_step_time", "s", variant=COMPILED),
            "peak, eager (GiB)": memory(variant=EAGER),
            "peak, compiled (GiB)": memory(variant=COMPILED),
        },
    ),
    "best": Table(
        title="Our kernels over the fastest other variant, forward and backward, {precision}",
        rows=["head_dim"],
        data=lambda rows: speedups(ours_against_best(rows, "benchmark")),
        where={"phase": "both"},
        columns={"{sequence}": speedup()},
    ),
    "slower": slower(
        "Where another variant is faster, the 20 largest differences at most", "benchmark"
    ),
    "shapes": Table(
        title="Our kernels over the fastest other variant at the models' shapes, {phase}",
        rows=["precision", "batch", "size"],
        data=lambda rows: speedups(ours_against_best(rows, "shapes")),
        columns={"{context}": speedup()},
    ),
    "shapes_slower": slower(
        "Models' shapes where another variant is faster, the 20 largest differences at most",
        "shapes",
    ),
    "shapes_times": by_variant(
        "Forward and backward in ms at the models' shapes", kernel_time(phase="both"), "shapes"
    ),
    "host": by_variant(
        "Host time in µs of launching forward and backward",
        quantity("host_time", "us", phase="both"),
        "shapes",
    ),
    "race_memory": by_variant(
        "Peak memory of forward and backward in MiB, at the head dim with the most variants",
        memory("memory", "MiB", stage="peak"),
        data=with_most_variants,
    ),
    "shapes_memory": by_variant(
        "Peak memory of forward and backward in MiB at the models' shapes",
        memory("memory", "MiB", stage="peak"),
        "shapes",
    ),
    "softmax": Table(
        title="Softmax against the two matmuls of attention, {precision}",
        rows=["size", "context"],
        where={"topic": "softmax"},
        columns={
            "QKᵀ and PV (ms)": quantity("matmuls", "ms"),
            "softmax, fused (ms)": kernel_time(part="softmax"),
            "written out (ms)": quantity("written_out", "ms"),
            "fused / matmuls": quantity("fused_to_matmuls"),
            "written out / matmuls": quantity("written_to_matmuls"),
            "written out / fused": quantity("written_to_fused", "times"),
        },
    ),
    "softmax_parts": Table(
        title="Operations of naive attention, milliseconds, {precision}",
        rows=["size", "context"],
        where={"topic": "softmax"},
        columns={"{part}": kernel_time()},
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
    "tiles_best": Table(
        title="Fastest plain tile (BLOCK_M x BLOCK_N) and the chosen kernel, {direction}",
        rows=["head_dim", "sequence"],
        data=best_tiles,
        columns={
            "fastest tile": quantity("best_time", "text", "variant"),
            "its time (ms)": quantity("best_time", "ms"),
            "chosen kernel (ms)": kernel_time(),
            "rejected sizes": quantity("rejected", "integer"),
        },
    ),
    "tiles_rejected": Table(
        title="Tile sizes that Triton or the GPU rejects",
        rows=["direction", "head_dim", "block_m", "block_n"],
        data=rejected_tiles,
        columns={"reason": quantity("why", "text")},
    ),
    "tiles": Table(
        title="All tile sizes at the largest head dimension and the longest sequence, {direction}",
        rows=["head_dim", "sequence", "block_m", "block_n", "num_warps", "kernel"],
        data=lambda rows: at_largest(rows, "tiles", "head_dim", "sequence"),
        columns={
            "time (ms)": kernel_time(),
            "shared memory (KiB)": quantity("shared_memory", "KiB"),
            "estimated (KiB)": quantity("estimated_shared_memory", "KiB"),
            "registers": quantity("registers", "integer"),
            "spills": quantity("spills", "integer"),
        },
    ),
    "leaderboard": Table(
        title="Leaderboard shape, head dim {head_dim}",
        rows=["attention"],
        data=leaderboard,
        columns={
            **{f"{name} (ms)": kernel_time(phase=name) for name in PASSES},
            "sustained (ms)": quantity("sustained_time", "ms"),
            **{f"{name}, our speed-up": speedup(phase=name) for name in PASSES},
            "TFLOP/s": quantity("rate", phase="both"),
            "of matmul": quantity("matmul_share", "percent", phase="both"),
        },
    ),
    "model": Table(
        title="A training step with each attention, alternating in one process",
        rows=["size", "context"],
        where={"topic": "model"},
        columns={
            "naive (ms)": time(variant=NAIVE, phase=STEP),
            "cuDNN (ms)": time(variant=CUDNN, phase=STEP),
            "ours (ms)": time(variant=OURS, phase=STEP),
            "naive, device (ms)": time(variant=NAIVE, phase=STEP, clock="device"),
            "cuDNN, device (ms)": time(variant=CUDNN, phase=STEP, clock="device"),
            "ours, device (ms)": time(variant=OURS, phase=STEP, clock="device"),
            "speed-up over naive": speedup(comparison="model"),
            "over cuDNN": speedup(comparison="model_cudnn"),
            "peak, naive (GiB)": memory(variant=NAIVE),
            "peak, ours (GiB)": memory(variant=OURS),
        },
    ),
    "published": Table(
        title="Published on other GPUs: no heads, batch 8, head dim 64; precision not stated",
        chapter="published",
        rows=["gpu", "implementation", "phase"],
        where={"topic": "attention", "batch": 8, "head_dim": 64, "phase": ["forward", "backward"]},
        columns={"{sequence} (ms)": quantity("published", "ms")},
    ),
}

SEQUENCE = Axis(field="sequence", title="sequence", log=2)
RELATIVE: Any = {
    "color": "attention",
    "names": {name: name for name in (NAMES.get(each, each) for each in DRAWN)},
    "y": Axis("speed relative to the fastest"),
}
FIGURES = {
    "race": Figure(
        title="Speed relative to the fastest variant, forward and backward, causal, one head",
        facet="panel",
        x=SEQUENCE,
        data=race,
        **RELATIVE,
    ),
    "naive": Figure(
        title="Naive attention by sequence: time and peak memory",
        facet="panel",
        color="attention",
        dash="dim",
        x=SEQUENCE,
        y=Axis("", log=10),
        share_y=False,
        data=naive_panels,
    ),
    "tiles": Figure(
        title="Plain kernels by tile, largest head dim and longest sequence: ms (blank: rejected)",
        mark="heatmap",
        facet="direction",
        x=Axis(field="block_n", title="BLOCK_N (keys)", categorical=True),
        y=Axis(field="block_m", title="BLOCK_M (queries)", categorical=True),
        data=lambda results: tried_tiles(
            at_largest(results.rows, "tiles", "head_dim", "sequence"), status="ok"
        ),
        share_y=False,
    ),
    "shapes": Figure(
        title="Speed relative to the fastest variant at the models' shapes, forward and backward",
        facet="panel",
        x=Axis(field="context", title="context", log=2),
        data=shape_race,
        **RELATIVE,
    ),
}


def facts(chapter: Chapter) -> dict[str, Any]:
    """Values that the templates use."""
    rows = chapter.own.rows
    ours = select(rows, topic="benchmark", variant=OURS)
    untimed = select(ours, quantity="time", status="ok").empty
    best = ours_against_best(rows, "benchmark").where(phase="both")
    board = ours_against_best(rows, "leaderboard").where(phase="both")
    shapes = ours_against_best(rows, "shapes")
    return {
        "topics": {row["topic"]: row for row in records(rows.drop_duplicates("topic"))},
        "naive": naive_facts(rows),
        "best": {
            precision: found
            for (precision,) in distinct(ours, ["precision"])
            if (found := best.where(precision=precision))
        },
        # Nothing can be decided about what was sampled only once.
        "single": sum(min(p.variant["n"], p.baseline["n"]) < 2 for p in best.undecided),
        "shapes": {p: shapes.where(phase=p) for p in PASSES} if shapes else {},
        "shapes_failed": failed_at(rows, "shapes"),
        "raced": set(select(rows, topic="benchmark", quantity="time", status="ok")["attention"]),
        "board": [board_facts(chapter, pair) for pair in board],
        "why_not_ours": next(iter(ours["reason"].dropna()), None) if untimed else None,
        "excess": excess_facts(chapter),
        "checked": checked(chapter),
        "repeat": agreement(chapter.results, chapter.name),
        "unwatched": [FA4, FA4_SAME_BITS],
    }


def failed_at(rows: Rows, topic: str) -> dict[str, dict[str, Any]]:
    """By variant: the sizes at which it failed, at every context or at some, and one reason."""
    failed = select(rows, topic=topic, status="failed", attention=lambda name: name is not None)
    return {
        str(name): {"sizes": list(dict.fromkeys(mine["size"])), "reason": mine.iloc[0]["reason"]}
        for name, mine in failed.groupby("attention", sort=False)
    }


def excess_facts(chapter: Chapter) -> dict[str, Any] | None:
    """The times that contradict their parts, and what the host needs to launch the worst."""
    found = chapter.extremes(quantity="excess", flags=lambda flags: not consistent(flags))
    if found is None:
        return None
    worst = {key: found["high"][key] for key in ("source", "variant", "phase")}
    return {**found, "host": chapter.value(quantity="host_time", **worst)}


def naive_facts(rows: Rows) -> dict[str, Any] | None:
    """Where naive attention ends, and how well the formula predicts its memory."""
    largest, full = extreme_naive(rows, "ok"), extreme_naive(rows, "oom")
    if largest is None:
        return None
    needs = {"quantity": "expected_memory", "stage": "peak"}
    mine = select(rows, source=(full or largest)["source"], **needs)
    scores = select(mine, tensor=list(naive_memory.SCORES))["value"]
    rows = select(rows, source=largest["source"], stage="peak")
    found = select(rows, quantity="memory", variant=NAIVE)["value"].sum()
    return {
        "largest": largest,
        "full": full,
        "need": select(mine, tensor="sum")["value"].sum(),
        "scores": len(scores),
        "score_bytes": scores.max(),
        "agreement": found / select(rows, tensor="sum")["value"].sum(),
    }


def board_facts(chapter: Chapter, pair: Pair) -> dict[str, Any]:
    """Ours and the fastest other variant at a leaderboard shape, with what others published."""
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
    """By precision: how many variants were checked, how many of them failed or got no time for
    another reason, and the largest errors of those that did."""
    rows, key = chapter.own.rows, ["source", "variant"]
    errors = select(rows, status="ok", quantity="error")
    failed = is_among(errors, select(rows, status="failed"), key)
    errors = errors.assign(timed=is_timed(errors, rows, key), failed=failed)
    return [
        {
            "precision": precision,
            "count": len(distinct(mine, key)),
            "failed": len(distinct(select(mine, timed=False, failed=True), key)),
            "untimed": len(distinct(select(mine, timed=False, failed=False), key)),
            "worst": extremes(select(mine, timed=True)),
            "ours": extremes(select(mine, timed=True, variant=[OURS, CHOSEN])),
        }
        for precision, mine in errors.groupby("precision", sort=False)
    ]
