"""Tables of the chapter on paper: each number beside the formula that gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmlab.study.results import Result
from lmlab.writeup.collect import Collected, sources_of
from lmlab.writeup.frames import calculations as frames
from lmlab.writeup.numbers import exact, factor, significant
from lmlab.writeup.table import NOTHING, STATUS_CELLS, Column, Table
from lmlab.writeup.tables.on_this_machine import here, rings_here, tokens_cell

GB = 1e9
CHANGES = {
    "none": "none",
    "weights_in_8_bits": "weights gathered in 8 bits",
    "twice_the_tensor_parallelism": "twice the tensor parallelism",
    "two_pipeline_stages": "two pipeline stages, a stage's micro-batches sharing one gather",
    "best_split": "the best split",
}


def tables(collected: Collected) -> dict[str, Table]:
    """All tables by name; without the chapter's result each says so."""
    found = frames.answer(collected)
    makers = {
        "memory": memory,
        "sharding": sharding,
        "mesh": mesh,
        "levers": levers,
        "rings": rings,
    }
    return {
        **{name: make(collected, found) for name, make in makers.items()},
        "here": here(collected, found),
        "rings_here": rings_here(collected),
    }


def memory(collected: Collected, found: Result | None) -> Table:
    """Bytes of the training state and of a token's activations."""
    rows: list[list[str]] = []
    if found is not None:
        state, per_token = found.data["state_bytes"], found.data["activation_bytes_per_token"]
        gpu = found.settings["gpu_memory_gb"] * GB
        rows = [
            ["parameters P", "L · 2 D F", f"{found.data['parameters']:,}", NOTHING, NOTHING],
            _bytes_row("master weights, fp32", "4 P", state["master_weights"], gpu),
            _bytes_row("gradients, fp32", "4 P", state["gradients"], gpu),
            _bytes_row("AdamW's moments, fp32", "2 · 4 P", state["optimizer"], gpu),
            _bytes_row("training state", "16 P", state["total"], gpu),
            _bytes_row("activations of a token, bf16", "L · 2 (D + F)", per_token, gpu),
        ]
    gpu_gb = exact(found.settings["gpu_memory_gb"]) if found else ""
    return _table(
        collected,
        found,
        title=f"Memory of the model, in GPUs of {gpu_gb} GB" if found else "Memory of the model",
        columns=["Part", "Formula", "Count", "GB", "GPUs"],
        rows=rows,
        caption=f"{_model(found)} GB are 10⁹ bytes.",
    )


def _bytes_row(what: str, formula: str, count: float, gpu: float) -> list[str]:
    return [what, formula, f"{count:,.0f}", significant(count / GB, 4), significant(count / gpu)]


def sharding(collected: Collected, found: Result | None) -> Table:
    """The fewest devices that hold the state and a batch's activations."""
    batches: Sequence[Mapping[str, Any]] = found.data["batches"] if found else ()
    rows = [
        [
            f"{row['tokens']:,}",
            significant(row["activation_bytes"] / GB, 4),
            str(row["gpus_unsharded"]),
            _or_none(row["fewest_devices"], "{:,}"),
            NOTHING if row["bytes_a_device"] is None else significant(row["bytes_a_device"] / GB),
        ]
        for row in batches
    ]
    caption, unsharded = "", "GPUs, unsharded"
    if found is not None:
        unsharded = f"{exact(found.settings['gpu_memory_gb'])}-GB GPUs, unsharded"
        device, share = found.settings, found.data["activation_share"]
        caption = (
            f"Devices of {exact(device['device_memory_gb'])} GB ({device['device_name']}); the "
            f"share s = {share:g} of the activations is sharded with the state."
        )
    return _table(
        collected,
        found,
        title="Sharded over N devices: N ≥ (16 P + s A) / (memory − (1 − s) A)",
        columns=["Tokens a device", "Activations A (GB)", unsharded, "Fewest N", "GB each"],
        rows=rows,
        caption=caption,
    )


