"""Attention: naive, compiled, our FlashAttention against the others, tiles, and inside the model."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from lmlab.chapters.attention import naive_memory
from lmlab.report.compare import Compare, Comparison, Pair
from lmlab.report.figure import Axis, Figure, value_axis
from lmlab.report.frame import Results, Rows, combine, distinct, select
from lmlab.report.frame import derive as derived
from lmlab.report.page import Chapter
from lmlab.report.table import Column, Table, memory, quantity, time

TITLE = "Attention: naive, compiled and our own kernels"

OURS, NAIVE, COMPILED, EAGER, CHOSEN = "flash", "naive", "compiled", "eager", "chosen"
NAMES = {
    "compiled": "compiled naive",
    "sdpa_flash": "SDPA flash",
    "sdpa_cudnn": "SDPA cuDNN",
    "sdpa_efficient": "SDPA efficient",
    "sdpa_math": "SDPA math",
    "flex": "FlexAttention",
    "tiled": "tiled (PyTorch)",
    "flash": "ours (Triton)",
}
KERNEL_CLOCK = ("events", "wall")
ITEMSIZE = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
SHAPE = ["precision", "head_dim", "sequence", "phase"]
COLUMNS = ("topic", "variant", "stage", "tensor", "size", "context", "specialized", *SHAPE)
STAGES = {
    "forward_peak": "forward peak",
    "before_backward": "before backward",
    "peak": "backward peak",
}
# Both passes in one call should take about as long as the two timed apart.
INCONSISTENT_ABOVE = 1.5


def derive(rows: Rows, results: Results) -> Rows:
    """Display names, consistency flags, memory by the formula, rates, eager steps elsewhere."""
    rows = rows.reindex(columns=[*dict.fromkeys([*rows.columns, *COLUMNS])])
    kernel = rows["specialized"].map({True: "specialized warps", False: "plain"})
    rows = rows.assign(
        attention=rows["variant"].map(lambda name: NAMES.get(name, name)),
        kernel=kernel.where(rows["variant"] != CHOSEN, "chosen, " + kernel.astype(str)),
    )
    rows = mark_inconsistent(rows)
    rows = pd.concat([rows, expected_memory(rows)], ignore_index=True)
    rows = _rates(rows, results)
    return _compiling(rows, results)


def mark_inconsistent(rows: Rows) -> Rows:
    """Flag times of both passes that far exceed the sum of the passes timed apart."""
    parts = {p: {"quantity": "time", "phase": p} for p in ("both", "forward", "backward")}
    rows = combine(
        rows,
        "both_over_parts",
        parts,
        lambda p: p.both / (p.forward + p.backward),
        on=("source", "variant"),
    )
    excess = select(rows, quantity="both_over_parts")
    excess = excess[excess["value"] > INCONSISTENT_ABOVE]
    bad = set(distinct(excess, ["source", "variant", "phase"]))
    keys = rows[["source", "variant", "phase"]].itertuples(index=False, name=None)
    flags = [
        (*flags, "inconsistent") if key in bad else flags
        for flags, key in zip(rows["flags"], keys, strict=True)
    ]
    return rows.assign(flags=pd.Series(flags, index=rows.index, dtype=object))


def consistent(flags: Any) -> bool:
    """Whether a time may be quoted as a best or a worst."""
    return "inconsistent" not in flags


def expected_memory(rows: Rows) -> Rows:
    """Memory of naive attention by its formula, at every shape of the study, measured or not."""
    points = select(rows, topic="naive").drop_duplicates("source")
    found = []
    for point in points.to_dict("records"):
        base = {key: point[key] for key in ("chapter", "source", "flags", "topic", *SHAPE[:3])}
        shape = {key: point[key] for key in ("batch", "sequence", "head_dim", "causal")}
        for stage in naive_memory.STAGES:
            held = naive_memory.held(stage, **shape, itemsize=ITEMSIZE[point["precision"]])
            found += [
                {
                    **base,
                    "quantity": "expected_memory",
                    "status": "ok",
                    "stage": stage,
                    "tensor": tensor,
                    "value": count,
                }
                for tensor, count in [*held.items(), ("sum", sum(held.values()))]
            ]
    return pd.DataFrame(found, columns=[*rows.columns], dtype=object)


def _rates(rows: Rows, results: Results) -> Rows:
    """TFLOP/s of every pass, and as a share of the fastest matmul of the same precision."""
    flops = select(rows, quantity="flops")
    counts = dict(
        zip(zip(flops["source"], flops["phase"], strict=True), flops["value"], strict=True)
    )

    def rate(found: Rows) -> list[float]:
        keys = zip(found["source"], found["phase"], found["value"], strict=True)
        return [counts[source, phase] / ms / 1e9 for source, phase, ms in keys]

    timed = {"quantity": "time", "topic": ["benchmark", "leaderboard"]}
    rows = derived(rows, "rate", timed, rate, unit="TFLOP/s")
    peaks = select(results.rows, chapter="machine", quantity="matmul_rate", status="ok")
    by_dtype = dict(zip(peaks["dtype"], peaks["value"], strict=True)) if len(peaks) else {}
    known = {"quantity": "rate", "precision": list(by_dtype)}
    return derived(
        rows, "matmul_share", known, lambda found: found.value / found.precision.map(by_dtype)
    )


def _compiling(rows: Rows, results: Results) -> Rows:
    """Steps until compiling has paid for itself, and the fastest eager step of other processes."""
    step = {"topic": "model_compile", "phase": "train_step", "quantity": "time"}
    parts = {
        EAGER: {**step, "variant": EAGER},
        COMPILED: {**step, "variant": COMPILED},
        "first": {"quantity": "first_step_time", "variant": COMPILED},
    }
    rows = combine(rows, "break_even_steps", parts, _break_even)
    elsewhere = [
        {"chapter": "attention", "topic": "model", "variant": NAIVE, "phase": "train_step"},
        {"chapter": "end_to_end", "mode": "train_step", "start": "warm", "phase": "total"},
    ]
    shape = ["size", "context", "precision", "batch"]
    found = pd.concat([select(results.rows, quantity="time", status="ok", **w) for w in elsewhere])
    found = select(found, clock="wall")
    fastest = found.groupby(shape)["value"].min() if len(found) else {}
    here = select(rows, status="ok", **parts[EAGER])
    known = [
        row["source"] for row in here.to_dict("records") if tuple(row[k] for k in shape) in fastest
    ]

    def fastest_of(chosen: Rows) -> list[float]:
        return [fastest[key] for key in chosen[shape].itertuples(index=False, name=None)]

    where = {**parts[EAGER], "source": known}
    rows = derived(rows, "eager_elsewhere", where, fastest_of, unit="ms")
    both = {"other": {"quantity": "eager_elsewhere"}, COMPILED: parts[COMPILED]}
    return combine(rows, "speedup_elsewhere", both, lambda p: p.other / p.compiled)


def _break_even(parts: Rows) -> Any:
    saved = parts.eager - parts.compiled
    return (parts["first"] / saved).where(saved > 0)


def versus(variant: str, baseline: str, topic: str, on: list[str]) -> Compare:
    """Two variants of the same points, which took turns in one process."""
    return Compare(
        variant={"variant": variant},
        baseline={"variant": baseline},
        on=on,
        where={"quantity": "time", "topic": topic, "flags": consistent},
    )


COMPARISONS = {
    "compiled_model": versus(COMPILED, EAGER, "model_compile", ["size", "phase"]),
    "compiled_naive": versus(COMPILED, NAIVE, "naive", SHAPE[1:]),
    "compiled_kernels": versus(COMPILED, NAIVE, "benchmark", SHAPE),
    "model": versus(OURS, NAIVE, "model", ["size", "context"]),
}


def ours_against_all(rows: Rows, topic: str) -> list[Pair]:
    """Our kernels against every other variant of a topic."""
    names = [name for (name,) in distinct(select(rows, topic=topic), ["variant"]) if name != OURS]
    return [pair for name in names for pair in versus(OURS, name, topic, SHAPE).run(rows).pairs]


def ours_against_best(rows: Rows, topic: str) -> Comparison:
    """Our kernels against the fastest other variant of every point and pass."""
    best: dict[str, Pair] = {}
    for pair in ours_against_all(rows, topic):
        key = pair.label
        best[key] = min(best.get(key, pair), pair, key=lambda each: each.ratio)
    return Comparison(list(best.values()))


def speedups(pairs: list[Pair]) -> Rows:
    """Comparisons as rows, named after what ours is compared with."""
    others = [pair.baseline for pair in pairs]
    return (
        Comparison(pairs)
        .rows()
        .assign(
            attention=[other["attention"] for other in others],
            theirs=[other["value"] for other in others],
            ours=[pair.variant["value"] for pair in pairs],
        )
    )


def leaderboard(rows: Rows) -> Rows:
    """Variants, the fastest first, with our speed-up over each."""
    rows = select(rows, topic="leaderboard")
    pairs = ours_against_all(rows, "leaderboard")
    both = select(rows, quantity="time", phase="both", head_dim=_first(rows, "head_dim"))
    order = rows["attention"].map(dict(zip(both["attention"], both["value"], strict=True)))
    rows = rows.loc[pd.to_numeric(order).sort_values(kind="stable").index]
    return pd.concat([rows, speedups(pairs)]) if pairs else rows


def _first(rows: Rows, key: str) -> Any:
    return next((value for (value,) in distinct(rows, [key])), None)


def shape_to_show(rows: Rows) -> int | None:
    """The head dimension of the first shape that does not fit, or else the largest."""
    naive = select(rows, topic="naive")
    full = select(naive, status="oom")
    return (full if len(full) else naive)["head_dim"].max() if len(naive) else None


def accounts(rows: Rows) -> Rows:
    """Memory by tensor at the smallest shape that does not fit and the largest that does."""
    naive = select(rows, topic="naive")
    shapes = [each for each in (extreme_naive(rows, "oom"), extreme_naive(rows, "ok")) if each]
    found = []
    for shape in shapes:
        mine = select(naive, source=shape["source"], quantity=["memory", "expected_memory"])
        mine = mine[(mine["quantity"] == "expected_memory") | (mine["variant"] == NAIVE)]
        what = "does not fit" if shape["status"] == "oom" else "fits"
        title = f"head dim {shape['head_dim']}, sequence {shape['sequence']:,}, which {what}"
        tensor = mine["tensor"].where(mine["quantity"] == "expected_memory", "measured")
        found.append(mine.assign(shape=title, tensor=tensor, quantity="memory"))
    return pd.concat(found) if found else naive.assign(shape=None)


def extreme_naive(rows: Rows, status: str) -> dict[str, Any] | None:
    """The shortest sequence at which naive attention ran out of memory, or the longest it ran."""
    found = select(rows, topic="naive", status=status)
    if status == "ok":
        found = select(found, quantity="time", variant=NAIVE)
    else:
        found = found[found["variant"].isna() | (found["variant"] == NAIVE)]
    ordered = found.sort_values(["sequence", "head_dim"], key=pd.to_numeric)
    return None if found.empty else ordered.iloc[-1 if status == "ok" else 0].to_dict()


def race(results: Results) -> Rows:
    """Speed of the drawn variants relative to the fastest of all, forward and backward."""
    rows = select(results.rows, topic="benchmark", quantity="time", phase="both", status="ok")
    rows = select(rows, flags=consistent)
    present = {name for (name,) in distinct(rows, ["precision"])}
    rows = select(rows, precision="bf16" if "bf16" in present else _first(rows, "precision"))
    variants = {name for (name,) in distinct(rows, ["variant"])}
    sdpa = "sdpa_cudnn" if "sdpa_cudnn" in variants else "sdpa_flash"
    fastest = rows.groupby("source")["value"].transform("min")
    rows = rows.assign(value=fastest / rows["value"])
    return select(rows, variant=[NAIVE, COMPILED, sdpa, "flex", OURS])


def naive_panels(results: Results) -> Rows:
    """Time of both passes and peak memory of naive attention, one panel each."""
    rows = select(results.rows, topic="naive", status="ok", variant=[NAIVE, COMPILED])
    panels = {
        "forward (ms)": ({"quantity": "time", "phase": "forward"}, 1.0),
        "backward (ms)": ({"quantity": "time", "phase": "backward"}, 1.0),
        "peak memory (GiB)": ({"quantity": "memory", "stage": "peak"}, 2.0**-30),
    }
    return pd.concat(
        [
            found.assign(panel=panel, value=found["value"] * factor)
            for panel, (where, factor) in panels.items()
            for found in [select(rows, **where)]
        ]
    )


def kernel_time(phase: str, **where: Any) -> Column:
    """A time by the kernel clock."""
    return time(clock=KERNEL_CLOCK, phase=phase, **where)


def variants_table(phase: str, title: str) -> Table:
    """All variants at all shapes."""
    return Table(
        title=f"{title}, {{precision}}, causal, one head, milliseconds",
        facet="precision",
        rows=["head_dim", "sequence"],
        across="attention",
        where={"topic": "benchmark"},
        columns={"{attention}": kernel_time(phase)},
    )


def slower_shapes(rows: Rows) -> Rows:
    """Where another variant is faster than ours, the largest difference first."""
    pairs = [pair for pair in ours_against_all(rows, "benchmark") if pair.verdict == "slower"]
    return speedups(sorted(pairs, key=lambda pair: pair.ratio)) if pairs else rows.head(0)


def longest(rows: Rows) -> Rows:
    """Our rates at the longest sequence, with those of the fastest other variant."""
    rows = select(rows, topic="benchmark")
    mine = select(rows, quantity=["rate", "matmul_share"], variant=OURS, status="ok")
    mine = mine[mine["sequence"] == mine["sequence"].max()]
    rates = select(rows, quantity="rate", flags=consistent, variant=lambda name: name != OURS)
    rates = rates[rates["sequence"] == rates["sequence"].max()]
    best = rates.sort_values("value", key=pd.to_numeric).drop_duplicates(SHAPE, keep="last")
    texts = [
        f"{name}, {rate:.3g}" for name, rate in zip(best["attention"], best["value"], strict=True)
    ]
    return pd.concat([mine, best.assign(quantity="best_other", text=texts)])


LEADERBOARD = {
    "forward (ms)": kernel_time("forward"),
    "backward (ms)": kernel_time("backward"),
    "both (ms)": kernel_time("both"),
    "TFLOP/s": quantity("rate", phase="both"),
    "of matmul": quantity("matmul_share", "percent", phase="both"),
    "ours faster by": quantity("speedup", "text", field="speedup", phase="both"),
}
SPEEDUP = {"quantity": "speedup"}


def with_speedups(rows: Rows, name: str) -> Rows:
    """Rows and the speed-ups of a declared comparison."""
    found = COMPARISONS[name].run(rows)
    return pd.concat([rows, found.rows()]) if found else rows


def step(variant: str) -> Column:
    """A training step of a variant."""
    return time(variant=variant, phase="train_step")


TABLES = {
    "front_naive": Table(
        title="Naive attention, eager, at the head dimension of the shape that does not fit, or the "
        "largest",
        rows=["sequence"],
        data=lambda rows: select(rows, topic="naive", head_dim=shape_to_show(rows)),
        columns={
            "forward (ms)": time(variant=NAIVE, phase="forward"),
            "backward (ms)": time(variant=NAIVE, phase="backward"),
            "saved for backward (GiB)": memory("saved_memory", variant=NAIVE),
            "peak (GiB)": memory("memory", variant=NAIVE, stage="peak"),
            "peak by formula (GiB)": memory("expected_memory", stage="peak", tensor="sum"),
        },
    ),
    "front_compile": Table(
        title="Training step, eager and compiled; the speed-up is that of steps which alternate in "
        "one process",
        rows=["size"],
        where={"topic": "model_compile"},
        data=lambda rows: with_speedups(rows, "compiled_model"),
        columns={
            "eager (ms)": step(EAGER),
            "compiled (ms)": step(COMPILED),
            "speed-up": Column({**SPEEDUP, "phase": "train_step"}, "text", "speedup"),
            "fastest eager step of another process (ms)": quantity("eager_elsewhere", "ms"),
            "speed-up over that": quantity("speedup_elsewhere", "times"),
            "first compiled step (s)": quantity("first_step_time", "s", variant=COMPILED),
        },
    ),
    "front_leaderboard": Table(
        title="Forward and backward at the leaderboard's shape",
        rows=["attention"],
        across="head_dim",
        data=leaderboard,
        columns={
            "d = {head_dim} (ms)": LEADERBOARD["both (ms)"],
            "d = {head_dim}, TFLOP/s": LEADERBOARD["TFLOP/s"],
            "d = {head_dim}, ours faster by": LEADERBOARD["ours faster by"],
        },
    ),
    "naive": Table(
        title="Naive attention, eager",
        rows=["head_dim", "sequence"],
        where={"topic": "naive"},
        columns={
            "forward (ms)": time(variant=NAIVE, phase="forward"),
            "sd": time(variant=NAIVE, phase="forward", field="sd"),
            "backward (ms)": time(variant=NAIVE, phase="backward"),
            "sd ": time(variant=NAIVE, phase="backward", field="sd"),
            "saved (MiB)": memory("saved_memory", "MiB", variant=NAIVE),
            "before backward (MiB)": memory(
                "memory", "MiB", variant=NAIVE, stage="before_backward"
            ),
            "peak (MiB)": memory("memory", "MiB", variant=NAIVE, stage="peak"),
        },
    ),
    "account": Table(
        title="Memory of naive attention in GiB by the formula: {shape}",
        facet="shape",
        rows=["tensor"],
        data=accounts,
        columns={name: memory("memory", stage=stage) for stage, name in STAGES.items()},
    ),
    "compiled_naive": Table(
        title="Naive attention, compiled; speed-up over eager in the same process",
        rows=["head_dim", "sequence"],
        where={"topic": "naive"},
        data=lambda rows: with_speedups(rows, "compiled_naive"),
        columns={
            "forward (ms)": time(variant=COMPILED, phase="forward"),
            "forward speed-up": Column({**SPEEDUP, "phase": "forward"}, "text", "speedup"),
            "backward (ms)": time(variant=COMPILED, phase="backward"),
            "backward speed-up": Column({**SPEEDUP, "phase": "backward"}, "text", "speedup"),
            "peak (MiB)": memory("memory", "MiB", variant=COMPILED, stage="peak"),
            "first pass (s)": quantity("first_call_time", "s", variant=COMPILED),
        },
    ),
    "compiled_model": Table(
        title="The whole model, eager and compiled, in one process",
        rows=["size"],
        where={"topic": "model_compile"},
        data=lambda rows: with_speedups(rows, "compiled_model"),
        columns={
            **{
                f"{name}{text}": column
                for phase, name in (
                    ("forward", "forward"),
                    ("forward_backward", "forward + backward"),
                    ("train_step", "step"),
                )
                for text, column in (
                    (", eager (ms)", time(variant=EAGER, phase=phase)),
                    (", compiled (ms)", time(variant=COMPILED, phase=phase)),
                    (", speed-up", Column({**SPEEDUP, "phase": phase}, "text", "speedup")),
                )
            },
            "peak, eager (GiB)": memory(variant=EAGER),
            "peak, compiled (GiB)": memory(variant=COMPILED),
            "steps to break even": quantity("break_even_steps", "integer"),
        },
    ),
    "best": Table(
        title="Our kernels over the fastest other variant, forward and backward, {precision}",
        facet="precision",
        rows=["head_dim"],
        across="sequence",
        data=lambda rows: speedups(ours_against_best(rows, "benchmark").pairs or []),
        where={"phase": "both"},
        columns={"{sequence}": quantity("speedup", "text", field="speedup")},
    ),
    "slower": Table(
        title="Where another variant is faster than ours",
        rows=["precision", "head_dim", "sequence", "phase", "attention"],
        data=slower_shapes,
        columns={
            "its time (ms)": quantity("speedup", "ms", field="theirs"),
            "ours (ms)": quantity("speedup", "ms", field="ours"),
            "ours over it": quantity("speedup", "times"),
        },
    ),
    "longest": Table(
        title="Our kernels at the longest sequence, TFLOP/s, and the fastest other variant",
        rows=["precision", "head_dim", "sequence"],
        data=longest,
        columns={
            text: column
            for phase in ("forward", "backward", "both")
            for text, column in (
                (f"{phase}", quantity("rate", phase=phase)),
                (f"{phase}, best other", quantity("best_other", "text", "text", phase=phase)),
            )
        }
        | {"both, of matmul": quantity("matmul_share", "percent", phase="both")},
    ),
    "forward": variants_table("forward", "Forward"),
    "backward": variants_table("backward", "Backward"),
    "both": variants_table("both", "Forward and backward"),
    "tiles": Table(
        title="Tile sizes of our {direction} kernel",
        facet="direction",
        rows=["head_dim", "block_m", "block_n", "num_warps", "kernel"],
        where={"topic": "tiles"},
        columns={
            "time (ms)": time(clock=KERNEL_CLOCK),
            "shared memory (KiB)": quantity("shared_memory", "KiB"),
            "estimated (KiB)": quantity("estimated_shared_memory", "KiB"),
            "registers": quantity("registers", "integer"),
            "spills": quantity("spills", "integer"),
        },
    ),
    "leaderboard": Table(
        title="Leaderboard shape, head dim {head_dim}",
        facet="head_dim",
        rows=["attention"],
        data=leaderboard,
        columns=LEADERBOARD,
    ),
    "model": Table(
        title="A training step with naive attention and with ours, alternating in one process",
        rows=["size", "context"],
        where={"topic": "model"},
        data=lambda rows: with_speedups(rows, "model"),
        columns={
            "naive (ms)": step(NAIVE),
            "ours (ms)": step(OURS),
            "speed-up": quantity("speedup", "text", field="speedup"),
            "peak, naive (GiB)": memory(variant=NAIVE),
            "peak, ours (GiB)": memory(variant=OURS),
        },
    ),
    "published_naive": Table(
        title="Published on other GPUs: attention without heads, batch 8, head dim 64; precision "
        "not stated",
        chapter="published",
        rows=["gpu", "implementation", "phase"],
        across="sequence",
        where={"topic": "attention", "batch": 8, "head_dim": 64, "phase": ["forward", "backward"]},
        columns={"{sequence} (ms)": quantity("published", "ms")},
    ),
    "published_causal": Table(
        title="Published on other GPUs: causal attention, head dim 64; precision, batch and heads "
        "not stated",
        chapter="published",
        rows=["gpu", "implementation", "phase"],
        across="sequence",
        where={
            "topic": "attention",
            "causal": "yes",
            "head_dim": 64,
            "phase": ["forward", "forward_backward"],
        },
        columns={"{sequence} (ms)": quantity("published", "ms")},
    ),
}

FIGURES = {
    "race": Figure(
        title="Speed relative to the fastest variant, forward and backward, bf16, causal, one head",
        mark="line",
        facet="head_dim",
        facet_title="head dim {}",
        color="attention",
        x=Axis(field="sequence", title="sequence", log=2),
        y=value_axis("fastest time / time"),
        data=race,
    ),
    "naive": Figure(
        title="Naive attention by sequence: time and peak memory",
        mark="line",
        facet="panel",
        color="head_dim",
        dash="attention",
        x=Axis(field="sequence", title="sequence", log=2),
        y=value_axis("", log=10),
        share_y=False,
        data=naive_panels,
    ),
    "tiles": Figure(
        title="Our kernels by tile size (ms)",
        mark="heatmap",
        facet="direction",
        x=Axis(field="block_n", title="BLOCK_N (keys)", categorical=True),
        y=Axis(field="block_m", title="BLOCK_M (queries)", categorical=True),
        where={"topic": "tiles", "quantity": "time", "variant": lambda name: name != CHOSEN},
        share_y=False,
    ),
}


def facts(chapter: Chapter) -> dict[str, Any]:
    """What the sentences of the page need."""
    rows = chapter.own.rows
    ok = select(rows, status="ok")
    return {
        "naive": _naive_facts(rows),
        "compile": _compile_facts(ok),
        "best": {
            precision: ours_against_best(rows, "benchmark").where(precision=precision, phase="both")
            for (precision,) in distinct(select(ok, topic="benchmark"), ["precision"])
        },
        "board": _board_facts(chapter),
        "rates": {
            phase: _largest(
                select(ok, quantity="rate", variant=OURS, phase=phase, precision="bf16")
            )
            for phase in ("forward", "both")
        },
        "tiles": _tile_facts(ok),
        "why_not_ours": _why_not(rows),
        "inconsistent": select(ok, quantity="time", flags=lambda flags: not consistent(flags)),
        "inconsistent_worst": _largest(select(ok, quantity="both_over_parts")),
        "checked": _checked(ok),
        "peak_saved": _peak_saved(ok),
    }


def _naive_facts(rows: Rows) -> dict[str, Any] | None:
    """Where it ends, how it grows, and how well the formula predicts its memory."""
    largest, full = extreme_naive(rows, "ok"), extreme_naive(rows, "oom")
    if largest is None:
        return None
    peak = {"quantity": "expected_memory", "stage": "peak"}
    shape = full or largest
    mine = select(rows, source=shape["source"], **peak)
    scores = select(mine, tensor=list(naive_memory.SCORES))["value"]
    total = select(mine, tensor="sum")["value"].iloc[0]
    measured = select(
        rows, source=largest["source"], quantity="memory", stage="peak", variant=NAIVE
    )
    expected = select(rows, source=largest["source"], tensor="sum", **peak)
    same = select(rows, topic="naive", head_dim=largest["head_dim"], variant=NAIVE, status="ok")
    return {
        "largest": largest,
        "full": full,
        "need": total,
        "scores": len(scores),
        "score_bytes": scores.iloc[0],
        "scores_share": scores.sum() / total,
        "agreement": None
        if measured.empty
        else measured["value"].iloc[0] / expected["value"].iloc[0],
        "memory_power": _power(select(same, quantity="saved_memory")),
        "time_power": _power(select(same, quantity="time", phase="forward")),
    }


def _power(rows: Rows) -> float | None:
    """Exponent of the growth with the sequence, over the two longest."""
    found = rows.sort_values("sequence", key=pd.to_numeric).tail(2)
    if len(found) < 2:
        return None
    low, high = found.to_dict("records")
    return math.log(high["value"] / low["value"]) / math.log(high["sequence"] / low["sequence"])


def _compile_facts(rows: Rows) -> dict[str, Any]:
    elsewhere = select(rows, quantity="speedup_elsewhere")
    first = select(rows, quantity="first_step_time", variant=COMPILED)["value"]
    steps = select(rows, quantity="break_even_steps")["value"].dropna()
    return {
        "elsewhere": _extremes(elsewhere),
        "first": (first.min(), first.max()) if len(first) else None,
        "break_even": (steps.min(), steps.max()) if len(steps) else None,
        "replaced": select(rows, quantity="attention_replaced")["value"].sum(),
    }


def _board_facts(chapter: Chapter) -> list[dict[str, Any]]:
    """Ours at the leaderboard's shape next to the fastest other variant and published entries."""
    rows = chapter.own.rows
    found = []
    for pair in ours_against_best(rows, "leaderboard").where(phase="both").pairs:
        ours = pair.variant
        shape = {key: ours[key] for key in ("batch", "heads", "head_dim", "sequence", "precision")}
        published = select(chapter.results.rows, chapter="published", topic="leaderboard", **shape)
        share = {"source": ours["source"], "variant": OURS, "phase": "both"}
        found.append(
            {
                "pair": pair,
                "ours": ours,
                "other": pair.baseline,
                "published": published.to_dict("records"),
                "share": chapter.value(quantity="matmul_share", **share),
                "rate": chapter.value(quantity="rate", **share),
            }
        )
    return found


