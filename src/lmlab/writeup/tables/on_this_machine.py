"""Tables of the chapter on paper that put this machine's measured rates into its formulas."""

from __future__ import annotations

import math
from typing import Any

from lmlab.planning import batch
from lmlab.study.results import Result
from lmlab.writeup.collect import Collected, sources_of
from lmlab.writeup.frames import calculations as frames
from lmlab.writeup.frames.calculations import RING_SIZE_BYTES, Link
from lmlab.writeup.frames.collectives import asked_for
from lmlab.writeup.numbers import binary_bytes, significant
from lmlab.writeup.table import NOTHING, Column, Table

WAYS = {
    "dp": "data parallel",
    "fsdp": "FSDP",
    "mesh": "FSDP {fsdp} × TP {tp}",
    "best": "best split of FSDP and TP",
}


def here(collected: Collected, found: Result | None) -> Table:
    """The same batches with what this machine was measured at."""
    link = frames.link(collected)
    rows: list[list[str]] = []
    if found is not None and link is not None:
        shape, d_ff = frames.mesh_of(found), frames.blocks_of(found).d_ff
        rows = [
            [
                WAYS[row["way"]].format(fsdp=shape.fsdp, tp=shape.tp),
                str(row["formula"]),
                "no batch"
                if (tokens := _number(row["tokens_a_device"])) is None
                else measured_tokens(tokens),
            ]
            for _, row in frames.batches_here(link, shape, d_ff).iterrows()
        ]
        most = batch.most_tensor_parallel(link.network(link.gather), d_ff=d_ff)
        shown = significant(most) if most >= 2 else f"none ({significant(most)})"
        rows.append(["tensor parallel: most devices", "Y < F / (C/W)", shown])
    return Table(
        title="The same on this machine: tokens a device from which it is compute-bound",
        columns=[Column("Split", "left"), Column("Needs", "left"), Column("Value")],
        rows=rows or [["No value", NOTHING, NOTHING]],
        caption=_link_caption(link),
        sources=_other_sources(collected),
    )


def _link_caption(link: Link | None) -> str:
    if link is None:
        return "Needs a measured bf16 matrix product and an exchange between ranks on the device."
    gather, reduce = link.gather, link.reduce
    return (
        f"{link.arm}: C = {significant(link.matmul_tflops)} TFLOP/s a rank (bf16 matrix products "
        f"of the machine card), W = {significant(gather['bus_gb_per_s'])} GB/s "
        f"({_exchange(gather, 'all-gather')}) and {significant(reduce['bus_gb_per_s'])} GB/s "
        f"({_exchange(reduce, 'all-reduce')}); one axis each. For many such ranks: (n − 1) / n is "
        "taken as 1."
    )


def _exchange(case: Any, name: str) -> str:
    return f"{name} of {asked_for(case['size_bytes'])}, {case['dtype']}"


def rings_here(collected: Collected) -> Table:
    """Both ways to all-reduce by the fitted lines of this machine."""
    found = frames.ring_times(collected)
    rows = [
        [
            str(row["arm"]),
            significant(row["step_ms"]),
            significant(row["bus_gb_per_s"]),
            significant(row["ring_ms"]),
            significant(row["gather_ms"]),
            "any size" if math.isinf(row["even_bytes"]) else binary_bytes(row["even_bytes"]),
        ]
        for _, row in found.iterrows()
    ]
    size = binary_bytes(RING_SIZE_BYTES)
    formats = ", ".join(dict.fromkeys(found["dtype"])) or "nothing measured"
    return Table(
        title=f"Both ways to all-reduce {size} on this machine, computed",
        columns=[
            Column("Ranks", "left"),
            Column("Latency a step (ms)"),
            Column("Bus bandwidth (GB/s)"),
            Column("Ring (ms)"),
            Column("Whole tensors (ms)"),
            Column("Whole no slower up to"),
        ],
        rows=rows or [["No line", *[NOTHING] * 5]],
        caption="Latency and bandwidth from the fitted lines of the measured all-reduces "
        f"({formats}), the latency shared out over a ring's steps.",
        sources=_other_sources(collected),
    )


def _other_sources(collected: Collected) -> list[str]:
    card = [f"results/{collected.machine}/machine.json"] if collected.card else []
    return [*card, *(s for rows in collected.beside.values() for s in sources_of(rows))]


def measured_tokens(count: float) -> str:
    """Whole tokens, to as many digits as a measured bandwidth has."""
    return f"{math.ceil(count):,}" if count < 1000 else significant(count)


def tokens_cell(count: float | None, devices: float = 1) -> str:
    """Tokens, or that no number of them is enough."""
    return "no batch" if count is None else f"{math.ceil(count / devices):,}"


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(value)