def mesh(collected: Collected, found: Result | None) -> Table:
    """From which batch on the mesh computes longer than it talks."""
    rows: list[list[str]] = []
    caption = ""
    if found is not None:
        values, device = found.data["mesh"], found.settings
        count = values["devices"]
        rows = [
            ["operations while a byte travels", "C / W", significant(found.data["intensity"], 4)],
            ["most tensor parallelism that hides", "M_y F / (C/W)",
             significant(values["most_tensor_parallel"])],
            ["tokens of the whole batch, messages hidden", "X (C/W) / M_x",
             tokens_cell(values["tokens_hidden"])],
            ["tokens a device, messages hidden", "(C/W) / (M_x Y)",
             tokens_cell(values["tokens_hidden"], count)],
            ["tokens of the whole batch, messages exposed",
             "X (C/W) / M_x / (1 − Y (C/W) / (M_y F))", tokens_cell(values["tokens_exposed"])],
            ["tokens a device, messages exposed", "the same / N",
             tokens_cell(values["tokens_exposed"], count)],
        ]  # fmt: skip
        shape = frames.mesh_of(found)
        caption = (
            f"{device['device_name']}: C = {significant(device['device_flops_per_s'] / 1e12)} "
            f"TFLOP/s, W = {significant(device['device_bytes_per_s'] / GB)} GB/s an axis; X = "
            f"{shape.fsdp} devices of FSDP over M_x = {shape.fsdp_axes} axes, Y = "
            f"{shape.tp} of TP over M_y = {shape.tp_axes}, N = {shape.devices}. Forward pass, bf16."
        )
    return _table(
        collected,
        found,
        title="The batch from which the mesh is compute-bound",
        columns=["Quantity", "Formula", "Value"],
        rows=rows,
        caption=caption,
    )


def levers(collected: Collected, found: Result | None) -> Table:
    """The batch after one change each."""
    rows: list[list[str]] = []
    if found is not None:
        before = found.data["mesh"]["tokens_hidden"]
        rows = [
            [
                CHANGES[row["change"]],
                f"{exact(row['fsdp'])} × {exact(row['tp'])}",
                tokens_cell(row["tokens"]),
                tokens_cell(row["tokens"], row["fsdp"] * row["tp"]),
                factor(row["tokens"] / before) if row["tokens"] and before else NOTHING,
            ]
            for row in found.data["levers"]
        ]
    return _table(
        collected,
        found,
        title="What lowers the batch that is needed",
        columns=["Change", "FSDP × TP", "Tokens", "Tokens a device", "Of before"],
        rows=rows,
        caption="The same number of devices, messages hidden. Tokens a device: of the FSDP × TP "
        "devices that share the batch, in a pipeline those of one stage. The best split need not "
        "be whole.",
    )


def rings(collected: Collected, found: Result | None) -> Table:
    """Steps and bytes of both ways to all-reduce."""
    rows = [
        [
            str(row["ranks"]),
            str(row["ring_steps"]),
            significant(row["ring_bytes"]),
            str(row["gather_steps"]),
            significant(row["gather_bytes"]),
            factor(row["gather_bytes"] / row["ring_bytes"]),
        ]
        for row in (found.data["rings"] if found else ())
    ]
    return _table(
        collected,
        found,
        title="All-reduce as a ring, and with whole tensors passed around",
        columns=[
            "Ranks n", "Ring: steps", "sent, of the size", "Whole: steps", "sent, of the size",
            "More bytes",
        ],
        rows=rows,
        caption="Ring: 2 (n − 1) steps of 1/n. Without the reduce-scatter: n − 1 steps of the "
        "whole tensor, added up on arrival.",
    )  # fmt: skip


def _table(
    collected: Collected,
    found: Result | None,
    *,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str,
) -> Table:
    """A table of the chapter's own result, or its status."""
    status = STATUS_CELLS[collected.rows[0].status] if collected.rows and not found else NOTHING
    left = {"Part", "Formula", "Quantity", "Change"}
    return Table(
        title=title,
        columns=[Column(name, "left" if name in left else "right") for name in columns],
        rows=rows or [[status, *[NOTHING] * (len(columns) - 1)]],
        caption=caption,
        sources=sources_of(collected.rows),
    )


def _model(found: Result | None) -> str:
    if found is None:
        return ""
    blocks = frames.blocks_of(found)
    return (
        f"L = {blocks.num_blocks} blocks of two linear layers, D = {blocks.d_model:,} and "
        f"F = {blocks.d_ff:,}, no bias; backward needs the input of each layer."
    )


def _or_none(value: int | None, shown: str) -> str:
    return "none" if value is None else shown.format(value)
