"""Snapshots become histories with the allocator's block sizes."""

from typing import Any

import pytest

from lmlab.measure.memory.snapshot import block_sizes, history_of, rounded

Frame = dict[str, Any]


def frame(filename: str, line: int = 1, name: str = "f") -> Frame:
    return {"filename": filename, "line": line, "name": name}


def entry(action: str, addr: int, size: int, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, **more}


def alloc(addr: int, size: int, *frames: Frame) -> list[dict[str, Any]]:
    return [entry("alloc", addr, size, frames=list(frames), time_us=100 + addr)]


def free(addr: int, size: int) -> list[dict[str, Any]]:
    return [entry("free_requested", addr, size), entry("free_completed", addr, size)]


def out_of_memory(size: int, device_free: int) -> list[dict[str, Any]]:
    return [{"action": "oom", "size": size, "stream": 0, "device_free": device_free}]


def block(address: int, size: int, requested: int, state: str = "active_allocated") -> Frame:
    return {"address": address, "size": size, "requested_size": requested, "state": state}


def snapshot(trace: list[dict[str, Any]], *blocks: Frame, device: int = 0) -> dict[str, Any]:
    """One segment with the blocks, and the trace of one device."""
    segment = {
        "device": device,
        "address": blocks[0]["address"] if blocks else 0,
        "total_size": sum(b["size"] for b in blocks),
        "blocks": list(blocks),
    }
    return {"segments": [segment], "device_traces": [[] for _ in range(device)] + [trace]}


def test_events_are_allocations_completed_frees_and_failures() -> None:
    segments = [entry("segment_alloc", 0, 2**21), entry("snapshot", 0, 0)]
    trace = [*segments, *alloc(512, 100), *free(512, 100), *out_of_memory(2**34, 2**20)]
    found = history_of(snapshot(trace), 0, max_entries=7)
    assert [(event.kind, event.size, event.address) for event in found.events] == [
        *(("alloc", 100, 512), ("free", 100, 512), ("oom", 2**34, 0))
    ]
    assert not found.dropped
    assert history_of(snapshot(trace), 0, max_entries=6).dropped, "a full buffer has lost events"


def test_devices_are_apart_and_frames_are_optional() -> None:
    waiting = block(1536, 1024, 1000, "active_awaiting_free")
    blocks = [block(512, 512, 100), block(1024, 512, 0, "inactive"), waiting]
    taken = snapshot([entry("alloc", 512, 100)], *blocks, device=1)
    first, second = (history_of(taken, device, max_entries=99) for device in (0, 1))
    assert second.events[0].frames == ()
    assert [(b.address, b.size) for b in second.live_at_end] == [(512, 100), (1536, 1000)]
    assert (first.events, first.live_at_end) == ([], [])


MIB = 2**20
THIRD = 6_815_744  # three of 6.5 MiB fill a segment of 20 MiB

# A trace, the sizes of its blocks, and the segment at the end and the live blocks if unusual.
CASES: dict[str, tuple[Any, ...]] = {
    "a large block keeps a remainder of up to a mebibyte": (
        alloc(0, THIRD) + alloc(THIRD, THIRD) + alloc(2 * THIRD, THIRD),
        *([THIRD, THIRD, 20 * MIB - 2 * THIRD], 20 * MIB, [0, THIRD, 2 * THIRD]),
    ),
    "exactly a mebibyte": (alloc(0, 19 * MIB), [20 * MIB]),
    "more is split off": (alloc(0, 19 * MIB - 512), [19 * MIB - 512]),
    "a small block keeps nothing": (alloc(MIB, MIB - 512), [MIB - 512], 2 * MIB, [MIB]),
    # The second block is older than the trace and freed in it; the first is made before that.
    "free space ends at the next block in use": (
        alloc(0, 4 * MIB) + free(5 * MIB, 100) + free(0, 4 * MIB) + alloc(0, 4 * MIB),
        [5 * MIB, 4 * MIB],
    ),
    "segments come and go": (
        [
            *(alloc(0, 19 * MIB + 512) + free(0, 1)),
            *(entry("segment_free", 0, 20 * MIB), entry("segment_alloc", 0, 32 * MIB)),
            *alloc(0, 19 * MIB + 512),
        ],
        *([20 * MIB, 19 * MIB + 512], 32 * MIB),
    ),
    "expandable segments are split exactly": (
        [entry("segment_map", 0, 20 * MIB), *alloc(0, 19 * MIB + 512)],
        [19 * MIB + 512],
    ),
    "an unknown segment": (alloc(2**40, 5 * MIB), [5 * MIB], 20 * MIB, [2**40]),
}


@pytest.mark.parametrize("case", CASES)
def test_block_sizes_follow_the_allocators_rule(case: str) -> None:
    trace, expected, *unusual = CASES[case]
    segment, live = (*unusual, *(20 * MIB, [0])[len(unusual) :])
    assert block_sizes(trace, {0: segment}, live) == expected
    assert [rounded(size) for size in (0, 1, 512, 513)] == [512, 512, 512, 1024]
