"""Results of the chapters of several ranks, as a machine with one GPU, or a CPU, would leave them.

Times follow the chapters' own models of a link, with a small fixed wave from round to round, so
that every share, fit and verdict is known beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.overhead_model import added_ms
from tests.writeup import factory

BYTES_PER_MS, CALL_MS = 2e6, 0.5
SILENT_MS, BACKWARD_MS = 120.0, 80.0
MIB = 2**20
PARAMETERS = 128_625_408
WAVE = 0.004


def ranks(point: Point, device: str) -> dict[str, Any]:
    """What the process group says of itself."""
    placement, world = str(point.parameters["placement"]), int(point.parameters["world_size"])
    gpus = {"own_gpu": world, "shared_gpu": 1, "cpu": 0}[placement]
    return {
        "backend": "nccl" if placement == "own_gpu" else "gloo", "world_size": world,
        "device": device, "gpus": gpus, "nnodes": 1, "threads": 1,
    }  # fmt: skip


def result(
    point: Point, device: str, data: Mapping[str, Any], times: Mapping[str, Sequence[float]]
) -> Result:
    """A result of a job; on a machine with one GPU nobody gets a GPU of his own."""
    if point.parameters["placement"] == "own_gpu":
        world = point.parameters["world_size"]
        return factory.failed(point, "unsupported", f"needs {world} GPUs, 1 found", device)
    measurements = {name: factory.measurement(list(samples)) for name, samples in times.items()}
    common = {"tf32": False, "threads": 1, "profiler": "torch profiler 2.11.0"}
    everything = {**common, **data, "ranks": ranks(point, device)}
    return factory.result(point, device, measurements=measurements, data=everything)


def by_rank(ms: float, rounds: int, world: int, phase: float = 0.0) -> list[list[float]]:
    """Step times of every rank: a wave over rounds, the last rank a little later."""
    return [
        [ms * (1 + WAVE * math.sin(1.7 * i + phase)) * (1 - 0.01 * (world - 1 - rank))
         for i in range(rounds)]
        for rank in range(world)
    ]  # fmt: skip


def slowest(ranks_ms: Sequence[Sequence[float]]) -> list[float]:
    return [max(times) for times in zip(*ranks_ms, strict=True)]


def trace(share: float | None, messages: int, ms: float) -> dict[str, Any]:
    """A step with one compute interval, and messages of which a share lies within it."""
    end = 100.0
    start = end if share is None else end - share * ms
    return {
        "compute_ms": end, "communication_ms": 0.0 if share is None else ms,
        "overlapped_ms": 0.0 if share is None else share * ms, "overlapped_share": share,
        "overlapped_share_by_rank": [share, share], "messages_seen": messages,
        "seen_as": None if share is None else "gloo's messages",
        "intervals_ms": {
            "compute": [[0.0, end]],
            "communication": [] if share is None else [[start, start + ms]],
            "copies": [] if share is None else [[start, start + 1.0]],
        },
    }  # fmt: skip


def choice(size: str, left_out: Sequence[Mapping[str, str]] = ()) -> dict[str, Any]:
    return {
        "size": size, "all_reduce_gb_per_s": 2.0, "step_s": 0.4, "over_limit": False,
        "left_out": list(left_out),
    }  # fmt: skip


def messages_of(name: str) -> int:
    """A bucket of so many MB holds so many of the gradient's bytes."""
    if name in ("naive", "overlapped"):
        return 111
    if name == "flat":
        return 1
    size = float(name.removeprefix("bucketed_")) * MIB
    return max(1, min(111, math.ceil(4 * PARAMETERS / size)))


def arm_added_ms(name: str) -> float:
    hide = 0.0 if name in ("naive", "flat") else BACKWARD_MS
    number = messages_of("bucketed_25" if name == "torch_ddp" else name)
    return added_ms(4 * PARAMETERS, number, hide, bytes_per_ms=BYTES_PER_MS, call_ms=CALL_MS)


