"""What the pages about jobs of several ranks share: who took part, and what needs more GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmlab.report.frame import Results, Rows, distinct, select

BACKENDS = {"nccl": "NCCL", "gloo": "gloo"}
PLACEMENTS = {"own_gpu": "{} GPUs", "shared_gpu": "{} ranks on one GPU", "cpu": "{} CPU ranks"}


def with_ranks(rows: Rows, results: Results, labels: Sequence[str]) -> Rows:
    """The rows with a column `ranks`, which names the process group of a point: "2 CPU ranks
    over gloo". Backend and device are what the group itself reported, not what was asked for.
    The columns of `labels` exist even if nothing was measured."""
    reported = {
        source: describe(result.data["ranks"])
        for source, result in results.results.items()
        if "ranks" in result.data
    }
    asked = [
        reported.get(source) or PLACEMENTS[placement].format(world_size)
        for source, placement, world_size in rows[["source", "placement", "world_size"]].itertuples(
            index=False, name=None
        )
    ]
    missing = [label for label in labels if label not in rows]
    return rows.assign(ranks=asked, **dict.fromkeys(missing))


def describe(group: Mapping[str, Any]) -> str:
    """A process group in a few words."""
    count, gpus = group["world_size"], group["gpus"]
    if group["device"] == "cpu":
        who = f"{count} CPU rank" + "s" * (count > 1)
    elif gpus == count:
        who = f"{count} GPU" + "s" * (count > 1)
    else:
        who = f"{count} ranks on {'one GPU' if gpus == 1 else f'{gpus} GPUs'}"
    nodes = f" on {group['nnodes']} nodes" if group["nnodes"] > 1 else ""
    return f"{who}{nodes} over {BACKENDS.get(group['backend'], group['backend'])}"


def measured(rows: Rows) -> Rows:
    """Rows of the points that ran: a group that could not start needs no column of its own."""
    return rows[rows["quantity"].notna()]


def not_started(rows: Rows) -> list[dict[str, Any]]:
    """Groups that this machine could not start, with the reason; one entry per point."""
    found = select(rows[rows["quantity"].isna()], status=["unsupported", "failed", "oom"])
    keys = ["ranks", "placement", "world_size", "status", "reason"]
    return [dict(zip(keys, values, strict=True)) for values in distinct(found, keys)]
