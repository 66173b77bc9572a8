"""Where the peak comes, what it is made of, and what 16 bit do to it."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from lmlab.writeup.frames import memory as frames
from lmlab.writeup.frames.memory import BASE, CATEGORIES, LOW, MODES
from lmlab.writeup.numbers import binary_bytes, counted, every, listed, percent
from lmlab.writeup.places import extreme, place, where

# Two peaks that differ by less are the same: blocks of an allocator fall as they happen to.
SAME_WITHIN = 0.01


def stage(data: pd.DataFrame) -> str:
    """Which phase of a train step holds the peak, precision by precision."""
    steps = frames.measured(frames.of(data, mode="train_step"))
    if not len(steps):
        return "Which stage is the peak is not known: no training step was measured."
    parts = [
        _stages(frames.of(steps, precision=precision), precision)
        for precision in frames.order(steps, "precision")
    ]
    return " ".join(parts)


def _stages(steps: pd.DataFrame, precision: str) -> str:
    phases = frames.order(steps, "peak_phase")
    if len(phases) == 1:
        return (
            f"In {precision} the peak of {every(len(steps), 'training step')} lies in the "
            f"{phases[0]} phase."
        )
    told = [
        f"in the {phase} phase for {where(part, steps)}"
        for phase in phases
        if len(part := steps[steps["peak_phase"] == phase])
    ]
    return f"In {precision} the peak lies {listed(told)}."


def composition(data: pd.DataFrame) -> str:
    """What dominates the train step's peak at both ends of the study."""
    steps = frames.measured(frames.of(data, mode="train_step"))
    if not len(steps):
        return "What the peak consists of is not known: no training step was measured."
    size = frames.shown_size(steps)
    told = []
    for precision in frames.order(steps, "precision"):
        rows = frames.of(steps, size=size, precision=precision).sort_values("context")
        if len(rows):
            ends = [rows.iloc[0]] if len(rows) == 1 else [rows.iloc[0], rows.iloc[-1]]
            told.append(f"in {precision} {listed(_largest_part(row) for row in ends)}")
    return f"The largest part of the peak of a training step of {size} is {'; '.join(told)}."


def _largest_part(row: pd.Series) -> str:
    total = sum(row[f"live_{name}"] for name in CATEGORIES)
    name = max(CATEGORIES, key=lambda name: row[f"live_{name}"])
    share = percent(row[f"live_{name}"] / total, 2)
    return f"{CATEGORIES[name]} at context {row['context']} ({share})"


def low_precision(data: pd.DataFrame, mode: str) -> str:
    """Whether bf16 autocast saves memory in a mode, from which context on, and what it costs."""
    both = frames.both_precisions(data, mode)
    name = MODES[mode].capitalize()
    if not len(both):
        return f"{name}: no place was measured in both {BASE} and {LOW}."
    both = both.assign(ratio=both["peak_bytes_b"] / both["peak_bytes_a"])
    saves = both[both["ratio"] < 1 - SAME_WITHIN]
    costs = both[both["ratio"] > 1 + SAME_WITHIN]
    parts = [
        _group(saves, both, f"{LOW} takes less", largest=False),
        _group(costs, both, f"{LOW} takes more", largest=True),
    ]
    same = len(both) - len(saves) - len(costs)
    if same == len(both):
        verdict = f"{LOW} and {BASE} peak at the same height within {percent(SAME_WITHIN, 1)}"
    else:
        told = [part for part in parts if part]
        if same:
            told.append(f"the same within {percent(SAME_WITHIN, 1)} at {counted(same, 'place')}")
        verdict = "; ".join(told)
    return f"{name}: {verdict}.{_begins(saves, both)}{_why(both)}"


def _group(rows: pd.DataFrame, both: pd.DataFrame, claim: str, *, largest: bool) -> str:
    if not len(rows):
        return ""
    most = extreme(rows, "ratio", largest=largest)
    change = percent(abs(most["ratio"] - 1), 2)
    return (
        f"{claim} at {len(rows)} of {counted(len(both), 'place')} ({where(rows, both)}), by up to "
        f"{change} ({place(most)})"
    )


def _begins(saves: pd.DataFrame, both: pd.DataFrame) -> str:
    """The context at which it starts to save, for the largest size; that needs both cases."""
    size = frames.shown_size(both)
    contexts = sorted(both["context"][both["size"] == size])
    saving = sorted(saves["context"][saves["size"] == size])
    if len(contexts) < 2:
        return ""
    if not saving:
        return f" For {size} it never saves up to context {contexts[-1]}."
    if saving == contexts:
        return f" For {size} it saves at every context."
    if saving == contexts[-len(saving) :]:
        return f" For {size} it starts to save at context {saving[0]}."
    return f" For {size} it saves at context {listed(map(str, saving))} only."


def _why(both: pd.DataFrame) -> str:
    """What autocast adds and what it takes away, at the ends of the largest size's contexts."""
    size = frames.shown_size(both)
    rows = both[both["size"] == size].sort_values("context")
    ends: Sequence[pd.Series] = [rows.iloc[0], rows.iloc[-1]] if len(rows) > 1 else [rows.iloc[0]]
    told = [f"at context {row['context']} {_balance(row)}" for row in ends]
    return (
        f" Weights stay in {BASE} and autocast adds 16-bit copies of them: for {size}, "
        f"{listed(told)}."
    )


def _balance(row: pd.Series) -> str:
    """Copies against activations; an update of the weights has neither."""
    if row["peak_phase_b"] == "optimizer":
        return "the peak is the optimizer's, when the copies are gone"
    copies = binary_bytes(row["live_weight_copies_b"])
    return f"the copies are {copies} and activations and workspace {_change(row)}"


def _change(row: pd.Series) -> str:
    before, after = (
        row[f"live_activations{arm}"] + row[f"live_workspace{arm}"] for arm in ("_a", "_b")
    )
    if after == before:
        return "stay as they are"
    word = "fall" if after < before else "grow"
    return f"{word} by {binary_bytes(abs(after - before))}"
