"""Tables of the machine: its card, and what it reaches against what its maker states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lmlab.writeup.caption import describe
from lmlab.writeup.collect import Collected, sources_of
from lmlab.writeup.numbers import binary_bytes, percent, significant
from lmlab.writeup.table import NOTHING, STATUS_CELLS, Column, Table

COPY = "copy"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


# Field of the card, how it is called, how its value is printed; what the card lacks is left out.
FACTS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("name", "Device", str),
    ("gpu_count", "GPUs", _whole),
    ("compute_capability", "Compute capability", str),
    ("sms", "Streaming multiprocessors", _whole),
    ("warp_size", "Warp size", _whole),
    ("registers_per_sm", "Registers per multiprocessor", _whole),
    ("registers_per_block", "Registers per block", _whole),
    ("shared_memory_per_sm_bytes", "Shared memory per multiprocessor", binary_bytes),
    ("shared_memory_per_block_bytes", "Shared memory per block", binary_bytes),
    ("shared_memory_per_block_optin_bytes", "Shared memory per block, opt-in", binary_bytes),
    ("l2_bytes", "L2 cache", binary_bytes),
    ("memory_bytes", "Device memory", binary_bytes),
    ("driver", "Driver", str),
    ("power_limit_w", "Power limit", lambda watts: f"{watts:g} W"),
    ("clocks_mhz", "Clocks when read, and highest", lambda clocks: _clocks(clocks)),
    ("cpu", "Processor", lambda cpu: _processor(cpu)),
    ("os", "System", str),
)


def tables(collected: Collected) -> dict[str, Table]:
    """The card and the ceilings."""
    return {"card": card(collected), "ceilings": ceilings(collected)}


def card(collected: Collected) -> Table:
    """What the machine is."""
    values = {} if collected.card is None else collected.card.data["card"]
    body = [
        [label, show(values[key])]
        for key, label, show in FACTS
        if values.get(key) is not None and not (key == "gpu_count" and values[key] == 0)
    ]
    return Table(
        title="Machine card",
        columns=[Column("What", "left"), Column("Value", "left")],
        rows=body or [["Machine card", _status(collected)]],
        caption="As PyTorch, NVML and the system report it; what they do not tell is left out.",
        sources=sources_of(collected.rows),
    )


def ceilings(collected: Collected) -> Table:
    """The fastest product of each precision and the fastest copy, against the stated peak."""
    body = [] if collected.card is None else _measured(collected, collected.card.data["ceilings"])
    source = collected.ceiling("peaks", "source")
    stated = f"Stated: {source}." if source else "No sourced peaks for this device, hence no share."
    return Table(
        title="Measured ceilings beside stated peaks",
        columns=[
            Column("What", "left"),
            Column("Measured"),
            Column("Shape or bytes"),
            Column("Stated peak"),
            Column("Share"),
        ],
        rows=body or [["Ceilings", _status(collected), *[NOTHING] * 3]],
        caption=f"{describe(collected.results)} Random operands; a copy counts bytes read and "
        f"written. {stated}",
        sources=sources_of(collected.rows),
    )


def _measured(collected: Collected, ceilings: Mapping[str, Any]) -> list[list[str]]:
    matmuls = [_matmul(collected, name, row) for name, row in ceilings["matmul_tflops"].items()]
    return [*matmuls, _copy(collected, ceilings["copy_gb_per_s"])]


def _matmul(collected: Collected, name: str, row: Mapping[str, Any]) -> list[str]:
    peak = collected.ceiling("peaks", "tflops", name)
    if row["tflops"] is None:
        return [
            f"matmul {name}",
            row.get("reason") or "no reason given",
            NOTHING,
            *_peak(peak, None),
        ]
    measured = f"{significant(row['tflops'], 3)} TFLOP/s"
    shape = " × ".join(str(side) for side in row["shape"])
    return [f"matmul {name}", measured, shape, *_peak(peak, row["tflops"])]


def _peak(peak: float | None, measured: float | None, unit: str = "TFLOP/s") -> list[str]:
    if peak is None:
        return ["not known", NOTHING]
    share = NOTHING if measured is None else percent(measured / peak, 3)
    return [f"{peak:,.10g} {unit}", share]


def _copy(collected: Collected, row: Mapping[str, Any]) -> list[str]:
    peak = collected.ceiling("peaks", "memory_tb_per_s")
    peak_gb = None if peak is None else 1000 * peak
    if row["gb_per_s"] is None:
        return [
            COPY,
            row.get("reason") or "no reason given",
            NOTHING,
            *_peak(peak_gb, None, "GB/s"),
        ]
    measured = f"{significant(row['gb_per_s'], 3)} GB/s"
    return [COPY, measured, binary_bytes(row["bytes"]), *_peak(peak_gb, row["gb_per_s"], "GB/s")]


def _clocks(clocks: Mapping[str, Any]) -> str:
    parts = [
        f"{name} {clocks[name]} of {clocks.get(f'{name}_max')} MHz"
        for name in ("sm", "memory")
        if clocks.get(name) is not None
    ]
    return ", ".join(parts) or "not told"


def _processor(cpu: Mapping[str, Any]) -> str:
    return (
        f"{cpu['model']}, {cpu['architecture']}, {cpu['usable_cores']} of "
        f"{cpu['logical_cores']} logical cores usable, {binary_bytes(cpu['memory_bytes'])} memory"
    )


def _status(collected: Collected) -> str:
    return STATUS_CELLS.get(
        collected.rows[0].status if collected.rows else "missing", "not measured"
    )
