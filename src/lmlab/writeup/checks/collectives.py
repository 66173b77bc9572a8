"""Exchanges that cannot be: faster than their path allows, or as fast for any size."""

from __future__ import annotations

import pandas as pd

from lmlab.writeup.collect import Collected
from lmlab.writeup.frames import collectives as frames
from lmlab.writeup.frames.collectives import OPERATIONS
from lmlab.writeup.numbers import binary_bytes, significant, times
from lmlab.writeup.places import extreme

GLOO_LIMIT_GB_PER_S = 64.0
"""Through the host: one thread copies no faster, and no PCIe slot carries more."""
SIZES_APART = 64
TIMES_APART = 2.0


def checks(collected: Collected) -> list[str]:
    """Bandwidths that a backend can have, times that grow, and the worlds that were asked for."""
    data = frames.measured(frames.frame(collected.rows))
    return [*_impossible(collected, data), *_sizeless(data), *_other_worlds(collected)]


def _impossible(collected: Collected, data: pd.DataFrame) -> list[str]:
    """Bus bandwidth above what lies between the ranks."""
    copied = collected.ceiling("ceilings", "copy_gb_per_s", "gb_per_s")
    # A copy counts what is read and what is written; what arrives is only written.
    limits = {"gloo": GLOO_LIMIT_GB_PER_S, "nccl": None if copied is None else copied / 2}
    warnings = []
    for _, row in data.iterrows():
        limit = limits.get(row["backend"])
        if limit is not None and row["bus_gb_per_s"] > limit:
            warnings.append(
                f"{OPERATIONS[row['operation']]} of {binary_bytes(row['size_bytes'])} in "
                f"{row['dtype']} with {row['arm']} has a bus bandwidth of "
                f"{significant(row['bus_gb_per_s'])} GB/s; its path carries at most "
                f"{significant(limit)}."
            )
    return warnings


def _sizeless(data: pd.DataFrame) -> list[str]:
    """Times that hardly grow with the size are those of something else than an exchange."""
    warnings = []
    several = data[data["world_size"] > 1]
    for _, part in several.groupby(frames.KIND, sort=False):
        small, large = (extreme(part, "size_bytes", largest=most) for most in (False, True))
        grown = large["median_ms"] / small["median_ms"]
        if large["size_bytes"] >= SIZES_APART * small["size_bytes"] and grown < TIMES_APART:
            warnings.append(
                f"{OPERATIONS[large['operation']]} in {large['dtype']} with {large['arm']}: "
                f"{binary_bytes(large['size_bytes'])} take only {times(grown)} as long as "
                f"{binary_bytes(small['size_bytes'])}."
            )
    return warnings


def _other_worlds(collected: Collected) -> list[str]:
    """A process group of another size than the point asks for."""
    return [
        f"{row.point.label()} was measured by {row.result.data['ranks']['world_size']} ranks."
        for row in collected.rows
        if row.result is not None
        and row.status == "ok"
        and row.result.data["ranks"]["world_size"] != row.point.parameters["world_size"]
    ]
