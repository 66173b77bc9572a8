"""Very large models on paper: memory, devices, compute-bound batches, ring all-reduce."""

from lmlab.report.frame import Results, Rows, combine, derived
from lmlab.report.table import Table, quantity

TITLE = "Calculations"
PARTS = {"master_weights": "weights", "optimizer": "moments"}


def derive(rows: Rows, results: Results) -> Rows:
    """Add batches per device; with pipeline stages, those of one stage."""
    batch = {"quantity": "batch_tokens"}
    rows = derived(rows, "batch_per_device", batch, lambda f: f.value / f.fsdp / f.tp)
    parts, on = {n: {"quantity": f"lever_{n}"} for n in ("tokens", "fsdp", "tp")}, ["change"]
    return combine(rows, "lever_per_device", parts, lambda p: p.tokens / (p.fsdp * p.tp), on=on)


TABLES = {
    "state": Table(
        title="Training state in fp32: weights, gradients and two AdamW moments",
        rows=["part"],
        data=lambda rows: rows.replace({"part": PARTS}),
        columns={"GB": quantity("state_memory", "GB")},
    ),
    "recipes": Table(
        title="Bytes per parameter that training with AdamW keeps",
        rows=["recipe"],
        where={"quantity": "bytes_per_parameter"},
        columns={"{part}": quantity("bytes_per_parameter", "integer")},
    ),
    "schemes": Table(
        title="One block of three matrices: what a pass computes and sends, and the most devices "
        "whose messages are hidden",
        rows=["scheme", "direction"],
        headers={"direction": "pass"},
        columns={
            "TFLOP": quantity("scheme_flops", "TFLOP"),
            "MB sent": quantity("scheme_bytes", "MB"),
            "compute, one device (ms)": quantity("scheme_compute_time", "ms"),
            "message (ms)": quantity("scheme_message_time", "ms"),
            "most devices": quantity("scheme_devices"),
        },
    ),
    "splits": Table(
        title="Best split of FSDP and tensor parallelism, three matrices, one axis each",
        rows=["axes"],
        columns={
            "most devices": quantity("split_devices", "integer"),
            "FSDP": quantity("split_fsdp"),
            "TP": quantity("split_tp"),
        },
    ),
    "batches": Table(
        title="Devices needed by tokens per device",
        rows=["tokens"],
        headers={"tokens": "tokens per device"},
        columns={
            "activations (GB)": quantity("activation_memory", "GB"),
            "GPUs' worth of memory": quantity("gpus_unsharded", "integer"),
            "fewest devices, sharded": quantity("fewest_devices", "integer"),
            "GB per device": quantity("memory_per_device", "GB"),
        },
    ),
    "mesh": Table(
        title="Tokens from which the mesh is compute-bound",
        rows=["messages"],
        columns={
            "tokens in all": quantity("batch_tokens", "ceiling"),
            "tokens per device": quantity("batch_per_device", "ceiling"),
        },
    ),
    "levers": Table(
        title="Smallest compute-bound batch on the same number of devices, after one change; two "
        "pipeline stages: half the devices each; tokens per micro-batch, of at least two",
        rows=["change"],
        columns={
            "FSDP": quantity("lever_fsdp"),
            "TP": quantity("lever_tp"),
            "tokens": quantity("lever_tokens", "ceiling"),
            "tokens per device": quantity("lever_per_device", "ceiling"),
        },
    ),
    "rings": Table(
        title="All-reduce as a ring and with whole tensors sent around: steps, and bytes that each "
        "rank sends per byte of the tensor",
        rows=["ranks"],
        columns={
            "ring: steps": quantity("all_reduce_steps", "integer", way="ring"),
            "bytes": quantity("all_reduce_bytes", way="ring"),
            "whole tensors: steps": quantity("all_reduce_steps", "integer", way="whole tensors"),
            "bytes ": quantity("all_reduce_bytes", way="whole tensors"),
        },
    ),
}
