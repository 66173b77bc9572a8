"""Calculations: a model too large for any machine at hand, worked out on paper.

Nothing is measured and no device is used; the formulas are derived in lmlab.planning. The point's
settings are the question (model, devices, mesh) and its records the answer, so that pages read
these numbers like any others.

Records: `parameters`; `state_memory` per part and `state_devices`; `activation_bytes_per_token`;
per number of `tokens` on a device `activation_memory`, `gpus_unsharded`, `fewest_devices` and
`memory_per_device`; `intensity` of the network; `batch_tokens`, the smallest batch at which the
mesh is compute-bound, with messages `hidden` behind computation or `exposed`;
`most_tensor_parallel`; `block_time` per part at the first of these batches; `lever_tokens`,
`lever_fsdp` and `lever_tp` after each `change`; per number of `ranks` the steps and bytes (per byte
of the tensor) of an all-reduce, as a ring and with whole tensors sent around; `bytes_per_parameter`
per recipe and part. For one feed-forward block of three matrices, per `scheme` and `direction`
(forward, backward): `scheme_flops`, `scheme_bytes` that a device sends, `scheme_compute_time` on
one device, `scheme_message_time` and `scheme_devices`, the most that hide the message; with the two
mesh `axes` overlapped or in turn, `split_devices`, `split_fsdp` and `split_tp` of the best split.
"""

import math
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import torch

from lmlab.jobs.outcome import Outcome
from lmlab.measure.records import Record, by_label, value, values, without_value
from lmlab.planning import batch, memory, rings
from lmlab.planning.batch import FeedForward, Mesh, Network, Pass, Scheme
from lmlab.planning.memory import Blocks
from lmlab.study.points import Point

ACTIVATION_SHARE = 0.5
"""Every second layer's activations are sharded with the state."""
BLOCKS = ("d_model", "d_ff", "num_blocks")
MESH = ("fsdp", "tp", "fsdp_axes", "tp_axes")
FP8_BYTES = 1
GATED = 3
"""Matrices of SwiGLU: gate, up and down."""
GB = 1e9


def measure(point: Point, device: torch.device) -> Outcome:
    """Work out the point's question."""
    settings = point.settings
    blocks = Blocks(**{key: settings[key] for key in BLOCKS})
    network = Network(
        flops_per_s=settings["device_flops_per_s"], bytes_per_s=settings["device_bytes_per_s"]
    )
    mesh = Mesh(**{key: settings[key] for key in MESH})
    block = FeedForward(d_model=blocks.d_model, d_ff=blocks.d_ff)
    return Outcome(
        measurements=[
            *memory_records(blocks, settings),
            value("intensity", network.intensity, "FLOP/B"),
            *mesh_records(network, mesh, block),
            *lever_records(network, mesh, block),
            *scheme_records(network, replace(block, matrices=GATED), settings["scheme_tokens"]),
            *(record for ranks in settings["ranks"] for record in ring_records(ranks)),
        ]
    )


def memory_records(blocks: Blocks, settings: Any) -> list[Record]:
    """State and activations of the model, whole and sharded."""
    state = memory.training_state(blocks)
    state_bytes = sum(state.values())
    gpu_bytes = settings["gpu_memory_gb"] * GB
    device_bytes = settings["device_memory_gb"] * GB
    records = [
        value("parameters", blocks.parameters, ""),
        *by_label("state_memory", "part", {**state, "total": state_bytes}),
        value("state_devices", memory.devices_for(state_bytes, gpu_bytes), ""),
        value("activation_bytes_per_token", blocks.activation_bytes_per_token, "B"),
    ]
    for recipe, parts in memory.BYTES_PER_PARAMETER.items():
        counts = {**parts, "total": sum(parts.values())}
        records += by_label("bytes_per_parameter", "part", counts, recipe=recipe)
    for tokens in settings["tokens"]:
        activations = blocks.activation_bytes_per_token * tokens
        unsharded = memory.devices_for(state_bytes + activations, gpu_bytes)
        found = {"activation_memory_bytes": activations, "gpus_unsharded": unsharded}
        records += values(found, tokens=tokens)
        devices = memory.min_devices(state_bytes, activations, device_bytes, share=ACTIVATION_SHARE)
        if devices is None:
            reason = "the unsharded half of the activations alone exceeds a device"
            records.append(without_value("fewest_devices", "unsupported", reason, tokens=tokens))
            continue
        sharded = memory.sharded_bytes(state_bytes, activations, devices, share=ACTIVATION_SHARE)
        records += values(
            {"fewest_devices": devices, "memory_per_device_bytes": sharded}, tokens=tokens
        )
    return records


