"""Published attention times beside ours: the naive formula, and a sweep over sequences.

They stand there to give a scale. What an author does not state (precision, batch, heads) is said to
be so; ours is filled in for every precision, as nobody knows which one theirs is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from lmlab.writeup.collect import Collected, sources_of
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.numbers import significant
from lmlab.writeup.references import NOT_STATED, published_attention
from lmlab.writeup.table import NOTHING, Column, Table

HEAD_DIM = 64
BATCH = 8
"""Of the naive attention that publications time."""
FILE = "attention.csv"
MOST_SEQUENCES = 6
"""Of more, every other one: ten pairs of numbers side by side are not read."""


def published_naive(collected: Collected, data: pd.DataFrame) -> Table | None:
    """Forward and backward of naive attention, eager and compiled."""
    theirs = published_attention(collected.references, HEAD_DIM)
    theirs = theirs[theirs["batch"].eq(str(BATCH)) & theirs["phase"].isin(["forward", "backward"])]
    ours = frames.of(data, topic="naive", head_dim=HEAD_DIM)
    sequences = _shared(ours, theirs)
    if collected.device != "cuda" or not sequences:
        return None
    body = [
        [
            collected.device_name,
            "this page",
            arm,
            *_ours(ours, arm, ("forward", "backward"), sequences, "mean_ms"),
        ]
        for arm in (frames.NAIVE, frames.COMPILED)
    ]
    body += _theirs(theirs, ("forward", "backward"), sequences)
    return Table(
        title=f"Published beside measured: naive attention, batch {BATCH}, head dim {HEAD_DIM}, "
        "forward / backward in ms",
        columns=_columns(sequences),
        rows=sorted(body, key=lambda row: row[2] != frames.NAIVE),
        caption="One column a sequence, means. Publications are numbered as in report/references "
        "and do not state their precision; publication 002 gives seconds for a number of passes "
        "that is taken to be 100.",
        sources=[*sources_of(frames.rows_of(collected, "naive")), f"report/references/{FILE}"],
    )


def published_race(collected: Collected, data: pd.DataFrame) -> Table | None:
    """Forward, and forward with backward, of causal attention over a sweep of sequences."""
    passes = ("forward", "forward_backward")
    theirs = published_attention(collected.references, HEAD_DIM)
    theirs = theirs[theirs["causal"].eq("yes") & theirs["phase"].isin(passes)]
    ours = frames.of(data, topic="benchmark", head_dim=HEAD_DIM)
    sequences = _shared(ours, theirs)
    if collected.device != "cuda" or not sequences:
        return None
    body = [
        [
            collected.device_name,
            "this page",
            f"{frames.label(arm)}, {precision}",
            *_ours(
                frames.of(ours, precision=precision),
                arm,
                ("forward", "both"),
                sequences,
                "median_ms",
            ),
        ]
        for precision in frames.order(ours, "precision")
        for arm in (frames.NAIVE, frames.OURS)
    ]
    return Table(
        title=f"Published beside measured: causal attention, head dim {HEAD_DIM}, forward / "
        "forward and backward in ms",
        columns=_columns(sequences),
        rows=[*body, *_theirs(theirs, passes, sequences)],
        caption="One column a sequence; ours are medians, batch 1, one head. Publications are "
        "numbered as in report/references and state neither precision, batch nor heads here.",
        sources=[*sources_of(frames.rows_of(collected, "benchmark")), f"report/references/{FILE}"],
    )


def _columns(sequences: Sequence[int]) -> list[Column]:
    names = [Column(title, "left") for title in ("GPU", "Publication", "Attention")]
    return [*names, *(Column(f"{sequence:,}") for sequence in sequences)]


def _shared(ours: pd.DataFrame, theirs: pd.DataFrame) -> list[int]:
    known = set(theirs["sequence"])
    shared = [sequence for sequence in frames.order(ours, "sequence") if str(sequence) in known]
    return shared if len(shared) <= MOST_SEQUENCES else shared[::2]


def _ours(
    ours: pd.DataFrame, arm: str, passes: Sequence[str], sequences: Sequence[int], value: str
) -> list[str]:
    return [_our_cell(frames.of(ours, arm=arm, sequence=s), passes, value) for s in sequences]


def _our_cell(here: pd.DataFrame, passes: Sequence[str], value: str) -> str:
    if not len(here):
        return NOTHING
    if not len(frames.measured(here)):
        return frames.STATUSES[here["status"].iloc[0]]
    parts = [frames.of(here, pass_=name).iloc[0] for name in passes]
    return " / ".join(
        frames.STATUSES[part["status"]] if math.isnan(part[value]) else significant(part[value])
        for part in parts
    )


def _theirs(
    theirs: pd.DataFrame, passes: Sequence[str], sequences: Sequence[int]
) -> list[list[str]]:
    body = []
    for key, part in theirs.groupby(["source", "gpu", "implementation"], sort=True):
        source, gpu, name = (str(value) for value in key)
        arm = {"eager": frames.NAIVE}.get(name, name)
        body.append([gpu, source, arm, *(_their_cell(part, passes, s) for s in sequences)])
    return body


def _their_cell(part: pd.DataFrame, passes: Sequence[str], sequence: int) -> str:
    here = part[part["sequence"] == str(sequence)]
    times = [here["ms"][here["phase"] == name] for name in passes]
    if not any(len(time) for time in times):
        return NOT_STATED
    return " / ".join(significant(float(t.iloc[0])) if len(t) else NOT_STATED for t in times)
