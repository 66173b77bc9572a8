"""The fastest step: the ladder, what each rung gains, our kernels next to the library's."""

from functools import partial
from typing import Any

from lmlab.chapters.attention.page import NAMES
from lmlab.chapters.machine.page import kernel_time, with_rates, with_share
from lmlab.report.compare import Compare
from lmlab.report.figure import Axis, Figure
from lmlab.report.frame import Results, Rows, combine, derived, highest, select, values_of
from lmlab.report.page import Chapter
from lmlab.report.table import Table, memory, quantity, speedup, time

TITLE = "The fastest step"

OWN: dict[str, Any] = {"own": True}
BOTH_CLOCKS = {"quantity": "time", "clock": ["wall", "device"]}


def _rungs(baseline: str, topic: str, *on: str, **where: Any) -> Compare:
    where = {"quantity": "token_time", "clock": "wall", "topic": topic} | where
    return Compare(variant={"side": "rung"}, baseline={"side": baseline}, on=on, where=where)


def _kernels(baseline: str) -> Compare:
    where, on = {"quantity": "time", "topic": "kernels"}, ["size", "part"]
    return Compare(variant={"variant": "ours"}, baseline={"variant": baseline}, on=on, where=where)


COMPARISONS = {
    "rungs": _rungs("before", "ladder", "size", "rung"),
    "attention": _rungs("other", "ladder", "size", "rung", "clock", **BOTH_CLOCKS),
    "leaderboard": _rungs("before", "leaderboard", "rung"),
    "kernels": _kernels("library"),
    "loss": _kernels("compiled"),
}
COLUMNS = ["rung", "attention", "side", "variant", "part", "topic", "size", "layers", "precision"]


def derive(rows: Rows, results: Results) -> Rows:
    """Add rates and utilization, and mark the records of the rung itself as `own`."""
    rows = rows.reindex(columns=list(dict.fromkeys([*rows, *COLUMNS])))
    is_own = (rows["variant"] == rows["rung"]) | (rows["side"] == "rung")
    names = rows["attention"].map(lambda name: NAMES.get(name, name))
    rows = rows.assign(own=is_own.where(rows["rung"].notna()), attention=names)
    rates = {"throughput": "tokens", "rate": "flops"}
    key = ["source", "rung", "attention"]
    rows = with_rates(rows, rates, key, side=["rung", "other"], clock="wall")
    # Side `rung` only: in the next rung's rounds, the same step has a different wall time.
    step = {"quantity": "time", "side": "rung", "topic": "ladder"}
    busy = {clock: {**step, "clock": clock} for clock in ("device", "wall")}
    rows = combine(rows, "busy_share", busy, lambda p: p.device / p.wall, on=key)
    rows = with_share(rows, "mfu", results, "stated_matmul_rate")
    rows = with_share(rows, "measured_mfu", results, "matmul_rate")
    own = {"quantity": "throughput", **OWN}
    first = select(rows, status="ok", **own).drop_duplicates("source").set_index("source")["value"]
    return derived(rows, "relative", own, lambda f: f.value / f.source.map(first))


