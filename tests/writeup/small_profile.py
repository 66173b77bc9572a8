"""Two sizes at two contexts, recorded as a test says: enough for every sentence of the chapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lmlab.study.chapters import points_of
from lmlab.study.config import Study, load
from lmlab.study.files import REFERENCES
from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.collect import Collected, Row
from tests.writeup import factory

SIMT, TENSOR, UNTOLD = "ampere_sgemm_128x64_tn", "s16816gemm_bf16_align8", "gemm of a library"
SOFTMAX, ADD, NORM, UPDATE = "softmax_warp_forward", "elementwise add", "reduce", "elementwise lerp"
FAMILY = {
    SIMT: "matmul_simt",
    TENSOR: "matmul_tensor_core",
    UNTOLD: "matmul",
    SOFTMAX: "softmax",
    ADD: "elementwise",
    NORM: "reduction",
    UPDATE: "optimizer",
}
MS = 1_000_000

Kernels = Sequence[tuple[str, float, int]]
"""Name, milliseconds in all, calls."""
FORWARD: Kernels = [(SIMT, 8.0, 85), (SOFTMAX, 1.0, 12), (ADD, 0.7, 48), (NORM, 0.3, 25)]
BACKWARD: Kernels = [(SIMT, 16.0, 170), (ADD, 3.0, 90)]
OPTIMIZER: Kernels = [(UPDATE, 5.0, 60)]
PARTS = {"scores": 1.0, "scale_and_mask": 1.0, "softmax": 1.0, "output": 1.0}
PRODUCT_FLOPS = 4_000_000_000
ATTENTION_COST = {
    "scores": {"flops": PRODUCT_FLOPS, "bytes": 10_000_000},
    "scale_and_mask": {"flops": PRODUCT_FLOPS // 128, "bytes": 40_000_000},
    "softmax": {"flops": PRODUCT_FLOPS * 5 // 128, "bytes": 20_000_000},
    "output": {"flops": PRODUCT_FLOPS, "bytes": 10_000_000},
}


class Names:
    """The list of names of one result."""

    def __init__(self) -> None:
        self.rows: list[dict[str, str]] = []

    def index(self, name: str) -> int:
        row = {"name": name, "short_name": name, "family": FAMILY.get(name, "matmul_simt")}
        # The optimizer's kernels are elementwise by name.
        row["family"] = "elementwise" if row["family"] == "optimizer" else row["family"]
        if row not in self.rows:
            self.rows.append(row)
        return self.rows.index(row)


def run(
    phases: dict[str, Kernels],
    names: Names,
    *,
    span_ms: float | None = None,
    wait: tuple[float, str | None, str | None] = (0.0, None, None),
    late_ms: float = 0.0,
) -> dict[str, Any]:
    """A digest of phases; the device never idles unless a longer span is given."""
    kernels = [kernel for inside in phases.values() for kernel in inside]
    together: dict[str, tuple[float, int]] = {}
    for name, ms, calls in kernels:
        before = together.get(name, (0.0, 0))
        together[name] = (before[0] + ms, before[1] + calls)
    table = sorted(together.items(), key=lambda item: -item[1][0])
    total = sum(ms for _, ms, _ in kernels)
    families: dict[str, dict[str, int]] = {}
    for name, ms, calls in kernels:
        entry = families.setdefault(
            FAMILY.get(name, "matmul_simt"), {"total_ns": 0, "instances": 0}
        )
        entry["total_ns"] += round(ms * MS)
        entry["instances"] += calls
    per_call = [round(ms * MS / calls) for _, (ms, calls) in table]
    waited, call, after = wait
    return {
        "kernels": sum(calls for _, _, calls in kernels),
        "total_ns": round(total * MS),
        "busy_ns": round(total * MS),
        "span_ns": round((span_ms or total) * MS),
        "phases": [_phase(name, inside) for name, inside in phases.items()],
        "families": families,
        "table": {
            "name": [names.index(name) for name, _ in table],
            "instances": [calls for _, (_, calls) in table],
            "total_ns": [round(ms * MS) for _, (ms, _) in table],
            **{f"{key}_ns": per_call for key in ("avg", "med", "min", "max")},
            "sd_ns": [0.0] * len(table),
        },
        "rest": {"names": 0, "instances": 0, "total_ns": 0},
        "copies": {"instances": 0, "total_ns": 0},
        "host": {
            "wait_ns": round(waited * MS),
            "waits": [{"name": call, "after": after, "duration_ns": 1}] if call else [],
            "launches": 3,
            "delay_median_ns": 5000,
            "delay_max_ns": 9000,
            "gap_ns": round(((span_ms or total) - total) * MS),
            "host_late_gap_ns": round(late_ms * MS),
            "gaps": 3,
            "longest_gaps": [],
            "calls": [],
        },
    }


def _phase(name: str, kernels: Kernels) -> dict[str, Any]:
    total = round(sum(ms for _, ms, _ in kernels) * MS)
    return {
        "phase": name,
        "kernels": sum(calls for _, _, calls in kernels),
        "total_ns": total,
        "busy_ns": total,
        "span_ns": total,
        "host_ns": 2 * MS,
    }


def part(name: str, ms: float) -> dict[str, Any]:
    """What a part of attention takes, in one kernel."""
    return {"part": name, "kernels": 1, "total_ns": round(ms * MS), "product_ns": 0, "names": []}


def recording(
    point: Point,
    device: str = "cuda",
    *,
    clock_ms: float = 10.5,
    forward: Kernels = FORWARD,
    backward: Kernels = BACKWARD,
    optimizer: Kernels = OPTIMIZER,
    parts: dict[str, float] | None = PARTS,
    span_ms: float | None = None,
    step: dict[str, Any] | None = None,
    **data: Any,
) -> Result:
    """A point whose runs consist of these kernels."""
    names = Names()
    modes = {
        "forward": run({"forward": forward}, names, span_ms=span_ms),
        "forward_backward": run({"forward": forward, "backward": backward}, names),
        "train_step": run(
            {"zero_grad": [], "forward": forward, "backward": backward, "optimizer": optimizer},
            names,
            **(step or {}),
        ),
    }
    return factory.result(
        point,
        device,
        measurements={"forward": factory.measurement([clock_ms, clock_ms, clock_ms])},
        data={
            "tool": "torch profiler 2.13.0",
            "tool_note": None,
            "tokens_per_step": 512,
            "parameters_total": 10,
            "attention_cost": ATTENTION_COST,
            "autocast": False,
            "tf32": False,
            "threads": 2,
            "modes": modes,
            "attention_parts": parts and [part(name, ms) for name, ms in parts.items()],
            "slow_ranges": [],
            "timeline": None,
            "layer": None,
            "names": names.rows,
            **data,
        },
    )


def study(device: str = "cuda", **block: Any) -> Study:
    """A study whose profiles have two sizes and two contexts, or what a test wants."""
    values = factory.config()
    for blocks in values["studies"].values():
        wanted = {"sizes": ["small", "medium"], "contexts": [128, 256], **block}
        blocks["profile"].update(wanted)
    return load(values, device)


Make = Callable[[Point], Result | None]


def collected(
    make: Make | None = None,
    device: str = "cuda",
    *,
    card: Result | None = None,
    end_to_end: Callable[[Point], Result | None] | None = None,
    **block: Any,
) -> Collected:
    """The chapter as the writeup sees it; None from `make` is a point not measured."""
    what = study(device, **block)
    machine = factory.MACHINES[device]["id"]

    def rows(chapter: str, maker: Make) -> list[Row]:
        return [
            Row(point, point.path(Path("results"), machine).as_posix(), maker(point))
            for point in points_of(what, chapter)
        ]

    others = {"end_to_end": rows("end_to_end", end_to_end)} if end_to_end else {}
    own = rows("profile", make or (lambda point: recording(point, device)))
    return Collected("profile", machine, device, what, own, card, REFERENCES, others)


def nothing(point: Point) -> None:
    return None
