"""Tables of the end-to-end chapter: times, rates, who waits for whom, precisions, cold starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from lmlab.writeup.caption import describe, with_reasons
from lmlab.writeup.collect import Collected, Row, sources_of
from lmlab.writeup.frames import end_to_end as frames
from lmlab.writeup.frames.cold_start import FEWEST_SETTLED_STEPS, TOLERANCE, traces
from lmlab.writeup.frames.speedup import BASE, PHASES, compared_precisions, speedups
from lmlab.writeup.numbers import percent
from lmlab.writeup.table import Column, Table
from lmlab.writeup.tables.cells import (
    WITHIN_NOISE,
    Cell,
    busy_cell,
    by_place,
    first_cell,
    number_cell,
    place_cells,
    place_columns,
    ratio_cell,
    settle_cell,
    share_cell,
    speedup_cell,
    time_cell,
)
from lmlab.writeup.tables.published import published
from lmlab.writeup.tables.repeats import repeats


def tables(collected: Collected) -> dict[str, Table]:
    """All tables by name; a precision has its own, so that no row mixes two."""
    data = frames.frame(collected)
    precisions = frames.order(frames.grid(data), "precision")
    return {
        **{f"times_{name}": times(collected, data, name) for name in precisions},
        **{f"rates_{name}": rates(collected, data, name) for name in precisions},
        **({"busy": busy(collected, data)} if collected.device == "cuda" else {}),
        **repeats(collected, data),
        **{f"speedup_{p}": speedup(collected, data, p) for p in compared_precisions(data)},
        **({"warmup": warmup(collected, data)} if len(frames.cold(data)) else {}),
        **published(collected, data),
    }


def times(collected: Collected, data: pd.DataFrame, precision: str) -> Table:
    """Mean ± deviation and median of every phase."""
    rows = frames.of(frames.grid(data), precision=precision)
    steps = frames.of(rows, mode="train_step")
    cells: dict[str, tuple[pd.DataFrame, Cell]] = {
        "Forward, no gradient": (frames.of(rows, mode="forward", phase="forward"), time_cell),
        "Forward": (frames.of(steps, phase="forward"), time_cell),
        "Backward": (frames.of(steps, phase="backward"), time_cell),
        "Optimizer": (frames.of(steps, phase="optimizer"), time_cell),
        "Whole step": (frames.of(steps, phase="total"), time_cell),
    }
    used = chosen(collected, precision=precision, start="warm", mode={"forward", "train_step"})
    return Table(
        title=f"Time of each phase, {precision}: mean ± standard deviation (median)",
        columns=[*place_columns(rows), *(Column(f"{name} (ms)") for name in cells)],
        rows=by_place(rows, list(cells.values())),
        caption=f"{caption(used, rows)} Forward with gradients includes the loss; the whole step "
        "also clears the gradients.",
        sources=sources_of(used),
    )


def rates(collected: Collected, data: pd.DataFrame, precision: str) -> Table:
    """What the times amount to: ratio, throughput, share of what the hardware can do."""
    rows = frames.of(frames.grid(data), precision=precision)
    steps = frames.of(rows, mode="train_step")
    total = frames.of(steps, phase="total")
    peak = collected.ceiling("peaks", "tflops", precision)
    ceiling = collected.ceiling("ceilings", "matmul_tflops", precision, "tflops")
    cells: dict[str, tuple[pd.DataFrame, Cell]] = {
        "Backward : forward": (frames.of(steps, phase={"forward", "backward"}), ratio_cell),
        "Tokens/s": (total, lambda part: number_cell(part, "tokens_per_s")),
        "TFLOP/s": (total, lambda part: number_cell(part, "tflops")),
        "MFU": (total, lambda part: share_cell(part, peak, "no MFU")),
        "Of measured matmul": (total, lambda part: share_cell(part, ceiling, "no ceiling")),
    }
    used = chosen(collected, precision=precision, start="warm", mode={"train_step"})
    card = ["results/" + collected.machine + "/machine.json"] if collected.card else []
    return Table(
        title=f"Rates of the training step, {precision}",
        columns=[*place_columns(rows), *(Column(name) for name in cells)],
        rows=by_place(rows, list(cells.values())),
        caption=f"{caption(used, rows)} From medians. {flop_note(collected)} "
        f"{peak_note(collected, precision)}",
        sources=[*sources_of(used), *card],
    )


def busy(collected: Collected, data: pd.DataFrame) -> Table:
    """How much of each phase the GPU was working at all."""
    rows = frames.of(frames.grid(data), mode="train_step")
    cells = [
        (frames.of(rows, precision=precision, phase=phase), busy_cell)
        for precision in frames.order(rows, "precision")
        for phase in frames.PHASES_OF_MODE["train_step"]
    ]
    titles = [
        f"{phase.capitalize()}, {precision}"
        for precision in frames.order(rows, "precision")
        for phase in frames.PHASES_OF_MODE["train_step"]
    ]
    used = chosen(collected, start="warm", mode={"train_step"})
    return Table(
        title="Share of each phase in which the GPU ran anything",
        columns=[*place_columns(rows), *(Column(title) for title in titles)],
        rows=by_place(rows, cells),
        caption=f"{caption(used, rows)} GPU time is the union of all kernel and copy intervals of "
        "one step under the profiler, over the phase's median without it. Well under 100 % means "
        "that the GPU waits for the host.",
        sources=sources_of(used),
    )


def speedup(collected: Collected, data: pd.DataFrame, precision: str) -> Table:
    """One precision against the base."""
    rows = frames.grid(data)
    ratios = {
        tuple(row[[*frames.PLACE, "what"]]): row for _, row in speedups(data, precision).iterrows()
    }
    body = [
        [
            *place,
            *(
                speedup_cell(rows, ratios.get((*key, what)), key, what, precision)
                for what in PHASES
            ),
        ]
        for key, place in zip(frames.places(rows), place_cells(rows), strict=True)
    ]
    used = [
        row
        for row in chosen(collected, start="warm", mode={"forward", "train_step"})
        if row.point.parameters["precision"] in {BASE, precision}
    ]
    return Table(
        title=f"Speed-up of {precision} over {BASE}: median time in {BASE} / median in {precision}",
        columns=[*place_columns(rows), *(Column(what.capitalize()) for what in PHASES)],
        rows=body,
        caption=f"{caption(used, rows)} A ratio across points: the two were measured in different "
        f"processes. {WITHIN_NOISE} marks a difference within noise, that between processes "
        "included.",
        sources=sources_of(used),
    )


def warmup(collected: Collected, data: pd.DataFrame) -> Table:
    """What is measured when fewer steps are thrown away first."""
    rows = frames.cold(data)
    settled = traces(data)
    body = []
    for size in frames.order(rows, "size"):
        for count in frames.order(rows, "warmup"):
            point = frames.of(rows, size=size, warmup=count)
            phases = [
                time_cell(frames.of(point, phase=phase))
                for phase in (*frames.PHASES_OF_MODE[point["mode"].iloc[0]], "total")
            ]
            trace = frames.of(settled, size=size, warmup=count)
            body.append([str(size), str(count), *phases, first_cell(trace), settle_cell(trace)])
    phases_shown = (*frames.PHASES_OF_MODE[rows["mode"].iloc[0]], "whole step")
    used = chosen(collected, start="cold")
    return Table(
        title="Cold starts, measured after so many warm-ups: mean ± standard deviation (median)",
        columns=[
            Column("Size", "left"),
            Column("Warm-ups"),
            *(Column(f"{phase.capitalize()} (ms)") for phase in phases_shown),
            Column("First measured step (ms)"),
            Column("Settled from step"),
        ],
        rows=body,
        caption=f"{cold_caption(used, rows)} Every row is a process of its own. Steps count from "
        f"the process's first, warm-ups included; settled: no step from there on more than "
        f"{percent(TOLERANCE, 2)} above the median of its second half, at least "
        f"{FEWEST_SETTLED_STEPS} of them; then slower: the settled steps of its first half have a "
        f"median more than {percent(TOLERANCE, 2)} below that.",
        sources=sources_of(used),
    )


def chosen(collected: Collected, **wanted: Any) -> list[Row]:
    """The chapter's rows with these parameters; a set means any of its values."""

    def fits(row: Row) -> bool:
        values = row.point.parameters
        return all(
            values[key] in value if isinstance(value, set) else values[key] == value
            for key, value in wanted.items()
        )

    return [row for row in collected.rows if fits(row)]


