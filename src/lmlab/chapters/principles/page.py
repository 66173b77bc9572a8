"""Six principles of fast GPU code: one pair of programs each, and the parts of the machine."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd

from lmlab.chapters.machine.page import ceilings, kernel_time, with_rates
from lmlab.report.compare import Compare
from lmlab.report.figure import Axis, Figure
from lmlab.report.frame import Results, Rows, derived, select
from lmlab.report.page import Chapter
from lmlab.report.table import Table, memory, quantity, speedup

TITLE = "What makes a GPU fast"

NAMES = {
    "divergence": "Control divergence",
    "precision": "Low precision",
    "fusion": "Operator fusion",
    "recomputation": "Recomputation",
    "coalescing": "Coalescing",
    "tiling": "Tiling",
}
PANELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "divergence": ("relative time by number of branches", "relative_time", {}),
    # fp16 runs at the rate of bf16: one line would hide the other.
    "precision": ("TFLOP/s by side of the matrices", "rate", {"series": lambda s: s != "fp16"}),
    "fusion": ("GB/s by columns (GELU chain)", "bandwidth", {"variant": re.compile("GELU").match}),
    "recomputation": ("MiB kept for backward, by depth", "saved_mib", {}),
    "coalescing": ("useful GB/s by stride of a copy", "bandwidth", {"series": "copy"}),
    # By tile size; the row-major order is only in the table.
    "tiling": ("TFLOP/s by FLOPs per byte of a tile", "rate", {"series": lambda s: s != "without"}),
}
"""Title, quantity and rows of each panel."""
ROOF = "roof"
SERIES = {
    "without": "without the principle",
    "with": "with it",
    "library": "library",
    ROOF: "roofline without L2",
    **{name: name for name in ("fp32", "tf32", "fp16", "bf16")},
}
LIMITS = {
    "bandwidth": ("fusion", "coalescing"),
    "rate": ("divergence", "precision", "recomputation", "tiling"),
}
"""Topics by what limits them."""
LABELS = ["variant", "series", "x", "pair", "tile"]
TIMES = {"quantity": "time", "clock": ["events", "wall"]}
WITH, WITHOUT = {"pair": "with"}, {"pair": "without"}
COMPARISONS = {"pairs": Compare(variant=WITH, baseline=WITHOUT, on=["topic"], where=TIMES)}
PARTS = ("sms", "warp_size", "registers_per_sm", "shared_memory_per_sm_bytes", "l2_bytes")


def derive(rows: Rows, results: Results) -> Rows:
    """Rates, their shares of the machine's ceilings, and the points of the six panels."""
    rows = rows.reindex(columns=list(dict.fromkeys([*rows, *LABELS])))
    rows = rows.assign(principle=rows["topic"].map(NAMES))
    rows = with_rates(rows, {"rate": "flops", "bandwidth": "bytes"}, ["source", "variant"])
    limits = ceilings(results)
    # Topics that do not compare dtypes use the device's usual one.
    usual = "bf16" if results.value(chapter="machine", quantity="device") == "cuda" else "fp32"
    for name, topics in LIMITS.items():
        where = {"quantity": name, "topic": list(topics)}
        rows = derived(rows, "share", where, partial(_shares, limits, usual))
    rows = derived(rows, "saved_mib", {"quantity": "saved_bytes"}, lambda f: f["value"] / 2**20)
    branches = {"quantity": "time", "topic": "divergence"}
    rows = derived(rows, "relative_time", branches, _over_one_branch)
    return pd.concat([rows, *_panels(rows), _roof(rows, limits)], ignore_index=True)


def _shares(limits: dict[str, float], usual: str, found: Rows) -> Any:
    """Each value over its ceiling: the copy bandwidth, or the matmul rate of its dtype."""
    types = found["topic"].map({"divergence": "fp32"}).fillna(usual)
    types = types.mask(found["topic"] == "precision", found["series"])
    types = types.mask(found["quantity"] == "bandwidth", "copy")
    return found["value"] / types.map(limits).astype(float)


