"""The same work measured in two processes: what a ratio across points may be by chance.

Samples of one process share its clocks, its memory and the pace of its host thread, so their
quartiles cannot show how another process would have fared. A study measures some work twice,
though: forward and backward are the same in mode forward_backward and in a training step, and a
cold process at the grid's own warm-up repeats a point of the grid. How far the two medians lie
apart is what a comparison across points adds of itself.

That depends on who sets the pace. A GPU that never idles repeats to a fraction of a per cent; a
host that launches kernels one by one does not. Pairs are therefore taken by the share of the phase
in which the GPU ran anything, the lower share of the two. The largest difference of n pairs is the
tolerance of their class: nothing is assumed about the shape of the noise, and a further pair would
exceed it once in n + 1 times. Under ten pairs that is too often for a bound; what they show still
counts, but the page says that they are few.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from lmlab.writeup.comparison import ACROSS_POINTS
from lmlab.writeup.frames.end_to_end import PHASES_OF_MODE, PLACE, cold, grid, of, pairs

Limit = Literal["gpu", "partly", "host", "unknown"]
LIMITS: tuple[Limit, ...] = ("gpu", "partly", "host", "unknown")
GPU_LIMITED_FROM = 0.95
HOST_LIMITED_BELOW = 0.80
FEWEST_PAIRS = 10


@dataclass(frozen=True)
class Tolerance:
    """What pairs of one class say about a ratio across points."""

    pairs: int = 0
    largest: float = 0.0

    @property
    def margin(self) -> float:
        """By how much two times must differ before the difference means anything."""
        return max(ACROSS_POINTS, self.largest)

    @property
    def few(self) -> bool:
        return self.pairs < FEWEST_PAIRS


def limit_of(busy_share: float) -> Limit:
    """Who sets the pace of a phase; unknown where no busy time was recorded, as on a CPU."""
    if math.isnan(busy_share):
        return "unknown"
    if busy_share >= GPU_LIMITED_FROM:
        return "gpu"
    return "host" if busy_share < HOST_LIMITED_BELOW else "partly"


def repeats(data: pd.DataFrame) -> pd.DataFrame:
    """Every phase that two processes measured, with how far the longer lies above the shorter."""
    rows = of(data, phase=set(PHASES_OF_MODE["train_step"]))
    warm = grid(rows)
    same = [*PLACE, "precision", "attention", "warmup", "phase"]
    modes = pairs(of(warm, mode="forward_backward"), of(warm, mode="train_step"), same)
    starts = pairs(cold(rows), warm, [*same, "mode"])
    modes = modes.assign(process_a="mode forward_backward", process_b="mode train_step")
    starts = starts.assign(process_a="a cold start", process_b="a warm start")
    both = pd.concat([part for part in (modes, starts) if len(part)] or [modes], ignore_index=True)
    medians = both[["median_ms_a", "median_ms_b"]].astype(float)
    shares = both[["busy_share_a", "busy_share_b"]].astype(float).min(axis=1, skipna=False)
    return both.assign(
        difference=medians.max(axis=1) / medians.min(axis=1) - 1,
        limit=pd.Series([limit_of(share) for share in shares], index=both.index, dtype=object),
    )


def tolerances(data: pd.DataFrame) -> dict[Limit, Tolerance]:
    """The tolerance of every class; one without a pair is left with the fixed rule."""
    found = repeats(data)
    return {
        limit: Tolerance(len(here), float(here["difference"].max())) if len(here) else Tolerance()
        for limit in LIMITS
        for here in [of(found, limit=limit)]
    }


def margins(both: pd.DataFrame, allowed: dict[Limit, Tolerance]) -> list[float]:
    """For each pair of arms the tolerance of the less certain one."""
    shares = zip(both["busy_share_a"], both["busy_share_b"], strict=True)
    return [max(allowed[limit_of(share)].margin for share in arms) for arms in shares]
