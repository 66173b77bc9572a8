"""Kernels: where the time goes, what backward and the optimizer change, softmax vs. matmul."""

import re
from collections.abc import Callable
from typing import Any

import pandas as pd

from lmlab.chapters.end_to_end.page import POINT, naming_batches
from lmlab.chapters.machine.page import with_share
from lmlab.chapters.profile import figures_page
from lmlab.chapters.profile.figures_page import MODES, OTHER_FAMILIES, PARTS
from lmlab.report.frame import Results, Rows, at_first, combine, derived, extremes, select
from lmlab.report.page import Chapter
from lmlab.report.table import Table, quantity, time
from lmlab.report.text import plain

TITLE = "Kernels"
FIGURES = figures_page.FIGURES

RUN = ["source", "mode"]
MATMULS = {"matmul_tensor_core": "tensor", "matmul_simt": "SIMT", "matmul": "unknown"}
PHASES = ("forward", "backward", "optimizer")
# Sums over kernels; all other times come from the timeline and include gaps or host time.
SUMS = ["total_time", "family_total_time", "kernel_total_time", "part_total_time"]
# A timeline agrees with the clock within this; beyond it the profiler has slowed the host.
AGREES_WITHIN = 0.05
# From this share of the copy bandwidth on, a kernel whose tensors exceed L2 is memory-bound.
MEMORY_BOUND_FROM = 0.5
OTHER_KERNELS = 5

WALL = {"quantity": "time", "phase": "forward", "clock": "wall"}
# What the name of a matmul kernel contains: library, tile of the output, layout of the operands.
LIBRARY = re.compile(r"xmma|cutlass|nvjet|ampere|hopper|volta|turing|gemv|gemm", re.IGNORECASE)
TILE = re.compile(r"(?<![\dx])(\d+x\d+)")
LAYOUT = re.compile(r"_([nt]{2}|[NT]{3})(?:_|$)")


def derive(rows: Rows, results: Results) -> Rows:
    """Add shares, ratios and rates to the recorded rows."""
    if select(rows, quantity="profiler_version").empty:
        return rows
    read_off = (rows["clock"] == "device") & ~rows["quantity"].isin(SUMS)
    rows = _shares(rows.assign(clock=rows["clock"].mask(read_off, "timeline")))
    for name in ("span", "busy"):
        parts = {"profiled": _where(f"{name}_time", mode="forward", phase="total"), "wall": WALL}
        rows = combine(rows, f"{name}_to_wall", parts, lambda p: p.profiled / p.wall)
    idle = {"late": _where("host_late_gap_time"), "span": _where("span_time", phase="total")}
    rows = combine(rows, "host_bound_share", idle, lambda p: p.late / p.span, on=RUN)
    # The end-to-end chapter times the same forward pass in a separate process.
    forward = _end_to_end(results, mode="forward", phase="forward")
    rows = derived(rows, "to_end_to_end", WALL, lambda f: f.value / _aligned(forward, f))
    passes = {name: _where("span_time", mode="train_step", phase=name) for name in PHASES}
    rows = combine(rows, "backward_to_forward", passes, lambda p: p.backward / p.forward)
    rows = _utilization(rows, results)
    rows = _attention(rows, results.value(chapter="machine", quantity="copy_bandwidth"))
    names = zip(rows["kernel"], rows["family"], strict=True)
    return naming_batches(rows.assign(display_name=[kernel_name(*each) for each in names]))


def _end_to_end(results: Results, **where: str) -> Any:
    """Wall times of the same point in the end-to-end chapter."""
    where |= {"chapter": "end_to_end", "quantity": "time", "clock": "wall", "start": "warm"}
    rows = select(results.rows, status="ok", **where)
    return rows.drop_duplicates(POINT).set_index(POINT)["value"]


def _utilization(rows: Rows, results: Results) -> Rows:
    """A training step's utilization as a product: its matmul kernels' share of peak, their share
    of device time, and device time as a share of wall time."""
    step = {"mode": "train_step"}
    total = _where("total_time", phase="total", **step)
    work = {"ms": total, **{n: _where(f"matmul_{n}", **step) for n in ("share", "flops")}}
    rows = combine(rows, "matmul_rate", work, lambda p: p.flops / (p.share * p.ms) / 1e9)
    rows = with_share(rows, "share_of_peak", results, "stated_matmul_rate", "matmul_rate")
    wall = _end_to_end(results, phase="total", **step)
    rows = derived(rows, "device_share", total, lambda f: f.value / _aligned(wall, f))
    names = ("share_of_peak", "matmul_share", "device_share")
    parts = {name: _where(name, **step) for name in names}
    return combine(rows, "utilization", parts, lambda p: p.prod(axis=1))


