"""The model as a whole: compiled against eager, and with one attention against another."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.collect import Collected, sources_of
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.table import Column, Table
from lmlab.writeup.tables.attention_cells import (
    bytes_cell,
    caption,
    left_out,
    median_cell,
    seconds_cell,
    speedup_cell,
)
from lmlab.writeup.tables.cells import WITHIN_NOISE

TITLES = {
    "forward": "Forward",
    "forward_backward": "Forward + backward",
    "train_step": "Train step",
}


def compiled_model(collected: Collected, data: pd.DataFrame) -> Table | None:
    """Speed-up of each pass, what the first step cost, and the peak of a step."""
    rows = frames.of(data, topic="model_compile")
    if not len(rows):
        return None
    ratios = frames.against(rows, frames.COMPILED, frames.EAGER)
    used = frames.rows_of(collected, "model_compile")
    asked = used[0].point.settings
    return Table(
        title="The whole model, eager → compiled: median time in ms (speed-up)",
        columns=[
            Column("Size", "left"),
            *(Column(title) for title in TITLES.values()),
            Column("First compiled step (s)"),
            Column("Peak memory"),
        ],
        rows=[
            [str(size), *_compiled(frames.of(rows, size=size), frames.of(ratios, size=size))]
            for size in frames.order(frames.known(rows), "size")
        ],
        caption=f"{caption(used)} Context {used[0].point.parameters['context']}, batch "
        f"{asked['batch']}, {asked['precision']}, {asked['attention']} attention. Forward keeps "
        "what backward needs. The first step compiles, with empty caches."
        f"{left_out(rows, 'size')}",
        sources=sources_of(used),
    )


def _compiled(here: pd.DataFrame, ratios: pd.DataFrame) -> list[str]:
    arms = [frames.of(here, arm=arm) for arm in (frames.EAGER, frames.COMPILED)]
    steps = [frames.of(arm, pass_="train_step") for arm in arms]
    cells = []
    for name in TITLES:
        times = " → ".join(median_cell(frames.of(arm, pass_=name)) for arm in arms)
        ratio = frames.of(ratios, pass_=name)
        cells.append(f"{times} ({speedup_cell(ratio)})" if len(ratio) else times)
    peaks = " → ".join(bytes_cell(step, "peak_memory_bytes") for step in steps)
    return [*cells, seconds_cell(steps[1], "first_step_s"), peaks]


def model(collected: Collected, data: pd.DataFrame) -> Table | None:
    """Time and peak memory of a train step with each attention."""
    rows = frames.of(data, topic="model")
    if not len(rows):
        return None
    there = frames.known(rows)
    base, *others = frames.order(rows, "arm")
    used = frames.rows_of(collected, "model")
    asked = used[0].point.settings
    return Table(
        title="A train step with each attention: median time in ms, and peak memory",
        columns=[
            Column("Size", "left"),
            Column("Context"),
            *(Column(f"{frames.label(arm)} (ms)") for arm in (base, *others)),
            *(Column(f"Speed-up of {frames.label(arm)}") for arm in others),
            *(Column(f"Peak, {frames.label(arm)}") for arm in (base, *others)),
        ],
        rows=[
            [
                str(size),
                str(context),
                *_step(frames.of(rows, size=size, context=context), [base, *others]),
            ]
            for size in frames.order(there, "size")
            for context in frames.order(frames.of(there, size=size), "context")
        ],
        caption=f"{caption(used)} Batch {asked['batch']}, {asked['precision']}. All arms of a row "
        f"in one process, in turns; {WITHIN_NOISE}: within noise.{left_out(rows, 'place')}",
        sources=sources_of(used),
    )


def _step(here: pd.DataFrame, arms: list[str]) -> list[str]:
    base, *others = arms
    parts = {arm: frames.of(here, arm=arm) for arm in arms}
    return [
        *(median_cell(parts[arm]) for arm in arms),
        *(speedup_cell(frames.against(here, arm, base)) for arm in others),
        *(bytes_cell(parts[arm], "peak_memory_bytes") for arm in arms),
    ]
