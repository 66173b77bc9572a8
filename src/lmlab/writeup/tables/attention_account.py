"""The memory of naive attention tensor by tensor, beside what the allocator counted.

Two shapes are worth it: the smallest that did not fit, because it says why, and the largest that
did, because there the account can be held against a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmlab.writeup.collect import Collected, Row, sources_of
from lmlab.writeup.frames import attention as frames
from lmlab.writeup.numbers import binary_bytes, percent
from lmlab.writeup.table import NOTHING, Column, Table

MOMENTS = {
    "forward": "forward_peak_memory_bytes",
    "before_backward": "memory_before_backward_bytes",
    "peak": "peak_memory_bytes",
}


def accounts(collected: Collected) -> dict[str, Table]:
    """The smallest shape that did not fit and the largest that did, those that there are."""
    chosen = {
        "account_too_large": smallest_without_room(collected),
        "account_largest": largest_with_room(collected),
    }
    return {name: _account(row) for name, row in chosen.items() if row is not None}


def smallest_without_room(collected: Collected) -> Row | None:
    """The shape with the fewest scores among those that ran out of memory."""
    full = [row for row in _accounted(collected) if arm_of(row).get("status") == "oom"]
    return min(full, key=_size, default=None)


def largest_with_room(collected: Collected) -> Row | None:
    """The shape with the most scores among those that ran."""
    ran = [row for row in _accounted(collected) if arm_of(row).get("status") == "ok"]
    return max(ran, key=_size, default=None)


def account_of(row: Row) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """The tensors at both moments."""
    assert row.result is not None, "rows without a result were left out"
    account: Mapping[str, Sequence[Mapping[str, Any]]] = row.result.data["account"]
    return account


def arm_of(row: Row) -> Mapping[str, Any]:
    """What the eager arm noted."""
    assert row.result is not None, "rows without a result were left out"
    arm: Mapping[str, Any] = row.result.data["arms"].get(frames.NAIVE, {})
    return arm


def setup(used: Sequence[Row]) -> str:
    """What all shapes share."""
    settings = used[0].point.settings
    mask = "causal mask" if settings["causal"] else "no mask"
    return f"Batch {settings['batch']}, no heads, {settings['precision']}, {mask}."


def _accounted(collected: Collected) -> list[Row]:
    rows = frames.rows_of(collected, "naive")
    return [row for row in rows if row.result is not None and "account" in row.result.data]


def _size(row: Row) -> tuple[int, int]:
    return int(row.point.parameters["sequence"]), int(row.point.parameters["head_dim"])


def _account(row: Row) -> Table:
    held, arm = account_of(row), arm_of(row)
    sums = [sum(tensor["bytes"] for tensor in held[when]) for when in MOMENTS]
    found = [_against(arm, key, total) for key, total in zip(MOMENTS.values(), sums, strict=True)]
    shape = row.point.parameters
    is_full = arm.get("status") == "oom"
    fits, why = ("does not fit", f" ({arm['reason']})") if is_full else ("fits", "")
    return Table(
        title=f"Memory of naive attention tensor by tensor: head dim {shape['head_dim']}, "
        f"sequence {shape['sequence']:,}, which {fits}",
        columns=[
            *(Column("Tensor", "left"), Column("Shape"), Column("Peak in forward")),
            *(Column("Before backward"), Column("Peak in backward")),
        ],
        rows=[
            *_tensors(held),
            ["sum", NOTHING, *(binary_bytes(total) for total in sums)],
            ["measured", NOTHING, *found],
        ],
        caption=f"{setup([row])} By the formula; measured: what the allocator counted{why}.",
        sources=sources_of([row]),
    )


def _tensors(held: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[list[str]]:
    """Every tensor of any moment, in the order in which they come."""
    every = {tensor["tensor"]: tensor for when in MOMENTS for tensor in held[when]}
    there = [{tensor["tensor"] for tensor in held[when]} for when in MOMENTS]
    return [
        [
            name,
            " × ".join(f"{length:,}" for length in tensor["shape"]),
            *(binary_bytes(tensor["bytes"]) if name in names else NOTHING for names in there),
        ]
        for name, tensor in every.items()
    ]


def _against(arm: Mapping[str, Any], key: str, total: int) -> str:
    counted = arm.get(key)
    if counted is not None:
        return f"{binary_bytes(counted)} ({percent(counted / total)} of the sum)"
    return "OOM" if arm.get("status") == "oom" else "not counted"