def data_parallel(point: Point, device: str = "cuda", torch_ratio: float = 1.0) -> Result:
    """Every variant on a link of 2 GB/s; PyTorch's takes `torch_ratio` times ours."""
    settings, world = point.settings, int(point.parameters["world_size"])
    rounds = settings["rounds"]
    ours = [f"bucketed_{size:g}" for size in settings["bucket_sizes_mb"]]
    arms: dict[str, Any] = {}
    for index, name in enumerate(["alone", "naive", "flat", "overlapped", *ours, "torch_ddp"]):
        talks = name != "alone"
        ms = SILENT_MS + (arm_added_ms(name) if talks else 0.0)
        ms *= torch_ratio if name == "torch_ddp" else 1.0
        number = 0 if not talks else None if name == "torch_ddp" else messages_of(name)
        share = None if not talks else 0.0 if name in ("naive", "flat") else 0.25
        arms[name] = {
            "status": "ok", "reason": None, "gradient_error": 1e-8 if talks else None,
            "messages": number, "message_bytes": number and 4 * PARAMETERS,
            "largest_message_bytes": number and 4 * PARAMETERS // number,
            "ranks_ms": by_rank(ms, rounds, world, phase=0.2 * index),
            "trace": trace(share, number or 21, 4 * PARAMETERS / BYTES_PER_MS),
        }  # fmt: skip
    data = {
        "choice": choice(
            settings["sizes"][-1]["size"],
            [{"size": one["size"], "reason": "its messages alone take about 4 s"}
             for one in settings["sizes"][:-1]],
        ),
        "step_limit_s": 2.0, "parameters_total": PARAMETERS, "gradient_bytes": 4 * PARAMETERS,
        "tokens_per_rank": 2048, "torch_bucket_mb": settings["torch_bucket_mb"],
        "phases_ms": {"forward": [30.0] * rounds, "backward": [BACKWARD_MS] * rounds,
                      "optimizer": [10.0] * rounds, "total": [SILENT_MS] * rounds},
        "arms": arms,
    }  # fmt: skip
    return result(point, device, data, {n: slowest(arm["ranks_ms"]) for n, arm in arms.items()})


def moments(
    device: str, *, parameters: int, gradients: int, state: int, activations: int = 900 * MIB
) -> dict[str, Any]:
    """Readings of one rank; the allocator keeps what it has, the device adds a context."""
    stages = {
        "initialised": (0, 0, 0),
        "after_forward": (0, 0, activations),
        "before_step": (gradients, 0, 0),
        "after_step": (gradients, state, 0),
    }
    readings, reserved = {}, 0
    for index, (name, (held, kept, saved)) in enumerate(stages.items()):
        allocated = parameters + held + kept + saved + 2 * MIB
        reserved = max(reserved, allocated + 20 * MIB) + 4 * MIB * index
        parts = {
            "parameters": parameters, "gradients": held, "optimizer_state": kept,
            "activations": saved, "other": 2 * MIB,
        }  # fmt: skip
        readings[name] = {
            "allocated_bytes": allocated, "reserved_bytes": reserved if device == "cuda" else None,
            "device_bytes": reserved + 600 * MIB, "device_scope": "process", "parts_bytes": parts,
        }  # fmt: skip
    peaks = {"forward_backward": None, "optimizer": None}
    return {"moments": readings, "peaks_bytes": peaks, "loss": 9.2}


