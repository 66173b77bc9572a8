"""Synthetic results shaped like a machine's: what the writeup's tests are made from.

The times follow a small model of a GPU (a host that launches layers at a fixed pace, products at a
rate per precision), so that a page made from them looks like a real one and figures can be judged
by eye. Nothing in them is random: a sample's deviation is a fixed wave.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lmlab.study.chapters import points_of
from lmlab.study.config import Study, load
from lmlab.study.files import REFERENCES, ROOT
from lmlab.study.points import Point
from lmlab.study.results import Result
from lmlab.writeup.collect import Collected, Row

MACHINES = {
    "cuda": {"id": "nvidia-h200", "device": "cuda", "name": "NVIDIA H200"},
    "cpu": {"id": "cpu-test", "device": "cpu", "name": "Test Processor 2 @ 2.0 GHz"},
}
RATES_TFLOPS = {
    "cuda": {"fp32": 48.0, "tf32": 380.0, "fp16": 640.0, "bf16": 620.0},
    "cpu": {"fp32": 0.08, "tf32": 0.08, "fp16": 0.02, "bf16": 0.03},
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LAUNCH_MS_PER_LAYER = {"forward": 0.85, "backward": 0.95, "optimizer": 0.25}
AUTOCAST_MS_PER_LAYER = 0.3
Maker = Callable[[Point, str], Result]


def config(**changes: Any) -> dict[str, Any]:
    """The repository's config.yaml with changed top-level keys."""
    values: dict[str, Any] = yaml.safe_load((ROOT / "config.yaml").read_text())
    return {**deepcopy(values), **changes}


def study(device: str = "cuda", name: str = "auto") -> Study:
    return load(config(study=name), device)


def measurement(samples: list[float], **changes: Any) -> dict[str, Any]:
    """A measurement as a result file holds it, its statistics computed from the samples."""
    quartiles = (
        statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
    )
    return {
        "clock": "host",
        "cache": "warm",
        "stopped": f"{len(samples)} samples",
        "samples_ms": samples,
        "n": len(samples),
        "median_ms": statistics.median(samples),
        "q1_ms": quartiles[0],
        "q3_ms": quartiles[2],
        "min_ms": min(samples),
        "max_ms": max(samples),
        "mean_ms": statistics.fmean(samples),
        "sd_ms": statistics.stdev(samples) if len(samples) > 1 else None,
        "noisy": quartiles[2] - quartiles[0] > 0.1 * statistics.median(samples),
        **changes,
    }


def samples_around(value: float, count: int, spread: float = 0.004) -> list[float]:
    """A fixed wave around a value: every statistic is known and none is zero."""
    return [value * (1 + spread * math.sin(1.7 * i + 0.3)) for i in range(count)]


def result(point: Point, device: str = "cuda", **changes: Any) -> Result:
    """A valid result of a point."""
    values: dict[str, Any] = {
        "chapter": point.chapter,
        "parameters": dict(point.parameters),
        "settings": dict(point.settings),
        "status": "ok",
        "machine": MACHINES[device],
        "versions": {
            "python": "3.12.3", "torch": "2.13.0", "triton": "3.9.0", "lmlab": "0.1.0",
            "cuda": "13.0" if device == "cuda" else None,
        },
        "commit": {"id": COMMIT, "dirty": False},
        "code_fingerprint": "0123456789abcdef",
        "started_at": "2026-01-01T00:00:00Z",
        "elapsed_s": 1.5,
        **changes,
    }  # fmt: skip
    return Result(**values)


def failed(point: Point, status: str, reason: str, device: str = "cuda") -> Result:
    return result(point, device, status=status, reason=reason)


def end_to_end(point: Point, device: str = "cuda") -> Result:
    """An end-to-end point on a machine that launches layers at a pace and multiplies at a rate."""
    values = modelled_step(point, device)
    steps, warmups = point.settings["steps"], point.parameters["warmup"]
    cold = point.parameters["start"] == "cold"
    measurements, before = {}, {}
    for index, (phase, ms) in enumerate(values["phases_ms"].items()):
        trace = samples_around(ms, warmups + steps, spread=0.003 + 0.001 * index)
        if cold:
            slow = cold_factors(phase) + [1.0] * len(trace)
            trace = [ms * factor for ms, factor in zip(trace, slow, strict=False)]
        before[phase], measurements[phase] = trace[:warmups], measurement(trace[warmups:])
    samples = [m["samples_ms"] for m in measurements.values()]
    total = [sum(parts) for parts in zip(*samples, strict=True)]
    measurements["total"] = measurement(total)
    before["total"] = [sum(parts) for parts in zip(*before.values(), strict=True)]
    data = {**values["data"], "warmup_samples_ms": before}
    return result(point, device, measurements=measurements, data=data)


