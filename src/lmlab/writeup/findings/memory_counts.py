"""Whether the books balance: replay, prediction, layers around tensors, and what did not fit."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import memory as frames
from lmlab.writeup.frames.memory import CATEGORIES, MODES
from lmlab.writeup.numbers import (
    binary_bytes,
    counted,
    deviation,
    every,
    percent,
    span,
)
from lmlab.writeup.places import extreme, place

FAR_OFF = 0.10
"""A prediction that misses by more is explained."""
REPLAY_WITHIN = 0.02
NO_LINE = "no line"
"""What the results call the line of an allocation that no line of the program asked for."""


def stream(data: pd.DataFrame) -> str:
    """One residual-stream tensor: derived, and found among the allocations."""
    steps = frames.measured(frames.of(data, mode="train_step"))
    if not len(steps):
        return "The residual stream was not looked for: no training step was measured."
    row = _with_most_streams(steps)
    start = (
        f"One fp32 tensor of the residual stream of {place(row)} is "
        f"{binary_bytes(row['stream_bytes'])}"
    )
    missing = steps[steps["stream_allocated"] == 0]
    if len(missing):
        return (
            f"{start}; at {len(missing)} of {counted(len(steps), 'point')} no allocation has "
            "exactly the derived size."
        )
    return (
        f"{start}: batch × context × d_model × 4 bytes. Allocations of exactly the derived size "
        f"are found in {every(len(steps), 'training step')}. In this one ({row['precision']}) "
        f"there are {row['stream_allocated']:,.0f}{_makers(row['stream_lines'])}; at its peak "
        f"{row['stream_live']:,.0f} tensors of this size are live."
    )


def _with_most_streams(steps: pd.DataFrame) -> pd.Series:
    """Of the largest size, the step with most of them live at its peak; the longest of equals."""
    rows = frames.of(steps, size=frames.shown_size(steps))
    return rows.sort_values(["stream_live", "context"], kind="stable").iloc[-1]


def _makers(lines: Mapping[str, int]) -> str:
    """Who asked for them: autograd, where no line of the program runs, and the busiest line."""
    told = []
    if NO_LINE in lines:
        told.append(
            f"{lines[NO_LINE]:,} without a line of the program (autograd makes them in backward)"
        )
    own = {line: count for line, count in lines.items() if line != NO_LINE}
    if own:
        most = max(own, key=own.__getitem__)
        told.append(f"of the program's own lines most by {most} ({own[most]:,})")
    return f": {', '.join(told)}" if told else ""


def outside(collected: Collected) -> str:
    """What nvidia-smi shows and PyTorch does not."""
    if collected.device != "cuda":
        return "On a CPU there are no layers between the driver and the tensors to tell apart."
    found = [
        mode["accounting"]
        for result in collected.results
        for mode in result.data.get("modes", {}).values()
        if mode.get("accounting")
    ]
    if not found:
        return "What lies outside PyTorch is not known: nothing was measured."
    amounts = [account["outside_pytorch_bytes"] / 2**20 for account in found]
    nccl = (
        "NCCL is part of it"
        if any(account["nccl_is_running"] for account in found)
        else "no NCCL is running in these processes"
    )
    return (
        f"Outside PyTorch's allocator lie {span(amounts)} MiB (CUDA context, kernel images, "
        f"library handles; {nccl}). That, the driver's own reserve, the cache and rounding are the "
        "difference between what nvidia-smi shows and memory_allocated."
    )


def unused(data: pd.DataFrame, device: str) -> str:
    """How much the allocator holds without using it."""
    if device != "cuda":
        return "A CPU's allocator reserves nothing ahead."
    steps = frames.measured(frames.of(data, mode="train_step"))
    steps = steps[steps["reserved_bytes"].notna()]
    if not len(steps):
        return "Reserved memory was not measured."
    steps = steps.assign(free=1 - steps["allocated_bytes"] / steps["reserved_bytes"])
    low, high = (extreme(steps, "free", largest=largest) for largest in (False, True))
    return (
        f"Of what a training step reserves at its peak, {percent(low['free'], 2)} ({place(low)}, "
        f"{low['precision']}) to {percent(high['free'], 2)} ({place(high)}, {high['precision']}) "
        "is never in use at once: the price of blocks that fit no later tensor."
    )


def out_of_memory(data: pd.DataFrame) -> str:
    """What did not fit, what it asked for, and what was live."""
    failed = data[data["status"] == "oom"]
    if not len(failed):
        missing = len(data[~data["status"].isin(["ok", "oom"])])
        if not len(data) or missing:
            return "Of what was measured, nothing ran out of memory." if len(data) else ""
        return f"Nothing ran out of memory: {every(len(data), 'recording')} fit."
    told = [
        f"{MODES[row['mode']]} of {place(row)} in {row['precision']} ({row['reason']})"
        for _, row in failed.iterrows()
    ]
    return f"{counted(len(failed), 'recording')} ran out of memory: {'; '.join(told)}."


def replayed(data: pd.DataFrame) -> str:
    """How well the replay meets the allocator's own counter."""
    rows = frames.measured(data)
    rows = rows[rows["allocated_bytes"].notna()]
    if not len(rows):
        return (
            "There is no allocator's counter to hold the replay against."
            if len(frames.measured(data))
            else "Nothing was replayed."
        )
    rows = rows.assign(off=(rows["replayed_bytes"] / rows["allocated_bytes"] - 1).abs())
    if not rows["off"].any():
        return (
            "The replayed peak is max_memory_allocated to the byte for "
            f"{every(len(rows), 'recording')}."
        )
    worst = extreme(rows, "off", largest=True)
    beyond = rows[rows["off"] > REPLAY_WITHIN]
    verdict = (
        f"within {percent(REPLAY_WITHIN, 1)} for {every(len(rows), 'recording')}"
        if not len(beyond)
        else f"off by more than {percent(REPLAY_WITHIN, 1)} for {len(beyond)} of "
        f"{counted(len(rows), 'recording')}"
    )
    return (
        f"The replayed peak meets max_memory_allocated {verdict}; the largest difference is "
        f"{percent(worst['off'], 2)} ({MODES[worst['mode']]} of {place(worst)}, "
        f"{worst['precision']})."
    )