def _over_one_branch(found: Rows) -> Any:
    one = found[found["x"] == found["x"].min()].set_index("series")["value"]
    return found["value"] / found["series"].map(one)


def _panels(rows: Rows) -> Iterator[Rows]:
    for topic, (title, name, where) in PANELS.items():
        mine = select(rows, topic=topic, quantity=name, status="ok", x=pd.notna, **where)
        mine = mine.sort_values("x", key=pd.to_numeric, kind="stable")
        if topic == "coalescing":
            mine = mine.assign(series=(mine["x"] == 1).map({True: "with", False: "without"}))
        yield mine.assign(quantity="panel", panel=f"{NAMES[topic]}\n{title}")


def _roof(rows: Rows, limits: dict[str, float]) -> Rows:
    """What memory and tensor cores allow at the intensity of each tile."""
    tiles = select(rows, topic="tiling", quantity="rate", status="ok", series="with")
    if tiles.empty or not {"copy", "bf16"} <= limits.keys():
        return rows.head(0)
    allowed = (tiles["x"].astype(float) * limits["copy"] / 1e3).clip(upper=limits["bf16"])
    panel = f"{NAMES['tiling']}\n{PANELS['tiling'][0]}"
    return tiles.assign(quantity="panel", panel=panel, series=ROOF, value=allowed.astype(object))


TABLES = {
    "pairs": Table(
        title="A pair of programs per principle (tiles also differ in warps and stages); ceiling: "
        "the machine's matmul or copy, measured separately, so good to several percent",
        rows=["principle"],
        columns={
            "without": quantity("time", "text", "variant", **WITHOUT),
            "with": quantity("time", "text", "variant", **WITH),
            "speed-up": speedup(),
            "share of ceiling": quantity("share", "percent", **WITH),
        },
    ),
    "programs": Table(
        title="{principle}: all programs",
        rows=["variant"],
        columns={
            "time (ms)": kernel_time(),
            "TFLOP/s": quantity("rate"),
            "GB/s": quantity("bandwidth"),
            "share of ceiling": quantity("share", "percent"),
            "launches": quantity("launches", "integer"),
            "error": quantity("error", "scientific"),
            "peak (MiB)": memory(format="MiB"),
            "saved (MiB)": quantity("saved_bytes", "MiB"),
        },
    ),
    "blocks": Table(
        title="Tiled matmul: blocks that fit on an SM, and what runs out first (one of equals)",
        rows=["tile"],
        where={"topic": "tiling"},
        columns={
            "warps": quantity("warps", "integer"),
            "registers per thread": quantity("registers", "integer"),
            "shared memory (KiB)": quantity("shared_memory", "KiB"),
            "blocks per SM": quantity("blocks_per_sm", "integer"),
            "limited by": quantity("limit", "text"),
        },
    ),
}
FIGURES = {
    "panels": Figure(
        title="Six principles",
        facet="panel",
        wrap=3,
        share_y=False,
        color="series",
        x=Axis(field="x", title="", log=2),
        y=Axis("", log=10),
        where={"quantity": "panel"},
        names=SERIES,
        height=2.6,
    )
}


def facts(chapter: Chapter) -> dict[str, Any]:
    """Parts of the machine, the pairs by topic, and what was left out."""
    failed = select(chapter.own.rows, status=["unsupported", "failed", "oom"], variant=pd.isna)
    saved = select(chapter.own.rows, quantity="saved_bytes", status="ok")
    kept = dict(zip(saved["pair"], saved["value"], strict=True)) if len(saved) else {}
    parts = {name: chapter.results.value(chapter="machine", quantity=name) for name in PARTS}
    return {
        "parts": {name: part for name, part in parts.items() if part is not None},
        "pairs": {pair.point["topic"]: pair for pair in chapter.compare["pairs"]},
        "kept": kept["without"] / kept["with"] if {"with", "without"} <= kept.keys() else None,
        "left_out": dict(zip(failed["principle"], failed["reason"], strict=True)),
    }
