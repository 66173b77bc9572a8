"""What the memory measurements say, sentence by sentence."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.findings.memory_checkpointing import best, fits, nesting, price
from lmlab.writeup.findings.memory_counts import (
    out_of_memory,
    outside,
    predictions,
    replayed,
    stream,
    unused,
)
from lmlab.writeup.findings.memory_peaks import (
    SAME_WITHIN,
    composition,
    low_precision,
    stage,
)
from lmlab.writeup.frames import memory as frames
from lmlab.writeup.frames.memory import BASE, LOW, MODES
from lmlab.writeup.numbers import binary_bytes, counted, listed
from lmlab.writeup.places import extreme, place


def findings(collected: Collected) -> dict[str, str]:
    """All findings by name."""
    data = frames.frame(collected)
    arms = frames.arms(collected)
    return {
        "summary": summary(collected, data),
        "modes": modes(collected, data),
        "stage": stage(data),
        "composition": composition(data),
        **{f"precision_{mode}": low_precision(data, mode) for mode in MODES},
        "stream": stream(data),
        "outside": outside(collected),
        "unused": unused(data, collected.device),
        "out_of_memory": out_of_memory(data),
        "replayed": replayed(data),
        "predictions": predictions(data),
        "published": published(collected),
        "checkpointing_fits": fits(arms),
        "checkpointing_best": best(collected, arms),
        "checkpointing_price": price(arms),
        "checkpointing_nested": nesting(collected, arms),
    }


def summary(collected: Collected, data: pd.DataFrame) -> str:
    """The chapter in two sentences, for the abstract."""
    steps = frames.measured(frames.of(data, mode="train_step"))
    if not len(steps):
        return "No training step's memory was measured."
    largest = extreme(steps, "peak_bytes", largest=True)
    text = (
        f"The largest training step ({place(largest)}, {largest['precision']}) peaks at "
        f"{binary_bytes(largest['peak_bytes'])}, in its {largest['peak_phase']} phase."
    )
    both = frames.both_precisions(data, "train_step")
    if not len(both):
        return text
    saves = both[both["peak_bytes_b"] < (1 - SAME_WITHIN) * both["peak_bytes_a"]]
    costs = both[both["peak_bytes_b"] > (1 + SAME_WITHIN) * both["peak_bytes_a"]]
    return (
        f"{text} Against {BASE}, {LOW} autocast lowers the peak of {len(saves) or 'none'} of "
        f"{counted(len(both), 'training step')} and raises {len(costs) or 'none'}."
    )


def modes(collected: Collected, data: pd.DataFrame) -> str:
    """What is recorded, and how."""
    if not len(data):
        return "The study asks for no point of the grid."
    names = listed(MODES[name] for name in frames.order(data, "mode"))
    source = (
        "the caching allocator's own history, with the Python line of every allocation"
        if collected.device == "cuda"
        else "the profiler's memory events, since a CPU has no caching allocator"
    )
    return (
        "Every size, context and precision is recorded in "
        f"{counted(len(frames.order(data, 'mode')), 'mode')}, one after the other in one process: "
        f"{names}. The record is {source}."
    )


def published(collected: Collected) -> str:
    """Why there is no published table, where there is none."""
    if collected.device == "cpu":
        return "The published peaks are of GPUs; those of a CPU have nothing to stand beside."
    return "No size of this study has a published peak."