def cold_factors(phase: str) -> list[float]:
    """How much longer the first steps of a fresh process take."""
    return {"forward": [40.0, 1.6, 1.04], "backward": [6.0, 1.2], "optimizer": [3.0, 1.3]}.get(
        phase, [1.0]
    )


def modelled_step(point: Point, device: str) -> dict[str, Any]:
    """Phase times, FLOPs and GPU-busy times of one step."""
    p, s = point.parameters, point.settings
    tokens = p["context"] * p["batch"]
    weights = s["num_layers"] * (4 * s["d_model"] ** 2 + 3 * s["d_model"] * s["d_ff"])
    parameters = weights + 2 * s["vocab_size"] * s["d_model"]
    scores = 4 * s["num_layers"] * p["batch"] * p["context"] ** 2 * s["d_model"]
    flops = 2 * (weights + s["vocab_size"] * s["d_model"]) * tokens + scores
    rate = 0.75 * RATES_TFLOPS[device][p["precision"]] * 1e9
    elementwise = s["num_layers"] * tokens * (20 * s["d_model"] + 6 * p["context"] * s["num_heads"])
    memory_ms = elementwise * 8 / (3.5e9 if device == "cuda" else 8e6)
    gpu = {"forward": flops / rate + memory_ms, "backward": 2 * flops / rate + 2 * memory_ms}
    gpu["optimizer"] = parameters * 28 / (3.8e9 if device == "cuda" else 8e6)
    wanted = {"forward": 1, "forward_backward": 2, "train_step": 3}[str(p["mode"])]
    phases = list(gpu)[:wanted]
    launch = dict(LAUNCH_MS_PER_LAYER)
    if p["precision"] != "fp32":
        launch["forward"] += AUTOCAST_MS_PER_LAYER
    if p["mode"] == "forward":
        launch["forward"] *= 0.8
    pace = s["num_layers"] if device == "cuda" else 0
    times = {phase: max(gpu[phase], launch[phase] * pace) + 0.05 for phase in phases}
    work = {"forward": flops, "backward": 2 * flops, "optimizer": 0}
    data = {
        "tokens_per_step": tokens,
        "flops": {phase: {"matmul": int(work[phase]), "other": 10} for phase in phases},
        "flop_convention": "full",
        "parameters_total": parameters,
        "parameters_bytes": 4 * parameters,
        "gpu_busy_ms": {phase: gpu[phase] for phase in phases} if device == "cuda" else None,
        "tf32": False,
        "threads": 2,
        "peak_memory_bytes": 10 * 2**30 if device == "cuda" else None,
        "init_s": 0.5,
    }
    return {"phases_ms": times, "data": data}


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
    return result(
        point,
        device,
        data={
            "card": {
                "device": device,
                "name": MACHINES[device]["name"],
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
    return result(point, device, data=makers[str(point.parameters["topic"])](point, device))


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


MAKERS: Mapping[str, Maker] = {
    "machine": card,
    "end_to_end": end_to_end,
    "precision": precision,
}


def collected(
    chapter: str,
    device: str = "cuda",
    *,
    name: str = "auto",
    make: Callable[[Point, str], Result | None] | None = None,
    with_card: bool = True,
) -> Collected:
    """A chapter as the writeup sees it; `make` may change or withhold a point's result."""
    what = study(device, name)
    machine = MACHINES[device]["id"]
    maker = make or MAKERS[chapter]
    rows = [
        Row(point, point.path(Path("results"), machine).as_posix(), maker(point, device))
        for point in points_of(what, chapter)
    ]
    cards = [card(point, device) for point in points_of(what, "machine")]
    return Collected(
        chapter, machine, device, what, rows, cards[0] if with_card else None, REFERENCES
    )


def write_study(root: Path, device: str = "cuda", name: str = "auto") -> Path:
    """A whole study's results under a folder, as measuring leaves them."""
    what = study(device, name)
    for chapter, maker in MAKERS.items():
        for point in points_of(what, chapter):
            maker(point, device).write(point.path(root / "results", MACHINES[device]["id"]))
    return root / "results"
