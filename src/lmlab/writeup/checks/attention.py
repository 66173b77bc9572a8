"""Numbers of the attention chapter that must fit each other."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.numbers import binary_bytes, counted, percent, significant
from lmlab.writeup.places import extreme
from lmlab.writeup.tables.attention_account import MOMENTS
from lmlab.writeup.tables.attention_tiles import CHOSEN

# The allocator rounds every tensor up to 512 bytes, and large ones to 2 MiB.
ACCOUNT_WITHIN = 0.05
ACCOUNT_WITHIN_BYTES = 32 * 2**20
# Backward alone keeps its graph; together with forward it need not. Below a tenth of a
# millisecond launching counts as much as work.
SUM_WITHIN = 0.25
SUM_FROM_MS = 0.1
# A time that is noisy itself contradicts nothing.
NOISY_ABOVE = 0.10
FEWEST_SAMPLES = 5
# The same kernels in two processes.
SAME_WITHIN = 0.10


def checks(collected: Collected) -> list[str]:
    """A warning for everything that contradicts something else."""
    data = frames.frame(collected)
    return [
        *memory_as_accounted(collected),
        *passes_add_up(data),
        *below_peak(collected, data),
        *same_kernels_twice(data),
    ]


def memory_as_accounted(collected: Collected) -> list[str]:
    """What naive attention holds is what the formula says it holds."""
    off, tried = [], 0
    for row in frames.rows_of(collected, "naive"):
        if row.result is None or "account" not in row.result.data:
            continue
        arm = row.result.data["arms"].get(frames.NAIVE, {})
        found = {when: arm.get(key) for when, key in MOMENTS.items()}
        for when, measured in found.items():
            total = sum(tensor["bytes"] for tensor in row.result.data["account"][when])
            allowed = max(ACCOUNT_WITHIN * total, ACCOUNT_WITHIN_BYTES)
            tried += measured is not None
            if measured is not None and abs(measured - total) > allowed:
                off.append((abs(measured / total - 1), row.point.label(), when, measured, total))
    if not off:
        return []
    _, place, when, measured, total = max(off)
    return [
        f"In {len(off)} of {counted(tried, 'case')} naive attention holds another amount of memory "
        f"than the formula says: {place}, {when.replace('_', ' ')}, where the allocator counted "
        f"{binary_bytes(measured)} and the formula asks for {binary_bytes(total)}, is the worst."
    ]


def passes_add_up(data: pd.DataFrame) -> list[str]:
    """Forward and backward together take about as long as one after the other."""
    race = frames.measured(frames.of(data, topic={"benchmark", "leaderboard"}))
    quiet = race[
        (race["n"] >= FEWEST_SAMPLES)
        & (race["q3_ms"] - race["q1_ms"] < NOISY_ABOVE * race["median_ms"])
    ]
    keys = ["topic", "precision", "head_dim", "sequence", "arm"]
    table = quiet.pivot(index=keys, columns="pass", values="median_ms")
    if not {"forward", "backward", "both"} <= set(table.columns):
        return []
    table = table.dropna().assign(parts=lambda rows: rows["forward"] + rows["backward"])
    table = table.assign(off=(table["both"] / table["parts"] - 1).abs()).reset_index()
    off = table[(table["both"] >= SUM_FROM_MS) & (table["off"] > SUM_WITHIN)]
    if not len(off):
        return []
    worst = extreme(off, "off", largest=True)
    return [
        f"In {len(off)} of {counted(len(table), 'case')} forward and backward take another time "
        f"together than one by one: {frames.label(worst['arm'])}, {worst['precision']}, head dim "
        f"{worst['head_dim']}, sequence {worst['sequence']:,} ({worst['topic']}), "
        f"{significant(worst['both'])} ms against {significant(worst['parts'])} ms, is the worst."
    ]


def below_peak(collected: Collected, data: pd.DataFrame) -> list[str]:
    """Nothing multiplies faster than the hardware can."""
    warnings = []
    rates = data[data["tflops"].notna() & data["precision"].notna()]
    for _, row in rates.iterrows():
        name = str(row["precision"])
        # fp32 digits can be put together from TF32 products, at a third of their rate.
        peaks = [collected.ceiling("peaks", "tflops", name)]
        tf32 = collected.ceiling("peaks", "tflops", "tf32")
        peaks += [tf32 / 3] if name == "fp32" and tf32 else []
        known = [peak for peak in peaks if peak is not None]
        if known and row["tflops"] > max(known):
            warnings.append(
                f"{frames.label(row['arm'])} {row['pass']}, {name}, head dim {row['head_dim']}: "
                f"{significant(row['tflops'])} TFLOP/s is above the stated peak of "
                f"{significant(max(known))}."
            )
    return warnings


def same_kernels_twice(data: pd.DataFrame) -> list[str]:
    """The tiles that the table chooses take the same time in both topics that time them."""
    board = frames.measured(frames.of(data, topic="leaderboard", arm=frames.OURS))
    tiles = frames.measured(frames.of(data, topic="tiles", arm=CHOSEN))
    both = board.merge(
        tiles, on=["head_dim", "sequence", "heads", "precision", "pass"], suffixes=("_a", "_b")
    )
    return [
        f"Our {row['pass']} at head dim {row['head_dim']} takes {significant(row['median_ms_a'])} "
        f"ms at the published shape and {significant(row['median_ms_b'])} ms among the tiles, "
        f"{percent(abs(row['median_ms_a'] / row['median_ms_b'] - 1), 2)} apart."
        for _, row in both.iterrows()
        if abs(row["median_ms_a"] / row["median_ms_b"] - 1) > SAME_WITHIN
    ]
