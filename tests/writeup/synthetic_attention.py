"""The attention chapter of the synthetic study: arms with rates, a launch cost and a memory.

An arm takes its operations over its rate plus what a launch costs; naive ones move scores through
memory besides. What does not fit the memory, or what a CPU does not have, has a status instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmlab.study.points import Point
from lmlab.study.results import Result
from tests.writeup import factory

MEMORY_BYTES = 139 * 2**30
BYTES_PER_S = {"cuda": 4.1e12, "cpu": 8e9}
ONLY_16_BIT = {"sdpa_flash", "sdpa_cudnn"}
WITHOUT_GPU = {"flash", "flex", "sdpa_cudnn", "sdpa_efficient"}
PRODUCTS = {"forward": 2, "backward": 5, "both": 7}
CPU_SLOWDOWN = 5000.0


@dataclass(frozen=True)
class Speed:
    """What an arm does in the long run, in TFLOP/s, and what a call costs it."""

    bf16: float
    fp32: float
    launch_us: float
    scores_moved: float = 0.0
    """How often the square of scores goes through memory."""


SPEEDS = {
    "naive": Speed(300, 45, 60, 12),
    "compiled": Speed(300, 45, 30, 6),
    "sdpa_flash": Speed(320, 45, 25),
    "sdpa_cudnn": Speed(480, 45, 30),
    "sdpa_efficient": Speed(180, 30, 22),
    "sdpa_math": Speed(250, 45, 80, 16),
    "flex": Speed(380, 25, 35),
    "tiled": Speed(2, 2, 3000),
    "flash": Speed(470, 60, 15),
}


def attention(point: Point, device: str = "cuda") -> Result:
    """A point of any topic."""
    topic = str(point.parameters["topic"])
    if device == "cpu" and topic in {"tiles", "leaderboard"}:
        return factory.failed(point, "unsupported", "a shape for GPUs", device)
    if topic in {"model", "model_compile"}:
        return model(point, device)
    if topic == "tiles":
        return tiles(point)
    return race(point, device)


def flops(asked: Mapping[str, Any]) -> dict[str, float]:
    product = 2.0 * asked["batch"] * (asked.get("heads") or 1) * asked["sequence"] ** 2
    share = 0.5 if asked["causal"] else 1.0
    return {name: share * n * product * asked["head_dim"] for name, n in PRODUCTS.items()}


def scores_bytes(asked: Mapping[str, Any]) -> int:
    size = 4 if asked["precision"] == "fp32" else 2
    return int(asked["batch"] * (asked.get("heads") or 1) * asked["sequence"] ** 2 * size)


def race(point: Point, device: str) -> Result:
    """Arms of a shape."""
    asked = {**point.settings, **point.parameters}
    arms = {arm: standing(arm, asked, device) for arm in asked["arms"]}
    running = [arm for arm, row in arms.items() if row["status"] == "ok"]
    passes = ("forward", "backward", *(("both",) if asked["topic"] != "naive" else ()))
    measurements = {
        f"{arm}.{name}": factory.measurement(wave(milliseconds(arm, name, asked, device)), **clock)
        for arm in running
        for name in passes
        for clock in ({"clock": "host" if asked["topic"] == "naive" else "cuda_events"},)
    }
    data = {"flops": flops(asked), "arms": arms, "threads": 2}
    if asked["topic"] == "naive":
        data["account"] = account(asked)
    if not running:
        reason = next(iter(arms.values()))["reason"]
        return factory.result(point, device, status="oom", reason=reason, data=data)
    return factory.result(point, device, measurements=measurements, data=data)


def standing(arm: str, asked: Mapping[str, Any], device: str) -> dict[str, Any]:
    naive_like = SPEEDS[arm].scores_moved > 0
    if device == "cpu" and arm in WITHOUT_GPU:
        return {"status": "unsupported", "reason": "not on a CPU"}
    if arm in ONLY_16_BIT and asked["precision"] == "fp32" and device == "cuda":
        return {"status": "unsupported", "reason": "needs 16-bit inputs"}
    if arm == "tiled" and asked["sequence"] > 4096:
        return {"status": "capped", "reason": "would take about 9 s; the cap is 0.2 s"}
    if naive_like and 3 * scores_bytes(asked) > MEMORY_BYTES:
        return {"status": "oom", "reason": "asked for 128.00 GiB, 10.00 GiB free"}
    held = 5 * asked["batch"] * asked["sequence"] * asked["head_dim"] * 4 + scores_bytes(asked)
    on_gpu = device == "cuda"
    return {
        "status": "ok",
        "reason": None,
        "first_call_s": 4.2 if arm in {"compiled", "flex"} else 0.01,
        "errors": dict.fromkeys(("output", "grad_q", "grad_k", "grad_v"), 1e-3),
        "forward_peak_memory_bytes": held + scores_bytes(asked) if on_gpu else None,
        "memory_before_backward_bytes": held if on_gpu else None,
        "peak_memory_bytes": held + 2 * scores_bytes(asked) if on_gpu else None,
        "saved_bytes": scores_bytes(asked),
        "attention_replaced": 0,
    }


def milliseconds(arm: str, name: str, asked: Mapping[str, Any], device: str) -> float:
    speed = SPEEDS[arm]
    rate = speed.bf16 if asked["precision"] == "bf16" else speed.fp32
    rate /= 1.0 if device == "cuda" else CPU_SLOWDOWN
    share = PRODUCTS[name] / 7
    moved = speed.scores_moved * scores_bytes(asked) * share / BYTES_PER_S[device]
    return 1e3 * (flops(asked)[name] / rate / 1e12 + moved) + speed.launch_us * share / 1e3


def wave(ms: float) -> list[float]:
    return [ms * (1 + 0.004 * shift) for shift in (-1, 0.5, 0, -0.5, 1)]


def account(asked: Mapping[str, Any]) -> dict[str, Any]:
    vector = [asked["batch"], asked["sequence"], asked["head_dim"]]
    square = [asked["batch"], asked["sequence"], asked["sequence"]]

    def row(name: str, shape: list[int]) -> dict[str, Any]:
        size = 4
        for length in shape:
            size *= length
        return {"tensor": name, "shape": shape, "bytes": size}

    held = [row(name, vector) for name in ("queries", "keys", "values", "gradient of output")]
    held += [row("weights", square), row("output", vector)]
    more = [row("gradient of weights", square), row("gradient of scores", square)]
    forward = [*held, row("scores", square)]
    return {"forward": forward, "before_backward": held, "peak": [*held, *more]}


def tiles(point: Point) -> Result:
    """Every cut of our kernels; the largest does not fit."""
    asked = {**point.settings, **point.parameters}
    direction = str(asked["direction"])
    cuts = {f"{kept}x{walked}": (kept, walked) for kept, walked in asked["tiles"]}
    arms = {name: cut(kept, walked, asked) for name, (kept, walked) in cuts.items()}
    arms["chosen"] = {**cut(128, 64, asked), "specialised": True}
    work = flops(asked)
    measurements = {
        f"{name}.{direction}": factory.measurement(
            wave(work[direction] / tile_rate(row) / 1e9), clock="cuda_events", cache="cold"
        )
        for name, row in arms.items()
        if row["status"] == "ok"
    }
    data = {"flops": work, "arms": arms, "shared_limit_bytes": 232448}
    return factory.result(point, "cuda", measurements=measurements, data=data)


def tile_rate(row: Mapping[str, Any]) -> float:
    plain = 400 * min(1.0, row["kept"] / 128) ** 0.5 * min(1.0, row["walked"] / 64) ** 0.3
    return plain * (0.4 if row["spills"] else 1.0) * (1.15 if row["specialised"] else 1.0)


def cut(kept: int, walked: int, asked: Mapping[str, Any]) -> dict[str, Any]:
    shared = (kept + 2 * asked["stages"] * walked) * asked["head_dim"] * 2
    fits = shared <= 232448
    reason = f"tiles {kept} x {walked}: out of resource: shared memory, Required: {shared}"
    return {
        "status": "ok" if fits else "unsupported",
        "reason": None if fits else reason,
        "kept": kept,
        "walked": walked,
        "warps": 4 if kept <= 64 else 8,
        "stages": asked["stages"],
        "specialised": False,
        "shared_by_count_bytes": shared + 2048,
        "shared_bytes": shared if fits else None,
        "registers": 255 if kept > 128 else 168,
        "spills": 96 if kept > 128 else 0,
        "errors": {"output": 1e-3} if fits else None,
    }


def model(point: Point, device: str) -> Result:
    """A model whose attention takes more of the step the longer the context is."""
    asked = {**point.settings, **point.parameters}
    size, context = asked["d_model"] * asked["num_layers"], asked["context"]
    names = asked.get("arms", ["eager", "compiled"])
    arms: dict[str, dict[str, Any]] = {}
    measurements: dict[str, Any] = {}
    for index, name in enumerate(names):
        if device == "cpu" and name == "flash":
            arms[name] = {"status": "unsupported", "reason": "not on a CPU"}
            continue
        if name == "naive" and size > 80_000 and context >= 1024:
            arms[name] = {"status": "oom", "reason": "asked for 2.00 GiB, 1.00 GiB free"}
            continue
        square = 1.0 if index == 0 else 0.2
        ms = size * context * (1 + square * context / 1024) / 1e6
        gib = size * (1 + square * context / 512) / 1500
        arms[name] = {
            "status": "ok",
            "reason": None,
            "loss": 9.2,
            "first_step_s": 30.0 if name == "compiled" else 0.2,
            "peak_memory_bytes": int(gib * 2**30) if device == "cuda" else None,
            "attention_replaced": 0,
        }
        parts = {"forward": 0.3, "forward_backward": 0.9, "train_step": 1.0}
        kept = parts if point.parameters["topic"] == "model_compile" else {"train_step": 1.0}
        measurements |= {
            f"{name}.{part}": factory.measurement(wave(ms * share)) for part, share in kept.items()
        }
    data = {"arms": arms, "tokens_per_step": context * asked["batch"], "threads": 2}
    return factory.result(point, device, measurements=measurements, data=data)