OURS: Any = {"side": "rung", "attention": lambda name: name != "naive"}
TABLES = {
    "front": Table(
        title="Rungs of the ladder; gain: over the rung before in alternating rounds, which can "
        "differ from the ratio of tokens/s, most where noisy; MFU: of the precision's stated peak",
        rows=["rung"],
        where={"topic": "ladder", "rung": lambda rung: rung != "checkpoint"},
        columns={
            "{size}, tokens/s": quantity("throughput", "integer", **OWN),
            "{size}, gain": speedup(comparison="rungs"),
            "{size}, MFU": quantity("mfu", "percent", **OWN),
        },
    ),
    "ladder": Table(
        title="The ladder, {size}: each rung adds to the one before",
        rows=["rung"],
        where={"topic": "ladder"},
        columns={
            "batch": quantity("tokens", "integer", field="batch_size", **OWN),
            "step (ms)": time(side="rung"),
            "device (ms)": time(side="rung", clock="device"),
            "device / wall": quantity("busy_share", "percent"),
            "tokens/s": quantity("throughput", "integer", **OWN),
            "over the rung before": speedup(comparison="rungs"),
            "MFU, stated peak": quantity("mfu", "percent", **OWN),
            "MFU, measured peak": quantity("measured_mfu", "percent", **OWN),
            "peak (GiB)": memory(**OWN),
            "mJ/token": quantity("energy_per_token", "mJ", **OWN),
            "to compile (s)": quantity("compile_time", "s", **OWN),
            "gradient error": quantity("gradient_error", "scientific", **OWN),
            "allowed": quantity("gradient_tolerance", "scientific", **OWN),
        },
    ),
    "parts": Table(
        title="Device time of a step by kind of kernel, {size} (ms)",
        rows=["rung"],
        where={"quantity": "part_time"},
        columns={"{part}": quantity("part_time", "ms")},
    ),
    "attention": Table(
        title="The same rung with another attention; wall times in the same rounds",
        rows=["size", "rung"],
        where={"topic": "ladder"},
        data=partial(select, status="ok"),
        columns={
            "ours (ms)": time(**OURS),
            "other (ms)": time(side="other"),
            "ours, device (ms)": time(**OURS, clock="device"),
            "other, device (ms)": time(side="other", clock="device"),
            "other": time("text", side="other", field="attention"),
            "our speed-up over it": speedup(comparison="attention", clock="wall"),
            "by device time": speedup(comparison="attention", clock="device"),
        },
    ),
    "tries": Table(
        title="Batches tried, {size}, without a CUDA graph: tokens per second of the faster of two "
        "steps, not of rounds as in the ladder",
        rows=["rung", "checkpoint", "batch_size"],
        where={"quantity": "tried_throughput"},
        columns={"tokens/s": quantity("tried_throughput", "integer")},
    ),
    "kernels": Table(
        title="Our kernels next to the library's; AdamW on the embedding and at most four blocks",
        rows=["size", "part", "variant"],
        where={"topic": "kernels"},
        columns={
            "time (ms)": kernel_time(),
            "peak (MiB)": quantity("peak_memory", "MiB"),
            "error": quantity("error", "scientific"),
        },
    ),
    "leaderboard": Table(
        title="The leaderboard's step with {shallow} layers",
        rows=["rung"],
        where={"topic": "leaderboard"},
        columns={
            "step (ms)": time(side="rung"),
            "over the rung before": speedup(comparison="leaderboard"),
            "peak (GiB)": memory(**OWN),
            "to compile (s)": quantity("compile_time", "s", **OWN),
        },
    ),
    "layers": Table(
        title="Layers tried at the leaderboard's shape, last rung, the faster of two steps",
        rows=["layers"],
        where={"topic": "leaderboard", "variant": "deepest"},
        columns={"step (ms)": quantity("time", "ms"), "peak (GiB)": memory()},
    ),
}


def in_order(results: Results) -> Rows:
    """Gains over the first rung, in ladder order even if some sizes left out a rung."""
    rows = select(results.rows, topic="ladder")
    order = values_of(rows, "rung")  # a rung left out has a row, too
    found = select(rows, status="ok", quantity="relative")
    return found.sort_values("rung", key=lambda rungs: rungs.map(order.index), kind="stable")


FIGURES = {
    "ladder": Figure(
        title="The ladder: tokens per second, over the first rung",
        color="size",
        x=Axis(field="rung", title="rung, each on top of the one before", categorical=True),
        y=Axis("times the first rung", log=10),
        data=in_order,
    )
}


def facts(chapter: Chapter) -> dict[str, Any]:
    """The best step of each size, and the rungs left out, by reason."""
    rows = chapter.own.rows
    rates = select(rows, quantity="throughput", topic="ladder", **OWN)
    left_out = select(rows, topic="ladder", status="unsupported", quantity="time", **OWN)
    return {
        "best": [_best(select(rows, size=size)) for size in values_of(rates, "size")],
        "left_out": left_out.groupby("reason", sort=False)["rung"].unique().map(list).to_dict(),
    }


def _best(rows: Rows) -> dict[str, Any]:
    """The fastest rung of a size, with its numbers and its gain over the first rung."""
    mine = select(rows, topic="ladder", status="ok", **OWN)
    rates = select(mine, quantity="throughput")
    best: Any = highest(rates)
    here = select(mine, rung=best["rung"])
    values = here.drop_duplicates("quantity").set_index("quantity")["value"]
    shares = {name: values.get(name) for name in ("mfu", "measured_mfu", "busy_share")}
    first = rates.iloc[0]
    parts = select(here, quantity="part_time").set_index("part")["value"]
    shares["matmul_share"] = parts["matmul"] / parts.sum() if "matmul" in parts else None
    return {**best, **shares, "first": first["rung"], "gain": best["value"] / first["value"]}