def caption(used: Sequence[Row], rows: pd.DataFrame) -> str:
    """From the results behind a table; a batch that is a column is left out."""
    columns = ["batch"] if rows["batch"].nunique() > 1 else []
    results = [row.result for row in used if row.result is not None]
    return with_reasons(describe(results, columns=[*columns, "start"]), results)


def cold_caption(used: Sequence[Row], rows: pd.DataFrame) -> str:
    """Cold starts share one context and precision, which no column shows."""
    results = [row.result for row in used if row.result is not None]
    where = (
        f"Context {rows['context'].iloc[0]}, {rows['precision'].iloc[0]}, {rows['mode'].iloc[0]}."
    )
    return f"{describe(results, columns=['warmup'])} {where}"


def flop_note(collected: Collected) -> str:
    """Which FLOPs are counted: without it a utilisation means nothing."""
    counted = [r.data for r in collected.results if r.status == "ok" and r.data["flops"]]
    if not counted:
        return "FLOPs are not known: the cost model does not describe this model."
    meaning = {
        "full": "attention's whole square counted, masked half included",
        "causal": "only the unmasked half of attention counted",
    }
    names = sorted({data["flop_convention"] for data in counted})
    notes = [f'"{name}" ({meaning.get(name, "as the cost model defines it")})' for name in names]
    return f"FLOPs: matmuls of forward and backward, convention {' and '.join(notes)}."


def peak_note(collected: Collected, precision: str) -> str:
    """What MFU is a share of, or why there is none."""
    peak = collected.ceiling("peaks", "tflops", precision)
    if peak is None:
        return f"No MFU: there is no sourced {precision} peak for {collected.device_name}."
    return f"MFU: of the stated {peak:g} TFLOP/s, sourced in the chapter on the machine."
