"""The race of the variants in tables: a short one on limits, a long one a precision and pass."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from lmlab.writeup.collect import Collected, Row, sources_of
from lmlab.writeup.comparison import FEW_SAMPLES_APART, FEWEST_SAMPLES
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.frames.race import fastest, losses
from lmlab.writeup.numbers import listed, percent, significant
from lmlab.writeup.table import NOTHING, Column, Table
from lmlab.writeup.tables.attention_cells import caption, left_out, median_cell, speedup_cell

PASSES = frames.PASSES["benchmark"]
TITLES = {"forward": "Forward", "backward": "Backward", "both": "Forward and backward"}


def races(collected: Collected, data: pd.DataFrame) -> dict[str, Table]:
    """Medians of all variants: one table a precision and pass."""
    rows = frames.of(data, topic="benchmark")
    return {
        f"race_{precision}_{name}": _race(collected, rows, precision, name)
        for precision in frames.order(rows, "precision")
        for name in PASSES
    }


def _race(collected: Collected, rows: pd.DataFrame, precision: str, name: str) -> Table:
    here = frames.of(rows, precision=precision, pass_=name)
    arms, there = frames.arms_of(here), frames.known(here)
    used = _used(collected, precision)
    return Table(
        title=f"{TITLES[name]}, {precision}, causal: median time in ms",
        columns=[
            Column("Head dim"),
            Column("Sequence"),
            *(Column(frames.label(arm)) for arm in arms),
        ],
        rows=[
            [
                str(head_dim),
                f"{sequence:,}",
                *(
                    median_cell(frames.of(here, head_dim=head_dim, sequence=sequence, arm=arm))
                    for arm in arms
                ),
            ]
            for head_dim in frames.order(there, "head_dim")
            for sequence in frames.order(frames.of(there, head_dim=head_dim), "sequence")
        ],
        caption=f"{caption(used)} Batch {used[0].point.settings['batch']}, one head. All of a row "
        f"in one process, in turns. {_words(here)}{left_out(here, 'shape')}",
        sources=sources_of(used),
    )


def _words(here: pd.DataFrame) -> str:
    """What a cell without a time means, of those that there are."""
    shapes = here.groupby("arm")["sequence"].count()
    meanings = {
        f"{NOTHING}: not asked for at this shape.": shapes.nunique() > 1,
        "Failed: gave wrong numbers or broke, as the head of this chapter says.": (
            here["status"].eq("failed").any()
        ),
    }
    told = [words for words, there in meanings.items() if there]
    told += [_reasons(here, status) for status in ("unsupported", "oom", "capped")]
    return " ".join(filter(None, told))


def _reasons(here: pd.DataFrame, status: str) -> str:
    """Why arms have no time, those of one reason together; of several reasons of an arm one."""
    found: dict[str, list[str]] = {}
    for arm, part in frames.of(here, status=status).groupby("arm", sort=False):
        found.setdefault(_reason(part, status), []).append(frames.label(str(arm)))
    told = [f"{listed(names)} ({reason.rstrip('.')})" for reason, names in found.items()]
    word = frames.STATUSES[status]
    return f"{word[0].upper()}{word[1:]}: {'; '.join(told)}." if told else ""


def _reason(part: pd.DataFrame, status: str) -> str:
    """Of an arm over its cap that of the first sequence, since each has its own number."""
    first = part.sort_values("sequence").iloc[0]
    told = str(first["reason"]).rstrip(".")
    where = f"at sequence {first['sequence']:,} " if status == "capped" else ""
    return f"{where}{told}"


def lost(collected: Collected, data: pd.DataFrame) -> Table | None:
    """Every shape and pass at which another variant is faster than ours, the worst first."""
    rows = frames.of(data, topic="benchmark")
    others = [arm for arm in frames.arms_of(rows) if arm != frames.OURS]
    slower = losses(rows, frames.OURS, others)
    if not len(slower):
        return None
    used = frames.rows_of(collected, "benchmark")
    return Table(
        title="Where another variant is faster than ours beyond noise",
        columns=[
            *(Column("Precision", "left"), Column("Head dim"), Column("Sequence")),
            *(Column("Pass", "left"), Column("Variant", "left")),
            *(Column("Its time (ms)"), Column("Ours (ms)"), Column("Speed-up of ours")),
        ],
        rows=[
            [
                *(row["precision"], str(row["head_dim"]), f"{row['sequence']:,}"),
                *(TITLES[row["pass"]].lower(), frames.label(row["other"])),
                *(significant(row["median_ms_a"]), significant(row["median_ms_b"])),
                speedup_cell(slower.loc[[index]]),
            ]
            for index, row in slower.sort_values("speedup").iterrows()
        ],
        caption=f"{caption(used)} Medians of variants that took turns in one process. Of fewer "
        f"than {FEWEST_SAMPLES} samples, a difference counts from "
        f"{percent(FEW_SAMPLES_APART, 1)} on.",
        sources=sources_of(used),
    )


def limits(collected: Collected, data: pd.DataFrame) -> Table | None:
    """What our kernels reach at the longest sequence, beside the best of the others."""
    rows = frames.of(data, topic="benchmark")
    ours = frames.measured(frames.of(rows, arm=frames.OURS))
    if not len(ours):
        return None
    body = [
        _limit(collected, rows, precision, head_dim)
        for precision in frames.order(ours, "precision")
        for head_dim in frames.order(frames.of(ours, precision=precision), "head_dim")
    ]
    used = frames.rows_of(collected, "benchmark")
    card = [f"results/{collected.machine}/machine.json"] if collected.card else []
    return Table(
        title="Our kernels at the longest sequence measured: TFLOP/s (best other variant)",
        columns=[
            Column("Precision", "left"),
            Column("Head dim"),
            Column("Sequence"),
            *(Column(TITLES[name]) for name in PASSES),
            Column("Both, of measured matmul"),
        ],
        rows=body,
        caption=f"{caption(used)} Rates count the unmasked half alone: two products forward, five "
        "backward. Measured matmul: the fastest product of this precision on this machine. In fp32 "
        "that is no bound: our kernels may put a product together from several on tensor cores.",
        sources=[*sources_of(used), *card],
    )


def _limit(collected: Collected, rows: pd.DataFrame, precision: str, head_dim: int) -> list[str]:
    here = frames.of(rows, precision=precision, head_dim=head_dim)
    longest = max(frames.measured(frames.of(here, arm=frames.OURS))["sequence"])
    here = frames.of(here, sequence=longest)
    ceiling = collected.ceiling("ceilings", "matmul_tflops", precision, "tflops")
    both = frames.measured(frames.of(here, arm=frames.OURS, pass_="both"))
    share = percent(both["tflops"].iloc[0] / ceiling) if ceiling and len(both) else "no ceiling"
    cells = [_rate(frames.of(here, pass_=name)) for name in PASSES]
    return [precision, str(head_dim), f"{longest:,}", *cells, share]


def _rate(here: pd.DataFrame) -> str:
    ours = median_cell(frames.of(here, arm=frames.OURS), "tflops")
    best = fastest(here, without=[frames.OURS])
    if not len(best):
        return ours
    row = best.iloc[0]
    return f"{ours} ({frames.label(row['arm'])} {significant(row['tflops'])})"


def _used(collected: Collected, precision: str) -> Sequence[Row]:
    return [
        row
        for row in frames.rows_of(collected, "benchmark")
        if row.point.parameters["precision"] == precision
    ]