def _tile_facts(rows: Rows) -> list[dict[str, Any]]:
    """Per direction: the fastest and the slowest plain tile size, and the chosen kernel."""
    found = []
    rows = select(rows, topic="tiles", quantity="time")
    for key in distinct(rows, ["head_dim", "direction"]) if len(rows) else []:
        mine = select(rows, head_dim=key[0], direction=key[1])
        extremes = _extremes(select(mine, variant=lambda name: name != CHOSEN))
        chosen = select(mine, variant=CHOSEN).to_dict("records")
        if extremes and chosen:
            found.append({**extremes, "chosen": chosen[0]})
    return found


def _why_not(rows: Rows) -> str | None:
    """Why our kernels have no time here."""
    rows = select(rows, topic=["benchmark", "leaderboard", "tiles"])
    if not select(rows, quantity="time", variant=OURS, status="ok").empty:
        return None
    reasons = select(rows, variant=[OURS], status=["unsupported", "failed", "oom"])["reason"]
    return None if reasons.empty else str(reasons.iloc[0])


def _checked(rows: Rows) -> list[dict[str, Any]]:
    """By precision: how many variants were checked, and the largest error, of all and of ours."""
    errors = select(rows, quantity="error")
    found = []
    for (precision,) in distinct(errors, ["precision"]):
        mine = select(errors, precision=precision)
        ours = select(mine, variant=[OURS, CHOSEN])["value"]
        found.append(
            {
                "precision": precision,
                "count": len(distinct(mine, ["source", "variant"])),
                "worst": mine["value"].max(),
                "ours": None if ours.empty else ours.max(),
            }
        )
    return found


def _peak_saved(rows: Rows) -> dict[str, Any] | None:
    """Where our kernels save the most memory inside the model."""
    peaks = select(rows, topic="model", quantity="peak_memory")
    found = combine(
        peaks,
        "saved",
        {"ours": {"variant": OURS}, "naive": {"variant": NAIVE}},
        lambda p: p.naive - p.ours,
    )
    best = _largest(select(found, quantity="saved"))
    if best is None:
        return None
    both = select(peaks, source=best["source"]).set_index("variant")["value"]
    return {**best, "naive": both[NAIVE], "ours": both[OURS]}


def _largest(rows: Rows) -> dict[str, Any] | None:
    found = _extremes(rows)
    return found["high"] if found else None


def _extremes(rows: Rows) -> dict[str, Any] | None:
    """The rows with the smallest and the largest value."""
    if rows.empty:
        return None
    ordered = rows.sort_values("value", key=pd.to_numeric)
    return {"low": ordered.iloc[0].to_dict(), "high": ordered.iloc[-1].to_dict()}
