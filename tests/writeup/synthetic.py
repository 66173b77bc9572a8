"""A whole synthetic study, shaped like the real one on a GPU or on a CPU.

The times follow a small model of a machine (a host that launches layers at a fixed pace, products
at a rate per precision), so that a page made from them looks like a real one and its figures can
be judged by eye.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lmlab.study.chapters import READS, points_of
from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.collect import Collected
from tests.writeup import factory, synthetic_parallel, synthetic_ranks
from tests.writeup.synthetic_attention import attention
from tests.writeup.synthetic_memory import memory
from tests.writeup.synthetic_profile import profile

RATES_TFLOPS = {
    "cuda": {"fp32": 48.0, "tf32": 380.0, "fp16": 640.0, "bf16": 620.0},
    "cpu": {"fp32": 0.08, "bf16": 0.03},
}
LAUNCH_MS_PER_LAYER = {"forward": 0.85, "backward": 0.95, "optimizer": 0.25}
AUTOCAST_MS_PER_LAYER = 0.3
# The host of another process has another pace; a busy GPU does not show it.
HOST_PACE = {"forward": 0.8, "forward_backward": 1.0, "train_step": 1.08}
FIRST_STEPS = {"forward": [40.0, 1.6, 1.04], "backward": [6.0, 1.2], "optimizer": [3.0, 1.3]}


def end_to_end(point: Point, device: str = "cuda") -> Result:
    """A point on a machine that launches layers at a pace and multiplies at a rate."""
    p, s = point.parameters, point.settings
    tokens = int(p["context"]) * int(p["batch"])
    weights = s["num_layers"] * (4 * s["d_model"] ** 2 + 3 * s["d_model"] * s["d_ff"])
    head = s["vocab_size"] * s["d_model"]
    scores = 4 * s["num_layers"] * int(p["context"]) * tokens * s["d_model"]
    flops = 2 * (weights + head) * tokens + scores
    elementwise = s["num_layers"] * tokens * (20 * s["d_model"] + 6 * int(p["context"]))
    memory_ms = elementwise * 8 / (3.5e9 if device == "cuda" else 8e6)
    forward_ms = flops / (0.75e9 * RATES_TFLOPS[device][str(p["precision"])]) + memory_ms
    optimizer_ms = (weights + 2 * head) * 28 / (3.8e9 if device == "cuda" else 8e6)
    gpu = {"forward": forward_ms, "backward": 2 * forward_ms, "optimizer": optimizer_ms}
    wanted = {"forward": 1, "forward_backward": 2, "train_step": 3}[str(p["mode"])]
    phases = list(gpu)[:wanted]
    work = {"forward": flops, "backward": 2 * flops, "optimizer": 0}
    return factory.step(
        point,
        device,
        cold=FIRST_STEPS if p["start"] == "cold" else None,
        busy_ms={phase: gpu[phase] for phase in phases} if device == "cuda" else None,
        flops={phase: work[phase] for phase in phases},
        data={"parameters_total": weights + 2 * head},
        **{phase: max(gpu[phase], _launch_ms(point, phase, device)) + 0.05 for phase in phases},
    )


def _launch_ms(point: Point, phase: str, device: str) -> float:
    if device == "cpu":
        return 0.0
    pace = LAUNCH_MS_PER_LAYER[phase]
    if phase == "forward" and point.parameters["precision"] != "fp32":
        pace += AUTOCAST_MS_PER_LAYER
    return float(pace * HOST_PACE[str(point.parameters["mode"])] * point.settings["num_layers"])


def card(point: Point, device: str = "cuda") -> Result:
    """A machine card."""
    gpu = {
        "sms": 132, "warp_size": 32, "registers_per_sm": 65536, "registers_per_block": 65536,
        "shared_memory_per_sm_bytes": 233472, "shared_memory_per_block_bytes": 49152,
        "shared_memory_per_block_optin_bytes": 232448, "l2_bytes": 62914560,
        "memory_bytes": 150_000_000_000, "compute_capability": "9.0", "driver": "580.95.05",
        "clocks_mhz": {"sm": 1980, "memory": 3201, "sm_max": 1980, "memory_max": 3201},
        "power_limit_w": 700.0,
    }  # fmt: skip
    on_gpu = device == "cuda"
    rates = (
        RATES_TFLOPS[device] if on_gpu else {k: RATES_TFLOPS["cpu"][k] for k in ("fp32", "bf16")}
    )
    return factory.result(
        point,
        device,
        data={
            "card": {
                "device": device,
                "name": factory.MACHINES[device]["name"],
                **{key: value if on_gpu else None for key, value in gpu.items()},
                "gpu_count": 1 if on_gpu else 0,
                "cpu": {
                    "model": "Test Processor 2 @ 2.0 GHz", "logical_cores": 16, "usable_cores": 2,
                    "architecture": "x86_64", "memory_bytes": 137438953472,
                },
                "os": "Linux 6.1.0",
            },
            "ceilings": {
                "matmul_tflops": {
                    name: {
                        "tflops": rate,
                        "shape": [8192, 8192, 8192],
                        "median_ms": 2 * 8192**3 / rate / 1e9,
                        "reason": None,
                    }
                    for name, rate in rates.items()
                },
                "copy_gb_per_s": {
                    "gb_per_s": 4100.0, "bytes": 4 * 2**30, "median_ms": 1.05, "reason": None,
                },
            },
            "peaks": {
                "source": "NVIDIA H200 Tensor Core GPU datasheet",
                "tflops": {"fp32": 67.0, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4},
                "memory_tb_per_s": 4.8,
            }
            if on_gpu
            else None,
        },
    )  # fmt: skip


def precision(point: Point, device: str = "cuda") -> Result:
    """A result of one of the precision chapter's experiments."""
    makers = {"accumulation": accumulation, "autocast": autocast, "layernorm": layernorm}
    return factory.result(point, device, data=makers[str(point.parameters["topic"])](point, device))


