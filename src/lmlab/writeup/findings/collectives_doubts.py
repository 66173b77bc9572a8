"""What the numbers of the collectives do not carry: cases not begun, and times that scatter."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.comparison import FEWEST_SAMPLES
from lmlab.writeup.frames import collectives as frames
from lmlab.writeup.frames.collectives import MIB, OPERATIONS
from lmlab.writeup.numbers import binary_bytes, counted, listed
from lmlab.writeup.tables.collectives import FEW, NOISY, NOT_BEGUN


def cut(every: pd.DataFrame) -> str:
    """What had no time left, and what there is of the largest size all the same."""
    missing = every[every["cut"]]
    if not len(missing):
        return ""
    smallest = frames.asked_for(missing["size_bytes"].min())
    return (
        f"A job has {frames.time_caps(missing)} for all its cases, and one is begun only if its "
        f"fewest repetitions fit into what is left: {_counts_of(every, 'case')} "
        f"{_verb(len(missing), 'was', 'were')} not begun, none below {smallest}; their cells say "
        f"“{NOT_BEGUN}”. {_left_at_the_largest(every)}"
    ).rstrip()


def gap(every: pd.DataFrame) -> str:
    """The same for the abstract's count of what has no number; no sentence of its own."""
    missing = every[every["cut"]]
    if not len(missing):
        return ""
    verb = _verb(len(missing), "was", "were")
    return f"{_counts_of(every, 'exchange')} {verb} not begun for want of time"


def noise(data: pd.DataFrame) -> str:
    """How many times scatter, or are too few to show whether they do, and at which sizes."""
    sent, halves = frames.between_ranks(data), frames.halves(data)
    if not len(sent):
        return "No case between ranks was timed."
    noisy, few = sent["noisy"], frames.has_few_samples(sent)
    told = []
    if noisy.any():
        told.append(
            f"{noisy.sum()} {_verb(noisy.sum(), 'is', 'are')} noisy ({NOISY} in the tables: "
            f"{frames.NOISY_MEANS}), {_by_half(sent, noisy, halves)}"
        )
    if few.any():
        told.append(
            f"{few.sum()} {_verb(few.sum(), 'has', 'have')} {frames.samples(sent[few]['n'])} "
            f"({FEW}), {_by_half(sent, few, halves)}"
        )
    if not told:
        return (
            f"None of the {counted(len(sent), 'timed case')} between ranks is noisy or has fewer "
            f"than {FEWEST_SAMPLES} samples."
        )
    return f"Of {counted(len(sent), 'timed case')} between ranks, {'; '.join(told)}."


def noisy_inside(data: pd.DataFrame) -> str:
    """What a result's own flag leaves out, for the appendix."""
    sent = frames.between_ranks(data)
    count = sent["noisy"].sum()
    if not count:
        return ""
    return (
        f"A result of collectives raises the flag noisy for its largest {_kind(data)} alone; of "
        f"{counted(len(sent), 'timed case')} between ranks, {count} {_verb(count, 'is', 'are')}."
    )


def _counts_of(every: pd.DataFrame, noun: str) -> str:
    """Cases cut of all there are; those of one rank, which sends nothing, for themselves."""
    kinds = {
        "between ranks": frames.between_ranks(every),
        "of one rank": frames.of(every, world_size=1),
    }
    return listed(
        f"{cases['cut'].sum()} of {counted(len(cases), noun)} {words}"
        for words, cases in kinds.items()
        if cases["cut"].any()
    )


def _left_at_the_largest(every: pd.DataFrame) -> str:
    """Which exchanges of the largest size were timed; the first is let ahead of the others."""
    sent = frames.between_ranks(every)
    sizes = sent["size_bytes"].map(frames.nominal_mib)
    largest = sent[sizes == sizes.max()]
    if not largest["cut"].any():
        return ""
    where = f"At the largest size ({frames.asked_for(largest.iloc[0]['size_bytes'])})"
    kinds = [part for _, part in largest.groupby(["operation", "dtype"], sort=False)]
    timed_kinds = [part for part in kinds if len(frames.measured(part))]
    if not timed_kinds:
        return f"{where} nothing was timed between ranks."
    verb = _verb(len(timed_kinds), "was", "were")
    told = f"{where} only {listed(map(_kind_timed, timed_kinds))} {verb} timed between ranks"
    first = _kind(sent)
    if first not in map(_kind, timed_kinds):
        return f"{told}."
    it = "it" if len(timed_kinds) == 1 else first
    return f"{told}: {it} is let ahead of the others on purpose."


def _kind(part: pd.DataFrame) -> str:
    """The operation and format of the first case, and with it of all that are alike."""
    return f"{OPERATIONS[part.iloc[0]['operation']].lower()} in {part.iloc[0]['dtype']}"


def _kind_timed(part: pd.DataFrame) -> str:
    there = len(frames.measured(part))
    some = f" ({there} of {counted(len(part), 'set')} of ranks)" if there < len(part) else ""
    return f"{_kind(part)}{some}"


def _verb(count: float, one: str, several: str) -> str:
    return one if count == 1 else several


def _by_half(sent: pd.DataFrame, marked: pd.Series, halves: tuple[list[int], list[int]]) -> str:
    """`95 of 128 up to 16 MiB and 55 of 120 from 64 MiB on`."""
    sizes = sent["size_bytes"].map(frames.nominal_mib)
    inside = [sizes.isin(half) for half in halves]
    words = [up_to(halves), from_on(halves)]
    return listed(
        f"{marked[half].sum() or 'none'} of {half.sum()} {word}"
        for half, word in zip(inside, words, strict=True)
        if half.any()
    )


def up_to(halves: tuple[list[int], list[int]]) -> str:
    """The small sizes in words."""
    return f"up to {binary_bytes(halves[0][-1] * MIB)}" if halves[0] else ""


def from_on(halves: tuple[list[int], list[int]]) -> str:
    """The large sizes in words."""
    return f"from {binary_bytes(halves[1][0] * MIB)} on"