def mesh_records(network: Network, mesh: Mesh, block: FeedForward) -> list[Record]:
    """The smallest batches at which the mesh is compute-bound, and the times of a block."""
    hidden = batch.min_tokens_overlapped(network, mesh, block)
    exposed = batch.min_tokens_exposed(network, mesh, block)
    most = batch.max_tensor_parallel(network, block, axes=mesh.tp_axes)
    records = [
        value("mesh_devices", mesh.devices, ""),
        value("most_tensor_parallel", most, ""),
        _tokens("batch_tokens", hidden, messages="hidden"),
        _tokens("batch_tokens", exposed, messages="exposed"),
    ]
    if hidden is not None:
        times = batch.block_times(network, mesh, block, hidden)
        for part, seconds in times.items():
            records.append(value("block_time", seconds * 1e3, "ms", part=part))
    return records


def lever_records(network: Network, mesh: Mesh, block: FeedForward) -> list[Record]:
    """The smallest compute-bound batch on the same number of devices, after each single change."""
    axes = {"fsdp_axes": mesh.fsdp_axes, "tp_axes": mesh.tp_axes}
    best = mesh.devices * batch.min_tokens_per_device(network, block, **axes)
    fsdp = batch.best_fsdp(best, mesh.devices, block, **axes)
    wider = replace(mesh, fsdp=mesh.fsdp // 2, tp=mesh.tp * 2)
    stages = replace(mesh, fsdp=mesh.fsdp // 2)  # two stages, each of half the FSDP degree

    def needed(changed: Mesh, **more: float) -> float | None:
        return batch.min_tokens_overlapped(network, changed, block, **more)

    changes = {
        "none": (needed(mesh), mesh),
        "weights gathered in 8 bits": (needed(mesh, weight_bytes=FP8_BYTES), mesh),
        "twice the tensor parallelism": (needed(wider), wider),
        "two pipeline stages": (needed(stages), stages),
        "the best split": (best, replace(mesh, fsdp=fsdp, tp=mesh.devices / fsdp)),
    }
    records = []
    for change, (tokens, changed) in changes.items():
        records.append(_tokens("lever_tokens", tokens, change=change))
        records += values({"fsdp": changed.fsdp, "tp": changed.tp}, "lever_", change=change)
    return records


def scheme_records(network: Network, block: FeedForward, tokens: float) -> list[Record]:
    """Both passes over one block under each scheme, and the best split of two of them."""
    records = []
    for scheme, direction in product(get_args(Scheme), get_args(Pass)):
        labels = {"scheme": scheme, "direction": direction}
        flops = block.flops(tokens, direction)
        sent = batch.message_bytes(block, scheme, direction, tokens)
        most = batch.max_devices(network, block, scheme, direction, tokens)
        records += [
            value("scheme_flops", flops, "FLOP", **labels),
            value("scheme_bytes", sent, "B", **labels),
            value("scheme_compute_time", 1e3 * flops / network.flops_per_s, "ms", **labels),
            value("scheme_message_time", 1e3 * sent / network.bytes_per_s, "ms", **labels),
        ]
        if math.isfinite(most):
            records.append(value("scheme_devices", most, "", **labels))
    for name, overlapped in {"overlapped": True, "in turn": False}.items():
        devices = batch.max_mesh_devices(network, block, tokens, overlapped=overlapped)
        fsdp = batch.best_fsdp(tokens, devices, block)
        split = {"devices": devices, "fsdp": fsdp, "tp": devices / fsdp}
        records += values(split, "split_", axes=name)
    return records


def _tokens(quantity: str, tokens: float | None, **labels: str) -> Record:
    if tokens is None:
        reason = "exchanging activations takes longer than computing at any batch"
        return without_value(quantity, "unsupported", reason, **labels)
    return value(quantity, tokens, "", **labels)


def ring_records(ranks: int) -> list[Record]:
    """Steps, and bytes sent per byte of the tensor, of both ways to all-reduce."""
    records = []
    for way, (steps, sent) in rings.all_reduce(ranks).items():
        numbers = {"all_reduce_steps": steps, "all_reduce_bytes": sent}
        records += [value(name, n, "", ranks=ranks, way=way) for name, n in numbers.items()]
    return records
