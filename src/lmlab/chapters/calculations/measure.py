"""Calculations: a model too large for any machine at hand, worked out on paper.

Nothing is measured, and the device is not touched; formulas and their derivation are in
lmlab.planning. The point's settings are the question (the model, the devices, the mesh), `data` is
the answer, so that the page has these numbers from where it has all others.

`data`: `parameters`; `state_bytes` and `state_devices` (how many devices' memory that is);
`activation_bytes_per_token`; `batches`, for each number of tokens on a device the activations and
the fewest devices to shard over; `intensity` of the network; `mesh`, the batch from which the mesh
computes longer than it talks, with messages `hidden` behind the computation and `exposed`, and the
block's times at the first; `levers`, the same batch after one change each; `rings`, the steps and
the bytes of an all-reduce for each number of ranks, in units of the tensor's size.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from lmlab.jobs.outcome import Outcome
from lmlab.planning import batch, memory, rings
from lmlab.planning.batch import Mesh, Network
from lmlab.planning.memory import Blocks
from lmlab.study.points import Point

ACTIVATION_SHARE = 0.5
"""Every second layer's activations are sharded with the state."""
BLOCKS = ("d_model", "d_ff", "num_blocks")
MESH = ("fsdp", "tp", "fsdp_axes", "tp_axes")
FP8_BYTES = 1
GB = 1e9


def measure(point: Point, device: torch.device) -> Outcome:
    """Work out the point's question."""
    settings = point.settings
    blocks = Blocks(**{key: settings[key] for key in BLOCKS})
    network = Network(
        flops_per_s=settings["device_flops_per_s"], bytes_per_s=settings["device_bytes_per_s"]
    )
    mesh = Mesh(**{key: settings[key] for key in MESH})
    return Outcome(
        data={
            **memory_of(blocks, settings),
            "intensity": network.intensity,
            "mesh": mesh_batch(network, mesh, blocks),
            "levers": levers(network, mesh, blocks.d_ff),
            "rings": [ring_row(ranks) for ranks in settings["ranks"]],
        }
    )


def memory_of(blocks: Blocks, settings: Any) -> dict[str, Any]:
    """State and activations of the model, whole and sharded."""
    state = memory.training_state(blocks)
    gpu_bytes = settings["gpu_memory_gb"] * GB
    device_bytes = settings["device_memory_gb"] * GB
    return {
        "parameters": blocks.parameters,
        "state_bytes": {**asdict(state), "total": state.total},
        "state_devices": memory.devices_for(state.total, gpu_bytes),
        "activation_bytes_per_token": blocks.activation_bytes_per_token,
        "activation_share": ACTIVATION_SHARE,
        "batches": [
            batch_row(blocks, tokens, gpu_bytes, device_bytes) for tokens in settings["tokens"]
        ],
    }


def batch_row(blocks: Blocks, tokens: int, gpu_bytes: float, device_bytes: float) -> dict[str, Any]:
    """What a batch of that many tokens adds, and how many devices then have room."""
    state = memory.training_state(blocks).total
    activations = memory.activation_bytes(blocks, tokens)
    devices = memory.min_devices(state, activations, device_bytes, share=ACTIVATION_SHARE)
    sharded = devices and memory.sharded_bytes(state, activations, devices, share=ACTIVATION_SHARE)
    return {
        "tokens": tokens,
        "activation_bytes": activations,
        "gpus_unsharded": memory.devices_for(state + activations, gpu_bytes),
        "fewest_devices": devices,
        "bytes_a_device": sharded,
    }


def mesh_batch(network: Network, mesh: Mesh, blocks: Blocks) -> dict[str, Any]:
    """From which batch on the mesh computes longer than it talks."""
    hidden = batch.min_tokens_overlapped(network, mesh, d_ff=blocks.d_ff)
    exposed = batch.min_tokens_exposed(network, mesh, d_ff=blocks.d_ff)
    sizes = {"d_model": blocks.d_model, "d_ff": blocks.d_ff}
    times = batch.block_times(network, mesh, tokens=hidden, **sizes) if hidden else None
    return {
        "devices": mesh.devices,
        "tokens_hidden": hidden,
        "tokens_exposed": exposed,
        "most_tensor_parallel": batch.max_tensor_parallel(
            network, d_ff=blocks.d_ff, axes=mesh.tp_axes
        ),
        "block_s": times and asdict(times),
    }


def levers(network: Network, mesh: Mesh, d_ff: int) -> list[dict[str, Any]]:
    """The batch that the same number of devices needs after one change each."""
    fsdp_axes, tp_axes = mesh.fsdp_axes, mesh.tp_axes
    best = mesh.devices * batch.min_tokens_per_device(
        network, d_ff=d_ff, fsdp_axes=fsdp_axes, tp_axes=tp_axes
    )
    fsdp = batch.best_fsdp(best, mesh.devices, d_ff=d_ff, fsdp_axes=fsdp_axes, tp_axes=tp_axes)
    wider = replace(mesh, fsdp=mesh.fsdp // 2, tp=mesh.tp * 2)
    stages = replace(mesh, fsdp=mesh.fsdp // 2)  # two stages of half the FSDP groups each

    def needed(changed: Mesh, **more: float) -> float | None:
        return batch.min_tokens_overlapped(network, changed, d_ff=d_ff, **more)

    return [
        {"change": "none", "tokens": needed(mesh), "fsdp": mesh.fsdp, "tp": mesh.tp},
        {
            "change": "weights_in_8_bits",
            "tokens": needed(mesh, weight_bytes=FP8_BYTES),
            "fsdp": mesh.fsdp,
            "tp": mesh.tp,
        },
        {
            "change": "twice_the_tensor_parallelism",
            "tokens": needed(wider),
            "fsdp": wider.fsdp,
            "tp": wider.tp,
        },
        {
            "change": "two_pipeline_stages",
            "tokens": needed(stages),
            "fsdp": stages.fsdp,
            "tp": stages.tp,
        },
        {"change": "best_split", "tokens": best, "fsdp": fsdp, "tp": mesh.devices / fsdp},
    ]


def ring_row(ranks: int) -> dict[str, Any]:
    """Steps, and bytes for every byte of the tensor, of both ways to all-reduce."""
    return {
        "ranks": ranks,
        "ring_steps": rings.ring_steps(ranks),
        "ring_bytes": rings.ring_bytes(1.0, ranks),
        "gather_steps": rings.gather_steps(ranks),
        "gather_bytes": rings.gather_bytes(1.0, ranks),
    }