def predictions(data: pd.DataFrame) -> str:
    """How far the cost model is off, and where it is far off, by which category."""
    rows = frames.measured(data)
    rows = rows[rows["error"].notna()]
    if not len(rows):
        return "The cost model makes no prediction for what was measured."
    low, high = rows["error"].min(), rows["error"].max()
    text = (
        f"The cost model's peak is off by {deviation(low)} to {deviation(high)} over "
        f"{counted(len(rows), 'recording')}"
    )
    far = rows[rows["error"].abs() > FAR_OFF]
    if not len(far):
        return f"{text}: nowhere by more than {percent(FAR_OFF, 2)}. {_same_phase(rows)}"
    told = [
        f"{MODES[row['mode']]} of {place(row)}, {row['precision']}: "
        f"{deviation(row['error'])}, most of it {_culprit(row)}"
        for _, row in far.iterrows()
    ]
    return f"{text}. By more than {percent(FAR_OFF, 2)} for {'; '.join(told)}. {_same_phase(rows)}"


def _same_phase(rows: pd.DataFrame) -> str:
    """Whether the model also knows where the peak is."""
    same = rows[rows["peak_phase"] == rows["predicted_phase"]]
    if len(same) == len(rows):
        return "It puts every peak into the phase in which it is measured."
    return (
        f"It puts {len(same)} of {counted(len(rows), 'peak')} into the phase in which they are "
        "measured."
    )


def _culprit(row: pd.Series) -> str:
    """The category in which prediction and measurement differ most."""
    differences = {
        name: row[f"predicted_{name}"] - row[f"live_{name}"]
        for name in CATEGORIES
        if not math.isnan(row[f"predicted_{name}"]) and not math.isnan(row[f"live_{name}"])
    }
    if not differences:
        return "in no category that is known"
    # A prediction that is too low misses something; the category must err in the same direction.
    same = {n: d for n, d in differences.items() if d * row["error"] > 0} or differences
    name = max(same, key=lambda name: abs(same[name]))
    return (
        f"{CATEGORIES[name]} (predicted {binary_bytes(row[f'predicted_{name}'])}, measured "
        f"{binary_bytes(row[f'live_{name}'])})"
    )