def kernel_name(kernel: Any, family: Any) -> Any:
    """A matmul kernel as library, tile and layout; other kernels keep their short name."""
    library, tile, layout = (form.search(str(kernel)) for form in (LIBRARY, TILE, LAYOUT))
    if family not in MATMULS or library is None or tile is None:
        return kernel
    return " ".join([library[0].lower(), tile[1], *(layout.groups() if layout else ())])


def _where(name: str, **labels: Any) -> dict[str, Any]:
    return {"quantity": name, **labels}


def _aligned(values: Any, found: Rows) -> Any:
    return values.reindex(pd.MultiIndex.from_frame(found[values.index.names])).to_numpy()


def _shares(rows: Rows) -> Rows:
    """Families and kernels as shares of a run's device time; `kernel_share` leaves copies, which
    are not kernels, out of the total, as nsys does."""
    kernel, run = _where("kernel_total_time"), _where("total_time", phase="total")
    total = select(rows, **run).set_index(RUN)["value"]
    copies = select(rows, **kernel, rank=pd.isna).set_index(RUN)["value"]
    kernels = total - copies.reindex(total.index).fillna(0)
    family = _where("family_total_time")
    rows = derived(rows, "family_share", family, lambda f: f.value / _aligned(total, f))
    rows = derived(rows, "share_of_run", kernel, lambda f: f.value / _aligned(total, f))
    ranked = {**kernel, "rank": pd.notna}
    rows = derived(rows, "kernel_share", ranked, lambda f: f.value / _aligned(kernels, f))
    matmuls = select(rows, quantity="family_share", family=list(MATMULS))
    added = matmuls.groupby(RUN, sort=False)["value"].sum().reindex(total.index).fillna(0)
    return derived(rows, "matmul_share", run, lambda f: _aligned(added, f))


def _attention(rows: Rows, copy_bandwidth: float | None) -> Rows:
    """Add ratios and rates of attention's parts, if any were recorded."""
    if "part" not in rows:
        return rows
    ms = {part: _where("part_total_time", part=part) for part in PARTS}
    flops = {part: _where("flops", part=part) for part in PARTS}
    for name, parts, value in (
        ("softmax_to_matmuls", ms, lambda p: p.softmax / (p.scores + p.output)),
        ("flops_to_matmuls", flops, lambda p: p.softmax / (p.scores + p.output)),
        ("mask_to_softmax", ms, lambda p: p.scale_and_mask / p.softmax),
        ("pointwise_share", ms, lambda p: (p.softmax + p.scale_and_mask) / p.sum(axis=1)),
    ):
        rows = combine(rows, name, parts, value)
    time_of, on = _where("part_total_time"), ["source", "part"]
    whole = select(rows, **time_of).groupby("source")["value"].sum()
    rows = derived(rows, "part_share", time_of, lambda f: f.value / f.source.map(whole))
    cost = {"ms": time_of, "flops": _where("flops"), "bytes": _where("traffic")}
    rows = combine(rows, "rate", cost, lambda p: p.flops / p.ms / 1e9, on=on)
    rows = combine(rows, "bandwidth", cost, lambda p: p.bytes / p.ms / 1e6, on=on)
    # A softmax reads and writes every score once in each layer.
    moved = _where("traffic", part="softmax")
    rows = derived(rows, "scores_bytes", moved, lambda f: f.value / 2 / f.num_layers)
    if copy_bandwidth is None:
        return rows
    bandwidth = _where("bandwidth", part="softmax")
    return derived(rows, "share_of_copy", bandwidth, lambda f: f.value / copy_bandwidth)


def recorded(rows: Rows) -> Rows:
    """Rows of every precision with at least one recording, including its missing points."""
    return select(rows, precision=set(select(rows, quantity="profiler_version")["precision"]))


def at_longest(rows: Rows) -> Rows:
    """The rows of each size and precision at the longest context that was recorded for it."""
    run = ["size", "precision"]
    longest = select(rows, quantity="profiler_version").groupby(run)["context"].max()
    return rows[rows["context"].to_numpy() == _aligned(longest, rows)]


def other_kernels(rows: Rows) -> Rows:
    """The largest non-matmul kernels of a forward pass, per size at its longest context."""
    rows = select(at_longest(rows), mode="forward", kernel=pd.notna)
    shares = select(rows, quantity="share_of_run", family=lambda family: family not in MATMULS)
    order = shares.groupby("source")["value"].rank(ascending=False, method="first")
    chosen = shares[order <= OTHER_KERNELS].set_index(["source", "kernel"]).index
    rows = rows[rows.set_index(["source", "kernel"]).index.isin(chosen)]
    # Two kernels may share a short name; the larger comes first.
    return rows.drop_duplicates(["source", "kernel", "quantity"])