def accumulation(point: Point, device: str) -> dict[str, Any]:
    """The four loops; the fp16 one is really run."""
    total, rows = np.float16(0), []
    for step in range(1, 1001):
        before = float(total)
        total = np.float16(total + np.float16(0.01))
        rows.append((step, float(total), float(np.spacing(total)), float(total) - before))
    kept = rows[4::5]
    trace = dict(
        zip(("step", "sum", "spacing", "added"), map(list, zip(*kept, strict=True)), strict=True)
    )
    results = {
        "fp32": ("float32", "float32", 10.000133514404297),
        "fp16": ("float16", "float16", float(total)),
        "fp32_plus_fp16": ("float32", "float16", 10.002135276794434),
        "fp32_plus_fp16_cast": ("float32", "float16", 10.002135276794434),
    }
    loops = [
        {"name": n, "accumulator": a, "term": t, "result": r, "exact": 10.0, "error": r - 10.0}
        for n, (a, t, r) in results.items()
    ]
    return {
        "loops": loops,
        "terms": 1000,
        "term": 0.01,
        "term_in_fp16": float(np.float16(0.01)),
        "fp16_trace": trace,
    }


def autocast(point: Point, device: str) -> dict[str, Any]:
    low = {"fp16": "float16", "bf16": "bfloat16"}[str(point.parameters["dtype"])]
    dtypes = {
        "parameters": "float32", "fc1_output": low, "layernorm_output": "float32", "logits": low,
        "loss": "float32", "gradients": "float32",
    }  # fmt: skip
    return {
        "device": device,
        "dtype": point.parameters["dtype"],
        "components": [{"name": name, "dtype": dtype} for name, dtype in dtypes.items()],
    }


def layernorm(point: Point, device: str) -> dict[str, Any]:
    limits = {
        "fp16": (65504.0, 6e-8, 5e-4),
        "bf16": (3.4e38, 9e-41, 4e-3),
        "fp32": (3.4e38, 1e-45, 6e-8),
    }
    rows = []
    for dtype, (largest, smallest, rounding) in limits.items():
        for exponent in range(-5, 6):
            scale = 10.0**exponent
            variance = scale**2
            over, under = variance > largest, variance < smallest
            error = None if over else 1.0 if under else rounding * (1 + 0.3 * math.sin(exponent))
            rows.append(
                {
                    "dtype": dtype, "scale": scale, "true_variance": variance,
                    "computed_variance": None if over else 0.0 if under else variance * (1 + error),
                    "overflow": over, "underflow": under, "relative_error": error,
                }
            )  # fmt: skip
    output = [
        {"dtype": dtype, "scale": 10.0**exponent, "largest_error": limits[dtype][2]}
        for dtype in limits
        for exponent in range(-5, 6)
    ]
    return {"rows": rows, "layernorm_rows": output}


MAKERS: Mapping[str, Callable[[Point, str], Result]] = {
    "machine": card,
    "end_to_end": end_to_end,
    "profile": profile,
    "memory": memory,
    "precision": precision,
    "attention": attention,
    "collectives": synthetic_ranks.collectives,
    "data_parallel": synthetic_parallel.data_parallel,
    "sharded_optimizer": synthetic_parallel.sharded_optimizer,
    "fsdp": synthetic_parallel.fsdp,
    "calculations": synthetic_ranks.calculations,
}


def collected(chapter: str, device: str = "cuda", make: factory.Maker | None = None) -> Collected:
    """A chapter of the synthetic study; `make` may change or withhold results."""
    (card_point,) = points_of(factory.study(device), "machine")
    return factory.collected(
        chapter,
        make or MAKERS[chapter],
        device,
        card=card(card_point, device),
        beside={name: MAKERS[name] for name in READS.get(chapter, ())},
    )
