"""Hand-made memory snapshots in torch's format."""

from __future__ import annotations

from typing import Any

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