MATMUL_SHARES = {f"matmul, {plain(m)}": quantity("matmul_share", "percent", mode=m) for m in MODES}
PART_TIMES = {f"{PARTS[p]} (ms)": quantity("part_total_time", "ms", part=p) for p in PARTS}
ATTENTION = {**PART_TIMES, "softmax / matmuls, time": quantity("softmax_to_matmuls")}


def _top_kernel(mode: str, title: str = "{}") -> dict[str, Any]:
    where: Any = {"rank": 1, "mode": mode}
    return {
        title.format("kernel"): quantity("kernel_instances", "text", "display_name", **where),
        title.format("calls"): quantity("kernel_instances", "integer", **where),
        title.format("share"): quantity("kernel_share", "percent", **where),
    }


FAMILY_SHARES = {
    f"{family}, {plain(mode)}": quantity("family_share", "percent", mode=mode, family=family)
    for mode, more in (("forward", ()), ("train_step", ("optimizer",)))
    for family in (*OTHER_FAMILIES, *more)
}
BY_CONTEXT: Any = {"rows": ["size", "context"], "data": recorded}
IN_STEPS: Any = {**BY_CONTEXT, "where": {"mode": "train_step"}}
TABLES = {
    "front_attention": Table(
        title="Parts of attention in one forward pass, {precision}, all layers, longest context "
        "recorded",
        rows=["size", "context"],
        data=lambda rows: at_longest(at_first(rows, "precision")),
        columns=ATTENTION,
    ),
    "clock": Table(
        title="A forward pass by the host's clock and by the profiler, {precision}",
        **BY_CONTEXT,
        columns={
            "wall (ms)": time(phase="forward"),
            "first to last kernel (ms)": quantity("span_time", "ms", mode="forward", phase="total"),
            "busy (ms)": quantity("busy_time", "ms", mode="forward", phase="total"),
            "first to last / wall": quantity("span_to_wall", "times"),
            "busy / wall": quantity("busy_to_wall", "percent"),
            "wall / end to end": quantity("to_end_to_end", "times"),
        },
    ),
    "top": Table(
        title="Kernel with the most time, {precision}",
        columns=_top_kernel("forward") | _top_kernel("forward_backward", "{}, with backward"),
        **BY_CONTEXT,
    ),
    "phases": Table(
        title="Training step on the device's timeline: first to last kernel, {precision}",
        columns={
            **{f"{name} (ms)": quantity("span_time", "ms", phase=name) for name in PHASES},
            "backward / forward": quantity("backward_to_forward", "times"),
        },
        **IN_STEPS,
    ),
    "utilization": Table(
        title="Utilization of a training step as a product of three shares, {precision}",
        columns={
            "matmul kernels (TFLOP/s)": quantity("matmul_rate"),
            "of the stated peak": quantity("share_of_peak", "percent"),
            "x matmuls in device time": quantity("matmul_share", "percent"),
            "x device in wall time": quantity("device_share", "percent"),
            "= utilization": quantity("utilization", "percent"),
        },
        **IN_STEPS,
    ),
    "others": Table(
        title="Largest non-matmul kernels of a forward pass, at the longest context recorded, "
        "{precision}",
        rows=["size", "context", "kernel"],
        data=other_kernels,
        columns={
            "calls": quantity("kernel_instances", "integer"),
            "share of device time": quantity("share_of_run", "percent"),
        },
    ),
    "families": Table(
        title="Share of device time by kernel family, {precision}",
        **BY_CONTEXT,
        columns={**MATMUL_SHARES, **FAMILY_SHARES},
    ),
    "host": Table(
        title="Host and device in one profiled training step, {precision}",
        **IN_STEPS,
        columns={
            "device, first to last kernel (ms)": quantity("span_time", "ms", phase="total"),
            "host, all phases (ms)": quantity("host_time", "ms", phase="total"),
            "host waits (ms)": quantity("wait_time", "ms"),
            "launch, mean (µs)": quantity("launch_time", "us"),
            "launch to start, median (ms)": quantity("delay_median_time", "ms"),
            "number of gaps": quantity("gaps", "integer"),
            "idle in gaps (ms)": quantity("gap_time", "ms"),
            "idle, host late": quantity("host_bound_share", "percent"),
        },
    ),
    "attention": Table(
        title="Parts of attention in one forward pass, all layers, {precision}",
        **BY_CONTEXT,
        columns={
            **ATTENTION,
            "softmax / matmuls, FLOPs": quantity("flops_to_matmuls"),
            "scale and mask / softmax": quantity("mask_to_softmax", "times"),
        },
    ),
    "rates": Table(
        title="Rates of attention's parts by the cost model's FLOPs and bytes, {precision}",
        rows=["size", "context"],
        data=lambda rows: at_first(rows, "precision"),
        columns={
            "scores tensor (MiB)": quantity("scores_bytes", "MiB"),
            "QKᵀ (TFLOP/s)": quantity("rate", part="scores"),
            "PV (TFLOP/s)": quantity("rate", part="output"),
            "softmax (TFLOP/s)": quantity("rate", part="softmax"),
            "scale and mask (GB/s)": quantity("bandwidth", part="scale_and_mask"),
            "softmax (GB/s)": quantity("bandwidth", part="softmax"),
            "softmax, share of copy": quantity("share_of_copy", "percent"),
        },
    ),
}


