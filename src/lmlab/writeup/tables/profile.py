"""Tables of the profile chapter."""

from __future__ import annotations

from lmlab.writeup.collect import Collected
from lmlab.writeup.table import Table
from lmlab.writeup.tables import profile_attention, profile_kernels, profile_timeline


def tables(collected: Collected) -> dict[str, Table]:
    """All tables by name; those that may be long are one a size and mode."""
    return {
        "clock": profile_timeline.clock(collected),
        **profile_timeline.host(collected),
        **profile_timeline.slow_ranges(collected),
        "top": profile_kernels.top(collected),
        **profile_kernels.full(collected),
        "others": profile_kernels.others(collected),
        "families": profile_kernels.families(collected),
        **profile_kernels.cores(collected),
        "parts": profile_attention.summary(collected),
        **profile_attention.details(collected),
    }