def sharded_optimizer(point: Point, device: str = "cuda", zero_ratio: float = 1.5) -> Result:
    """State cut by the ranks; PyTorch's step takes `zero_ratio` times ours."""
    world, rounds = int(point.parameters["world_size"]), point.settings["rounds"]
    whole = 4 * PARAMETERS
    state = {
        "replicated": 2 * whole,
        "sharded": 2 * whole // world,
        "torch_zero": 2 * whole // world,
    }
    memory = {
        name: {
            "status": "ok", "reason": None,
            "ranks": [
                moments(device, parameters=whole, gradients=whole, state=kept)
                for _ in range(world)
            ],
        }
        for name, kept in state.items()
    }  # fmt: skip
    phases = {"replicated": 10.0, "sharded": 260.0, "torch_zero": 260.0 * zero_ratio}
    timed = {
        name: {
            "ranks_ms": by_rank(300.0 + ms, rounds, world),
            "optimizer_ms": by_rank(ms, rounds, world, phase=0.3 * index),
        }
        for index, (name, ms) in enumerate(phases.items())
    }
    sizes = [size["size"] for size in point.settings["sizes"]]
    data = {
        "memory": {
            "size": sizes[0], "left_out": [],
            "expected": {"parameters": whole, "gradients": whole, "optimizer_state": 2 * whole,
                         "activations": 900 * MIB},
            "owned_bytes": [whole // world] * world, "arms": memory,
        },
        "time": {
            "choice": choice(sizes[-1]), "step_limit_s": 2.0, "parameters_total": PARAMETERS,
            "gradient_bytes": whole, "tokens_per_rank": 512, "arms": timed,
        },
    }  # fmt: skip
    times = {name: slowest(arm["optimizer_ms"]) for name, arm in timed.items()}
    steps = {f"{name}_step": slowest(arm["ranks_ms"]) for name, arm in timed.items()}
    return result(point, device, data, {**times, **steps})


LAYERS = ("token_embeddings", "layers.0.attn.q_proj", "layers.0.ffn.w1", "lm_head")
THERE = {("forward", "token_embeddings"), ("backward", "lm_head")}
"""The first is gathered before the step's clock runs, the last of forward is still there."""


def fsdp(
    point: Point, device: str = "cuda", torch_ratio: float = 1.0, wait_ms: float = 3.0
) -> Result:
    """FSDP three times as slow as data parallelism; layers wait `wait_ms`, but for those there."""
    world, rounds = int(point.parameters["world_size"]), point.settings["rounds"]
    whole, cut = 4 * PARAMETERS, 4 * PARAMETERS - 100_000
    held = {
        "ddp": (whole, whole, 2 * whole),
        "ddp_sharded_optimizer": (whole, whole, 2 * whole // world),
        "fsdp": tuple(k * (whole - cut + cut // world) for k in (1, 1, 2)),
        "torch_fully_shard": tuple(k * (whole // world) for k in (1, 1, 2)),
    }  # fmt: skip
    step = {"ddp": 400.0, "ddp_sharded_optimizer": 650.0, "fsdp": 1200.0}
    step["torch_fully_shard"] = 1200.0 * torch_ratio
    arms: dict[str, Any] = {
        name: {
            "status": "ok", "reason": None,
            "ranks": [
                {**moments(device, parameters=p, gradients=g, state=s), "losses": [9.2, 9.1]}
                for _ in range(world)
            ],
            "ranks_ms": by_rank(step[name], rounds, world, phase=0.3 * index),
            "trace": trace(0.1 * (index + 1), 20, 300.0),
        }
        for index, (name, (p, g, s)) in enumerate(held.items())
    }  # fmt: skip
    waits = [
        {
            "phase": phase,
            "layer": f"{layer}.weight",
            "wait_ms": wait_ms if (phase, layer) not in THERE else 0.01,
        }
        for phase, layers in (("forward", LAYERS), ("backward", LAYERS[::-1]))
        for layer in layers
    ]
    data = {
        "choice": choice(point.settings["sizes"][-1]["size"]), "parameters_total": PARAMETERS,
        "parameter_bytes": whole, "sharded_bytes": cut, "tokens_per_rank": 2048,
        "expected": None, "waits": [waits] * world, "waits_below_ms": 0.2, "arms": arms,
    }  # fmt: skip
    return result(point, device, data, {n: slowest(arm["ranks_ms"]) for n, arm in arms.items()})