def facts(chapter: Chapter) -> dict[str, Any]:
    """Template values, of the first precision unless keyed by it; empty if nothing was recorded."""
    everything = select(chapter.own.rows, status="ok")
    rows = at_first(everything, "precision")
    if select(rows, quantity="profiler_version").empty:
        return {}
    steps = {"mode": "train_step"}

    def by_precision(name: str, value: Callable[[Rows], Any], **where: Any) -> dict[str, Any]:
        found = select(everything, quantity=name, **where).groupby("precision", sort=False)
        return {str(precision): value(mine) for precision, mine in found}

    def by_point(name: str, mode: str, field: str = "value", **where: Any) -> Any:
        return select(rows, quantity=name, mode=mode, **where).set_index("source")[field]

    matmul = {mode: by_point("matmul_share", mode) for mode in MODES}
    top = {mode: by_point("kernel_share", mode, "kernel", rank=1) for mode in MODES}
    mask = select(rows, quantity="mask_to_softmax")
    return {
        "gpu": any(r.machine["device"] == "cuda" for r in chapter.results.of(chapter.name)),
        "tools": sorted(set(select(rows, quantity="profiler_version")["value"])),
        "notes": sorted(set(select(rows, quantity="profiler_note")["value"])),
        "matmul": {mode: (shares.min(), shares.max()) for mode, shares in matmul.items()},
        "steps": by_precision("matmul_share", lambda f: (f.value.min(), f.value.max()), **steps),
        "with_backward": len(matmul["forward_backward"]),
        "with_optimizer": len(matmul["train_step"]),
        "backward_raises": _count(matmul["forward_backward"], "gt", matmul["forward"]),
        "optimizer_lowers": _count(matmul["train_step"], "lt", matmul["forward_backward"]),
        "optimizer": extremes(select(rows, quantity="family_share", family="optimizer")),
        "same_top": _count(top["forward_backward"], "eq", top["forward"]),
        "precisions": list(everything["precision"].dropna().unique()),
        "cores": by_precision("family_total_time", _cores, family=list(MATMULS), **steps),
        "clock_agrees": by_precision(
            "span_to_wall", lambda f: list(abs(f.value - 1) <= AGREES_WITHIN)
        ),
        "softmax_time": extremes(select(rows, quantity="softmax_to_matmuls")),
        "softmax_flops": extremes(select(rows, quantity="flops_to_matmuls")),
        "mask": extremes(mask),
        "mask_above": int((mask["value"] > 1).sum()),
        "pointwise": by_precision("pointwise_share", extremes),
        "elementwise": by_precision(
            "family_share", _range_of_sums, family=["elementwise", "copy"], **steps
        ),
        "memory": _memory(rows, chapter.results.value(chapter="machine", quantity="l2_bytes")),
    }


def _range_of_sums(shares: Rows) -> tuple[float, float]:
    sums = shares.groupby("source")["value"].sum()
    return sums.min(), sums.max()


def _count(values: Any, comparison: str, others: Any) -> int:
    """Number of points at which the comparison holds; `others` may cover more points."""
    return int(getattr(values, comparison)(others.reindex(values.index)).sum())


def _cores(matmuls: Rows) -> dict[str, float]:
    """Share of matmul time by type of core."""
    ms = matmuls.groupby("family")["value"].sum() / matmuls["value"].sum()
    return {core: float(ms.get(family, 0)) for family, core in MATMULS.items()}


def _memory(rows: Rows, l2: float | None) -> dict[str, Any] | None:
    """How close softmaxes come to copy bandwidth, counting only those whose tensors exceed L2;
    None without any, or without a measured copy."""
    scores = select(rows, quantity="scores_bytes")
    beyond = scores[scores["value"] > l2] if l2 else scores.head(0)
    shares = select(rows, quantity="share_of_copy", source=list(beyond["source"]))
    if shares.empty:
        return None
    bound = int((shares["value"] >= MEMORY_BOUND_FROM).sum())
    return {"l2": l2, "beyond": len(shares), "bound": bound, "share": extremes(shares)}
